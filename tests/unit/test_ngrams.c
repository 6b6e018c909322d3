// tests/unit/test_ngrams.c - embeddings of n-grams: hashes as their publisher has them, and the CPU
// device's operators against a reference, whose results neither cuts of a sequence nor tokens that
// are taken back change by a bit.
// CTest: no-tsan

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine_impl.h"
#include "unit/device_test.h"

enum { N = 37, VOCAB = 6, MAX_PAGES = N, SPARE = 3, MAX_CHANNELS = 150 };

typedef struct {
  uint32_t size, n_heads, cols, n_shards, page_tokens; // rows
  uint32_t channels, n_taps;                           // convolution
} shape;

static const shape shapes[] = {
    {.size = 3,
     .n_heads = 2,
     .cols = 5,
     .n_shards = 3,
     .page_tokens = 8,
     .channels = 150,
     .n_taps = 4},
    {.size = 2,
     .n_heads = 1,
     .cols = 16,
     .n_shards = 1,
     .page_tokens = 4,
     .channels = 3,
     .n_taps = 2},
    {.size = 5,
     .n_heads = 1,
     .cols = 1,
     .n_shards = 7,
     .page_tokens = 2,
     .channels = 64,
     .n_taps = 3},
};

typedef struct {
  const shape *s;
  td_ngram_table table;
  ref_weight shards[7];
  td_weight weights[7];
  int32_t tokens[N], position[N], pages_of[MAX_PAGES];
  float *in, *y, *x, *conv;
  float *rows, *out; // results: [N][row], [N][channels]
  size_t row, ids_at, page_bytes;
  char *pages;
  td_state_trail trail;
} fixture;

static void open_fixture(fixture *f, const shape *s, uint64_t *rng) {
  *f = (fixture){.s = s};
  td_ngram_hash *h = &f->table.hash;
  *h = (td_ngram_hash){.size = s->size, .n_heads = s->n_heads, .end = 2};
  const uint32_t n = (uint32_t)td_ngram_hash_fill(h, 1, 7, 5, VOCAB);
  const uint32_t each = (n + s->n_shards - 1) / s->n_shards;
  for (uint32_t i = 0; i < s->n_shards; i++) {
    const uint32_t left = n - i * each;
    f->shards[i] = ref_make_weight(rng, TD_BF16, left < each ? left : each, s->cols, 0, 0);
    f->weights[i] = f->shards[i].w;
  }
  f->table.shards = f->weights;
  f->table.n_shards = s->n_shards;
  f->row = (size_t)td_ngram_rows(h) * s->cols;
  f->ids_at = (size_t)td_ngram_past(s->n_taps, s->size) * s->channels;
  f->page_bytes = (f->ids_at + s->size - 1) * sizeof(float);
  f->in = ref_floats(rng, (size_t)N * s->channels);
  f->y = ref_floats(rng, (size_t)N * s->channels);
  f->x = ref_floats(rng, (size_t)N * s->channels);
  f->conv = ref_floats(rng, (size_t)s->n_taps * s->channels);
  f->rows = calloc(N, f->row * sizeof(float));
  f->out = malloc((size_t)N * s->channels * sizeof(float));
  f->pages = malloc(MAX_PAGES * f->page_bytes);
  memset(f->pages, 0xff, MAX_PAGES * f->page_bytes); // NaN where nothing was written
  for (int32_t i = 0; i < N; i++) {
    f->tokens[i] = (int32_t)ref_below(rng, VOCAB);
    f->position[i] = i;
    f->pages_of[i] = MAX_PAGES - 1 - i;
  }
}

static void close_fixture(fixture *f) {
  for (uint32_t i = 0; i < f->s->n_shards; i++)
    ref_free_weight(&f->shards[i]);
  free(f->in), free(f->y), free(f->x), free(f->conv), free(f->rows), free(f->out), free(f->pages);
}

// Tokens [begin, begin + n), as one step.
static void run(device_fixture *d, fixture *f, int32_t begin, int32_t n) {
  const shape *s = f->s;
  int32_t q_begin[] = {0, n}, seq[N] = {0};
  const size_t at = (size_t)begin * s->channels;
  memcpy(f->out + at, f->x + at, (size_t)n * s->channels * sizeof(float));
  const td_batch_view batch = {.seq = seq,
                               .position = f->position + begin,
                               .q_begin = q_begin,
                               .page_table = f->pages_of,
                               .n_tokens = (uint32_t)n,
                               .n_seqs = 1,
                               .max_pages = MAX_PAGES,
                               .page_tokens = s->page_tokens};
  const td_kv_view state = {.pages = f->pages, .page_bytes = f->page_bytes, .dtype = TD_F32};
  td_op_ngram_rows(d->stream, &(td_ngram_rows_args){.batch = batch,
                                                    .state = state,
                                                    .trail = f->trail,
                                                    .ids_at = f->ids_at,
                                                    .tokens = f->tokens + begin,
                                                    .table = &f->table,
                                                    .out = f->rows + (size_t)begin * f->row});
  td_op_ngram_conv(d->stream, &(td_ngram_conv_args){.batch = batch,
                                                    .state = state,
                                                    .trail = f->trail,
                                                    .conv = f->conv,
                                                    .in = f->in + at,
                                                    .y = f->y + at,
                                                    .x = f->out + at,
                                                    .channels = s->channels,
                                                    .n_taps = s->n_taps,
                                                    .step = s->size});
  device_sync(d);
}

