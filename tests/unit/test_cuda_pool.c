// tests/unit/test_cuda_pool.c - the CUDA device's pooled keys: what they leave in pages against the
// CPU device's, which test_pool.c holds against double; attention over them in double; and both
// against themselves however a sequence is cut or restored.
// CTest: gpu no-tsan

#include "unit/cuda_test.h"
#include "unit/device_test.h"

enum { SEQS = 2, MOST_TOKENS = 120, TOKENS = SEQS * MOST_TOKENS };
enum { SPARE = 3 }; // keys of a ring behind its window

// FP32 sums in another order, and functions of another library, of values of about 1.
#define SLACK 2e-5

typedef struct {
  uint32_t dim, rot_dim, group, window, page_tokens, top_k, n_heads, n;
  bool overlaps, has_no_norm, is_plain; // is_plain: no gates, and entries' first elements rotate
} shape;

static const shape shapes[] = {
    {16, 4, 4, 7, 8, 3, 11, 30, true, false, false}, // in runs of eight
    {70, 8, 8, 1, 4, 0, 3, 27, false, false,
     false}, // groups larger than pages, dims that make no runs
    {9, 2, 0, 11, 4, 0, 2, 20, false, false, false},    // no pooled keys
    {24, 24, 2, 80, 32, 0, 4, 120, true, false, false}, // keys of more than a split
    {512, 64, 4, 7, 64, 3, 40, 18, true, false, false}, // of the most, heads of two blocks
    {20, 0, 8, 3, 16, 2, 3, 30, false, true, false},
    {40, 12, 8, 3, 16, 2, 3, 40, false, false, true},
};

// Both sequences' inputs, and what the GPU makes of them. Layout of a page: tests/unit/test_pool.c.
typedef struct {
  const shape *s;
  uint32_t width, max_pages, n_pages; // width: of x and gate
  size_t open_at, entry_at, page_bytes, row;
  float *x, *gate, *bias, *norm, *cos_sin, *keys, *q, *sinks; // [SEQS][n][..]
  int32_t *selected;                                          // [SEQS][n][top_k]
  int32_t page_table[SEQS * MOST_TOKENS];
  float *dev_x, *dev_gate, *dev_cos_sin;
  uint16_t *dev_keys, *dev_q;
  int32_t *dev_selected, *dev_tables;
  char *dev_pages;
  td_state_trail trail; // of the steps to come
  size_t trail_at;
  char *pages; // as the GPU left them
  float *out;  // [SEQS][n][n_heads][dim]
} world;

static uint32_t entries_of(const shape *s) {
  return s->group ? td_pool_entries(s->page_tokens, s->group) : 0;
}

