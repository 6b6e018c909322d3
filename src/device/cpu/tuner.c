// src/device/cpu/tuner.c - trials, medians and the choice of schedule and rows per call.
#include "device/cpu/tuner.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/stats.h"

enum {
  PLACES = 3,
  MIDDLE = 1,     // index of the current option
  WAYS_ROUND = 0, // later rounds compare rows
  MAX_KINDS = 128 // further kinds keep their first settings
};
// An option must cost less than this share of the current one; smaller gains are noise.
static const double better = 0.97;

typedef struct {
  uint32_t rows; // rows per call; 0: no such option
  td_gemv_schedule way;
} option;

typedef struct {
  option options[PLACES];
  double cost[PLACES][TD_TUNER_ROUND];
  uint32_t n[PLACES];
} knob;

typedef struct {
  td_tuner_kind kind;
  knob knobs[TD_TUNER_KNOBS];
  uint32_t round, n_begun, n_ended; // trials of the round
} kind_trials;

struct td_cpu_tuner {
  pthread_mutex_t lock; // guards what follows
  kind_trials kinds[MAX_KINDS];
  uint32_t n_kinds;
};

td_cpu_tuner *td_cpu_tuner_open(void) {
  td_cpu_tuner *t = calloc(1, sizeof *t);
  if (t) pthread_mutex_init(&t->lock, NULL);
  return t;
}

void td_cpu_tuner_close(td_cpu_tuner *t) {
  if (!t) return;
  pthread_mutex_destroy(&t->lock);
  free(t);
}

static uint16_t log2_up(uint32_t n) {
  uint16_t log = 0;
  while (log < 31 && 1u << log < n)
    log++;
  return log;
}

td_tuner_kind td_tuner_kind_of(const td_weight *w, uint32_t n_experts, uint32_t n_tokens,
                               bool prompt) {
  enum { PROMPT = 32 };
  td_tuner_kind kind;
  memset(&kind, 0, sizeof kind); // for memcmp
  kind.rows = w->rows;
  kind.cols = w->cols;
  kind.scale_cols = w->scale_cols;
  kind.n_experts = n_experts;
  kind.batch = (uint16_t)(log2_up(n_tokens) + (prompt ? PROMPT : 0));
  kind.dtype = (uint8_t)w->dtype;
  kind.n_ways = prompt ? 1 : (uint8_t)td_kernels_n_schedules(w);
  return kind;
}

// ---- one kind of calls -------------------------------------------------------------------------

_Static_assert(TD_N_GEMV_SCHEDULES == 2, "an option for each way");

// Options for the next round: half and twice the current number of rows.
static void try_rows(knob *k) {
  enum { LEAST_ROWS = 32 }; // of a call
  const option middle = k->options[MIDDLE];
  const uint32_t half = middle.rows / 2 / LEAST_ROWS * LEAST_ROWS, twice = 2 * middle.rows;
  k->options[0] = (option){half, middle.way};
  if (middle.rows >= LEAST_ROWS && twice <= TD_TUNER_ROWS)
    k->options[2] = (option){twice, middle.way};
}

static double median(const knob *k, int place) {
  double cost[TD_TUNER_ROUND];
  memcpy(cost, k->cost[place], sizeof cost);
  return td_median(cost, k->n[place]);
}

// The index of the best option; MIDDLE unless another one is clearly better.
static int knob_best(const knob *k) {
  if (k->n[MIDDLE] == 0) return MIDDLE;
  int best = MIDDLE;
  double least = better * median(k, MIDDLE);
  for (int i = 0; i < PLACES; i++) {
    if (i == MIDDLE || k->n[i] == 0 || median(k, i) >= least) continue;
    best = i;
    least = median(k, i);
  }
  return best;
}

// ---- kinds ------------------------------------------------------------------------------------

static void begin_round(kind_trials *k, const option middle[TD_TUNER_KNOBS]) {
  for (int i = 0; i < TD_TUNER_KNOBS; i++) {
    k->knobs[i] = (knob){.options[MIDDLE] = middle[i]};
    if (k->round == WAYS_ROUND)
      k->knobs[i].options[MIDDLE + 1] = (option){middle[i].rows, TD_GEMV_INTERLEAVED};
    else
      try_rows(&k->knobs[i]);
  }
  k->n_begun = k->n_ended = 0;
}

