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
