// src/text/template.c - opens and renders chat templates.
#include "text/template.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/fs.h"
#include "base/grow.h"
#include "base/json_parse.h"
#include "base/str.h"
#include "base/utf8.h"
#include "gguf/files.h"
#include "text/jinja/jinja.h"

#define MAX_SOURCE_BYTES  ((size_t)4 << 20)
#define MAX_CONFIG_BYTES  ((size_t)256 << 20)
#define PARSE_MAX_BYTES   ((size_t)256 << 20)
#define PARSE_MAX_STEPS   50000000
#define RENDER_MAX_BYTES  ((size_t)256 << 20)
#define RENDER_MAX_OUTPUT ((size_t)64 << 20)
#define RENDER_MAX_STEPS  20000000
#define RENDER_MAX_CPU_MS 2000
// Recursion limit of the tree walk. Python's own limit ends a template at a few hundred nested
// macro calls.
#define MAX_DEPTH 2500

struct td_template {
  jj j; // owns the tree's memory
  jj_tree tree;
  char *source; // [n_source]
  size_t n_source;
  td_template *tool_use; // template used instead for renders with tools, or NULL
};

// ---- opening ----

static td_status parse(td_template *t, const char *source, size_t len, td_err *err) {
  jj *j = &t->j;
  *j = (jj){.err = err,
            .max_bytes = PARSE_MAX_BYTES,
            .max_steps = PARSE_MAX_STEPS,
            .steps_left = PARSE_MAX_STEPS,
            .max_depth = MAX_DEPTH};
  if (setjmp(j->on_error)) {
    jj_free_all(j);
    td_err_prefix(err, "chat template");
    return j->status;
  }
  if (len > MAX_SOURCE_BYTES)
    jj_raise(j, TD_ELIMIT, "more than %zu bytes of source", MAX_SOURCE_BYTES);
  t->tree.body = jj_parse(j, jj_lex(j, source, len));
  jj_resolve(j, &t->tree);
  return TD_OK;
}

td_status td_template_open(td_template **out, const char *source, size_t len, td_err *err) {
  *out = NULL;
  td_template *t = calloc(1, sizeof *t);
  if (!t) return td_fail(err, TD_ENOMEM, "chat template: out of memory");
  td_status st = parse(t, source, len, err);
  if (st != TD_OK) {
    free(t);
    return st;
  }
  t->source = malloc(len + 1);
  if (!t->source) {
    td_template_close(t);
    return td_fail(err, TD_ENOMEM, "chat template: out of memory");
  }
  memcpy(t->source, source, len);
  t->n_source = len;
  *out = t;
  return TD_OK;
}

void td_template_source(const td_template *t, td_buf *out) {
  td_buf_add(out, t->source, t->n_source);
}

bool td_template_mentions(const td_template *t, const char *text) {
  if (memmem(t->source, t->n_source, text, strlen(text))) return true;
  return t->tool_use && td_template_mentions(t->tool_use, text);
}

void td_template_close(td_template *tmpl) {
  if (!tmpl) return;
  td_template_close(tmpl->tool_use);
  free(tmpl->source);
  jj_free_all(&tmpl->j);
  free(tmpl);
}

static td_status open_file(td_template **out, const char *path, td_err *err) {
  td_buf source = TD_BUF_INIT;
  td_status st = td_file_read_regular(&source, path, MAX_SOURCE_BYTES, err);
  if (st == TD_OK) {
    st = td_template_open(out, td_buf_text(&source), source.len, err);
    if (st != TD_OK) td_err_prefix(err, "%s", path);
  }
  td_buf_free(&source);
  return st;
}

// The template called name in [{"name": ..., "template": ...}, ...]; NULL if there is none.
static const char *named_template(const cJSON *list, const char *name) {
  const cJSON *item;
  cJSON_ArrayForEach(item, list) {
    const cJSON *its_name = td_json_get(item, "name"), *text = td_json_get(item, "template");
    if (cJSON_IsString(its_name) && cJSON_IsString(text) &&
        strcmp(its_name->valuestring, name) == 0)
      return text->valuestring;
  }
  return NULL;
}

