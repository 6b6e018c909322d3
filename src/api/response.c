// src/api/response.c - writes complete responses and streaming chunks of the OpenAI protocol.
#include "api/response.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/utf8.h"

#define MIN_LOGPROB (-9999.0) // stands for minus infinity, which JSON lacks

void td_api_head_init(td_api_head *head, bool is_chat, const char *model, const td_tokenizer *tok,
                      int64_t created, const unsigned char random[16]) {
  *head = (td_api_head){.is_chat = is_chat, .model = model, .created = created, .tok = tok};
  int n = snprintf(head->id, sizeof head->id, "%s-", is_chat ? "chatcmpl" : "cmpl");
  for (int i = 0; i < 16; i++)
    n += snprintf(head->id + n, sizeof head->id - (size_t)n, "%02x", random[i]);
}

// ---- log-probabilities ----------------------------------------------------------------------

// Always a number, also for a logit that is not.
static double logprob_of(double value) {
  return value >= MIN_LOGPROB ? value : MIN_LOGPROB;
}

// Of a token that may be a prompt's first, which has none: NAN, written as null.
static double logprob_or_nan(double value) {
  return isnan(value) ? value : logprob_of(value);
}

// A token alone, as a string and as bytes. Bytes that are not UTF-8, and NUL, are escaped as the
// protocol does, so that different tokens stay distinguishable.
static void add_token_text(td_buf *out, const char *bytes, size_t len) {
  if (td_utf8_valid(bytes, len) && !memchr(bytes, '\0', len)) {
    td_buf_add(out, bytes, len);
    return;
  }
  td_buf_str(out, "bytes:");
  for (size_t i = 0; i < len; i++)
    td_buf_printf(out, "\\x%02x", (unsigned char)bytes[i]);
}

static void write_bytes(td_json_writer *w, const char *bytes, size_t len) {
  td_jw_begin_array(w, "bytes");
  for (size_t i = 0; i < len; i++)
    td_jw_int(w, NULL, (unsigned char)bytes[i]);
  td_jw_end_array(w);
}

static void write_top(td_json_writer *w, const td_api_head *head, const td_wire_token *token,
                      bool with_ids) {
  td_jw_begin_array(w, "top_logprobs");
  for (uint32_t i = 0; i < token->n_top && i < TD_WIRE_MAX_TOP; i++) {
    size_t len;
    const char *bytes = td_tokenizer_bytes(head->tok, token->top[i].id, &len);
    td_buf text = TD_BUF_INIT;
    add_token_text(&text, bytes, len);
    td_jw_begin_object(w, NULL);
    if (with_ids) td_jw_int(w, "id", token->top[i].id);
    td_jw_add(w, "'token': %p, 'logprob': %g", &text, logprob_of((double)token->top[i].value));
    write_bytes(w, bytes, len);
    td_jw_end_object(w);
    td_buf_free(&text);
  }
  td_jw_end_array(w);
}

// The token's piece of the text, truncated where a stop string ended the text.
static const char *piece_of(const td_answer *answer, const td_answer_token *t, size_t *len) {
  size_t end = t->end < answer->n_sure ? t->end : answer->n_sure;
  *len = end > t->begin ? end - t->begin : 0;
  return td_buf_text(&answer->text) + (*len ? t->begin : 0);
}

void td_api_write_token_logprobs(td_json_writer *w, const char *key, const td_api_head *head,
                                 const td_answer *answer, size_t first, size_t last,
                                 bool with_ids) {
  td_jw_begin_array(w, key);
  for (size_t i = first; i < last; i++) {
    const td_answer_token *t = &answer->tokens[i];
    size_t len, n_bytes;
    const char *piece = piece_of(answer, t, &len);
    const char *bytes = td_tokenizer_bytes(head->tok, t->token.id, &n_bytes);
    bool is_hidden = answer->detok.skip_special && td_tokenizer_is_special(head->tok, t->token.id);
    if (is_hidden) n_bytes = 0; // the content omits it as well
    td_jw_begin_object(w, NULL);
    if (with_ids) td_jw_int(w, "id", t->token.id);
    td_jw_str_len(w, "token", piece, len);
    td_jw_double(w, "logprob", logprob_of((double)t->token.logprob));
    write_bytes(w, bytes, n_bytes);
    write_top(w, head, &t->token, with_ids);
    td_jw_end_object(w);
  }
  td_jw_end_array(w);
}

