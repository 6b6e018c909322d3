// tests/unit/engine_test.h - all logits of an engine over a small model, with the routed experts on
// its device, on the CPU beside it, or passing through its memory.
#pragma once

#include <stdio.h>

#include "engine/engine.h"
#include "engine/experts/expert_slots.h"
#include "support/checkpoint.h"
#include "support/folder.h"
#include "unit/ref.h"
#include "unit/sanitized.h"

enum { ENGINE_PAGE = 16, SEQ_PAGES = 3, ENGINE_SEQS = 3, PROMPT = 37, ANSWER = 4 };
// A prompt that goes to the other device in pieces.
enum { LONG_PROMPT = 1100, LONG_PAGES = LONG_PROMPT / ENGINE_PAGE + 1 };

// IN_HALVES: decode steps, too. PARTED: of all layers but the first. ALL_WAYS: streamed for
// prompts from STREAM_PROMPT tokens on, and in halves.
typedef enum { TOGETHER, APART, IN_HALVES, PARTED, STREAMED, ALL_WAYS } placement;
enum { STREAM_PROMPT = 4, SHORT_PROMPT = 2, SHORT_SEQS = 2, SHORT_ANSWER = 3 };

static _Thread_local uint64_t engine_routing; // of all steps of the last engine
static _Thread_local uint64_t engine_streamed_bytes;

// Of CPU devices: one for all in a process.
static td_activations engine_activations = TD_ACTIVATIONS_F32;

// Of how many layers, from the last on, dense weights stream; UINT32_MAX: of all.
static uint32_t engine_streamed_dense;

static uint32_t engine_drafts; // of a step

typedef struct {
  const char *name;  // of a golden model, or the absolute path of another
  size_t ring_bytes; // for experts that pass through
} small_model;

// Without and with shared experts and dense layers. A slot holds three of eight experts, and the
// ring comes round from layer to layer; or one of four, and it comes round in a layer.
static const small_model small_models[] = {{"qwen3_moe", 132 << 10}, {"deepseek_fp8", 246 << 10}};
enum {
  N_SMALL_MODELS = IS_TSAN ? 1 : TD_COUNT(small_models), // threads meet alike in both
  PAIRED_RING = 24 << 10,
  NEXT_RING = 24 << 10
}; // of ck_gpt_oss's and ck_qwen3_next's experts

typedef struct {
  td_model *model;
  td_dev *dev, *expert_dev;
  td_engine *engine;
  size_t n_vocab;
} engine_fixture;

// Or a directory.
static inline const char *golden_dir(const char *name) {
  return name[0] == '/' ? name : td_test_golden(name);
}

static inline uint32_t streamed_dense_of(const td_model *model) {
  const uint32_t n_layers = td_model_config_of(model)->n_layers;
  return engine_streamed_dense < n_layers ? engine_streamed_dense : n_layers;
}

// max_tokens: of a step, and of a sequence.
// f: has the model; arena: of its experts, or NULL.
static inline void open_engine_from(engine_fixture *f, const small_model *m, td_dev *dev,
                                    placement where, uint32_t max_tokens, td_expert_arena *arena) {
  td_err err;
  f->dev = dev;
  f->n_vocab = td_model_config_of(f->model)->n_vocab;
  const td_dev_opts cpu = {.kind = "cpu", .n_threads = 3, .activations = engine_activations};
  if (where != TOGETHER) assert_int_equal(td_dev_open(&f->expert_dev, &cpu, &err), TD_OK);
  const uint32_t n_pages = (max_tokens + ENGINE_PAGE - 1) / ENGINE_PAGE;
  const td_engine_opts opts = {.n_pages = n_pages + ENGINE_SEQS * SEQ_PAGES,
                               .n_streamed_dense = streamed_dense_of(f->model),
                               .page_tokens = ENGINE_PAGE,
                               .max_step_tokens = max_tokens,
                               .max_step_seqs = ENGINE_SEQS,
                               .max_drafts = engine_drafts,
                               .max_seq_tokens = n_pages * ENGINE_PAGE,
                               .kv_dtype = td_dev_kv_dtype(dev, TD_F32),
                               .record_routing = true,
                               .expert_dev = f->expert_dev,
                               .arena = arena,
                               .n_gpu_expert_layers = where == PARTED ? 1 : 0,
                               .n_microbatches = where == IN_HALVES || where == ALL_WAYS ? 2 : 1,
                               .stream_bytes = where >= STREAMED ? m->ring_bytes : 0,
                               .break_even_tokens = where == ALL_WAYS ? STREAM_PROMPT
                                                                      : PROMPT - ENGINE_SEQS};
  if (td_engine_open(&f->engine, f->model, f->dev, &opts, &err) != TD_OK) fail_msg("%s", err.msg);
}