static td_status open_config(td_template **out, const char *model_dir, td_err *err) {
  static const char file[] = "tokenizer_config.json";
  cJSON *config;
  td_status st = td_checkpoint_json(&config, model_dir, file, MAX_CONFIG_BYTES, err);
  if (st != TD_OK) return st;
  const cJSON *member = td_json_get(config, "chat_template");
  const char *text = cJSON_IsString(member) ? member->valuestring : NULL, *tool_use = NULL;
  if (cJSON_IsArray(member)) {
    text = named_template(member, "default");
    tool_use = named_template(member, "tool_use");
  }
  if (text) {
    st = td_template_open(out, text, strlen(text), err);
  } else {
    st = td_fail(err, TD_ENOENT, "no chat_template%s%s", member ? " named default" : "",
                 td_gguf_is(model_dir) ? "" : ": put a chat_template.jinja beside it");
  }
  if (st == TD_OK && tool_use)
    st = td_template_open(&(*out)->tool_use, tool_use, strlen(tool_use), err);
  if (st != TD_OK) td_err_prefix(err, "%s/%s", model_dir, file);
  if (st != TD_OK) td_checkpoint_name_error(model_dir, err);
  cJSON_Delete(config);
  return st;
}

static td_status open_model_files(td_template **out, const char *model_dir, td_err *err) {
  char path[4096];
  snprintf(path, sizeof path, "%s/chat_template.jinja", model_dir);
  if (!td_file_exists(path)) {
    if (td_checkpoint_has(model_dir, "tokenizer_config.json"))
      return open_config(out, model_dir, err);
    return td_fail(err, TD_ENOENT,
                   "%s: no chat template: neither chat_template.jinja nor "
                   "tokenizer_config.json is there",
                   model_dir);
  }
  td_status st = open_file(out, path, err);
  if (st != TD_OK) return st;
  snprintf(path, sizeof path, "%s/additional_chat_templates/tool_use.jinja", model_dir);
  return td_file_exists(path) ? open_file(&(*out)->tool_use, path, err) : TD_OK;
}

// no_template: why there is none in the model's files.
static td_status open_builtin(td_template **out, const char *model_dir, const td_err *no_template,
                              td_err *err) {
  td_buf source = TD_BUF_INIT;
  td_status st = td_builtin_template_find(&source, model_dir, err);
  if (st == TD_OK && source.len) {
    st = td_template_open(out, td_buf_text(&source), source.len, err);
  } else if (st == TD_OK) {
    st = no_template->code;
    if (err) *err = *no_template;
  }
  td_buf_free(&source);
  return st;
}

td_status td_template_open_model(td_template **out, const char *model_dir, td_err *err) {
  td_err no_template;
  *out = NULL;
  td_status st = open_model_files(out, model_dir, &no_template);
  if (st == TD_ENOENT)
    st = open_builtin(out, model_dir, &no_template, err);
  else if (st != TD_OK && err)
    *err = no_template;
  if (st != TD_OK) {
    td_template_close(*out);
    *out = NULL;
  }
  return st;
}

// ---- variables ----

typedef struct {
  jj *j;
  bool typed; // strings come from the user
} importer;

static jj_value import(importer *im, const cJSON *node);

static jj_value import_number(importer *im, const cJSON *node) {
  const char *text = node->valuestring;
  double f = node->valuedouble;
  jj_value v;
  if (text) {
    const jj_str s = {.p = text, .len = strlen(text), .n_chars = strlen(text)};
    if (!strpbrk(text, ".eE") && jj_parse_int(im->j, &s, 10, &v)) return v;
    return JJ_OF_FLOAT(f);
  }
  bool whole = f == floor(f) && fabs(f) <= 9007199254740992.0;
  return whole ? JJ_OF_INT((int64_t)f) : JJ_OF_FLOAT(f);
}

static const jj_str *import_text(importer *im, const char *text, bool typed) {
  size_t len = strlen(text);
  if (!td_utf8_valid(text, len)) jj_raise(im->j, TD_EINVAL, "a variable is not valid UTF-8");
  return jj_str_borrow(im->j, text, len, typed);
}

// Templates build control tokens from roles ('<|' + role + '|>'), so known role names are not
// treated as user input.
static bool is_role(const cJSON *node) {
  static const char roles[] = "system user assistant tool model function developer ipython";
  return node->string && strcmp(node->string, "role") == 0 && td_is_word(roles, node->valuestring);
}

static jj_value import_object(importer *im, const cJSON *node) {
  jj_dict *dict = jj_dict_new(im->j);
  const cJSON *item;
  cJSON_ArrayForEach(item, node) {
    jj_value key = JJ_OF_STR(import_text(im, item->string, im->typed));
    if (!jj_dict_get(im->j, dict, key)) jj_dict_set(im->j, dict, key, import(im, item));
  }
  return JJ_OF_DICT(dict);
}

