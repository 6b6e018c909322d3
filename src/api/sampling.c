// src/api/sampling.c - parses the sampling parameters and stop conditions of a request.
#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "api/api_impl.h"

// Accepts all of int64: td_json_parse keeps the text of numbers that a double cannot hold.
static td_status parse_seed(td_api_request *out, const cJSON *root, td_api_error *error) {
  const cJSON *seed = td_json_get(root, "seed");
  if (!seed) return TD_OK;
  double value = cJSON_IsNumber(seed) ? seed->valuedouble : NAN;
  int64_t whole;
  if (!(value == floor(value))) return td_api_wrong(error, "seed", "must be an integer");
  if (!td_json_whole(seed, INT64_MIN, INT64_MAX, &whole))
    return td_api_wrong(error, "seed", "must fit into 64 bits, signed");
  out->sampling.seed = (uint64_t)whole;
  out->has_seed = true;
  return TD_OK;
}

// Samplers of other servers that this one lacks: an answer without them would not be what was asked
// for. At the value that turns one off, nothing is asked for.
static td_status refuse_others(const cJSON *root, td_api_error *error) {
  static const struct {
    const char *name;
    double off;
  } others[] = {{"mirostat", 0},
                {"mirostat_mode", 0},
                {"tfs", 1},
                {"tfs_z", 1},
                {"top_a", 0},
                {"dynatemp_range", 0},
                {"smoothing_factor", 0},
                {"epsilon_cutoff", 0},
                {"eta_cutoff", 0},
                {"no_repeat_ngram_size", 0}};
  for (size_t i = 0; i < TD_COUNT(others); i++) {
    const cJSON *value = td_json_get(root, others[i].name);
    if (!cJSON_IsNumber(value) || value->valuedouble == others[i].off) continue;
    return td_api_wrong(error, others[i].name,
                        ": this server does not have this sampler; leave it out, or turn it off "
                        "with %g. There are top_k, top_p, min_p, typical_p, top_n_sigma, "
                        "xtc_probability, dry_multiplier and penalties",
                        others[i].off);
  }
  return TD_OK;
}

static td_status parse_numbers(td_sampling *s, const cJSON *root, td_api_error *error) {
  const struct {
    const char *name;
    double min, max;
    float *out;
  } numbers[] = {{"temperature", 0, 100, &s->temperature},
                 {"top_p", 0, 1, &s->top_p},
                 {"min_p", 0, 1, &s->min_p},
                 {"presence_penalty", -2, 2, &s->presence_penalty},
                 {"frequency_penalty", -2, 2, &s->frequency_penalty},
                 {"repetition_penalty", 0.01, 100, &s->repetition_penalty},
                 {"typical_p", 0, 1, &s->typical_p},
                 {"top_n_sigma", -1, 1000, &s->top_n_sigma},
                 {"xtc_probability", 0, 1, &s->xtc_probability},
                 {"xtc_threshold", 0, 1, &s->xtc_threshold}};
  int64_t top_k = s->top_k;
  td_status st = refuse_others(root, error);
  s->xtc_threshold = 0.1f;
  for (size_t i = 0; i < TD_COUNT(numbers) && st == TD_OK; i++)
    st = td_api_get_float(root, numbers[i].name, numbers[i].min, numbers[i].max, numbers[i].out,
                          error);
  if (st == TD_OK) st = td_api_get_int(root, "top_k", -1, INT32_MAX, &top_k, error);
  if (st != TD_OK) return st;
  if (s->top_n_sigma < 0) s->top_n_sigma = 0;
  s->top_k = top_k > 0 ? (uint32_t)top_k : 0;
  // In the protocol top_p 0 means only the likeliest token, but on the wire 0 disables top_p.
  if (s->top_p == 0) s->top_p = FLT_MIN;
  if (s->min_p >= 1) s->min_p = nextafterf(1, 0);
  return TD_OK;
}

static td_status add_breaker(td_wire_dry *dry, const cJSON *item, const char *where,
                             td_api_error *error) {
  const char *text = cJSON_IsString(item) ? item->valuestring : "";
  const size_t n_bytes = strlen(text) + 1;
  if (n_bytes == 1) return td_api_wrong(error, where, "must be a string that is not empty");
  if (n_bytes > sizeof dry->breakers - dry->n_bytes) {
    return td_api_wrong(error, where,
                        ": the breakers have more than %zu bytes together, each counted with one "
                        "more; leave some out",
                        sizeof dry->breakers);
  }
  memcpy(dry->breakers + dry->n_bytes, text, n_bytes);
  dry->n_bytes += (uint32_t)n_bytes;
  return TD_OK;
}

