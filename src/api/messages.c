// src/api/messages.c - checks a conversation and writes it as the variables of a chat template. Of
// each message the template gets role, content (one string, null, or with images parts), name,
// reasoning_content, tool_calls and tool_call_id, as far as present.
#include <string.h>

#include "api/api_impl.h"
#include "api/turn.h"
#include "base/grow.h"
#include "base/str.h"

#define MAX_KWARGS 64

static td_status write_content(td_api_request *out, td_json_writer *w, const cJSON *message,
                               const char *role, bool is_asked, const char *where,
                               td_api_error *error) {
  const td_api_path at = td_api_member(where, "content");
  const char *param = at.text;
  const cJSON *content = td_json_get(message, "content");
  if (!content && strcmp(role, "assistant") == 0) {
    td_jw_null(w, "content");
    return TD_OK;
  }
  if (!content && strcmp(role, "tool") == 0) { // a tool message without content
    td_jw_str(w, "content", "");
    return TD_OK;
  }
  if (!content) return td_api_wrong(error, param, "is missing");
  if (cJSON_IsString(content)) {
    td_jw_str(w, "content", content->valuestring);
    return TD_OK;
  }
  const bool may_show = strcmp(role, "user") == 0 || strcmp(role, "tool") == 0;
  td_api_content said = {.sees = out->sees && may_show, .request = out};
  td_status st = td_api_add_content(&said, content, is_asked, param, error);
  if (st == TD_OK) td_api_write_content(w, &said);
  td_api_content_free(&said);
  return st;
}

// The protocol sends arguments as a JSON string, but some clients send the object itself. Templates
// expect the object; a string that does not parse as one is passed on as text.
static void write_arguments(td_json_writer *w, const cJSON *arguments, bool plain) {
  td_err err;
  td_buf text = TD_BUF_INIT;
  if (cJSON_IsString(arguments)) {
    td_buf_str(&text, arguments->valuestring[0] ? arguments->valuestring : "{}");
  } else if (arguments) {
    td_json_writer object = TD_JSON_WRITER(&text);
    td_api_write_json(&object, NULL, arguments);
  } else {
    td_buf_str(&text, "{}");
  }
  const char *json = td_buf_text(&text);
  if (text.data) td_json_replace_escapes(text.data, text.len);
  bool is_object = json[strspn(json, " \t\r\n")] == '{' &&
                   td_json_check(json, text.len, TD_JSON_MAX_DEPTH / 2, &err) == TD_OK;
  if (is_object && !plain)
    td_jw_raw(w, "arguments", json);
  else
    td_jw_str(w, "arguments", json);
  w->out->failed |= text.failed;
  td_buf_free(&text);
}

static td_status write_function(td_json_writer *w, const cJSON *function, bool plain,
                                const char *where, td_api_error *error) {
  const char *name = NULL;
  if (!cJSON_IsObject(function)) return td_api_wrong(error, where, "must be an object");
  td_status st = td_api_get_str_at(function, "name", where, &name, error);
  if (st != TD_OK) return st;
  const cJSON *arguments = td_json_get(function, "arguments");
  if (arguments && !cJSON_IsString(arguments) && !cJSON_IsObject(arguments)) {
    td_api_path at = td_api_member(where, "arguments");
    return td_api_wrong(error, at.text, "must be a string of JSON, or an object");
  }
  if (!name) {
    td_api_path at = td_api_member(where, "name");
    return td_api_wrong(error, at.text, "is missing");
  }
  td_jw_add(w, "'function': {'name': %s", name);
  write_arguments(w, arguments, plain);
  td_jw_end_object(w);
  return TD_OK;
}

static td_status write_call(td_json_writer *w, const cJSON *call, bool plain, const char *where,
                            td_api_error *error) {
  const char *id = NULL;
  if (!cJSON_IsObject(call)) return td_api_wrong(error, where, "must be an object");
  td_status st = td_api_get_str_at(call, "id", where, &id, error);
  if (st != TD_OK) return st;
  td_jw_begin_object(w, NULL);
  if (id) td_jw_str(w, "id", id);
  td_jw_str(w, "type", "function");
  td_api_path at = td_api_member(where, "function");
  st = write_function(w, td_json_get(call, "function"), plain, at.text, error);
  td_jw_end_object(w);
  return st;
}