static inline void open_engine(engine_fixture *f, const small_model *m, td_dev *dev,
                               placement where, uint32_t max_tokens) {
  td_err err;
  *f = (engine_fixture){.dev = dev};
  if (td_model_open(&f->model, golden_dir(m->name), &err) != TD_OK) fail_msg("%s", err.msg);
  open_engine_from(f, m, dev, where, max_tokens, NULL);
}

static inline void close_engine(engine_fixture *f) {
  td_engine_close(f->engine);
  td_dev_close(f->expert_dev);
  td_model_close(f->model);
}

// What layers chose is hashed (FNV-1a).
static inline void keep_routing(engine_fixture *f) {
  const td_model_config *c = td_model_config_of(f->model);
  for (uint32_t i = 0; i < c->n_layers; i++) {
    uint32_t n_tokens;
    const int32_t *ids = td_engine_routing(f->engine, i, &n_tokens);
    for (uint32_t k = 0; ids && k < n_tokens * c->top_k; k++)
      engine_routing = (engine_routing ^ (uint32_t)ids[k]) * 1099511628211u;
  }
}

static inline void keep_step(engine_fixture *f, const td_step_seq *seqs, uint32_t n_seqs,
                             uint32_t n_rows, float **out) {
  td_err err;
  if (td_engine_step(f->engine, seqs, n_seqs, &err) != TD_OK) fail_msg("%s", err.msg);
  memcpy(*out, td_engine_logits(f->engine), n_rows * f->n_vocab * sizeof **out);
  *out += n_rows * f->n_vocab;
  engine_streamed_bytes = td_engine_stream_progress(f->engine).copied_bytes;
  keep_routing(f);
}

// Prompts, one after the other, and answers to all of them, side by side.
static inline void keep_steps(engine_fixture *f, float *out) {
  static const int32_t pages[ENGINE_SEQS][SEQ_PAGES] = {{0, 2, 4}, {1, 3, 5}, {8, 7, 6}};
  int32_t tokens[ENGINE_SEQS][PROMPT + ANSWER];
  for (int32_t s = 0; s < ENGINE_SEQS; s++) {
    for (int32_t i = 0; i < PROMPT + ANSWER; i++)
      tokens[s][i] = 3 + (7 * s + 5 * i) % 200;
  }
  td_step_seq seqs[ENGINE_SEQS];
  for (uint32_t s = 0; s < ENGINE_SEQS; s++) {
    seqs[s] = (td_step_seq){.tokens = tokens[s],
                            .n_tokens = PROMPT - s, // so that no two are as far
                            .pages = pages[s],
                            .n_pages = SEQ_PAGES,
                            .want = TD_WANT_ALL};
    keep_step(f, &seqs[s], 1, PROMPT - s, &out);
  }
  for (uint32_t i = 0; i < ANSWER; i++) {
    for (uint32_t s = 0; s < ENGINE_SEQS; s++) {
      seqs[s].n_past = PROMPT - s + i;
      seqs[s].tokens = tokens[s] + seqs[s].n_past;
      seqs[s].n_tokens = 1;
      seqs[s].is_decode = true;
    }
    keep_step(f, seqs, ENGINE_SEQS, ENGINE_SEQS, &out);
  }
}