static void open_world(world *w, cuda_fixture *f, const shape *s) {
  *w = (world){.s = s, .width = s->overlaps ? 2 * s->dim : s->dim};
  w->max_pages = (s->n - 1) / s->page_tokens + 1;
  w->n_pages = SEQS * w->max_pages + 1; // the last is no one's
  w->open_at = (size_t)(s->window + SPARE) * s->dim;
  w->entry_at = w->open_at + 6 * (size_t)s->dim;
  w->page_bytes = (w->entry_at + (size_t)entries_of(s) * s->dim) * sizeof(float);
  w->page_bytes = (w->page_bytes + 15) / 16 * 16;
  w->row = (size_t)s->n_heads * s->dim;
  const size_t n = (size_t)SEQS * s->n, of_bias = (size_t)(s->group ? s->group : 1) * w->width;
  f->rng = 3;
  w->x = ref_floats(&f->rng, n * w->width);
  w->gate = ref_floats(&f->rng, n * w->width);
  w->bias = ref_floats(&f->rng, of_bias);
  w->norm = ref_floats(&f->rng, s->dim);
  w->cos_sin = ref_floats(&f->rng, (size_t)s->n * s->rot_dim);
  w->sinks = ref_floats(&f->rng, s->n_heads);
  w->keys = cuda_floats(f, n * s->dim);
  w->q = cuda_floats(f, n * w->row);
  w->selected = malloc((n * s->top_k + 1) * sizeof *w->selected);
  w->pages = malloc(w->n_pages * w->page_bytes);
  w->out = malloc(n * w->row * sizeof *w->out);
  TD_CHECK(w->selected && w->pages && w->out);
  for (uint32_t i = 0; i < n; i++) { // the first entries and the last
    const int32_t n_seen = s->group ? (int32_t)((i % s->n + 1) / s->group) : 0;
    for (uint32_t k = 0; k < s->top_k; k++)
      w->selected[i * s->top_k + k] = k + 1 < s->top_k ? (int32_t)k : n_seen - 1;
  }
  for (uint32_t p = 0; p < SEQS * w->max_pages; p++) // in no order
    w->page_table[p] = (int32_t)(SEQS * w->max_pages - 1 - p);
  w->dev_x = cuda_alloc(f, n * w->width * sizeof *w->dev_x);
  w->dev_gate = cuda_alloc(f, n * w->width * sizeof *w->dev_gate);
  w->dev_keys = cuda_alloc(f, n * s->dim * sizeof *w->dev_keys);
  w->dev_q = cuda_alloc(f, n * w->row * sizeof *w->dev_q);
  w->dev_selected = cuda_alloc(f, (n * s->top_k + 1) * sizeof *w->dev_selected);
  w->dev_tables = cuda_alloc(f, (2 * TOKENS + SEQS + 1 + SEQS * w->max_pages) * sizeof(int32_t));
  w->dev_cos_sin = cuda_put(f, w->cos_sin, (size_t)s->n * s->rot_dim * sizeof *w->cos_sin);
  w->dev_pages = cuda_alloc(f, w->n_pages * w->page_bytes);
  memset(w->pages, 0xff, w->n_pages * w->page_bytes); // NaN where nothing is written
  td_op_copy(f->stream, w->dev_pages, w->pages, w->n_pages * w->page_bytes);
}

static void close_world(world *w) {
  void *const owned[] = {w->x, w->gate,  w->bias,     w->norm,  w->cos_sin, w->keys,
                         w->q, w->sinks, w->selected, w->pages, w->out};
  for (size_t i = 0; i < TD_COUNT(owned); i++)
    free(owned[i]);
}

// The rows of tokens [begin, begin + n) of both sequences, one after the other.
static void *rows_of(const world *w, const void *all, size_t row_bytes, const uint32_t begin[SEQS],
                     const uint32_t n[SEQS]) {
  char *out = malloc(((size_t)n[0] + n[1]) * row_bytes + 1), *to = out;
  TD_CHECK(out);
  for (uint32_t s = 0; s < SEQS; s++) {
    memcpy(to, (const char *)all + ((size_t)s * w->s->n + begin[s]) * row_bytes, n[s] * row_bytes);
    to += n[s] * row_bytes;
  }
  return out;
}

static void put_rows(cuda_fixture *f, const world *w, void *to, const void *all, size_t row_bytes,
                     const uint32_t begin[SEQS], const uint32_t n[SEQS]) {
  void *rows = rows_of(w, all, row_bytes, begin, n);
  td_op_copy(f->stream, to, rows, ((size_t)n[0] + n[1]) * row_bytes);
  cuda_sync(f);
  free(rows);
}

static void put_bf16_rows(cuda_fixture *f, const world *w, uint16_t *to, const float *all,
                          size_t row, const uint32_t begin[SEQS], const uint32_t n[SEQS]) {
  float *rows = rows_of(w, all, row * sizeof *rows, begin, n);
  const size_t count = ((size_t)n[0] + n[1]) * row;
  uint16_t *bits = malloc(count * sizeof *bits + 1);
  TD_CHECK(bits);
  for (size_t i = 0; i < count; i++)
    bits[i] = ref_to_bf16(rows[i]);
  td_op_copy(f->stream, to, bits, count * sizeof *bits);
  cuda_sync(f);
  free(rows);
  free(bits);
}

