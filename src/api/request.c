// src/api/request.c - parses and checks request bodies of the OpenAI protocol.
#include "api/request.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api/api_impl.h"

#define MAX_VALUES (1u << 20) // JSON values in one body; parsed they take 80 MiB

#define DEFAULT_COMPLETION_TOKENS 16 // default of the protocol

td_status td_api_get_int(const cJSON *object, const char *key, int64_t min, int64_t max,
                         int64_t *out, td_api_error *error) {
  td_err err;
  td_status st = td_json_get_int(object, key, min, max, out, &err);
  return st == TD_OK ? st : td_api_bad(error, key, "%s", err.msg);
}

td_status td_api_get_float(const cJSON *object, const char *key, double min, double max, float *out,
                           td_api_error *error) {
  td_err err;
  double value = *out;
  if (td_json_get_double(object, key, &value, &err) != TD_OK)
    return td_api_bad(error, key, "%s", err.msg);
  if (!(value >= min && value <= max))
    return td_api_wrong(error, key, "must be between %g and %g", min, max);
  *out = (float)value;
  return TD_OK;
}

td_api_path td_api_member(const char *where, const char *key) {
  td_api_path path;
  snprintf(path.text, sizeof path.text, "%.80s%s%.40s", where, where[0] ? "." : "", key);
  return path;
}

td_api_path td_api_item(const char *where, unsigned i) {
  td_api_path path;
  snprintf(path.text, sizeof path.text, "%.110s[%u]", where, i);
  return path;
}

td_status td_api_get_str_at(const cJSON *object, const char *key, const char *where,
                            const char **out, td_api_error *error) {
  td_err err;
  td_status st = td_json_get_str(object, key, out, &err);
  if (st == TD_OK) return st;
  td_api_path at = td_api_member(where, key);
  return td_api_wrong(error, at.text, "must be a string");
}

td_status td_api_get_bool_at(const cJSON *object, const char *key, const char *where, bool *out,
                             td_api_error *error) {
  td_err err;
  td_status st = td_json_get_bool(object, key, out, &err);
  if (st == TD_OK) return st;
  td_api_path at = td_api_member(where, key);
  return td_api_wrong(error, at.text, "must be true or false");
}

td_status td_api_copy(char **out, const char *text, td_api_error *error) {
  *out = strdup(text);
  return *out ? TD_OK : td_api_fail(error, 503, NULL, NULL, "out of memory");
}

static td_budget budget_of(const td_api_defaults *defaults) {
  td_budget budget = TD_API_BUDGET;
  budget.is_canceled = defaults->is_canceled;
  return budget;
}

void td_api_request_free(td_api_request *request) {
  free(request->model);
  free(request->bias);
  for (uint32_t i = 0; i < request->n_text_bias; i++)
    free(request->text_bias[i].text);
  free(request->text_bias);
  td_stops_free(&request->stops);
  td_buf_free(&request->vars);
  td_buf_free(&request->plain_vars);
  td_buf_free(&request->grammar);
  td_grammar_build_close(request->build);
  td_tool_params_free(&request->params);
  free(request->marks);
  for (uint32_t i = 0; i < request->n_images; i++) {
    td_buf_free(&request->images[i].bytes);
    free(request->images[i].where);
  }
  free(request->images);
  for (uint32_t i = 0; i < request->n_callable; i++)
    td_api_tool_free(&request->callable[i]);
  free(request->callable);
  for (uint32_t i = 0; i < request->n_prompts; i++) {
    free(request->prompts[i].text);
    free(request->prompts[i].ids);
  }
  free(request->prompts);
  free(request->suffix);
  free(request->cache_salt);
  memset(request, 0, sizeof *request);
}

// Parses a body that contains \u0000 or lone surrogates again, with U+FFFD in their place. Models
// generate them, and clients send them back in the conversation.
static td_status parse_replaced(cJSON **root, const char *body, size_t len, td_err *err) {
  td_buf copy = TD_BUF_INIT;
  td_err first = *err;
  td_buf_add(&copy, body, len);
  td_status st = td_buf_status(&copy, err);
  if (st == TD_OK && td_json_replace_escapes(copy.data, copy.len)) {
    st = td_json_parse_at_most(root, copy.data, copy.len, TD_JSON_MAX_DEPTH, MAX_VALUES, err);
  } else if (st == TD_OK) {
    *err = first;
    st = first.code;
  }
  td_buf_free(&copy);
  return st;
}

