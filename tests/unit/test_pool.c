// tests/unit/test_pool.c - pooled keys, attention over them and a window, hyper-connections: the
// operators of the CPU device against a reference in double, and that neither cuts of a sequence
// nor restored pages change a bit.

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "unit/device_test.h"

enum {
  N = 45,
  HEADS = 11,
  MAX_PAGES = N,
  SPARE = 3 // keys of a ring behind its window
};          // tokens; heads are computed in tiles of 8, or all together

typedef struct {
  uint32_t dim, rot_dim, group, window, page_tokens, top_k;
  bool overlaps, has_no_norm;
  bool is_mean; // no gates; halves of the first elements rotate
} shape;

static const shape shapes[] = {
    {.dim = 12,
     .rot_dim = 4,
     .group = 4,
     .window = 7,
     .page_tokens = 8,
     .top_k = 3,
     .overlaps = true},
    {.dim = 70,
     .rot_dim = 8,
     .group = 8,
     .window = 1,
     .page_tokens = 4}, // groups larger than pages
    {.dim = 16, .rot_dim = 16, .group = 2, .window = 20, .page_tokens = 16, .overlaps = true},
    {.dim = 20, .group = 8, .window = 3, .page_tokens = 16, .top_k = 2, .has_no_norm = true},
    {.dim = 10, .rot_dim = 6, .group = 4, .window = 3, .page_tokens = 8, .is_mean = true},
    {.dim = 9, .rot_dim = 2, .group = 0, .window = 11, .page_tokens = 4}, // no pooled keys
};

// A sequence's inputs, and the memory of its pages.
typedef struct {
  const shape *s;
  uint32_t width; // of x and gate
  size_t open_at, entry_at, page_bytes;
  float *x, *gate, *bias, *norm, *cos_sin, *keys, *q, *sinks;
  char *pages;
  td_state_trail trail;
  int32_t table[MAX_PAGES], seq[N], position[N], selected[N * 8];
  float *out; // [N][HEADS][dim]
} fixture;

static void open_fixture(fixture *f, const shape *s, uint64_t *rng) {
  *f = (fixture){.s = s, .width = s->overlaps ? 2 * s->dim : s->dim};
  f->open_at = (size_t)(s->window + SPARE) * s->dim;
  f->entry_at = f->open_at + 6 * (size_t)s->dim;
  const uint32_t n_entries = s->group ? td_pool_entries(s->page_tokens, s->group) : 0;
  f->page_bytes = (f->entry_at + (size_t)n_entries * s->dim) * sizeof(float);
  const size_t bias = (size_t)(s->group ? s->group : 1) * f->width;
  f->x = ref_floats(rng, (size_t)N * f->width);
  f->gate = ref_floats(rng, (size_t)N * f->width);
  f->bias = ref_floats(rng, bias);
  f->norm = ref_floats(rng, s->dim);
  f->cos_sin = ref_floats(rng, (size_t)N * s->rot_dim);
  f->keys = ref_floats(rng, (size_t)N * s->dim);
  f->q = ref_floats(rng, (size_t)N * HEADS * s->dim);
  f->sinks = ref_floats(rng, HEADS);
  f->out = malloc((size_t)N * HEADS * s->dim * sizeof(float));
  f->pages = malloc(MAX_PAGES * f->page_bytes);
  for (int32_t i = 0; i < N; i++) {
    f->position[i] = i;
    f->table[i] = (MAX_PAGES - 1 - i);
    for (uint32_t k = 0; k < s->top_k; k++) { // the first ones and the last
      const int32_t n_seen = (i + 1) / (int32_t)s->group;
      f->selected[(uint32_t)i * s->top_k + k] = k + 1 < s->top_k ? (int32_t)k : n_seen - 1;
    }
  }
}

static void close_fixture(fixture *f) {
  free(f->x), free(f->gate), free(f->bias), free(f->norm), free(f->cos_sin);
  free(f->keys), free(f->q), free(f->sinks), free(f->out), free(f->pages);
}

