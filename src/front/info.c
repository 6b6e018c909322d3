// src/front/info.c - endpoints without a job: models, health, metrics and the chat page.
#include <stdlib.h>
#include <string.h>

#include "api/dialects/response_store.h"
#include "base/json_write.h"
#include "base/mem_info.h"
#include "base/query.h"
#include "front/serve_impl.h"

// Anthropic's clients say so, and have a form of their own.
static bool is_anthropic(const td_http_exchange *x) {
  return td_http_header(x, "anthropic-version");
}

static void write_model(td_json_writer *w, const td_http_exchange *x, const td_host *h,
                        const char *name) {
  const int64_t created = h->serve->created;
  td_jw_add(w, "{'id': %s", name);
  if (is_anthropic(x)) {
    td_jw_add(w, "'type': 'model', 'display_name': %s", name);
    td_serve_write_time(w, "created_at", created);
  } else {
    td_jw_add(w, "'object': 'model', 'created': %ld, 'owned_by': 'tandem'", created);
  }
  td_jw_int(w, "max_model_len", h->n_ctx);
  if (!is_anthropic(x)) td_jw_int(w, "size", (int64_t)h->files.n_bytes); // of the files
  td_jw_add(w, "'status': %s}", td_host_state_name(td_host_state_of(h)));
}

void td_serve_models(void *ctx, td_http_exchange *x) {
  const td_serve *serve = ctx;
  const td_host *hosts = serve->hosts.all;
  const td_str_list *names = &serve->options->model_names; // of the only model
  const uint32_t n = names->n ? names->n : serve->hosts.n;
  td_buf body = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&body);
  td_jw_begin_object(&w, NULL);
  if (!is_anthropic(x)) td_jw_str(&w, "object", "list");
  td_jw_begin_array(&w, "data");
  for (uint32_t i = 0; i < n; i++) {
    const td_host *h = &hosts[names->n ? 0 : i];
    write_model(&w, x, h, names->n ? names->values[i] : h->name);
  }
  td_jw_end_array(&w);
  if (is_anthropic(x)) {
    td_jw_bool(&w, "has_more", false);
    td_jw_str(&w, "first_id", names->n ? names->values[0] : hosts[0].name);
    td_jw_str(&w, "last_id", names->n ? names->values[n - 1] : hosts[n - 1].name);
  }
  td_jw_end_object(&w);
  td_serve_respond(x, 200, TD_JSON_TYPE, &body);
}

void td_serve_model(void *ctx, td_http_exchange *x) {
  const td_serve *serve = ctx;
  const char *id = td_http_path(x) + strlen("/v1/models/");
  const td_host *h = td_hosts_find(&serve->hosts, id, NULL);
  if (!h) {
    td_api_error error;
    td_serve_unknown_model(serve, id, &error);
    td_serve_fail(x, &error);
    return;
  }
  td_buf body = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&body);
  write_model(&w, x, h, id);
  td_serve_respond(x, 200, TD_JSON_TYPE, &body);
}

static void answer_stored(td_serve *serve, td_http_exchange *x, bool is_deleted) {
  const char *path = td_http_path(x) + strlen("/v1/responses/");
  td_api_caller caller;
  td_api_error error;
  td_buf body = TD_BUF_INIT;
  td_serve_authorize(serve, x, &caller);
  const uint64_t owner = td_serve_owner(serve, &caller);
  const td_status st = is_deleted
                           ? td_responses_delete(&body, serve->responses, owner, path, &error)
                           : td_responses_get(&body, serve->responses, owner, path,
                                              td_http_query(x), &error);
  if (st == TD_OK) {
    td_serve_respond(x, 200, TD_JSON_TYPE, &body);
  } else {
    td_buf_free(&body);
    td_serve_fail(x, &error);
  }
}

void td_serve_response(void *ctx, td_http_exchange *x) {
  answer_stored(ctx, x, false);
}

void td_serve_response_end(void *ctx, td_http_exchange *x) {
  answer_stored(ctx, x, true);
}

static const char *worker_state(td_backend_state state) {
  switch (state) {
  case TD_BACKEND_LOADING: return "loading";
  case TD_BACKEND_READY: return "ok";
  case TD_BACKEND_STUCK: return "stuck";
  case TD_BACKEND_FAILED: return "failed";
  }
  return "unknown";
}

static void write_workers(td_json_writer *w, const td_host *h, bool names_model) {
  td_backend_worker workers[TD_BACKEND_MAX_WORKERS];
  uint32_t n = h->backend ? td_backend_workers(h->backend, workers) : 0;
  for (uint32_t i = 0; i < n; i++) {
    td_jw_add(w, "{'role': %s", workers[i].role);
    if (names_model) td_jw_str(w, "model", h->name);
    td_jw_str(w, "status", worker_state(workers[i].state));
    if (workers[i].reason[0]) td_jw_str(w, "reason", workers[i].reason);
    td_jw_add(w, "'running': %u, 'threads': %u, 'restarts': %u}", workers[i].n_running,
              workers[i].n_threads, workers[i].n_restarts);
  }
}