// Tables of a step: seq, position, q_begin, page table.
static td_batch_view put_tables(const world *w, int32_t *tables, const uint32_t begin[SEQS],
                                const uint32_t n[SEQS]) {
  int32_t *seq = tables, *position = tables + TOKENS, *q_begin = tables + 2 * TOKENS;
  int32_t *page_table = q_begin + SEQS + 1;
  uint32_t t = 0, max_keys = 0;
  for (uint32_t s = 0; s < SEQS; s++) {
    q_begin[s] = (int32_t)t;
    for (uint32_t i = 0; i < n[s]; i++, t++) {
      seq[t] = (int32_t)s;
      position[t] = (int32_t)(begin[s] + i);
    }
    if (begin[s] + n[s] > max_keys) max_keys = begin[s] + n[s];
  }
  q_begin[SEQS] = (int32_t)t;
  memcpy(page_table, w->page_table, SEQS * w->max_pages * sizeof *page_table);
  return (td_batch_view){.seq = seq,
                         .position = position,
                         .q_begin = q_begin,
                         .page_table = page_table,
                         .n_tokens = t,
                         .n_seqs = SEQS,
                         .max_pages = w->max_pages,
                         .page_tokens = w->s->page_tokens,
                         .max_keys = max_keys};
}

static td_pool_args pool_args(const world *w, td_batch_view batch) {
  const shape *s = w->s;
  return (td_pool_args){.batch = batch,
                        .stride = w->width,
                        .bias = s->is_plain ? NULL : w->bias,
                        .rotates_first = s->is_plain,
                        .norm = {w->norm, TD_F32, s->has_no_norm ? 0 : s->dim},
                        .open_at = w->open_at,
                        .entry_at = w->entry_at,
                        .dim = s->dim,
                        .rot_dim = s->rot_dim,
                        .group = s->group,
                        .overlaps = s->overlaps,
                        .eps = 1e-5f};
}

static td_attn_pool_args attn_args(const world *w, td_batch_view batch) {
  const shape *s = w->s;
  return (td_attn_pool_args){.batch = batch,
                             .key_stride = s->dim,
                             .sinks = w->sinks,
                             .entry_at = w->entry_at,
                             .n_heads = s->n_heads,
                             .dim = s->dim,
                             .window = s->window,
                             .ring = s->window + SPARE,
                             .group = s->group,
                             .top_k = s->top_k,
                             .scale = 0.3f};
}

// One step of both sequences on the GPU; its results and all pages are copied back.
static void step(cuda_fixture *f, world *w, const uint32_t begin[SEQS], const uint32_t n[SEQS]) {
  const shape *s = w->s;
  static int32_t tables[2 * TOKENS + SEQS + 1 + SEQS * MOST_TOKENS];
  td_batch_view batch = put_tables(w, tables, begin, n);
  td_op_copy(f->stream, w->dev_tables, tables,
             (2 * TOKENS + SEQS + 1 + SEQS * w->max_pages) * sizeof *tables);
  batch.seq = w->dev_tables;
  batch.position = batch.seq + TOKENS;
  batch.q_begin = batch.position + TOKENS;
  batch.page_table = batch.q_begin + SEQS + 1;
  const size_t words = w->width * sizeof(float);
  put_rows(f, w, w->dev_x, w->x, words, begin, n);
  put_rows(f, w, w->dev_gate, w->gate, words, begin, n);
  put_bf16_rows(f, w, w->dev_keys, w->keys, s->dim, begin, n);
  put_bf16_rows(f, w, w->dev_q, w->q, w->row, begin, n);
  put_rows(f, w, w->dev_selected, w->selected, s->top_k * sizeof(int32_t), begin, n);
  const td_kv_view state = {.pages = w->dev_pages, .page_bytes = w->page_bytes, .dtype = TD_F32};
  td_pool_args pool = pool_args(w, batch);
  pool.state = state;
  pool.trail = w->trail;
  pool.trail_at = w->trail_at;
  pool.x = w->dev_x;
  pool.gate = s->is_plain ? NULL : w->dev_gate;
  pool.cos_sin = w->dev_cos_sin;
  if (s->group) td_op_pool(f->stream, &pool);
  td_attn_pool_args attn = attn_args(w, batch);
  attn.state = state;
  attn.q = w->dev_q;
  attn.key = w->dev_keys;
  attn.selected = s->top_k ? w->dev_selected : NULL;
  td_op_attn_pool(f->stream, &attn);
  cuda_get(f, w->pages, w->dev_pages, w->n_pages * w->page_bytes);
  float *out = cuda_get_bf16(f, w->dev_q, batch.n_tokens * w->row);
  const float *from = out;
  for (uint32_t k = 0; k < SEQS; k++) {
    memcpy(w->out + ((size_t)k * s->n + begin[k]) * w->row, from, n[k] * w->row * sizeof *out);
    from += n[k] * w->row;
  }
  free(out);
}

