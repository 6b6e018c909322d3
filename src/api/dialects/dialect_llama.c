// src/api/dialects/dialect_llama.c - llama-server's /completion and /infill, which editors use. A
// request is translated to the body of /v1/completions.
#include <string.h>

#include "api/dialects/dialect_impl.h"
#include "api/infill.h"

#define MAX_FILES 256

// ---- request -----------------------------------------------------------------------------------

// Translated, or without a meaning here.
static const char own[] =
    "prompt n_predict max_tokens max_completion_tokens n_probs logprobs seed repeat_penalty "
    "logit_bias stop grammar json_schema temperature input_prefix input_suffix input_extra suffix "
    "response_fields return_tokens n best_of echo stream_options t_max_predict_ms n_indent "
    "cache_prompt top_logprobs";

static void pass(td_json_writer *w, const cJSON *root, const char *from, const char *to) {
  const cJSON *item = td_json_get(root, from);
  if (item) td_api_write_json(w, to, item);
}

// [[id, bias or false], ...] beside the object that OpenAI has.
static td_status write_bias(td_json_writer *w, const cJSON *bias, td_api_error *error) {
  static const char key[] = "logit_bias";
  unsigned i = 0;
  if (!cJSON_IsArray(bias)) {
    if (bias) td_api_write_json(w, key, bias);
    return TD_OK;
  }
  td_jw_begin_object(w, key);
  for (const cJSON *pair = bias->child; pair; pair = pair->next) {
    const cJSON *id = cJSON_IsArray(pair) ? pair->child : NULL, *value = id ? id->next : NULL;
    const td_api_path at = td_api_item(key, i++);
    char name[24];
    if (!(cJSON_IsNumber(id) || cJSON_IsString(id)) ||
        !(cJSON_IsNumber(value) || cJSON_IsFalse(value))) {
      return td_api_wrong(error, at.text,
                          "must be a pair of a token id or a text and a number or false");
    }
    if (cJSON_IsNumber(id)) snprintf(name, sizeof name, "%.0f", id->valuedouble);
    td_jw_double(w, cJSON_IsString(id) ? id->valuestring : name,
                 cJSON_IsFalse(value) ? -100 : value->valuedouble);
  }
  td_jw_end_object(w);
  return TD_OK;
}

static void write_stop(td_json_writer *w, const cJSON *stop) {
  if (!cJSON_IsArray(stop)) {
    if (stop && !(cJSON_IsString(stop) && !stop->valuestring[0]))
      td_api_write_json(w, "stop", stop);
    return;
  }
  td_jw_begin_array(w, "stop");
  for (const cJSON *item = stop->child; item; item = item->next)
    if (!cJSON_IsString(item) || item->valuestring[0]) td_api_write_json(w, NULL, item);
  td_jw_end_array(w);
}

static td_status write_numbers(td_json_writer *w, const cJSON *root, td_dialect_state *s,
                               td_api_error *error) {
  int64_t n_predict = -1, n_probs = 0, max_ms = 0;
  float temperature = -1;
  bool returns_tokens = false;
  static const char *const lengths[] = {"max_tokens", "n_predict"};
  td_status st = TD_OK;
  for (size_t i = 0; i < TD_COUNT(lengths) && st == TD_OK; i++)
    st = td_api_get_int(root, lengths[i], INT32_MIN, INT32_MAX, &n_predict, error);
  if (st == TD_OK) st = td_api_get_int(root, "n_probs", 0, INT32_MAX, &n_probs, error);
  if (st == TD_OK) st = td_api_get_bool(root, "return_tokens", &returns_tokens, error);
  if (st == TD_OK)
    st = td_api_get_int(root, "t_max_predict_ms", INT32_MIN, INT32_MAX, &max_ms, error);
  if (st == TD_OK) st = td_api_get_float(root, "temperature", -100, 100, &temperature, error);
  if (st != TD_OK) return st;
  td_jw_int(w, "max_tokens", n_predict < 0 ? -1 : n_predict);
  if (td_json_get(root, "temperature"))
    td_jw_double(w, "temperature", temperature > 0 ? (double)temperature : 0);
  if (n_probs || returns_tokens)
    td_jw_int(w, "logprobs", n_probs < TD_WIRE_MAX_TOP ? n_probs : TD_WIRE_MAX_TOP);
  s->returns_tokens = returns_tokens;
  s->n_probs = (uint32_t)n_probs;
  s->max_predict_ns = max_ms > 0 ? (uint64_t)max_ms * 1000000 : 0;
  return TD_OK;
}

