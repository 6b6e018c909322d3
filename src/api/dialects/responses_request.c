// src/api/dialects/responses_request.c - from a body of /v1/responses to one of chat.
#include <stdlib.h>
#include <string.h>

#include "api/dialects/responses_impl.h"
#include "base/str.h"

// ---- items of stored responses, by reference ----------------------------------------------------

#define MAX_REFERENCES 1024 // a request
#define MAX_BYTES      (32u << 20)

typedef struct referenced {
  struct referenced *next;
  char id[64];
  cJSON *root; // owned
} referenced;

// Zeroed: none yet.
typedef struct {
  referenced *responses; // owned: each is parsed once
  unsigned n;            // references
  size_t n_bytes;        // of the responses, and of what was written for their items
} referred;

static void free_references(referred *references) {
  for (referenced *r = references->responses, *next; r; r = next) {
    next = r->next;
    cJSON_Delete(r->root);
    free(r);
  }
  *references = (referred){0};
}

static td_status count_referred(referred *references, size_t n_bytes, const char *where,
                                td_api_error *error) {
  references->n_bytes += n_bytes;
  if (references->n_bytes <= MAX_BYTES) return TD_OK;
  return td_api_wrong(error, where,
                      ": the stored responses that are referred to, and their items, have more "
                      "than %u MiB: refer to fewer",
                      MAX_BYTES >> 20);
}

static td_status parse(referred *references, const char *id, const td_buf *json, const char *where,
                       td_api_error *error) {
  td_err err;
  referenced *r = json->failed ? NULL : calloc(1, sizeof *r);
  if (!r) return td_api_fail(error, 503, NULL, NULL, "out of memory");
  td_status st = td_json_parse(&r->root, td_buf_text(json), json->len, TD_JSON_MAX_DEPTH, &err);
  if (st != TD_OK) {
    free(r);
    return td_api_fail_err(error, where, &err);
  }
  snprintf(r->id, sizeof r->id, "%s", id);
  r->next = references->responses;
  references->responses = r;
  return TD_OK;
}

// *root NULL: there is no such response.
static td_status find_response(referred *references, const td_dialect_state *state, const char *id,
                               const char *where, const cJSON **root, td_api_error *error) {
  const referenced *r = references->responses;
  while (r && strcmp(r->id, id) != 0)
    r = r->next;
  *root = r ? r->root : NULL;
  td_buf json = TD_BUF_INIT;
  if (r || !state->store ||
      !td_response_store_get(state->store, state->owner, id, TD_STORED_RESPONSE, &json))
    return TD_OK;
  td_status st = count_referred(references, json.len, where, error);
  if (st == TD_OK) st = parse(references, id, &json, where, error);
  if (st == TD_OK) *root = references->responses->root;
  td_buf_free(&json);
  return st;
}

static const cJSON *item_of(const cJSON *items, const char *id) {
  for (const cJSON *item = items ? items->child : NULL; item; item = item->next)
    if (td_json_is(item, "id", id)) return item;
  return NULL;
}

// The item's id is PREFIX_RESPONSE_INDEX.
static td_status refer(referred *references, const td_dialect_state *state, const cJSON *id,
                       const char *where, const cJSON **item, td_api_error *error) {
  const char *text = cJSON_IsString(id) ? id->valuestring : "";
  const char *begin = strchr(text, '_'), *end = strrchr(text, '_');
  const cJSON *root = NULL;
  char response[64] = "";
  if (begin && end > begin)
    snprintf(response, sizeof response, "resp_%.*s", (int)(end - begin - 1), begin + 1);
  td_status st = TD_OK;
  if (++references->n <= MAX_REFERENCES)
    st = find_response(references, state, response, where, &root, error);
  if (st != TD_OK) return st;
  *item = root ? item_of(td_json_get(root, "output"), text) : NULL;
  if (*item) return TD_OK;
  return td_api_fail(error, 404, where, "not_found",
                     "%s: there is no item %.64s; responses are kept in memory, the last ones "
                     "only: send the item itself",
                     where, text);
}

// ---- input -------------------------------------------------------------------------------------

