// src/worker/step.h - builds an engine step: continuous batching with chunked prefill.
// Every decoding request contributes its next token if it has a page for it and does not wait for
// its grammar's mask, and behind it the drafts that are expected to pay (engine/draft.h). Prompts
// and replays follow in the requests' order, up to prefill_chunk tokens per step, or up to the
// budget of prefill_budget.h if the step decodes, so that decode does not pause for long. Where a
// second engine streams experts, long prompts and whatever waits beside them form steps of its own,
// which hold their requests while they last. A prompt waits in front of tokens of an image that is
// not embedded yet.
#pragma once

#include <assert.h>
#include <stdint.h>

#include "engine/draft.h"
#include "engine/engine.h"
#include "options/options.h"
#include "worker/prefill_budget.h"
#include "worker/request.h"

typedef struct {
  uint32_t max_seqs;
  uint32_t draft_mode;       // --draft; td_step_open: off
  uint32_t max_draft_tokens; // of a step with drafts, prompts apart
  uint32_t max_drafts;       // of a step
  td_draft_pace pace;
  bool is_warm;           // the last step decoded alone, and no pause followed
  td_draft **drafts;      // [max_seqs], of the requests that decode
  uint32_t stream_tokens; // prompts of at least that many tokens are another step's; 0: none are
  td_prefill_budget budget;
  td_step_seq *seqs;            // [max_seqs], the first n form the step
  td_worker_request **requests; // [max_seqs], the request of each
  uint32_t n, n_decode;         // sequences; how many of them decode
  uint32_t n_decode_tokens;     // their tokens
  uint32_t n_prefilled;         // tokens of the other sequences
  // For the layer that drafts; NULL: there is none.
  struct {
    int32_t *next;      // [td_step_max_tokens]: what follows each token of the step
    int32_t *drawn;     // [max_seqs]: the last token drawn for each sequence; -1: none
    td_draft_seq *seqs; // [max_seqs]
    int32_t *pages;     // [max_pages]: the sequences' pages, which requests that end take along
    uint32_t max_pages;
    td_image_input *images; // [max_images]: likewise
    uint32_t max_images;
    bool reads_prompt; // or a replay, of a request that the layer is computed for
  } layer;
} td_step;

// On error *out is closed. TD_ENOMEM.
td_status td_step_open(td_step *out, uint32_t max_seqs, uint32_t prefill_chunk, td_err *err);
// With a layer that drafts.
td_status td_step_use_layer(td_step *step, td_err *err);
void td_step_close(td_step *step); // closing a zeroed one is legal

// Maximum tokens in a step.
static_assert(TD_MAX_BATCH + TD_DRAFT_STEP + TD_MAX_CHUNK <= UINT16_MAX, "y of a GPU's grids");
static inline uint32_t td_step_max_tokens(uint32_t max_seqs, uint32_t prefill_chunk) {
  return max_seqs + TD_DRAFT_STEP + prefill_chunk;
}

// Puts the request's prompt before all others. No effect if there is no such request.
void td_step_put_first(td_requests *requests, uint64_t id);
// Builds the step; n is 0 if there is nothing to compute. Valid until a request ends.
void td_step_build(td_step *step, const td_requests *requests);
void td_step_clear(td_step *step); // n is 0
// The next image that a prompt waits for; *of: the request. NULL: none waits.
const td_image_input *td_step_awaited(const td_step *step, const td_requests *requests,
                                      td_worker_request **of);
// The prompt tokens that a step of prompts alone would find, if no other request has anything to
// compute: none decodes or has a prompt of less than min_tokens. Else 0.
uint64_t td_step_long_prompts(const td_requests *requests, uint32_t min_tokens);
// Builds a step of prompts alone, if at least min_tokens of them wait and no step holds them.
void td_step_build_prefill(td_step *step, const td_requests *requests, uint32_t min_tokens);
// How many tokens may be drafted for a request that decodes: within its pages, and so that the one
// after them is its last at most.
uint32_t td_step_max_drafts(const td_worker_request *request, uint32_t page_tokens);
void td_step_hold(const td_step *step, bool is_held); // the step's requests
bool td_step_is_ended(const td_step *step);           // nobody waits for any of its requests
// Records that computing the step took ns.
void td_step_note(td_step *step, uint64_t ns);
