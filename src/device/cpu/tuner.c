#include "device/cpu/tuner.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"

enum {
  PLACES = 3, // half, the middle one, twice
  MIDDLE = 1,
  SAMPLES = TD_TUNER_ROUND / PLACES,
  MAX_KINDS = 128 // more are computed as they begin
};
// Less than this share is not told from noise.
static const float better = 0.97f;

typedef struct {
  uint32_t rows[PLACES]; // 0: none
  float cost[PLACES][SAMPLES];
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
  kind.layout = (uint8_t)w->layout;
  return kind;
}

// ---- one number -------------------------------------------------------------------------------

static void knob_begin(knob *k, uint32_t middle, uint32_t least) {
  memset(k, 0, sizeof *k);
  const uint32_t half = middle / 2 / least * least;
  k->rows[0] = half;
  k->rows[MIDDLE] = middle;
  k->rows[2] = middle > 0 && 2 * middle <= TD_TUNER_ROWS && middle >= least ? 2 * middle : 0;
}

static int by_size(const void *a, const void *b) {
  float x = *(const float *)a, y = *(const float *)b;
  return (x > y) - (x < y);
}

static float median(const knob *k, int place) {
  float sorted[SAMPLES];
  memcpy(sorted, k->cost[place], sizeof sorted);
  qsort(sorted, k->n[place], sizeof *sorted, by_size);
  return sorted[k->n[place] / 2];
}

// The best, or the middle one unless another is clearly better.
static int knob_best(const knob *k) {
  if (k->n[MIDDLE] == 0) return MIDDLE;
  int best = MIDDLE;
  float least = better * median(k, MIDDLE);
  for (int i = 0; i < PLACES; i++) {
    if (i == MIDDLE || k->n[i] == 0 || median(k, i) >= least) continue;
    best = i;
    least = median(k, i);
  }
  return best;
}

// ---- kinds ------------------------------------------------------------------------------------

// Of what is stored by columns, lines of memory hold as many (kernels/registry.c).
static uint32_t least_rows(const td_tuner_kind *kind) {
  return kind->layout == TD_LAYOUT_ROWS ? 32 : 128;
}

static void begin_round(kind_trials *k, const uint32_t rows[TD_TUNER_KNOBS]) {
  for (int i = 0; i < TD_TUNER_KNOBS; i++)
    knob_begin(&k->knobs[i], rows[i], least_rows(&k->kind));
  k->n_begun = k->n_ended = 0;
}

static bool is_settled(const kind_trials *k) {
  return k->round == TD_TUNER_ROUNDS;
}

static void end_round(kind_trials *k) {
  uint32_t rows[TD_TUNER_KNOBS];
  bool moved = false;
  for (int i = 0; i < TD_TUNER_KNOBS; i++) {
    int best = knob_best(&k->knobs[i]);
    rows[i] = k->knobs[i].rows[best];
    moved |= best != MIDDLE;
  }
  k->round = moved ? k->round + 1 : TD_TUNER_ROUNDS;
  begin_round(k, rows);
  if (moved || is_settled(k)) {
    td_debug("kernels: %u x %u, %u experts, batch %u%s: %u and %u rows a call%s", k->kind.rows,
             k->kind.cols, k->kind.n_experts, 1u << k->kind.batch % 32,
             k->kind.batch < 32 ? "" : " of prompts", rows[0], rows[1],
             is_settled(k) ? "" : " so far");
  }
}

static kind_trials *find_kind(td_cpu_tuner *t, const td_tuner_kind *kind,
                              const uint32_t first[TD_TUNER_KNOBS]) {
  if ((uint64_t)kind->rows * kind->cols < TD_TUNER_WEIGHTS) return NULL;
  for (uint32_t i = 0; i < t->n_kinds; i++) {
    if (!memcmp(&t->kinds[i].kind, kind, sizeof *kind)) return &t->kinds[i];
  }
  if (t->n_kinds == MAX_KINDS) return NULL;
  kind_trials *k = &t->kinds[t->n_kinds++];
  k->kind = *kind;
  begin_round(k, first);
  return k;
}

// Every place of one number meets every place of the other.
static int place_of(uint32_t turn, int knob_idx) {
  return (int)((knob_idx == 0 ? turn : turn / PLACES) % PLACES);
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
      int place = trial.counts ? place_of(k->n_begun, i) : MIDDLE;
      if (k->knobs[i].rows[place] == 0) place = MIDDLE;
      trial.place[i] = (uint8_t)place;
      trial.rows[i] = k->knobs[i].rows[place];
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
      if (b->n[place] < SAMPLES) b->cost[place][b->n[place]++] = (float)((double)ns / work);
    }
    if (++k->n_ended == TD_TUNER_ROUND) end_round(k);
  }
  pthread_mutex_unlock(&t->lock);
}
