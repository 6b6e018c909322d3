// src/api/response.h - responses of the OpenAI protocol, whole and in chunks.
#ifndef TD_API_RESPONSE_H
#define TD_API_RESPONSE_H

#include <stdbool.h>
#include <stdint.h>

#include "api/answer.h"
#include "api/delta.h"
#include "base/buf.h"

// What every chunk of a response repeats.
typedef struct {
  bool is_chat;
  char id[48];
  const char *model; // borrowed
  int64_t created;   // seconds since 1970
  const td_tokenizer *tok;
} td_api_head;

typedef struct {
  uint64_t n_prompt, n_output, n_cached; // tokens
} td_api_usage;

// How long an answer took: the object `timings`, as llama-server has it. The first token comes with
// the prompt, so a rate over the answer is that of the tokens behind it.
typedef struct {
  uint64_t n_prefilled, n_cached; // tokens of the prompt: computed; found in the cache
  uint64_t prefill_ns;            // the computing
  uint64_t n_output;              // tokens of the answer
  uint64_t n_followed;            // of them, those that came behind a first one
  uint64_t follow_ns;             // from the first to the last
} td_api_timings;

typedef struct {
  const td_answer *answer;
  const td_delta *message;       // chat: all of it
  const td_output_parser *parts; // chat: whose calls it names
  const char *finish_reason;     // "stop", "length", "tool_calls"
} td_api_choice;

// Fills id from 16 random bytes.
void td_api_head_init(td_api_head *head, bool is_chat, const char *model, const td_tokenizer *tok,
                      int64_t created, const unsigned char random[16]);

// The whole response.
void td_api_write_response(td_buf *out, const td_api_head *head, const td_api_choice *choices,
                           uint32_t n_choices, const td_api_usage *usage,
                           const td_api_timings *timings);

// Chunks of a stream, one JSON object each. The first of a chat choice tells the role, the last its
// finish_reason and its timings.
void td_api_write_role(td_buf *out, const td_api_head *head, uint32_t index);
// A piece of a completion. so_far: how much was used until now, or NULL: not told.
void td_api_write_piece(td_buf *out, const td_api_head *head, uint32_t index,
                        const td_answer *answer, const td_answer_piece *piece,
                        const td_api_usage *so_far);
// A piece of a chat: what delta holds, and the piece's tokens. so_far: likewise.
void td_api_write_delta(td_buf *out, const td_api_head *head, uint32_t index,
                        const td_answer *answer, const td_answer_piece *piece,
                        const td_output_parser *parts, const td_delta *delta,
                        const td_api_usage *so_far);
void td_api_write_finish(td_buf *out, const td_api_head *head, uint32_t index,
                         const char *finish_reason, const td_api_timings *timings);
void td_api_write_usage(td_buf *out, const td_api_head *head, const td_api_usage *usage);

#endif