// Tokens [begin, begin + n), as one step.
static void run(device_fixture *d, fixture *f, int32_t begin, int32_t n) {
  const shape *s = f->s;
  int32_t q_begin[] = {0, n}, seq[N] = {0};
  const size_t row = (size_t)HEADS * s->dim;
  memcpy(f->out + begin * row, f->q + begin * row, n * row * sizeof(float));
  const td_batch_view batch = {.seq = seq,
                               .position = f->position + begin,
                               .q_begin = q_begin,
                               .page_table = f->table,
                               .n_tokens = (uint32_t)n,
                               .n_seqs = 1,
                               .max_pages = MAX_PAGES,
                               .page_tokens = s->page_tokens};
  const td_kv_view state = {.pages = f->pages, .page_bytes = f->page_bytes, .dtype = TD_F32};
  if (s->group) {
    td_op_pool(d->stream,
               &(td_pool_args){.batch = batch,
                               .state = state,
                               .trail = f->trail,
                               .x = f->x + (size_t)begin * f->width,
                               .gate = s->is_mean ? NULL : f->gate + (size_t)begin * f->width,
                               .stride = f->width,
                               .bias = f->bias,
                               .norm = {f->norm, TD_F32, s->has_no_norm ? 0 : s->dim},
                               .cos_sin = f->cos_sin,
                               .open_at = f->open_at,
                               .entry_at = f->entry_at,
                               .dim = s->dim,
                               .rot_dim = s->rot_dim,
                               .group = s->group,
                               .overlaps = s->overlaps,
                               .rotates_first = s->is_mean,
                               .eps = 1e-5f});
  }
  td_op_attn_pool(d->stream,
                  &(td_attn_pool_args){.batch = batch,
                                       .state = state,
                                       .q = f->out + begin * row,
                                       .key = f->keys + (size_t)begin * s->dim,
                                       .key_stride = s->dim,
                                       .sinks = f->sinks,
                                       .selected = s->top_k ? f->selected + begin * s->top_k : NULL,
                                       .entry_at = f->entry_at,
                                       .n_heads = HEADS,
                                       .dim = s->dim,
                                       .window = s->window,
                                       .ring = s->window + SPARE,
                                       .group = s->group,
                                       .top_k = s->top_k,
                                       .scale = 0.3f});
  device_sync(d);
}

// ---- the reference ------------------------------------------------------------------------------

static void ref_entry(const fixture *f, uint32_t entry, double *out) {
  const shape *s = f->s;
  double squares = 0;
  for (uint32_t d = 0; d < s->dim; d++) {
    double sum = 0, weights = 0;
    const uint32_t end = (entry + 1) * s->group;
    for (uint32_t p = s->overlaps && entry ? end - 2 * s->group : end - s->group; p < end; p++) {
      const uint32_t half = s->overlaps && p >= end - s->group ? s->dim : 0;
      const size_t at = (size_t)p * f->width + half + d;
      const float *bias = f->bias + p % s->group * f->width + half;
      const double w = s->is_mean ? 1 : exp(f->gate[at] + (double)bias[d]);
      sum += w * f->x[at];
      weights += w;
    }
    out[d] = sum / weights;
    squares += out[d] * out[d];
  }
  if (s->has_no_norm) return;
  for (uint32_t d = 0; d < s->dim; d++)
    out[d] *= f->norm[d] / sqrt(squares / s->dim + 1e-5);
  double *x = out + s->dim - s->rot_dim;
  const float *angles = f->cos_sin + (size_t)entry * s->group * s->rot_dim;
  for (uint32_t i = 0; i < s->rot_dim; i += 2) {
    double *a = s->is_mean ? out + i / 2 : x + i, *b = s->is_mean ? a + s->rot_dim / 2 : a + 1;
    const double u = *a, v = *b;
    *a = u * angles[i] - v * angles[i + 1];
    *b = v * angles[i] + u * angles[i + 1];
  }
}