// ---- the reference ------------------------------------------------------------------------------

// As transformers shifts tokens: what is behind the last end token, or its begin, counts as one.
static int32_t ref_shifted(const fixture *f, int32_t t, int32_t back) {
  int32_t last_end = -1;
  for (int32_t i = 0; i < t; i++)
    if (f->tokens[i] == f->table.hash.end) last_end = i;
  const bool is_valid = t - (last_end + 1) >= back && t >= back;
  return back == 0 || is_valid ? f->tokens[t - back] : f->table.hash.end;
}

static void ref_rows(const fixture *f, int32_t t, float *out) {
  const td_ngram_hash *h = &f->table.hash;
  uint64_t offset = 0;
  for (uint32_t head = 0; head < td_ngram_rows(h); head++) {
    uint64_t mixed = 0;
    for (uint32_t i = 0; i < head / h->n_heads + 2; i++)
      mixed ^= (uint64_t)ref_shifted(f, t, (int32_t)i) * h->factor[i];
    uint32_t row = (uint32_t)(offset + mixed % h->rows[head]), shard = 0;
    offset += h->rows[head];
    for (; row >= f->weights[shard].rows; shard++)
      row -= f->weights[shard].rows;
    for (uint32_t c = 0; c < f->s->cols; c++)
      *out++ = (float)ref_at(&f->weights[shard], row, c);
  }
}

static void ref_conv(const fixture *f, int32_t t, double *out) {
  const shape *s = f->s;
  for (uint32_t c = 0; c < s->channels; c++) {
    double sum = 0;
    for (uint32_t j = 0; j < s->n_taps; j++) {
      const int32_t from = t - (int32_t)((s->n_taps - 1 - j) * s->size);
      if (from >= 0)
        sum += (double)f->conv[j * s->channels + c] * f->in[(uint32_t)from * s->channels + c];
    }
    const size_t at = (uint32_t)t * s->channels + c;
    out[c] = f->x[at] + (double)f->y[at] + sum / (1 + exp(-sum));
  }
}

// ---- tests --------------------------------------------------------------------------------------

// Of the published defaults, from transformers 5.24.
TEST(hashes) {
  static const struct {
    uint64_t factor[3];
    uint32_t first, last;
  } want[] = {
      {{0x158eeb0ed789, 0x124a0230ff35, 0x752f6eb3ba7}, 20000003, 20000171},
      {{0x30c753607ad, 0x11f6f94c3293, 0x9c5173d4aa9}, 20000213, 20000429},
  };
  for (uint32_t nth = 0; nth < TD_COUNT(want); nth++) {
    td_ngram_hash h = {.size = 3, .n_heads = 8};
    uint64_t sum = 0;
    const uint64_t n = td_ngram_hash_fill(&h, nth, 1234, 20000000, 248320);
    assert_memory_equal(h.factor, want[nth].factor, sizeof want[nth].factor);
    assert_int_equal(td_ngram_rows(&h), 16);
    assert_int_equal(h.rows[0], want[nth].first);
    assert_int_equal(h.rows[15], want[nth].last);
    for (uint32_t i = 0; i < 16; i++)
      sum += h.rows[i];
    assert_int_equal(n, sum);
  }
}

TEST(results) {
  device_fixture d;
  FOR_TEAMS(d) {
    for (size_t i = 0; i < TD_COUNT(shapes); i++) {
      fixture f;
      open_fixture(&f, &shapes[i], &d.rng);
      run(&d, &f, 0, N);
      for (int32_t t = 0; t < N; t++) {
        float rows[64];
        double out[MAX_CHANNELS];
        ref_rows(&f, t, rows);
        assert_memory_equal(f.rows + (size_t)t * f.row, rows, f.row * sizeof *rows);
        ref_conv(&f, t, out);
        device_assert_close(f.out + (size_t)t * f.s->channels, out, f.s->channels, 1e-5);
      }
      close_fixture(&f);
    }
  }
}

