// src/api/dialects/dialect_ollama.c - Ollama's /api/chat and /api/generate. A stream is one JSON
// object a line.
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "api/dialects/dialect_impl.h"
#include "api/dialects/go_template.h"
#include "api/infill.h"
#include "base/str.h"

// ---- request -----------------------------------------------------------------------------------

static const char own[] =
    "messages options format stream keep_alive prompt system template context raw suffix images "
    "logprobs top_logprobs";

static void write_options(td_json_writer *w, td_dialect_state *s, const cJSON *root) {
  static const char
      key[] = "options",
      passed[] =
          "temperature top_k top_p min_p typical_p top_n_sigma xtc_probability xtc_threshold "
          "dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers "
          "mirostat "
          "tfs_z seed stop presence_penalty frequency_penalty";
  const cJSON *options = td_json_get(root, key), *most = td_json_get(options, "num_predict");
  if (cJSON_IsNumber(most) && most->valuedouble <= 0) // -1, -2: no limit
    td_jw_int(w, "max_tokens", -1);
  else
    td_dialect_move(w, s, root, key, "num_predict", "max_tokens");
  td_dialect_move(w, s, root, key, "repeat_penalty", "repetition_penalty");
  for (const cJSON *item = options ? options->child : NULL; item; item = item->next)
    if (td_is_word(passed, item->string))
      td_dialect_move(w, s, root, key, item->string, item->string);
}

// "json", or a schema.
static void write_format(td_json_writer *w, td_dialect_state *s, const cJSON *format) {
  if (!format || (cJSON_IsString(format) && !format->valuestring[0])) return;
  td_dialect_note(s, "response_format", "format");
  td_dialect_note(s, "response_format.schema", "format");
  td_jw_add(w, "'response_format': {'type': 'json_object'");
  if (cJSON_IsObject(format)) td_api_write_json(w, "schema", format);
  td_jw_end_object(w);
}

// Members that are translated rather than passed on, and so are not checked as chat's are.
static td_status check_types(const cJSON *root, td_api_error *error) {
  static const td_member_type members[] = {
      {"options", "an object", cJSON_Object},
      {"messages", "an array", cJSON_Array},
      {"prompt", "a string", cJSON_String},
      {"system", "a string", cJSON_String},
      {"template", "a string", cJSON_String},
      {"suffix", "a string", cJSON_String},
      {"raw", "true or false", cJSON_True | cJSON_False},
      {"stream", "true or false", cJSON_True | cJSON_False},
      {"format", "\"json\" or a schema", cJSON_String | cJSON_Object},
      {"think", "true, false or a string", cJSON_True | cJSON_False | cJSON_String}};
  const cJSON *format = td_json_get(root, "format");
  td_status st = td_dialect_check_types(root, members, TD_COUNT(members), error);
  if (st != TD_OK || !cJSON_IsString(format)) return st;
  if (!format->valuestring[0] || strcmp(format->valuestring, "json") == 0) return TD_OK;
  return td_api_wrong(error, "format", "must be \"json\" or a schema");
}

static void write_common(td_json_writer *w, td_dialect_state *s, const cJSON *root) {
  td_dialect_pass(w, root, own);
  td_jw_bool(w, "stream", !cJSON_IsFalse(td_json_get(root, "stream")));
  write_options(w, s, root);
  write_format(w, s, td_json_get(root, "format"));
}

static td_status check_images(const cJSON *object, bool sees, const char *where,
                              td_api_error *error) {
  const cJSON *images = td_json_get(object, "images");
  const td_api_path at = td_api_member(where, "images");
  if (!cJSON_IsArray(images) || !images->child || sees) return TD_OK;
  return td_api_wrong(error, at.text, ": images are not supported");
}

// Images come before what is said of them.
static void write_seen(td_json_writer *w, td_dialect_state *s, const cJSON *images,
                       const char *text, const char *chat, const char *where) {
  const td_api_path at = td_api_member(chat, "content"), from = td_api_member(where, "images");
  unsigned i = 0;
  td_jw_begin_array(w, "content");
  for (const cJSON *image = images->child; image; image = image->next, i++) {
    td_dialect_note(s, td_api_item(at.text, i).text, td_api_item(from.text, i).text);
    td_jw_add(w, "{'type': 'image'");
    td_api_write_json(w, "data", image);
    td_jw_end_object(w);
  }
  if (text[0]) td_jw_add(w, "{'type': 'text', 'text': %s}", text);
  td_jw_end_array(w);
}

