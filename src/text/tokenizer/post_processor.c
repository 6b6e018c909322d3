// src/text/tokenizer/post_processor.c - reads which tokens are added around a text.
#include "text/tokenizer/post_processor.h"

#include <limits.h>
#include <string.h>

#include "base/json_parse.h"
#include "text/tokenizer/json.h"

static td_status add_id(td_token_ids *ids, const cJSON *id, td_err *err) {
  int64_t value;
  if (!td_json_whole(id, 0, INT32_MAX, &value)) return td_fail(err, TD_EFORMAT, "not a token id");
  return td_token_ids_push(ids, (int32_t)value, err);
}

static td_status add_special(td_token_ids *ids, const cJSON *json, const cJSON *token,
                             td_err *err) {
  const char *name = NULL;
  td_status st = td_tok_need_str(token, "id", &name, err);
  if (st != TD_OK) return st;
  const cJSON *list = td_json_get(td_json_get(td_json_get(json, "special_tokens"), name), "ids");
  if (!cJSON_IsArray(list))
    return td_fail(err, TD_EFORMAT, "special_tokens has no ids for \"%.80s\"", name);
  for (const cJSON *id = list->child; id && st == TD_OK; id = id->next)
    st = add_id(ids, id, err);
  return st;
}

// {"single": [{"SpecialToken": ..}, {"Sequence": {"id": "A"}}, ...]}
static td_status read_template(td_post *own, const cJSON *json, td_err *err) {
  const cJSON *single = td_json_get(json, "single");
  if (!cJSON_IsArray(single)) return td_fail(err, TD_EFORMAT, "single must be an array");
  bool seen = false;
  for (const cJSON *item = single->child; item; item = item->next) {
    const cJSON *token = td_json_get(item, "SpecialToken");
    const char *sequence = NULL;
    td_status st = TD_OK;
    if (token) {
      st = add_special(seen ? &own->after : &own->before, json, token, err);
    } else {
      st = td_tok_need_str(td_json_get(item, "Sequence"), "id", &sequence, err);
      if (st == TD_OK && (seen || strcmp(sequence, "A") != 0))
        st = td_fail(err, TD_EUNSUPPORTED, "the text must stand once, as \"A\"");
      seen = true;
    }
    if (st != TD_OK) return td_err_prefix(err, "single");
  }
  return seen ? TD_OK : td_fail(err, TD_EUNSUPPORTED, "single leaves the text out");
}

// {"cls": ["<s>", 0], "sep": ["</s>", 2]}
static td_status read_cls_sep(td_post *own, const cJSON *json, td_err *err) {
  td_status st = add_id(&own->before, cJSON_GetArrayItem(td_json_get(json, "cls"), 1), err);
  if (st != TD_OK) return td_err_prefix(err, "cls");
  st = add_id(&own->after, cJSON_GetArrayItem(td_json_get(json, "sep"), 1), err);
  return st == TD_OK ? st : td_err_prefix(err, "sep");
}

// Each step wraps the result of the previous ones.
static td_status read_step(void *owner, const cJSON *json, const char *type, td_err *err) {
  td_post *post = owner, own = {0};
  td_status st = TD_OK;
  if (strcmp(type, "TemplateProcessing") == 0)
    st = read_template(&own, json, err);
  else if (strcmp(type, "BertProcessing") == 0 || strcmp(type, "RobertaProcessing") == 0)
    st = read_cls_sep(&own, json, err);
  else if (strcmp(type, "ByteLevel") != 0) // ByteLevel only trims offsets
    st = td_fail(err, TD_EUNSUPPORTED, "this post-processor is not supported");
  if (st == TD_OK) st = td_token_ids_add(&own.before, post->before.ids, post->before.n, err);
  if (st == TD_OK) st = td_token_ids_add(&post->after, own.after.ids, own.after.n, err);
  if (st == TD_OK) {
    td_token_ids swap = post->before;
    post->before = own.before;
    own.before = swap;
  }
  td_post_free(&own);
  return st;
}

td_status td_post_read(td_post *post, const cJSON *json, td_err *err) {
  if (!json) return TD_OK;
  td_status st = td_tok_each_step(json, "processors", read_step, post, err);
  return st == TD_OK ? st : td_err_prefix(err, "post_processor");
}

void td_post_free(td_post *post) {
  td_token_ids_free(&post->before);
  td_token_ids_free(&post->after);
}