static void ref_key(const fixture *f, uint32_t position, double *out) {
  for (uint32_t d = 0; d < f->s->dim; d++)
    out[d] = f->keys[(size_t)position * f->s->dim + d];
}

static void ref_token(const fixture *f, uint32_t t, uint32_t head, double *out) {
  const shape *s = f->s;
  const float *q = f->q + ((size_t)t * HEADS + head) * s->dim;
  double sum = exp(f->sinks[head]), key[128];
  const uint32_t seen = s->group ? (t + 1) / s->group : 0;
  const bool selects = s->top_k && seen > s->top_k;
  const uint32_t n_entries = selects ? s->top_k : seen;
  const uint32_t first = t + 1 > s->window ? t + 1 - s->window : 0;
  memset(out, 0, s->dim * sizeof *out);
  for (uint32_t i = 0; i < n_entries + t + 1 - first; i++) {
    if (i < n_entries) {
      ref_entry(f, selects ? (uint32_t)f->selected[t * s->top_k + i] : i, key);
    } else {
      ref_key(f, first + i - n_entries, key);
    }
    double score = 0;
    for (uint32_t d = 0; d < s->dim; d++)
      score += key[d] * q[d];
    const double w = exp(0.3 * score);
    sum += w;
    for (uint32_t d = 0; d < s->dim; d++)
      out[d] += w * key[d];
  }
  for (uint32_t d = 0; d < s->dim; d++)
    out[d] /= sum;
}

// ---- tests --------------------------------------------------------------------------------------

TEST(results) {
  device_fixture d;
  FOR_TEAMS(d) {
    for (size_t i = 0; i < TD_COUNT(shapes); i++) {
      fixture f;
      open_fixture(&f, &shapes[i], &d.rng);
      run(&d, &f, 0, N);
      double *want = malloc((size_t)N * HEADS * f.s->dim * sizeof *want);
      for (uint32_t k = 0; k < N * HEADS; k++)
        ref_token(&f, k / HEADS, k % HEADS, want + (size_t)k * f.s->dim);
      device_assert_close(f.out, want, (size_t)N * HEADS * f.s->dim, 1e-5);
      free(want);
      close_fixture(&f);
    }
  }
}

static const int32_t cuts[][4] = {{1, 1, 1, 1}, {3, 1, 7, 2}, {8, 8, 8, 8}, {13, 5, 1, 26}};

TEST(cuts_change_no_bit) {
  device_fixture d;
  FOR_TEAMS(d) {
    for (size_t i = 0; i < TD_COUNT(shapes); i++) {
      fixture f;
      open_fixture(&f, &shapes[i], &d.rng);
      const size_t n_bytes = (size_t)N * HEADS * f.s->dim * sizeof(float);
      float *whole = malloc(n_bytes);
      run(&d, &f, 0, N);
      memcpy(whole, f.out, n_bytes);
      for (size_t c = 0; c < TD_COUNT(cuts); c++) {
        memset(f.pages, 0xff, MAX_PAGES * f.page_bytes); // NaN where nothing was written
        for (int32_t at = 0, k = 0; at < N; k++) {
          const int32_t n = cuts[c][k % 4] < N - at ? cuts[c][k % 4] : N - at;
          run(&d, &f, at, n);
          at += n;
        }
        assert_memory_equal(f.out, whole, n_bytes);
      }
      free(whole);
      close_fixture(&f);
    }
  }
}

// The last page in use is copied elsewhere and filled by another sequence before this one goes on.
TEST(a_restored_page_continues) {
  device_fixture d;
  enum { CUT = 19 };
  FOR_TEAMS(d) {
    for (size_t i = 0; i < TD_COUNT(shapes); i++) {
      fixture f;
      open_fixture(&f, &shapes[i], &d.rng);
      const size_t n_bytes = (size_t)N * HEADS * f.s->dim * sizeof(float);
      float *whole = malloc(n_bytes);
      run(&d, &f, 0, N);
      memcpy(whole, f.out, n_bytes);
      run(&d, &f, 0, CUT);
      const uint32_t page = (CUT - 1) / f.s->page_tokens;
      char *from = f.pages + (size_t)f.table[page] * f.page_bytes;
      f.table[page] = f.table[N - 1]; // of positions far behind
      memcpy(f.pages + (size_t)f.table[page] * f.page_bytes, from, f.page_bytes);
      memset(from, 0xff, f.page_bytes);
      run(&d, &f, CUT, N - CUT);
      assert_memory_equal(f.out, whole, n_bytes);
      free(whole);
      close_fixture(&f);
    }
  }
}

