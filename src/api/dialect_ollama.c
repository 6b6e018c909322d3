// src/api/dialect_ollama.c - Ollama's /api/chat and /api/generate. A stream is one JSON object a
// line.
#include <string.h>
#include <time.h>

#include "api/api_impl.h"
#include "api/dialect_impl.h"

// ---- request -----------------------------------------------------------------------------------

static const char *const own[] = {"messages",   "options", "format", "stream",   "think",
                                  "keep_alive", "prompt",  "system", "template", "context",
                                  "raw",        "suffix",  "images", NULL};

static void write_options(td_json_writer *w, const cJSON *options) {
  static const char *const names[][2] = {{"num_predict", "max_tokens"},
                                         {"repeat_penalty", "repetition_penalty"}};
  static const char *const same[] = {
      "temperature",      "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty",
      "frequency_penalty"};
  for (size_t i = 0; i < TD_COUNT(same); i++) {
    const cJSON *item = td_json_get(options, same[i]);
    if (item) td_api_write_json(w, same[i], item);
  }
  for (size_t i = 0; i < TD_COUNT(names); i++) {
    const cJSON *item = td_json_get(options, names[i][0]);
    if (!item) continue;
    bool is_open = i == 0 && cJSON_IsNumber(item) && item->valuedouble <= 0; // -1, -2: no limit
    if (is_open) {
      td_jw_int(w, names[i][1], -1);
    } else {
      td_api_write_json(w, names[i][1], item);
    }
  }
}

// "json", or a schema.
static void write_format(td_json_writer *w, const cJSON *format) {
  if (!format || (cJSON_IsString(format) && !format->valuestring[0])) return;
  td_jw_begin_object(w, "response_format");
  td_jw_str(w, "type", "json_object");
  if (cJSON_IsObject(format)) td_api_write_json(w, "schema", format);
  td_jw_end_object(w);
}

static void write_thinking(td_json_writer *w, const cJSON *think) {
  if (cJSON_IsString(think)) td_jw_str(w, "reasoning_effort", think->valuestring);
  if (!cJSON_IsBool(think)) return;
  td_jw_begin_object(w, "chat_template_kwargs");
  td_jw_bool(w, "enable_thinking", cJSON_IsTrue(think));
  td_jw_end_object(w);
}

// Members that are translated rather than passed on, and so are not checked as chat's are.
static td_status check_types(const cJSON *root, td_api_error *error) {
  static const struct {
    const char *key, *kind;
    int types; // of cJSON
  } members[] = {{"options", "an object", cJSON_Object},
                 {"messages", "an array", cJSON_Array},
                 {"system", "a string", cJSON_String},
                 {"stream", "true or false", cJSON_True | cJSON_False},
                 {"format", "\"json\" or a schema", cJSON_String | cJSON_Object},
                 {"think", "true, false or a string", cJSON_True | cJSON_False | cJSON_String}};
  for (size_t i = 0; i < TD_COUNT(members); i++) {
    const cJSON *item = td_json_get(root, members[i].key);
    if (item && !(item->type & members[i].types)) {
      return td_api_bad(error, members[i].key, "%s must be %s", members[i].key, members[i].kind);
    }
  }
  return TD_OK;
}

static void write_common(td_json_writer *w, const cJSON *root) {
  td_dialect_pass(w, root, own);
  td_jw_bool(w, "stream", !cJSON_IsFalse(td_json_get(root, "stream")));
  write_options(w, td_json_get(root, "options"));
  write_format(w, td_json_get(root, "format"));
  write_thinking(w, td_json_get(root, "think"));
}

static td_status refuse_images(const cJSON *object, const char *where, td_api_error *error) {
  const cJSON *images = td_json_get(object, "images");
  if (!cJSON_IsArray(images) || !images->child) return TD_OK;
  return td_api_bad(error, where, "%s: images are not supported", where);
}

