// src/text/tokenizer/json.c - helpers to read tokenizer.json.
#include "text/tokenizer/json.h"

#include <string.h>

#include "base/json_parse.h"

td_status td_tok_need_str(const cJSON *json, const char *key, const char **out, td_err *err) {
  *out = NULL;
  td_status st = td_json_get_str(json, key, out, err);
  if (st == TD_OK && !*out) return td_fail(err, TD_EFORMAT, "%s is missing", key);
  return st;
}

td_status td_tok_each_step(const cJSON *json, const char *key, td_tok_step step, void *owner,
                           td_err *err) {
  const char *type = "";
  td_status st = td_tok_need_str(json, "type", &type, err);
  if (st != TD_OK) return st;
  if (strcmp(type, "Sequence") != 0) {
    st = step(owner, json, type, err);
    return st == TD_OK ? st : td_err_prefix(err, "%s", type);
  }
  const cJSON *steps = td_json_get(json, key);
  if (!cJSON_IsArray(steps)) return td_fail(err, TD_EFORMAT, "%s must be an array", key);
  int i = 0;
  for (const cJSON *item = steps->child; item; item = item->next, i++) {
    st = td_tok_each_step(item, key, step, owner, err);
    if (st != TD_OK) return td_err_prefix(err, "%s[%d]", key, i);
  }
  return TD_OK;
}

td_status td_tok_read_pattern(const cJSON *json, td_regex **regex, td_err *err) {
  const cJSON *pattern = td_json_get(json, "pattern");
  const char *literal = NULL, *text = NULL;
  td_status st = td_json_get_str(pattern, "String", &literal, err);
  if (st == TD_OK) st = td_json_get_str(pattern, "Regex", &text, err);
  if (st == TD_OK && !literal == !text)
    st = td_fail(err, TD_EFORMAT, "must be {\"String\": ...} or {\"Regex\": ...}");
  if (st == TD_OK) {
    if (literal) text = literal;
    st = td_regex_open(regex, text, strlen(text), literal != NULL, err);
  }
  return st == TD_OK ? st : td_err_prefix(err, "pattern");
}