static void write_message(td_json_writer *w, td_dialect_state *s, const cJSON *message,
                          const char *where) {
  static const char own_names[] = "thinking images tool_name content";
  const cJSON *content = td_json_get(message, "content"), *images = td_json_get(message, "images");
  const cJSON *thinking = td_json_get(message, "thinking");
  const cJSON *name = td_json_get(message, "tool_name");
  td_jw_begin_object(w, NULL);
  td_dialect_pass(w, message, own_names);
  const bool has_images = cJSON_IsArray(images) && images->child &&
                          (!content || cJSON_IsString(content));
  if (has_images && s->sees) {
    write_seen(w, s, images, content ? content->valuestring : "", where, where);
  } else if (has_images) {
    td_buf text = TD_BUF_INIT;
    if (content) td_buf_str(&text, content->valuestring);
    td_api_add_omitted(&text, "image");
    td_jw_buf(w, "content", &text);
    td_buf_free(&text);
  } else if (content) {
    td_api_write_json(w, "content", content);
  }
  if (thinking) {
    td_dialect_note(s, td_api_member(where, "reasoning_content").text,
                    td_api_member(where, "thinking").text);
    td_api_write_json(w, "reasoning_content", thinking);
  }
  if (name && !td_json_get(message, "name")) {
    td_dialect_note(s, td_api_member(where, "name").text, td_api_member(where, "tool_name").text);
    td_api_write_json(w, "name", name);
  }
  td_jw_end_object(w);
}

// Log-probabilities of the answer: in the form of chat's request, or of completions'.
static td_status write_logprobs(td_json_writer *w, const cJSON *root, bool is_text,
                                td_api_error *error) {
  bool wanted = false;
  int64_t n_top = 0;
  td_status st = td_api_get_bool(root, "logprobs", &wanted, error);
  if (st == TD_OK) st = td_api_get_int(root, "top_logprobs", 0, TD_WIRE_MAX_TOP, &n_top, error);
  if (st != TD_OK || (!wanted && !n_top)) return st;
  if (is_text)
    td_jw_int(w, "logprobs", n_top);
  else
    td_jw_add(w, "'logprobs': true, 'top_logprobs': %ld", n_top);
  return TD_OK;
}

static td_status translate_chat(td_buf *out, const cJSON *root, td_dialect_state *state,
                                td_api_error *error) {
  const cJSON *messages = td_json_get(root, "messages");
  td_json_writer w = TD_JSON_WRITER(out);
  td_status st = check_types(root, error);
  if (st != TD_OK) return st;
  td_jw_begin_object(&w, NULL);
  write_common(&w, state, root);
  st = write_logprobs(&w, root, false, error);
  unsigned i = 0;
  const cJSON *asked = td_api_asked(messages);
  td_jw_begin_array(&w, "messages");
  for (const cJSON *m = messages ? messages->child : NULL; m && st == TD_OK; m = m->next) {
    const td_api_path where = td_api_item("messages", i++);
    if (m == asked) st = check_images(m, state->sees, where.text, error);
    if (cJSON_IsObject(m))
      write_message(&w, state, m, where.text);
    else
      td_api_write_json(&w, NULL, m);
  }
  td_jw_add(&w, "]}");
  return st;
}

