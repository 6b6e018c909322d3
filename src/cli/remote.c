// src/cli/remote.c - `tandem list --server`, `tandem ps` and `tandem stop`: the models of a running
// server, by Ollama's API.
#include "cli/remote.h"

#include <stdio.h>
#include <string.h>

#include "base/json_parse.h"
#include "base/json_write.h"
#include "base/units.h"
#include "bench/openai_client.h"
#include "cli/cli.h"
#include "runtime/command.h"

#define DEFAULT_SERVER "http://127.0.0.1:8080"

const char *td_cli_server(const td_options *o) {
  return o->server ? o->server : DEFAULT_SERVER;
}

td_status td_cli_fetch(td_buf *out, const td_options *o, const char *path, const td_buf *json,
                       uint64_t max_ms, td_err *err) {
  const td_fetch_args args = {.server = td_cli_server(o),
                              .api_key = o->api_key,
                              .path = path,
                              .json = json,
                              .max_ms = max_ms};
  return td_fetch(out, &args, err);
}

static const char *text_of(const cJSON *model, const char *key) {
  const cJSON *item = td_json_get(model, key);
  return cJSON_IsString(item) ? item->valuestring : "";
}

static double number_of(const cJSON *model, const char *key) {
  const cJSON *item = td_json_get(model, key);
  return cJSON_IsNumber(item) ? item->valuedouble : 0;
}

// Fetches a list of models. On success the caller owns *root.
static td_status fetch_models(cJSON **root, td_buf *text, const td_options *o, const char *path,
                              td_err *err) {
  td_status st = td_cli_fetch(text, o, path, NULL, 0, err);
  if (st == TD_OK) st = td_json_parse(root, td_buf_text(text), text->len, TD_JSON_MAX_DEPTH, err);
  return st;
}

static int show(const td_options *o, const char *path, bool is_running) {
  td_err err;
  td_buf text = TD_BUF_INIT;
  cJSON *root = NULL;
  td_status st = fetch_models(&root, &text, o, path, &err);
  const cJSON *models = td_json_get(root, "models"), *m;
  int width = (int)strlen("NAME");
  cJSON_ArrayForEach(m, models) {
    const int len = (int)strlen(text_of(m, "name"));
    if (len > width) width = len;
  }
  if (st == TD_OK && o->json) {
    puts(td_buf_text(&text));
  } else if (st == TD_OK) {
    printf("%-*s  %9s  %-9s%s\n", width, "NAME", "SIZE", "STATUS",
           is_running ? "  RUNNING  WAITING  CONTEXT" : "");
    cJSON_ArrayForEach(m, models) {
      const double n_bytes = number_of(m, "size");
      const bool is_small = n_bytes < (double)TD_GIB;
      printf("%-*s  %5.1f %s  %-9s", width, text_of(m, "name"),
             is_small ? td_mib(n_bytes) : td_gib(n_bytes), is_small ? "MiB" : "GiB",
             text_of(m, "status"));
      if (is_running) {
        printf("  %7.0f  %7.0f  %7.0f", number_of(m, "running"), number_of(m, "waiting"),
               number_of(m, "context_length"));
      }
      putchar('\n');
    }
  }
  cJSON_Delete(root);
  td_buf_free(&text);
  return st == TD_OK ? 0 : td_cmd_fail(&err);
}

int td_cmd_list(const td_options *o) {
  return o->server ? show(o, "/api/tags", false) : td_cli_list_cache(o);
}

int td_cmd_ps(const td_options *o) {
  return show(o, "/api/ps", true);
}

// Appends the name of the only model that is loaded.
static td_status find_loaded(td_buf *name, const td_options *o, td_err *err) {
  td_buf text = TD_BUF_INIT;
  cJSON *root = NULL;
  td_status st = fetch_models(&root, &text, o, "/api/ps", err);
  const cJSON *models = td_json_get(root, "models");
  const int n = cJSON_IsArray(models) ? cJSON_GetArraySize(models) : 0;
  if (st == TD_OK && n != 1) {
    st = td_fail(err, TD_EINVAL,
                 n ? "%d models are loaded: tandem stop NAME"
                   : "%d models are loaded: there is nothing to stop",
                 n);
  }
  if (st == TD_OK) td_buf_str(name, text_of(models->child, "name"));
  cJSON_Delete(root);
  td_buf_free(&text);
  return st;
}

int td_cmd_stop(const td_options *o) {
  td_err err;
  td_buf name = TD_BUF_INIT, json = TD_BUF_INIT, answer = TD_BUF_INIT;
  td_status st = TD_OK;
  if (o->model)
    td_buf_str(&name, o->model);
  else
    st = find_loaded(&name, o, &err);
  td_json_writer w = TD_JSON_WRITER(&json);
  td_jw_add(&w, "{'model': %s, 'keep_alive': 0}", td_buf_text(&name));
  if (st == TD_OK) st = td_buf_status(&json, &err);
  if (st == TD_OK) st = td_cli_fetch(&answer, o, "/api/generate", &json, 0, &err);
  td_buf_free(&name);
  td_buf_free(&json);
  td_buf_free(&answer);
  return st == TD_OK ? 0 : td_cmd_fail(&err);
}
