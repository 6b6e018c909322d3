// src/engine/dual_batch.c - measures and chooses one or two microbatches per decode step.
#include "engine/dual_batch.h"

#include "base/status.h"

static td_dual_batch_of *of_size(td_dual_batch_tuner *dual_batch, uint32_t n_tokens) {
  uint32_t i = 0;
  while (i + 1 < TD_COUNT(dual_batch->by_size) && n_tokens >> (i + 1))
    i++;
  return &dual_batch->by_size[i];
}

uint32_t td_dual_batch_choose(td_dual_batch_tuner *dual_batch, uint32_t n_tokens) {
  if (n_tokens < 2) return 1;
  td_dual_batch_of *h = of_size(dual_batch, n_tokens);
  const uint32_t i = h->n_steps++ % TD_HALVES_ROUND;
  if (i == 0) h->best_ns[0] = h->best_ns[1] = UINT64_MAX;
  if (i < 2 * TD_HALVES_TRIALS) return 1 + i % 2;
  return h->best_ns[1] < h->best_ns[0] ? 2 : 1;
}

void td_dual_batch_note(td_dual_batch_tuner *dual_batch, uint32_t n_tokens, uint32_t n_microbatches,
                        uint64_t ns) {
  uint64_t *best_ns = &of_size(dual_batch, n_tokens)->best_ns[n_microbatches - 1];
  if (ns < *best_ns) *best_ns = ns;
}
