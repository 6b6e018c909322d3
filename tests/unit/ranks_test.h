// tests/unit/ranks_test.h - all logits of an engine whose prompts are computed by several devices:
// prompts together, in chunks, shorter than the devices are many, and answers between them.
#pragma once

#include "comm/comm.h"
#include "unit/engine_test.h"

enum { RANKS_FIRST = 37, RANKS_SECOND = 5, RANKS_CHUNK = 20, RANKS_PAGES = 6, RANKS_TOKENS = 64 };
enum { RANKS_ROWS = RANKS_FIRST + 1 + 2 + RANKS_CHUNK + 2 };

// The steps of ranks_steps: tokens of each sequence, and whether all devices compute it.
typedef struct {
  uint32_t n_seqs, n_tokens[2];
  bool is_parallel;
} ranks_step_shape;

static const ranks_step_shape ranks_shapes[] = {
    {2, {RANKS_FIRST, RANKS_SECOND}, true},
    {2, {1, 1}, false},
    {1, {RANKS_CHUNK}, true},
    {1, {1}, true},
    {1, {2}, true},
    {1, {1}, false},
};

typedef struct {
  const char *kind, *backend;
  uint32_t n;       // devices
  bool is_streamed; // experts, where the others have them on the device
  const char *jitter;
  bool is_halved;   // one half is exchanged while the other is computed
  bool is_borrowed; // KV pages, to which the engine does not know who writes
} ranks_way;

static inline void ranks_step(td_engine *e, const td_step_seq *seqs, uint32_t n_seqs,
                              uint32_t n_rows, size_t n_vocab, float **out) {
  td_err err;
  if (td_engine_step(e, seqs, n_seqs, &err) != TD_OK) fail_msg("%s", err.msg);
  memcpy(*out, td_engine_logits(e), n_rows * n_vocab * sizeof **out);
  *out += n_rows * n_vocab;
}

// All logits are wanted of the first prompt and of its second chunk, so that the device leaves the
// rest to the host, too.
static inline void ranks_steps(td_engine *e, size_t n_vocab, float *out) {
  static const int32_t pages[3][RANKS_PAGES] = {
      {0, 2, 4, 9, 10, 11}, {1, 3, 5, 12, 13, 14}, {8, 7, 6, 15, 16, 17}};
  int32_t tokens[RANKS_TOKENS];
  for (int32_t i = 0; i < RANKS_TOKENS; i++)
    tokens[i] = 3 + 7 * i % 200;
  td_step_seq seqs[2];
  for (int s = 0; s < 2; s++) {
    seqs[s] = (td_step_seq){.tokens = tokens + s,
                            .n_tokens = s ? RANKS_SECOND : RANKS_FIRST,
                            .pages = pages[s],
                            .n_pages = RANKS_PAGES,
                            .want = s ? TD_WANT_LAST : TD_WANT_ALL};
  }
  ranks_step(e, seqs, 2, RANKS_FIRST + 1, n_vocab, &out);
  for (int s = 0; s < 2; s++) {
    seqs[s].n_past = seqs[s].n_tokens;
    seqs[s].n_tokens = 1;
    seqs[s].is_decode = true;
    seqs[s].want = TD_WANT_ALL;
  }
  ranks_step(e, seqs, 2, 2, n_vocab, &out);
  seqs[0].n_past++;
  seqs[0].n_tokens = RANKS_CHUNK;
  seqs[0].is_decode = false;
  ranks_step(e, seqs, 1, RANKS_CHUNK, n_vocab, &out);
  const td_step_seq shorts[] = {{.tokens = tokens + 9,
                                 .n_tokens = 1,
                                 .pages = pages[2],
                                 .n_pages = RANKS_PAGES,
                                 .want = TD_WANT_ALL},
                                {.tokens = tokens + 10,
                                 .n_tokens = 2,
                                 .n_past = 1,
                                 .pages = pages[2],
                                 .n_pages = RANKS_PAGES,
                                 .want = TD_WANT_NONE},
                                {.tokens = tokens + 12,
                                 .n_tokens = 1,
                                 .n_past = 3,
                                 .pages = pages[2],
                                 .n_pages = RANKS_PAGES,
                                 .is_decode = true,
                                 .want = TD_WANT_LAST}};
  ranks_step(e, &shorts[0], 1, 1, n_vocab, &out);
  ranks_step(e, &shorts[1], 1, 0, n_vocab, &out);
  ranks_step(e, &shorts[2], 1, 1, n_vocab, &out);
}