// Computes token `at` and SPARE others than those that follow it in one step, and takes these back.
static void take_back(device_fixture *d, fixture *f, int32_t at) {
  static const int32_t first[] = {0};
  const shape *s = f->s;
  const size_t open_bytes = (s->group ? s->overlaps ? 6 : 3 : 0) * s->dim * sizeof(float);
  const size_t n = SPARE * (size_t)f->width, n_keys = SPARE * (size_t)s->dim;
  float *x = f->x + ((size_t)at + 1) * f->width, *keys = f->keys + ((size_t)at + 1) * s->dim;
  float *saved = malloc((n + n_keys) * sizeof *saved);
  char *slots = calloc(SPARE, open_bytes + 1);
  memcpy(saved, x, n * sizeof *x);
  memcpy(saved + n, keys, n_keys * sizeof *keys);
  for (size_t i = 0; i < n; i++)
    x[i] = 3 - x[i];
  for (size_t i = 0; i < n_keys; i++)
    keys[i] = 3 - keys[i];
  f->trail = (td_state_trail){slots, first, open_bytes};
  run(d, f, at, 1 + SPARE);
  f->trail = (td_state_trail){.slots = NULL};
  memcpy(x, saved, n * sizeof *x);
  memcpy(keys, saved + n, n_keys * sizeof *keys);
  char *page = f->pages + (size_t)f->table[(uint32_t)at / s->page_tokens] * f->page_bytes;
  memcpy(page + f->open_at * sizeof(float), slots, open_bytes);
  free(saved);
  free(slots);
}

TEST(tokens_that_are_taken_back) {
  device_fixture d;
  FOR_TEAMS(d) {
    for (size_t i = 0; i < TD_COUNT(shapes); i++) {
      fixture f;
      open_fixture(&f, &shapes[i], &d.rng);
      const size_t n_bytes = (size_t)N * HEADS * f.s->dim * sizeof(float);
      float *whole = malloc(n_bytes);
      run(&d, &f, 0, N);
      memcpy(whole, f.out, n_bytes);
      memset(f.pages, 0xff, MAX_PAGES * f.page_bytes);
      for (int32_t at = 0; at < N; at++) {
        if (at % 3 == 0 && at + SPARE < N) {
          take_back(&d, &f, at);
        } else {
          run(&d, &f, at, 1);
        }
      }
      assert_memory_equal(f.out, whole, n_bytes);
      free(whole);
      close_fixture(&f);
    }
  }
}

