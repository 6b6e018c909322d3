// src/front/llama.c - llama-server's endpoints without a job, by which editors learn what they talk
// to; and endpoints of all APIs that are not offered.
#include <string.h>

#include "base/query.h"
#include "front/serve_impl.h"

static uint32_t n_slots(const td_host *h) {
  return (uint32_t)h->options.max_batch;
}

static void write_token(td_json_writer *w, const char *key, const td_tokenizer *tok, int32_t id) {
  size_t len;
  td_jw_str(w, key, id >= 0 ? td_tokenizer_bytes(tok, id, &len) : "");
}

static void write_props(td_buf *body, const td_host *h, const td_chat *chat) {
  const td_tokenizer *tok = td_chat_tokenizer(chat);
  td_buf template = TD_BUF_INIT;
  td_chat_template_source(chat, &template);
  td_json_writer w = TD_JSON_WRITER(body);
  td_jw_add(&w,
            "{'default_generation_settings': {'id': 0, 'n_ctx': %u, 'is_processing': false, "
            "'params': {'n_predict': -1, 'temperature': %g, 'top_p': %g, 'top_k': %u}}, "
            "'total_slots': %u, 'model_alias': %s, 'model_path': %s, 'modalities': {'vision': %i, "
            "'audio': false}, 'chat_template': %p",
            h->n_ctx, (double)h->defaults.temperature, (double)h->defaults.top_p, h->defaults.top_k,
            n_slots(h), h->name, h->name, atomic_load(&h->sees), &template);
  td_buf_free(&template);
  write_token(&w, "bos_token", tok, td_tokenizer_bos(tok));
  write_token(&w, "eos_token", tok, td_tokenizer_eos(tok));
  td_jw_str(&w, "build_info", "tandem " TD_VERSION);
  td_serve_write_choices(&w, h);
  td_jw_add(&w, "'is_sleeping': %i}", td_host_state_of(h) == TD_HOST_SLEEPING);
}

void td_serve_props(void *ctx, td_http_exchange *x) {
  td_api_error error;
  td_host *h = td_serve_queried_host(ctx, x, &error);
  const td_chat *chat = td_serve_chat_of(h, x, &error);
  if (!chat) return;
  td_buf body = TD_BUF_INIT;
  write_props(&body, h, chat);
  td_serve_respond(x, 200, TD_JSON_TYPE, &body);
}

void td_serve_slots(void *ctx, td_http_exchange *x) {
  td_api_error error;
  td_host *h = td_serve_queried_host(ctx, x, &error);
  if (!h) {
    td_serve_fail(x, &error);
    return;
  }
  const uint32_t n_busy = h->backend ? td_backend_n_running(h->backend) : 0;
  td_buf fails = TD_BUF_INIT;
  td_query_get(&fails, td_http_query(x), "fail_on_no_slot");
  const bool is_refused = strcmp(td_buf_text(&fails), "1") == 0 && n_busy >= n_slots(h);
  td_buf_free(&fails);
  if (is_refused) {
    td_api_fail(&error, 503, NULL, NULL, "no slot available");
    td_serve_fail(x, &error);
    return;
  }
  td_buf body = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&body);
  td_jw_begin_array(&w, NULL);
  for (uint32_t i = 0; i < n_slots(h); i++) {
    td_jw_add(&w, "{'id': %u, 'n_ctx': %u, 'speculative': false, 'is_processing': %i}", i, h->n_ctx,
              i < n_busy);
  }
  td_jw_end_array(&w);
  td_serve_respond(x, 200, TD_JSON_TYPE, &body);
}

// ---- not offered --------------------------------------------------------------------------------

void td_serve_not_offered(void *ctx, td_http_exchange *x) {
  static const char *const why[] = {
#define X(method, path, why) why,
      TD_NOT_OFFERED(X)
#undef X
  };
  td_api_error error;
  (void)ctx;
  td_api_fail(&error, 400, NULL, "not_supported", "%s", why[td_http_route_of(x) - TD_N_ROUTES]);
  td_serve_fail(x, &error);
}
