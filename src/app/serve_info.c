// src/app/serve_info.c - the endpoints that answer at once: models, health, and the tokenizer and
// template for those who debug a prompt.
#include <string.h>

#include "app/serve.h"
#include "base/json_write.h"

static void respond(td_http_exchange *x, int status, td_buf *body) {
  if (body->failed) {
    td_http_error(x, 503, "out of memory");
  } else {
    td_http_respond(x, status, "application/json", td_buf_text(body), body->len);
  }
  td_buf_free(body);
}

static void write_model(td_json_writer *w, const td_serve *serve) {
  td_jw_begin_object(w, NULL);
  td_jw_str(w, "id", serve->name);
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
  write_model(&w, ctx);
  td_jw_end_array(&w);
  td_jw_end_object(&w);
  respond(x, 200, &body);
}

void td_serve_model(void *ctx, td_http_exchange *x) {
  const td_serve *serve = ctx;
  const char *id = td_http_path(x) + strlen("/v1/models/");
  if (strcmp(id, serve->name) != 0) {
    td_api_error error;
    td_api_fail(&error, 404, "model", "model_not_found",
                "the model %.200s does not exist: this server has %s", id, serve->name);
    td_serve_fail(x, &error);
    return;
  }
  td_buf body = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&body);
  write_model(&w, serve);
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

void td_serve_health(void *ctx, td_http_exchange *x) {
  const td_serve *serve = ctx;
  td_backend_state state = td_backend_state_of(serve->backend);
  bool ok = state == TD_BACKEND_READY;
  td_buf body = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&body);
  td_jw_begin_object(&w, NULL);
  td_jw_str(&w, "status", state_name(state));
  td_jw_int(&w, "running", td_backend_n_running(serve->backend));
  td_jw_int(&w, "waiting", td_backend_n_waiting(serve->backend));
  td_jw_end_object(&w);
  if (!ok) td_http_add_header(x, "Retry-After", "1");
  respond(x, ok ? 200 : 503, &body);
}

static void write_ids(td_json_writer *w, const td_ids *ids) {
  td_jw_begin_array(w, "tokens");
  for (size_t i = 0; i < ids->n; i++)
    td_jw_int(w, NULL, ids->ids[i]);
  td_jw_end_array(w);
}

// Tokens, and the rendered prompt of a chat, of a body with messages, content or prompt.
static bool encode_body(td_serve *serve, td_http_exchange *x, td_ids *ids, td_buf *text,
                        bool want_chat) {
  const td_buf *body = td_http_body(x);
  td_api_request request;
  td_api_error error;
  td_status st = td_api_parse_tokenize(&request, td_buf_text(body), body->len, &serve->defaults,
                                       &error);
  if (st == TD_OK && want_chat && !request.is_chat) {
    st = td_api_bad(&error, "messages", "messages are missing");
  }
  if (st == TD_OK && request.n_prompts > 1) {
    st = td_api_bad(&error, "prompt", "only one prompt at a time");
  }
  if (st == TD_OK) st = td_serve_encode(serve->chat, &request, ids, text, &error);
  td_api_request_free(&request);
  if (st != TD_OK) td_serve_fail(x, &error);
  return st == TD_OK;
}

void td_serve_tokenize(void *ctx, td_http_exchange *x) {
  td_serve *serve = ctx;
  td_ids ids = {0};
  if (encode_body(serve, x, &ids, NULL, false)) {
    td_buf body = TD_BUF_INIT;
    td_json_writer w = TD_JSON_WRITER(&body);
    td_jw_begin_object(&w, NULL);
    write_ids(&w, &ids);
    td_jw_int(&w, "count", (int64_t)ids.n);
    td_jw_int(&w, "max_model_len", td_serve_n_ctx(serve));
    td_jw_end_object(&w);
    respond(x, 200, &body);
  }
  td_ids_free(&ids);
}

static void respond_text(td_http_exchange *x, const char *key, const td_buf *text) {
  td_buf body = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&body);
  td_jw_begin_object(&w, NULL);
  td_jw_str_len(&w, key, td_buf_text(text), text->len);
  td_jw_end_object(&w);
  respond(x, 200, &body);
}

void td_serve_apply_template(void *ctx, td_http_exchange *x) {
  td_ids ids = {0};
  td_buf text = TD_BUF_INIT;
  if (encode_body(ctx, x, &ids, &text, true)) respond_text(x, "prompt", &text);
  td_ids_free(&ids);
  td_buf_free(&text);
}

void td_serve_detokenize(void *ctx, td_http_exchange *x) {
  const td_serve *serve = ctx;
  const td_buf *body = td_http_body(x);
  td_api_request request;
  td_api_error error;
  td_buf text = TD_BUF_INIT;
  td_status st = td_api_parse_detokenize(&request, td_buf_text(body), body->len, &serve->defaults,
                                         &error);
  if (st == TD_OK) {
    td_err err;
    st = td_tokenizer_decode(td_chat_tokenizer(serve->chat), request.prompts[0].ids,
                             request.prompts[0].n_ids, false, &text, &err);
    if (st != TD_OK) td_api_fail_err(&error, "tokens", &err);
  }
  if (st == TD_OK) {
    respond_text(x, "prompt", &text);
  } else {
    td_serve_fail(x, &error);
  }
  td_api_request_free(&request);
  td_buf_free(&text);
}