// Selections of entries, at most 3 of 11, in pages of two; a score of 0 ties, and the first win.
// By the first head alone, or by both alike.
static void check_selected(bool has_weights) {
  enum { GROUP = 4, DIM = 6, TOP = 3, ENTRIES = N / GROUP };
  device_fixture d;
  FOR_TEAMS(d) {
    float *pages = ref_floats(&d.rng, MAX_PAGES * 2 * DIM), *q = ref_floats(&d.rng, N * 2 * DIM);
    float *weights = ref_floats(&d.rng, N * 2);
    int32_t table[MAX_PAGES], seq[N] = {0}, position[N], selected[N * TOP], q_begin[] = {0, N};
    for (int32_t i = 0; i < N; i++) {
      position[i] = i;
      table[i] = MAX_PAGES - 1 - i;
      weights[2 * i] = fabsf(weights[2 * i]);
      weights[2 * i + 1] = 0;
    }
    td_op_select(d.stream, &(td_select_args){.batch = {.seq = seq,
                                                       .position = position,
                                                       .q_begin = q_begin,
                                                       .page_table = table,
                                                       .n_tokens = N,
                                                       .n_seqs = 1,
                                                       .max_pages = MAX_PAGES,
                                                       .page_tokens = 2 * GROUP},
                                             .kv = {.pages = (char *)pages,
                                                    .page_bytes = 2 * DIM * sizeof(float),
                                                    .dtype = TD_F32},
                                             .q = q,
                                             .weights = has_weights ? weights : NULL,
                                             .selected = selected,
                                             .n_heads = 2,
                                             .dim = DIM,
                                             .top_k = TOP,
                                             .group = GROUP});
    device_sync(&d);
    for (int32_t t = 0; t < N; t++) {
      const int32_t n = (t + 1) / GROUP;
      double scores[ENTRIES];
      for (int32_t j = 0; j < n; j++) {
        scores[j] = 0;
        for (int32_t h = 0; h < (has_weights ? 1 : 2); h++) {
          const float *query = q + (t * 2 + h) * DIM;
          double product = 0;
          for (int32_t i = 0; i < DIM; i++)
            product += (double)query[i] * pages[(table[j / 2] * 2 + j % 2) * DIM + i];
          scores[j] += fmax(product, 0) * (has_weights ? weights[2 * t] : 1);
        }
      }
      for (int32_t j = 0, k = 0; n > TOP && j < n; j++) {
        int32_t n_before = 0; // entries that are better, or as good and earlier
        for (int32_t i = 0; i < n; i++)
          n_before += scores[i] > scores[j] || (scores[i] == scores[j] && i < j);
        if (n_before < TOP) assert_int_equal(selected[t * TOP + k++], j);
      }
    }
    free(pages), free(q), free(weights);
  }
}

TEST(entries_are_selected) {
  check_selected(true);
  check_selected(false);
}

TEST(bad_arguments) {
  device_fixture d;
  device_open(&d, 1);
  fixture f;
  shape odd = shapes[0];
  odd.group = 3;
  open_fixture(&f, &odd, &d.rng);
  td_op_attn_pool(
      d.stream,
      &(td_attn_pool_args){.batch = {.seq = f.seq,
                                     .position = f.position,
                                     .q_begin = (int32_t[]){0, 1},
                                     .page_table = f.table,
                                     .n_tokens = 1,
                                     .n_seqs = 1,
                                     .max_pages = 1,
                                     .page_tokens = 8},
                           .state = {.pages = f.pages, .page_bytes = f.page_bytes, .dtype = TD_F32},
                           .group = 3,
                           .dim = 12,
                           .window = 7,
                           .ring = 7,
                           .n_heads = HEADS,
                           .sinks = f.sinks});
  device_expect_failure(&d, "groups of 3");
  device_reopen_stream(&d);
  td_op_hyper_write(d.stream, &(td_hyper_write_args){.n_tokens = 1, .n_streams = 17, .dim = 1});
  device_expect_failure(&d, "17 streams");
  device_reopen_stream(&d);
  close_fixture(&f);
  device_close(&d);
}

// ---- hyper-connections --------------------------------------------------------------------------

enum { TOKENS = 3, STREAMS = 3, DIM = 300, SCORES = (2 + STREAMS) * STREAMS, ROUNDS = 4 };

static double ref_sigmoid(double x) {
  return 1 / (1 + exp(-x));
}