// The prompt of /v1/completions for what goes to the model without its chat template: what is
// around the cursor, the text as it is, or rendered by the request's own template.
static td_status write_prompt(td_json_writer *w, const cJSON *root, const td_dialect_state *s,
                              td_api_error *error) {
  const char *prompt = "", *suffix = "", *template = "", *system = "";
  td_err err;
  td_status st = td_api_get_str(root, "prompt", &prompt, error);
  if (st == TD_OK) st = td_api_get_str(root, "suffix", &suffix, error);
  if (st == TD_OK) st = td_api_get_str(root, "template", &template, error);
  if (st == TD_OK) st = td_api_get_str(root, "system", &system, error);
  if (st != TD_OK) return st;
  const bool is_raw = cJSON_IsTrue(td_json_get(root, "raw"));
  if (template[0] && !is_raw) {
    td_buf text = TD_BUF_INIT;
    const td_go_vars vars = {.system = system, .prompt = prompt, .suffix = suffix};
    st = td_go_render(&text, template, &vars, &err);
    td_jw_buf(w, "prompt", &text);
    td_buf_free(&text);
    if (st == TD_ENOMEM) return td_api_fail_err(error, "template", &err);
    return st == TD_OK ? st : td_api_wrong(error, "template", ": %s", err.msg);
  }
  if (!suffix[0]) {
    td_jw_str(w, "prompt", prompt);
    return TD_OK;
  }
  const td_infill_tokens *tokens = td_infill_find(s->chat);
  const td_infill around = {
      .before = prompt, .n_before = strlen(prompt), .after = suffix, .n_after = strlen(suffix)};
  td_token_ids ids = {0};
  if (!tokens)
    return td_api_bad(error, "suffix", "the model does not support insert: " TD_INFILL_NONE);
  st = td_infill_encode(s->chat, tokens, &around, 0, &ids, &err);
  td_dialect_write_prompt(w, &ids);
  td_token_ids_free(&ids);
  return st == TD_OK ? st : td_api_fail_err(error, "suffix", &err);
}

static bool has_text(const cJSON *root, const char *key) {
  const cJSON *item = td_json_get(root, key);
  return cJSON_IsString(item) && item->valuestring[0];
}

static void write_messages(td_json_writer *w, td_dialect_state *s, const cJSON *root) {
  static const char *const roles[][2] = {{"system", "system"}, {"user", "prompt"}};
  const cJSON *images = td_json_get(root, "images");
  unsigned n = 0; // messages before this one
  td_jw_begin_array(w, "messages");
  for (size_t i = 0; i < TD_COUNT(roles); i++) {
    if (i == 0 && !has_text(root, roles[i][1])) continue;
    td_jw_add(w, "{'role': %s", roles[i][0]);
    const char *text = td_json_get(root, roles[i][1])->valuestring;
    if (i == 1 && cJSON_IsArray(images) && images->child)
      write_seen(w, s, images, text, td_api_item("messages", n).text, "");
    else
      td_jw_str(w, "content", text);
    td_jw_end_object(w);
    n++;
  }
  td_jw_end_array(w);
}

static td_status translate_generate(td_buf *out, const cJSON *root, td_dialect_state *state,
                                    td_api_error *error) {
  const cJSON *prompt = td_json_get(root, "prompt");
  td_json_writer w = TD_JSON_WRITER(out);
  td_status st = check_types(root, error);
  const bool is_text = cJSON_IsTrue(td_json_get(root, "raw")) || has_text(root, "suffix") ||
                       has_text(root, "template");
  if (st == TD_OK) st = check_images(root, state->sees && !is_text, "", error);
  if (st != TD_OK) return st;
  if (!prompt && !is_text) return td_api_wrong(error, "prompt", "is missing");
  state->is_text = is_text;
  td_jw_begin_object(&w, NULL);
  write_common(&w, state, root);
  st = write_logprobs(&w, root, is_text, error);
  if (is_text && !td_json_get(td_json_get(root, "options"), "num_predict"))
    td_jw_int(&w, "max_tokens", -1);
  if (st == TD_OK && is_text) {
    st = write_prompt(&w, root, state, error);
  } else if (st == TD_OK) {
    td_dialect_note(state, "messages", "prompt");
    write_messages(&w, state, root);
  }
  td_jw_end_object(&w);
  return st;
}

// ---- loading -----------------------------------------------------------------------------------

// A duration as Go writes it, 1h30m, 300ms, or seconds; negative: for ever. False: it is neither.
static bool parse_duration(const char *text, double *out_ms) {
  static const struct {
    const char *name;
    double ms;
  } units[] = {{"ms", 1}, {"us", 1e-3}, {"ns", 1e-6}, {"h", 3600e3}, {"m", 60e3}, {"s", 1e3}};
  const bool is_negative = text[0] == '-';
  double ms = 0;
  text += is_negative || text[0] == '+';
  if (!*text) return false;
  while (*text) {
    char *end;
    if (*text != '.' && (*text < '0' || *text > '9')) return false;
    const double value = strtod(text, &end);
    size_t i = 0;
    while (i < TD_COUNT(units) && strncmp(end, units[i].name, strlen(units[i].name)) != 0)
      i++;
    if (i == TD_COUNT(units) && *end) return false;
    ms += value * (i < TD_COUNT(units) ? units[i].ms : 1e3);
    text = end + (i < TD_COUNT(units) ? strlen(units[i].name) : 0);
  }
  *out_ms = is_negative ? -ms : ms;
  return isfinite(ms);
}

