// src/worker/request.h - a worker's requests, from the front's records to their last token.
// Everything the front sends is checked here: an invalid record ends its request with an error and
// does not affect others.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "engine/draft.h"
#include "engine/sampler.h"
#include "model/model.h"
#include "tandem/image.h"
#include "tandem/wire.h"
#include "text/grammar/matcher.h"

typedef enum {
  TD_REQUEST_RECEIVING, // its records are still arriving
  TD_REQUEST_PREFILL,
  TD_REQUEST_REPLAY, // the prompt is prefilled, generated tokens are being recomputed
  TD_REQUEST_DECODE,
} td_request_phase;

#define TD_WORKER_MAX_ENDS (TD_MAX_EOS + TD_WIRE_MAX_ENDS)

typedef struct {
  uint64_t id;
  td_request_phase phase;
  td_wire_submit submit;
  int32_t *tokens; // [n_prompt + max_output + TD_DRAFT_MAX], owned: prompt, generated, guesses
  uint32_t n_tokens_received;
  int32_t *pages; // [most_pages], owned: room for the pages of all tokens
  uint32_t most_pages, n_pages_received;
  td_token_value *bias; // [n_bias], owned
  uint32_t n_bias_received;
  char *grammar; // [n_grammar], owned: text/grammar/grammar.h; NULL once the matcher has it
  uint32_t n_grammar_received;
  td_image_input *images; // [n_images], owned; pixels are mapped where n_past leaves any
  uint32_t n_images_received;
  uint32_t n_embedded; // images, the first ones, whose embeddings were made
  size_t patch_bytes;
  td_wire_copies copies; // still to be made
  td_wire_dry params_of_dry;
  bool has_copies, has_dry; // they were received
  uint32_t max_output;      // max_tokens, or what fits into the context
  td_sampler *sampler;      // owned
  td_matcher *matcher;      // owned; NULL: any text
  td_dry *dry;              // owned; NULL: off
  // A row that waits for the matcher's mask, owned; it is in no step until a token is drawn.
  float *logits; // [n_vocab]; NULL: none was needed yet
  bool has_logits;
  td_top_logits top;                // of them; n = 0: not ranked
  int32_t ends[TD_WORKER_MAX_ENDS]; // end tokens
  uint32_t n_ends;
  uint32_t n_past; // tokens in the pages; the next step starts with tokens[n_past]
  uint32_t n_output;
  td_draft draft;     // its guesses follow the generated tokens in tokens
  uint32_t n_guesses; // how many of them the model's layer has made for the next step
  // Where that layer's part of the text begins, at a page: 0, or after a prompt with streamed
  // experts some of its last tokens.
  uint32_t layer_from;
  // With drafts in the step whose results are being posted: the sequence it is there, and tokens in
  // the pages as the step has left them; 0: not more than n_past.
  uint32_t step_seq, n_computed;
  uint64_t begin_ns, first_token_ns;
  // Copies of its pages to the device were begun; they have not ended, and it is in no step.
  bool is_placed, is_entering;
  // A step in progress uses its pages and fills them: until that ends, it can only be marked as
  // ended, for this reason and with this text (static, or NULL).
  bool is_held, is_ended;
  bool is_left; // canceled while a step of others was in progress
  td_done_reason end_reason;
  const char *end_text;
} td_worker_request;

// Tokens the front sends with the request.
static inline uint32_t td_request_n_given(const td_worker_request *r) {
  return r->submit.n_prompt + r->submit.n_answer;
}

// Limits that requests are checked against.
typedef struct {
  uint32_t n_vocab, n_ctx, max_seqs;
  uint32_t n_pages, page_tokens; // size of the KV pool
  const int32_t *eos_ids; // [n_eos], at most TD_MAX_EOS: the checkpoint's end tokens; borrowed
  uint32_t n_eos;
  td_grammars *grammars;        // borrowed; NULL: grammars are not supported
  const td_token_index *tokens; // borrowed; NULL: not known
  uint32_t patch, merge;        // of the model's tower; 0: it does not see
  int images_fd;                // where the pixels are
} td_request_limits;

typedef struct {
  td_request_limits limits;
  td_worker_request *slots;   // [max_seqs]
  td_worker_request **active; // [max_seqs], the first n, in order of prefill
  uint32_t n;
} td_requests;

// On error *out is closed. TD_ENOMEM.
td_status td_requests_open(td_requests *out, const td_request_limits *limits, td_err *err);
void td_requests_close(td_requests *requests); // closing a zeroed one is legal

// Tokens in the pages when decode begins: the prompt, and all generated tokens except the last.
static inline uint32_t td_request_n_to_read(const td_wire_submit *submit) {
  return submit->n_prompt + (submit->n_answer ? submit->n_answer - 1 : 0);
}

bool td_request_ends_with(const td_worker_request *request, int32_t id);

// Where its next generated token goes, and the guess for it is.
static inline int32_t *td_request_next(const td_worker_request *r) {
  return r->tokens + r->submit.n_prompt + r->n_output;
}

// The phase that follows from its n_past.
td_request_phase td_request_phase_of(const td_worker_request *request);

// How a request ends whose sampler or grammar failed with st.
td_done_reason td_request_failure(td_status st);
// Whether the grammar lets nothing follow what was generated.
bool td_request_is_complete(const td_worker_request *request);

// Handles a SUBMIT, PAGES, TOKENS, BIAS, GRAMMAR, IMAGES, COPIES, DRY or CANCEL. True: the request
// ended; send *reply (a DONE). Records of unknown requests are dropped: they follow a request that
// was rejected. A held request is marked as ended instead; its holder sends its DONE.
bool td_requests_take(td_requests *requests, const td_wire_msg *msg, td_wire_msg *reply);

// The request with that id; NULL: there is none.
td_worker_request *td_requests_find(const td_requests *requests, uint64_t id);

// Ends a request and writes its DONE into *reply. text may be NULL.
void td_requests_end(td_requests *requests, td_worker_request *request, td_done_reason reason,
                     const char *text, td_wire_msg *reply);
