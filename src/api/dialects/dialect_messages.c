// src/api/dialects/dialect_messages.c - Anthropic's Messages.
#include <string.h>

#include "api/dialects/dialect_impl.h"

// ---- request -----------------------------------------------------------------------------------

// A line that Claude Code puts in front of its prompt and that differs from request to request:
// the prefix cache would never be hit.
static bool is_billing(const char *text) {
  static const char line[] = "x-anthropic-billing-header:";
  return strncmp(text, line, sizeof line - 1) == 0;
}

// What of a request is written, and where to.
typedef struct {
  td_json_writer *w;
  td_dialect_state *s;
  td_api_error *error;
} writing;

static td_status write_system(const writing *to, const cJSON *system) {
  td_buf text = TD_BUF_INIT;
  td_status st = TD_OK;
  unsigned i = 0;
  if (!cJSON_IsArray(system)) st = td_api_add_parts(&text, system, true, "system", to->error);
  for (const cJSON *part = system->child; part && st == TD_OK; part = part->next) {
    const cJSON *line = td_json_get(part, "text");
    const td_api_path at = td_api_member(td_api_item("system", i++).text, "text");
    if (!cJSON_IsString(line)) {
      st = td_api_wrong(to->error, at.text, "is missing or not a string");
    } else if (!is_billing(line->valuestring)) {
      if (text.len) td_buf_char(&text, '\n');
      td_buf_str(&text, line->valuestring);
    }
  }
  if (st == TD_OK && text.len) {
    td_dialect_begin_message(to->w, to->s, "system", "system");
    td_jw_add(to->w, "'content': %p}", &text);
  }
  to->w->out->failed |= text.failed;
  td_buf_free(&text);
  return st;
}

static td_status write_result(const writing *to, const cJSON *block, const char *where) {
  const cJSON *content = td_json_get(block, "content");
  td_api_content said = td_dialect_begin_content(to->s, true);
  td_api_path at = td_api_member(where, "content");
  td_status st = content ? td_api_add_content(&said, content, false, at.text, to->error) : TD_OK;
  td_dialect_write_result(to->w, to->s, block, "tool_use_id", where, &said);
  return st;
}

// chat: the path of the call there.
static void write_use(const writing *to, const cJSON *block, const char *where, const char *chat) {
  const cJSON *id = td_json_get(block, "id"), *name = td_json_get(block, "name");
  td_dialect_note(to->s, chat, where);
  td_dialect_note(to->s, td_api_member(chat, "function").text, where);
  td_dialect_note(to->s, td_api_member(chat, "function.arguments").text,
                  td_api_member(where, "input").text);
  td_jw_begin_object(to->w, NULL);
  if (id) td_api_write_json(to->w, "id", id);
  td_jw_add(to->w, "'type': 'function', 'function': {");
  if (name) td_api_write_json(to->w, "name", name);
  td_api_write_json(to->w, "arguments", td_json_get(block, "input"));
  td_jw_add(to->w, "}}");
}

static void write_uses(const writing *to, const cJSON *content, const char *where,
                       const char *chat) {
  const td_api_path calls = td_api_member(chat, "tool_calls");
  unsigned i = 0, n = 0;
  td_jw_begin_array(to->w, "tool_calls");
  for (const cJSON *block = content->child; block; block = block->next, i++) {
    if (!td_json_is(block, "type", "tool_use")) continue;
    write_use(to, block, td_api_item(where, i).text, td_api_item(calls.text, n++).text);
  }
  td_jw_end_array(to->w);
}

// Blocks that are not part of what a message says.
static bool is_said(const cJSON *block) {
  static const char *const others[] = {"tool_use", "tool_result", "thinking", "redacted_thinking"};
  for (size_t i = 0; i < TD_COUNT(others); i++)
    if (td_json_is(block, "type", others[i])) return false;
  return true;
}

