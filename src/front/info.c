// src/front/info.c - endpoints without a job: models, health, metrics and the chat page.
#include <string.h>

#include "base/json_write.h"
#include "front/serve_impl.h"

static void respond_as(td_http_exchange *x, int status, const char *type, td_buf *body) {
  if (body->failed) {
    td_http_error(x, 503, "out of memory");
  } else {
    td_http_respond(x, status, type, td_buf_text(body), body->len);
  }
  td_buf_free(body);
}

static void respond(td_http_exchange *x, int status, td_buf *body) {
  respond_as(x, status, "application/json", body);
}

static void write_model(td_json_writer *w, const td_serve *serve, const char *name) {
  td_jw_begin_object(w, NULL);
  td_jw_str(w, "id", name);
  td_jw_str(w, "object", "model");
  td_jw_int(w, "created", serve->created);
  td_jw_str(w, "owned_by", "tandem");
  td_jw_int(w, "max_model_len", td_serve_n_ctx(serve));
  td_jw_end_object(w);
}

void td_serve_models(void *ctx, td_http_exchange *x) {
  td_buf body = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&body);
  td_jw_begin_object(&w, NULL);
  td_jw_str(&w, "object", "list");
  td_jw_begin_array(&w, "data");
  const td_serve *serve = ctx;
  const td_str_list *names = &serve->options->model_names;
  if (!names->n) write_model(&w, serve, serve->name);
  for (uint32_t i = 0; i < names->n; i++)
    write_model(&w, serve, names->values[i]);
  td_jw_end_array(&w);
  td_jw_end_object(&w);
  respond(x, 200, &body);
}

void td_serve_model(void *ctx, td_http_exchange *x) {
  const td_serve *serve = ctx;
  const char *id = td_http_path(x) + strlen("/v1/models/");
  if (!td_serve_has_model(serve, id)) {
    td_api_error error;
    td_api_fail(&error, 404, "model", "model_not_found",
                "the model %.200s does not exist: this server has %s", id, serve->name);
    td_serve_fail(x, &error);
    return;
  }
  td_buf body = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&body);
  write_model(&w, serve, id);
  respond(x, 200, &body);
}

static const char *state_name(td_backend_state state) {
  switch (state) {
  case TD_BACKEND_LOADING: return "loading";
  case TD_BACKEND_READY: return "ok";
  case TD_BACKEND_STUCK: return "stuck";
  case TD_BACKEND_FAILED: return "failed";
  }
  return "unknown";
}

static void write_workers(td_json_writer *w, const td_serve *serve) {
  td_backend_worker workers[TD_BACKEND_MAX_WORKERS];
  uint32_t n = serve->backend ? td_backend_workers(serve->backend, workers) : 0;
  td_jw_begin_array(w, "workers");
  for (uint32_t i = 0; i < n; i++) {
    td_jw_begin_object(w, NULL);
    td_jw_str(w, "role", workers[i].role);
    td_jw_str(w, "status", state_name(workers[i].state));
    if (workers[i].reason[0]) td_jw_str(w, "reason", workers[i].reason);
    td_jw_int(w, "running", workers[i].n_running);
    td_jw_int(w, "threads", workers[i].n_threads);
    td_jw_int(w, "restarts", workers[i].n_restarts);
    td_jw_end_object(w);
  }
  td_jw_end_array(w);
}

void td_serve_health(void *ctx, td_http_exchange *x) {
  const td_serve *serve = ctx;
  td_backend_state state = td_serve_state(serve);
  bool ok = state == TD_BACKEND_READY;
  td_buf body = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&body);
  td_jw_begin_object(&w, NULL);
  td_jw_str(&w, "status", state_name(state));
  td_jw_int(&w, "running", serve->backend ? td_backend_n_running(serve->backend) : 0);
  td_jw_int(&w, "waiting", serve->backend ? td_backend_n_waiting(serve->backend) : 0);
  write_workers(&w, serve);
  td_jw_end_object(&w);
  if (!ok) td_http_add_header(x, "Retry-After", "1");
  respond(x, ok ? 200 : 503, &body);
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