static td_status write_calls(td_json_writer *w, const cJSON *message, bool plain, const char *where,
                             td_api_error *error) {
  const td_api_path at = td_api_member(where, "tool_calls");
  const cJSON *calls = td_json_get(message, "tool_calls");
  if (calls && !cJSON_IsArray(calls)) return td_api_wrong(error, at.text, "must be an array");
  if (!calls || !calls->child) return TD_OK;
  td_jw_begin_array(w, "tool_calls");
  td_status st = TD_OK;
  unsigned i = 0;
  for (const cJSON *call = calls->child; call && st == TD_OK; call = call->next) {
    td_api_path item = td_api_item(at.text, i++);
    st = write_call(w, call, plain, item.text, error);
  }
  td_jw_end_array(w);
  return st;
}

static td_status write_optional(td_json_writer *w, const cJSON *message, const char *key,
                                const char *as, const char *where, td_api_error *error) {
  const char *text = NULL;
  td_status st = td_api_get_str_at(message, key, where, &text, error);
  if (st == TD_OK && text) td_jw_str(w, as, text);
  return st;
}

// The role under the name that templates use; NULL if it is unknown.
static const char *role_of(const cJSON *message) {
  const cJSON *role = td_json_get(message, "role");
  if (!cJSON_IsString(role)) return NULL;
  if (strcmp(role->valuestring, "developer") == 0) return "system";
  static const char *const known[] = {"system", "user", "assistant", "tool"};
  for (size_t i = 0; i < TD_COUNT(known); i++)
    if (strcmp(role->valuestring, known[i]) == 0) return known[i];
  return NULL;
}

static td_status write_message(td_api_request *out, td_json_writer *w, const cJSON *message,
                               bool plain, bool is_asked, const char *where, td_api_error *error) {
  if (!cJSON_IsObject(message)) return td_api_wrong(error, where, "must be an object");
  const char *role = role_of(message);
  if (!role) {
    td_api_path at = td_api_member(where, "role");
    return td_api_wrong(error, at.text,
                        "must be one of system, developer, user, assistant and tool");
  }
  td_jw_add(w, "{'role': %s", role);
  td_status st = write_content(out, w, message, role, is_asked, where, error);
  if (st == TD_OK) st = write_optional(w, message, "name", "name", where, error);
  if (st == TD_OK) st = write_optional(w, message, "tool_call_id", "tool_call_id", where, error);
  const char *reasoning = td_json_get(message, "reasoning_content") ? "reasoning_content"
                                                                    : "reasoning";
  if (st == TD_OK) st = write_optional(w, message, reasoning, "reasoning_content", where, error);
  if (st == TD_OK) st = write_calls(w, message, plain, where, error);
  td_jw_end_object(w);
  return st;
}

// What an assistant's checked message says.
static void hash_answer(const cJSON *message, td_digest *said) {
  const cJSON *content = td_json_get(message, "content"),
              *calls = td_json_get(message, "tool_calls");
  td_buf text = TD_BUF_INIT;
  td_api_error ignored;
  td_sha256 sha;
  if (cJSON_IsArray(content)) td_api_add_parts(&text, content, false, "", &ignored);
  if (cJSON_IsString(content)) td_buf_str(&text, content->valuestring);
  td_api_said_begin(&sha, td_buf_text(&text), text.len);
  for (const cJSON *call = calls ? calls->child : NULL; call; call = call->next) {
    const cJSON *function = td_json_get(call, "function");
    const cJSON *arguments = td_json_get(function, "arguments");
    td_buf_clear(&text);
    td_json_writer w = TD_JSON_WRITER(&text);
    if (cJSON_IsString(arguments)) td_buf_str(&text, arguments->valuestring);
    if (cJSON_IsObject(arguments)) td_api_write_json(&w, NULL, arguments);
    if (!text.len) td_buf_str(&text, "{}");
    td_api_said_call(&sha, td_json_get(function, "name")->valuestring, td_buf_text(&text));
  }
  td_sha256_end(&sha, said);
  td_buf_free(&text);
}

static td_status mark_message(td_api_request *out, const cJSON *message, size_t end,
                              td_api_error *error) {
  if (!TD_GROW(out->marks, out->n_marks, out->cap_marks, 16))
    return td_api_fail(error, 503, NULL, NULL, "out of memory");
  td_api_mark *mark = &out->marks[out->n_marks++];
  *mark = (td_api_mark){.end = end,
                        .is_answer = strcmp(role_of(message), "assistant") == 0,
                        .is_question = strcmp(role_of(message), "user") == 0};
  if (mark->is_answer) hash_answer(message, &mark->said);
  return TD_OK;
}

