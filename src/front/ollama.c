// src/front/ollama.c - Ollama's endpoints without a job.
#include <stdlib.h>
#include <string.h>

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

static void write_model(td_json_writer *w, const td_host *h, const char *name) {
  char digest[TD_DIGEST_HEX];
  td_digest_hex(digest, &h->files.digest);
  td_jw_begin_object(w, NULL);
  td_jw_str(w, "name", name);
  td_jw_str(w, "model", name);
  td_serve_write_time(w, "modified_at", h->files.modified_s);
  td_jw_int(w, "size", (int64_t)h->files.n_bytes);
  td_jw_str(w, "digest", digest);
  td_jw_str(w, "status", td_host_state_name(td_host_state_of(h)));
  write_details(w);
  td_jw_end_object(w);
}

void td_serve_ollama_tags(void *ctx, td_http_exchange *x) {
  const td_serve *serve = ctx;
  const td_str_list *names = &serve->options->model_names;
  const td_host *hosts = serve->hosts.all;
  td_buf body = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&body);
  td_jw_begin_object(&w, NULL);
  td_jw_begin_array(&w, "models");
  for (uint32_t i = 0; !names->n && i < serve->hosts.n; i++)
    write_model(&w, &hosts[i], hosts[i].name);
  for (uint32_t i = 0; i < names->n; i++)
    write_model(&w, &hosts[0], names->values[i]);
  td_jw_end_array(&w);
  td_jw_end_object(&w);
  respond(x, &body);
}

// The model that the body names. NULL: error says why.
static td_host *find_named(const td_serve *serve, const td_buf *body, td_api_error *error) {
  const char *suffix = td_dialect_ollama_chat.model_suffix;
  char *name = NULL;
  if (td_api_parse_model(&name, td_buf_text(body), body->len, error) != TD_OK) return NULL;
  td_host *h = name ? td_hosts_find(&serve->hosts, name, suffix) : NULL;
  if (!h) td_serve_unknown_model(serve, name ? name : "", error);
  free(name);
  return h;
}

void td_serve_ollama_show(void *ctx, td_http_exchange *x) {
  const td_serve *serve = ctx;
  td_api_error error;
  td_err err;
  td_host *h = find_named(serve, td_http_body(x), &error);
  const td_chat *chat = h ? td_host_chat(h, &err) : NULL;
  if (h && !chat) td_api_fail_err(&error, NULL, &err);
  if (!chat) {
    td_serve_fail_as(x, &error, &td_dialect_ollama_chat);
    return;
  }
  td_buf body = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&body);
  td_jw_begin_object(&w, NULL);
  td_jw_str(&w, "modelfile", "");
  td_jw_str(&w, "parameters", "");
  td_jw_str(&w, "template", "");
  td_serve_write_time(&w, "modified_at", h->files.modified_s);
  write_details(&w);
  td_jw_begin_object(&w, "model_info");
  td_jw_str(&w, "general.architecture", "tandem");
  td_jw_int(&w, "tandem.context_length", h->n_ctx);
  td_jw_end_object(&w);
  td_jw_begin_array(&w, "capabilities");
  td_jw_str(&w, NULL, "completion");
  if (td_chat_template_mentions(chat, "tools")) td_jw_str(&w, NULL, "tools");
  if (td_chat_template_mentions(chat, "</think")) td_jw_str(&w, NULL, "thinking");
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
