// tests/unit/test_cuda_attn.c - the CUDA device's KV pages and attention against a naive one in
// double: whole prompts, chunks on top of cached pages and single tokens, ragged lengths and dims.
#include <setjmp.h>

#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "unit/cuda_test.h"
#include "unit/filtered.h"
#include "unit/sanitized.h"

enum { MAX_SEQS = 3 };
enum { ASAN_MOST = 135 }; // tokens: two splits of 128 keys

// One attention layer and the sequences it sees.
typedef struct {
  const char *name;
  bool mla, absorbed;
  uint32_t n_heads, n_kv_heads, head_dim; // GQA
  uint32_t window;                        //
  bool has_sinks;                         //
  uint32_t nope, rope, v_dim, rank;       // MLA
  uint32_t page_tokens, n_seqs, len[MAX_SEQS];
  td_dtype kv_dtype, kv_b_dtype;
  size_t keys_bytes; // 0: the device's own
  bool host_knows;   // what the batch's sequences are
} layout;

typedef struct {
  const layout *l;
  cuda_fixture *f;
  uint32_t k_dim, out_dim; // of a head
  uint32_t entry;          // elements of k (and of v) a token stores
  float *q[MAX_SEQS], *k[MAX_SEQS], *v[MAX_SEQS];
  ref_weight kv_b;
  double *kv_b_values;
  float *sinks; // [n_heads]
  double scale;
  uint32_t max_pages;
  size_t page_bytes;
  char *pages;
  int32_t *page_table;                           // on the device
  bool prompt;                                   // what the next step's tokens are, of GQA
  int32_t q_begin[MAX_SEQS + 1], position[1024]; // of the last step
} world;

static void make_pages(world *w) {
  const layout *l = w->l;
  for (uint32_t s = 0; s < l->n_seqs; s++) {
    uint32_t n = (l->len[s] + l->page_tokens - 1) / l->page_tokens + 1;
    if (n > w->max_pages) w->max_pages = n;
  }
  size_t n_pages = (size_t)l->n_seqs * w->max_pages;
  w->page_bytes =
      (size_t)l->page_tokens * w->entry * td_dtype_bytes(l->kv_dtype) * (l->mla ? 1 : 2) + 64;
  char *nans = malloc(n_pages * w->page_bytes); // what was never stored must not be used
  int32_t *table = malloc(n_pages * sizeof *table);
  memset(nans, 0xff, n_pages * w->page_bytes);
  for (size_t i = 0; i < n_pages; i++)
    table[i] = (int32_t)(n_pages - 1 - i);
  w->pages = cuda_put(w->f, nans, n_pages * w->page_bytes);
  w->page_table = cuda_put(w->f, table, n_pages * sizeof *table);
  free(nans);
  free(table);
}

static void make_world(world *w, const layout *l, cuda_fixture *f) {
  *w = (world){.l = l, .f = f, .scale = 0.25};
  w->k_dim = l->mla ? l->nope + l->rope : l->head_dim;
  w->out_dim = l->mla ? l->v_dim : l->head_dim;
  w->entry = l->mla ? l->rank + l->rope : l->n_kv_heads * l->head_dim;
  for (uint32_t s = 0; s < l->n_seqs; s++) {
    w->q[s] = cuda_floats(f, (size_t)l->len[s] * l->n_heads * w->k_dim);
    for (size_t i = 0; i < (size_t)l->len[s] * l->n_heads * w->k_dim; i++) // heads of three sizes
      w->q[s][i] *= ldexpf(1, -2 * (int)(i / w->k_dim % l->n_heads % 3));
    w->k[s] = cuda_floats(f, (size_t)l->len[s] * w->entry);
    w->v[s] = cuda_floats(f, (size_t)l->len[s] * w->entry);
  }
  if (l->mla) {
    uint32_t rows = l->n_heads * (l->nope + l->v_dim);
    w->kv_b = ref_make_weight(&f->rng, l->kv_b_dtype, rows, l->rank, 128, 128);
    w->kv_b_values = ref_doubles((size_t)rows * l->rank);
    for (size_t i = 0; i < (size_t)rows * l->rank; i++)
      w->kv_b_values[i] = ref_at(&w->kv_b.w, (uint32_t)(i / l->rank), (uint32_t)(i % l->rank));
  }
  w->sinks = ref_floats(&f->rng, l->n_heads);
  for (uint32_t h = 0; h < l->n_heads; h++) // from none of the weight to nearly all of it
    w->sinks[h] = w->sinks[h] * 2 + (float)(h % 3) * 4 - 4;
  make_pages(w);
}

static void free_world(world *w) {
  for (uint32_t s = 0; s < w->l->n_seqs; s++) {
    free(w->q[s]);
    free(w->k[s]);
    free(w->v[s]);
  }
  ref_free_weight(&w->kv_b);
  free(w->kv_b_values);
  free(w->sinks);
}