// Gathers an assistant's turn, which Responses spells as several items.
typedef struct {
  td_json_writer *w;
  td_dialect_state *state;
  td_api_error *error;
  td_buf content, reasoning, calls;
  unsigned n_calls;
  bool is_open;
  td_api_path from; // its first item
  referred references;
} turn;

static void begin_turn(turn *t, const char *where) {
  if (!t->is_open) snprintf(t->from.text, sizeof t->from.text, "%s", where);
  t->is_open = true;
}

static void end_turn(turn *t) {
  if (!t->is_open) return;
  td_json_writer *w = t->w;
  td_dialect_begin_message(w, t->state, "assistant", t->from.text);
  td_jw_buf(w, "content", &t->content);
  if (t->reasoning.len) td_jw_buf(w, "reasoning_content", &t->reasoning);
  if (t->calls.len) {
    td_buf_char(&t->calls, ']');
    td_jw_raw(w, "tool_calls", td_buf_text(&t->calls));
  }
  td_jw_end_object(w);
  w->out->failed |= t->content.failed || t->reasoning.failed || t->calls.failed;
  td_buf_clear(&t->content);
  td_buf_clear(&t->reasoning);
  td_buf_clear(&t->calls);
  t->n_calls = 0;
  t->is_open = false;
}

// Notes where the turn's next call is from.
static void note_call(turn *t, const char *where) {
  const td_api_path calls = td_api_member(td_dialect_next_message(t->state).text, "tool_calls");
  const td_api_path call = td_api_item(calls.text, t->n_calls++);
  td_dialect_note(t->state, call.text, where);
  td_dialect_note(t->state, td_api_member(call.text, "id").text,
                  td_api_member(where, "call_id").text);
  td_dialect_note(t->state, td_api_member(call.text, "function").text, where);
}

static td_status add_call(turn *t, const cJSON *item, const char *type, const char *where) {
  const cJSON *id = td_json_get(item, "call_id"), *arguments = td_json_get(item, "arguments");
  const char *name = NULL, *space = NULL, *input = "";
  td_status st = td_api_get_str_at(item, "name", where, &name, t->error);
  if (st == TD_OK) st = td_api_get_str_at(item, "namespace", where, &space, t->error);
  const bool is_custom = strcmp(type, "custom_tool_call") == 0;
  if (st == TD_OK && is_custom) st = td_api_get_str_at(item, "input", where, &input, t->error);
  if (st != TD_OK) return st;
  td_json_writer w = TD_JSON_WRITER(&t->calls);
  td_buf flat = TD_BUF_INIT;
  begin_turn(t, where);
  note_call(t, where);
  td_buf_char(&t->calls, t->calls.len ? ',' : '[');
  td_jw_begin_object(&w, NULL);
  if (id) td_api_write_json(&w, "id", id);
  td_jw_add(&w, "'type': 'function', 'function': {");
  if (name)
    td_responses_add_name(&flat, space, name);
  else if (strcmp(type, "function_call") != 0) // local_shell_call and the like
    td_buf_add(&flat, type, strlen(type) - strlen("_call"));
  if (flat.len) td_jw_str(&w, "name", flat.data);
  if (is_custom) {
    td_jw_add(&w, "'arguments': {'input': %s}", input);
  } else {
    if (!arguments) arguments = td_json_get(item, "action");
    td_api_write_json(&w, "arguments", arguments);
  }
  td_jw_add(&w, "}}");
  t->calls.failed |= flat.failed;
  td_buf_free(&flat);
  return TD_OK;
}

// Notes in the assistant's turn what has no result in the conversation, such as web_search_call.
static void add_note(turn *t, const cJSON *item, const char *type, const char *where) {
  const cJSON *action = td_json_get(item, "action");
  td_json_writer w = TD_JSON_WRITER(&t->content);
  if (t->content.len) td_buf_char(&t->content, '\n');
  td_buf_printf(&t->content, "[%.64s", type);
  if (action) {
    td_buf_char(&t->content, ' ');
    td_api_write_json(&w, NULL, action);
  }
  td_buf_char(&t->content, ']');
  begin_turn(t, where);
}

