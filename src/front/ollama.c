// src/front/ollama.c - Ollama's endpoints without a job.
#include <stdlib.h>
#include <time.h>

#include "api/infill.h"
#include "base/clock.h"
#include "base/json_write.h"
#include "front/serve_impl.h"
#include "gguf/files.h"

// Of Ollama's API what is spoken here is that of this version, by which clients decide.
#define OLLAMA_VERSION "0.12.11"
#define FOR_EVER_S     10982476800 // 2318, which clients show as for ever

// Empty until the model was loaded for the first time.
static void write_details(td_json_writer *w, const td_host *h) {
  const double n = (double)h->n_params;
  char size[32] = "";
  if (n >= 1e9)
    snprintf(size, sizeof size, "%.1fB", n * 1e-9);
  else if (n > 0)
    snprintf(size, sizeof size, "%.1fM", n * 1e-6);
  td_jw_add(w,
            "'details': {'parent_model': '', 'format': %s, 'family': %s, "
            "'families': [%s], 'parameter_size': %s, 'quantization_level': %s}",
            td_gguf_is(h->dir) ? "gguf" : "safetensors", h->arch_name, h->arch_name, size,
            n > 0 ? h->dtype : "");
}

static void begin_model(td_json_writer *w, const td_host *h, const char *name) {
  char digest[TD_DIGEST_HEX];
  td_digest_hex(digest, &h->files.digest);
  td_jw_add(w, "{'name': %s, 'model': %s, 'size': %lu, 'digest': %s, 'status': %s", name, name,
            h->files.n_bytes, digest, td_host_state_name(td_host_state_of(h)));
  write_details(w, h);
}

// When the model will be unloaded if no request comes, seconds since 1970.
static int64_t expires_s(const td_serve *serve, const td_host *h) {
  if (!serve->hosts.is_on_demand || h->keep_ns == UINT64_MAX) return FOR_EVER_S;
  const uint64_t idle_ns = h->n_inside ? 0 : td_clock_ns() - h->used_ns;
  const uint64_t left_ns = idle_ns < h->keep_ns ? h->keep_ns - idle_ns : 0;
  return (int64_t)time(NULL) + (int64_t)(left_ns / 1000000000u);
}

void td_serve_ollama_ps(void *ctx, td_http_exchange *x) {
  const td_serve *serve = ctx;
  td_buf body = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&body);
  td_jw_add(&w, "{'models': [");
  for (uint32_t i = 0; i < serve->hosts.n; i++) {
    const td_host *h = &serve->hosts.all[i];
    const bool is_on_gpu = h->placement.is_discrete && !h->placement.experts_on_cpu;
    if (td_host_state_of(h) != TD_HOST_READY) continue;
    begin_model(&w, h, h->name);
    td_serve_write_time(&w, "expires_at", expires_s(serve, h));
    td_jw_add(&w, "'size_vram': %ld, 'context_length': %u, 'running': %u, 'waiting': %u}",
              is_on_gpu ? (int64_t)h->files.n_bytes : 0, h->n_ctx, td_backend_n_running(h->backend),
              td_backend_n_waiting(h->backend));
  }
  td_jw_add(&w, "]}");
  td_serve_respond(x, 200, TD_JSON_TYPE, &body);
}

void td_serve_ollama_tags(void *ctx, td_http_exchange *x) {
  const td_serve *serve = ctx;
  const td_str_list *names = &serve->options->model_names;
  const td_host *hosts = serve->hosts.all;
  const uint32_t n = names->n ? names->n : serve->hosts.n;
  td_buf body = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&body);
  td_jw_add(&w, "{'models': [");
  for (uint32_t i = 0; i < n; i++) {
    const td_host *h = &hosts[names->n ? 0 : i];
    begin_model(&w, h, names->n ? names->values[i] : h->name);
    td_serve_write_time(&w, "modified_at", h->files.modified_s);
    td_jw_end_object(&w);
  }
  td_jw_add(&w, "]}");
  td_serve_respond(x, 200, TD_JSON_TYPE, &body);
}

#define MAX_NAME_BODY (64u << 10) // parsed on the loop

// The model that the body names. NULL: error says why.
static td_host *find_named(const td_serve *serve, const td_buf *body, td_api_error *error) {
  const char *suffix = td_dialect_ollama_chat.model_suffix;
  char *name = NULL;
  if (body->len > MAX_NAME_BODY) {
    td_api_fail(error, 413, NULL, NULL, "the body has %zu bytes where a model's name is expected",
                body->len);
    return NULL;
  }
  if (td_api_parse_model(&name, td_buf_text(body), body->len, error) != TD_OK) return NULL;
  td_host *h = name ? td_hosts_find(&serve->hosts, name, suffix) : NULL;
  if (!h) td_serve_unknown_model(serve, name ? name : "", error);
  free(name);
  return h;
}

// The template stands for the model's own, which is not in Go's language: clients look in it for
// what the model can do.
static void write_shown(td_buf *body, const td_host *h, const td_chat *chat) {
  const bool fills_in = td_infill_find(chat);
  const bool has_tools = td_chat_template_mentions(chat, "tools");
  char text[96];
  td_json_writer w = TD_JSON_WRITER(body);
  td_jw_add(&w, "{'license': '', 'modelfile': ''");
  snprintf(text, sizeof text, "num_ctx %u", (unsigned)h->n_ctx);
  td_jw_str(&w, "parameters", text);
  snprintf(text, sizeof text, "{{ .System }}%s{{ .Prompt }}%s{{ .Response }}",
           has_tools ? "{{ .Tools }}" : "", fills_in ? "{{ .Suffix }}" : "");
  td_jw_str(&w, "template", text);
  td_serve_write_time(&w, "modified_at", h->files.modified_s);
  write_details(&w, h);
  td_jw_add(&w, "'model_info': {'general.architecture': %s, 'general.basename': %s", h->arch_name,
            h->name);
  if (h->n_params) td_jw_int(&w, "general.parameter_count", (int64_t)h->n_params);
  snprintf(text, sizeof text, "%.63s.context_length", h->arch_name);
  td_jw_int(&w, text, h->n_ctx);
  td_jw_add(&w, "}, 'capabilities': ['completion'");
  if (atomic_load(&h->sees)) td_jw_str(&w, NULL, "vision");
  if (has_tools) td_jw_str(&w, NULL, "tools");
  if (td_output_form_of(chat)) td_jw_str(&w, NULL, "thinking");
  if (fills_in) td_jw_str(&w, NULL, "insert");
  td_jw_add(&w, "]}");
}

void td_serve_ollama_show(void *ctx, td_http_exchange *x) {
  const td_serve *serve = ctx;
  td_api_error error;
  td_host *h = find_named(serve, td_http_body(x), &error);
  const td_chat *chat = td_serve_chat_of(h, x, &error);
  if (!chat) return;
  td_buf body = TD_BUF_INIT;
  write_shown(&body, h, chat);
  td_serve_respond(x, 200, TD_JSON_TYPE, &body);
}

void td_serve_ollama_version(void *ctx, td_http_exchange *x) {
  (void)ctx;
  td_buf body = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&body);
  td_jw_add(&w, "{'version': %s, 'api': 'ollama', 'server': %s}", OLLAMA_VERSION,
            "tandem " TD_VERSION);
  td_serve_respond(x, 200, TD_JSON_TYPE, &body);
}
