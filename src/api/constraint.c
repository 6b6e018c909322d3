// src/api/constraint.c - what the answer must match: response_format, and the names that vLLM,
// SGLang and llama-server give to the same. Each becomes a node of the request's grammar.
#include <assert.h>
#include <stdio.h>
#include <string.h>

#include "api/api_impl.h"
#include "text/grammar/json_rules.h"
#include "text/grammar/json_schema.h"
#include "text/grammar/regex.h"

#define MAX_CHOICES 4096

static_assert((int)TD_SCHEMA_PATH_BYTES == TD_API_PARAM_BYTES, "a schema's path is a member's");

td_grammar_build *td_api_build(td_api_request *out, td_api_error *error) {
  if (!out->build) out->build = td_grammar_build_open(&out->budget);
  if (!out->build) td_api_fail(error, 503, NULL, NULL, "out of memory");
  return out->build;
}

static td_status set_schema(td_api_request *out, const cJSON *schema, bool is_strict,
                            const char *param, td_api_error *error) {
  td_api_path at;
  td_err err;
  snprintf(at.text, sizeof at.text, "%s", param);
  const td_json_schema_opts opts = {
      .is_free = out->allows_any_json, .leaves_out = !is_strict, .path = at.text};
  out->has_format = true;
  td_status st = td_json_schema_build(&out->format, out->build, schema, &opts, &err);
  return st == TD_OK ? st : td_api_fail_err(error, at.text, &err);
}

// A schema, or the text of one.
static td_status set_json(td_api_request *out, const cJSON *value, const char *param,
                          td_api_error *error) {
  if (!cJSON_IsString(value)) return set_schema(out, value, false, param, error);
  cJSON *schema;
  td_err err;
  td_status st = td_json_parse(&schema, value->valuestring, strlen(value->valuestring),
                               TD_JSON_MAX_DEPTH, &err);
  if (st == TD_ENOMEM) return td_api_fail_err(error, param, &err);
  if (st != TD_OK) return td_api_wrong(error, param, "is not a JSON schema: %s", err.msg);
  st = set_schema(out, schema, false, param, error);
  cJSON_Delete(schema);
  return st;
}

static td_status set_any_object(td_api_request *out) {
  out->has_format = true;
  out->format = td_g_json_object(out->build, out->allows_any_json);
  return TD_OK;
}

// st: what became of param's value.
static td_status finish_format(td_api_request *out, td_status st, const char *param, td_err *err,
                               td_api_error *error) {
  out->has_format = true;
  if (st == TD_OK) return st;
  td_err_prefix(err, "%s", param);
  return td_api_fail_err(error, param, err);
}

static td_status set_regex(td_api_request *out, const cJSON *value, const char *param,
                           td_api_error *error) {
  td_err err;
  if (!cJSON_IsString(value)) return td_api_wrong(error, param, "must be a string");
  td_status st = td_g_regex(&out->format, out->build, value->valuestring,
                            strlen(value->valuestring), TD_REGEX_WHOLE, &err);
  return finish_format(out, st, param, &err, error);
}

static td_status set_choice(td_api_request *out, const cJSON *value, const char *param,
                            td_api_error *error) {
  if (!cJSON_IsArray(value) || !value->child || cJSON_GetArraySize(value) > MAX_CHOICES)
    return td_api_wrong(error, param, "must be an array of 1 to %d strings", MAX_CHOICES);
  const size_t list = td_g_begin(out->build);
  td_status st = TD_OK;
  for (const cJSON *item = value->child; item && st == TD_OK; item = item->next) {
    if (!cJSON_IsString(item)) st = td_api_wrong(error, param, "must hold strings");
    if (st == TD_OK) td_g_add(out->build, td_g_str(out->build, item->valuestring));
  }
  out->format = td_g_end_any(out->build, list);
  out->has_format = true;
  return st;
}

static td_status set_grammar(td_api_request *out, const cJSON *value, const char *param,
                             td_api_error *error) {
  td_err err;
  if (!cJSON_IsString(value)) return td_api_wrong(error, param, "must be a string of GBNF");
  td_status st = td_g_parse(&out->format, out->build, value->valuestring,
                            strlen(value->valuestring), &err);
  return finish_format(out, st, param, &err, error);
}

// ---- members -----------------------------------------------------------------------------------

typedef td_status (*setter)(td_api_request *, const cJSON *, const char *, td_api_error *);

typedef struct {
  const char *name;
  setter set;
} constraint_name;

