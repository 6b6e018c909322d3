// src/api/responses_request.c - from a body of /v1/responses to one of chat.
#include <string.h>

#include "api/api_impl.h"
#include "api/responses_impl.h"

// Gathers an assistant's turn, which Responses spells as several items.
typedef struct {
  td_json_writer *w;
  td_buf content, reasoning, calls;
  bool is_open;
} turn;

static void end_turn(turn *t) {
  if (!t->is_open) return;
  td_json_writer *w = t->w;
  td_jw_begin_object(w, NULL);
  td_jw_str(w, "role", "assistant");
  td_jw_str_len(w, "content", td_buf_text(&t->content), t->content.len);
  if (t->reasoning.len) {
    td_jw_str_len(w, "reasoning_content", t->reasoning.data, t->reasoning.len);
  }
  if (t->calls.len) {
    td_buf_char(&t->calls, ']');
    td_jw_raw(w, "tool_calls", td_buf_text(&t->calls));
  }
  td_jw_end_object(w);
  w->out->failed |= t->content.failed || t->reasoning.failed || t->calls.failed;
  td_buf_clear(&t->content);
  td_buf_clear(&t->reasoning);
  td_buf_clear(&t->calls);
  t->is_open = false;
}

static void add_call(turn *t, const cJSON *item) {
  const cJSON *id = td_json_get(item, "call_id"), *name = td_json_get(item, "name");
  td_json_writer w = TD_JSON_WRITER(&t->calls);
  td_buf_char(&t->calls, t->calls.len ? ',' : '[');
  td_jw_begin_object(&w, NULL);
  if (cJSON_IsString(id)) td_jw_str(&w, "id", id->valuestring);
  td_jw_str(&w, "type", "function");
  td_jw_begin_object(&w, "function");
  if (cJSON_IsString(name)) td_jw_str(&w, "name", name->valuestring);
  td_api_write_json(&w, "arguments", td_json_get(item, "arguments"));
  td_jw_end_object(&w);
  td_jw_end_object(&w);
  t->is_open = true;
}

// What a tool returned: text, or parts with text.
static td_status write_output(td_json_writer *w, const cJSON *item, const char *where,
                              td_api_error *error) {
  const cJSON *id = td_json_get(item, "call_id"), *output = td_json_get(item, "output");
  td_api_path at = td_api_member(where, "output");
  td_buf text = TD_BUF_INIT;
  td_status st = output ? td_dialect_text(&text, output, at.text, error) : TD_OK;
  td_jw_begin_object(w, NULL);
  td_jw_str(w, "role", "tool");
  if (cJSON_IsString(id)) td_jw_str(w, "tool_call_id", id->valuestring);
  td_jw_str_len(w, "content", td_buf_text(&text), text.len);
  td_jw_end_object(w);
  w->out->failed |= text.failed;
  td_buf_free(&text);
  return st;
}

static td_status write_message(turn *t, const cJSON *item, const char *where, td_api_error *error) {
  const cJSON *role = td_json_get(item, "role"), *content = td_json_get(item, "content");
  td_api_path at = td_api_member(where, "content");
  if (!cJSON_IsString(role)) {
    at = td_api_member(where, "role");
    return td_api_bad(error, at.text, "%s is missing", at.text);
  }
  if (strcmp(role->valuestring, "assistant") == 0) {
    if (t->content.len) end_turn(t);
    t->is_open = true;
    return td_dialect_text(&t->content, content, at.text, error);
  }
  end_turn(t);
  td_buf text = TD_BUF_INIT;
  td_status st = td_dialect_text(&text, content, at.text, error);
  td_jw_begin_object(t->w, NULL);
  td_jw_str(t->w, "role", role->valuestring);
  td_jw_str_len(t->w, "content", td_buf_text(&text), text.len);
  td_jw_end_object(t->w);
  t->w->out->failed |= text.failed;
  td_buf_free(&text);
  return st;
}

static td_status write_item(turn *t, const cJSON *item, const char *where, td_api_error *error) {
  const cJSON *type = td_json_get(item, "type");
  const char *name = cJSON_IsString(type) ? type->valuestring : "message";
  if (!cJSON_IsObject(item)) return td_api_bad(error, where, "%s must be an object", where);
  if (strcmp(name, "message") == 0) return write_message(t, item, where, error);
  if (strcmp(name, "function_call") == 0) {
    add_call(t, item);
    return TD_OK;
  }
  if (strcmp(name, "reasoning") == 0) {
    const cJSON *content = td_json_get(item, "content");
    if (t->is_open) end_turn(t);
    t->is_open = content != NULL;
    return content ? td_dialect_text(&t->reasoning, content, where, error) : TD_OK;
  }
  end_turn(t);
  if (strcmp(name, "function_call_output") == 0) return write_output(t->w, item, where, error);
  td_api_path at = td_api_member(where, "type");
  return td_api_bad(error, at.text, "%s: an item of type %.64s is not supported", at.text, name);
}