// Both sequences from their begin to their end, in steps of each[i % 4] tokens of each.
static void run(cuda_fixture *f, world *w, const uint32_t each[4]) {
  uint32_t begin[SEQS] = {0};
  for (uint32_t i = 0; begin[0] < w->s->n || begin[1] < w->s->n; i++) {
    uint32_t n[SEQS];
    for (uint32_t s = 0; s < SEQS; s++) { // the second sequence lags behind
      const uint32_t left = w->s->n - begin[s], wanted = each[(i + 3 * s) % 4];
      n[s] = wanted < left ? wanted : left;
    }
    step(f, w, begin, n);
    for (uint32_t s = 0; s < SEQS; s++)
      begin[s] += n[s];
  }
}

static const uint32_t whole[4] = {MOST_TOKENS, MOST_TOKENS, MOST_TOKENS, MOST_TOKENS};

// ---- the references -----------------------------------------------------------------------------

static const float *state_of(const world *w, uint32_t seq, uint32_t position) {
  const int32_t page = w->page_table[seq * w->max_pages + position / w->s->page_tokens];
  return (const float *)(const void *)(w->pages + (size_t)page * w->page_bytes);
}

// The CPU device's pages after the same tokens, in one step.
static char *pages_of_cpu(const world *w) {
  const shape *s = w->s;
  static int32_t tables[2 * TOKENS + SEQS + 1 + SEQS * MOST_TOKENS];
  char *pages = malloc(w->n_pages * w->page_bytes);
  float *q = malloc((size_t)SEQS * s->n * w->row * sizeof *q);
  TD_CHECK(pages && q);
  memset(pages, 0xff, w->n_pages * w->page_bytes);
  memcpy(q, w->q, (size_t)SEQS * s->n * w->row * sizeof *q);
  device_fixture d;
  device_open(&d, 2);
  const td_batch_view batch = put_tables(w, tables, (uint32_t[]){0, 0}, (uint32_t[]){s->n, s->n});
  const td_kv_view state = {.pages = pages, .page_bytes = w->page_bytes, .dtype = TD_F32};
  td_pool_args pool = pool_args(w, batch);
  pool.state = state;
  pool.x = w->x;
  pool.gate = s->is_plain ? NULL : w->gate;
  pool.cos_sin = w->cos_sin;
  if (s->group) td_op_pool(d.stream, &pool);
  td_attn_pool_args attn = attn_args(w, batch);
  attn.state = state;
  attn.q = q;
  attn.key = w->keys;
  attn.selected = s->top_k ? w->selected : NULL;
  td_op_attn_pool(d.stream, &attn);
  device_sync(&d);
  device_close(&d);
  free(q);
  return pages;
}

// Everything that a page has, for it may be handed to a CPU.
static void check_pages(const world *w) {
  char *want = pages_of_cpu(w);
  const float *a = (const float *)(const void *)w->pages, *b = (const float *)(const void *)want;
  for (size_t i = 0; i < w->n_pages * w->page_bytes / sizeof *a; i++) {
    const bool is_same = isnan(b[i]) ? isnan(a[i]) : isinf(b[i]) ? a[i] == b[i] : false;
    if (!is_same)
      cuda_assert_within(a[i], b[i], SLACK * (1 + fabsf(b[i])), "pages",
                         i % (w->page_bytes / sizeof *a));
  }
  free(want);
}

static double rounded(float f) { // to nearest even, as the GPU gathers entries
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  return ref_bf16((uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16));
}