// Writes what the blocks of a message say to said, and what was thought to thinking.
static td_status gather(td_api_content *said, td_buf *thinking, const cJSON *content, bool is_asked,
                        const char *where, td_api_error *error) {
  unsigned i = 0;
  for (const cJSON *block = content->child; block; block = block->next) {
    const char *thought = NULL;
    const td_api_path at = td_api_item(where, i++);
    td_status st = TD_OK;
    if (td_json_is(block, "type", "thinking"))
      st = td_api_get_str_at(block, "thinking", at.text, &thought, error);
    if (thought) {
      if (thinking->len) td_buf_char(thinking, '\n');
      td_buf_str(thinking, thought);
    }
    if (is_said(block)) st = td_api_add_shown_part(said, block, is_asked, at.text, error);
    if (st != TD_OK) return st;
  }
  return TD_OK;
}

// An assistant's blocks are one message. A user's tool results come before what the user says.
static td_status write_blocks(const writing *to, const char *role, const cJSON *content,
                              bool is_asked, const char *message) {
  const bool is_assistant = strcmp(role, "assistant") == 0;
  const td_api_path where = td_api_member(message, "content");
  bool has_calls = false;
  td_status st = TD_OK;
  unsigned i = 0, n_results = 0;
  for (const cJSON *block = content->child; block && st == TD_OK; block = block->next, i++) {
    has_calls |= is_assistant && td_json_is(block, "type", "tool_use");
    if (!td_json_is(block, "type", "tool_result")) continue;
    st = write_result(to, block, td_api_item(where.text, i).text);
    n_results++;
  }
  td_api_content said = td_dialect_begin_content(to->s, !is_assistant);
  td_buf thinking = TD_BUF_INIT;
  if (st == TD_OK) st = gather(&said, &thinking, content, is_asked, where.text, to->error);
  const bool says = said.text.len || said.parts.len;
  if (st == TD_OK && (says || has_calls || is_assistant || !n_results)) {
    const td_api_path chat = td_dialect_next_message(to->s);
    td_dialect_begin_message(to->w, to->s, role, message);
    td_api_write_content(to->w, &said);
    if (thinking.len) td_jw_buf(to->w, "reasoning_content", &thinking);
    if (has_calls) write_uses(to, content, where.text, chat.text);
    td_jw_end_object(to->w);
  }
  to->w->out->failed |= thinking.failed;
  td_api_content_free(&said);
  td_buf_free(&thinking);
  return st;
}

static td_status write_messages(const writing *to, const cJSON *root) {
  const cJSON *messages = td_json_get(root, "messages"), *system = td_json_get(root, "system");
  if (!cJSON_IsArray(messages) || !messages->child)
    return td_api_wrong(to->error, "messages", "must be an array with at least one message");
  td_jw_begin_array(to->w, "messages");
  td_status st = system ? write_system(to, system) : TD_OK;
  unsigned i = 0;
  const cJSON *asked = td_api_asked(messages);
  for (const cJSON *m = messages->child; m && st == TD_OK; m = m->next) {
    const td_api_path where = td_api_item("messages", i++);
    const cJSON *role = td_json_get(m, "role"), *content = td_json_get(m, "content");
    if (cJSON_IsString(role) && cJSON_IsArray(content)) {
      st = write_blocks(to, role->valuestring, content, m == asked, where.text);
    } else { // a string; chat checks the rest
      td_dialect_note(to->s, td_dialect_next_message(to->s).text, where.text);
      to->s->n_messages++;
      td_api_write_json(to->w, NULL, m);
    }
  }
  td_jw_end_array(to->w);
  return st;
}

#define MAX_REFERRED 512 // names of tools

// The tools that a conversation refers to, by tool_reference or by a call: each once, the first
// first.
typedef struct {
  const char *names[MAX_REFERRED];
  size_t n;
} referred;

static void add_referred(referred *out, const cJSON *name) {
  if (!cJSON_IsString(name) || out->n == MAX_REFERRED) return;
  for (size_t i = 0; i < out->n; i++)
    if (strcmp(out->names[i], name->valuestring) == 0) return;
  out->names[out->n++] = name->valuestring;
}