// Appends the input as chat messages.
static td_status write_input(td_buf *out, const cJSON *root, td_api_error *error) {
  const cJSON *input = td_json_get(root, "input");
  td_json_writer w = TD_JSON_WRITER(out);
  turn t = {.w = &w};
  td_status st = TD_OK;
  if (cJSON_IsString(input)) {
    td_jw_begin_object(&w, NULL);
    td_jw_str(&w, "role", "user");
    td_jw_str(&w, "content", input->valuestring);
    td_jw_end_object(&w);
  } else if (!cJSON_IsArray(input) || !input->child) {
    st = td_api_bad(error, "input", "input must be a string or an array of items");
  } else {
    unsigned i = 0;
    for (const cJSON *item = input->child; item && st == TD_OK; item = item->next) {
      td_api_path where = td_api_item("input", i++);
      st = write_item(&t, item, where.text, error);
    }
    end_turn(&t);
  }
  td_buf_free(&t.content);
  td_buf_free(&t.reasoning);
  td_buf_free(&t.calls);
  return st;
}

// The conversation: that of previous_response_id, then the input. Without instructions, which
// count for one response.
static td_status gather_messages(td_buf *out, const cJSON *root, const td_dialect_state *state,
                                 td_api_error *error) {
  const cJSON *previous = td_json_get(root, "previous_response_id");
  if (td_json_get(root, "conversation") || td_json_get(root, "prompt")) {
    return td_api_fail(error, 400, "conversation", "unsupported_parameter",
                       "conversation and prompt are not supported; give previous_response_id");
  }
  if (previous) {
    bool is_found = cJSON_IsString(previous) && state && state->store &&
                    td_response_store_get(state->store, previous->valuestring, out);
    if (!is_found) {
      return td_api_fail(error, 404, "previous_response_id", "not_found",
                         "previous_response_id: there is no such response; responses are kept in "
                         "memory, the last ones only");
    }
    td_buf_char(out, ',');
  }
  return write_input(out, root, error);
}

// ---- tools and options -------------------------------------------------------------------------

static void write_tools(td_json_writer *w, const cJSON *tools) {
  static const char *const names[] = {"name", "description", "parameters", "strict"};
  td_jw_begin_array(w, "tools");
  for (const cJSON *tool = tools->child; tool; tool = tool->next) {
    const cJSON *type = td_json_get(tool, "type");
    if (!cJSON_IsString(type) || strcmp(type->valuestring, "function") != 0) continue;
    td_jw_begin_object(w, NULL);
    td_jw_str(w, "type", "function");
    td_jw_begin_object(w, "function");
    for (size_t i = 0; i < TD_COUNT(names); i++) {
      const cJSON *item = td_json_get(tool, names[i]);
      if (item) td_api_write_json(w, names[i], item);
    }
    td_jw_end_object(w);
    td_jw_end_object(w);
  }
  td_jw_end_array(w);
}

static void write_function(td_json_writer *w, const char *key, const cJSON *name) {
  td_jw_begin_object(w, key);
  td_jw_str(w, "type", "function");
  td_jw_begin_object(w, "function");
  td_api_write_json(w, "name", name);
  td_jw_end_object(w);
  td_jw_end_object(w);
}

static void write_choice(td_json_writer *w, const cJSON *choice) {
  const cJSON *name = td_json_get(choice, "name"), *list = td_json_get(choice, "tools");
  if (name) {
    write_function(w, "tool_choice", name);
  } else if (cJSON_IsArray(list)) {
    td_jw_begin_object(w, "tool_choice");
    td_jw_str(w, "type", "allowed_tools");
    td_jw_begin_object(w, "allowed_tools");
    td_api_write_json(w, "mode", td_json_get(choice, "mode"));
    td_jw_begin_array(w, "tools");
    for (const cJSON *tool = list->child; tool; tool = tool->next)
      write_function(w, NULL, td_json_get(tool, "name"));
    td_jw_end_array(w);
    td_jw_end_object(w);
    td_jw_end_object(w);
  } else {
    td_api_write_json(w, "tool_choice", choice);
  }
}