// The rows [from[s], to[s]) of every sequence, one after the other, on the device.
static uint16_t *gather(world *w, float *const *rows, size_t width, const uint32_t *from,
                        const uint32_t *to) {
  size_t n = 0;
  for (uint32_t s = 0; s < w->l->n_seqs; s++)
    n += to[s] - from[s];
  float *all = malloc(n * width * sizeof *all), *at = all;
  for (uint32_t s = 0; s < w->l->n_seqs; s++) {
    size_t count = (to[s] - from[s]) * width;
    memcpy(at, rows[s] + from[s] * width, count * sizeof *at);
    at += count;
  }
  uint16_t *out = cuda_put_bf16(w->f, all, n * width);
  free(all);
  return out;
}

static td_batch_view make_batch(world *w, const uint32_t *from, const uint32_t *to) {
  int32_t seq[1024], *position = w->position, *q_begin = w->q_begin;
  uint32_t n = 0, max_keys = 0;
  for (uint32_t s = 0; s < w->l->n_seqs; s++) {
    for (uint32_t p = from[s]; p < to[s]; p++, n++) {
      seq[n] = (int32_t)s;
      position[n] = (int32_t)p;
    }
    q_begin[s + 1] = (int32_t)n;
    if (to[s] > max_keys) max_keys = to[s];
  }
  return (td_batch_view){.seq = cuda_put(w->f, seq, n * sizeof *seq),
                         .position = cuda_put(w->f, position, n * sizeof *position),
                         .q_begin = cuda_put(w->f, q_begin, sizeof w->q_begin),
                         .host_q_begin = w->l->host_knows ? q_begin : NULL,
                         .host_position = w->l->host_knows ? position : NULL,
                         .page_table = w->page_table,
                         .n_tokens = n,
                         .n_seqs = w->l->n_seqs,
                         .max_pages = w->max_pages,
                         .page_tokens = w->l->page_tokens,
                         .max_keys = max_keys};
}

static void run_gqa(world *w, const td_batch_view *batch, const td_kv_view *kv, const uint16_t *q,
                    const uint16_t *k, const uint16_t *v, uint16_t *out) {
  const layout *l = w->l;
  td_op_kv_store_gqa(w->f->stream, &(td_kv_store_gqa_args){.batch = *batch,
                                                           .kv = *kv,
                                                           .k = k,
                                                           .v = v,
                                                           .k_stride = w->entry,
                                                           .v_stride = w->entry,
                                                           .n_kv_heads = l->n_kv_heads,
                                                           .head_dim = l->head_dim});
  td_op_attn_gqa(w->f->stream, &(td_attn_gqa_args){.batch = *batch,
                                                   .kv = *kv,
                                                   .q = q,
                                                   .out = out,
                                                   .n_heads = l->n_heads,
                                                   .n_kv_heads = l->n_kv_heads,
                                                   .head_dim = l->head_dim,
                                                   .window = l->window,
                                                   .sinks = l->has_sinks ? w->sinks : NULL,
                                                   .scale = (float)w->scale,
                                                   .prompt = w->prompt});
}

static void store_mla(world *w, const td_batch_view *batch, const td_kv_view *kv,
                      const uint16_t *k) {
  td_op_kv_store_mla(
      w->f->stream,
      &(td_kv_store_mla_args){.batch = *batch, .kv = *kv, .entry = k, .entry_dim = w->entry});
}

static void run_mla(world *w, const td_batch_view *batch, const td_kv_view *kv, const uint16_t *q,
                    const uint16_t *k, uint16_t *out) {
  const layout *l = w->l;
  store_mla(w, batch, kv, k);
  td_op_attn_mla(w->f->stream, &(td_attn_mla_args){.batch = *batch,
                                                   .kv = *kv,
                                                   .q = q,
                                                   .kv_b = &w->kv_b.w,
                                                   .out = out,
                                                   .n_heads = l->n_heads,
                                                   .nope_dim = l->nope,
                                                   .rope_dim = l->rope,
                                                   .v_dim = l->v_dim,
                                                   .kv_lora_rank = l->rank,
                                                   .scale = (float)w->scale,
                                                   .absorbed = l->absorbed});
}

// What one position gives a head: its key, and its value.
static void naive_key(const world *w, uint32_t s, uint32_t p, uint32_t head, double *k, double *v) {
  const layout *l = w->l;
  const float *entry = w->k[s] + (size_t)p * w->entry;
  if (!l->mla) {
    size_t at = (size_t)(head / (l->n_heads / l->n_kv_heads)) * l->head_dim;
    for (uint32_t d = 0; d < l->head_dim; d++) {
      k[d] = entry[at + d];
      v[d] = w->v[s][(size_t)p * w->entry + at + d];
    }
    return;
  }
  const double *row = w->kv_b_values + (size_t)head * (l->nope + l->v_dim) * l->rank;
  for (uint32_t d = 0; d < l->nope + l->v_dim; d++, row += l->rank) {
    double sum = 0;
    for (uint32_t c = 0; c < l->rank; c++)
      sum += row[c] * entry[c];
    *(d < l->nope ? &k[d] : &v[d - l->nope]) = sum;
  }
  for (uint32_t d = 0; d < l->rope; d++)
    k[l->nope + d] = entry[l->rank + d];
}

