// src/engine/dual_batch.h - whether a decode step with offloaded experts runs as one or as two
// microbatches.
// Two microbatches keep both devices busy, but weights of experts that both of them choose are
// loaded twice. So both variants are measured: steps of similar size alternate between them for a
// trial, then use the faster one until the next trial. Pure arithmetic; time is passed in.
#pragma once

#include <stdint.h>

#define TD_HALVES_TRIALS 8    // steps per variant in a trial
#define TD_HALVES_ROUND  1024 // steps from one trial to the next

typedef struct {
  uint64_t best_ns[2]; // fastest step with one and with two microbatches
  uint32_t n_steps;
} td_dual_batch_of;

// Initialize with zeros.
typedef struct {
  td_dual_batch_of by_size[11]; // index: log2 of the step's tokens
} td_dual_batch_tuner;

// Microbatches for the next step, which has n_tokens tokens: 1 or 2.
uint32_t td_dual_batch_choose(td_dual_batch_tuner *dual_batch, uint32_t n_tokens);
// Records that this step took ns.
void td_dual_batch_note(td_dual_batch_tuner *dual_batch, uint32_t n_tokens, uint32_t n_microbatches,
                        uint64_t ns);
