// src/api/dialects/dialect_responses.c - OpenAI's Responses: what is generated, as items.
#include <string.h>

#include "api/dialects/responses_impl.h"

static void item_id(const td_dialect_state *s, td_block_kind kind, uint32_t index, char out[80]) {
  static const char *const prefixes[] = {
      [TD_BLOCK_REASONING] = "rs", [TD_BLOCK_TEXT] = "msg", [TD_BLOCK_CALL] = "fc"};
  snprintf(out, 80, "%s_%s_%u", prefixes[kind], td_dialect_id(s), index);
}

// The log-probabilities of a text that the answer has; without them, or without text, none.
static void write_logprobs(td_json_writer *w, const td_dialect_state *s, const char *text,
                           size_t len) {
  const td_answer *answer = s->answer;
  const char *all = td_buf_text(&answer->text);
  const char *at = len && answer->n_kept ? memmem(all, answer->text.len, text, len) : NULL;
  const size_t begin = at ? (size_t)(at - all) : 0, end = at ? begin + len : 0;
  size_t first = 0, last;
  while (first < answer->n_kept && answer->tokens[first].end <= begin)
    first++;
  for (last = first; last < answer->n_kept && answer->tokens[last].begin < end;)
    last++;
  td_api_write_token_logprobs(w, "logprobs", s->head, answer, first, last, false);
}

static void write_part(td_json_writer *w, const char *key, const td_dialect_state *s,
                       const char *text, size_t len) {
  td_jw_begin_object(w, key);
  td_jw_str(w, "type", "output_text");
  td_jw_str_len(w, "text", text, len);
  td_jw_add(w, "'annotations': []");
  write_logprobs(w, s, text, len);
  td_jw_end_object(w);
}

// What is called, and with what.
static void write_call(td_json_writer *w, const td_dialect_state *s, const td_tool_call *call,
                       const char *text, size_t len) {
  const td_responses_call of = td_responses_call_of(s, call);
  if (of == TD_RESPONSES_SEARCH) {
    td_jw_str(w, "execution", "client");
    td_jw_raw(w, "arguments", text && call->is_whole && text[0] == '{' ? text : "{}");
    return;
  }
  td_responses_write_name(w, s, call);
  if (of == TD_RESPONSES_FUNCTION) {
    td_jw_str_len(w, "arguments", text ? text : "", len);
    return;
  }
  td_buf input = TD_BUF_INIT;
  if (text) td_responses_add_input(&input, text, len);
  td_jw_buf(w, "input", &input);
  td_buf_free(&input);
}

// An item, finished or as it begins (text NULL). A call that broke off is incomplete.
static void write_item(td_json_writer *w, const char *key, const td_dialect_state *s,
                       td_block_kind kind, uint32_t index, const td_tool_call *call,
                       const char *text, size_t len) {
  static const char *const types[] = {[TD_BLOCK_REASONING] = "reasoning",
                                      [TD_BLOCK_TEXT] = "message",
                                      [TD_BLOCK_CALL] = "function_call"};
  char id[80];
  item_id(s, kind, index, id);
  td_jw_begin_object(w, key);
  td_jw_str(w, "id", id);
  const td_responses_call of = td_responses_call_of(s, call);
  td_jw_str(w, "type",
            of == TD_RESPONSES_CUSTOM   ? "custom_tool_call"
            : of == TD_RESPONSES_SEARCH ? "tool_search_call"
                                        : types[kind]);
  const bool is_cut = kind == TD_BLOCK_CALL && !call->is_whole;
  td_jw_str(w, "status", !text ? "in_progress" : is_cut ? "incomplete" : "completed");
  if (kind == TD_BLOCK_CALL) {
    td_jw_str(w, "call_id", call->id);
    write_call(w, s, call, text, len);
  } else {
    if (kind == TD_BLOCK_TEXT) td_jw_str(w, "role", "assistant");
    if (kind == TD_BLOCK_REASONING) td_jw_add(w, "'summary': []");
    td_jw_begin_array(w, "content");
    if (text && kind == TD_BLOCK_TEXT) write_part(w, NULL, s, text, len);
    if (text && kind == TD_BLOCK_REASONING) {
      td_jw_add(w, "{'type': 'reasoning_text'");
      td_jw_str_len(w, "text", text, len);
      td_jw_end_object(w);
    }
    td_jw_end_array(w);
  }
  td_jw_end_object(w);
}