// Of a token and head, over the entries that the GPU left.
static void check_token(const world *w, uint32_t seq, uint32_t t, uint32_t head) {
  const shape *s = w->s;
  const size_t row = (size_t)seq * s->n + t;
  const float *q = w->q + row * w->row + (size_t)head * s->dim;
  const float *got = w->out + row * w->row + (size_t)head * s->dim;
  const uint32_t n_seen = s->group ? (t + 1) / s->group : 0;
  const bool selects = s->top_k && n_seen > s->top_k;
  const uint32_t n_entries = selects ? s->top_k : n_seen;
  const uint32_t first = t + 1 > s->window ? t + 1 - s->window : 0;
  double sum = exp(w->sinks[head]), most = 0, *key = ref_doubles(s->dim);
  double *out = ref_doubles(s->dim);
  memset(out, 0, s->dim * sizeof *out);
  for (uint32_t i = 0; i < n_entries + t + 1 - first; i++) {
    const uint32_t entry = selects ? (uint32_t)w->selected[row * s->top_k + i % s->top_k] : i;
    const float *from = w->keys + ((size_t)seq * s->n + first + i - n_entries) * s->dim;
    if (i < n_entries)
      from = state_of(w, seq, (entry + 1) * s->group - 1) + w->entry_at +
             (size_t)(entry % entries_of(s)) * s->dim;
    double score = 0;
    for (uint32_t d = 0; d < s->dim; d++) {
      key[d] = rounded(from[d]);
      most = fmax(most, fabs(key[d]));
      score += key[d] * q[d];
    }
    const double weight = exp(0.3f * score);
    sum += weight;
    for (uint32_t d = 0; d < s->dim; d++)
      out[d] += weight * key[d];
  }
  // Weights are rounded to BF16 beside their exact sum, and so is the result.
  const double slack = most * (ULP_BF16 / 2 + (s->dim + 8) * 4 * ULP_F32);
  for (uint32_t d = 0; d < s->dim; d++) {
    const double want = out[d] / sum;
    cuda_assert_within(got[d], want, slack + fabs(want) * ULP_BF16 / 2, "attention", d);
  }
  free(key);
  free(out);
}

// ---- tests --------------------------------------------------------------------------------------

TEST(results) {
  for (size_t i = 0; i < TD_COUNT(shapes); i++) {
    CUDA_OPEN(f);
    world w;
    open_world(&w, &f, &shapes[i]);
    // as many tokens at a time as scratch has room for
    ((td_cuda_dev *)f.dev)->keys_bytes = 7 * 64 * shapes[i].dim * sizeof(uint16_t);
    run(&f, &w, whole);
    check_pages(&w);
    for (uint32_t t = 0; t < SEQS * shapes[i].n; t++) {
      for (uint32_t head = 0; head < shapes[i].n_heads; head++)
        check_token(&w, t / shapes[i].n, t % shapes[i].n, head);
    }
    close_world(&w);
    cuda_close(&f);
  }
}

static const uint32_t cuts[][4] = {{1, 1, 1, 1}, {13, 5, 0, 26}};

TEST(cuts_change_no_bit) {
  for (size_t i = 0; i < 3; i++) {
    CUDA_OPEN(f);
    world w;
    open_world(&w, &f, &shapes[i]);
    const size_t n_bytes = SEQS * shapes[i].n * w.row * sizeof(float);
    float *once = malloc(n_bytes);
    TD_CHECK(once);
    run(&f, &w, whole);
    memcpy(once, w.out, n_bytes);
    for (size_t c = 0; c < TD_COUNT(cuts); c++) {
      memset(w.pages, 0xff, w.n_pages * w.page_bytes);
      td_op_copy(f.stream, w.dev_pages, w.pages, w.n_pages * w.page_bytes);
      run(&f, &w, cuts[c]);
      assert_memory_equal(w.out, once, n_bytes);
    }
    free(once);
    close_world(&w);
    cuda_close(&f);
  }
}

// The last page in use is copied elsewhere and filled by another sequence before this one goes on.
TEST(a_restored_page_continues) {
  for (size_t i = 0; i < 3; i++) {
    const uint32_t n = shapes[i].n, cut = 13, rest[SEQS] = {n - cut, 0};
    CUDA_OPEN(f);
    world w;
    open_world(&w, &f, &shapes[i]);
    run(&f, &w, whole);
    float *once = malloc(n * w.row * sizeof *once);
    TD_CHECK(once);
    memcpy(once, w.out, n * w.row * sizeof *once);
    step(&f, &w, (uint32_t[]){0, 0}, (uint32_t[]){cut, 0});
    int32_t *page = &w.page_table[(cut - 1) / shapes[i].page_tokens];
    char *from = w.dev_pages + (size_t)*page * w.page_bytes;
    *page = (int32_t)w.n_pages - 1;
    td_op_copy(f.stream, w.dev_pages + (size_t)*page * w.page_bytes, from, w.page_bytes);
    memset(w.pages, 0xff, w.page_bytes);
    td_op_copy(f.stream, from, w.pages, w.page_bytes);
    step(&f, &w, (uint32_t[]){cut, 0}, rest);
    assert_memory_equal(w.out, once, n * w.row * sizeof *once);
    free(once);
    close_world(&w);
    cuda_close(&f);
  }
}