// The factors of one token.
static void ref_factors(const float *x, const float *scores, const float *base, const float *scale,
                        double *out) {
  double squares = 0, sum;
  for (int i = 0; i < STREAMS * DIM; i++)
    squares += (double)x[i] * x[i];
  const double gain = 1 / sqrt(squares / (STREAMS * DIM) + 1e-5);
  for (int i = 0; i < SCORES; i++) {
    const int part = i / STREAMS < 2 ? i / STREAMS : 2;
    out[i] = scores[i] * gain * scale[part] + base[i];
    out[i] = part == 0 ? ref_sigmoid(out[i]) + 1e-6 : part == 1 ? 2 * ref_sigmoid(out[i]) : out[i];
  }
  double *m = out + 2 * STREAMS;
  for (int i = 0; i < STREAMS; i++) {
    sum = 0;
    for (int j = 0; j < STREAMS; j++)
      sum += exp(m[i * STREAMS + j]);
    for (int j = 0; j < STREAMS; j++)
      m[i * STREAMS + j] = exp(m[i * STREAMS + j]) / sum + 1e-6;
  }
  for (int r = 0; r < 2 * ROUNDS - 1; r++) { // columns first and last
    const int along = r % 2 ? 1 : STREAMS, across = r % 2 ? STREAMS : 1;
    for (int i = 0; i < STREAMS; i++) {
      sum = 1e-6;
      for (int j = 0; j < STREAMS; j++)
        sum += m[i * across + j * along];
      for (int j = 0; j < STREAMS; j++)
        m[i * across + j * along] /= sum;
    }
  }
}

// Without scores, the norm of the streams' mean.
TEST(mean_of_streams) {
  device_fixture d;
  FOR_TEAMS(d) {
    float *x = ref_floats(&d.rng, TOKENS * STREAMS * DIM), *w = ref_floats(&d.rng, DIM);
    float out[TOKENS * DIM];
    static double want[TOKENS * DIM];
    td_op_hyper_read(d.stream, &(td_hyper_read_args){.x = x,
                                                     .w = {w, TD_F32, DIM},
                                                     .out = out,
                                                     .n_tokens = TOKENS,
                                                     .n_streams = STREAMS,
                                                     .dim = DIM,
                                                     .norm_eps = 1e-5f,
                                                     .head = true});
    device_sync(&d);
    for (int t = 0; t < TOKENS; t++) {
      double mean[DIM] = {0}, squares = 0;
      for (int i = 0; i < STREAMS * DIM; i++)
        mean[i % DIM] += x[t * STREAMS * DIM + i] / (double)STREAMS;
      for (int i = 0; i < DIM; i++)
        squares += mean[i] * mean[i];
      for (int i = 0; i < DIM; i++)
        want[t * DIM + i] = mean[i] / sqrt(squares / DIM + 1e-5) * w[i];
    }
    device_assert_close(out, want, TOKENS * DIM, 1e-5);
    free(x), free(w);
  }
}

// Streams that are read by gates of each element.
TEST(gated_streams) {
  device_fixture d;
  FOR_TEAMS(d) {
    float *x = ref_floats(&d.rng, TOKENS * STREAMS * DIM), *y = ref_floats(&d.rng, TOKENS * DIM);
    float *gate = ref_floats(&d.rng, TOKENS * STREAMS * DIM),
          *low = ref_floats(&d.rng, TOKENS * DIM);
    float *scores = ref_floats(&d.rng, TOKENS * STREAMS), out[TOKENS * DIM];
    static double want[TOKENS * DIM], added[TOKENS * STREAMS * DIM], silu[TOKENS * DIM];
    memset(want, 0, sizeof want);
    for (int i = 0; i < TOKENS * STREAMS * DIM; i++) {
      const int stream = i / DIM, at = stream / STREAMS * DIM + i % DIM;
      want[at] += x[i] * ref_sigmoid(gate[i]) / STREAMS;
      added[i] = x[i] + 2 * ref_sigmoid(scores[stream] / STREAMS) * y[at];
    }
    for (int i = 0; i < TOKENS * DIM; i++)
      silu[i] = 0.25 * low[i] * ref_sigmoid(0.25 * low[i]);
    td_op_silu_rows(d.stream,
                    &(td_silu_rows_args){.x = low, .n_rows = TOKENS, .dim = DIM, .factor = 0.25f});
    td_op_hyper_mix(d.stream, &(td_hyper_mix_args){.x = x,
                                                   .gate = gate,
                                                   .scores = scores,
                                                   .out = out,
                                                   .n_tokens = TOKENS,
                                                   .n_streams = STREAMS,
                                                   .dim = DIM});
    td_op_hyper_write(d.stream, &(td_hyper_write_args){.x = x,
                                                       .y = y,
                                                       .scores = scores,
                                                       .n_tokens = TOKENS,
                                                       .n_streams = STREAMS,
                                                       .dim = DIM,
                                                       .adds = true});
    device_sync(&d);
    device_assert_close(low, silu, TOKENS * DIM, 1e-5);
    device_assert_close(out, want, TOKENS * DIM, 1e-5);
    device_assert_close(x, added, TOKENS * STREAMS * DIM, 1e-5);
    td_op_hyper_mix(d.stream, &(td_hyper_mix_args){.n_tokens = 1, .n_streams = 17, .dim = 1});
    device_expect_failure(&d, "17 streams");
    device_reopen_stream(&d);
    free(x), free(y), free(gate), free(low), free(scores);
  }
}