static void find_referred(referred *out, const cJSON *value) {
  for (const cJSON *item = value->child; item; item = item->next) {
    const bool is_call = td_json_is(item, "type", "tool_use");
    if (is_call || td_json_is(item, "type", "tool_reference"))
      add_referred(out, td_json_get(item, is_call ? "name" : "tool_name"));
    if (!is_call) find_referred(out, item);
  }
}

// Whether a tool is the client's own: those that run at Anthropic have another type.
static bool is_own(const cJSON *tool) {
  return !td_json_text(tool, "type") || td_json_is(tool, "type", "custom");
}

static bool is_deferred(const cJSON *tool) {
  return cJSON_IsTrue(td_json_get(tool, "defer_loading")) &&
         cJSON_IsString(td_json_get(tool, "name"));
}

static void write_tool(const writing *to, const cJSON *tool, unsigned index, unsigned n) {
  static const char *const same[] = {"name", "description", "strict"};
  const td_api_path chat = td_api_item("tools", n), where = td_api_item("tools", index);
  td_dialect_note(to->s, chat.text, where.text);
  td_dialect_note(to->s, td_api_member(chat.text, "function").text, where.text);
  td_dialect_note(to->s, td_api_member(chat.text, "function.parameters").text,
                  td_api_member(where.text, "input_schema").text);
  td_jw_add(to->w, "{'type': 'function', 'function': {");
  for (size_t i = 0; i < TD_COUNT(same); i++) {
    const cJSON *item = td_json_get(tool, same[i]);
    if (item) td_api_write_json(to->w, same[i], item);
  }
  const cJSON *schema = td_json_get(tool, "input_schema");
  if (schema) td_api_write_json(to->w, "parameters", schema);
  td_jw_add(to->w, "}}");
}

// Tools of the client. Those whose loading is deferred come last, once and in the order in which
// they are referred to, so that the prompt in front of them stays the same. Returns how many.
static unsigned write_tools(const writing *to, const cJSON *root) {
  const cJSON *tools = td_json_get(root, "tools"), *messages = td_json_get(root, "messages");
  unsigned n = 0, index = 0;
  referred all = {.n = 0};
  if (!tools) return 0;
  if (messages) find_referred(&all, messages);
  add_referred(&all, td_json_get(td_json_get(root, "tool_choice"), "name"));
  td_jw_begin_array(to->w, "tools");
  for (const cJSON *tool = tools->child; tool; tool = tool->next, index++)
    if (is_own(tool) && !is_deferred(tool)) write_tool(to, tool, index, n++);
  for (size_t i = 0; i < all.n; i++) {
    const cJSON *tool = tools->child;
    for (index = 0; tool && !(is_own(tool) && is_deferred(tool) &&
                              strcmp(td_json_get(tool, "name")->valuestring, all.names[i]) == 0);
         index++)
      tool = tool->next;
    if (tool) write_tool(to, tool, index, n++);
  }
  td_jw_end_array(to->w);
  return n;
}

static td_status write_choice(const writing *to, const cJSON *choice, bool has_tools) {
  static const char key[] = "tool_choice";
  const char *word = NULL, *name = NULL;
  bool is_single = false;
  td_status st = td_api_get_str_at(choice, "type", key, &word, to->error);
  if (st == TD_OK) st = td_api_get_str_at(choice, "name", key, &name, to->error);
  if (st == TD_OK)
    st = td_api_get_bool_at(choice, "disable_parallel_tool_use", key, &is_single, to->error);
  if (st != TD_OK) return st;
  if (is_single) td_jw_bool(to->w, "parallel_tool_calls", false);
  if (word && (strcmp(word, "auto") == 0 || strcmp(word, "none") == 0)) {
    if (has_tools) td_jw_str(to->w, key, word);
  } else if (word && strcmp(word, "any") == 0) {
    td_jw_str(to->w, key, "required");
  } else if (word && strcmp(word, "tool") == 0) {
    td_dialect_note(to->s, "tool_choice.function", key);
    td_jw_begin_object(to->w, key);
    td_jw_add(to->w, "'type': 'function', 'function': {");
    if (name) td_jw_str(to->w, "name", name);
    td_jw_add(to->w, "}}");
  } else {
    return td_api_wrong(to->error, "tool_choice.type", "must be auto, any, tool or none");
  }
  return TD_OK;
}

