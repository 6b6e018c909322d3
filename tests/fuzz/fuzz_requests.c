// tests/fuzz/fuzz_requests.c - a front that sends the worker any records it likes, in any order.
// Input: records of tandem/wire.h, one behind the other; the request id is reduced to 0..7 so that
// they meet. After each, the KV pages held are those of the requests held.
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "worker/request.h"
#include "worker/step.h"

enum { N_VOCAB = 64, N_CTX = 256, MAX_SEQS = 4, PAGE_TOKENS = 16, N_PAGES = 24, CHUNK = 32 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check(const td_kv *kv, const td_requests *requests, td_step *step) {
  uint32_t n_held = 0;
  for (uint32_t i = 0; i < requests->n; i++) {
    const td_worker_request *r = requests->active[i];
    uint32_t n_pages = 0;
    if (r->has_seq) td_kv_pages(kv, r->seq, &n_pages);
    TD_CHECK(r->phase == TD_REQUEST_RECEIVING ? n_pages == 0 : n_pages > 0);
    n_held += n_pages;
  }
  TD_CHECK(n_held + td_kv_n_free(kv) == N_PAGES);
  td_step_build(step, requests);
  uint32_t n_tokens = 0;
  for (uint32_t i = 0; i < step->n; i++)
    n_tokens += step->seqs[i].n_tokens;
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
    check(kv, &requests, &step);
  }
  td_requests_close(&requests);
  TD_CHECK(td_kv_n_free(kv) == N_PAGES);
  td_step_close(&step);
  td_kv_close(kv);
  return 0;
}