static void keep_item(td_dialect_state *s, td_block_kind kind, uint32_t index,
                      const td_tool_call *call, const char *text, size_t len) {
  td_json_writer w = TD_JSON_WRITER(&s->items);
  if (s->items.len) td_buf_char(&s->items, ',');
  write_item(&w, NULL, s, kind, index, call, text, len);
}

static void write_usage(td_json_writer *w, const td_api_usage *usage) {
  td_jw_add(w,
            "'usage': {'input_tokens': %lu, 'input_tokens_details': {'cached_tokens': %lu}, "
            "'output_tokens': %lu, 'output_tokens_details': {'reasoning_tokens': %lu}, "
            "'total_tokens': %lu}",
            usage->n_prompt, usage->n_cached, usage->n_output, usage->n_reasoning,
            usage->n_prompt + usage->n_output);
}

static void response_id(const td_dialect_state *s, char out[64]) {
  snprintf(out, 64, "resp_%s", td_dialect_id(s));
}

// Whether a limit cut the answer, or a stop string its last call.
static bool is_incomplete(const td_dialect_state *s, const td_dialect_end *end) {
  return strcmp(end->finish_reason, "length") == 0 ||
         (end->answer->stopped && td_output_parser_is_cut(s->parts));
}

// The response; end NULL: as it begins.
static void write_response(td_json_writer *w, const td_dialect_state *s,
                           const td_dialect_end *end) {
  char id[64];
  response_id(s, id);
  const bool is_cut = end && is_incomplete(s, end);
  td_jw_add(w, "{'id': %s, 'object': 'response', 'created_at': %ld, 'status': %s, 'error': null",
            id, s->head->created,
            !end     ? "in_progress"
            : is_cut ? "incomplete"
                     : "completed");
  if (is_cut)
    td_jw_add(w, "'incomplete_details': {'reason': %s}",
              strcmp(end->finish_reason, "length") == 0 ? "max_output_tokens" : "stop");
  else
    td_jw_null(w, "incomplete_details");
  td_jw_add(w, "'model': %s, 'output': [", s->head->model);
  td_buf_add(w->out, td_buf_text(&s->items), s->items.len);
  td_jw_end_array(w);
  td_buf_add(w->out, td_buf_text(&s->echo), s->echo.len);
  if (end)
    write_usage(w, end->usage);
  else
    td_jw_null(w, "usage");
  td_jw_end_object(w);
}

// ---- events ------------------------------------------------------------------------------------

static td_json_writer begin_event(td_buf *out, td_dialect_state *s, const char *type) {
  td_json_writer w = td_dialect_begin_event(out, type);
  td_jw_add(&w, "'sequence_number': %lu", s->sequence++);
  return w;
}

// An event about the open item.
static td_json_writer begin_item_event(td_buf *out, td_dialect_state *s, const char *type,
                                       uint32_t index, bool has_part) {
  char id[80];
  item_id(s, s->block, index, id);
  td_json_writer w = begin_event(out, s, type);
  td_jw_add(&w, "'item_id': %s, 'output_index': %u", id, index);
  if (has_part) td_jw_int(&w, "content_index", 0);
  return w;
}

static void response_event(td_buf *out, td_dialect_state *s, const char *type,
                           const td_dialect_end *end) {
  td_json_writer w = begin_event(out, s, type);
  td_jw_add(&w, "'response':");
  write_response(&w, s, end);
  td_dialect_end_event(&w);
}

static void begin(td_buf *out, td_dialect_state *s, const td_api_usage *usage) {
  (void)usage;
  response_event(out, s, "response.created", NULL);
  response_event(out, s, "response.in_progress", NULL);
}

static const td_tool_call *call_of(const td_dialect_state *s) {
  return s->block == TD_BLOCK_CALL ? td_dialect_call(s) : NULL;
}

