// tests/unit/test_cuda_ngrams.c - the CUDA device's embeddings of n-grams, and streams that gates
// read, against the CPU device's, whose activations are not rounded, and against themselves however
// a sequence is cut and tokens are taken back.
// CTest: gpu no-tsan

#include "tandem/kernels.h"
#include "unit/cuda_test.h"
#include "unit/device_test.h"

enum { N = 37, VOCAB = 6, SPARE = 3, TAPS = 4, END = 2 };

// FP32 sums in another order, and functions of another library, of values of about 1.
#define SLACK 2e-5

typedef struct {
  uint32_t size, n_heads, cols, page_tokens, channels, n_taps;
} shape;

static const shape shapes[] = {{3, 2, 5, 8, 150, 4}, {2, 1, 16, 4, 3, 2}, {5, 1, 1, 2, 64, 3}};

typedef struct {
  const shape *s;
  td_ngram_table table;
  ref_weight weight;
  int32_t tokens[N], pages_of[N];
  float *in, *y, *x, *conv; // of BF16 values, but for conv
  size_t row, ids_at, page_bytes;
  uint16_t *gathered, *dev_rows, *dev_in, *dev_y, *dev_x;
  int32_t *dev_tables; // tokens, seq, position, q_begin, page table
  char *dev_pages;
  td_state_trail trail;
  float *rows, *out; // what the GPU made
} world;

static void open_world(world *w, cuda_fixture *f, const shape *s) {
  td_err err;
  td_kernels_init_any(); // before a CPU device does
  *w = (world){.s = s};
  td_ngram_hash *h = &w->table.hash;
  *h = (td_ngram_hash){.size = s->size, .n_heads = s->n_heads, .end = END};
  const uint32_t n_rows = (uint32_t)td_ngram_hash_fill(h, 1, 7, 5, VOCAB);
  w->weight = ref_make_weight(&f->rng, TD_BF16, n_rows, s->cols, 0, 0);
  w->table.shards = &w->weight.w;
  w->table.n_shards = 1;
  w->row = (size_t)td_ngram_rows(h) * s->cols;
  w->ids_at = (size_t)td_ngram_past(s->n_taps, s->size) * s->channels;
  w->page_bytes = (w->ids_at + s->size - 1) * sizeof(float);
  const size_t n = (size_t)N * s->channels;
  w->in = cuda_floats(f, n);
  w->y = cuda_floats(f, n);
  w->x = cuda_floats(f, n);
  w->conv = ref_floats(&f->rng, (size_t)s->n_taps * s->channels);
  w->rows = malloc(N * w->row * sizeof *w->rows);
  w->out = malloc(n * sizeof *w->out);
  w->dev_in = cuda_put_bf16(f, w->in, n);
  w->dev_y = cuda_put_bf16(f, w->y, n);
  w->dev_x = cuda_alloc(f, n * sizeof *w->dev_x);
  w->dev_rows = cuda_alloc(f, N * w->row * sizeof *w->dev_rows);
  w->dev_tables = cuda_alloc(f, (4 * N + 2) * sizeof *w->dev_tables);
  w->dev_pages = cuda_alloc(f, N * w->page_bytes);
  void *gathered;
  assert_int_equal(td_dev_alloc_host(f->dev, &gathered, N * w->row * sizeof(uint16_t), &err),
                   TD_OK);
  w->gathered = gathered;
  for (int32_t i = 0; i < N; i++) {
    w->tokens[i] = (int32_t)ref_below(&f->rng, VOCAB);
    w->pages_of[i] = N - 1 - i;
  }
}

static void close_world(world *w, cuda_fixture *f) {
  td_dev_free_host(f->dev, w->gathered);
  ref_free_weight(&w->weight);
  free(w->in), free(w->y), free(w->x), free(w->conv), free(w->rows), free(w->out);
}

// NaN where nothing is written, and the streams as they are at first.
static void reset(world *w, cuda_fixture *f) {
  char *nans = malloc(N * w->page_bytes);
  memset(nans, 0xff, N * w->page_bytes);
  td_op_copy(f->stream, w->dev_pages, nans, N * w->page_bytes);
  cuda_sync(f);
  free(nans);
}

static void gather(world *w, int32_t begin, int32_t n) {
  float row[64];
  for (int32_t t = 0; t < n; t++) {
    int32_t ids[TD_MAX_NGRAM];
    for (int32_t i = 0; i < (int32_t)w->s->size; i++)
      ids[i] = begin + t >= i ? w->tokens[begin + t - i] : END;
    td_ngram_row(&w->table, ids, row);
    for (size_t i = 0; i < w->row; i++)
      w->gathered[(size_t)t * w->row + i] = ref_to_bf16(row[i]);
  }
}

