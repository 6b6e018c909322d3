// src/engine/dual_batch.h - whether steps of answers are quicker in one part or in two dual_batch,
// one behind the other, so that each of two devices has one to do while the other has the other.
// But experts that both dual_batch choose are read twice, so it is tried out: for steps of about as
// many tokens by turns, then the quicker way, and after many steps anew. Pure arithmetic; time is
// passed in.
#ifndef TD_ENGINE_DUAL_BATCH_H
#define TD_ENGINE_DUAL_BATCH_H

#include <stdint.h>

#define TD_HALVES_TRIALS 8    // of either way
#define TD_HALVES_ROUND  1024 // steps from one trial to the next

typedef struct {
  uint64_t best_ns[2]; // of steps in one part, and in two
  uint32_t n_steps;
} td_dual_batch_of;

// Zeroed, it knows nothing.
typedef struct {
  td_dual_batch_of by_size[11]; // by the logarithm of a step's tokens
} td_dual_batch_tuner;

// Parts of the next step, which has n_tokens tokens: 1 or 2.
uint32_t td_dual_batch_choose(td_dual_batch_tuner *dual_batch, uint32_t n_tokens);
// It took ns in n_microbatches microbatches.
void td_dual_batch_note(td_dual_batch_tuner *dual_batch, uint32_t n_tokens, uint32_t n_microbatches,
                        uint64_t ns);

#endif