static td_status parse_breakers(td_wire_dry *dry, const cJSON *root, td_api_error *error) {
  static const char key[] = "dry_sequence_breakers", usual[] = "\n\0:\0\"\0*";
  const cJSON *list = td_json_get(root, key);
  unsigned i = 0;
  td_status st = TD_OK;
  if (!list) {
    memcpy(dry->breakers, usual, sizeof usual);
    dry->n_bytes = sizeof usual;
    return TD_OK;
  }
  cJSON *parsed = NULL;
  if (cJSON_IsString(list)) { // text-generation-webui's form: the array's text, or its items'
    td_buf text = {0};
    const bool is_array = list->valuestring[strspn(list->valuestring, " \n")] == '[';
    td_buf_printf(&text, is_array ? "%s" : "[%s]", list->valuestring);
    td_err err;
    if (!text.failed) td_json_parse_at_most(&parsed, text.data, text.len, 2, 256, &err);
    td_buf_free(&text);
    list = parsed;
  }
  if (!cJSON_IsArray(list)) {
    cJSON_Delete(parsed);
    return td_api_wrong(error, key,
                        "must be an array of strings, or a string that holds one as JSON");
  }
  for (const cJSON *item = list->child; item && st == TD_OK; item = item->next)
    st = add_breaker(dry, item, td_api_item(key, i++).text, error);
  cJSON_Delete(parsed);
  return st;
}

static td_status parse_dry(td_wire_dry *dry, const cJSON *root, td_api_error *error) {
  int64_t allowed = 2, last_n = -1;
  dry->base = 1.75f;
  td_status st = td_api_get_float(root, "dry_multiplier", 0, 100, &dry->multiplier, error);
  if (st == TD_OK) st = td_api_get_float(root, "dry_base", 1, 100, &dry->base, error);
  if (st == TD_OK) st = td_api_get_int(root, "dry_allowed_length", 1, INT32_MAX, &allowed, error);
  if (st == TD_OK) st = td_api_get_int(root, "dry_penalty_last_n", -1, INT32_MAX, &last_n, error);
  if (st == TD_OK) st = parse_breakers(dry, root, error);
  dry->allowed_length = (uint32_t)allowed;
  if (dry->multiplier > 0) dry->last_n = last_n < 0 ? UINT32_MAX : (uint32_t)last_n;
  return st;
}

// A member's name is a token id or, as llama-server has it, a text.
static td_status parse_bias_entry(td_api_request *out, const cJSON *item, uint32_t n_vocab,
                                  td_api_error *error) {
  char *end;
  errno = 0;
  const long long id = strtoll(item->string, &end, 10);
  const bool is_id = item->string[0] >= '0' && item->string[0] <= '9' && !*end;
  if (!item->string[0] || (is_id && (errno || id >= n_vocab))) {
    return td_api_wrong(error, "logit_bias", ": \"%.32s\" is not a token id of this model",
                        item->string);
  }
  if (!cJSON_IsNumber(item) || !(fabs(item->valuedouble) <= 100))
    return td_api_wrong(error, "logit_bias", "must hold numbers between -100 and 100");
  const float value = (float)item->valuedouble;
  if (is_id) {
    out->bias[out->n_bias++] = (td_token_value){.id = (int32_t)id, .value = value};
    return TD_OK;
  }
  td_api_text_bias *text = &out->text_bias[out->n_text_bias++];
  text->value = value;
  return td_api_copy(&text->text, item->string, error);
}

static td_status parse_bias(td_api_request *out, const cJSON *root, uint32_t n_vocab,
                            td_api_error *error) {
  const cJSON *bias = td_json_get(root, "logit_bias");
  if (!bias) return TD_OK;
  if (!cJSON_IsObject(bias)) return td_api_wrong(error, "logit_bias", "must be an object");
  int n = cJSON_GetArraySize(bias);
  if (n == 0) return TD_OK;
  if (n > TD_API_MAX_BIAS)
    return td_api_wrong(error, "logit_bias", "has more than %d entries", TD_API_MAX_BIAS);
  out->bias = calloc(TD_API_MAX_BIAS, sizeof *out->bias);
  out->text_bias = calloc((size_t)n, sizeof *out->text_bias);
  if (!out->bias || !out->text_bias) return td_api_fail(error, 503, NULL, NULL, "out of memory");
  for (const cJSON *item = bias->child; item; item = item->next) {
    td_status st = parse_bias_entry(out, item, n_vocab, error);
    if (st != TD_OK) return st;
  }
  return TD_OK;
}

