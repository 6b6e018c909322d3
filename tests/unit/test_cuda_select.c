// tests/unit/test_cuda_select.c - what the CUDA device computes of an indexer: layer norms, and the
// selection of keys, or of blocks of keys, against scores in double, whose ties are exact.
// CTest: gpu no-tsan

#include "unit/cuda_test.h"

TEST(layernorm) {
  static const uint32_t dims[] = {1, 12, 128, 300};
  CUDA_OPEN(f);
  for (size_t k = 0; k < 2 * TD_COUNT(dims); k++) {
    const uint32_t dim = dims[k / 2], n = 5, stride = dim + 3;
    const bool is_f32 = k % 2;
    float *x = cuda_floats(&f, n * stride), *w = cuda_floats(&f, dim), *b = cuda_floats(&f, dim);
    const size_t n_bytes = (size_t)n * stride * sizeof *x;
    void *dev = is_f32 ? cuda_put(&f, x, n_bytes) : (void *)cuda_put_bf16(&f, x, n * stride);
    const td_layernorm_args args = {.x = dev,
                                    .w = {cuda_put(&f, w, dim * sizeof *w), TD_F32, dim},
                                    .b = {cuda_put(&f, b, dim * sizeof *b), TD_F32, dim},
                                    .stride = stride,
                                    .n_rows = n,
                                    .dim = dim,
                                    .eps = 1e-6f,
                                    .is_f32 = is_f32};
    td_op_layernorm(f.stream, &args);
    float *got = is_f32 ? malloc(n_bytes) : cuda_get_bf16(&f, dev, n * stride);
    TD_CHECK(got);
    if (is_f32) cuda_get(&f, got, dev, n_bytes);
    for (uint32_t row = 0; row < n; row++) {
      double mean = 0, variance = 0;
      for (uint32_t i = 0; i < dim; i++)
        mean += x[row * stride + i] / (double)dim;
      for (uint32_t i = 0; i < dim; i++)
        variance += pow(x[row * stride + i] - mean, 2) / dim;
      for (uint32_t i = 0; i < stride; i++) {
        const size_t at = row * stride + i;
        const double norm = (x[at] - mean) / sqrt(variance + 1e-6);
        const double want = i < dim ? norm * w[i] + b[i] : x[at];
        const double slack = i < dim ? (is_f32 ? 0 : fabs(want) * ULP_BF16) + 1e-4 : 0;
        cuda_assert_within(got[at], want, slack, "layer norm", at);
      }
    }
    free(x);
    free(w);
    free(b);
    free(got);
  }
  cuda_close(&f);
}

typedef struct {
  uint32_t n_heads, dim, top_k, page_tokens, len[2];
  td_dtype kv_dtype;
  uint32_t block, n_local; // block 0: keys are selected, by all heads together
} layout;

typedef struct {
  const layout *l;
  float *q[2], *k[2], *weights[2];
} world;

// Small multiples of a half, whose products and sums are exact, so that scores tie.
static float *coarse(cuda_fixture *f, size_t n) {
  float *out = ref_floats(&f->rng, n);
  for (size_t i = 0; i < n; i++)
    out[i] = rintf(out[i] * 2) / 2;
  return out;
}

static double product_of(const world *w, uint32_t s, uint32_t t, uint32_t h, uint32_t p) {
  const layout *l = w->l;
  double dot = 0;
  for (uint32_t d = 0; d < l->dim; d++)
    dot += w->q[s][(t * l->n_heads + h) * l->dim + d] * w->k[s][p * l->dim + d];
  return dot;
}

static double score_of(const world *w, uint32_t s, uint32_t t, uint32_t p) {
  double sum = 0;
  for (uint32_t h = 0; h < w->l->n_heads; h++)
    sum += w->weights[s][t * w->l->n_heads + h] * fmax(0, product_of(w, s, t, h, p));
  return sum;
}

static double score_of_block(const world *w, uint32_t s, uint32_t t, uint32_t h, uint32_t b) {
  const layout *l = w->l;
  double best = t / l->block - b < l->n_local ? INFINITY : -INFINITY;
  for (uint32_t p = b * l->block; p <= t && p < (b + 1) * l->block; p++)
    best = fmax(best, product_of(w, s, t, h, p));
  return best;
}