td_status td_api_parse_root(cJSON **root, const char *body, size_t len, td_api_error *error) {
  td_err err;
  td_status st = td_json_parse_at_most(root, body, len, TD_JSON_MAX_DEPTH, MAX_VALUES, &err);
  if (st == TD_EFORMAT && len) st = parse_replaced(root, body, len, &err);
  if (st == TD_ENOMEM) return td_api_fail_err(error, NULL, &err);
  if (st == TD_ELIMIT) return td_api_bad(error, NULL, "the body has %s", err.msg);
  if (st != TD_OK) return td_api_bad(error, NULL, "the body is not valid JSON: %s", err.msg);
  if (!cJSON_IsObject(*root)) return td_api_bad(error, NULL, "the body must be a JSON object");
  return TD_OK;
}

static td_status parse_stream(td_api_request *out, const cJSON *root, td_api_error *error) {
  td_status st = td_api_get_bool(root, "stream", &out->stream, error);
  if (st == TD_OK) st = td_api_get_bool(root, "return_progress", &out->return_progress, error);
  if (st != TD_OK) return st;
  const cJSON *options = td_json_get(root, "stream_options");
  if (!options) return TD_OK;
  if (!cJSON_IsObject(options)) return td_api_wrong(error, "stream_options", "must be an object");
  if (!out->stream)
    return td_api_wrong(error, "stream_options", "is allowed only with stream: true");
  bool is_continuous = false;
  static const char where[] = "stream_options";
  st = td_api_get_bool_at(options, "include_usage", where, &out->include_usage, error);
  if (st == TD_OK)
    st = td_api_get_bool_at(options, "continuous_usage_stats", where, &is_continuous, error);
  out->include_usage_so_far = out->include_usage && is_continuous;
  return st;
}

// max_completion_tokens is the newer name of max_tokens and takes precedence. -1: as many as fit.
static td_status parse_max_tokens(td_api_request *out, const cJSON *root, td_api_error *error) {
  static const char *const names[] = {"max_tokens", "max_completion_tokens"};
  out->max_tokens = out->is_chat ? -1 : DEFAULT_COMPLETION_TOKENS;
  for (size_t i = 0; i < TD_COUNT(names); i++) {
    td_status st = td_api_get_int(root, names[i], -1, INT32_MAX, &out->max_tokens, error);
    if (st != TD_OK) return st;
    if (out->max_tokens == 0 && out->is_chat)
      return td_api_wrong(error, names[i], "must be at least 1, or -1: as many as fit");
  }
  return TD_OK;
}

static td_status parse_ends(td_api_request *out, const cJSON *root, td_api_error *error) {
  bool skips = true;
  td_status st = td_api_get_bool(root, "ignore_eos", &out->ignore_eos, error);
  if (st == TD_OK) st = td_api_get_bool(root, "skip_special_tokens", &skips, error);
  if (st == TD_OK) st = td_api_get_int(root, "min_tokens", 0, INT32_MAX, &out->min_tokens, error);
  out->shows_special = !skips;
  if (st != TD_OK || out->max_tokens < 0 || out->min_tokens <= out->max_tokens) return st;
  return td_api_wrong(error, "min_tokens",
                      "must not be more than the %lld tokens that the answer may have",
                      (long long)out->max_tokens);
}

static td_status parse_cache_salt(td_api_request *out, const cJSON *root, td_api_error *error) {
  static const char key[] = "cache_salt";
  const char *text = NULL;
  td_status st = td_api_get_str(root, key, &text, error);
  if (st != TD_OK || !text) return st;
  if (!text[0]) return td_api_bad(error, key, "cache_salt must not be empty");
  return td_api_copy(&out->cache_salt, text, error);
}

static td_status parse_truncation(td_api_request *out, const cJSON *root, td_api_error *error) {
  static const char key[] = "truncation";
  const char *how = "disabled";
  td_status st = td_api_get_str(root, key, &how, error);
  out->is_cut_to_fit = st == TD_OK && strcmp(how, "auto") == 0;
  if (st != TD_OK || out->is_cut_to_fit || strcmp(how, "disabled") == 0) return st;
  return td_api_bad(error, key, "truncation must be \"auto\" or \"disabled\"");
}

static td_status parse_common(td_api_request *out, const cJSON *root,
                              const td_api_defaults *defaults, td_api_error *error) {
  const char *model = NULL;
  int64_t n = 1;
  td_status st = td_api_get_str(root, "model", &model, error);
  if (st == TD_OK && model && model[0]) st = td_api_copy(&out->model, model, error);
  if (st == TD_OK) st = parse_stream(out, root, error);
  if (st == TD_OK) st = parse_max_tokens(out, root, error);
  if (st == TD_OK) st = td_api_get_int(root, "n", 1, TD_API_MAX_N, &n, error);
  if (st == TD_OK) st = parse_ends(out, root, error);
  if (st == TD_OK) st = td_api_parse_sampling(out, root, defaults, error);
  if (st == TD_OK) st = parse_cache_salt(out, root, error);
  if (st == TD_OK) st = parse_truncation(out, root, error);
  out->n = (uint32_t)n;
  return st;
}