static td_status write_format(const writing *to, const cJSON *root) {
  const cJSON *format = td_json_get(td_json_get(root, "output_config"), "format");
  const char *where = format ? "output_config.format" : "output_format";
  const td_api_path type = td_api_member(where, "type");
  if (!format) format = td_json_get(root, where);
  if (!format) return TD_OK;
  if (!td_json_is(format, "type", "json_schema"))
    return td_api_wrong(to->error, type.text, "must be json_schema");
  td_dialect_note(to->s, "response_format", where);
  td_dialect_note(to->s, "response_format.json_schema", where);
  td_jw_add(to->w, "'response_format': {'type': 'json_schema', 'json_schema': {");
  td_api_write_json(to->w, "schema", td_json_get(format, "schema"));
  td_jw_add(to->w, "}}");
  return TD_OK;
}

// Whether the last message is the beginning of the answer.
static bool is_prefilled(const cJSON *messages) {
  const cJSON *last = messages->child;
  while (last->next)
    last = last->next;
  const cJSON *content = td_json_get(last, "content");
  if (!td_json_is(last, "role", "assistant")) return false;
  if (cJSON_IsString(content)) return content->valuestring[0] != '\0';
  const cJSON *block = content ? content->child : NULL;
  while (block && block->next)
    block = block->next;
  return td_json_is(block, "type", "text");
}

#define NO_THREADS "thread_unsupported_request"

// Tools in OpenAI's form would be taken for ones that run at Anthropic, and left out.
static td_status refuse_foreign_tools(const cJSON *root, td_api_error *error) {
  const cJSON *tools = td_json_get(root, "tools");
  unsigned i = 0;
  for (const cJSON *tool = tools ? tools->child : NULL; tool; tool = tool->next, i++) {
    const td_api_path at = td_api_member(td_api_item("tools", i).text, "type");
    if (!td_json_is(tool, "type", "function")) continue;
    return td_api_wrong(error, at.text,
                        ": a tool of the client's own is of type custom or none, with name and "
                        "input_schema beside it");
  }
  return TD_OK;
}

static td_status check(const cJSON *root, const td_dialect_state *state, td_api_error *error) {
  static const td_member_type members[] = {{"tools", "an array", cJSON_Array},
                                           {"tool_choice", "an object", cJSON_Object},
                                           {"output_config", "an object", cJSON_Object},
                                           {"output_format", "an object", cJSON_Object}};
  if (td_json_get(root, "thread")) { // it would stand for messages that are not in the request
    return td_api_fail(error, 400, "thread", NO_THREADS,
                       "thread is not supported: send the whole conversation each time");
  }
  if (!state->is_count && !td_json_get(root, "max_tokens"))
    return td_api_wrong(error, "max_tokens", "is missing");
  td_status st = td_dialect_check_types(root, members, TD_COUNT(members), error);
  return st == TD_OK ? refuse_foreign_tools(root, error) : st;
}