static td_status parse_keep_alive(td_dialect_load *out, const cJSON *root, td_api_error *error) {
  static const char key[] = "keep_alive";
  const cJSON *item = td_json_get(root, key);
  double ms = 0;
  if (!item) return TD_OK;
  bool ok = cJSON_IsNumber(item) || cJSON_IsString(item);
  if (cJSON_IsNumber(item)) ms = item->valuedouble * 1e3;
  if (cJSON_IsString(item)) ok = parse_duration(item->valuestring, &ms);
  if (!ok || !isfinite(ms)) {
    return td_api_bad(error, key,
                      "keep_alive must be a number of seconds, or a duration such as "
                      "\"5m\"; negative: for ever");
  }
  out->has_keep = true;
  out->keep_ms = ms < 0 ? -1 : ms < 1e15 ? (int64_t)ceil(ms) : (int64_t)1e15;
  return TD_OK;
}

static td_status peek_chat(td_dialect_load *out, const cJSON *root, td_api_error *error) {
  const cJSON *messages = td_json_get(root, "messages");
  out->is_empty = !messages || (cJSON_IsArray(messages) && !messages->child);
  return parse_keep_alive(out, root, error);
}

static td_status peek_generate(td_dialect_load *out, const cJSON *root, td_api_error *error) {
  const cJSON *prompt = td_json_get(root, "prompt"), *images = td_json_get(root, "images");
  out->is_empty = (!prompt || (cJSON_IsString(prompt) && !prompt->valuestring[0])) &&
                  !has_text(root, "suffix") && !(images && images->child);
  return parse_keep_alive(out, root, error);
}

// ---- answer ------------------------------------------------------------------------------------

static td_json_writer begin_line(td_buf *out, const td_dialect_state *s) {
  char when[40];
  struct timespec now;
  struct tm tm;
  clock_gettime(CLOCK_REALTIME, &now);
  gmtime_r(&now.tv_sec, &tm);
  size_t n = strftime(when, sizeof when, "%Y-%m-%dT%H:%M:%S", &tm);
  snprintf(when + n, sizeof when - n, ".%06ldZ", now.tv_nsec / 1000);
  td_json_writer w = TD_JSON_WRITER(out);
  td_jw_add(&w, "{'model': %s, 'created_at': %s", s->head->model, when);
  return w;
}

// A call that is not whole has no arguments that could be written.
static void write_calls(td_json_writer *w, const td_dialect_state *s, uint32_t first,
                        uint32_t last) {
  bool is_begun = false;
  for (uint32_t i = first; i < last; i++) {
    const td_tool_call *call = &s->parts->calls[i];
    if (!call->is_whole) continue;
    if (!is_begun) td_jw_begin_array(w, "tool_calls");
    is_begun = true;
    td_jw_add(w, "{'function': {'name': %s", call->name);
    td_jw_raw(w, "arguments", td_buf_text(&call->arguments));
    td_jw_add(w, "}}");
  }
  if (is_begun) td_jw_end_array(w);
}

// Begins a line with what it says, and with the calls [first, last).
static td_json_writer begin_text(td_buf *out, const td_dialect_state *s, const td_buf *content,
                                 const td_buf *reasoning, uint32_t first, uint32_t last) {
  const bool is_chat = s->dialect != &td_dialect_ollama_generate;
  td_json_writer w = begin_line(out, s);
  if (is_chat) td_jw_add(&w, "'message': {'role': 'assistant'");
  td_jw_buf(&w, is_chat ? "content" : "response", content);
  if (reasoning->len) td_jw_buf(&w, "thinking", reasoning);
  write_calls(&w, s, first, last);
  if (is_chat) td_jw_end_object(&w);
  return w;
}

static td_json_writer begin_calls(td_buf *out, const td_dialect_state *s, uint32_t first,
                                  uint32_t last) {
  const td_buf none = TD_BUF_INIT;
  return begin_text(out, s, &none, &none, first, last);
}

static void end_line(td_json_writer *w) {
  td_jw_end_object(w);
  td_buf_char(w->out, '\n');
}