// Attention of position p, and what each element may err by: keys (MLA expanded), weights and the
// result are rounded to BF16, half a unit each. A score that errs by e changes its weight by the
// factor exp(e).
static void naive_attention(const world *w, uint32_t s, uint32_t head, uint32_t p, const double *ks,
                            const double *vs, double *out, double *slack) {
  const float *q = w->q[s] + ((size_t)p * w->l->n_heads + head) * w->k_dim;
  const uint32_t window = w->l->window, first = window && p + 1 > window ? p + 1 - window : 0;
  const double sink = w->l->has_sinks ? w->sinks[head] : -INFINITY;
  double total = 0, worst = 0, largest = sink, score[1024];
  double key_ulp = w->l->mla ? ULP_BF16 / 2 : 0;
  for (uint32_t j = first; j <= p; j++) {
    double size = 0;
    score[j] = 0;
    for (uint32_t d = 0; d < w->k_dim; d++) {
      double product = q[d] * ks[(size_t)j * w->k_dim + d] * w->scale;
      score[j] += product;
      size += fabs(product);
    }
    worst = fmax(worst, size * (key_ulp + 600 * ULP_F32));
    largest = fmax(largest, score[j]);
  }
  for (uint32_t j = first; j <= p; j++) {
    score[j] = exp(score[j] - largest);
    total += score[j];
  }
  total += exp(sink - largest);
  double weight_error = 2 * (exp(worst) - 1) + ULP_BF16 + 600 * ULP_F32;
  for (uint32_t d = 0; d < w->out_dim; d++) {
    double size = 0;
    out[d] = 0;
    for (uint32_t j = first; j <= p; j++) {
      double part = score[j] / total * vs[(size_t)j * w->out_dim + d];
      out[d] += part;
      size += fabs(part);
    }
    slack[d] = size * (weight_error + key_ulp) + fabs(out[d]) * ULP_BF16 / 2;
  }
}

static void check_outputs(const world *w, const float *got, const uint32_t *from,
                          const uint32_t *to) {
  const layout *l = w->l;
  double out[256], slack[256];
  size_t row0 = 0;
  for (uint32_t s = 0; s < l->n_seqs; s++) {
    double *ks = ref_doubles((size_t)to[s] * w->k_dim), *vs = ref_doubles(to[s] * w->out_dim);
    for (uint32_t head = 0; head < l->n_heads; head++) {
      for (uint32_t p = 0; p < to[s]; p++)
        naive_key(w, s, p, head, ks + (size_t)p * w->k_dim, vs + (size_t)p * w->out_dim);
      for (uint32_t p = from[s]; p < to[s]; p++) {
        naive_attention(w, s, head, p, ks, vs, out, slack);
        size_t row = (row0 + p - from[s]) * l->n_heads + head;
        for (uint32_t d = 0; d < w->out_dim; d++) {
          cuda_assert_within(got[row * w->out_dim + d], out[d], slack[d], l->name,
                             row * w->out_dim + d);
        }
      }
    }
    row0 += to[s] - from[s];
    free(ks);
    free(vs);
  }
}

// The outputs, checked; to be freed.
static float *step(world *w, const uint32_t *from, const uint32_t *to) {
  td_batch_view batch = make_batch(w, from, to);
  td_kv_view kv = {.pages = w->pages, .page_bytes = w->page_bytes, .dtype = w->l->kv_dtype};
  size_t q_row = (size_t)w->l->n_heads * w->k_dim, out_row = (size_t)w->l->n_heads * w->out_dim;
  uint16_t *q = gather(w, w->q, q_row, from, to), *k = gather(w, w->k, w->entry, from, to);
  uint16_t *out = cuda_alloc(w->f, batch.n_tokens * out_row * sizeof *out);
  if (w->l->mla) {
    run_mla(w, &batch, &kv, q, k, out);
  } else {
    run_gqa(w, &batch, &kv, q, k, gather(w, w->v, w->entry, from, to), out);
  }
  float *got = cuda_get_bf16(w->f, out, batch.n_tokens * out_row);
  check_outputs(w, got, from, to);
  return got;
}

// Every sequence's last token, computed alone, is the same to the last bit after two others.
static void check_company(world *w, const float *alone) {
  const layout *l = w->l;
  const size_t row = (size_t)l->n_heads * w->out_dim;
  uint32_t from[MAX_SEQS];
  for (uint32_t s = 0; s < l->n_seqs; s++)
    from[s] = l->len[s] - 3;
  float *got = step(w, from, l->len);
  for (uint32_t s = 0; s < l->n_seqs; s++)
    assert_memory_equal(got + (3 * s + 2) * row, alone + s * row, row * sizeof *got);
  free(got);
}