// What a GPU is given: the same rows, and every token shows that the worker lives.
TEST(gathered) {
  device_fixture d;
  device_open(&d, 1);
  for (size_t i = 0; i < TD_COUNT(shapes); i++) {
    fixture f;
    uint16_t out[N * 64];
    float rows[64];
    _Atomic uint32_t pulse = 0;
    open_fixture(&f, &shapes[i], &d.rng);
    td_dev_set_progress_counter(d.dev, &pulse);
    const td_step_seq seq = {.tokens = f.tokens, .n_tokens = N};
    td_ngrams_gather(d.dev, &f.table, &seq, NULL, out);
    for (int32_t t = 0; t < N; t++) {
      ref_rows(&f, t, rows);
      for (size_t k = 0; k < f.row; k++)
        assert_int_equal(out[(size_t)t * f.row + k], ref_to_bf16(rows[k]));
    }
    assert_true(pulse >= N);
    close_fixture(&f);
  }
  device_close(&d);
}

// Tokens in cuts; before every third step of one token, others behind it are computed and taken
// back.
static void run_cut(device_fixture *d, fixture *f, const int32_t cuts[4], bool takes_back) {
  static const int32_t first[] = {0};
  char *slots = malloc(SPARE * f->page_bytes);
  for (int32_t at = 0, k = 0; at < N; k++) {
    const int32_t n = cuts[k % 4] < N - at ? cuts[k % 4] : N - at;
    if (takes_back && k % 3 == 0 && at + 1 + SPARE < N) {
      const size_t page = (size_t)f->pages_of[(uint32_t)at / f->s->page_tokens];
      int32_t saved[SPARE];
      memcpy(saved, f->tokens + at + 1, sizeof saved);
      for (int32_t i = 0; i < SPARE; i++)
        f->tokens[at + 1 + i] = (saved[i] + 1) % VOCAB;
      f->trail = (td_state_trail){slots, first, f->page_bytes};
      run(d, f, at, 1 + SPARE);
      f->trail = (td_state_trail){.slots = NULL};
      memcpy(f->tokens + at + 1, saved, sizeof saved);
      memcpy(f->pages + page * f->page_bytes, slots, f->page_bytes);
      at++;
    } else {
      run(d, f, at, n);
      at += n;
    }
  }
  free(slots);
}

TEST(cuts_change_no_bit) {
  static const int32_t cuts[][4] = {{1, 1, 1, 1}, {3, 1, 7, 2}, {8, 8, 8, 8}, {13, 5, 1, 26}};
  device_fixture d;
  FOR_TEAMS(d) {
    for (size_t i = 0; i < 2 * TD_COUNT(shapes) * TD_COUNT(cuts); i++) {
      fixture f;
      open_fixture(&f, &shapes[i / 2 % TD_COUNT(shapes)], &d.rng);
      const size_t n_rows = N * f.row, n_out = (size_t)N * f.s->channels;
      float *whole = malloc((n_rows + n_out) * sizeof *whole);
      run(&d, &f, 0, N);
      memcpy(whole, f.rows, n_rows * sizeof *whole);
      memcpy(whole + n_rows, f.out, n_out * sizeof *whole);
      memset(f.pages, 0xff, MAX_PAGES * f.page_bytes);
      run_cut(&d, &f, cuts[i / 2 / TD_COUNT(shapes)], i % 2);
      assert_memory_equal(f.rows, whole, n_rows * sizeof *whole);
      assert_memory_equal(f.out, whole + n_rows, n_out * sizeof *whole);
      free(whole);
      close_fixture(&f);
    }
  }
}

// Products of both signs and one of zero.
TEST(gates) {
  enum { TOKENS = 3, STREAMS = 2, DIM = 70 };
  device_fixture d;
  FOR_TEAMS(d) {
    float *x = ref_floats(&d.rng, TOKENS * STREAMS * DIM),
          *value = ref_floats(&d.rng, TOKENS * DIM);
    float *query = ref_floats(&d.rng, TOKENS * STREAMS * DIM);
    static double want[TOKENS * STREAMS * DIM];
    memset(query, 0, DIM * sizeof *query);
    for (int k = 0; k < TOKENS * STREAMS; k++) {
      double sum = 0;
      for (int i = 0; i < DIM; i++)
        sum += (double)x[k * DIM + i] * query[k * DIM + i];
      sum /= sqrt(DIM);
      const double root = sqrt(fmax(fabs(sum), 1e-6)), g = sum > 0 ? root : sum < 0 ? -root : 0;
      for (int i = 0; i < DIM; i++)
        want[k * DIM + i] = value[k / STREAMS * DIM + i] / (1 + exp(-g));
    }
    td_op_ngram_gate(d.stream, &(td_ngram_gate_args){.x = x,
                                                     .query = query,
                                                     .value = value,
                                                     .n_tokens = TOKENS,
                                                     .n_streams = STREAMS,
                                                     .dim = DIM});
    device_sync(&d);
    device_assert_close(x, want, TOKENS * STREAMS * DIM, 1e-5);
    free(x), free(value), free(query);
  }
}
