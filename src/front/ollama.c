// src/front/ollama.c - Ollama's endpoints without a job.
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/json_parse.h"
#include "base/json_write.h"
#include "front/serve_impl.h"

static void respond(td_http_exchange *x, td_buf *body) {
  if (body->failed) {
    td_http_error(x, 503, "out of memory");
  } else {
    td_http_respond(x, 200, "application/json", td_buf_text(body), body->len);
  }
  td_buf_free(body);
}

static void write_time(td_json_writer *w, const char *key, int64_t seconds) {
  char text[40];
  time_t when = (time_t)seconds;
  struct tm tm;
  gmtime_r(&when, &tm);
  strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &tm);
  td_jw_str(w, key, text);
}

static void write_details(td_json_writer *w) {
  td_jw_begin_object(w, "details");
  td_jw_str(w, "parent_model", "");
  td_jw_str(w, "format", "safetensors");
  td_jw_str(w, "family", "tandem");
  td_jw_begin_array(w, "families");
  td_jw_str(w, NULL, "tandem");
  td_jw_end_array(w);
  td_jw_str(w, "parameter_size", "");
  td_jw_str(w, "quantization_level", "");
  td_jw_end_object(w);
}

static void write_model(td_json_writer *w, const td_serve *serve, const char *name) {
  td_jw_begin_object(w, NULL);
  td_jw_str(w, "name", name);
  td_jw_str(w, "model", name);
  write_time(w, "modified_at", serve->created);
  td_jw_int(w, "size", 0);
  td_jw_str(w, "digest", "");
  write_details(w);
  td_jw_end_object(w);
}

void td_serve_ollama_tags(void *ctx, td_http_exchange *x) {
  const td_serve *serve = ctx;
  const td_str_list *names = &serve->options->model_names;
  td_buf body = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&body);
  td_jw_begin_object(&w, NULL);
  td_jw_begin_array(&w, "models");
  if (!names->n) write_model(&w, serve, serve->name);
  for (uint32_t i = 0; i < names->n; i++)
    write_model(&w, serve, names->values[i]);
  td_jw_end_array(&w);
  td_jw_end_object(&w);
  respond(x, &body);
}

// The model that the body names, without :latest. NULL: none of this server's.
static bool names_model(const td_serve *serve, const td_buf *body) {
  cJSON *root = NULL;
  td_err err;
  if (td_json_parse(&root, td_buf_text(body), body->len, TD_JSON_MAX_DEPTH, &err) != TD_OK) {
    return false;
  }
  const cJSON *name = td_json_get(root, "model");
  if (!name) name = td_json_get(root, "name");
  bool is_known = false;
  if (cJSON_IsString(name)) {
    char *end = strstr(name->valuestring, ":latest");
    if (end && !end[strlen(":latest")]) *end = '\0';
    is_known = td_serve_has_model(serve, name->valuestring);
  }
  cJSON_Delete(root);
  return is_known;
}

void td_serve_ollama_show(void *ctx, td_http_exchange *x) {
  const td_serve *serve = ctx;
  if (!names_model(serve, td_http_body(x))) {
    td_api_error error;
    td_api_fail(&error, 404, "model", "model_not_found",
                "the model does not exist: this server "
                "has %s",
                serve->name);
    td_serve_fail_as(x, &error, &td_dialect_ollama_chat);
    return;
  }
  td_buf body = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&body);
  td_jw_begin_object(&w, NULL);
  td_jw_str(&w, "modelfile", "");
  td_jw_str(&w, "parameters", "");
  td_jw_str(&w, "template", "");
  write_time(&w, "modified_at", serve->created);
  write_details(&w);
  td_jw_begin_object(&w, "model_info");
  td_jw_str(&w, "general.architecture", "tandem");
  td_jw_int(&w, "tandem.context_length", td_serve_n_ctx(serve));
  td_jw_end_object(&w);
  td_jw_begin_array(&w, "capabilities");
  td_jw_str(&w, NULL, "completion");
  if (td_chat_template_mentions(serve->chat, "tools")) td_jw_str(&w, NULL, "tools");
  if (td_chat_template_mentions(serve->chat, "</think>")) td_jw_str(&w, NULL, "thinking");
  td_jw_end_array(&w);
  td_jw_end_object(&w);
  respond(x, &body);
}

void td_serve_ollama_version(void *ctx, td_http_exchange *x) {
  (void)ctx;
  td_buf body = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&body);
  td_jw_begin_object(&w, NULL);
  td_jw_str(&w, "version", TD_VERSION);
  td_jw_end_object(&w);
  respond(x, &body);
}