// The long prompt and, beside it, the next generated token, of which keep_steps has left PROMPT
// + ANSWER.
static inline void keep_long_step(engine_fixture *f, float *out) {
  static const int32_t pages[SEQ_PAGES] = {0, 2, 4}, token = 5;
  int32_t tokens[LONG_PROMPT], long_pages[LONG_PAGES];
  for (int32_t i = 0; i < LONG_PROMPT; i++)
    tokens[i] = 3 + 7 * i % 200;
  for (int32_t i = 0; i < LONG_PAGES; i++)
    long_pages[i] = ENGINE_SEQS * SEQ_PAGES + i;
  const td_step_seq seqs[] = {{.tokens = tokens,
                               .n_tokens = LONG_PROMPT,
                               .pages = long_pages,
                               .n_pages = LONG_PAGES,
                               .want = TD_WANT_ALL},
                              {.tokens = &token,
                               .n_tokens = 1,
                               .n_past = PROMPT + ANSWER,
                               .pages = pages,
                               .n_pages = SEQ_PAGES,
                               .is_decode = true,
                               .want = TD_WANT_ALL}};
  keep_step(f, seqs, TD_COUNT(seqs), LONG_PROMPT + 1, &out);
}

enum { SHORT_ROWS = STREAM_PROMPT + SHORT_PROMPT + SHORT_SEQS * SHORT_ANSWER };

// A prompt for which experts stream, one for which they do not, and answers to both: steps enough
// to be launched as a graph.
static inline void keep_short_steps(engine_fixture *f, float *out) {
  static const int32_t tokens[] = {5, 17, 4, 99, 23, 42, 8, 3, 150, 11}, pages[] = {0, 1};
  static const uint32_t lengths[SHORT_SEQS] = {STREAM_PROMPT, SHORT_PROMPT};
  td_step_seq seqs[SHORT_SEQS];
  for (uint32_t s = 0; s < SHORT_SEQS; s++) {
    seqs[s] = (td_step_seq){.tokens = tokens,
                            .n_tokens = lengths[s],
                            .pages = &pages[s],
                            .n_pages = 1,
                            .want = TD_WANT_ALL};
    keep_step(f, &seqs[s], 1, lengths[s], &out);
  }
  for (uint32_t i = 0; i < SHORT_ANSWER; i++) {
    for (uint32_t s = 0; s < SHORT_SEQS; s++) {
      seqs[s].n_past = lengths[s] + i;
      seqs[s].tokens = &tokens[3 * s + i];
      seqs[s].n_tokens = 1;
      seqs[s].is_decode = true;
    }
    keep_step(f, seqs, SHORT_SEQS, SHORT_SEQS, &out);
  }
}

// All memory that holds routed experts: one file's mapping in small models.
static inline const char *experts_memory(const td_model *model, size_t *n_bytes) {
  const char *begin = NULL, *end = NULL;
  const td_model_config *c = td_model_config_of(model);
  for (uint32_t i = 0; i < c->n_layers; i++) {
    const td_layer *layer = td_model_layer(model, i);
    for (uint32_t k = 0; layer->is_moe && k < 3 * c->n_experts; k++) {
      const td_weight *arrays[] = {layer->gate, layer->up ? layer->up : layer->down, layer->down};
      const td_weight *w = &arrays[k % 3][k / 3];
      const char *data = w->data;
      if (!begin || data < begin) begin = data;
      if (data + td_weight_data_bytes(w) > end) end = data + td_weight_data_bytes(w);
    }
  }
  *n_bytes = (size_t)(end - begin);
  return begin;
}

// Of what is opened next (base/jitter.h); 0: no delays.
static inline void set_jitter(unsigned seed) {
  char text[16];
  snprintf(text, sizeof text, "%u", seed);
  setenv("TANDEM_JITTER", text, 1);
}

// All logits of those, the caller's. What runs side by side is delayed as seed has it
// (base/jitter.h); 0: nothing is, and the emulator does one thing after the other.
static inline float *short_logits(const small_model *m, const char *kind, placement where,
                                  unsigned seed, size_t *n_bytes) {
  const td_dev_opts opts = {.kind = kind, .n_threads = 2, .activations = engine_activations};
  td_dev *dev;
  td_err err;
  set_jitter(seed);
  setenv("CUDA_LAUNCH_BLOCKING", seed ? "0" : "1", 1);
  if (td_dev_open(&dev, &opts, &err) != TD_OK) fail_msg("%s", err.msg);
  engine_fixture f;
  open_engine(&f, m, dev, where, ENGINE_PAGE);
  size_t n_memory;
  const char *memory = experts_memory(f.model, &n_memory);
  td_dev_pin(dev, memory, n_memory, false);
  td_dev_wait_pinned(dev, memory, n_memory);
  *n_bytes = SHORT_ROWS * f.n_vocab * sizeof(float);
  float *out = malloc(*n_bytes);
  keep_short_steps(&f, out);
  close_engine(&f);
  td_dev_close(dev);
  unsetenv("TANDEM_JITTER");
  unsetenv("CUDA_LAUNCH_BLOCKING");
  return out;
}

