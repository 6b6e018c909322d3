// src/api/response.h - writes responses of the OpenAI protocol, complete or in streaming chunks.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "api/answer.h"
#include "api/delta.h"
#include "api/receipt.h"
#include "base/buf.h"
#include "base/json_write.h"

// Members repeated in every chunk of a response.
typedef struct {
  bool is_chat;
  char id[48];
  const char *model; // borrowed
  // system_fingerprint: of what results are rounded by; borrowed, empty or NULL: not reported
  const char *fingerprint;
  int64_t created; // seconds since 1970
  const td_tokenizer *tok;
} td_api_head;

typedef struct {
  uint64_t n_prompt, n_output, n_cached; // tokens
  uint64_t n_reasoning;                  // of n_output; only Responses reports it
  uint64_t n_accepted, n_rejected;       // drafted tokens: of n_output; the others
} td_api_usage;

// The `timings` object, as in llama-server. Prefill yields the first token, so the decode rate
// counts only the tokens after it.
typedef struct {
  uint64_t n_prefilled, n_cached; // prompt tokens: computed; found in the prefix cache
  uint64_t prefill_ns;            // time spent on prefill
  uint64_t n_output;              // generated tokens
  uint64_t n_followed;            // how many of them are not their choice's first
  uint64_t follow_ns;             // from the first token to the last
} td_api_timings;

typedef struct {
  const td_answer *answer;
  const td_delta *message;       // chat: the complete message
  const td_output_parser *parts; // chat: holds the calls that message refers to
  const char *finish_reason;     // "stop", "length", "tool_calls"
  const td_receipt *receipt;     // NULL: none
  // The prompt's tokens with their log-probabilities, [n_prompt]; the first has none (NAN). NULL:
  // not reported. Of each, n_prompt_top candidates are.
  const td_wire_token *prompt;
  uint32_t n_prompt, n_prompt_top;
} td_api_choice;

// Fills id from 16 random bytes.
void td_api_head_init(td_api_head *head, bool is_chat, const char *model, const td_tokenizer *tok,
                      int64_t created, const unsigned char random[16]);

// Writes a complete (non-streaming) response.
void td_api_write_response(td_buf *out, const td_api_head *head, const td_api_choice *choices,
                           uint32_t n_choices, const td_api_usage *usage,
                           const td_api_timings *timings);

// Writes log-probabilities of the answer's kept tokens [first, last) as an array; with_ids: as
// llama-server does, with the tokens' ids.
void td_api_write_token_logprobs(td_json_writer *w, const char *key, const td_api_head *head,
                                 const td_answer *answer, size_t first, size_t last, bool with_ids);
// How many of a finished answer's kept tokens belong to its text.
size_t td_api_n_shown(const td_answer *answer);
void td_api_write_timings(td_json_writer *w, const td_api_timings *timings);

// The `prompt_progress` object, as in llama-server: tokens of the prompt, and how many of them are
// prefilled or were found in the prefix cache.
typedef struct {
  uint64_t n_prompt, n_cached, n_done;
  uint64_t elapsed_ns; // since prefill began
} td_api_progress;

// Write one streaming chunk each, a JSON object. The first chunk of a chat choice carries the role,
// the last one finish_reason and timings.
void td_api_write_role(td_buf *out, const td_api_head *head, uint32_t index);
// Before the first token: how far the prefill is.
void td_api_write_progress(td_buf *out, const td_api_head *head, uint32_t index,
                           const td_api_progress *progress);
// A piece of a completion. so_far: usage up to now; NULL: omitted.
void td_api_write_piece(td_buf *out, const td_api_head *head, uint32_t index,
                        const td_answer *answer, const td_answer_piece *piece,
                        const td_api_usage *so_far);
// A piece of a chat: the delta and the log-probabilities of the piece's tokens. so_far: as above.
void td_api_write_delta(td_buf *out, const td_api_head *head, uint32_t index,
                        const td_answer *answer, const td_answer_piece *piece,
                        const td_output_parser *parts, const td_delta *delta,
                        const td_api_usage *so_far);
// receipt: NULL: none. so_far: as above.
void td_api_write_finish(td_buf *out, const td_api_head *head, uint32_t index,
                         const char *finish_reason, const td_receipt *receipt,
                         const td_api_timings *timings, const td_api_usage *so_far);
void td_api_write_usage(td_buf *out, const td_api_head *head, const td_api_usage *usage);