// What both endpoints have in common.
static td_status write_common(td_json_writer *w, const cJSON *root, td_dialect_state *s,
                              td_api_error *error) {
  const cJSON *seed = td_json_get(root, "seed"), *grammar = td_json_get(root, "grammar");
  const cJSON *schema = td_json_get(root, "json_schema");
  const cJSON *fields = td_json_get(root, "response_fields");
  if (fields && !cJSON_IsArray(fields))
    return td_api_wrong(error, "response_fields", "must be an array of strings");
  s->is_text = true;
  td_dialect_pass(w, root, own);
  if (seed && !(cJSON_IsNumber(seed) && seed->valuedouble < 0)) pass(w, root, "seed", "seed");
  if (grammar && !(cJSON_IsString(grammar) && !grammar->valuestring[0]))
    pass(w, root, "grammar", "grammar");
  if (schema && !(cJSON_IsObject(schema) && !schema->child))
    pass(w, root, "json_schema", "json_schema");
  td_dialect_move(w, s, root, "", "repeat_penalty", "repetition_penalty");
  td_dialect_note(s, "max_tokens", td_json_get(root, "n_predict") ? "n_predict" : "max_tokens");
  td_status st = write_numbers(w, root, s, error);
  if (st == TD_OK) st = write_bias(w, td_json_get(root, "logit_bias"), error);
  if (fields && fields->child) {
    td_json_writer kept = TD_JSON_WRITER(&s->fields);
    td_api_write_json(&kept, NULL, fields);
  }
  return st;
}

static td_status translate_completion(td_buf *out, const cJSON *root, td_dialect_state *s,
                                      td_api_error *error) {
  const cJSON *prompt = td_json_get(root, "prompt");
  td_json_writer w = TD_JSON_WRITER(out);
  if (!prompt) {
    const bool is_chat = td_json_get(root, "messages");
    return td_api_wrong(error, "prompt", "is missing%s",
                        is_chat ? "; messages are what /v1/chat/completions takes" : "");
  }
  // A list of one prompt is that prompt.
  const char *where = "prompt";
  if (cJSON_IsArray(prompt) && prompt->child && !cJSON_IsNumber(prompt->child)) {
    if (prompt->child->next) {
      return td_api_wrong(error, "prompt",
                          "must be a string or an array of token ids here; /v1/completions takes "
                          "several prompts at once");
    }
    prompt = prompt->child;
    where = "prompt[0]";
  }
  const td_api_path inner = td_api_member(where, "prompt_string");
  if (cJSON_IsObject(prompt)) {
    const cJSON *data = td_json_get(prompt, "multimodal_data");
    const td_api_path at = td_api_member(where, "multimodal_data");
    if (data && data->child)
      return td_api_wrong(error, at.text, "is not supported: /v1/chat/completions takes images");
    prompt = td_json_get(prompt, "prompt_string");
    where = inner.text;
  }
  if (!prompt) return td_api_wrong(error, where, "is missing");
  td_dialect_note(s, "prompt", where);
  td_jw_begin_object(&w, NULL);
  td_status st = write_common(&w, root, s, error);
  write_stop(&w, td_json_get(root, "stop"));
  td_api_write_json(&w, "prompt", prompt);
  td_jw_end_object(&w);
  if (cJSON_IsString(prompt)) td_buf_str(&s->prompt, prompt->valuestring);
  return st;
}

static td_status get_files(const cJSON *extra, td_infill_file *files, uint32_t *n,
                           td_api_error *error) {
  static const char key[] = "input_extra";
  *n = 0;
  unsigned i = 0;
  if (extra && !cJSON_IsArray(extra)) return td_api_wrong(error, key, "must be an array");
  for (const cJSON *item = extra ? extra->child : NULL; item; item = item->next) {
    const td_api_path at = td_api_item(key, i++), inner = td_api_member(at.text, "text");
    const char *text = NULL, *name = "tmp";
    td_status st = td_api_get_str_at(item, "text", at.text, &text, error);
    if (st == TD_OK) st = td_api_get_str_at(item, "filename", at.text, &name, error);
    if (st != TD_OK) return st;
    if (!text) return td_api_wrong(error, inner.text, "is missing");
    if (*n == MAX_FILES) return td_api_wrong(error, key, "has more than %d entries", MAX_FILES);
    files[(*n)++] = (td_infill_file){.name = name, .text = text};
  }
  return TD_OK;
}

// Tokens that begin another part of such a prompt end the middle.
static void write_infill_stop(td_json_writer *w, const cJSON *stop, const td_infill_tokens *t) {
  const char *const ends[] = {t->before, t->after, t->fill, t->repo, t->file};
  td_jw_begin_array(w, "stop");
  if (cJSON_IsString(stop) && stop->valuestring[0]) td_jw_str(w, NULL, stop->valuestring);
  for (const cJSON *item = cJSON_IsArray(stop) ? stop->child : NULL; item; item = item->next)
    if (!cJSON_IsString(item) || item->valuestring[0]) td_api_write_json(w, NULL, item);
  for (size_t i = 0; i < TD_COUNT(ends); i++)
    if (ends[i]) td_jw_str(w, NULL, ends[i]);
  td_jw_end_array(w);
}

