// src/device/cpu/tuner.h - online choice of a linear kernel's GEMV schedule and rows per call.
// The best choice depends on machine, matrix, batch and pool: CPUs differ in prefetching, a call
// has a cost, large calls leave threads idle at the end, and cache sizes differ. Results do not
// depend on it. Runs of an operator serve as trials. The first round alternates between the
// kernel's schedules until their medians are known. Later rounds compare the current number of rows
// with half and twice as many, beginning with what the kernels propose, until the middle one is
// best. This takes the first generated tokens, or the first layers of a prefill; nothing is stored
// on disk. Thread: any.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "tandem/kernels.h"

enum {
  TD_TUNER_KNOBS = 2,         // kinds of calls that an operator has, at most
  TD_TUNER_ROUND = 18,        // trials before medians are compared
  TD_TUNER_ROUNDS = 6,        // at most; the first is for schedules
  TD_TUNER_ROWS = 1024,       // rows per call, at most
  TD_TUNER_WEIGHTS = 1 << 20, // of a matrix; runs with fewer are too short to measure
};

typedef struct td_cpu_tuner td_cpu_tuner;

// Runs of one operator that are comparable.
typedef struct {
  uint32_t rows, cols, scale_cols; // of the first matrix
  uint32_t n_experts;              // to choose from; 0: the operator is a single matrix
  uint16_t batch;                  // log2 of the number of tokens, and whether they are a prompt's
  uint8_t dtype;
  uint8_t n_ways; // schedules of its kernel, at least 1
} td_tuner_kind;

typedef struct {
  uint32_t rows[TD_TUNER_KNOBS]; // rows per call
  td_gemv_schedule way[TD_TUNER_KNOBS];
  uint8_t place[TD_TUNER_KNOBS]; // index of the option being tried, 0 to 2
  uint32_t kind, round;
  bool counts; // the round needs more trials
} td_trial;

// NULL: out of memory.
td_cpu_tuner *td_cpu_tuner_open(void);
void td_cpu_tuner_close(td_cpu_tuner *tuner);

td_tuner_kind td_tuner_kind_of(const td_weight *w, uint32_t n_experts, uint32_t n_tokens,
                               bool prompt);

// Settings for the next run of a kind. first: rows per call to begin with; 0 for kinds of calls
// that the operator does not have.
td_trial td_cpu_tuner_next(td_cpu_tuner *tuner, const td_tuner_kind *kind,
                           const uint32_t first[TD_TUNER_KNOBS]);
// Records the run's time for an amount of work, in a unit that is the same for all runs of its
// kind.
void td_cpu_tuner_add(td_cpu_tuner *tuner, const td_trial *trial, uint64_t ns, double work);