// Whole prompts but for a few tokens, a chunk of those, then the last token alone.
static void check_layout(const layout *l) {
  CUDA_OPEN(f);
  world w;
  make_world(&w, l, &f);
  if (l->keys_bytes) ((td_cuda_dev *)f.dev)->keys_bytes = l->keys_bytes;
  uint32_t from[MAX_SEQS], to[MAX_SEQS];
  static const uint32_t left[] = {7, 1, 0}; // tokens after each step
  float *got = NULL;
  for (size_t i = 0; i < TD_COUNT(left); i++) {
    for (uint32_t s = 0; s < l->n_seqs; s++) {
      from[s] = i == 0 || l->len[s] <= left[i - 1] ? 0 : l->len[s] - left[i - 1];
      to[s] = l->len[s] > left[i] ? l->len[s] - left[i] : 0;
    }
    free(got);
    w.prompt = left[i] > 0;
    got = step(&w, from, to);
  }
  if (!l->mla || l->absorbed) check_company(&w, got);
  free(got);
  cuda_close(&f);
  free_world(&w);
}

// The last tokens of a prompt, one to four of them, are to the last bit what the whole prompt
// gives, and tokens that were decoded one by one what they are computed again all at once.
static void check_cuts(const layout *l) {
  enum { DECODED = 6 };
  CUDA_OPEN(f);
  world w;
  make_world(&w, l, &f);
  const size_t row = (size_t)l->n_heads * w.out_dim;
  const uint32_t n = l->len[0], none = 0, behind = n - DECODED;
  w.prompt = true;
  float *whole = step(&w, &none, &n);
  for (uint32_t tail = 1; tail <= 4; tail += 3) {
    const uint32_t from = n - tail;
    float *got = step(&w, &from, &n);
    assert_memory_equal(got, whole + from * row, tail * row * sizeof *got);
    free(got);
  }
  w.prompt = false;
  float *again = step(&w, &behind, &n);
  for (uint32_t from = behind; from < n; from++) {
    const uint32_t to = from + 1;
    float *got = step(&w, &from, &to);
    assert_memory_equal(got, again + (from - behind) * row, row * sizeof *got);
    free(got);
  }
  free(whole);
  free(again);
  cuda_close(&f);
  free_world(&w);
}

// Overwrites the first pages of sequence 0 with NaN.
static void spoil_pages(world *w, uint32_t n) {
  char *nans = malloc(w->page_bytes);
  int32_t table[64];
  memset(nans, 0xff, w->page_bytes);
  cuda_get(w->f, table, w->page_table, n * sizeof *table);
  for (uint32_t i = 0; i < n; i++)
    td_op_copy(w->f->stream, w->pages + (size_t)table[i] * w->page_bytes, nans, w->page_bytes);
  cuda_sync(w->f);
  free(nans);
}

// Keys that no window of the step's tokens reaches are not read, whole tiles of them: NaN there
// changes no bit.
static void test_old_pages_are_not_read(void **state) {
  (void)state;
  enum { LEN = 530, TAIL = 4, WINDOW = 128, OLD_PAGES = 6 };
  static const layout l = {.name = "a window of two pages",
                           .n_heads = 2,
                           .n_kv_heads = 1,
                           .head_dim = 32,
                           .window = WINDOW,
                           .has_sinks = true,
                           .page_tokens = 64,
                           .n_seqs = 1,
                           .len = {LEN},
                           .kv_dtype = TD_BF16,
                           .host_knows = true};
  CUDA_OPEN(f);
  world w;
  make_world(&w, &l, &f);
  const size_t row = (size_t)l.n_heads * w.out_dim;
  const uint32_t none = 0, n = LEN, from = LEN - TAIL;
  assert_true((from + 1 - WINDOW) / TD_CU_PREFILL_TOKENS * TD_CU_PREFILL_TOKENS ==
              OLD_PAGES * l.page_tokens);
  w.prompt = true;
  float *whole = step(&w, &none, &n);
  w.prompt = false;
  float *decoded = step(&w, &from, &n);
  spoil_pages(&w, OLD_PAGES);
  float *again = step(&w, &from, &n);
  assert_memory_equal(again, decoded, TAIL * row * sizeof *again);
  free(again);
  w.prompt = true;
  again = step(&w, &from, &n);
  assert_memory_equal(again, whole + from * row, TAIL * row * sizeof *again);
  free(again);
  free(decoded);
  free(whole);
  cuda_close(&f);
  free_world(&w);
}

