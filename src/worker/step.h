// src/worker/step.h - what goes into one engine step: continuous batching.
// Every request that decodes brings its next token, if there is a page for it; what remains of
// prompts, and of answers that are computed again, follows in the requests' order: over all of them
// prefill_chunk tokens a step, beside answers so many that those pause for no longer than a few
// steps of their own (budget.h).
#ifndef TD_WORKER_STEP_H
#define TD_WORKER_STEP_H

#include <stdint.h>

#include "engine/engine.h"
#include "worker/prefill_budget.h"
#include "worker/request.h"

typedef struct {
  uint32_t max_seqs;
  td_prefill_budget budget;
  td_step_seq *seqs;            // [max_seqs], the first n are the step
  td_worker_request **requests; // [max_seqs], whose they are
  uint32_t n, n_decode;         // sequences; those that bring an answer's next token
  uint32_t n_prefilled;         // tokens of the others
} td_step;

// On error *out is closed. TD_ENOMEM.
td_status td_step_open(td_step *out, uint32_t max_seqs, uint32_t prefill_chunk, td_err *err);
void td_step_close(td_step *step); // closing a zeroed one is legal

// Most tokens a step may carry.
static inline uint32_t td_step_max_tokens(uint32_t max_seqs, uint32_t prefill_chunk) {
  return max_seqs + prefill_chunk;
}

// Fills the step; n is 0 when nothing is to be computed. Valid until a request ends.
void td_step_build(td_step *step, const td_requests *requests);
// What was built took ns to compute.
void td_step_note(td_step *step, uint64_t ns);

#endif