// What a tool returned: text, or parts with text.
static td_status write_output(const turn *t, const cJSON *item, const char *where) {
  const cJSON *output = td_json_get(item, "output");
  td_api_path at = td_api_member(where, "output");
  td_api_content said = td_dialect_begin_content(t->state, true);
  td_status st = TD_OK;
  td_responses_add_found(&said.text, td_json_get(item, "tools"), NULL);
  if (cJSON_IsObject(output)) st = td_api_add_shown_part(&said, output, false, at.text, t->error);
  if (output && !cJSON_IsObject(output))
    st = td_api_add_content(&said, output, false, at.text, t->error);
  td_dialect_write_result(t->w, t->state, item, "call_id", where, &said);
  return st;
}

static td_status write_message(turn *t, const cJSON *item, bool is_asked, const char *where) {
  const cJSON *role = td_json_get(item, "role"), *content = td_json_get(item, "content");
  td_api_path at = td_api_member(where, "content");
  if (!cJSON_IsString(role)) {
    at = td_api_member(where, "role");
    return td_api_wrong(t->error, at.text, "is missing or not a string");
  }
  if (strcmp(role->valuestring, "assistant") == 0) {
    if (t->content.len) end_turn(t);
    begin_turn(t, where);
    return td_api_add_parts(&t->content, content, false, at.text, t->error);
  }
  end_turn(t);
  td_api_content said = td_dialect_begin_content(t->state, strcmp(role->valuestring, "user") == 0);
  td_status st = td_api_add_content(&said, content, is_asked, at.text, t->error);
  td_dialect_begin_message(t->w, t->state, role->valuestring, where);
  td_api_write_content(t->w, &said);
  td_jw_end_object(t->w);
  return st;
}

static td_status write_item(turn *t, const cJSON *item, bool is_asked, const char *where);

static size_t n_written(const turn *t) {
  return t->w->out->len + t->content.len + t->reasoning.len + t->calls.len;
}

static td_status write_reference(turn *t, const cJSON *item, const char *where) {
  const cJSON *found;
  const td_api_path at = td_api_member(where, "id");
  td_status st = refer(&t->references, t->state, td_json_get(item, "id"), at.text, &found,
                       t->error);
  const size_t before = n_written(t);
  if (st == TD_OK) st = write_item(t, found, false, where);
  const size_t after = n_written(t);
  if (st != TD_OK || after <= before) return st;
  return count_referred(&t->references, after - before, at.text, t->error);
}

static td_status write_item(turn *t, const cJSON *item, bool is_asked, const char *where) {
  const char *name = "message";
  if (!cJSON_IsObject(item)) return td_api_wrong(t->error, where, "must be an object");
  td_status st = td_api_get_str_at(item, "type", where, &name, t->error);
  if (st != TD_OK) return st;
  if (strcmp(name, "message") == 0) return write_message(t, item, is_asked, where);
  if (strcmp(name, "reasoning") == 0) {
    const cJSON *content = td_json_get(item, "content");
    const td_api_path at = td_api_member(where, "content");
    end_turn(t);
    if (content) begin_turn(t, where);
    return content ? td_api_add_parts(&t->reasoning, content, false, at.text, t->error) : TD_OK;
  }
  if (strcmp(name, "additional_tools") == 0) return TD_OK; // they are offered
  if (strcmp(name, "item_reference") == 0) return write_reference(t, item, where);
  if (td_ends_with(name, "_output")) {
    end_turn(t);
    return write_output(t, item, where);
  }
  const bool is_call = td_ends_with(name, "_call") && td_json_get(item, "call_id");
  if (is_call || strcmp(name, "function_call") == 0) return add_call(t, item, name, where);
  add_note(t, item, name, where);
  return TD_OK;
}

