// tests/fuzz/fuzz_requests.c - a front that sends the worker any records it likes, in any order.
// Input: records of tandem/wire.h, one after the other; the request id is reduced to 0..7 so that
// they meet. After each a step is taken, and it must stay within tokens and pages.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "shm/segment.h"
#include "worker/request.h"
#include "worker/step.h"

enum { N_VOCAB = 64, N_CTX = 256, MAX_SEQS = 4, PAGE_TOKENS = 16, N_PAGES = 24, CHUNK = 32 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_seq(const td_worker_request *r, const td_step_seq *seq) {
  uint32_t end = seq->n_past + seq->n_tokens;
  TD_CHECK(r->phase != TD_REQUEST_RECEIVING && seq->n_tokens > 0);
  TD_CHECK(seq->n_past == r->n_past && seq->tokens == r->tokens + r->n_past);
  const uint32_t n_drafted = seq->want == TD_WANT_EACH ? r->draft.n_drafted : 0;
  TD_CHECK(end <= r->submit.n_prompt + r->n_output + n_drafted);
  TD_CHECK(r->n_output + n_drafted < r->max_output);
  TD_CHECK(r->submit.n_prompt + r->max_output <= N_CTX);
  TD_CHECK(seq->pages == r->pages && seq->n_pages <= N_PAGES && end <= seq->n_pages * PAGE_TOKENS);
  for (uint32_t i = 0; i < seq->n_pages; i++)
    TD_CHECK(seq->pages[i] >= 0 && seq->pages[i] < N_PAGES);
  for (uint32_t i = 0; i < seq->n_tokens; i++)
    TD_CHECK(seq->tokens[i] >= 0 && seq->tokens[i] < N_VOCAB);
}

// What the worker does with a step, but for the computing.
static void run_step(td_requests *requests, td_step *step) {
  td_wire_msg reply;
  uint32_t n_tokens = 0;
  td_worker_request *waiting;
  const td_image_input *image;
  while ((image = td_step_awaited(step, requests, &waiting)))
    waiting->n_embedded = (uint32_t)(image - waiting->images) + 1;
  td_step_build(step, requests);
  TD_CHECK(step->n <= MAX_SEQS);
  for (uint32_t i = 0; i < step->n; i++) {
    check_seq(step->requests[i], &step->seqs[i]);
    n_tokens += step->seqs[i].n_tokens;
  }
  TD_CHECK(n_tokens <= td_step_max_tokens(MAX_SEQS, CHUNK));
  for (uint32_t i = 0; i < step->n; i++) {
    td_worker_request *r = step->requests[i];
    const bool has_drafts = step->seqs[i].want == TD_WANT_EACH; // of which one is taken
    TD_CHECK(!has_drafts || (r->phase == TD_REQUEST_DECODE && r->draft.n_drafted));
    if (has_drafts) r->tokens[r->submit.n_prompt + r->n_output++] = r->tokens[r->n_past] % 3;
    r->n_past += has_drafts ? 2 : step->seqs[i].n_tokens;
    TD_CHECK(step->seqs[i].is_decode == (r->phase != TD_REQUEST_PREFILL));
    if (r->phase != TD_REQUEST_DECODE) r->phase = td_request_phase_of(r);
    // a scored prompt wants all rows; the last of its last step draws the first token
    const bool wants_token = step->seqs[i].want == TD_WANT_LAST || has_drafts ||
                             (step->seqs[i].want == TD_WANT_ALL && r->n_past == r->submit.n_prompt);
    TD_CHECK(!wants_token || r->phase == TD_REQUEST_DECODE);
    if (!wants_token) continue;
    r->tokens[r->submit.n_prompt + r->n_output++] = (int32_t)(r->n_past % 3);
    if (r->n_output == r->max_output) {
      td_requests_end(requests, r, TD_DONE_LENGTH, NULL, &reply);
    } else if (r->submit.flags & TD_SUBMIT_PREFILL_ONLY) {
      td_requests_end(requests, r, TD_DONE_PREFILLED, NULL, &reply);
    }
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  td_err err;
  td_requests requests;
  td_step step;
  const td_token_index tokens = {.n = 0}; // none has a text
  static int images_fd;
  if (!images_fd &&
      (td_segment_reserve(&images_fd, "fuzz", &err) != TD_OK || ftruncate(images_fd, 65536) != 0))
    abort();
  const td_request_limits limits = {.n_vocab = N_VOCAB,
                                    .n_ctx = N_CTX,
                                    .max_seqs = MAX_SEQS,
                                    .n_pages = N_PAGES,
                                    .page_tokens = PAGE_TOKENS,
                                    .tokens = &tokens,
                                    .patch = 2,
                                    .merge = 2,
                                    .images_fd = images_fd};
  if (td_requests_open(&requests, &limits, &err) != TD_OK ||
      td_step_open(&step, MAX_SEQS, CHUNK, &err) != TD_OK) {
    abort();
  }
  step.draft_mode = TD_DRAFT_AUTO;
  step.max_draft_tokens = MAX_SEQS + TD_DRAFT_STEP;
  for (; size >= sizeof(td_wire_msg); size -= sizeof(td_wire_msg)) {
    td_wire_msg msg, reply;
    memcpy(&msg, data, sizeof msg);
    data += sizeof msg;
    msg.request %= 8;
    if (td_requests_take(&requests, &msg, &reply)) {
      TD_CHECK(reply.kind == TD_MSG_DONE && reply.request == msg.request);
      TD_CHECK(memchr(reply.u.done.text, '\0', sizeof reply.u.done.text));
    }
    run_step(&requests, &step);
  }
  td_requests_close(&requests);
  td_step_close(&step);
  return 0;
}