static void test_prompts_and_replays_in_pieces(void **state) {
  (void)state;
  static const layout layouts[] = {
      {.name = "BF16 pages",
       .n_heads = 3,
       .n_kv_heads = 1,
       .head_dim = 32,
       .page_tokens = 16,
       .n_seqs = 1,
       .len = {70},
       .kv_dtype = TD_BF16},
      {.name = "F16 pages, ragged heads, two splits",
       .n_heads = 1,
       .n_kv_heads = 1,
       .head_dim = 20,
       .page_tokens = 16,
       .n_seqs = 1,
       .len = {135},
       .kv_dtype = TD_F16},
      {.name = "a window and sinks, keys from the second tile on",
       .n_heads = 4,
       .n_kv_heads = 2,
       .head_dim = 32,
       .window = 100,
       .has_sinks = true,
       .page_tokens = 16,
       .n_seqs = 1,
       .len = {300},
       .kv_dtype = TD_F16,
       .host_knows = true},
  };
  for (size_t i = 0; i < TD_COUNT(layouts); i++)
    check_cuts(&layouts[i]);
}

static void test_gqa(void **state) {
  (void)state;
  static const layout layouts[] = {
      {.name = "heads of 24, BF16 pages",
       .n_heads = 6,
       .n_kv_heads = 2,
       .head_dim = 24,
       .page_tokens = 16,
       .n_seqs = 3,
       .len = {72, 9, 150},
       .kv_dtype = TD_BF16,
       .keys_bytes = 1}, // a head, or a token, at a time
      {.name = "heads of 20, which no runs of eight make",
       .n_heads = 2,
       .n_kv_heads = 1,
       .head_dim = 20,
       .page_tokens = 16,
       .n_seqs = 1,
       .len = {75},
       .kv_dtype = TD_F16},
      {.name = "heads of 128, f16 pages",
       .n_heads = 2,
       .n_kv_heads = 1,
       .head_dim = 128,
       .page_tokens = 64,
       .n_seqs = 1,
       .len = {290},
       .kv_dtype = TD_F16},
      {.name = "heads of 256 that share one key",
       .n_heads = 9,
       .n_kv_heads = 1,
       .head_dim = 256,
       .page_tokens = 8,
       .n_seqs = 1,
       .len = {33},
       .kv_dtype = TD_F16},
      {.name = "a head of 256, many tiles of keys",
       .n_heads = 1,
       .n_kv_heads = 1,
       .head_dim = 256,
       .page_tokens = 16,
       .n_seqs = 1,
       .len = {210},
       .kv_dtype = TD_F16},
      {.name = "chunks whose first query sees all but one key of a tile, three KV heads by two",
       .n_heads = 3,
       .n_kv_heads = 3,
       .head_dim = 16,
       .page_tokens = 16,
       .n_seqs = 2,
       .len = {69, 133},
       .kv_dtype = TD_F16,
       .keys_bytes = (size_t)2 * 2 * 132 * 16 * sizeof(uint16_t)},
      {.name = "prompts of which two, then one, fit into a launch",
       .n_heads = 2,
       .n_kv_heads = 2,
       .head_dim = 16,
       .page_tokens = 16,
       .n_seqs = 3,
       .len = {9, 140, 21},
       .kv_dtype = TD_BF16,
       .keys_bytes = (size_t)2 * 2 * 149 * 16 * sizeof(uint16_t),
       .host_knows = true},
      {.name = "all prompts in a launch, one KV head at a time",
       .n_heads = 2,
       .n_kv_heads = 1,
       .head_dim = 24,
       .page_tokens = 16,
       .n_seqs = 3,
       .len = {30, 5, 75},
       .kv_dtype = TD_F16,
       .host_knows = true},
      {.name = "three splits of 256 keys",
       .n_heads = 3,
       .n_kv_heads = 3,
       .head_dim = 16,
       .page_tokens = 64,
       .n_seqs = 1,
       .len = {530},
       .kv_dtype = TD_F16},
      {.name = "a key a head, three splits of 128 keys",
       .n_heads = 2,
       .n_kv_heads = 2,
       .head_dim = 40,
       .page_tokens = 32,
       .n_seqs = 1,
       .len = {300},
       .kv_dtype = TD_BF16},
  };
  for (size_t i = 0; i < TD_COUNT(layouts); i++) {
    layout l = layouts[i];
    if (IS_ASAN && l.len[0] > ASAN_MOST) l.len[0] = ASAN_MOST;
    check_layout(&l);
  }
}