static void open_block(td_buf *out, td_dialect_state *s) {
  td_json_writer w = begin_event(out, s, "response.output_item.added");
  td_jw_int(&w, "output_index", s->n_blocks);
  write_item(&w, "item", s, s->block, s->n_blocks, call_of(s), NULL, 0);
  td_dialect_end_event(&w);
  if (s->block == TD_BLOCK_TEXT) {
    w = begin_item_event(out, s, "response.content_part.added", s->n_blocks, true);
    write_part(&w, "part", s, "", 0);
    td_dialect_end_event(&w);
  }
}

static void add_text(td_buf *out, td_dialect_state *s, const char *text, size_t len) {
  static const char *const types[] = {[TD_BLOCK_REASONING] = "response.reasoning_text.delta",
                                      [TD_BLOCK_TEXT] = "response.output_text.delta",
                                      [TD_BLOCK_CALL] = "response.function_call_arguments.delta"};
  if (td_responses_call_of(s, call_of(s)) != TD_RESPONSES_FUNCTION) return; // sent when it is whole
  td_json_writer w = begin_item_event(out, s, types[s->block], s->n_blocks - 1,
                                      s->block != TD_BLOCK_CALL);
  td_jw_str_len(&w, "delta", text, len);
  if (s->block == TD_BLOCK_TEXT) {
    td_api_write_token_logprobs(&w, "logprobs", s->head, s->answer, s->piece.first,
                                s->answer->n_kept ? s->piece.last : s->piece.first, false);
  }
  td_dialect_end_event(&w);
}

// The whole text of the open block.
static const char *block_text(const td_dialect_state *s, size_t *len) {
  const td_buf *all = s->block == TD_BLOCK_REASONING ? &s->reasoning : &s->content;
  size_t from = s->block_begin;
  if (s->block == TD_BLOCK_CALL) {
    all = &td_dialect_call(s)->arguments;
    from = 0;
  }
  *len = all->len - from;
  return td_buf_text(all) + from;
}

// The text of a call of a tool that takes text.
static void send_input(td_buf *out, td_dialect_state *s, uint32_t index, const char *arguments,
                       size_t len) {
  td_buf input = TD_BUF_INIT;
  td_responses_add_input(&input, arguments, len);
  static const char *const types[] = {"response.custom_tool_call_input.delta",
                                      "response.custom_tool_call_input.done"};
  for (size_t i = 0; i < TD_COUNT(types); i++) {
    td_json_writer w = begin_item_event(out, s, types[i], index, false);
    td_jw_buf(&w, i ? "input" : "delta", &input);
    td_dialect_end_event(&w);
  }
  td_buf_free(&input);
}

static void close_block(td_buf *out, td_dialect_state *s) {
  static const char *const types[] = {[TD_BLOCK_REASONING] = "response.reasoning_text.done",
                                      [TD_BLOCK_TEXT] = "response.output_text.done",
                                      [TD_BLOCK_CALL] = "response.function_call_arguments.done"};
  const uint32_t index = s->n_blocks - 1;
  size_t len;
  const char *text = block_text(s, &len);
  bool is_call = s->block == TD_BLOCK_CALL;
  td_json_writer w;
  const td_responses_call of = td_responses_call_of(s, call_of(s));
  if (of == TD_RESPONSES_CUSTOM) {
    send_input(out, s, index, text, len);
  } else if (of == TD_RESPONSES_FUNCTION) {
    w = begin_item_event(out, s, types[s->block], index, !is_call);
    if (is_call) td_responses_write_name(&w, s, td_dialect_call(s));
    td_jw_str_len(&w, is_call ? "arguments" : "text", text, len);
    if (s->block == TD_BLOCK_TEXT) write_logprobs(&w, s, text, len);
    td_dialect_end_event(&w);
  }
  if (s->block == TD_BLOCK_TEXT) {
    w = begin_item_event(out, s, "response.content_part.done", index, true);
    write_part(&w, "part", s, text, len);
    td_dialect_end_event(&w);
  }
  w = begin_event(out, s, "response.output_item.done");
  td_jw_int(&w, "output_index", index);
  write_item(&w, "item", s, s->block, index, call_of(s), text, len);
  td_dialect_end_event(&w);
  keep_item(s, s->block, index, call_of(s), text, len);
}