static td_status translate_chat(td_buf *out, const cJSON *root, td_dialect_state *state,
                                td_api_error *error) {
  static const char *const but[] = {"thinking", "images", "tool_name", NULL};
  const cJSON *messages = td_json_get(root, "messages");
  td_json_writer w = TD_JSON_WRITER(out);
  (void)state;
  td_status st = check_types(root, error);
  if (st != TD_OK) return st;
  td_jw_begin_object(&w, NULL);
  write_common(&w, root);
  unsigned i = 0;
  td_jw_begin_array(&w, "messages");
  for (const cJSON *m = messages ? messages->child : NULL; m && st == TD_OK; m = m->next) {
    td_api_path where = td_api_item("messages", i++);
    const cJSON *thinking = td_json_get(m, "thinking"), *name = td_json_get(m, "tool_name");
    st = refuse_images(m, where.text, error);
    if (!cJSON_IsObject(m)) {
      td_api_write_json(&w, NULL, m);
      continue;
    }
    td_jw_begin_object(&w, NULL);
    td_dialect_pass(&w, m, but);
    if (cJSON_IsString(thinking)) td_jw_str(&w, "reasoning_content", thinking->valuestring);
    if (cJSON_IsString(name)) td_jw_str(&w, "name", name->valuestring);
    td_jw_end_object(&w);
  }
  td_jw_end_array(&w);
  td_jw_end_object(&w);
  return st;
}

static td_status translate_generate(td_buf *out, const cJSON *root, td_dialect_state *state,
                                    td_api_error *error) {
  const cJSON *prompt = td_json_get(root, "prompt"), *system = td_json_get(root, "system");
  td_json_writer w = TD_JSON_WRITER(out);
  (void)state;
  td_status st = check_types(root, error);
  if (st == TD_OK) st = refuse_images(root, "images", error);
  if (st == TD_OK && cJSON_IsTrue(td_json_get(root, "raw"))) {
    st = td_api_bad(error, "raw", "raw is not supported here; use /v1/completions");
  }
  if (st == TD_OK && !cJSON_IsString(prompt)) {
    st = td_api_bad(error, "prompt", "prompt must be a string");
  }
  if (st != TD_OK) return st;
  td_jw_begin_object(&w, NULL);
  write_common(&w, root);
  td_jw_begin_array(&w, "messages");
  const cJSON *const texts[] = {system, prompt};
  for (int i = 0; i < 2; i++) {
    if (!cJSON_IsString(texts[i]) || (i == 0 && !system->valuestring[0])) continue;
    td_jw_begin_object(&w, NULL);
    td_jw_str(&w, "role", i ? "user" : "system");
    td_jw_str(&w, "content", texts[i]->valuestring);
    td_jw_end_object(&w);
  }
  td_jw_end_array(&w);
  td_jw_end_object(&w);
  return TD_OK;
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
  td_jw_begin_object(&w, NULL);
  td_jw_str(&w, "model", s->head->model);
  td_jw_str(&w, "created_at", when);
  return w;
}

static void write_calls(td_json_writer *w, const td_dialect_state *s, uint32_t first,
                        uint32_t last) {
  if (first >= last) return;
  td_jw_begin_array(w, "tool_calls");
  for (uint32_t i = first; i < last; i++) {
    const td_tool_call *call = &s->parts->calls[i];
    td_jw_begin_object(w, NULL);
    td_jw_begin_object(w, "function");
    td_jw_str(w, "name", call->name);
    td_err err;
    bool is_json = td_json_check(td_buf_text(&call->arguments), call->arguments.len,
                                 TD_JSON_MAX_DEPTH, &err) == TD_OK;
    td_jw_raw(w, "arguments", is_json ? td_buf_text(&call->arguments) : "{}");
    td_jw_end_object(w);
    td_jw_end_object(w);
  }
  td_jw_end_array(w);
}

static void write_text(td_json_writer *w, bool is_chat, const td_buf *content,
                       const td_buf *reasoning, const td_dialect_state *s, uint32_t first,
                       uint32_t last) {
  if (is_chat) {
    td_jw_begin_object(w, "message");
    td_jw_str(w, "role", "assistant");
  }
  td_jw_str_len(w, is_chat ? "content" : "response", td_buf_text(content), content->len);
  if (reasoning->len) td_jw_str_len(w, "thinking", td_buf_text(reasoning), reasoning->len);
  write_calls(w, s, first, last);
  if (is_chat) td_jw_end_object(w);
}