TEST(streams) {
  device_fixture d;
  FOR_TEAMS(d) {
    float *x = ref_floats(&d.rng, TOKENS * STREAMS * DIM), *y = ref_floats(&d.rng, TOKENS * DIM);
    float *scores = ref_floats(&d.rng, TOKENS * SCORES), *base = ref_floats(&d.rng, SCORES);
    float *scale = ref_floats(&d.rng, 3), *w = ref_floats(&d.rng, DIM);
    float out[TOKENS * DIM];
    static double want[TOKENS * DIM], mixed[TOKENS * STREAMS * DIM];
    for (int t = 0; t < TOKENS; t++) {
      double f[SCORES], squares = 0;
      ref_factors(x + t * STREAMS * DIM, scores + t * SCORES, base, scale, f);
      for (int i = 0; i < DIM; i++) {
        double sum = 0;
        for (int k = 0; k < STREAMS; k++) {
          const double *comb = f + 2 * STREAMS;
          sum += f[k] * x[(t * STREAMS + k) * DIM + i];
          double row = f[STREAMS + k] * y[t * DIM + i];
          for (int j = 0; j < STREAMS; j++)
            row += comb[j * STREAMS + k] * x[(t * STREAMS + j) * DIM + i];
          mixed[(t * STREAMS + k) * DIM + i] = row;
        }
        want[t * DIM + i] = sum;
        squares += sum * sum;
      }
      for (int i = 0; i < DIM; i++)
        want[t * DIM + i] *= w[i] / sqrt(squares / DIM + 1e-5);
    }
    td_op_hyper_read(d.stream, &(td_hyper_read_args){.x = x,
                                                     .scores = scores,
                                                     .base = base,
                                                     .scale = scale,
                                                     .w = {w, TD_F32, DIM},
                                                     .out = out,
                                                     .n_tokens = TOKENS,
                                                     .n_streams = STREAMS,
                                                     .dim = DIM,
                                                     .n_rounds = ROUNDS,
                                                     .eps = 1e-6f,
                                                     .norm_eps = 1e-5f});
    td_op_hyper_write(d.stream, &(td_hyper_write_args){.x = x,
                                                       .y = y,
                                                       .scores = scores,
                                                       .n_tokens = TOKENS,
                                                       .n_streams = STREAMS,
                                                       .dim = DIM});
    device_sync(&d);
    device_assert_close(out, want, TOKENS * DIM, 1e-5);
    device_assert_close(x, mixed, TOKENS * STREAMS * DIM, 1e-5);
    td_op_hyper_write(d.stream,
                      &(td_hyper_write_args){
                          .x = x, .y = y, .n_tokens = TOKENS, .n_streams = STREAMS, .dim = DIM});
    device_sync(&d);
    for (int k = 0; k < TOKENS * STREAMS; k++)
      assert_memory_equal(x + k * DIM, y + k / STREAMS * DIM, DIM * sizeof *x);
    free(x), free(y), free(scores), free(base), free(scale), free(w);
  }
}