// Whatever runs first, results are those of the plain way, by schedules [1, n_schedules].
static inline void check_schedules(const small_model *m, const char *kind, placement plain,
                                   placement where, unsigned n_schedules) {
  size_t n_bytes;
  float *want = short_logits(m, kind, plain, 0, &n_bytes);
  for (unsigned seed = 1; seed <= n_schedules; seed++) {
    float *got = short_logits(m, kind, where, seed, &n_bytes);
    if (memcmp(got, want, n_bytes) != 0) {
      fail_msg("%s: placement %d with TANDEM_JITTER=%u gives other logits", m->name, (int)where,
               seed);
    }
    free(got);
  }
  free(want);
}

// Results are the same bits where dense weights stream, those of the last layer or of all, whoever
// is faster.
static inline void check_dense_schedules(const small_model *m, const char *kind, placement where,
                                         unsigned n_schedules) {
  size_t n_bytes;
  float *want = short_logits(m, kind, where, 0, &n_bytes);
  for (unsigned seed = 1; seed <= n_schedules; seed++) {
    engine_streamed_dense = seed % 2 ? UINT32_MAX : 1;
    float *got = short_logits(m, kind, where, seed, &n_bytes);
    engine_streamed_dense = 0;
    if (memcmp(got, want, n_bytes) != 0) {
      fail_msg("%s: placement %d, dense weights streamed, with TANDEM_JITTER=%u: other logits",
               m->name, (int)where, seed);
    }
    free(got);
  }
  free(want);
}

// ---- two engines on one device, weights and KV pages -------------------------------------------

enum { LANE_SEQS = 4, LANE_DECODE = 5, LANE_TOKENS = ENGINE_PAGE };
enum { LANE_PIECE_BYTES = 1000 }; // less than a matrix, and no multiple of anything
static const uint32_t lane_prompts[LANE_SEQS] = {SHORT_PROMPT, STREAM_PROMPT, 9, 5};

typedef struct {
  td_model *model;
  td_dev *dev, *expert_dev;
  td_engine *prefill, *decode; // prefill streams experts; decode leaves them to the CPU
  td_engine_opts opts;         // prefill's
  void *kv_pages;
  size_t n_vocab;
  float *out; // [LANE_SEQS][LANE_DECODE + 1][n_vocab]: of the prompt's last token, then of answers
  uint32_t n_answered[LANE_SEQS];
  uint64_t random;
  bool feeds; // the prompt, while decode's steps are computed
} lanes;

