#include "worker/step.h"

#include <stdlib.h>

td_status td_step_open(td_step *out, uint32_t max_seqs, uint32_t prefill_chunk, td_err *err) {
  *out = (td_step){.max_seqs = max_seqs,
                   .prefill_chunk = prefill_chunk,
                   .seqs = calloc(max_seqs, sizeof(td_step_seq)),
                   .requests = calloc(max_seqs, sizeof(td_worker_request *))};
  if (out->seqs && out->requests) return TD_OK;
  td_step_close(out);
  return td_fail(err, TD_ENOMEM, "out of memory for steps of %u requests", max_seqs);
}

void td_step_close(td_step *step) {
  free(step->seqs);
  free(step->requests);
  *step = (td_step){0};
}

static void add(td_step *step, td_worker_request *r, uint32_t n_tokens, td_want want) {
  step->seqs[step->n] = (td_step_seq){.tokens = r->tokens + r->n_past,
                                      .n_tokens = n_tokens,
                                      .n_past = r->n_past,
                                      .pages = r->pages,
                                      .n_pages = r->submit.n_pages,
                                      .want = want,
                                      .temperature = r->submit.sampling.temperature};
  step->requests[step->n++] = r;
}

void td_step_build(td_step *step, const td_requests *requests) {
  step->n = 0;
  for (uint32_t i = 0; i < requests->n; i++) {
    td_worker_request *r = requests->active[i];
    if (r->phase != TD_REQUEST_DECODE) continue;
    add(step, r, 1, TD_WANT_LAST);
    step->seqs[step->n - 1].is_decode = true;
  }
  uint32_t budget = step->prefill_chunk;
  for (uint32_t i = 0; i < requests->n && budget; i++) {
    td_worker_request *r = requests->active[i];
    if (r->phase != TD_REQUEST_PREFILL) continue;
    uint32_t left = td_request_n_given(r) - r->n_past;
    uint32_t n = left < budget ? left : budget;
    add(step, r, n, n == left ? TD_WANT_LAST : TD_WANT_NONE);
    budget -= n;
  }
}