td_status td_api_tokenize_bias(td_api_request *r, const td_tokenizer *tok, td_api_error *error) {
  td_token_ids ids = {0};
  td_err err;
  td_status st = TD_OK;
  for (uint32_t i = 0; i < r->n_text_bias && st == TD_OK; i++) {
    const td_api_text_bias *b = &r->text_bias[i];
    ids.n = 0;
    st = td_tokenizer_encode(tok, b->text, strlen(b->text), 0, &ids, &err);
    if (st != TD_OK) td_api_fail_err(error, "logit_bias", &err);
    if (st == TD_OK && ids.n > TD_API_MAX_BIAS - r->n_bias)
      st = td_api_wrong(error, "logit_bias", "has more than %d tokens", TD_API_MAX_BIAS);
    for (size_t k = 0; k < ids.n && st == TD_OK; k++)
      r->bias[r->n_bias++] = (td_token_value){.id = ids.ids[k], .value = b->value};
  }
  td_token_ids_free(&ids);
  return st;
}

static td_status add_stop(td_stops *stops, const cJSON *item, const char *where,
                          td_api_error *error) {
  if (!cJSON_IsString(item)) return td_api_wrong(error, where, "must be a string");
  size_t len = strlen(item->valuestring);
  if (len == 0 || len > TD_API_MAX_STOP_BYTES)
    return td_api_wrong(error, where, "must have between 1 and %d bytes", TD_API_MAX_STOP_BYTES);
  if (stops->n == TD_API_MAX_STOPS)
    return td_api_wrong(error, "stop", "has more than %d entries", TD_API_MAX_STOPS);
  td_stop_string *stop = &stops->strings[stops->n];
  td_status st = td_api_copy(&stop->text, item->valuestring, error);
  if (st != TD_OK) return st;
  stop->len = len;
  stops->n++;
  return TD_OK;
}

static td_status parse_stop(td_api_request *out, const cJSON *root, td_api_error *error) {
  const cJSON *stop = td_json_get(root, "stop");
  if (!stop) return TD_OK;
  if (!cJSON_IsArray(stop) && !cJSON_IsString(stop))
    return td_api_wrong(error, "stop", "must be a string or an array of strings");
  unsigned i = 0;
  if (cJSON_IsString(stop)) return add_stop(&out->stops, stop, "stop", error);
  for (const cJSON *item = stop->child; item; item = item->next) {
    td_status st = add_stop(&out->stops, item, td_api_item("stop", i++).text, error);
    if (st != TD_OK) return st;
  }
  return TD_OK;
}

static td_status parse_stop_ids(td_api_request *out, const cJSON *root, uint32_t n_vocab,
                                td_api_error *error) {
  static const char key[] = "stop_token_ids";
  const cJSON *list = td_json_get(root, key);
  if (!list) return TD_OK;
  if (!cJSON_IsArray(list)) return td_api_wrong(error, key, "must be an array");
  for (const cJSON *item = list->child; item; item = item->next) {
    int64_t id;
    if (!td_json_whole(item, 0, (int64_t)n_vocab - 1, &id))
      return td_api_wrong(error, key, "must hold token ids, integers from 0 to %u", n_vocab - 1);
    if (out->n_stop_ids == TD_API_MAX_STOP_IDS)
      return td_api_wrong(error, key, "has more than %d entries", TD_API_MAX_STOP_IDS);
    out->stop_ids[out->n_stop_ids++] = (int32_t)id;
  }
  return TD_OK;
}

td_status td_api_parse_sampling(td_api_request *out, const cJSON *root,
                                const td_api_defaults *defaults, td_api_error *error) {
  td_sampling *s = &out->sampling;
  s->temperature = defaults->temperature;
  s->top_p = defaults->top_p;
  s->top_k = defaults->top_k;
  s->repetition_penalty = 1;
  td_status st = parse_numbers(s, root, error);
  if (st == TD_OK) st = parse_dry(&out->dry, root, error);
  if (st == TD_OK) st = parse_seed(out, root, error);
  if (st == TD_OK) st = parse_bias(out, root, defaults->n_vocab, error);
  if (st == TD_OK) st = parse_stop(out, root, error);
  if (st == TD_OK) st = parse_stop_ids(out, root, defaults->n_vocab, error);
  return st;
}