// Makes the rows of SPARE tokens behind token `at` others, and back.
static void invert(world *w, uint32_t at) {
  for (uint32_t s = 0; s < SEQS; s++) {
    const size_t row = (size_t)s * w->s->n + at + 1;
    for (size_t i = 0; i < SPARE * w->width; i++) {
      w->x[row * w->width + i] *= -1;
      w->gate[row * w->width + i] *= -1;
    }
    for (size_t i = 0; i < SPARE * (size_t)w->s->dim; i++)
      w->keys[row * w->s->dim + i] *= -1;
  }
}

// Computes token `at` of both sequences, and takes back SPARE others than those that follow it.
static void take_back(cuda_fixture *f, world *w, uint32_t at) {
  enum { AHEAD = 2 }; // elements of a slot, of something else
  const shape *s = w->s;
  static const int32_t first[SEQS] = {0, SPARE};
  const size_t n_open = (s->group ? s->overlaps ? 6 : 3 : 0) * (size_t)s->dim;
  const size_t slot_bytes = (AHEAD + n_open) * sizeof(float);
  char *slots = cuda_alloc(f, SEQS * SPARE * slot_bytes);
  const int32_t *dev_first = cuda_put(f, first, sizeof first);
  w->trail = (td_state_trail){slots, dev_first, slot_bytes};
  w->trail_at = AHEAD;
  invert(w, at);
  step(f, w, (uint32_t[]){at, at}, (uint32_t[]){1 + SPARE, 1 + SPARE});
  invert(w, at);
  w->trail = (td_state_trail){.slots = NULL};
  for (uint32_t k = 0; k < SEQS; k++) {
    const int32_t page = w->page_table[k * w->max_pages + at / s->page_tokens];
    td_op_copy(f->stream, w->dev_pages + (size_t)page * w->page_bytes + w->open_at * sizeof(float),
               slots + (size_t)first[k] * slot_bytes + AHEAD * sizeof(float),
               n_open * sizeof(float));
  }
}

TEST(tokens_that_are_taken_back) {
  for (size_t i = 0; i < 3; i++) {
    CUDA_OPEN(f);
    world w;
    open_world(&w, &f, &shapes[i]);
    const uint32_t n = shapes[i].n;
    const size_t n_bytes = SEQS * n * w.row * sizeof(float);
    float *once = malloc(n_bytes);
    TD_CHECK(once);
    run(&f, &w, whole);
    memcpy(once, w.out, n_bytes);
    memset(w.pages, 0xff, w.n_pages * w.page_bytes);
    td_op_copy(f.stream, w.dev_pages, w.pages, w.n_pages * w.page_bytes);
    uint32_t at = 0;
    for (; at + SPARE < n; at++)
      take_back(&f, &w, at);
    step(&f, &w, (uint32_t[]){at, at}, (uint32_t[]){n - at, n - at});
    assert_memory_equal(w.out, once, n_bytes);
    free(once);
    close_world(&w);
    cuda_close(&f);
  }
}