static inline void open_lanes(lanes *l, const small_model *m, const char *kind) {
  const td_dev_opts dev = {.kind = kind, .n_threads = 2, .activations = engine_activations};
  const td_dev_opts cpu = {.kind = "cpu", .n_threads = 3, .activations = engine_activations};
  td_err err;
  if (td_dev_open(&l->dev, &dev, &err) != TD_OK) fail_msg("%s", err.msg);
  assert_int_equal(td_dev_open(&l->expert_dev, &cpu, &err), TD_OK);
  if (td_model_open(&l->model, golden_dir(m->name), &err) != TD_OK) fail_msg("%s", err.msg);
  const td_model_config *c = td_model_config_of(l->model);
  td_engine_opts opts = {.n_pages = LANE_SEQS,
                         .page_tokens = ENGINE_PAGE,
                         .max_step_tokens = LANE_TOKENS,
                         .max_step_seqs = LANE_SEQS,
                         .max_seq_tokens = LANE_TOKENS,
                         .kv_dtype = td_dev_kv_dtype(l->dev, TD_F32),
                         .expert_dev = l->expert_dev,
                         .n_microbatches = 2,
                         .stream_bytes = m->ring_bytes,
                         .stream_piece_bytes = LANE_PIECE_BYTES,
                         .break_even_tokens = STREAM_PROMPT,
                         .n_streamed_dense = streamed_dense_of(l->model),
                         .is_confinable = true};
  const td_kv_layout kv = td_kv_layout_of(c, opts.kv_dtype, ENGINE_PAGE);
  const size_t n = LANE_SEQS * td_kv_layout_page_bytes(&kv);
  assert_int_equal(td_dev_alloc(l->dev, &l->kv_pages, n, &err), TD_OK);
  opts.kv_pages = l->kv_pages;
  if (td_engine_open(&l->prefill, l->model, l->dev, &opts, &err) != TD_OK) fail_msg("%s", err.msg);
  l->opts = opts;
  opts.stream_bytes = 0;
  opts.is_confinable = false;
  opts.is_urgent = true;
  if (td_engine_open(&l->decode, l->model, l->dev, &opts, &err) != TD_OK) fail_msg("%s", err.msg);
  size_t n_memory;
  const char *memory = experts_memory(l->model, &n_memory);
  td_dev_pin(l->dev, memory, n_memory, false);
  td_dev_wait_pinned(l->dev, memory, n_memory);
  assert_true(td_engine_streams_all(l->prefill));
  assert_false(td_engine_streams_all(l->decode));
  l->n_vocab = c->n_vocab;
  l->out = calloc((size_t)LANE_SEQS * (LANE_DECODE + 1), c->n_vocab * sizeof *l->out);
}

static inline void close_lanes(lanes *l) {
  td_engine_close(l->prefill);
  td_engine_close(l->decode);
  td_dev_free(l->dev, l->kv_pages);
  td_dev_close(l->expert_dev);
  td_model_close(l->model);
  td_dev_close(l->dev);
}

static inline uint32_t lane_random(lanes *l, uint32_t n) {
  l->random = l->random * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(l->random >> 33) % n;
}

static const int32_t lane_tokens[LANE_SEQS + LANE_TOKENS] = {
    5, 17, 4, 99, 23, 42, 8, 3, 150, 11, 60, 121, 77, 9, 30, 54, 18, 90, 2, 7};
static const int32_t lane_pages[LANE_SEQS] = {2, 0, 3, 1};

// The prompt of sequence s, or its next generated token.
static inline td_step_seq lane_seq(const lanes *l, uint32_t s, bool is_decode) {
  const uint32_t n_past = is_decode ? lane_prompts[s] + l->n_answered[s] : 0;
  return (td_step_seq){.tokens = lane_tokens + s + n_past,
                       .n_tokens = is_decode ? 1 : lane_prompts[s],
                       .n_past = n_past,
                       .pages = &lane_pages[s],
                       .n_pages = 1,
                       .is_decode = is_decode,
                       .want = TD_WANT_LAST};
}

static inline void keep_row(lanes *l, td_engine *from, uint32_t row, uint32_t s, uint32_t i) {
  td_sampler *greedy;
  td_wire_token token;
  td_err err;
  const td_sampling params = {.n_top_logprobs = 1};
  assert_int_equal(td_sampler_open(&greedy, &params, NULL, 0, l->n_vocab, &err), TD_OK);
  assert_int_equal(td_engine_draw(from, row, greedy, 1, &token, &err), TD_OK);
  td_sampler_close(greedy);
  float *out = l->out + (s * (LANE_DECODE + 1) + i) * l->n_vocab;
  out[0] = token.logprob;
  memcpy(out + 1, &token.id, sizeof token.id);
}

static inline void feed_lane(void *ctx) {
  lanes *l = ctx;
  td_engine_feed(l->prefill, lane_random(l, 1 << 18));
}

// One token of the answers to the sequences in `ready`, a bit each; randomly not all of them.
static inline void decode_lanes(lanes *l, uint32_t ready) {
  td_step_seq seqs[LANE_SEQS];
  uint32_t of[LANE_SEQS], n = 0;
  td_err err;
  for (uint32_t s = 0; s < LANE_SEQS; s++) {
    if (!(ready >> s & 1) || l->n_answered[s] == LANE_DECODE) continue;
    if (l->random && lane_random(l, 4) == 0) continue;
    seqs[n] = lane_seq(l, s, true);
    of[n++] = s;
  }
  if (!n) return;
  td_status st = l->feeds ? td_engine_step_with(l->decode, seqs, n, feed_lane, l, &err)
                          : td_engine_step(l->decode, seqs, n, &err);
  if (st != TD_OK) fail_msg("%s", err.msg);
  for (uint32_t i = 0; i < n; i++)
    keep_row(l, l->decode, i, of[i], ++l->n_answered[of[i]]);
}