// Windows of one token, within a tile of keys, of whole tiles, over splits and beyond the context.
static void test_gqa_with_windows_and_sinks(void **state) {
  (void)state;
  static const layout layouts[] = {
      {.name = "a window of one token",
       .n_heads = 2,
       .n_kv_heads = 1,
       .head_dim = 16,
       .window = 1,
       .page_tokens = 16,
       .n_seqs = 2,
       .len = {150, 9},
       .kv_dtype = TD_BF16},
      {.name = "a window within a tile, heads one by one",
       .n_heads = 6,
       .n_kv_heads = 2,
       .head_dim = 24,
       .window = 11,
       .has_sinks = true,
       .page_tokens = 16,
       .n_seqs = 3,
       .len = {72, 9, 290},
       .kv_dtype = TD_F16,
       .keys_bytes = 1,
       .host_knows = true},
      {.name = "a window of 128, pages of 64",
       .n_heads = 4,
       .n_kv_heads = 2,
       .head_dim = 64,
       .window = 128,
       .has_sinks = true,
       .page_tokens = 64,
       .n_seqs = 2,
       .len = {530, 200},
       .kv_dtype = TD_BF16,
       .host_knows = true},
      {.name = "a window over splits of 256, heads of 128",
       .n_heads = 9,
       .n_kv_heads = 3,
       .head_dim = 128,
       .window = 300,
       .has_sinks = true,
       .page_tokens = 64,
       .n_seqs = 1,
       .len = {700},
       .kv_dtype = TD_F16},
      {.name = "a window of 70, heads of 256",
       .n_heads = 2,
       .n_kv_heads = 1,
       .head_dim = 256,
       .window = 70,
       .page_tokens = 16,
       .n_seqs = 1,
       .len = {290},
       .kv_dtype = TD_F16,
       .host_knows = true},
      {.name = "a window that hides nothing",
       .n_heads = 3,
       .n_kv_heads = 3,
       .head_dim = 20,
       .window = 5000,
       .has_sinks = true,
       .page_tokens = 16,
       .n_seqs = 1,
       .len = {150},
       .kv_dtype = TD_BF16},
  };
  for (size_t i = 0; i < TD_COUNT(layouts); i++)
    check_layout(&layouts[i]);
}

static void check_mla(bool absorbed) {
  static const layout layouts[] = {
      {.name = "ragged dims, FP8 kv_b",
       .mla = true,
       .n_heads = 3,
       .nope = 40,
       .rope = 16,
       .v_dim = 56,
       .rank = 136,
       .page_tokens = 16,
       .n_seqs = 2,
       .len = {60, 12}, // more than 64 keys are expanded by rounded weights
       .kv_dtype = TD_BF16,
       .kv_b_dtype = TD_F8E4M3,
       .keys_bytes = 1},
      {.name = "three sequences",
       .mla = true,
       .n_heads = 2,
       .nope = 40,
       .rope = 16,
       .v_dim = 24,
       .rank = 64,
       .page_tokens = 16,
       .n_seqs = 3,
       .len = {20, 70, 3},
       .kv_dtype = TD_BF16,
       .kv_b_dtype = TD_BF16,
       .host_knows = true},
      {.name = "dims that no runs of eight make",
       .mla = true,
       .n_heads = 3,
       .nope = 20,
       .rope = 12,
       .v_dim = 27,
       .rank = 44,
       .page_tokens = 16,
       .n_seqs = 1,
       .len = {50},
       .kv_dtype = TD_BF16,
       .kv_b_dtype = TD_F16},
      {.name = "DeepSeek-V3's dims",
       .mla = true,
       .n_heads = 2,
       .nope = 128,
       .rope = 64,
       .v_dim = 128,
       .rank = 512,
       .page_tokens = 64,
       .n_seqs = 1,
       .len = {280},
       .kv_dtype = TD_F16,
       .kv_b_dtype = TD_BF16},
  };
  for (size_t i = 0; i < TD_COUNT(layouts); i++) {
    layout l = layouts[i];
    l.absorbed = absorbed;
    if (absorbed && l.len[0] > 140) l.len[0] = 140; // every token is a block of its own
    const uint32_t most = absorbed ? ASAN_MOST / 2 : ASAN_MOST;
    if (IS_ASAN && l.len[0] > most) l.len[0] = most;
    check_layout(&l);
  }
}

static void test_mla_expanded(void **state) {
  (void)state;
  check_mla(false);
}

static void test_mla_absorbed(void **state) {
  (void)state;
  check_mla(true);
}

