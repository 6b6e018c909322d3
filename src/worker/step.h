// src/worker/step.h - builds an engine step: continuous batching with chunked prefill.
// Every decoding request contributes its next token if it has a page for it. Prompts and replays
// follow in the requests' order, up to prefill_chunk tokens per step, or up to the budget of
// prefill_budget.h if the step decodes, so that decode does not pause for long. Where a second
// engine streams experts, long prompts and whatever waits beside them form steps of its own, which
// hold their requests while they last.
#ifndef TD_WORKER_STEP_H
#define TD_WORKER_STEP_H

#include <stdint.h>

#include "engine/engine.h"
#include "worker/prefill_budget.h"
#include "worker/request.h"

typedef struct {
  uint32_t max_seqs;
  uint32_t stream_tokens; // prompts of at least that many tokens are another step's; 0: none are
  td_prefill_budget budget;
  td_step_seq *seqs;            // [max_seqs], the first n form the step
  td_worker_request **requests; // [max_seqs], the request of each
  uint32_t n, n_decode;         // sequences; those that decode
  uint32_t n_prefilled;         // tokens of the other sequences
} td_step;

// On error *out is closed. TD_ENOMEM.
td_status td_step_open(td_step *out, uint32_t max_seqs, uint32_t prefill_chunk, td_err *err);
void td_step_close(td_step *step); // closing a zeroed one is legal

// Maximum tokens in a step.
static inline uint32_t td_step_max_tokens(uint32_t max_seqs, uint32_t prefill_chunk) {
  return max_seqs + prefill_chunk;
}

// Builds the step; n is 0 if there is nothing to compute. Valid until a request ends.
void td_step_build(td_step *step, const td_requests *requests);
// Builds a step of prompts alone, if at least least_tokens of them wait and no step holds them.
void td_step_build_prefill(td_step *step, const td_requests *requests, uint32_t least_tokens);
void td_step_hold(const td_step *step, bool is_held); // the step's requests
bool td_step_is_ended(const td_step *step);           // nobody waits for any of its requests
// Records that computing the step took ns.
void td_step_note(td_step *step, uint64_t ns);

#endif