static inline bool has_answers_left(const lanes *l, uint32_t ready) {
  for (uint32_t s = 0; s < LANE_SEQS; s++) {
    if (ready >> s & 1 && l->n_answered[s] < LANE_DECODE) return true;
  }
  return false;
}

static inline void end_prefill(lanes *l, uint32_t s) {
  td_err err;
  if (td_engine_end(l->prefill, &err) != TD_OK) fail_msg("%s", err.msg);
  keep_row(l, l->prefill, 0, s, 0);
}

// Prompts stream one after the other while the sequences before them decode. Sometimes a step is
// abandoned first.
static inline void run_lanes_beside(lanes *l) {
  td_err err;
  uint32_t ready = 1;
  for (uint32_t s = 1; s < LANE_SEQS; s++) {
    const td_step_seq seq = lane_seq(l, s, false);
    const td_stream_progress before = td_engine_stream_progress(l->prefill);
    for (bool abandons = lane_random(l, 3) == 0, is_done = false; !is_done; abandons = false) {
      assert_int_equal(td_engine_begin(l->prefill, &seq, 1, &err), TD_OK);
      for (int i = 0; !is_done && !(abandons && i == 2); i++) {
        td_engine_confine(l->prefill, lane_random(l, 2));
        is_done = td_engine_feed(l->prefill, 1 + lane_random(l, 1 << 19));
        l->feeds = !is_done && lane_random(l, 2);
        decode_lanes(l, ready);
        l->feeds = false;
        if (lane_random(l, 2)) td_engine_wait(l->prefill);
      }
      if (!is_done) assert_int_equal(td_engine_end(l->prefill, &err), TD_OK);
    }
    end_prefill(l, s);
    const td_stream_progress after = td_engine_stream_progress(l->prefill);
    assert_true(after.queued_bytes > before.queued_bytes);
    assert_true(after.queued_bytes == after.copied_bytes);
    ready |= 1u << s;
  }
  while (has_answers_left(l, ready))
    decode_lanes(l, ready);
}

// The same, one thing after the other.
static inline void run_lanes_apart(lanes *l) {
  td_err err;
  for (uint32_t s = 1; s < LANE_SEQS; s++) {
    const td_step_seq seq = lane_seq(l, s, false);
    if (td_engine_step(l->prefill, &seq, 1, &err) != TD_OK) fail_msg("%s", err.msg);
    keep_row(l, l->prefill, 0, s, 0);
  }
  for (uint32_t s = 0; s < LANE_SEQS; s++) {
    while (has_answers_left(l, 1u << s))
      decode_lanes(l, 1u << s);
  }
}

// The caller's. seed 0: one thing after the other.
static inline float *lane_rows(const small_model *m, const char *kind, unsigned seed,
                               size_t *n_bytes) {
  td_err err;
  set_jitter(seed);
  lanes l = {.random = seed};
  open_lanes(&l, m, kind);
  const td_step_seq seq = lane_seq(&l, 0, false);
  if (td_engine_step(l.decode, &seq, 1, &err) != TD_OK) fail_msg("%s", err.msg);
  keep_row(&l, l.decode, 0, 0, 0);
  if (seed) run_lanes_beside(&l);
  if (!seed) run_lanes_apart(&l);
  *n_bytes = LANE_SEQS * (LANE_DECODE + 1) * l.n_vocab * sizeof *l.out;
  close_lanes(&l);
  unsetenv("TANDEM_JITTER");
  return l.out;
}