static void write_chat_logprobs(td_json_writer *w, const td_api_head *head, const td_answer *answer,
                                size_t first, size_t last) {
  td_jw_begin_object(w, "logprobs");
  td_api_write_token_logprobs(w, "content", head, answer, first, last, false);
  td_jw_add(w, "'refusal': null}");
}

static void write_legacy_top(td_json_writer *w, const td_api_head *head,
                             const td_wire_token *token) {
  td_jw_begin_object(w, NULL);
  for (uint32_t i = 0; i < token->n_top && i < TD_WIRE_MAX_TOP; i++) {
    size_t len;
    const char *bytes = td_tokenizer_bytes(head->tok, token->top[i].id, &len);
    td_buf text = TD_BUF_INIT;
    add_token_text(&text, bytes, len);
    td_jw_double(w, td_buf_text(&text), logprob_of((double)token->top[i].value));
    w->out->failed |= text.failed;
    td_buf_free(&text);
  }
  td_jw_end_object(w);
}

static void write_legacy_logprobs(td_json_writer *w, const td_api_head *head,
                                  const td_answer *answer, size_t first, size_t last) {
  const td_answer_token *t = answer->tokens;
  td_jw_add(w, "'logprobs': {'tokens': [");
  for (size_t i = first; i < last; i++) {
    size_t len;
    const char *piece = piece_of(answer, &t[i], &len);
    td_jw_str_len(w, NULL, piece, len);
  }
  td_jw_add(w, "], 'token_logprobs': [");
  for (size_t i = first; i < last; i++)
    td_jw_double(w, NULL, logprob_or_nan((double)t[i].token.logprob));
  td_jw_add(w, "], 'top_logprobs': [");
  for (size_t i = first; i < last; i++)
    if (isnan(t[i].token.logprob))
      td_jw_null(w, NULL);
    else
      write_legacy_top(w, head, &t[i].token);
  td_jw_add(w, "], 'text_offset': [");
  for (size_t i = first; i < last; i++)
    td_jw_int(w, NULL, (int64_t)t[i].n_chars_before);
  td_jw_add(w, "]}");
}

static void write_logprobs(td_json_writer *w, const td_api_head *head, const td_answer *answer,
                           size_t first, size_t last) {
  if (!answer->keep_tokens)
    td_jw_null(w, "logprobs");
  else if (head->is_chat)
    write_chat_logprobs(w, head, answer, first, last);
  else
    write_legacy_logprobs(w, head, answer, first, last);
}

static void begin(td_json_writer *w, const td_api_head *head, const char *object) {
  td_jw_add(w, "{'id': %s, 'object': %s, 'created': %ld, 'model': %s", head->id, object,
            head->created, head->model);
  if (head->fingerprint && head->fingerprint[0])
    td_jw_str(w, "system_fingerprint", head->fingerprint);
}

static void write_usage(td_json_writer *w, const td_api_usage *usage) {
  td_jw_add(w,
            "'usage': {'prompt_tokens': %lu, 'completion_tokens': %lu, 'total_tokens': %lu, "
            "'prompt_tokens_details': {'cached_tokens': %lu}, "
            "'completion_tokens_details': {'accepted_prediction_tokens': %lu, "
            "'rejected_prediction_tokens': %lu}}",
            usage->n_prompt, usage->n_output, usage->n_prompt + usage->n_output, usage->n_cached,
            usage->n_accepted, usage->n_rejected);
}

static double per_second(uint64_t n, uint64_t ns) {
  return ns ? (double)n * 1e9 / (double)ns : 0;
}

static double ms_each(uint64_t n, uint64_t ns) {
  return n ? (double)ns / 1e6 / (double)n : 0;
}

void td_api_write_timings(td_json_writer *w, const td_api_timings *t) {
  td_jw_add(w,
            "'timings': {'cache_n': %lu, 'prompt_n': %lu, 'prompt_ms': %g, "
            "'prompt_per_token_ms': %g, 'prompt_per_second': %g, 'predicted_n': %lu, "
            "'predicted_ms': %g, 'predicted_per_token_ms': %g",
            t->n_cached, t->n_prefilled, (double)t->prefill_ns / 1e6,
            ms_each(t->n_prefilled, t->prefill_ns), per_second(t->n_prefilled, t->prefill_ns),
            t->n_output, (double)t->follow_ns / 1e6, ms_each(t->n_followed, t->follow_ns));
  td_jw_add(w, "'predicted_per_second': %g}", per_second(t->n_followed, t->follow_ns));
}

// ---- chat ------------------------------------------------------------------------------------