// A replay brings thousands of tokens: memory is bounded whatever their number, and each
// gets what it gets alone. Scaled down, since each token is a block on the emulator: 8,192 tokens
// of DeepSeek-V3 want 4.25 GiB, 17 times keys_bytes; here 8 times.
static void test_mla_replay(void **state) {
  (void)state;
  enum { SEQ = 8, N = 128, HEADS = 2, NOPE = 8, ROPE = 8, RANK = 16, PAGE = 16, N_SEQS = N / SEQ };
  enum { Q = HEADS * (NOPE + ROPE), OUT = HEADS * NOPE, ENTRY = RANK + ROPE, AT_ONCE = 16 };
  CUDA_OPEN(f);
  td_cuda_dev *dev = (td_cuda_dev *)f.dev;
  td_cuda_stream *stream = (td_cuda_stream *)f.stream;
  dev->keys_bytes = (size_t)AT_ONCE * HEADS * (ENTRY + RANK) * sizeof(float);
  static int32_t seq[N], position[N], begin[N_SEQS + 1], pages[N_SEQS];
  for (int32_t i = 0; i < N; i++) {
    seq[i] = i / SEQ;
    position[i] = i % SEQ;
    begin[i / SEQ + 1] = i + 1;
    pages[i / SEQ] = i / SEQ;
  }
  const size_t page_bytes = PAGE * ENTRY * sizeof(uint16_t);
  td_kv_view kv = {.page_bytes = page_bytes, .dtype = TD_BF16};
  kv.pages = cuda_alloc(&f, N_SEQS * page_bytes);
  td_batch_view batch = {.seq = cuda_put(&f, seq, sizeof seq),
                         .position = cuda_put(&f, position, sizeof position),
                         .q_begin = cuda_put(&f, begin, sizeof begin),
                         .page_table = cuda_put(&f, pages, sizeof pages),
                         .n_tokens = N,
                         .n_seqs = N_SEQS,
                         .max_pages = 1,
                         .page_tokens = PAGE};
  float *q = cuda_floats(&f, (size_t)N * Q), *entry = cuda_floats(&f, (size_t)N * ENTRY);
  float *values = cuda_floats(&f, (size_t)2 * HEADS * NOPE * RANK);
  const td_weight kv_b = {.data = values, .dtype = TD_F32, .rows = 2 * HEADS * NOPE, .cols = RANK};
  uint16_t *dev_q = cuda_put_bf16(&f, q, (size_t)N * Q);
  td_attn_mla_args args = {.batch = batch,
                           .kv = kv,
                           .q = dev_q,
                           .kv_b = &kv_b,
                           .out = cuda_alloc(&f, (size_t)N * OUT * sizeof(uint16_t)),
                           .n_heads = HEADS,
                           .nope_dim = NOPE,
                           .rope_dim = ROPE,
                           .v_dim = NOPE,
                           .kv_lora_rank = RANK,
                           .scale = 0.25f,
                           .absorbed = true};
  uint16_t *dev_entry = cuda_put_bf16(&f, entry, (size_t)N * ENTRY);
  td_op_kv_store_mla(f.stream, &(td_kv_store_mla_args){batch, kv, dev_entry, ENTRY});
  td_op_attn_mla(f.stream, &args);
  float *all = cuda_get_bf16(&f, args.out, (size_t)N * OUT);
  const size_t held = stream->scratch_bytes[CUDA_SCRATCH_QUERY] +
                      stream->scratch_bytes[CUDA_SCRATCH_LATENT];
  assert_true(held <= dev->keys_bytes + dev->keys_bytes / 4);
  for (uint32_t at = AT_ONCE - SEQ; at < N; at += 3 * AT_ONCE) { // the last of those before a cut
    args.batch.seq = batch.seq + at;
    args.batch.position = batch.position + at;
    args.batch.n_tokens = SEQ;
    args.q = dev_q + (size_t)at * Q;
    td_op_attn_mla(f.stream, &args);
    float *alone = cuda_get_bf16(&f, args.out, SEQ * OUT);
    assert_memory_equal(alone, all + (size_t)at * OUT, SEQ * OUT * sizeof *alone);
    free(alone);
  }
  free(q);
  free(entry);
  free(values);
  free(all);
  cuda_close(&f);
}

// Splits that a block adds up, where there are few SMs, are to the last bit those that it does not.
static void check_folding(uint32_t len, td_dtype kv_dtype) {
  const layout l = {.name = "many splits",
                    .mla = true,
                    .absorbed = true,
                    .n_heads = 3,
                    .nope = 16,
                    .rope = 8,
                    .v_dim = 16,
                    .rank = 40,
                    .page_tokens = 64,
                    .n_seqs = 1,
                    .len = {len},
                    .kv_dtype = kv_dtype,
                    .kv_b_dtype = TD_BF16};
  CUDA_OPEN(f);
  world w;
  make_world(&w, &l, &f);
  const uint32_t none = 0, before = len - 1;
  const td_kv_view kv = {.pages = w.pages, .page_bytes = w.page_bytes, .dtype = kv_dtype};
  const td_batch_view all = make_batch(&w, &none, &len);
  store_mla(&w, &all, &kv, gather(&w, w.k, w.entry, &none, &len));
  int *n_sms = &((td_cuda_dev *)f.dev)->props.n_sms;
  *n_sms = 1000;
  float *apart = step(&w, &before, &len);
  *n_sms = 1;
  float *by_block = step(&w, &before, &len);
  assert_memory_equal(by_block, apart, l.n_heads * w.out_dim * sizeof *apart);
  free(apart);
  free(by_block);
  cuda_close(&f);
  free_world(&w);
}

static void test_splits_are_added_up_alike(void **state) {
  (void)state;
  check_folding(900, TD_F16); // a block's four, and three and some
  check_folding(512, TD_BF16);
  check_folding(257, TD_BF16);
}

static void expect_failure(cuda_fixture *f, const char *part) {
  td_err err;
  assert_int_equal(td_stream_sync(f->stream, &err), TD_EINVAL);
  if (!strstr(err.msg, part)) fail_msg("'%s' does not speak of '%s'", err.msg, part);
  td_stream_close(f->stream);
  assert_int_equal(td_stream_open(&f->stream, f->dev, &err), TD_OK);
}

