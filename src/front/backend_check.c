// src/front/backend_check.c - rejects requests that no worker could run.
#include "front/backend.h"

td_status td_request_check(const td_request *q, const td_wire_ready *info, td_err *err) {
  if (q->n_prompt == 0) return td_fail(err, TD_EINVAL, "the prompt is empty");
  if (q->max_tokens == 0) return td_fail(err, TD_EINVAL, "max_tokens must be at least 1");
  if (q->n_prompt >= info->n_ctx) {
    return td_fail(err, TD_EINVAL,
                   "the prompt has %u tokens, the context holds %u, output included", q->n_prompt,
                   info->n_ctx);
  }
  if (q->n_bias > info->n_vocab)
    return td_fail(err, TD_EINVAL, "%u logit biases for %u tokens", q->n_bias, info->n_vocab);
  if (q->n_ends > TD_WIRE_MAX_ENDS) {
    return td_fail(err, TD_EINVAL, "%u end tokens; at most %d may be given", q->n_ends,
                   TD_WIRE_MAX_ENDS);
  }
  for (uint32_t i = 0; i < q->n_prompt; i++) {
    if (q->prompt[i] < 0 || (uint32_t)q->prompt[i] >= info->n_vocab) {
      return td_fail(err, TD_EINVAL, "token %d of the prompt is outside the vocabulary of %u",
                     q->prompt[i], info->n_vocab);
    }
  }
  return TD_OK;
}