static td_status parse_chat_logprobs(td_api_request *out, const cJSON *root, td_api_error *error) {
  int64_t n_top = -1;
  td_status st = td_api_get_bool(root, "logprobs", &out->logprobs, error);
  if (st == TD_OK) st = td_api_get_int(root, "top_logprobs", 0, TD_WIRE_MAX_TOP, &n_top, error);
  if (st != TD_OK || n_top < 0) return st;
  if (!out->logprobs)
    return td_api_wrong(error, "top_logprobs", "is allowed only with logprobs: true");
  out->sampling.n_top_logprobs = (uint32_t)n_top;
  return TD_OK;
}

static td_status parse_completion_logprobs(td_api_request *out, const cJSON *root,
                                           td_api_error *error) {
  int64_t n_top = -1;
  td_status st = td_api_get_int(root, "logprobs", 0, TD_WIRE_MAX_TOP, &n_top, error);
  if (st != TD_OK || n_top < 0) return st;
  out->logprobs = true;
  out->sampling.n_top_logprobs = (uint32_t)n_top;
  return TD_OK;
}

// Log-probabilities of the prompt's tokens.
static td_status parse_prompt_logprobs(td_api_request *out, const cJSON *root,
                                       td_api_error *error) {
  static const char key[] = "prompt_logprobs";
  out->n_prompt_logprobs = -1;
  td_status st = TD_OK;
  if (!cJSON_IsFalse(td_json_get(root, key)))
    st = td_api_get_int(root, key, 0, TD_WIRE_MAX_TOP, &out->n_prompt_logprobs, error);
  if (st == TD_OK && out->n_prompt_logprobs >= 0 && out->stream)
    st = td_api_bad(error, key, "prompt_logprobs is not allowed with stream: true");
  return st;
}

// best_of choices are computed, and the n likeliest are returned.
static td_status parse_best_of(td_api_request *out, const cJSON *root, td_api_error *error) {
  static const char key[] = "best_of";
  int64_t best_of = out->n;
  td_status st = td_api_get_int(root, key, 1, TD_API_MAX_N, &best_of, error);
  if (st != TD_OK) return st;
  if (best_of < out->n) return td_api_bad(error, key, "best_of must not be less than n");
  if (best_of > out->n && out->stream)
    return td_api_bad(error, key, "best_of above n is not allowed with stream: true");
  out->n_best = out->n;
  out->n = (uint32_t)best_of;
  return TD_OK;
}

td_status td_api_parse_model(char **out, const char *body, size_t len, td_api_error *error) {
  cJSON *root = NULL;
  const char *name = NULL;
  *out = NULL;
  td_status st = td_api_parse_root(&root, body, len, error);
  const char *key = st == TD_OK && !td_json_get(root, "model") ? "name" : "model";
  if (st == TD_OK) st = td_api_get_str(root, key, &name, error);
  if (st == TD_OK && name) st = td_api_copy(out, name, error);
  cJSON_Delete(root);
  return st;
}

// What a receipt does not hold. What constrains an answer is known later.
static td_status parse_receipt(td_api_request *out, const cJSON *root, td_api_error *error) {
  static const char key[] = "receipt";
  td_status st = td_api_get_bool(root, key, &out->receipt, error);
  if (st != TD_OK || !out->receipt) return st;
  const char *other = out->n_bias || out->n_text_bias     ? "logit_bias"
                      : out->dry.last_n                   ? "dry_multiplier"
                      : out->min_tokens                   ? "min_tokens"
                      : out->max_tokens == 0 || out->echo ? "echo, or max_tokens 0"
                                                          : NULL;
  return other ? td_api_bad(error, key, "receipt is not allowed with %s", other) : TD_OK;
}

static td_status refuse_suffix(const cJSON *root, td_api_error *error) {
  const cJSON *suffix = td_json_get(root, "suffix");
  if (!suffix || (cJSON_IsString(suffix) && !suffix->valuestring[0])) return TD_OK;
  return td_api_fail(error, 400, "suffix", "unsupported_parameter",
                     "suffix is not supported in chats, only on /v1/completions");
}