void td_serve_write_choices(td_json_writer *w, const td_host *h) {
  if (!h->backend || !h->fingerprint[0]) return;
  const td_wire_ready info = td_backend_info(h->backend);
  td_jw_add(w, "'system_fingerprint': %s, 'choices': {'kernels': %s", h->fingerprint, info.isa);
  if (info.gpu[0]) td_jw_str(w, "gpu", info.gpu);
  td_jw_add(w,
            "'devices': %s, 'workers': %d, 'prefill_chunk': %u, 'stream_from': %u, "
            "'expert_cache': %s}",
            h->runtime.devices, h->is_split ? 2 : 1, info.prefill_chunk, info.stream_tokens,
            h->runtime.expert_cache);
}

static void write_states(td_json_writer *w, const td_hosts *hosts) {
  td_jw_begin_array(w, "models");
  for (uint32_t i = 0; i < hosts->n; i++) {
    td_jw_add(w, "{'id': %s, 'status': %s", hosts->all[i].name,
              td_host_state_name(td_host_state_of(&hosts->all[i])));
    td_serve_write_choices(w, &hosts->all[i]);
    td_jw_add(w, "'running': %u, 'waiting': %u}", td_host_n_running(&hosts->all[i]),
              td_host_n_waiting(&hosts->all[i]));
  }
  td_jw_end_array(w);
}

// With several models: "stuck" if one is, else "ok", whatever is loaded.
static td_host_state overall_state(const td_hosts *hosts) {
  if (hosts->n == 1) return td_host_state_of(&hosts->all[0]);
  for (uint32_t i = 0; i < hosts->n; i++)
    if (td_host_state_of(&hosts->all[i]) == TD_HOST_STUCK) return TD_HOST_STUCK;
  return TD_HOST_READY;
}

// Whether a request would be served, perhaps after its model was loaded.
static bool is_healthy(const td_hosts *hosts, td_host_state state) {
  if (state == TD_HOST_READY) return true;
  bool has_started = hosts->n > 1 || hosts->all[0].was_ready || hosts->serve->options->models;
  return hosts->is_on_demand && has_started && state != TD_HOST_STUCK && state != TD_HOST_FAILED;
}

void td_serve_health(void *ctx, td_http_exchange *x) {
  const td_hosts *hosts = &((const td_serve *)ctx)->hosts;
  td_host_state state = overall_state(hosts);
  bool ok = is_healthy(hosts, state);
  uint32_t running = 0, waiting = 0;
  for (uint32_t i = 0; i < hosts->n; i++) {
    running += td_host_n_running(&hosts->all[i]);
    waiting += td_host_n_waiting(&hosts->all[i]);
  }
  td_buf body = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&body);
  td_jw_add(&w, "{'status': %s, 'running': %u, 'waiting': %u, 'workers': [",
            td_host_state_name(state), running, waiting);
  for (uint32_t i = 0; i < hosts->n; i++)
    write_workers(&w, &hosts->all[i], hosts->n > 1);
  td_jw_end_array(&w);
  write_states(&w, hosts);
  td_jw_end_object(&w);
  if (!ok) td_http_add_header(x, "Retry-After", "1");
  td_serve_respond(x, ok ? 200 : 503, TD_JSON_TYPE, &body);
}

void td_serve_version(void *ctx, td_http_exchange *x) {
  static const char text[] = "{\"version\":\"" TD_VERSION "\"}";
  (void)ctx;
  td_http_respond(x, 200, TD_JSON_TYPE, text, sizeof text - 1);
}

static void write_token(td_json_writer *w, const td_tokenizer *tok, const char *key,
                        const char *id_key, int32_t id) {
  size_t len;
  if (id < 0) {
    td_jw_null(w, key);
    td_jw_null(w, id_key);
    return;
  }
  td_jw_str(w, key, td_tokenizer_bytes(tok, id, &len));
  td_jw_int(w, id_key, id);
}

td_host *td_serve_queried_host(const td_serve *serve, const td_http_exchange *x,
                               td_api_error *error) {
  td_buf name = TD_BUF_INIT;
  td_host *h = &serve->hosts.all[0];
  if (td_query_get(&name, td_http_query(x), "model")) {
    h = td_hosts_find(&serve->hosts, td_buf_text(&name), NULL);
    if (!h) td_serve_unknown_model(serve, td_buf_text(&name), error);
  }
  td_buf_free(&name);
  return h;
}

const td_chat *td_serve_chat_of(td_host *h, td_http_exchange *x, td_api_error *error) {
  td_err err;
  const td_chat *chat = h ? td_host_chat(h, &err) : NULL;
  if (h && !chat) td_api_fail_err(error, NULL, &err);
  if (!chat) td_serve_fail(x, error);
  return chat;
}