static void write_format(td_json_writer *w, const cJSON *root) {
  const cJSON *format = td_json_get(td_json_get(root, "text"), "format");
  const cJSON *type = td_json_get(format, "type");
  if (!format) return;
  bool is_schema = cJSON_IsString(type) && strcmp(type->valuestring, "json_schema") == 0;
  if (!is_schema) {
    td_api_write_json(w, "response_format", format);
    return;
  }
  td_jw_begin_object(w, "response_format");
  td_jw_str(w, "type", "json_schema");
  td_api_write_json(w, "json_schema", format); // name, schema and strict are its members
  td_jw_end_object(w);
}

// What the response repeats of the request.
static void keep_echo(td_dialect_state *state, const cJSON *root) {
  static const struct {
    const char *name, *absent;
  } members[] = {{"instructions", "null"},
                 {"max_output_tokens", "null"},
                 {"metadata", "{}"},
                 {"parallel_tool_calls", "true"},
                 {"previous_response_id", "null"},
                 {"reasoning", "{\"effort\":null,\"summary\":null}"},
                 {"store", "true"},
                 {"temperature", "null"},
                 {"text", "{\"format\":{\"type\":\"text\"}}"},
                 {"tool_choice", "\"auto\""},
                 {"tools", "[]"},
                 {"top_p", "null"},
                 {"truncation", "\"disabled\""},
                 {"user", "null"}};
  for (size_t i = 0; i < TD_COUNT(members); i++) {
    const cJSON *item = td_json_get(root, members[i].name);
    td_buf_printf(&state->echo, ",\"%s\":", members[i].name);
    if (item) {
      td_json_writer w = TD_JSON_WRITER(&state->echo);
      td_api_write_json(&w, NULL, item);
    } else {
      td_buf_str(&state->echo, members[i].absent);
    }
  }
}

td_status td_responses_translate(td_buf *out, const cJSON *root, td_dialect_state *state,
                                 td_api_error *error) {
  static const char *const own[] = {"input",
                                    "instructions",
                                    "tools",
                                    "tool_choice",
                                    "text",
                                    "max_output_tokens",
                                    "reasoning",
                                    "previous_response_id",
                                    "store",
                                    "include",
                                    "metadata",
                                    "truncation",
                                    "conversation",
                                    "prompt",
                                    "background",
                                    "service_tier",
                                    "user",
                                    "stream_options",
                                    "top_logprobs",
                                    "max_tool_calls",
                                    "prompt_cache_key",
                                    "safety_identifier",
                                    "client_metadata",
                                    NULL};
  td_buf messages = TD_BUF_INIT;
  td_status st = gather_messages(&messages, root, state, error);
  const cJSON *instructions = td_json_get(root, "instructions"), *item;
  td_json_writer w = TD_JSON_WRITER(out);
  td_jw_begin_object(&w, NULL);
  td_dialect_pass(&w, root, own);
  td_buf all = TD_BUF_INIT;
  td_buf_char(&all, '[');
  if (cJSON_IsString(instructions)) {
    td_json_writer system = TD_JSON_WRITER(&all);
    td_jw_begin_object(&system, NULL);
    td_jw_str(&system, "role", "system");
    td_jw_str(&system, "content", instructions->valuestring);
    td_jw_end_object(&system);
    td_buf_char(&all, ',');
  }
  td_buf_add(&all, td_buf_text(&messages), messages.len);
  td_buf_char(&all, ']');
  td_jw_raw(&w, "messages", td_buf_text(&all));
  if ((item = td_json_get(root, "max_output_tokens"))) td_api_write_json(&w, "max_tokens", item);
  if ((item = td_json_get(root, "tools")) && cJSON_IsArray(item)) write_tools(&w, item);
  if ((item = td_json_get(root, "tool_choice"))) write_choice(&w, item);
  item = td_json_get(td_json_get(root, "reasoning"), "effort");
  if (item) td_api_write_json(&w, "reasoning_effort", item);
  write_format(&w, root);
  td_jw_end_object(&w);
  out->failed |= messages.failed || all.failed;
  td_buf_free(&all);
  if (state) {
    keep_echo(state, root);
    state->is_stored = !cJSON_IsFalse(cJSON_GetObjectItemCaseSensitive(root, "store"));
    state->messages = messages;
  } else {
    td_buf_free(&messages);
  }
  return st;
}