// Selections of entries, whose scores are exact, so that they tie; the first win, as on the CPU.
static void check_selection(uint32_t dim, uint32_t n_heads, uint32_t group, uint32_t page_tokens,
                            bool are_alike) {
  enum { N = 90, TOP = 3, MAX_PAGES = 45 };
  CUDA_OPEN(f);
  const size_t page = td_pool_entries(page_tokens, group) * (size_t)dim + 8;
  const size_t n_q = (size_t)N * n_heads * dim, n_pages = MAX_PAGES * page;
  float *pages = ref_floats(&f.rng, n_pages), *q = ref_floats(&f.rng, n_q);
  float *weights = ref_floats(&f.rng, N * n_heads);
  for (size_t i = 0; i < n_pages; i++)
    pages[i] = rintf(pages[i] * 2) / 2;
  for (size_t i = 0; i < n_q; i++)
    q[i] = rintf(q[i] * 2) / 2;
  for (size_t i = 0; i < (size_t)N * n_heads; i++)
    weights[i] = rintf(weights[i] * 2) / 2;
  int32_t table[MAX_PAGES], seq[N] = {0}, position[N], want[N * TOP], got[N * TOP];
  const int32_t q_begin[] = {0, N};
  for (int32_t i = 0; i < N; i++)
    position[i] = i;
  for (int32_t i = 0; i < MAX_PAGES; i++)
    table[i] = MAX_PAGES - 1 - i;
  memset(want, 0xff, sizeof want);
  td_select_args args = {
      .batch = {.seq = seq,
                .position = position,
                .q_begin = q_begin,
                .page_table = table,
                .n_tokens = N,
                .n_seqs = 1,
                .max_pages = MAX_PAGES,
                .page_tokens = page_tokens,
                .max_keys = N},
      .kv = {.pages = (char *)pages, .page_bytes = page * sizeof(float), .dtype = TD_F32},
      .q = q,
      .weights = are_alike ? NULL : weights,
      .selected = want,
      .n_heads = n_heads,
      .dim = dim,
      .top_k = TOP,
      .group = group};
  device_fixture d;
  device_open(&d, 1);
  td_op_select(d.stream, &args);
  device_sync(&d);
  device_close(&d);
  memset(got, 0xff, sizeof got);
  args.batch.seq = cuda_put(&f, seq, sizeof seq);
  args.batch.position = cuda_put(&f, position, sizeof position);
  args.batch.q_begin = cuda_put(&f, q_begin, sizeof q_begin);
  args.batch.page_table = cuda_put(&f, table, sizeof table);
  args.kv.pages = cuda_put(&f, pages, n_pages * sizeof *pages);
  args.q = cuda_put_bf16(&f, q, n_q);
  if (!are_alike) args.weights = cuda_put(&f, weights, (size_t)N * n_heads * sizeof *weights);
  args.selected = cuda_put(&f, got, sizeof got);
  td_op_select(f.stream, &args);
  cuda_get(&f, got, args.selected, sizeof got);
  assert_memory_equal(got, want, sizeof got);
  free(pages);
  free(q);
  free(weights);
  cuda_close(&f);
}

TEST(entries_are_selected) {
  check_selection(16, 3, 4, 8, false);
  check_selection(20, 70, 2, 2, false);
  check_selection(128, 64, 4, 16, false);
  check_selection(128, 16, 4, 16, true);
  check_selection(24, 70, 2, 2, true);
}

// A step of one token at a position of a sequence of one page.
static void step_at(cuda_fixture *f, int32_t position, int32_t page, td_attn_pool_args attn) {
  const int32_t seq = 0, q_begin[] = {0, 1};
  attn.batch = (td_batch_view){.seq = cuda_put(f, &seq, sizeof seq),
                               .position = cuda_put(f, &position, sizeof position),
                               .q_begin = cuda_put(f, q_begin, sizeof q_begin),
                               .page_table = cuda_put(f, &page, sizeof page),
                               .n_tokens = 1,
                               .n_seqs = 1,
                               .max_pages = 1,
                               .page_tokens = 8};
  td_op_attn_pool(f->stream, &attn);
}

TEST(bad_arguments) {
  CUDA_OPEN(f);
  static const float sink = 0;
  td_attn_pool_args attn = {
      .state = {.pages = cuda_alloc(&f, 4096), .page_bytes = 4096, .dtype = TD_F32},
      .q = cuda_alloc(&f, 1024),
      .key = cuda_alloc(&f, 1024),
      .sinks = &sink,
      .n_heads = 1,
      .dim = 16,
      .window = 2,
      .ring = 2,
      .group = 3,
      .scale = 1};
  step_at(&f, 0, 0, attn);
  cuda_expect_failure(&f, "groups of 3");
  attn.group = 0;
  step_at(&f, 0, -1, attn);
  cuda_expect_failure(&f, "page");
  step_at(&f, 8, 0, attn);
  cuda_expect_failure(&f, "position");
  td_op_hyper_write(f.stream, &(td_hyper_write_args){.n_tokens = 1, .n_streams = 17, .dim = 1});
  cuda_expect_failure(&f, "17 streams");
  cuda_close(&f);
}

// ---- hyper-connections --------------------------------------------------------------------------