// Appends the input as chat messages.
static td_status write_input(td_buf *out, const cJSON *root, td_dialect_state *state,
                             td_api_error *error) {
  const cJSON *input = td_json_get(root, "input");
  td_json_writer w = TD_JSON_WRITER(out);
  turn t = {.w = &w, .state = state, .error = error};
  td_status st = TD_OK;
  if (cJSON_IsString(input)) {
    td_dialect_begin_message(&w, state, "user", "input");
    td_jw_add(&w, "'content': %s}", input->valuestring);
  } else if (!cJSON_IsArray(input) || !input->child) {
    const bool is_chat = !input && td_json_get(root, "messages");
    st = td_api_wrong(error, "input", "must be a string or an array of items%s",
                      is_chat ? "; messages are what /v1/chat/completions takes" : "");
  } else {
    unsigned i = 0;
    const cJSON *asked = td_api_asked(input);
    for (const cJSON *item = input->child; item && st == TD_OK; item = item->next) {
      td_api_path where = td_api_item("input", i++);
      st = write_item(&t, item, item == asked, where.text);
    }
    end_turn(&t);
  }
  td_buf_free(&t.content);
  td_buf_free(&t.reasoning);
  td_buf_free(&t.calls);
  free_references(&t.references);
  return st;
}

// How many values a list without its brackets has.
static unsigned count_values(const char *list) {
  unsigned n = list[0] != '\0', depth = 0;
  bool in_string = false;
  for (const char *c = list; *c; c++) {
    if (in_string && *c == '\\') {
      c++;
    } else if (*c == '"') {
      in_string = !in_string;
    } else if (!in_string) {
      depth += (*c == '{' || *c == '[');
      depth -= (*c == '}' || *c == ']');
      n += *c == ',' && !depth;
    }
  }
  return n;
}

static td_status add_previous(td_buf *out, const cJSON *previous, td_dialect_state *state,
                              td_api_error *error) {
  static const char key[] = "previous_response_id";
  const bool is_found = cJSON_IsString(previous) && state->store &&
                        td_response_store_get(state->store, state->owner, previous->valuestring,
                                              TD_STORED_MESSAGES, out);
  if (!is_found) {
    return td_api_fail(error, 404, key, "previous_response_not_found",
                       "%s: there is no such response; responses are kept in memory, the last "
                       "ones only",
                       key);
  }
  for (unsigned n = count_values(td_buf_text(out)); n > 0; n--) {
    td_dialect_note(state, td_dialect_next_message(state).text, key);
    state->n_messages++;
  }
  td_buf_char(out, ',');
  return TD_OK;
}

// The conversation: that of previous_response_id, then the input. Without instructions, which
// count for one response.
static td_status gather_messages(td_buf *out, const cJSON *root, td_dialect_state *state,
                                 td_api_error *error) {
  static const char *const refused[] = {"conversation", "prompt"};
  const cJSON *previous = td_json_get(root, "previous_response_id");
  for (size_t i = 0; i < TD_COUNT(refused); i++) {
    if (!td_json_get(root, refused[i])) continue;
    return td_api_fail(error, 400, refused[i], "unsupported_parameter",
                       "%s is not supported; give previous_response_id", refused[i]);
  }
  td_status st = previous ? add_previous(out, previous, state, error) : TD_OK;
  return st == TD_OK ? write_input(out, root, state, error) : st;
}

// ---- tools and options -------------------------------------------------------------------------

// Log-probabilities are asked for by top_logprobs, or in include.
static void write_wanted_logprobs(td_json_writer *w, const cJSON *root) {
  const cJSON *top = td_json_get(root, "top_logprobs"), *include = td_json_get(root, "include");
  bool is_wanted = top && !(cJSON_IsNumber(top) && top->valuedouble == 0);
  for (const cJSON *item = include ? include->child : NULL; item; item = item->next)
    is_wanted |= cJSON_IsString(item) &&
                 strcmp(item->valuestring, "message.output_text.logprobs") == 0;
  if (!is_wanted) return;
  td_jw_bool(w, "logprobs", true);
  if (top) td_api_write_json(w, "top_logprobs", top);
}

static void write_format(td_json_writer *w, td_dialect_state *state, const cJSON *root) {
  const cJSON *format = td_json_get(td_json_get(root, "text"), "format");
  if (!format) return;
  td_dialect_note(state, "response_format", "text.format");
  td_dialect_note(state, "response_format.json_schema", "text.format");
  if (!td_json_is(format, "type", "json_schema")) {
    td_api_write_json(w, "response_format", format);
    return;
  }
  td_jw_add(w, "'response_format': {'type': 'json_schema'");
  td_api_write_json(w, "json_schema", format); // name, schema and strict are its members
  td_jw_end_object(w);
}