typedef struct {
  td_dev *devs[TD_COMM_MAX_RANKS], *expert_dev;
  uint32_t n;
  void *kv_pages;
  td_model *model;
  td_engine *engine;
  size_t n_vocab;
} ranks_engine;

static inline void open_ranks_engine(ranks_engine *f, const small_model *m, const ranks_way *way) {
  *f = (ranks_engine){.n = way->n};
  td_err err;
  for (uint32_t i = 0; i < way->n; i++) {
    const td_dev_opts opts = {.kind = way->kind, .index = i, .n_threads = 1};
    if (td_dev_open(&f->devs[i], &opts, &err) != TD_OK) fail_msg("%s", err.msg);
  }
  const td_dev_opts cpu = {.kind = "cpu", .n_threads = 1};
  if (way->is_streamed) assert_int_equal(td_dev_open(&f->expert_dev, &cpu, &err), TD_OK);
  if (td_model_open(&f->model, golden_dir(m->name), &err) != TD_OK) fail_msg("%s", err.msg);
  f->n_vocab = td_model_config_of(f->model)->n_vocab;
  const td_kv_layout kv = td_kv_layout_of(td_model_config_of(f->model),
                                          td_dev_kv_dtype(f->devs[0], TD_F32), ENGINE_PAGE);
  const size_t kv_bytes = (size_t)3 * RANKS_PAGES * td_kv_layout_page_bytes(&kv);
  if (way->is_borrowed)
    assert_int_equal(td_dev_alloc(f->devs[0], &f->kv_pages, kv_bytes, &err), TD_OK);
  const td_engine_opts opts = {.n_pages = 3 * RANKS_PAGES,
                               .page_tokens = ENGINE_PAGE,
                               .max_step_tokens = RANKS_TOKENS,
                               .max_step_seqs = 2,
                               .max_seq_tokens = RANKS_PAGES * ENGINE_PAGE,
                               .kv_dtype = td_dev_kv_dtype(f->devs[0], TD_F32),
                               .kv_pages = f->kv_pages,
                               .expert_dev = f->expert_dev,
                               .n_microbatches = 1,
                               .stream_bytes = way->is_streamed ? m->ring_bytes : 0,
                               .break_even_tokens = 1,
                               .peer_devs = f->devs + 1,
                               .n_peers = way->n - 1,
                               .parallel_tokens = 1,
                               .overlap_tokens = way->is_halved ? 1 : UINT32_MAX,
                               .comm_backend = way->backend};
  if (td_engine_open(&f->engine, f->model, f->devs[0], &opts, &err) != TD_OK)
    fail_msg("%s", err.msg);
}

static inline void close_ranks_engine(ranks_engine *f) {
  td_engine_close(f->engine);
  td_dev_free(f->devs[0], f->kv_pages);
  td_model_close(f->model);
  td_dev_close(f->expert_dev);
  for (uint32_t i = 0; i < f->n; i++)
    td_dev_close(f->devs[i]);
}

// f32 [RANKS_ROWS][*n_vocab], the caller's.
static inline float *ranks_logits(const small_model *m, const ranks_way *way, size_t *n_vocab) {
  if (way->jitter) setenv("TANDEM_JITTER", way->jitter, 1);
  ranks_engine f;
  open_ranks_engine(&f, m, way);
  *n_vocab = f.n_vocab;
  float *out = malloc(RANKS_ROWS * f.n_vocab * sizeof *out);
  ranks_steps(f.engine, f.n_vocab, out);
  close_ranks_engine(&f);
  if (way->jitter) unsetenv("TANDEM_JITTER");
  return out;
}

// Rounding moves logits by at most `bound` of the largest, but for max_rerouted tokens of which it
// changes the choice of experts, whose scores were about the same. And other bits, or only one
// device has computed.
static inline void assert_near(const float *got, const float *want, size_t n_vocab, float bound,
                               uint32_t max_rerouted) {
  uint32_t n_rerouted = 0;
  float largest = 0;
  for (size_t i = 0; i < RANKS_ROWS * n_vocab; i++)
    largest = fmaxf(largest, fabsf(want[i]));
  for (size_t row = 0; row < RANKS_ROWS; row++) {
    float worst = 0;
    for (size_t i = row * n_vocab; i < (row + 1) * n_vocab; i++)
      worst = fmaxf(worst, fabsf(got[i] - want[i]));
    if (!(worst <= bound * largest) && ++n_rerouted > max_rerouted) {
      fail_msg("row %zu is off by %g of %g", row, (double)worst, (double)largest);
    }
  }
  assert_memory_not_equal(got, want, RANKS_ROWS * n_vocab * sizeof *got);
}