static td_ngram_rows_args rows_args(const world *w, td_batch_view batch, td_kv_view state) {
  return (td_ngram_rows_args){
      .batch = batch, .state = state, .trail = w->trail, .ids_at = w->ids_at, .table = &w->table};
}

static td_ngram_conv_args conv_args(const world *w, td_batch_view batch, td_kv_view state) {
  return (td_ngram_conv_args){.batch = batch,
                              .state = state,
                              .trail = w->trail,
                              .conv = w->conv,
                              .channels = w->s->channels,
                              .n_taps = w->s->n_taps,
                              .step = w->s->size};
}

static int no_copy(void *dst, const void *src, size_t n_bytes, td_cu_stream stream) {
  (void)dst, (void)src, (void)n_bytes, (void)stream;
  return 1;
}

// Without the copy engine, which other streams' large copies may hold.
static void copy_rows(cuda_fixture *f, const td_ngram_rows_args *rows) {
  td_cuda_dev *dev = (td_cuda_dev *)f->dev;
  const td_cu_abi *own = dev->abi;
  td_cu_abi abi = *own;
  abi.copy = no_copy;
  dev->abi = &abi;
  td_op_ngram_rows(f->stream, rows);
  dev->abi = own;
}

// Tokens [begin, begin + n), as one step.
static void run(cuda_fixture *f, world *w, int32_t begin, int32_t n) {
  const size_t at = (size_t)begin * w->s->channels, count = (size_t)n * w->s->channels;
  int32_t tables[4 * N + 2] = {0};
  for (int32_t t = 0; t < n; t++) {
    tables[t] = w->tokens[begin + t];
    tables[2 * N + t] = begin + t;
  }
  tables[3 * N + 1] = n;
  memcpy(tables + 3 * N + 2, w->pages_of, sizeof w->pages_of);
  td_op_copy(f->stream, w->dev_tables, tables, sizeof tables);
  const td_batch_view batch = {.seq = w->dev_tables + N,
                               .position = w->dev_tables + 2 * N,
                               .q_begin = w->dev_tables + 3 * N,
                               .page_table = w->dev_tables + 3 * N + 2,
                               .n_tokens = (uint32_t)n,
                               .n_seqs = 1,
                               .max_pages = N,
                               .page_tokens = w->s->page_tokens};
  const td_kv_view state = {.pages = w->dev_pages, .page_bytes = w->page_bytes, .dtype = TD_F32};
  uint16_t *x = malloc(count * sizeof *x);
  for (size_t i = 0; i < count; i++)
    x[i] = ref_to_bf16(w->x[at + i]);
  td_op_copy(f->stream, w->dev_x + at, x, count * sizeof *x);
  gather(w, begin, n);
  td_ngram_rows_args rows = rows_args(w, batch, state);
  rows.tokens = w->dev_tables;
  rows.gathered = w->gathered;
  rows.out = w->dev_rows + (size_t)begin * w->row;
  copy_rows(f, &rows);
  td_ngram_conv_args conv = conv_args(w, batch, state);
  conv.in = w->dev_in + at;
  conv.y = w->dev_y + at;
  conv.x = w->dev_x + at;
  td_op_ngram_conv(f->stream, &conv);
  cuda_sync(f);
  free(x);
}

static void fetch(cuda_fixture *f, world *w) {
  float *rows = cuda_get_bf16(f, w->dev_rows, N * w->row);
  float *out = cuda_get_bf16(f, w->dev_x, (size_t)N * w->s->channels);
  memcpy(w->rows, rows, N * w->row * sizeof *rows);
  memcpy(w->out, out, (size_t)N * w->s->channels * sizeof *out);
  free(rows), free(out);
}

