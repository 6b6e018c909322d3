// src/text/builtin.c - finds the template for a model that brings none.
#include "text/builtin.h"

#include <stdio.h>
#include <string.h>

#include "base/fs.h"
#include "base/json_parse.h"
#include "gguf/files.h"

#define MAX_CONFIG_BYTES  ((size_t)16 << 20)
#define MAX_ENCODER_BYTES ((size_t)1 << 20)

// The encoder that comes with DeepSeek-V4 tells the checkpoints of April 2026, which have a single
// text for the highest effort, from later ones, which have one for each. It is not run.
static td_status add_efforts(td_buf *out, const char *model, td_err *err) {
  char path[4096];
  td_buf encoder = TD_BUF_INIT;
  snprintf(path, sizeof path, "%s/encoding/encoding_dsv4.py", model);
  td_status st = td_file_read_regular(&encoder, path, MAX_ENCODER_BYTES, err);
  const char *text = td_buf_text(&encoder);
  if (st == TD_OK && strstr(text, "REASONING_EFFORT_MAX") && !strstr(text, "_EFFORT_PROMPTS"))
    td_buf_str(out, "{%- set preview_efforts = true %}\n");
  td_buf_free(&encoder);
  return st == TD_ENOMEM ? st : TD_OK;
}

td_status td_builtin_template_find(td_buf *out, const char *model, td_err *err) {
  cJSON *config;
  td_status st = td_checkpoint_json(&config, model, "config.json", MAX_CONFIG_BYTES, err);
  if (st != TD_OK) return st == TD_ENOMEM ? st : TD_OK;
  const cJSON *type = td_json_get(config, "model_type");
  const td_builtin_template *t = td_builtin_templates;
  while (t->model_type && !(cJSON_IsString(type) && !strcmp(type->valuestring, t->model_type)))
    t++;
  if (t->model_type && strcmp(t->model_type, "deepseek_v4") == 0) st = add_efforts(out, model, err);
  if (t->model_type) td_buf_add(out, t->text, t->len);
  cJSON_Delete(config);
  return st == TD_OK ? td_buf_status(out, err) : st;
}
