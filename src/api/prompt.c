// src/api/prompt.c - parses the prompt of /v1/completions: a string, a list of strings, a list of
// token ids, or a list of such lists.
#include <stdlib.h>
#include <string.h>

#include "api/api_impl.h"

static td_status set_text(td_api_prompt *out, const cJSON *item, td_api_error *error) {
  out->len = strlen(item->valuestring);
  return td_api_copy(&out->text, item->valuestring, error);
}

static td_status set_ids(td_api_prompt *out, const cJSON *list, const char *key, uint32_t n_vocab,
                         td_api_error *error) {
  int n = cJSON_GetArraySize(list);
  if (n == 0) return td_api_wrong(error, key, "is empty");
  out->ids = malloc((size_t)n * sizeof *out->ids);
  if (!out->ids) return td_api_fail(error, 503, NULL, NULL, "out of memory");
  for (const cJSON *item = list->child; item; item = item->next) {
    int64_t id;
    if (!td_json_whole(item, 0, (int64_t)n_vocab - 1, &id))
      return td_api_wrong(error, key, "must hold token ids, integers from 0 to %u", n_vocab - 1);
    out->ids[out->n_ids++] = (int32_t)id;
  }
  return TD_OK;
}

static td_status set_each(td_api_request *out, const cJSON *list, const char *key, uint32_t n_vocab,
                          td_api_error *error) {
  for (const cJSON *item = list->child; item; item = item->next) {
    td_api_prompt *prompt = &out->prompts[out->n_prompts++];
    td_status st = cJSON_IsString(item)  ? set_text(prompt, item, error)
                   : cJSON_IsArray(item) ? set_ids(prompt, item, key, n_vocab, error)
                                         : td_api_wrong(error, key, "mixes kinds of prompts");
    if (st != TD_OK) return st;
  }
  return TD_OK;
}

td_status td_api_parse_prompt(td_api_request *out, const cJSON *root, const char *key,
                              const td_api_defaults *defaults, td_api_error *error) {
  const cJSON *prompt = td_json_get(root, key);
  bool add_special = true;
  if (!prompt && td_json_get(root, "messages"))
    return td_api_wrong(error, key, "is missing; messages are what /v1/chat/completions takes");
  if (!prompt) return td_api_wrong(error, key, "is missing");
  td_status st = td_api_get_bool(root, "add_special_tokens", &add_special, error);
  if (st != TD_OK) return st;
  out->is_bare = !add_special;
  bool is_list = cJSON_IsArray(prompt);
  if (!is_list && !cJSON_IsString(prompt))
    return td_api_wrong(error, key, "must be a string, or an array of strings or token ids");
  bool is_ids = is_list && cJSON_IsNumber(prompt->child);
  int n = is_list && !is_ids ? cJSON_GetArraySize(prompt) : 1;
  if (n == 0) return td_api_wrong(error, key, "is empty");
  if (n > TD_API_MAX_CHOICES)
    return td_api_wrong(error, key, "has more than %d entries", TD_API_MAX_CHOICES);
  out->prompts = calloc((size_t)n, sizeof *out->prompts);
  if (!out->prompts) return td_api_fail(error, 503, NULL, NULL, "out of memory");
  if (is_list && !is_ids) return set_each(out, prompt, key, defaults->n_vocab, error);
  out->n_prompts = 1;
  if (is_ids) return set_ids(&out->prompts[0], prompt, key, defaults->n_vocab, error);
  return set_text(&out->prompts[0], prompt, error);
}