// Whatever decode does beside a prompt that streams, and whoever is faster, results are those of
// one thing after the other. In half of the schedules dense weights stream, to each engine.
static inline void check_lanes(const small_model *m, const char *kind, unsigned n_schedules) {
  size_t n_bytes;
  float *want = lane_rows(m, kind, 0, &n_bytes);
  for (unsigned seed = 1; seed <= n_schedules; seed++) {
    engine_streamed_dense = seed % 2 ? 0 : UINT32_MAX;
    float *got = lane_rows(m, kind, seed, &n_bytes);
    engine_streamed_dense = 0;
    if (memcmp(got, want, n_bytes) != 0)
      fail_msg("%s: engines beside each other with TANDEM_JITTER=%u differ", m->name, seed);
    free(got);
  }
  free(want);
}

// ---- a cache of experts -------------------------------------------------------------------------

enum {
  CACHE_SEQS = 3,
  CACHE_STEPS = 24,
  CACHE_FEW_STEPS = 10,
  CACHE_PROMPT = 2,
  CACHE_TOKENS = ENGINE_PAGE * 2
};
enum { CACHE_PREEMPTS = 7 }; // every so many steps a sequence is computed again

typedef struct {
  uint32_t n_slots;        // 0: no cache
  uint32_t n_microbatches; //
  size_t step_bytes;       // see td_engine_opts.cache_step_bytes
  uint32_t n_steps;        // 0: CACHE_STEPS
} cache_case;

typedef struct {
  float *out; // [n_rows][n_vocab]
  size_t n_rows, n_vocab;
  td_expert_cache_stats stats;
} cache_result;

static inline size_t cache_bytes_of(const td_model *model, uint32_t n_slots, td_dtype act) {
  const td_model_config *c = td_model_config_of(model);
  uint32_t layer_idx = 0;
  while (!td_model_is_moe(c, layer_idx))
    layer_idx++;
  const td_layer *layer = td_model_layer(model, layer_idx);
  td_slot_part parts[TD_SLOT_EXPERT_PARTS];
  td_slot_list_expert(parts, layer, 0);
  const size_t row = c->dim * (c->top_k * sizeof(float) + td_dtype_bytes(act));
  return n_slots ? CACHE_SEQS * row + n_slots * td_slot_lay_out(parts, TD_SLOT_EXPERT_PARTS) : 0;
}

static inline void open_cached(engine_fixture *f, const small_model *m, td_dev *dev,
                               const cache_case *c) {
  td_err err;
  *f = (engine_fixture){.dev = dev};
  if (td_model_open(&f->model, golden_dir(m->name), &err) != TD_OK) fail_msg("%s", err.msg);
  f->n_vocab = td_model_config_of(f->model)->n_vocab;
  const td_dev_opts cpu = {.kind = "cpu", .n_threads = 3, .activations = engine_activations};
  assert_int_equal(td_dev_open(&f->expert_dev, &cpu, &err), TD_OK);
  const td_engine_opts opts = {
      .n_pages = 2 * CACHE_SEQS,
      .page_tokens = ENGINE_PAGE,
      .max_step_tokens = CACHE_TOKENS,
      .max_step_seqs = CACHE_SEQS,
      .max_seq_tokens = CACHE_TOKENS,
      .kv_dtype = td_dev_kv_dtype(dev, TD_F32),
      .record_routing = true,
      .expert_dev = f->expert_dev,
      .n_microbatches = c->n_microbatches,
      .cache_bytes = cache_bytes_of(f->model, c->n_slots, td_dev_act_dtype(dev)),
      .cache_step_bytes = c->step_bytes};
  if (td_engine_open(&f->engine, f->model, f->dev, &opts, &err) != TD_OK) fail_msg("%s", err.msg);
  const uint32_t n_slots = td_engine_cache_stats(f->engine).n_slots;
  assert_true(n_slots == c->n_slots || (n_slots >= 4 && n_slots < c->n_slots)); // holds all experts
}

// Tokens of few kinds, so that experts are used again.
static inline int32_t cache_token(uint32_t s, uint32_t i) {
  return (int32_t)(3 + 7 * s + 5 * (i % (3 + s)));
}