static void write_end(td_json_writer *w, const td_dialect_end *end) {
  const td_api_timings *t = end->timings;
  bool is_cut = strcmp(end->finish_reason, "length") == 0;
  td_jw_str(w, "done_reason", is_cut ? "length" : "stop");
  td_jw_bool(w, "done", true);
  td_jw_int(w, "total_duration", (int64_t)(t->prefill_ns + t->follow_ns));
  td_jw_int(w, "load_duration", 0);
  td_jw_int(w, "prompt_eval_count", (int64_t)end->usage->n_prompt);
  td_jw_int(w, "prompt_eval_duration", (int64_t)t->prefill_ns);
  td_jw_int(w, "eval_count", (int64_t)end->usage->n_output);
  td_jw_int(w, "eval_duration", (int64_t)t->follow_ns);
}

static void begin(td_buf *out, td_dialect_state *s, const td_api_usage *usage) {
  (void)out;
  (void)s;
  (void)usage;
}

// Calls are sent whole, when the next one begins or at the end.
static void send_delta(td_buf *out, td_dialect_state *s, const td_delta *delta, bool is_chat) {
  uint32_t n_whole = s->parts->n_calls ? s->parts->n_calls - 1 : 0;
  if (!delta->content.len && !delta->reasoning.len && n_whole <= s->n_blocks) return;
  td_json_writer w = begin_line(out, s);
  write_text(&w, is_chat, &delta->content, &delta->reasoning, s, s->n_blocks, n_whole);
  if (n_whole > s->n_blocks) s->n_blocks = n_whole;
  td_jw_bool(&w, "done", false);
  td_jw_end_object(&w);
  td_buf_char(out, '\n');
}

static void send_end(td_buf *out, td_dialect_state *s, const td_dialect_end *end, bool is_chat) {
  const td_buf none = TD_BUF_INIT;
  td_json_writer w;
  if (s->parts->n_calls > s->n_blocks) {
    w = begin_line(out, s);
    write_text(&w, is_chat, &none, &none, s, s->n_blocks, s->parts->n_calls);
    td_jw_bool(&w, "done", false);
    td_jw_end_object(&w);
    td_buf_char(out, '\n');
  }
  w = begin_line(out, s);
  write_text(&w, is_chat, &none, &none, s, 0, 0);
  write_end(&w, end);
  td_jw_end_object(&w);
  td_buf_char(out, '\n');
}

static void send_whole(td_buf *out, td_dialect_state *s, const td_delta *message,
                       const td_dialect_end *end, bool is_chat) {
  td_json_writer w = begin_line(out, s);
  write_text(&w, is_chat, &message->content, &message->reasoning, s, message->first_call,
             message->last_call);
  write_end(&w, end);
  td_jw_end_object(&w);
}

static void chat_delta(td_buf *out, td_dialect_state *s, const td_delta *delta) {
  send_delta(out, s, delta, true);
}

static void chat_end(td_buf *out, td_dialect_state *s, const td_dialect_end *end) {
  send_end(out, s, end, true);
}

static void chat_whole(td_buf *out, td_dialect_state *s, const td_delta *message,
                       const td_dialect_end *end) {
  send_whole(out, s, message, end, true);
}

static void generate_delta(td_buf *out, td_dialect_state *s, const td_delta *delta) {
  send_delta(out, s, delta, false);
}

static void generate_end(td_buf *out, td_dialect_state *s, const td_dialect_end *end) {
  send_end(out, s, end, false);
}

static void generate_whole(td_buf *out, td_dialect_state *s, const td_delta *message,
                           const td_dialect_end *end) {
  send_whole(out, s, message, end, false);
}

static void write_error(td_buf *out, const td_api_error *error, bool in_stream) {
  td_json_writer w = TD_JSON_WRITER(out);
  td_jw_begin_object(&w, NULL);
  td_jw_str(&w, "error", error->message);
  td_jw_end_object(&w);
  if (in_stream) td_buf_char(out, '\n');
}

const td_dialect td_dialect_ollama_chat = {.translate = translate_chat,
                                           .begin = begin,
                                           .delta = chat_delta,
                                           .end = chat_end,
                                           .whole = chat_whole,
                                           .error = write_error,
                                           .stream_type = "application/x-ndjson",
                                           .model_suffix = ":latest"};
const td_dialect td_dialect_ollama_generate = {.translate = translate_generate,
                                               .begin = begin,
                                               .delta = generate_delta,
                                               .end = generate_end,
                                               .whole = generate_whole,
                                               .error = write_error,
                                               .stream_type = "application/x-ndjson",
                                               .model_suffix = ":latest"};
