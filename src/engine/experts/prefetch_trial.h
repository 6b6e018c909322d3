// src/engine/experts/prefetch_trial.h - whether decode steps prefetch experts from the drive. Steps
// do so in turn for a while, then all or none do, until the next trial. Pure arithmetic; time is
// passed in.
#pragma once

#include <stdbool.h>
#include <stdint.h>

enum {
  TD_PREFETCH_PAIRS = 32,   // of steps in a trial, with and without
  TD_PREFETCH_ROUND = 2048, // steps from one trial to the next
};

// Initialize with zeros.
typedef struct {
  double ns[2]; // of the pairs' steps without and with
  uint64_t first_ns;
  uint32_t n_steps, n_pairs, first_tokens;
  bool pays;
} td_prefetch_trial;

// Whether the next step prefetches.
bool td_prefetch_trial_next(td_prefetch_trial *trial);
// Records that this step, of n_tokens, took ns. Whether it was the last of a trial, so that pays is
// decided anew. Steps that are not recorded, and pairs of unlike ones, do not count.
bool td_prefetch_trial_note(td_prefetch_trial *trial, uint32_t n_tokens, uint64_t ns);
