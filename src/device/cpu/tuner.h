// src/device/cpu/tuner.h - how a kernel is called, in which way and for how many rows: found out
// while they are computed. Processors differ in how they fetch rows ahead; a call costs something
// before it computes at full speed, many rows leave threads waiting for the last, and caches are of
// many sizes: what is best depends on machine, matrix, batch and pool. No result depends on it. An
// operator's runs are trials. The first round is of a kernel's ways, in turn, until medians tell
// which is quicker. Then, of the number of rows that the kernels propose, of half of it and of
// twice as many; where the middle one is not the best it goes on from there. That takes the first
// tokens of an answer, or the first layers of a prompt, and is neither a step of its own nor worth
// keeping.
// Any thread may call.
#ifndef TD_DEVICE_CPU_TUNER_H
#define TD_DEVICE_CPU_TUNER_H

#include <stdbool.h>
#include <stdint.h>

#include "tandem/kernels.h"

enum {
  TD_TUNER_KNOBS = 2,         // kinds of calls an operator has at most
  TD_TUNER_ROUND = 18,        // trials until medians are compared
  TD_TUNER_ROUNDS = 6,        // at most; the first is of ways
  TD_TUNER_ROWS = 1024,       // at most
  TD_TUNER_WEIGHTS = 1 << 20, // of a matrix: with fewer, how long a run takes tells little
};

typedef struct td_cpu_tuner td_cpu_tuner;

// Runs of one operator that are alike.
typedef struct {
  uint32_t rows, cols, scale_cols; // of the first matrix
  uint32_t n_experts;              // to choose from; 0: the operator is one matrix
  uint16_t batch;                  // how many tokens, roughly, and whether of prompts
  uint8_t dtype, layout;
  uint8_t n_ways; // of its kernel, at least 1
} td_tuner_kind;

typedef struct {
  uint32_t rows[TD_TUNER_KNOBS]; // of a call
  td_gemv_schedule way[TD_TUNER_KNOBS];
  uint8_t place[TD_TUNER_KNOBS]; // which of three options it is
  uint32_t kind, round;
  bool counts; // more are needed
} td_trial;

// NULL: no memory.
td_cpu_tuner *td_cpu_tuner_open(void);
void td_cpu_tuner_close(td_cpu_tuner *tuner);

td_tuner_kind td_tuner_kind_of(const td_weight *w, uint32_t n_experts, uint32_t n_tokens,
                               bool prompt);

// What the next run of a kind takes. first: the rows it begins with, 0 for calls it does not have.
td_trial td_cpu_tuner_next(td_cpu_tuner *tuner, const td_tuner_kind *kind,
                           const uint32_t first[TD_TUNER_KNOBS]);
// How long that run took for some work, in any unit that is the same for all runs of its kind.
void td_cpu_tuner_add(td_cpu_tuner *tuner, const td_trial *trial, uint64_t ns, double work);

#endif