td_status td_api_parse_chat(td_api_request *out, const char *body, size_t len,
                            const td_api_defaults *defaults, td_api_error *error) {
  *out = (td_api_request){.budget = budget_of(defaults), .sees = defaults->sees};
  out->is_chat = true;
  cJSON *root = NULL;
  td_status st = td_api_parse_root(&root, body, len, error);
  if (st == TD_OK) st = refuse_suffix(root, error);
  if (st == TD_OK) st = parse_common(out, root, defaults, error);
  if (st == TD_OK) st = parse_chat_logprobs(out, root, error);
  if (st == TD_OK) st = parse_prompt_logprobs(out, root, error);
  if (st == TD_OK) st = td_api_parse_constraint(out, root, error);
  if (st == TD_OK) st = td_api_refuse_unsupported(root, error);
  bool parallel = true;
  if (st == TD_OK) st = parse_best_of(out, root, error);
  if (st == TD_OK) st = td_api_get_bool(root, "parallel_tool_calls", &parallel, error);
  out->one_call = !parallel;
  if (st == TD_OK) st = td_api_parse_messages(out, root, error);
  if (st == TD_OK) st = td_api_parse_calls(out, root, error);
  if (st == TD_OK) st = parse_receipt(out, root, error);
  cJSON_Delete(root);
  return st;
}

// The text after what is generated, between which and the prompt the model fills in.
static td_status parse_suffix(td_api_request *out, const cJSON *root, td_api_error *error) {
  static const char key[] = "suffix";
  const char *text = NULL;
  td_status st = td_api_get_str(root, key, &text, error);
  if (st != TD_OK || !text || !text[0]) return st;
  if (out->echo) return td_api_bad(error, key, "suffix does not go with echo");
  for (uint32_t i = 0; i < out->n_prompts; i++)
    if (out->prompts[i].ids) return td_api_bad(error, key, "suffix needs a prompt of text");
  return td_api_copy(&out->suffix, text, error);
}

td_status td_api_parse_completion(td_api_request *out, const char *body, size_t len,
                                  const td_api_defaults *defaults, td_api_error *error) {
  *out = (td_api_request){.budget = budget_of(defaults)};
  cJSON *root = NULL;
  td_status st = td_api_parse_root(&root, body, len, error);
  if (st == TD_OK) st = parse_common(out, root, defaults, error);
  if (st == TD_OK) st = parse_completion_logprobs(out, root, error);
  if (st == TD_OK) st = parse_prompt_logprobs(out, root, error);
  if (st == TD_OK) st = td_api_get_bool(root, "echo", &out->echo, error);
  if (st == TD_OK) st = td_api_parse_constraint(out, root, error);
  if (st == TD_OK) st = td_api_refuse_unsupported(root, error);
  if (st == TD_OK) st = parse_best_of(out, root, error);
  if (st == TD_OK) st = td_api_parse_prompt(out, root, "prompt", defaults, error);
  if (st == TD_OK) st = parse_suffix(out, root, error);
  if (st == TD_OK) st = parse_receipt(out, root, error);
  if (st == TD_OK && out->n_prompts * out->n > TD_API_MAX_CHOICES) {
    st = td_api_bad(error, "prompt",
                    "%u prompts with n = %u are more than the %d completions allowed",
                    out->n_prompts, out->n, TD_API_MAX_CHOICES);
  }
  cJSON_Delete(root);
  return st;
}

// What requests about tokens alone begin with; the model may have any name, since nothing is
// computed.
static td_status begin_tokens(td_api_request *out, cJSON **root, const char *body, size_t len,
                              td_api_error *error) {
  *out = (td_api_request){.budget = TD_API_BUDGET, .n = 1};
  const char *model = NULL;
  const td_status st = td_api_parse_root(root, body, len, error);
  return st == TD_OK ? td_api_get_str(*root, "model", &model, error) : st;
}

td_status td_api_parse_tokenize(td_api_request *out, const char *body, size_t len,
                                const td_api_defaults *defaults, td_api_error *error) {
  cJSON *root = NULL;
  td_status st = begin_tokens(out, &root, body, len, error);
  if (st == TD_OK) st = td_api_refuse_unsupported(root, error);
  if (st == TD_OK && td_json_get(root, "messages")) {
    out->is_chat = true;
    out->sees = defaults->sees;
    st = td_api_parse_messages(out, root, error);
  } else if (st == TD_OK) {
    const char *key = td_json_get(root, "content") ? "content" : "prompt";
    st = td_api_parse_prompt(out, root, key, defaults, error);
  }
  cJSON_Delete(root);
  return st;
}

td_status td_api_parse_detokenize(td_api_request *out, const char *body, size_t len,
                                  const td_api_defaults *defaults, td_api_error *error) {
  cJSON *root = NULL;
  td_status st = begin_tokens(out, &root, body, len, error);
  if (st == TD_OK) st = td_api_parse_prompt(out, root, "tokens", defaults, error);
  if (st == TD_OK && (out->n_prompts != 1 || !out->prompts[0].ids))
    st = td_api_wrong(error, "tokens", "must be an array of token ids");
  cJSON_Delete(root);
  return st;
}

// ---- prompts ------------------------------------------------------------------------------------
// A string, a list of strings, a list of token ids, or a list of such lists.

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