static void test_bad_batches(void **state) {
  (void)state;
  enum { DIM = 8, PAGE = 4 };
  CUDA_OPEN(f);
  int32_t zero = 0, begin[] = {0, 1}, absent = -1, far = PAGE;
  uint16_t *x = cuda_alloc(&f, 64 * sizeof *x);
  td_kv_store_mla_args args = {
      .batch = {.seq = cuda_put(&f, &zero, sizeof zero),
                .position = cuda_put(&f, &zero, sizeof zero),
                .q_begin = cuda_put(&f, begin, sizeof begin),
                .page_table = cuda_put(&f, &absent, sizeof absent),
                .n_tokens = 1,
                .n_seqs = 1,
                .max_pages = 1,
                .page_tokens = PAGE},
      .kv = {.pages = cuda_alloc(&f, 256), .page_bytes = 256, .dtype = TD_BF16},
      .entry = x,
      .entry_dim = DIM,
  };
  td_op_kv_store_mla(f.stream, &args);
  expect_failure(&f, "page is absent");
  args.batch.position = cuda_put(&f, &far, sizeof far);
  td_op_kv_store_mla(f.stream, &args);
  expect_failure(&f, "position");
  args.batch.position = cuda_put(&f, &absent, sizeof absent);
  td_op_kv_store_mla(f.stream, &args);
  expect_failure(&f, "position");
  args.kv.page_bytes = 32;
  td_op_kv_store_mla(f.stream, &args);
  expect_failure(&f, "KV pages");
  cuda_close(&f);
}

// Attention after a store that fails touches nothing that is not there, few queries or many.
static void test_attention_over_bad_batches(void **state) {
  (void)state;
  enum { DIM = 8, PAGE = 4, MOST = 5, ENTRIES = 2 * PAGE * DIM };
  static const uint32_t n_tokens[] = {1, MOST};
  static const int32_t first[] = {0, PAGE, -3, -9}; // page 0 is absent in the first case
  CUDA_OPEN(f);
  uint16_t *x = cuda_alloc(&f, (size_t)MOST * DIM * sizeof *x);
  uint16_t *out = cuda_alloc(&f, (size_t)MOST * DIM * sizeof *out);
  td_op_fill_zero(f.stream, x, (size_t)MOST * DIM * sizeof *x);
  const td_kv_view kv = {.pages = cuda_alloc(&f, ENTRIES * sizeof(float)),
                         .page_bytes = ENTRIES * sizeof(float),
                         .dtype = TD_BF16};
  for (size_t i = 0; i < TD_COUNT(n_tokens) * TD_COUNT(first); i++) {
    uint32_t n = n_tokens[i % 2];
    int32_t seq[MOST] = {0}, position[MOST], begin[] = {0, (int32_t)n}, page = i < 2 ? -1 : 0;
    for (int t = 0; t < MOST; t++)
      position[t] = first[i / 2] + t;
    const td_batch_view batch = {.seq = cuda_put(&f, seq, sizeof seq),
                                 .position = cuda_put(&f, position, sizeof position),
                                 .q_begin = cuda_put(&f, begin, sizeof begin),
                                 .page_table = cuda_put(&f, &page, sizeof page),
                                 .n_tokens = n,
                                 .n_seqs = 1,
                                 .max_pages = 1,
                                 .page_tokens = PAGE};
    td_op_kv_store_gqa(f.stream, &(td_kv_store_gqa_args){batch, kv, x, x, DIM, DIM, 1, DIM});
    td_op_attn_gqa(f.stream, &(td_attn_gqa_args){.batch = batch,
                                                 .kv = kv,
                                                 .q = x,
                                                 .out = out,
                                                 .n_heads = 1,
                                                 .n_kv_heads = 1,
                                                 .head_dim = DIM,
                                                 .scale = 1,
                                                 .prompt = n > 1});
    expect_failure(&f, i < 2 && n == 1 ? "page is absent" : i < 2 ? "batch" : "position");
  }
  cuda_close(&f);
}

int main(int argc, char **argv) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_gqa),
      cmocka_unit_test(test_gqa_with_windows_and_sinks),
      cmocka_unit_test(test_mla_expanded),
      cmocka_unit_test(test_mla_absorbed),
      cmocka_unit_test(test_mla_replay),
      cmocka_unit_test(test_prompts_and_replays_in_pieces),
      cmocka_unit_test(test_old_pages_are_not_read),
      cmocka_unit_test(test_splits_are_added_up_alike),
      cmocka_unit_test(test_bad_batches),
      cmocka_unit_test(test_attention_over_bad_batches),
  };
  if (!filter_tests(argc, argv, tests, TD_COUNT(tests))) return 2;
  return cmocka_run_group_tests(tests, NULL, NULL);
}