// Streaming: writes the part of each call that was not sent yet, with the call's index.
static void write_calls(td_json_writer *w, const td_output_parser *parts, const td_delta *delta,
                        bool in_pieces) {
  if (delta->first_call == delta->last_call) return;
  td_jw_begin_array(w, "tool_calls");
  for (uint32_t i = delta->first_call; i < delta->last_call; i++) {
    const td_tool_call *call = &parts->calls[i];
    td_jw_begin_object(w, NULL);
    if (in_pieces) td_jw_int(w, "index", i);
    if (!call->is_sent) td_jw_add(w, "'id': %s, 'type': 'function'", call->id);
    td_jw_begin_object(w, "function");
    if (!call->is_sent) td_jw_str(w, "name", call->name);
    td_jw_str_len(w, "arguments", td_buf_text(&call->arguments) + call->n_sent,
                  call->arguments.len - call->n_sent);
    td_jw_add(w, "}}");
  }
  td_jw_end_array(w);
}

static void write_text_member(td_json_writer *w, const char *key, const td_buf *text) {
  if (text->len > 0) td_jw_buf(w, key, text);
}

static void write_message(td_json_writer *w, const td_api_choice *choice) {
  const td_delta *message = choice->message;
  td_jw_add(w, "'message': {'role': 'assistant'");
  if (message->content.len == 0 && message->first_call < message->last_call)
    td_jw_null(w, "content");
  else
    td_jw_buf(w, "content", &message->content);
  write_text_member(w, "reasoning_content", &message->reasoning);
  write_calls(w, choice->parts, message, false);
  td_jw_add(w, "'refusal': null}");
}

// ---- non-streaming --------------------------------------------------------------------------

// One candidate of a prompt's token, as in vLLM.
static void write_candidate(td_json_writer *w, const td_api_head *head, int32_t id, double logprob,
                            int64_t rank) {
  char key[16];
  size_t len;
  const char *bytes = td_tokenizer_bytes(head->tok, id, &len);
  td_buf text = TD_BUF_INIT;
  add_token_text(&text, bytes, len);
  snprintf(key, sizeof key, "%d", id);
  td_jw_begin_object(w, key);
  td_jw_double(w, "logprob", logprob_of(logprob));
  if (rank)
    td_jw_int(w, "rank", rank);
  else
    td_jw_null(w, "rank"); // not among the candidates
  td_jw_add(w, "'decoded_token': %p}", &text);
  td_buf_free(&text);
}

static void write_prompt_logprobs(td_json_writer *w, const td_api_head *head,
                                  const td_api_choice *choice) {
  td_jw_begin_array(w, "prompt_logprobs");
  for (uint32_t i = 0; i < choice->n_prompt; i++) {
    const td_wire_token *t = &choice->prompt[i];
    if (isnan(t->logprob)) {
      td_jw_null(w, NULL);
      continue;
    }
    int64_t rank = 0;
    for (uint32_t k = 0; k < t->n_top && !rank; k++)
      if (t->top[k].id == t->id) rank = k + 1;
    td_jw_begin_object(w, NULL);
    write_candidate(w, head, t->id, (double)t->logprob, rank);
    for (uint32_t k = 0; k < t->n_top && k < choice->n_prompt_top; k++)
      if (t->top[k].id != t->id)
        write_candidate(w, head, t->top[k].id, (double)t->top[k].value, k + 1);
    td_jw_end_object(w);
  }
  td_jw_end_array(w);
}

size_t td_api_n_shown(const td_answer *answer) {
  size_t n = answer->n_kept;
  while (n > 0 && answer->stopped && answer->tokens[n - 1].begin >= answer->n_sure)
    n--;
  return n;
}

static void write_choice(td_json_writer *w, const td_api_head *head, const td_api_choice *choice,
                         uint32_t index) {
  const td_answer *answer = choice->answer;
  td_jw_add(w, "{'index': %u", index);
  if (head->is_chat)
    write_message(w, choice);
  else
    td_jw_str_len(w, "text", td_buf_text(&answer->text), answer->n_sure);
  write_logprobs(w, head, answer, 0, td_api_n_shown(answer));
  if (choice->prompt) write_prompt_logprobs(w, head, choice);
  if (choice->receipt) td_receipt_add(w, "receipt", choice->receipt);
  td_jw_add(w, "'finish_reason': %s}", choice->finish_reason);
}