static const td_block_writer writer = {open_block, add_text, close_block};

static void delta_of(td_buf *out, td_dialect_state *s, const td_delta *delta) {
  td_dialect_blocks(out, s, delta, &writer);
}

// Keeps the response, and the conversation with the answer.
static void store(td_dialect_state *s, const td_buf *content, const td_buf *reasoning,
                  const td_dialect_end *end) {
  char id[64];
  if (!s->is_stored || !s->store) return;
  response_id(s, id);
  td_json_writer w = TD_JSON_WRITER(&s->messages);
  td_buf_char(&s->messages, ',');
  td_jw_add(&w, "{'role': 'assistant', 'content': %p", content);
  if (reasoning->len) td_jw_buf(&w, "reasoning_content", reasoning);
  if (s->parts->n_calls) {
    td_jw_begin_array(&w, "tool_calls");
    for (uint32_t i = 0; i < s->parts->n_calls; i++) {
      const td_tool_call *call = &s->parts->calls[i];
      td_jw_add(&w, "{'id': %s, 'type': 'function', 'function': {'name': %s, 'arguments': %p}}",
                call->id, call->name, &call->arguments);
    }
    td_jw_end_array(&w);
  }
  td_jw_end_object(&w);
  td_buf response = TD_BUF_INIT;
  write_response(&TD_JSON_WRITER(&response), s, end);
  td_response_store_put(s->store, s->owner, id,
                        (const td_buf *const[]){[TD_STORED_MESSAGES] = &s->messages,
                                                [TD_STORED_INPUT] = &s->input,
                                                [TD_STORED_RESPONSE] = &response});
  td_buf_free(&response);
}

static void end_of(td_buf *out, td_dialect_state *s, const td_dialect_end *end) {
  const bool is_cut = is_incomplete(s, end);
  td_dialect_close_block(out, s, &writer);
  response_event(out, s, is_cut ? "response.incomplete" : "response.completed", end);
  store(s, &s->content, &s->reasoning, end);
}

static void whole(td_buf *out, td_dialect_state *s, const td_delta *message,
                  const td_dialect_end *end) {
  uint32_t n = 0;
  if (message->reasoning.len)
    keep_item(s, TD_BLOCK_REASONING, n++, NULL, message->reasoning.data, message->reasoning.len);
  bool has_calls = message->first_call < message->last_call;
  if (message->content.len || !has_calls)
    keep_item(s, TD_BLOCK_TEXT, n++, NULL, td_buf_text(&message->content), message->content.len);
  for (uint32_t i = message->first_call; i < message->last_call; i++) {
    const td_tool_call *call = &s->parts->calls[i];
    keep_item(s, TD_BLOCK_CALL, n++, call, td_buf_text(&call->arguments), call->arguments.len);
  }
  write_response(&TD_JSON_WRITER(out), s, end);
  store(s, &message->content, &message->reasoning, end);
}

static void write_error(td_buf *out, const td_api_error *error, bool in_stream) {
  if (!in_stream) {
    td_api_error_write(out, error);
    return;
  }
  const bool is_too_long = error->code && strcmp(error->code, "context_length_exceeded") == 0;
  td_json_writer w = td_dialect_begin_event(out, is_too_long ? "response.failed" : "error");
  if (is_too_long) // of a response that has not begun
    td_jw_add(&w,
              "'sequence_number': 0, 'response': {'object': 'response', 'status': 'failed', "
              "'output': [], 'error': {'code': %s, 'message': %s}}",
              error->code, error->message);
  else
    td_jw_add(&w, "'code': %s, 'message': %s, 'param': %s",
              error->code ? error->code : "server_error", error->message,
              error->param[0] ? error->param : NULL);
  td_dialect_end_event(&w);
}

const td_dialect td_dialect_responses = {.translate = td_responses_translate,
                                         .begin = begin,
                                         .delta = delta_of,
                                         .end = end_of,
                                         .whole = whole,
                                         .error = write_error,
                                         .has_logprobs = true};