static bool is_settled(const kind_trials *k) {
  return k->round == TD_TUNER_ROUNDS;
}

static void end_round(kind_trials *k) {
  option to[TD_TUNER_KNOBS];
  bool moved = k->round == WAYS_ROUND;
  for (int i = 0; i < TD_TUNER_KNOBS; i++) {
    int best = knob_best(&k->knobs[i]);
    to[i] = k->knobs[i].options[best];
    moved |= best != MIDDLE;
  }
  k->round = moved ? k->round + 1 : TD_TUNER_ROUNDS;
  begin_round(k, to);
  if (moved || is_settled(k)) {
    td_debug("kernels: %u x %u, %u experts, batch %u%s: %u and %u rows a call, ways %d and %d%s",
             k->kind.rows, k->kind.cols, k->kind.n_experts, 1u << k->kind.batch % 32,
             k->kind.batch < 32 ? "" : " of prompts", to[0].rows, to[1].rows, (int)to[0].way,
             (int)to[1].way, is_settled(k) ? "" : " so far");
  }
}

static kind_trials *find_kind(td_cpu_tuner *t, const td_tuner_kind *kind,
                              const uint32_t first[TD_TUNER_KNOBS]) {
  if ((uint64_t)kind->rows * kind->cols < TD_TUNER_WEIGHTS) return NULL;
  for (uint32_t i = 0; i < t->n_kinds; i++)
    if (!memcmp(&t->kinds[i].kind, kind, sizeof *kind)) return &t->kinds[i];
  if (t->n_kinds == MAX_KINDS) return NULL;
  kind_trials *k = &t->kinds[t->n_kinds++];
  k->kind = *kind;
  k->round = kind->n_ways > 1 ? WAYS_ROUND : WAYS_ROUND + 1;
  option middle[TD_TUNER_KNOBS];
  for (int i = 0; i < TD_TUNER_KNOBS; i++)
    middle[i] = (option){first[i], TD_GEMV_SEQUENTIAL};
  begin_round(k, middle);
  return k;
}

td_trial td_cpu_tuner_next(td_cpu_tuner *t, const td_tuner_kind *kind,
                           const uint32_t first[TD_TUNER_KNOBS]) {
  td_trial trial = {0};
  memcpy(trial.rows, first, sizeof trial.rows);
  pthread_mutex_lock(&t->lock);
  kind_trials *k = find_kind(t, kind, first);
  if (k) {
    trial.kind = (uint32_t)(k - t->kinds);
    trial.round = k->round;
    trial.counts = !is_settled(k);
    for (int i = 0; i < TD_TUNER_KNOBS; i++) {
      // Every option of one kind of calls is combined with every option of the other.
      const uint32_t turn = i == 0 ? k->n_begun : k->n_begun / PLACES;
      int place = trial.counts ? (int)(turn % PLACES) : MIDDLE;
      if (k->knobs[i].options[place].rows == 0) place = MIDDLE;
      trial.place[i] = (uint8_t)place;
      trial.rows[i] = k->knobs[i].options[place].rows;
      trial.way[i] = k->knobs[i].options[place].way;
    }
    k->n_begun++;
  }
  pthread_mutex_unlock(&t->lock);
  return trial;
}

void td_cpu_tuner_add(td_cpu_tuner *t, const td_trial *trial, uint64_t ns, double work) {
  if (!trial->counts || !(work > 0)) return;
  pthread_mutex_lock(&t->lock);
  kind_trials *k = &t->kinds[trial->kind];
  if (trial->round == k->round) {
    for (int i = 0; i < TD_TUNER_KNOBS; i++) {
      knob *b = &k->knobs[i];
      int place = trial->place[i];
      b->cost[place][b->n[place]++] = (double)ns / work;
    }
    if (++k->n_ended == TD_TUNER_ROUND) end_round(k);
  }
  pthread_mutex_unlock(&t->lock);
}