// Writes content as parts, as which a string, too, is shown.
static void write_parts(td_json_writer *w, const cJSON *content, bool is_assistant) {
  if (!cJSON_IsString(content)) {
    td_api_write_json(w, "content", content);
    return;
  }
  td_jw_add(w, "'content': [{'type': %s, 'text': %s}]", is_assistant ? "output_text" : "input_text",
            content->valuestring);
}

// The request's items, for those who ask for them later.
static void keep_input(td_dialect_state *state, const cJSON *root) {
  const cJSON *input = td_json_get(root, "input");
  const bool is_text = cJSON_IsString(input);
  for (const cJSON *item = is_text ? input : input->child; item;
       item = is_text ? NULL : item->next) {
    const char *type = td_json_text(item, "type");
    const cJSON *content = is_text ? item : td_json_get(item, "content");
    td_json_writer w = TD_JSON_WRITER(&state->input);
    if (state->input.len) td_buf_char(&state->input, ',');
    td_jw_add(&w, "{'type': %s", type ? type : "message");
    if (is_text) td_jw_str(&w, "role", "user");
    if (!is_text) td_dialect_pass(&w, item, "type content");
    if (content) write_parts(&w, content, td_json_is(item, "role", "assistant"));
    td_jw_end_object(&w);
  }
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

static td_status check(const cJSON *root, td_api_error *error) {
  static const td_member_type members[] = {{"instructions", "a string", cJSON_String},
                                           {"tools", "an array", cJSON_Array},
                                           {"text", "an object", cJSON_Object},
                                           {"reasoning", "an object", cJSON_Object},
                                           {"include", "an array", cJSON_Array},
                                           {"store", "true or false", cJSON_True | cJSON_False}};
  return td_dialect_check_types(root, members, TD_COUNT(members), error);
}

static td_status write_messages(td_json_writer *w, const cJSON *root, td_dialect_state *state,
                                td_api_error *error) {
  const cJSON *instructions = td_json_get(root, "instructions");
  td_dialect_note(state, "messages", "input");
  td_jw_begin_array(w, "messages");
  if (instructions) {
    td_dialect_begin_message(w, state, "system", "instructions");
    td_jw_add(w, "'content': %s}", instructions->valuestring);
  }
  td_status st = gather_messages(&state->messages, root, state, error);
  if (st == TD_OK) td_jw_raw(w, NULL, td_buf_text(&state->messages)); // one or more
  td_jw_end_array(w);
  w->out->failed |= state->messages.failed;
  return st;
}

td_status td_responses_translate(td_buf *out, const cJSON *root, td_dialect_state *state,
                                 td_api_error *error) {
  static const char own[] =
      "input instructions tools tool_choice text max_output_tokens reasoning previous_response_id "
      "store include metadata conversation prompt background service_tier user "
      "stream_options top_logprobs max_tool_calls prompt_cache_key safety_identifier "
      "client_metadata";
  const cJSON *choice = td_json_get(root, "tool_choice");
  td_json_writer w = TD_JSON_WRITER(out);
  td_status st = check(root, error);
  if (st != TD_OK) return st;
  td_jw_begin_object(&w, NULL);
  td_dialect_pass(&w, root, own);
  st = write_messages(&w, root, state, error);
  if (st != TD_OK) return st;
  td_dialect_move(&w, state, root, "", "max_output_tokens", "max_tokens");
  td_dialect_move(&w, state, root, "reasoning", "effort", "reasoning_effort");
  state->own_tools = cJSON_CreateObject();
  const unsigned n_tools = td_responses_write_tools(&w, root, state);
  if (choice) td_responses_write_choice(&w, choice, n_tools, state);
  write_wanted_logprobs(&w, root);
  write_format(&w, state, root);
  td_jw_end_object(&w);
  keep_echo(state, root);
  keep_input(state, root);
  state->is_stored = !cJSON_IsFalse(cJSON_GetObjectItemCaseSensitive(root, "store"));
  return st;
}