static void write_end(td_json_writer *w, const td_dialect_end *end) {
  const td_api_timings *t = end->timings;
  bool is_cut = strcmp(end->finish_reason, "length") == 0;
  td_jw_add(w,
            "'done_reason': %s, 'done': true, 'total_duration': %lu, 'load_duration': 0, "
            "'prompt_eval_count': %lu, 'prompt_eval_duration': %lu, 'eval_count': %lu, "
            "'eval_duration': %lu",
            is_cut ? "length" : "stop", t->prefill_ns + t->follow_ns, end->usage->n_prompt,
            t->prefill_ns, end->usage->n_output, t->follow_ns);
}

static void begin(td_buf *out, td_dialect_state *s, const td_api_usage *usage) {
  (void)out;
  (void)s;
  (void)usage;
}

static void write_probabilities(td_json_writer *w, const td_dialect_state *s, size_t first,
                                size_t last) {
  if (!s->answer->keep_tokens || first >= last) return;
  td_api_write_token_logprobs(w, "logprobs", s->head, s->answer, first, last, false);
}

// Calls are sent whole, when the next one begins or at the end.
static void send_delta(td_buf *out, td_dialect_state *s, const td_delta *delta) {
  uint32_t n_whole = s->parts->n_calls ? s->parts->n_calls - 1 : 0;
  const bool has_tokens = s->answer->keep_tokens && s->piece.last > s->piece.first;
  if (!delta->content.len && !delta->reasoning.len && n_whole <= s->n_blocks && !has_tokens) return;
  td_json_writer w = begin_text(out, s, &delta->content, &delta->reasoning, s->n_blocks, n_whole);
  if (n_whole > s->n_blocks) s->n_blocks = n_whole;
  td_jw_bool(&w, "done", false);
  write_probabilities(&w, s, s->piece.first, s->piece.last);
  end_line(&w);
}

static void send_calls(td_buf *out, const td_dialect_state *s, uint32_t first, uint32_t last) {
  td_json_writer w = begin_calls(out, s, first, last);
  td_jw_bool(&w, "done", false);
  end_line(&w);
}

// A line without text, for clients that give up when nothing comes.
static void write_empty(td_buf *out, const td_dialect_state *s) {
  send_calls(out, s, 0, 0);
}

static void send_end(td_buf *out, td_dialect_state *s, const td_dialect_end *end) {
  const uint32_t n_whole = s->parts->n_calls - td_output_parser_is_cut(s->parts);
  if (n_whole > s->n_blocks) send_calls(out, s, s->n_blocks, n_whole);
  td_json_writer w = begin_calls(out, s, 0, 0);
  write_end(&w, end);
  end_line(&w);
}

static void send_whole(td_buf *out, td_dialect_state *s, const td_delta *message,
                       const td_dialect_end *end) {
  td_json_writer w = begin_text(out, s, &message->content, &message->reasoning, message->first_call,
                                message->last_call);
  write_end(&w, end);
  write_probabilities(&w, s, 0, td_api_n_shown(end->answer));
  td_jw_end_object(&w);
}

// The answer to a request without a prompt: the model was loaded, or is unloaded.
static void send_loaded(td_buf *out, const td_dialect_state *s, const char *how) {
  td_json_writer w = begin_calls(out, s, 0, 0);
  td_jw_add(&w, "'done_reason': %s, 'done': true}", how);
}

static void write_error(td_buf *out, const td_api_error *error, bool in_stream) {
  td_json_writer w = TD_JSON_WRITER(out);
  td_jw_add(&w, "{'error': %s}", error->message);
  if (in_stream) td_buf_char(out, '\n');
}

// Both answer alike.
#define DIALECT(name)                                                                              \
  const td_dialect td_dialect_ollama_##name = {.translate = translate_##name,                      \
                                               .begin = begin,                                     \
                                               .delta = send_delta,                                \
                                               .end = send_end,                                    \
                                               .whole = send_whole,                                \
                                               .error = write_error,                               \
                                               .idle = write_empty,                                \
                                               .peek = peek_##name,                                \
                                               .loaded = send_loaded,                              \
                                               .has_logprobs = true,                               \
                                               .stream_type = "application/x-ndjson",              \
                                               .model_suffix = ":latest"};
DIALECT(chat)
DIALECT(generate)