static td_status encode_infill(td_token_ids *ids, const cJSON *root, const td_infill_tokens *t,
                               td_dialect_state *s, td_api_error *error) {
  const char *before = "", *after = "", *prompt = "";
  td_infill_file files[MAX_FILES];
  td_infill f = {.files = files};
  int64_t n_predict = 0;
  td_err err;
  td_status st = td_api_get_str(root, "input_prefix", &before, error);
  if (st == TD_OK) st = td_api_get_str(root, "input_suffix", &after, error);
  if (st == TD_OK) st = td_api_get_str(root, "prompt", &prompt, error);
  if (st == TD_OK) st = get_files(td_json_get(root, "input_extra"), files, &f.n_files, error);
  if (st == TD_OK) st = td_api_get_int(root, "n_predict", INT32_MIN, INT32_MAX, &n_predict, error);
  if (st != TD_OK) return st;
  td_buf text = TD_BUF_INIT; // before the cursor
  td_buf_str(&text, before);
  td_buf_str(&text, prompt);
  f.before = td_buf_text(&text);
  f.n_before = text.len;
  f.after = after;
  f.n_after = strlen(after);
  const uint64_t kept = 64 + (n_predict > 0 ? (uint64_t)n_predict : 256); // for answer and marks
  ids->most = s->n_ctx;
  st = td_buf_status(&text, &err);
  if (st == TD_OK)
    st = td_infill_encode(s->chat, t, &f, kept < s->n_ctx ? s->n_ctx - kept : 0, ids, &err);
  td_buf_free(&text);
  return st == TD_OK ? st : td_api_fail_err(error, "input_prefix", &err);
}

void td_dialect_write_prompt(td_json_writer *w, const td_token_ids *ids) {
  td_jw_begin_array(w, "prompt");
  for (size_t i = 0; i < ids->n; i++)
    td_jw_int(w, NULL, ids->ids[i]);
  td_jw_end_array(w);
}

static td_status translate_infill(td_buf *out, const cJSON *root, td_dialect_state *s,
                                  td_api_error *error) {
  const td_infill_tokens *tokens = td_infill_find(s->chat);
  td_json_writer w = TD_JSON_WRITER(out);
  td_token_ids ids = {0};
  if (!tokens) {
    return td_api_fail(error, 501, NULL, "not_supported",
                       "infill is not supported by this model: " TD_INFILL_NONE);
  }
  td_status st = encode_infill(&ids, root, tokens, s, error);
  if (st == TD_OK && ids.n_cut) {
    const size_t n = ids.n + ids.n_cut;
    st = td_api_fail(error, 400, "input_prefix", "context_length_exceeded",
                     "input_prefix, prompt and input_suffix have %zu tokens together, and the "
                     "context holds %u: send fewer lines",
                     n, s->n_ctx);
    error->n_prompt_tokens = (int64_t)n;
    error->n_ctx = s->n_ctx;
  }
  if (st == TD_OK) {
    td_jw_begin_object(&w, NULL);
    st = write_common(&w, root, s, error);
    write_infill_stop(&w, td_json_get(root, "stop"), tokens);
    td_dialect_note(s, "prompt", "input_prefix");
    td_dialect_write_prompt(&w, &ids);
    td_jw_end_object(&w);
  }
  td_token_ids_free(&ids);
  return st;
}

// ---- answer ------------------------------------------------------------------------------------

static void write_tokens(td_json_writer *w, const td_dialect_state *s, size_t first, size_t last) {
  td_jw_begin_array(w, "tokens");
  for (size_t i = first; s->returns_tokens && i < last; i++)
    td_jw_int(w, NULL, s->answer->tokens[i].token.id);
  td_jw_end_array(w);
  if (s->n_probs) {
    td_api_write_token_logprobs(w, "completion_probabilities", s->head, s->answer, first, last,
                                true);
  }
}

static const char *stop_type(const td_dialect_end *end) {
  if (strcmp(end->finish_reason, "length") == 0) return "limit";
  return end->answer->stopped ? "word" : "eos";
}

static void write_end(td_json_writer *w, const td_dialect_state *s, const td_dialect_end *end) {
  const td_buf *text = &end->answer->text;
  const char *word = td_dialect_stop_string(end->answer);
  const uint64_t n_prompt = end->usage->n_prompt, n_output = end->usage->n_output;
  td_jw_add(w,
            "'stop': true, 'model': %s, 'tokens_predicted': %lu, 'tokens_evaluated': %lu, "
            "'generation_settings': {'n_ctx': %u}, 'prompt': %p, 'has_new_line': %i, "
            "'truncated': false, 'stop_type': %s, 'stopping_word': %s",
            s->head->model, n_output, n_prompt, s->n_ctx, &s->prompt,
            text->len && memchr(text->data, '\n', text->len), stop_type(end), word ? word : "");
  td_jw_int(w, "tokens_cached", (int64_t)(n_prompt + n_output));
  td_api_write_timings(w, end->timings);
}

