// src/worker/step.h - builds an engine step: continuous batching with chunked prefill.
// Every decoding request contributes its next token if it has a page for it. Prompts and replays
// follow in the requests' order, up to prefill_chunk tokens per step, or up to the budget of
// prefill_budget.h if the step decodes, so that decode does not pause for long.
#ifndef TD_WORKER_STEP_H
#define TD_WORKER_STEP_H

#include <stdint.h>

#include "engine/engine.h"
#include "worker/prefill_budget.h"
#include "worker/request.h"

typedef struct {
  uint32_t max_seqs;
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
// Records that computing the step took ns.
void td_step_note(td_step *step, uint64_t ns);

#endif