void td_serve_tokenizer_info(void *ctx, td_http_exchange *x) {
  const td_serve *serve = ctx;
  const td_tokenizer *tok = td_chat_tokenizer(serve->chat);
  td_buf body = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&body);
  td_jw_begin_object(&w, NULL);
  td_jw_str(&w, "tokenizer_class", "PreTrainedTokenizerFast");
  write_token(&w, tok, "bos_token", "bos_token_id", td_tokenizer_bos(tok));
  write_token(&w, tok, "eos_token", "eos_token_id", td_tokenizer_eos(tok));
  td_jw_bool(&w, "add_bos_token", td_tokenizer_wants_bos(tok));
  td_jw_int(&w, "vocab_size", serve->defaults.n_vocab);
  td_jw_int(&w, "model_max_length", td_serve_n_ctx(serve));
  td_jw_end_object(&w);
  respond(x, 200, &body);
}

// The routes as an OpenAPI document. Bodies are objects: the protocols' own documentation describes
// their members.
void td_serve_openapi(void *ctx, td_http_exchange *x) {
  static const struct {
    const char *method, *path, *what;
  } routes[] = {
#define X(name, method, path, needs, what) {method, path, what},
      TD_ROUTES(X)
#undef X
  };
  (void)ctx;
  td_buf body = TD_BUF_INIT;
  td_buf_str(&body,
             "{\"openapi\":\"3.1.0\",\"info\":{\"title\":\"tandem\",\"version\":\"" TD_VERSION
             "\"},\"paths\":{");
  for (size_t i = 0; i < TD_COUNT(routes); i++) {
    size_t len = strcspn(routes[i].path, "*");
    bool has_id = routes[i].path[len] == '*', is_post = strcmp(routes[i].method, "POST") == 0;
    td_buf_printf(&body, "%s\"%.*s%s\":{\"%s\":{\"summary\":\"%s\",", i ? "," : "", (int)len,
                  routes[i].path, has_id ? "{id}" : "", is_post ? "post" : "get", routes[i].what);
    if (has_id) {
      td_buf_str(&body, "\"parameters\":[{\"name\":\"id\",\"in\":\"path\",\"required\":true,"
                        "\"schema\":{\"type\":\"string\"}}],");
    }
    if (is_post) {
      td_buf_str(&body, "\"requestBody\":{\"required\":true,\"content\":{\"application/json\":{"
                        "\"schema\":{\"type\":\"object\"}}}},");
    }
    td_buf_str(&body, "\"responses\":{\"200\":{\"description\":\"success\"},\"default\":{"
                      "\"description\":\"an error, with its reason\"}}}}");
  }
  td_buf_str(&body, "}}");
  respond(x, 200, &body);
}

void td_serve_page(void *ctx, td_http_exchange *x) {
  (void)ctx;
  td_http_add_header(x, "Content-Security-Policy",
                     "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
                     "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'");
  td_http_add_header(x, "Cache-Control", "no-cache");
  td_http_respond(x, 200, "text/html; charset=utf-8", td_chat_page, td_chat_page_len);
}

void td_serve_metrics(void *ctx, td_http_exchange *x) {
  const td_serve *serve = ctx;
  td_metrics_now now = {.model = serve->name};
  if (serve->backend) {
    now.n_running = td_backend_n_running(serve->backend);
    now.n_waiting = td_backend_n_waiting(serve->backend);
    now.n_workers = td_backend_workers(serve->backend, now.workers);
    now.kv_use = td_backend_kv_use(serve->backend);
    now.has_kv_dir = serve->kv_dir != NULL;
    now.kv_disk = td_backend_kv_disk(serve->backend);
    now.n_preemptions = td_backend_n_preemptions(serve->backend);
  }
  td_buf body = TD_BUF_INIT;
  td_metrics_write(&body, &serve->metrics, &now);
  respond_as(x, 200, TD_METRICS_TYPE, &body);
}