// Of the answer only the members that response_fields names, by path.
static void write_fields(td_buf *out, const td_buf *whole, const td_buf *fields) {
  cJSON *all = cJSON_ParseWithLength(td_buf_text(whole), whole->len);
  cJSON *paths = cJSON_ParseWithLength(td_buf_text(fields), fields->len);
  td_json_writer w = TD_JSON_WRITER(out);
  if (!all || !paths) out->failed = true;
  td_jw_begin_object(&w, NULL);
  for (const cJSON *path = all && paths ? paths->child : NULL; path; path = path->next) {
    const cJSON *at = cJSON_IsString(path) ? all : NULL;
    char key[64];
    for (const char *rest = at ? path->valuestring : ""; at && rest;) {
      const size_t n = strcspn(rest, "/");
      snprintf(key, sizeof key, "%.*s", n < sizeof key ? (int)n : 0, rest);
      at = td_json_get(at, key);
      rest = rest[n] ? rest + n + 1 : NULL;
    }
    if (at) td_api_write_json(&w, path->valuestring, at);
  }
  td_jw_end_object(&w);
  cJSON_Delete(all);
  cJSON_Delete(paths);
}

static void write_final(td_buf *out, const td_dialect_state *s, const char *content, size_t len,
                        size_t n_tokens, const td_dialect_end *end) {
  td_buf text = TD_BUF_INIT;
  td_buf *to = s->fields.len ? &text : out;
  td_json_writer w = TD_JSON_WRITER(to);
  td_jw_add(&w, "{'index': 0");
  td_jw_str_len(&w, "content", content, len);
  write_tokens(&w, s, 0, n_tokens);
  td_jw_int(&w, "id_slot", 0);
  write_end(&w, s, end);
  td_jw_end_object(&w);
  if (s->fields.len) write_fields(out, &text, &s->fields);
  out->failed |= text.failed;
  td_buf_free(&text);
}

static void begin(td_buf *out, td_dialect_state *s, const td_api_usage *usage) {
  (void)out;
  s->n_prompt = usage->n_prompt;
}

static void delta_of(td_buf *out, td_dialect_state *s, const td_delta *delta) {
  td_buf_str(out, "data: ");
  td_json_writer w = TD_JSON_WRITER(out);
  td_jw_add(&w, "{'index': 0, 'content': %p", &delta->content);
  write_tokens(&w, s, s->piece.first, s->piece.last);
  td_jw_add(&w, "'stop': false, 'id_slot': 0, 'tokens_predicted': %u, 'tokens_evaluated': %lu}",
            s->answer->n_tokens, s->n_prompt);
  td_buf_str(out, "\n\n");
}

static void end_of(td_buf *out, td_dialect_state *s, const td_dialect_end *end) {
  td_buf_str(out, "data: ");
  write_final(out, s, "", 0, 0, end);
  td_buf_str(out, "\n\n");
}

static void whole(td_buf *out, td_dialect_state *s, const td_delta *message,
                  const td_dialect_end *end) {
  write_final(out, s, td_buf_text(&message->content), message->content.len,
              td_api_n_shown(end->answer), end);
}

static const char *type_of(const td_api_error *error) {
  if (error->n_ctx) return "exceed_context_size_error";
  switch (error->status) {
  case 401: return "authentication_error";
  case 403: return "permission_error";
  case 404: return "not_found_error";
  case 501: return "not_supported_error";
  case 503: return "unavailable_error";
  default: return error->status >= 500 ? "server_error" : "invalid_request_error";
  }
}

static void write_error(td_buf *out, const td_api_error *error, bool in_stream) {
  if (in_stream) td_buf_str(out, "data: ");
  td_json_writer w = TD_JSON_WRITER(out);
  td_jw_add(&w, "{'error': {'code': %d, 'message': %s, 'type': %s", error->status, error->message,
            type_of(error));
  if (error->n_ctx)
    td_jw_add(&w, "'n_prompt_tokens': %ld, 'n_ctx': %ld", error->n_prompt_tokens, error->n_ctx);
  td_jw_add(&w, "}}");
  if (in_stream) td_buf_str(out, "\n\n");
}

// Both answer alike.
#define DIALECT(name)                                                                              \
  const td_dialect td_dialect_##name = {.translate = translate_##name,                             \
                                        .begin = begin,                                            \
                                        .delta = delta_of,                                         \
                                        .end = end_of,                                             \
                                        .whole = whole,                                            \
                                        .error = write_error,                                      \
                                        .has_logprobs = true};
DIALECT(completion)
DIALECT(infill)