void td_serve_tokenizer_info(void *ctx, td_http_exchange *x) {
  td_api_error error;
  td_host *h = td_serve_queried_host(ctx, x, &error);
  const td_chat *chat = td_serve_chat_of(h, x, &error);
  if (!chat) return;
  const td_tokenizer *tok = td_chat_tokenizer(chat);
  td_buf body = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&body);
  td_jw_add(&w, "{'tokenizer_class': 'PreTrainedTokenizerFast'");
  write_token(&w, tok, "bos_token", "bos_token_id", td_tokenizer_bos(tok));
  write_token(&w, tok, "eos_token", "eos_token_id", td_tokenizer_eos(tok));
  td_jw_add(&w, "'add_bos_token': %i, 'vocab_size': %u, 'model_max_length': %u}",
            td_tokenizer_wants_bos(tok), h->defaults.n_vocab, h->n_ctx);
  td_serve_respond(x, 200, TD_JSON_TYPE, &body);
}

// The document of openapi.json, with what only the build knows in front of its members.
void td_serve_openapi(void *ctx, td_http_exchange *x) {
  (void)ctx;
  td_buf body = TD_BUF_INIT;
  td_buf_str(&body,
             "{\"openapi\":\"3.1.0\",\"info\":{\"title\":\"tandem\",\"version\":\"" TD_VERSION
             "\"},");
  td_buf_add(&body, (const char *)td_openapi + 1, td_openapi_len - 1);
  td_serve_respond(x, 200, TD_JSON_TYPE, &body);
}

static const char *page_type(const char *name) {
  const char *end = strrchr(name, '.');
  return strcmp(end, ".js") == 0    ? "text/javascript; charset=utf-8"
         : strcmp(end, ".css") == 0 ? "text/css; charset=utf-8"
                                    : "text/html; charset=utf-8";
}

// Scripts and styles come from files alone, and no string becomes markup: what a model writes
// cannot run, whatever the page does with it.
static void respond_page(td_http_exchange *x, const char *name) {
  const td_page_file *file = td_page_files;
  while (file->name && strcmp(file->name, name) != 0)
    file++;
  if (!file->name) {
    td_http_error(x, 404, "the page has no such file");
    return;
  }
  td_http_add_header(x, "Content-Security-Policy",
                     "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
                     "img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'; "
                     "require-trusted-types-for 'script'; trusted-types 'none'");
  td_http_add_header(x, "X-Content-Type-Options", "nosniff");
  td_http_add_header(x, "Referrer-Policy", "no-referrer");
  td_http_add_header(x, "Cache-Control", "no-cache");
  const bool is_gzip = file->bytes[0] == 0x1f && file->bytes[1] == 0x8b;
  if (is_gzip) td_http_add_header(x, "Content-Encoding", "gzip"); // which all browsers read
  td_http_respond(x, 200, page_type(name), file->bytes, file->len);
}

void td_serve_page(void *ctx, td_http_exchange *x) {
  (void)ctx;
  respond_page(x, "index.html");
}

void td_serve_status(void *ctx, td_http_exchange *x) {
  (void)ctx;
  respond_page(x, "status.html");
}

void td_serve_page_file(void *ctx, td_http_exchange *x) {
  (void)ctx;
  respond_page(x, td_http_path(x) + strlen("/page/"));
}

static td_metrics_model metrics_of(const td_host *h) {
  td_metrics_model m = {.counts = &h->metrics,
                        .model = h->name,
                        .state = td_host_state_of(h),
                        .n_loads = h->n_loads,
                        .n_waiting = td_host_n_waiting(h)};
  if (h->backend) {
    m.n_running = td_backend_n_running(h->backend);
    m.n_workers = td_backend_workers(h->backend, m.workers);
    m.kv_use = td_backend_kv_use(h->backend);
    m.page_tokens = td_backend_info(h->backend).page_tokens;
    m.n_pages = td_backend_info(h->backend).n_pages;
    m.kv_disk = td_backend_kv_disk(h->backend);
    m.n_preemptions = td_backend_n_preemptions(h->backend);
  }
  return m;
}

void td_serve_metrics(void *ctx, td_http_exchange *x) {
  const td_serve *serve = ctx;
  td_buf body = TD_BUF_INIT;
  td_metrics_now now = {.n = serve->hosts.n,
                        .models = calloc(serve->hosts.n, sizeof *now.models),
                        .n_routed = serve->n_routed,
                        .started = serve->created,
                        .memory_bytes = td_memory_limit_bytes(),
                        .memory_available_bytes = td_memory_available_bytes(),
                        .has_kv_dir = serve->hosts.kv_dir != NULL};
  for (uint32_t i = 0; now.models && i < now.n; i++)
    now.models[i] = metrics_of(&serve->hosts.all[i]);
  body.failed = !now.models;
  if (now.models) td_metrics_write(&body, &now);
  free(now.models);
  td_serve_respond(x, 200, TD_METRICS_TYPE, &body);
}