static td_status translate(td_buf *out, const cJSON *root, td_dialect_state *state,
                           td_api_error *error) {
  static const char own[] =
      "messages system tools tool_choice stop_sequences metadata output_config output_format "
      "container context_management mcp_servers service_tier betas";
  const cJSON *choice = td_json_get(root, "tool_choice");
  td_json_writer w = TD_JSON_WRITER(out);
  const writing to = {.w = &w, .s = state, .error = error};
  td_status st = check(root, state, error);
  if (st != TD_OK) return st;
  td_jw_begin_object(&w, NULL);
  td_dialect_pass(&w, root, own);
  st = write_messages(&to, root);
  if (st != TD_OK) return st;
  const unsigned n_tools = write_tools(&to, root);
  if (choice) st = write_choice(&to, choice, n_tools > 0);
  if (st == TD_OK) st = write_format(&to, root);
  td_dialect_move(&w, state, root, "", "stop_sequences", "stop");
  td_dialect_move(&w, state, root, "output_config", "effort", "reasoning_effort");
  if (is_prefilled(td_json_get(root, "messages"))) {
    td_dialect_note(state, "continue_final_message", "messages");
    td_jw_bool(&w, "continue_final_message", true);
  }
  td_jw_end_object(&w);
  return st;
}

// ---- answer ------------------------------------------------------------------------------------

static void write_usage(td_json_writer *w, const td_api_usage *usage) {
  td_jw_add(w,
            "'usage': {'input_tokens': %lu, 'cache_creation_input_tokens': 0, "
            "'cache_read_input_tokens': %lu, 'output_tokens': %lu}",
            usage->n_prompt - usage->n_cached, usage->n_cached, usage->n_output);
}

static void write_stop(td_json_writer *w, const td_dialect_end *end) {
  const char *stop = td_dialect_stop_string(end->answer), *reason = end->finish_reason;
  td_jw_add(w, "'stop_reason': %s, 'stop_sequence': %s",
            strcmp(reason, "length") == 0       ? "max_tokens"
            : strcmp(reason, "tool_calls") == 0 ? "tool_use"
            : stop                              ? "stop_sequence"
                                                : "end_turn",
            stop);
}

static void begin_message(td_json_writer *w, const td_dialect_state *s) {
  char id[64];
  snprintf(id, sizeof id, "msg_%s", td_dialect_id(s));
  td_jw_add(w, "{'id': %s, 'type': 'message', 'role': 'assistant', 'model': %s, 'content': [", id,
            s->head->model);
}

static void begin(td_buf *out, td_dialect_state *s, const td_api_usage *usage) {
  td_json_writer w = td_dialect_begin_event(out, "message_start");
  td_jw_add(&w, "'message':");
  begin_message(&w, s);
  td_jw_add(&w, "], 'stop_reason': null, 'stop_sequence': null");
  write_usage(&w, usage);
  td_jw_end_object(&w);
  td_dialect_end_event(&w);
}

static void open_block(td_buf *out, td_dialect_state *s) {
  td_json_writer w = td_dialect_begin_event(out, "content_block_start");
  td_jw_add(&w, "'index': %u, 'content_block':", s->n_blocks);
  if (s->block == TD_BLOCK_CALL)
    td_jw_add(&w, "{'type': 'tool_use', 'id': %s, 'name': %s, 'input': {}}", td_dialect_call(s)->id,
              td_dialect_call(s)->name);
  else if (s->block == TD_BLOCK_REASONING)
    td_jw_add(&w, "{'type': 'thinking', 'thinking': '', 'signature': ''}");
  else
    td_jw_add(&w, "{'type': 'text', 'text': ''}");
  td_dialect_end_event(&w);
}

static void add_text(td_buf *out, td_dialect_state *s, const char *text, size_t len) {
  static const char *const types[][2] = {[TD_BLOCK_TEXT] = {"text_delta", "text"},
                                         [TD_BLOCK_REASONING] = {"thinking_delta", "thinking"},
                                         [TD_BLOCK_CALL] = {"input_json_delta", "partial_json"}};
  td_json_writer w = td_dialect_begin_event(out, "content_block_delta");
  td_jw_add(&w, "'index': %u, 'delta': {'type': %s", s->n_blocks - 1, types[s->block][0]);
  td_jw_str_len(&w, types[s->block][1], text, len);
  td_jw_end_object(&w);
  td_dialect_end_event(&w);
}

