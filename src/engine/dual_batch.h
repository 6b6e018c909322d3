// src/engine/dual_batch.h - whether steps of answers are quicker in one part or in two halves, one
// behind the other, so that each of two devices has one to do while the other has the other. But
// experts that both halves choose are read twice, so it is tried out: for steps of about as many
// tokens by turns, then the quicker way, and after many steps anew. Pure arithmetic; time is passed
// in.
#ifndef TD_ENGINE_DUAL_BATCH_H
#define TD_ENGINE_DUAL_BATCH_H

#include <stdint.h>

#define TD_HALVES_TRIALS 8    // of either way
#define TD_HALVES_ROUND  1024 // steps from one trial to the next

typedef struct {
  uint64_t best_ns[2]; // of steps in one part, and in two
  uint32_t n_steps;
} td_halves_of;

// Zeroed, it knows nothing.
typedef struct {
  td_halves_of by_size[11]; // by the logarithm of a step's tokens
} td_halves;

// Parts of the next step, which has n_tokens tokens: 1 or 2.
uint32_t td_halves_choose(td_halves *halves, uint32_t n_tokens);
// It took ns in n_parts parts.
void td_halves_note(td_halves *halves, uint32_t n_tokens, uint32_t n_parts, uint64_t ns);

#endif