typedef struct {
  uint32_t n_streams, dim;
  bool head, is_mean;
} streams_shape;

// Against the CPU device, whose activations are not rounded.
static void check_streams(const streams_shape *s) {
  enum { N = 3, ROUNDS = 4 };
  CUDA_OPEN(f);
  const uint32_t n_scores = s->head ? s->n_streams : td_hyper_scores(s->n_streams);
  const size_t n_x = (size_t)N * s->n_streams * s->dim, n_y = (size_t)N * s->dim;
  float *x = cuda_floats(&f, n_x), *y = cuda_floats(&f, n_y), *w = ref_floats(&f.rng, s->dim);
  float *scores = ref_floats(&f.rng, N * n_scores), *base = ref_floats(&f.rng, n_scores);
  float *scale = ref_floats(&f.rng, 3), *out = malloc(n_y * sizeof *out);
  TD_CHECK(out);
  uint16_t *dev_x = cuda_put_bf16(&f, x, n_x);
  uint16_t *dev_y = cuda_put_bf16(&f, y, n_y), *dev_out = cuda_alloc(&f, n_y * sizeof *dev_out);
  float *dev_scores = cuda_put(&f, scores, N * n_scores * sizeof *scores);
  td_hyper_read_args read = {.x = x,
                             .scores = scores,
                             .base = base,
                             .scale = scale,
                             .w = {w, TD_F32, s->dim},
                             .out = out,
                             .n_tokens = N,
                             .n_streams = s->n_streams,
                             .dim = s->dim,
                             .n_rounds = ROUNDS,
                             .eps = 1e-6f,
                             .norm_eps = 1e-5f,
                             .head = s->head};
  if (s->is_mean) read.scores = NULL;
  td_hyper_write_args write = {
      .x = x, .y = y, .scores = scores, .n_tokens = N, .n_streams = s->n_streams, .dim = s->dim};
  device_fixture d;
  device_open(&d, 1);
  td_op_hyper_read(d.stream, &read);
  if (!s->head) td_op_hyper_write(d.stream, &write);
  device_sync(&d);
  read.x = write.x = dev_x;
  if (!s->is_mean) read.scores = dev_scores;
  write.scores = dev_scores;
  read.out = dev_out;
  write.y = dev_y;
  td_op_hyper_read(f.stream, &read);
  if (!s->head) td_op_hyper_write(f.stream, &write);
  float *got = cuda_get_bf16(&f, dev_out, n_y), *mixed = cuda_get_bf16(&f, dev_x, n_x);
  float *factors = malloc(N * n_scores * sizeof *factors);
  TD_CHECK(factors);
  cuda_get(&f, factors, dev_scores, N * n_scores * sizeof *factors);
  for (size_t i = 0; i < N * n_scores; i++)
    cuda_assert_within(factors[i], scores[i], SLACK, "factors", i);
  for (size_t i = 0; i < n_y; i++)
    cuda_assert_within(got[i], out[i], fabsf(out[i]) * ULP_BF16 / 2 + SLACK, "streams read", i);
  for (size_t i = 0; i < n_x; i++) {
    const double slack = s->head ? 0 : fabsf(x[i]) * ULP_BF16 / 2 + s->n_streams * SLACK;
    cuda_assert_within(mixed[i], x[i], slack, "streams written", i);
  }
  free(mixed);
  write.scores = NULL;
  td_op_hyper_write(f.stream, &write);
  mixed = cuda_get_bf16(&f, dev_x, n_x);
  for (size_t i = 0; i < n_x; i++)
    assert_true(mixed[i] == y[i / s->dim / s->n_streams * s->dim + i % s->dim]);
  float *const owned[] = {x, y, w, scores, base, scale, out, got, mixed, factors};
  for (size_t i = 0; i < TD_COUNT(owned); i++)
    free(owned[i]);
  cuda_close(&f);
}

TEST(streams) {
  static const streams_shape all[] = {
      {4, 64, false, false}, {4, 4608, false, false}, // more than a pass of a block
      {3, 75, false, false}, {1, 8, false, false},    {16, 40, false, false}, {4, 64, true, false},
      {2, 33, true, false},  {4, 64, true, true},     {3, 75, true, true},
  };
  for (size_t i = 0; i < TD_COUNT(all); i++)
    check_streams(&all[i]);
}