static td_status write_messages(td_api_request *out, td_json_writer *w, const cJSON *root,
                                bool plain, td_api_error *error) {
  const cJSON *messages = td_json_get(root, "messages");
  const bool has_prompt = !messages && td_json_get(root, "prompt");
  if (!cJSON_IsArray(messages) || !messages->child) {
    return td_api_wrong(error, "messages", "must be an array with at least one message%s",
                        has_prompt ? "; prompt is what /v1/completions takes" : "");
  }
  td_jw_begin_array(w, "messages");
  td_status st = TD_OK;
  unsigned i = 0;
  const cJSON *asked = td_api_asked(messages);
  out->n_shown = 0;
  for (const cJSON *m = messages->child; m && st == TD_OK; m = m->next) {
    td_api_path where = td_api_item("messages", i++);
    st = write_message(out, w, m, plain, m == asked, where.text, error);
    if (st == TD_OK && !plain) st = mark_message(out, m, w->out->len, error);
  }
  td_jw_end_array(w);
  if (!plain) out->vars_rest = w->out->len;
  return st;
}

// A number keeps its spelling if td_json_parse recorded it.
void td_api_write_json(td_json_writer *w, const char *key, const cJSON *value) {
  if (cJSON_IsNumber(value) && value->valuestring) {
    td_jw_raw(w, key, value->valuestring);
  } else if (cJSON_IsNumber(value)) {
    td_jw_double(w, key, value->valuedouble);
  } else if (cJSON_IsString(value)) {
    td_jw_str(w, key, value->valuestring);
  } else if (cJSON_IsBool(value)) {
    td_jw_bool(w, key, cJSON_IsTrue(value));
  } else if (cJSON_IsArray(value)) {
    td_jw_begin_array(w, key);
    for (const cJSON *item = value->child; item; item = item->next)
      td_api_write_json(w, NULL, item);
    td_jw_end_array(w);
  } else if (cJSON_IsObject(value)) {
    td_jw_begin_object(w, key);
    for (const cJSON *item = value->child; item; item = item->next)
      td_api_write_json(w, item->string, item);
    td_jw_end_object(w);
  } else {
    td_jw_null(w, key);
  }
}

static td_status write_kwargs(td_json_writer *w, const cJSON *root, td_api_error *error) {
  static const char key[] = "chat_template_kwargs";
  const cJSON *kwargs = td_json_get(root, key);
  if (!kwargs) return TD_OK;
  if (!cJSON_IsObject(kwargs)) return td_api_wrong(error, key, "must be an object");
  if (cJSON_GetArraySize(kwargs) > MAX_KWARGS)
    return td_api_wrong(error, key, "has more than %d members", MAX_KWARGS);
  // Names that belong to the protocol; chat_template_kwargs must not override them.
  for (const cJSON *item = kwargs->child; item; item = item->next)
    if (cJSON_GetObjectItemCaseSensitive(kwargs, item->string) == item &&
        !td_is_word("messages tools add_generation_prompt reasoning_effort bos_token eos_token "
                    "continue_final_message",
                    item->string))
      td_api_write_json(w, item->string, item);
  return TD_OK;
}

// Whether the last message is continued instead of a new one begun.
static td_status parse_continued(bool *generation_prompt, bool *is_continued, const cJSON *root,
                                 td_api_error *error) {
  static const char key[] = "continue_final_message";
  const cJSON *last = td_json_get(root, "messages")->child;
  td_status st = td_api_get_bool(root, key, is_continued, error);
  if (st != TD_OK || !*is_continued) return st;
  if (*generation_prompt && td_json_get(root, "add_generation_prompt")) {
    return td_api_wrong(error, "add_generation_prompt",
                        ": true does not go with a last message that is continued");
  }
  while (last->next)
    last = last->next;
  if (strcmp(role_of(last), "assistant") != 0)
    return td_api_wrong(error, key, ": the last message must be the assistant's");
  *generation_prompt = false;
  return TD_OK;
}