static bool is_neutral(const cJSON *item) {
  return !item || cJSON_IsFalse(item) || (cJSON_IsString(item) && !item->valuestring[0]);
}

// The first of the names that object has; it may have only one. where: the object's path, or NULL.
static td_status take_one(td_api_request *out, const cJSON *object, const constraint_name *names,
                          size_t n, const char *where, td_api_error *error) {
  for (size_t i = 0; i < n; i++) {
    const cJSON *item = td_json_get(object, names[i].name);
    if (is_neutral(item)) continue;
    td_api_path path = td_api_member(where ? where : "", names[i].name);
    const char *param = where ? path.text : names[i].name;
    if (out->has_format)
      return td_api_wrong(error, param, ": only one constraint of the output may be given");
    if (!td_api_build(out, error)) return TD_ENOMEM;
    td_status st = names[i].set(out, item, param, error);
    if (st != TD_OK) return st;
    if (!where && out->has_format) out->constraint = names[i].name;
  }
  return TD_OK;
}

// vLLM's switches; said to be off, they leave JSON free.
static bool allows_any_json(const cJSON *structured) {
  return cJSON_IsFalse(td_json_get(structured, "disable_any_whitespace")) ||
         cJSON_IsFalse(td_json_get(structured, "disable_additional_properties"));
}

static td_status set_structured(td_api_request *out, const cJSON *value, const char *param,
                                td_api_error *error) {
  static const constraint_name names[] = {
      {"json", set_json}, {"regex", set_regex}, {"choice", set_choice}, {"grammar", set_grammar}};
  static const char *const refused[] = {"structural_tag", "whitespace_pattern"};
  if (!cJSON_IsObject(value)) return td_api_wrong(error, param, "must be an object");
  for (size_t i = 0; i < TD_COUNT(refused); i++) {
    if (is_neutral(td_json_get(value, refused[i]))) continue;
    td_api_path path = td_api_member(param, refused[i]);
    return td_api_fail(error, 400, path.text, "unsupported_parameter", "%s is not supported",
                       path.text);
  }
  td_status st = take_one(out, value, names, TD_COUNT(names), param, error);
  bool is_object = cJSON_IsTrue(td_json_get(value, "json_object"));
  return st == TD_OK && is_object && !out->has_format ? set_any_object(out) : st;
}

static td_status set_format(td_api_request *out, const cJSON *format, const char *param,
                            td_api_error *error) {
  const cJSON *type = td_json_get(format, "type");
  const td_api_path at = td_api_member(param, "type");
  if (!cJSON_IsObject(format)) return td_api_wrong(error, param, "must be an object");
  if (!cJSON_IsString(type)) return td_api_wrong(error, at.text, "is missing or not a string");
  const char *name = type->valuestring;
  if (strcmp(name, "text") == 0) return TD_OK;
  if (strcmp(name, "json_object") == 0) {
    const cJSON *schema = td_json_get(format, "schema"); // llama-server's
    const td_api_path inner = td_api_member(param, "schema");
    return schema ? set_schema(out, schema, false, inner.text, error) : set_any_object(out);
  }
  if (strcmp(name, "grammar") == 0) {
    const td_api_path inner = td_api_member(param, "grammar");
    return set_grammar(out, td_json_get(format, "grammar"), inner.text, error);
  }
  if (strcmp(name, "json_schema") != 0) {
    return td_api_wrong(error, at.text,
                        "is \"%.64s\", and must be text, json_object or json_schema", name);
  }
  const cJSON *named = td_json_get(format, "json_schema"), *schema = td_json_get(named, "schema");
  const bool is_strict = cJSON_IsTrue(td_json_get(named, "strict"));
  const td_api_path inner = td_api_member(param, "json_schema.schema");
  if (cJSON_IsObject(schema)) return set_schema(out, schema, is_strict, inner.text, error);
  return td_api_wrong(error, inner.text, "is missing or not an object");
}

td_status td_api_parse_constraint(td_api_request *out, const cJSON *root, td_api_error *error) {
  static const constraint_name names[] = {{"response_format", set_format},
                                          {"structured_outputs", set_structured},
                                          {"guided_json", set_json},
                                          {"guided_regex", set_regex},
                                          {"guided_choice", set_choice},
                                          {"guided_grammar", set_grammar},
                                          {"grammar", set_grammar},
                                          {"json_schema", set_json},
                                          {"regex", set_regex},
                                          {"ebnf", set_grammar}};
  out->allows_any_json |= allows_any_json(td_json_get(root, "structured_outputs"));
  return take_one(out, root, names, TD_COUNT(names), NULL, error);
}