// Prompts, then random ones of the sequences in every step; now and then one is preempted, and what
// it had generated is computed again, on other pages.
static inline void run_cached(engine_fixture *f, const cache_case *c, cache_result *r) {
  int32_t tokens[CACHE_SEQS][CACHE_TOKENS], pages[CACHE_SEQS][2];
  uint32_t n_past[CACHE_SEQS];
  lanes random = {.random = 1};
  const uint32_t n_steps = c->n_steps ? c->n_steps : CACHE_STEPS;
  float *at = r->out = malloc((size_t)CACHE_SEQS * CACHE_STEPS * CACHE_TOKENS * f->n_vocab *
                              sizeof *at);
  for (uint32_t s = 0; s < CACHE_SEQS; s++) {
    for (uint32_t i = 0; i < CACHE_TOKENS; i++)
      tokens[s][i] = cache_token(s, i);
    pages[s][0] = (int32_t)s;
    pages[s][1] = (int32_t)(s + CACHE_SEQS);
    n_past[s] = CACHE_PROMPT;
    const td_step_seq seq = {.tokens = tokens[s],
                             .n_tokens = CACHE_PROMPT,
                             .pages = pages[s],
                             .n_pages = 2,
                             .want = TD_WANT_ALL};
    keep_step(f, &seq, 1, CACHE_PROMPT, &at);
  }
  for (uint32_t i = 0; i < n_steps; i++) {
    td_step_seq seqs[CACHE_SEQS];
    uint32_t n = 0, n_rows = 0;
    for (uint32_t s = 0; s < CACHE_SEQS; s++) {
      const bool again = i % CACHE_PREEMPTS == s + 1;
      if (!again && lane_random(&random, 4) == 0) continue;
      if (again) {
        const int32_t page = pages[s][0];
        pages[s][0] = pages[s][1];
        pages[s][1] = page;
      }
      seqs[n] = (td_step_seq){.tokens = tokens[s] + (again ? 0 : n_past[s]),
                              .n_tokens = again ? n_past[s] + 1 : 1,
                              .n_past = again ? 0 : n_past[s],
                              .pages = pages[s],
                              .n_pages = 2,
                              .is_decode = true,
                              .want = TD_WANT_ALL};
      n_rows += seqs[n++].n_tokens;
      n_past[s]++;
    }
    if (n) keep_step(f, seqs, n, n_rows, &at);
  }
  r->n_vocab = f->n_vocab;
  r->n_rows = (size_t)(at - r->out) / f->n_vocab;
  r->stats = td_engine_cache_stats(f->engine);
}

static void (*meddle_with)(engine_fixture *f); // called when the engine is open, or NULL

// The caller frees out. seed: see short_logits.
static inline cache_result cached_logits(const small_model *m, const char *kind,
                                         const cache_case *c, unsigned seed) {
  const td_dev_opts opts = {.kind = kind, .n_threads = 2, .activations = engine_activations};
  td_dev *dev;
  td_err err;
  set_jitter(seed);
  if (td_dev_open(&dev, &opts, &err) != TD_OK) fail_msg("%s", err.msg);
  engine_fixture f;
  open_cached(&f, m, dev, c);
  size_t n_memory;
  const char *memory = experts_memory(f.model, &n_memory);
  td_dev_pin(dev, memory, n_memory, false);
  td_dev_wait_pinned(dev, memory, n_memory);
  cache_result r;
  if (meddle_with) meddle_with(&f);
  run_cached(&f, c, &r);
  close_engine(&f);
  td_dev_close(dev);
  unsetenv("TANDEM_JITTER");
  return r;
}

enum { ENGINE_ROWS = ENGINE_SEQS * (PROMPT + ANSWER - 1) }; // prompts of PROMPT, and 1 and 2 less

// f32 [ENGINE_ROWS][*n_vocab], the caller's. with_long: and after them LONG_PROMPT + 1 rows more.
static inline float *engine_logits(const small_model *m, td_dev *dev, placement where,
                                   bool with_long, size_t *n_vocab) {
  engine_fixture f;
  engine_routing = 14695981039346656037u;
  open_engine(&f, m, dev, where, LONG_PROMPT + 1);
  *n_vocab = f.n_vocab;
  size_t n_rows = ENGINE_ROWS + (with_long ? LONG_PROMPT + 1 : 0);
  float *out = malloc(n_rows * f.n_vocab * sizeof *out);
  keep_steps(&f, out);
  if (with_long) keep_long_step(&f, out + ENGINE_ROWS * f.n_vocab);
  close_engine(&f);
  return out;
}