// Without `strict`, which is the server's to obey: models are trained on tools that do not have it.
static void write_tools(td_json_writer *w, const cJSON *tools) {
  td_jw_begin_array(w, "tools");
  for (const cJSON *tool = tools->child; tool; tool = tool->next) {
    td_jw_begin_object(w, NULL);
    for (const cJSON *item = tool->child; item; item = item->next) {
      if (strcmp(item->string, "function") != 0) {
        td_api_write_json(w, item->string, item);
        continue;
      }
      td_jw_begin_object(w, "function");
      for (const cJSON *part = item->child; part; part = part->next)
        if (strcmp(part->string, "strict") != 0) td_api_write_json(w, part->string, part);
      td_jw_end_object(w);
    }
    td_jw_end_object(w);
  }
  td_jw_end_array(w);
}

static td_status write_vars(td_api_request *request, td_buf *out, const cJSON *root, bool plain,
                            td_api_error *error) {
  td_json_writer w = TD_JSON_WRITER(out);
  bool generation_prompt = true, is_continued = false;
  const cJSON *tools;
  td_jw_begin_object(&w, NULL);
  td_status st = write_messages(request, &w, root, plain, error);
  if (st == TD_OK) st = td_api_check_tools(root, &tools, error);
  request->has_tools = st == TD_OK && tools;
  if (request->has_tools) write_tools(&w, tools);
  if (st == TD_OK) st = td_api_get_bool(root, "add_generation_prompt", &generation_prompt, error);
  if (st == TD_OK) st = parse_continued(&generation_prompt, &is_continued, root, error);
  request->is_continued = is_continued || !generation_prompt;
  if (st == TD_OK) td_jw_bool(&w, "add_generation_prompt", generation_prompt);
  if (st == TD_OK && is_continued) td_jw_bool(&w, "continue_final_message", true);
  const cJSON *format = td_json_get(td_json_get(root, "response_format"), "json_schema");
  const cJSON *schema = td_json_get(format, "schema"); // for templates that show it to the model
  if (st == TD_OK && cJSON_IsObject(schema)) td_api_write_json(&w, "response_format", schema);
  if (st == TD_OK) st = td_api_write_thinking(&w, root, error);
  if (st == TD_OK) st = write_kwargs(&w, root, error);
  td_jw_end_object(&w);
  if (st == TD_OK && out->failed) st = td_api_fail(error, 503, NULL, NULL, "out of memory");
  return st;
}

td_status td_api_parse_messages(td_api_request *out, const cJSON *root, td_api_error *error) {
  td_status st = write_vars(out, &out->vars, root, false, error);
  if (st == TD_OK) st = write_vars(out, &out->plain_vars, root, true, error);
  if (st != TD_OK) return st;
  bool same = out->vars.len == out->plain_vars.len &&
              memcmp(out->vars.data, out->plain_vars.data, out->vars.len) == 0;
  if (same) td_buf_free(&out->plain_vars);
  return TD_OK;
}

// ---- leaving turns out --------------------------------------------------------------------------

// The first message behind the instructions.
static cJSON *first_of_turns(const cJSON *vars) {
  const cJSON *messages = td_json_get(vars, "messages");
  cJSON *m = messages ? messages->child : NULL;
  while (m && (td_json_is(m, "role", "system") || td_json_is(m, "role", "developer")))
    m = m->next;
  return m;
}

uint32_t td_api_n_turns(const td_buf *vars) {
  cJSON *json;
  td_err ignored;
  uint32_t n = 0;
  if (td_json_parse(&json, vars->data, vars->len, TD_JSON_MAX_DEPTH, &ignored) != TD_OK) return 0;
  const cJSON *first = first_of_turns(json);
  for (const cJSON *m = first ? first->next : NULL; m; m = m->next)
    n += td_json_is(m, "role", "user");
  cJSON_Delete(json);
  return n;
}

void td_api_leave_out(td_buf *out, const td_buf *vars, uint32_t n) {
  cJSON *json;
  td_err ignored;
  out->failed |= td_json_parse(&json, vars->data, vars->len, TD_JSON_MAX_DEPTH, &ignored) != TD_OK;
  if (out->failed) return;
  cJSON *messages = cJSON_GetObjectItemCaseSensitive(json, "messages");
  cJSON *m = first_of_turns(json);
  do {
    cJSON *next = m->next;
    cJSON_Delete(cJSON_DetachItemViaPointer(messages, m));
    m = next;
    n -= m && td_json_is(m, "role", "user");
  } while (n && m);
  td_json_writer w = TD_JSON_WRITER(out);
  td_api_write_json(&w, NULL, json);
  cJSON_Delete(json);
}