// All tokens in one step of the CPU device: its rows, its streams, and its pages.
static void check_against_cpu(cuda_fixture *f, const world *w) {
  const shape *s = w->s;
  const size_t n = (size_t)N * s->channels;
  float *rows = malloc(N * w->row * sizeof *rows), *x = malloc(n * sizeof *x);
  char *pages = malloc(N * w->page_bytes), *got = malloc(N * w->page_bytes);
  int32_t seq[N] = {0}, position[N];
  const int32_t q_begin[] = {0, N};
  for (int32_t i = 0; i < N; i++)
    position[i] = i;
  memset(pages, 0xff, N * w->page_bytes);
  memcpy(x, w->x, n * sizeof *x);
  const td_batch_view batch = {.seq = seq,
                               .position = position,
                               .q_begin = q_begin,
                               .page_table = w->pages_of,
                               .n_tokens = N,
                               .n_seqs = 1,
                               .max_pages = N,
                               .page_tokens = s->page_tokens};
  const td_kv_view state = {.pages = pages, .page_bytes = w->page_bytes, .dtype = TD_F32};
  td_ngram_rows_args of_rows = rows_args(w, batch, state);
  of_rows.tokens = w->tokens;
  of_rows.out = rows;
  td_ngram_conv_args conv = conv_args(w, batch, state);
  conv.in = w->in;
  conv.y = w->y;
  conv.x = x;
  device_fixture d;
  device_open(&d, 1);
  td_op_ngram_rows(d.stream, &of_rows);
  td_op_ngram_conv(d.stream, &conv);
  device_sync(&d);
  device_close(&d);
  assert_memory_equal(w->rows, rows, N * w->row * sizeof *rows);
  for (size_t i = 0; i < n; i++)
    cuda_assert_within(w->out[i], x[i], fabsf(x[i]) * ULP_BF16 / 2 + SLACK, "streams", i);
  cuda_get(f, got, w->dev_pages, N * w->page_bytes);
  assert_memory_equal(got, pages, N * w->page_bytes); // it may be handed to a CPU
  free(rows), free(x), free(pages), free(got);
}

// Cuts; before every third step of one token, others behind it are computed and taken back.
static void run_cut(cuda_fixture *f, world *w, const int32_t cuts[4], bool takes_back) {
  static const int32_t first[] = {0};
  char *slots = cuda_alloc(f, SPARE * w->page_bytes);
  const int32_t *dev_first = cuda_put(f, first, sizeof first);
  for (int32_t at = 0, k = 0; at < N; k++) {
    const int32_t n = cuts[k % 4] < N - at ? cuts[k % 4] : N - at;
    if (!takes_back || k % 3 || at + 1 + SPARE >= N) {
      run(f, w, at, n);
      at += n;
      continue;
    }
    const size_t page = (size_t)w->pages_of[(uint32_t)at / w->s->page_tokens];
    int32_t saved[SPARE];
    memcpy(saved, w->tokens + at + 1, sizeof saved);
    for (int32_t i = 0; i < SPARE; i++)
      w->tokens[at + 1 + i] = (saved[i] + 1) % VOCAB;
    w->trail = (td_state_trail){slots, dev_first, w->page_bytes};
    run(f, w, at, 1 + SPARE);
    w->trail = (td_state_trail){.slots = NULL};
    memcpy(w->tokens + at + 1, saved, sizeof saved);
    td_op_copy(f->stream, w->dev_pages + page * w->page_bytes, slots, w->page_bytes);
    at++;
  }
}

TEST(results) {
  static const int32_t cuts[][4] = {{1, 1, 1, 1}, {3, 1, 7, 2}, {13, 5, 1, 26}};
  for (size_t i = 0; i < TD_COUNT(shapes); i++) {
    CUDA_OPEN(f);
    world w;
    open_world(&w, &f, &shapes[i]);
    reset(&w, &f);
    run(&f, &w, 0, N);
    fetch(&f, &w);
    check_against_cpu(&f, &w);
    const size_t n_rows = N * w.row, n_out = (size_t)N * w.s->channels;
    float *whole = malloc((n_rows + n_out) * sizeof *whole);
    memcpy(whole, w.rows, n_rows * sizeof *whole);
    memcpy(whole + n_rows, w.out, n_out * sizeof *whole);
    for (size_t c = 0; c < 2 * TD_COUNT(cuts); c++) {
      reset(&w, &f);
      run_cut(&f, &w, cuts[c / 2], c % 2);
      fetch(&f, &w);
      assert_memory_equal(w.rows, whole, n_rows * sizeof *whole);
      assert_memory_equal(w.out, whole + n_rows, n_out * sizeof *whole);
    }
    free(whole);
    close_world(&w, &f);
    cuda_close(&f);
  }
}