static void close_block(td_buf *out, td_dialect_state *s) {
  td_json_writer w = td_dialect_begin_event(out, "content_block_stop");
  td_jw_add(&w, "'index': %u", s->n_blocks - 1);
  td_dialect_end_event(&w);
}

static const td_block_writer writer = {open_block, add_text, close_block};

static void delta_of(td_buf *out, td_dialect_state *s, const td_delta *delta) {
  td_dialect_blocks(out, s, delta, &writer);
}

static void end_of(td_buf *out, td_dialect_state *s, const td_dialect_end *end) {
  td_dialect_close_block(out, s, &writer);
  td_json_writer w = td_dialect_begin_event(out, "message_delta");
  td_jw_begin_object(&w, "delta");
  write_stop(&w, end);
  td_jw_end_object(&w);
  write_usage(&w, end->usage);
  td_dialect_end_event(&w);
  w = td_dialect_begin_event(out, "message_stop");
  td_dialect_end_event(&w);
}

static void write_content(td_json_writer *w, const td_dialect_state *s, const td_delta *message) {
  if (message->reasoning.len)
    td_jw_add(w, "{'type': 'thinking', 'thinking': %p, 'signature': ''}", &message->reasoning);
  if (message->content.len) td_jw_add(w, "{'type': 'text', 'text': %p}", &message->content);
  for (uint32_t i = message->first_call; i < message->last_call; i++) {
    const td_tool_call *call = &s->parts->calls[i];
    const char *input = td_buf_text(&call->arguments);
    if (!call->is_whole || input[0] != '{') continue; // input has to be an object
    td_jw_add(w, "{'type': 'tool_use', 'id': %s, 'name': %s, 'input':", call->id, call->name);
    td_jw_raw(w, NULL, input);
    td_jw_end_object(w);
  }
}

static void whole(td_buf *out, td_dialect_state *s, const td_delta *message,
                  const td_dialect_end *end) {
  td_json_writer w = TD_JSON_WRITER(out);
  begin_message(&w, s);
  write_content(&w, s, message);
  td_jw_end_array(&w);
  write_stop(&w, end);
  write_usage(&w, end->usage);
  td_jw_end_object(&w);
}

static const char *type_of(int status) {
  switch (status) {
  case 401: return "authentication_error";
  case 403: return "permission_error";
  case 404: return "not_found_error";
  case 408: return "timeout_error";
  case 413: return "request_too_large";
  case 429: return "rate_limit_error";
  case 503: return "overloaded_error";
  default: return status >= 500 ? "api_error" : "invalid_request_error";
  }
}

static void write_error(td_buf *out, const td_api_error *error, bool in_stream) {
  char too_long[96]; // the words that clients look for
  snprintf(too_long, sizeof too_long, "prompt is too long: %lld tokens > %lld maximum",
           (long long)error->n_prompt_tokens, (long long)error->n_ctx - 1);
  td_json_writer w = TD_JSON_WRITER(out);
  if (in_stream)
    w = td_dialect_begin_event(out, "error");
  else
    td_jw_add(&w, "{'type': 'error'");
  td_jw_add(&w, "'error': {'type': %s, 'message': %s", type_of(error->status),
            error->n_ctx ? too_long : error->message);
  if (error->code && strcmp(error->code, NO_THREADS) == 0) // clients then do without
    td_jw_add(&w, "'details': {'error_code': %s, 'unsupported': []}", NO_THREADS);
  td_jw_end_object(&w);
  if (error->request_id) td_jw_str(&w, "request_id", error->request_id);
  if (in_stream)
    td_dialect_end_event(&w);
  else
    td_jw_end_object(&w);
}

const td_dialect td_dialect_messages = {.translate = translate,
                                        .begin = begin,
                                        .delta = delta_of,
                                        .end = end_of,
                                        .whole = whole,
                                        .error = write_error};