// What token t selects, with head h of blocks.
static void check_selection(const world *w, uint32_t s, uint32_t t, uint32_t h,
                            const int32_t *got) {
  const uint32_t top_k = w->l->top_k, block = w->l->block, n_seen = block ? t / block + 1 : t + 1;
  double *score = ref_doubles(n_seen);
  for (uint32_t p = 0; p < n_seen; p++)
    score[p] = block ? score_of_block(w, s, t, h, p) : score_of(w, s, t, p);
  uint32_t n = 0;
  for (uint32_t p = 0; p < n_seen; p++) {
    uint32_t n_before = 0;
    for (uint32_t other = 0; other < n_seen; other++)
      n_before += score[other] > score[p] || (score[other] == score[p] && other < p);
    if (n_seen <= top_k) {
      assert_int_equal(got[p], -7); // it is not written
    } else if (n_before < top_k && got[n++] != (int32_t)p) {
      fail_msg("sequence %u token %u head %u: %d instead of %u", s, t, h, got[n - 1], p);
    }
  }
  free(score);
}

// Tokens [from[s], len[s]) of both sequences, after their keys are stored.
static void run_layout(cuda_fixture *f, const layout *l, const uint32_t *from) {
  enum { MOST = 2048 };
  static int32_t seq[MOST], position[MOST];
  int32_t q_begin[3] = {0}, pages[2 * 64];
  const uint32_t max_pages = 64 / 2;
  world w = {.l = l};
  float *q = malloc(MOST * (size_t)l->n_heads * l->dim * sizeof *q), *at = q;
  float *weights = malloc(MOST * (size_t)l->n_heads * sizeof *q), *weight_at = weights;
  const size_t page_bytes = (size_t)l->page_tokens * l->dim * sizeof(uint16_t) + 32;
  td_kv_view kv = {.page_bytes = page_bytes, .dtype = l->kv_dtype};
  kv.pages = cuda_alloc(f, 2 * max_pages * page_bytes);
  for (uint32_t i = 0; i < 2 * max_pages; i++)
    pages[i] = (int32_t)(2 * max_pages - 1 - i);
  uint32_t n = 0, max_keys = 0;
  for (uint32_t s = 0; s < 2; s++) {
    w.q[s] = coarse(f, (size_t)l->len[s] * l->n_heads * l->dim);
    w.k[s] = coarse(f, (size_t)l->len[s] * l->dim);
    w.weights[s] = coarse(f, (size_t)l->len[s] * l->n_heads);
    for (uint32_t p = 0; p < l->len[s]; p++, n++) {
      seq[n] = (int32_t)s;
      position[n] = (int32_t)p;
    }
    q_begin[s + 1] = (int32_t)n;
    if (l->len[s] > max_keys) max_keys = l->len[s];
  }
  td_batch_view batch = {.seq = cuda_put(f, seq, sizeof seq),
                         .position = cuda_put(f, position, sizeof position),
                         .q_begin = cuda_put(f, q_begin, sizeof q_begin),
                         .page_table = cuda_put(f, pages, sizeof pages),
                         .n_tokens = n,
                         .n_seqs = 2,
                         .max_pages = max_pages,
                         .page_tokens = l->page_tokens,
                         .max_keys = max_keys};
  float *k = malloc((size_t)n * l->dim * sizeof *k);
  memcpy(k, w.k[0], (size_t)l->len[0] * l->dim * sizeof *k);
  memcpy(k + (size_t)l->len[0] * l->dim, w.k[1], (size_t)l->len[1] * l->dim * sizeof *k);
  const uint16_t *dev_k = cuda_put_bf16(f, k, (size_t)n * l->dim);
  td_op_kv_store(f->stream, &(td_kv_store_args){.batch = batch,
                                                .kv = kv,
                                                .k = dev_k,
                                                .k_stride = l->dim,
                                                .n_heads = 1,
                                                .head_dim = l->dim});
  n = 0;
  for (uint32_t s = 0; s < 2; s++) {
    const size_t row = (size_t)l->n_heads * l->dim, count = l->len[s] - from[s];
    memcpy(at, w.q[s] + from[s] * row, count * row * sizeof *q);
    memcpy(weight_at, w.weights[s] + from[s] * l->n_heads, count * l->n_heads * sizeof *q);
    at += count * row;
    weight_at += count * l->n_heads;
    for (uint32_t p = from[s]; p < l->len[s]; p++, n++) {
      seq[n] = (int32_t)s;
      position[n] = (int32_t)p;
    }
  }
  batch.seq = cuda_put(f, seq, sizeof seq);
  batch.position = cuda_put(f, position, sizeof position);
  batch.n_tokens = n;
  const uint32_t n_rows = n * (l->block ? l->n_heads : 1);
  const size_t n_selected = (size_t)n_rows * l->top_k;
  int32_t *selected = malloc(n_selected * sizeof *selected);
  for (size_t i = 0; i < n_selected; i++)
    selected[i] = -7;
  const td_select_args args = {
      .batch = batch,
      .kv = kv,
      .q = cuda_put_bf16(f, q, (size_t)n * l->n_heads * l->dim),
      .weights = cuda_put(f, weights, (size_t)n * l->n_heads * sizeof *weights),
      .selected = cuda_put(f, selected, n_selected * sizeof *selected),
      .n_heads = l->n_heads,
      .dim = l->dim,
      .top_k = l->top_k,
      .block = l->block,
      .n_local = l->n_local};
  td_op_select(f->stream, &args);
  cuda_get(f, selected, args.selected, n_selected * sizeof *selected);
  for (uint32_t row = 0; row < n_rows; row++) {
    const uint32_t t = row / (n_rows / n), h = row % (n_rows / n);
    check_selection(&w, (uint32_t)seq[t], (uint32_t)position[t], h,
                    selected + (size_t)row * l->top_k);
  }
  for (uint32_t s = 0; s < 2; s++) {
    free(w.q[s]);
    free(w.k[s]);
    free(w.weights[s]);
  }
  free(q);
  free(k);
  free(weights);
  free(selected);
}