void td_api_write_response(td_buf *out, const td_api_head *head, const td_api_choice *choices,
                           uint32_t n_choices, const td_api_usage *usage,
                           const td_api_timings *timings) {
  td_json_writer w = TD_JSON_WRITER(out);
  begin(&w, head, head->is_chat ? "chat.completion" : "text_completion");
  td_jw_begin_array(&w, "choices");
  for (uint32_t i = 0; i < n_choices; i++)
    write_choice(&w, head, &choices[i], i);
  td_jw_end_array(&w);
  write_usage(&w, usage);
  td_api_write_timings(&w, timings);
  td_jw_end_object(&w);
}

// ---- streaming ------------------------------------------------------------------------------

static void begin_chunk(td_json_writer *w, const td_api_head *head) {
  begin(w, head, head->is_chat ? "chat.completion.chunk" : "text_completion");
  td_jw_begin_array(w, "choices");
}

// Ends a choice in a chunk that is not the last.
static void end_choice(td_json_writer *w, const td_api_usage *so_far) {
  td_jw_add(w, "'finish_reason': null}]");
  if (so_far) write_usage(w, so_far);
  td_jw_end_object(w);
}

static td_json_writer begin_choice(td_buf *out, const td_api_head *head, uint32_t index) {
  td_json_writer w = TD_JSON_WRITER(out);
  begin_chunk(&w, head);
  td_jw_add(&w, "{'index': %u", index);
  return w;
}

void td_api_write_role(td_buf *out, const td_api_head *head, uint32_t index) {
  td_json_writer w = begin_choice(out, head, index);
  td_jw_add(&w, "'delta': {'role': 'assistant', 'content': ''}, 'logprobs': null");
  end_choice(&w, NULL);
}

void td_api_write_progress(td_buf *out, const td_api_head *head, uint32_t index,
                           const td_api_progress *progress) {
  td_json_writer w = begin_choice(out, head, index);
  if (head->is_chat)
    td_jw_add(&w, "'delta': {'role': 'assistant', 'content': null}");
  else
    td_jw_str(&w, "text", "");
  td_jw_add(&w,
            "'logprobs': null, 'finish_reason': null}], 'prompt_progress': {'total': %lu, "
            "'cache': %lu, 'processed': %lu, 'time_ms': %lu}}",
            progress->n_prompt, progress->n_cached, progress->n_done,
            progress->elapsed_ns / 1000000);
}

void td_api_write_piece(td_buf *out, const td_api_head *head, uint32_t index,
                        const td_answer *answer, const td_answer_piece *piece,
                        const td_api_usage *so_far) {
  td_json_writer w = begin_choice(out, head, index);
  td_jw_str_len(&w, "text", td_buf_text(&answer->text) + piece->begin, piece->end - piece->begin);
  write_logprobs(&w, head, answer, piece->first, piece->last);
  end_choice(&w, so_far);
}

void td_api_write_delta(td_buf *out, const td_api_head *head, uint32_t index,
                        const td_answer *answer, const td_answer_piece *piece,
                        const td_output_parser *parts, const td_delta *delta,
                        const td_api_usage *so_far) {
  td_json_writer w = begin_choice(out, head, index);
  td_jw_begin_object(&w, "delta");
  write_text_member(&w, "reasoning_content", &delta->reasoning);
  write_text_member(&w, "content", &delta->content);
  write_calls(&w, parts, delta, true);
  td_jw_end_object(&w);
  write_logprobs(&w, head, answer, piece->first, piece->last);
  end_choice(&w, so_far);
}

void td_api_write_finish(td_buf *out, const td_api_head *head, uint32_t index,
                         const char *finish_reason, const td_receipt *receipt,
                         const td_api_timings *timings, const td_api_usage *so_far) {
  td_json_writer w = begin_choice(out, head, index);
  if (head->is_chat)
    td_jw_add(&w, "'delta': {}");
  else
    td_jw_str(&w, "text", "");
  td_jw_null(&w, "logprobs");
  if (receipt) td_receipt_add(&w, "receipt", receipt);
  td_jw_add(&w, "'finish_reason': %s}]", finish_reason);
  td_api_write_timings(&w, timings);
  if (so_far) write_usage(&w, so_far);
  td_jw_end_object(&w);
}

void td_api_write_usage(td_buf *out, const td_api_head *head, const td_api_usage *usage) {
  td_json_writer w = TD_JSON_WRITER(out);
  begin_chunk(&w, head);
  td_jw_end_array(&w);
  write_usage(&w, usage);
  td_jw_end_object(&w);
}