// Products of both signs and one of zero, in more elements than a block has threads.
TEST(gates) {
  enum { TOKENS = 3, STREAMS = 2, DIM = 330, ALL = TOKENS * STREAMS * DIM };
  CUDA_OPEN(f);
  float *x = cuda_floats(&f, ALL), *query = cuda_floats(&f, ALL);
  float *value = cuda_floats(&f, TOKENS * DIM);
  memset(query, 0, DIM * sizeof *query);
  td_ngram_gate_args args = {.x = cuda_put_bf16(&f, x, ALL),
                             .query = cuda_put_bf16(&f, query, ALL),
                             .value = cuda_put_bf16(&f, value, TOKENS * DIM),
                             .n_tokens = TOKENS,
                             .n_streams = STREAMS,
                             .dim = DIM};
  td_op_ngram_gate(f.stream, &args);
  float *got = cuda_get_bf16(&f, args.x, ALL);
  args.x = x;
  args.query = query;
  args.value = value;
  device_fixture d;
  device_open(&d, 1);
  td_op_ngram_gate(d.stream, &args);
  device_sync(&d);
  device_close(&d);
  for (size_t i = 0; i < ALL; i++)
    cuda_assert_within(got[i], x[i], fabsf(x[i]) * ULP_BF16 / 2 + SLACK, "gates", i);
  free(x), free(query), free(value), free(got);
  cuda_close(&f);
}

// What streams that gates read go through: SiLU of the gates' input, the read, and the write.
static void check_streams(uint32_t n_streams, uint32_t dim, bool is_head) {
  enum { TOKENS = 3 };
  CUDA_OPEN(f);
  const size_t n = (size_t)TOKENS * n_streams * dim, n_out = (size_t)TOKENS * dim;
  const size_t n_scores = (size_t)TOKENS * n_streams;
  float *x = cuda_floats(&f, n), *gate = cuda_floats(&f, n), *y = cuda_floats(&f, n_out);
  float *scores = ref_floats(&f.rng, n_scores), *out = malloc(n_out * sizeof *out);
  TD_CHECK(out);
  float *dev_scores = cuda_put(&f, scores, n_scores * sizeof *scores);
  td_silu_rows_args silu = {
      .x = cuda_put_bf16(&f, gate, n), .n_rows = TOKENS * n_streams, .dim = dim, .factor = 0.25f};
  td_hyper_mix_args mix = {.x = cuda_put_bf16(&f, x, n),
                           .gate = cuda_put_bf16(&f, gate, n),
                           .scores = is_head ? NULL : dev_scores,
                           .out = cuda_alloc(&f, n_out * sizeof(uint16_t)),
                           .n_tokens = TOKENS,
                           .n_streams = n_streams,
                           .dim = dim};
  td_hyper_write_args write = {.x = cuda_put_bf16(&f, x, n),
                               .y = cuda_put_bf16(&f, y, n_out),
                               .scores = dev_scores,
                               .n_tokens = TOKENS,
                               .n_streams = n_streams,
                               .dim = dim,
                               .adds = true};
  td_op_silu_rows(f.stream, &silu);
  td_op_hyper_mix(f.stream, &mix);
  td_op_hyper_write(f.stream, &write);
  float *got_silu = cuda_get_bf16(&f, silu.x, n), *got_mix = cuda_get_bf16(&f, mix.out, n_out);
  float *got_x = cuda_get_bf16(&f, write.x, n), *got_scores = malloc(n_scores * sizeof *scores);
  TD_CHECK(got_scores);
  cuda_get(&f, got_scores, dev_scores, n_scores * sizeof *scores);
  mix.x = write.x = x;
  mix.gate = gate;
  mix.out = out;
  mix.scores = is_head ? NULL : scores;
  write.y = y;
  write.scores = scores;
  silu.x = gate;
  device_fixture d;
  device_open(&d, 1);
  td_op_hyper_mix(d.stream, &mix);
  td_op_hyper_write(d.stream, &write);
  td_op_silu_rows(d.stream, &silu);
  device_sync(&d);
  device_close(&d);
  for (size_t i = 0; i < n_scores; i++)
    cuda_assert_within(got_scores[i], scores[i], SLACK, "factors", i);
  for (size_t i = 0; i < n_out; i++)
    cuda_assert_within(got_mix[i], out[i], fabsf(out[i]) * ULP_BF16 / 2 + SLACK, "read", i);
  for (size_t i = 0; i < n; i++) {
    cuda_assert_within(got_x[i], x[i], fabsf(x[i]) * ULP_BF16 / 2 + SLACK, "written", i);
    cuda_assert_within(got_silu[i], gate[i], fabsf(gate[i]) * ULP_BF16 / 2 + SLACK, "SiLU", i);
  }
  float *const owned[] = {x, gate, y, scores, out, got_silu, got_mix, got_x, got_scores};
  for (size_t i = 0; i < TD_COUNT(owned); i++)
    free(owned[i]);
  cuda_close(&f);
}

TEST(streams) {
  check_streams(4, 64, false);
  check_streams(4, 2056, false); // more than a block's threads take at a time
  check_streams(3, 75, false);
  check_streams(16, 40, true);
}