// Whole prompts and single tokens, a few at a time where scratch is short.
static void run_layouts(const layout *layouts, size_t n) {
  for (size_t i = 0; i < n; i++) {
    const layout *l = &layouts[i];
    const bool is_long = l->len[0] > 500; // every token is a block on the emulator
    for (int whole = is_long ? 0 : 1; whole >= 0; whole--) {
      CUDA_OPEN(f);
      if (whole) ((td_cuda_dev *)f.dev)->keys_bytes = 7 * 90 * sizeof(float);
      run_layout(&f, l, (const uint32_t[]){whole ? 0 : l->len[0] - 2, whole ? 0 : l->len[1] - 1});
      cuda_close(&f);
    }
  }
}

// Heads and dims that fill no tile, more heads than a block holds, runs of keys of several blocks.
TEST(selections) {
  static const layout layouts[] = {
      {3, 12, 1, 16, {40, 3}, TD_BF16, 0, 0},     {5, 128, 7, 16, {90, 20}, TD_F16, 0, 0},
      {64, 128, 33, 64, {70, 36}, TD_BF16, 0, 0}, {70, 20, 30, 64, {34, 50}, TD_F16, 0, 0},
      {2, 8, 300, 64, {1000, 5}, TD_BF16, 0, 0},
  };
  run_layouts(layouts, TD_COUNT(layouts));
}

// Blocks of whole tiles of keys and of parts, with and without the eight keys of a warp; with none,
// some and all near; heads of several tokens in a tile, and more heads than a tile has; several
// runs of keys.
TEST(selections_of_blocks) {
  static const layout layouts[] = {
      {4, 128, 2, 64, {270, 40}, TD_BF16, 64, 1}, {3, 12, 3, 16, {90, 20}, TD_F16, 8, 0},
      {2, 16, 5, 16, {70, 36}, TD_BF16, 6, 2},    {1, 20, 7, 64, {60, 33}, TD_BF16, 3, 0},
      {70, 16, 1, 16, {60, 5}, TD_F16, 24, 1},    {18, 16, 2, 16, {30, 9}, TD_BF16, 5, 1},
      {4, 128, 3, 64, {1150, 5}, TD_F16, 128, 1}, {2, 8, 40, 64, {1000, 700}, TD_BF16, 12, 3},
  };
  run_layouts(layouts, TD_COUNT(layouts));
}
