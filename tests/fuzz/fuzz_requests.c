// tests/fuzz/fuzz_requests.c - a front that sends the worker any records it likes, in any order.
// Input: records of tandem/wire.h, one behind the other; the request id is reduced to 0..7 so that
// they meet. After each a step is taken, and the KV pages held are those of the requests held.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "worker/request.h"
#include "worker/step.h"

enum { N_VOCAB = 64, N_CTX = 256, MAX_SEQS = 4, PAGE_TOKENS = 16, N_PAGES = 24, CHUNK = 32 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(const td_kv *kv, const td_requests *requests) {
  bool is_held[N_PAGES] = {false};
  uint32_t n_held = 0;
  for (uint32_t i = 0; i < requests->n; i++) {
    const td_worker_request *r = requests->active[i];
    uint32_t n_pages = 0;
    const int32_t *pages = r->has_seq ? td_kv_pages(kv, r->seq, &n_pages) : NULL;
    TD_CHECK(r->phase == TD_REQUEST_RECEIVING ? n_pages == 0 : n_pages > 0);
    for (uint32_t j = 0; j < n_pages; j++) {
      n_held += !is_held[pages[j]];
      is_held[pages[j]] = true;
    }
  }
  TD_CHECK(n_held + td_kv_n_free(kv) == N_PAGES);
}

// What the worker does with a step, but for the computing.
static void run_step(td_requests *requests, td_step *step) {
  td_wire_msg reply;
  uint32_t n_tokens = 0;
  td_step_build(step, requests);
  for (uint32_t i = 0; i < step->n; i++) {
    td_worker_request *r = step->requests[i];
    n_tokens += step->seqs[i].n_tokens;
    td_requests_advance(requests, r, step->seqs[i].n_tokens);
    TD_CHECK((step->seqs[i].want == TD_WANT_LAST) == (r->n_past >= r->submit.n_prompt));
    if (step->seqs[i].want != TD_WANT_LAST) continue;
    r->phase = TD_REQUEST_DECODE;
    r->tokens[r->submit.n_prompt + r->n_output++] = (int32_t)(r->n_past % 3);
    if (r->n_output == r->max_output) td_requests_end(requests, r, TD_DONE_LENGTH, NULL, &reply);
  }
  TD_CHECK(n_tokens <= td_step_max_tokens(MAX_SEQS, CHUNK));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  td_err err;
  td_kv *kv;
  td_requests requests;
  td_step step;
  const td_kv_opts opts = {.page_tokens = PAGE_TOKENS, .n_pages = N_PAGES, .max_seqs = MAX_SEQS};
  if (td_kv_open(&kv, &opts, &err) != TD_OK ||
      td_requests_open(&requests, kv, N_VOCAB, N_CTX, MAX_SEQS, &err) != TD_OK ||
      td_step_open(&step, MAX_SEQS, CHUNK, &err) != TD_OK) {
    abort();
  }
  for (; size >= sizeof(td_wire_msg); size -= sizeof(td_wire_msg)) {
    td_wire_msg msg, reply;
    memcpy(&msg, data, sizeof msg);
    data += sizeof msg;
    msg.request %= 8;
    if (td_requests_take(&requests, &msg, &reply)) {
      TD_CHECK(reply.kind == TD_MSG_DONE && reply.request == msg.request);
      TD_CHECK(memchr(reply.u.done.text, '\0', sizeof reply.u.done.text));
    }
    check(kv, &requests);
    run_step(&requests, &step);
    check(kv, &requests);
  }
  td_requests_close(&requests);
  TD_CHECK(td_kv_n_free(kv) == N_PAGES);
  td_step_close(&step);
  td_kv_close(kv);
  return 0;
}