static jj_value import_array(importer *im, const cJSON *node) {
  jj_list *list = jj_list_new(im->j, 8);
  const cJSON *item;
  cJSON_ArrayForEach(item, node) {
    jj_push(im->j, list, import(im, item));
  }
  return JJ_OF_LIST(list);
}

static jj_value import(importer *im, const cJSON *node) {
  jj_value v = JJ_NONE_VALUE;
  jj_enter(im->j);
  if (cJSON_IsObject(node))
    v = import_object(im, node);
  else if (cJSON_IsArray(node))
    v = import_array(im, node);
  else if (cJSON_IsString(node))
    v = JJ_OF_STR(import_text(im, node->valuestring, im->typed && !is_role(node)));
  else if (cJSON_IsNumber(node))
    v = import_number(im, node);
  else if (cJSON_IsBool(node))
    v = JJ_OF_BOOL(cJSON_IsTrue(node));
  jj_leave(im->j);
  return v;
}

static const jj_dict *import_vars(jj *j, const cJSON *vars) {
  jj_dict *dict = jj_dict_new(j);
  const cJSON *item;
  cJSON_ArrayForEach(item, vars) {
    importer im = {.j = j, .typed = !td_ends_with(item->string, "_token")};
    jj_value key = JJ_OF_STR(import_text(&im, item->string, false));
    if (!jj_dict_get(j, dict, key)) jj_dict_set(j, dict, key, import(&im, item));
  }
  return dict;
}

// ---- rendering ----

static td_status add_spans(td_spans *typed, const jj_builder *b, size_t at, td_err *err) {
  const size_t n = typed->n + b->n_runs;
  if (n > typed->cap && !td_grow(&typed->spans, &typed->cap, n, 16, sizeof *typed->spans))
    return td_fail(err, TD_ENOMEM, "chat template: out of memory");
  for (size_t i = 0; i < b->n_runs; i++)
    typed->spans[typed->n++] = (td_span){at + b->runs[i].begin, at + b->runs[i].end};
  return TD_OK;
}

static td_status hand_over(const jj_builder *b, td_buf *out, td_spans *typed, td_err *err) {
  size_t at = out->len;
  td_buf_reserve(out, b->store->used);
  td_status st = td_buf_status(out, err);
  if (st == TD_OK && typed && b->n_runs) st = add_spans(typed, b, at, err);
  if (st == TD_OK) td_buf_add(out, b->store->data, b->store->used);
  return st;
}

static td_status run(jj *j, const td_template *tmpl, const cJSON *vars, jj_builder *out) {
  if (setjmp(j->on_error)) {
    td_err_prefix(j->err, "chat template");
    return j->status;
  }
  jj_build(out, j);
  j->out = out;
  j->vars = import_vars(j, vars);
  jj_run(j, &tmpl->tree);
  return TD_OK;
}

td_status td_template_render(const td_template *tmpl, const cJSON *vars,
                             const td_template_opts *opts, td_buf *out, td_spans *typed,
                             td_err *err) {
  td_template_opts o = opts ? *opts : (td_template_opts){0};
  if (!cJSON_IsObject(vars))
    return td_fail(err, TD_EINVAL, "chat template: the variables must be a JSON object");
  if (tmpl->tool_use && td_json_get(vars, "tools")) tmpl = tmpl->tool_use;
  jj j = {.err = err,
          .max_bytes = o.max_memory_bytes ? o.max_memory_bytes : RENDER_MAX_BYTES,
          .takes_share = !o.max_memory_bytes,
          .left_bytes = o.left_bytes,
          .max_steps = o.max_steps ? o.max_steps : RENDER_MAX_STEPS,
          .max_depth = MAX_DEPTH,
          .max_output = o.max_output_bytes ? o.max_output_bytes : RENDER_MAX_OUTPUT,
          .is_canceled = o.is_canceled,
          .now_us = o.now_us};
  j.steps_left = j.max_steps;
  uint64_t cpu_ms = o.max_cpu_ms ? o.max_cpu_ms : RENDER_MAX_CPU_MS;
  j.cpu_end_ns = td_clock_cpu_ns() + cpu_ms * 1000000;
  jj_builder text;
  td_status st = run(&j, tmpl, vars, &text);
  if (st == TD_OK) st = hand_over(&text, out, typed, err);
  jj_free_all(&j);
  return st;
}

// ---- templates of models that bring none --------------------------------------------------------

#define MAX_MODEL_CONFIG_BYTES ((size_t)16 << 20)
#define MAX_ENCODER_BYTES      ((size_t)1 << 20)

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
  td_status st = td_checkpoint_json(&config, model, "config.json", MAX_MODEL_CONFIG_BYTES, err);
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
