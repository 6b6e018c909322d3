// tests/unit/cuda_attn_test.h - one layer of the CUDA device's attention, its sequences and their
// KV pages, and a naive attention in double to compare each step with.
#pragma once

#include "unit/cuda_test.h"
#include "unit/sanitized.h"

enum { MAX_SEQS = 3, MAX_TOKENS = 1200 };
enum { ASAN_MOST = 135 }; // tokens: two splits of 128 keys

// One attention layer and the sequences it sees.
typedef struct {
  const char *name;
  bool mla, absorbed;
  uint32_t n_heads, n_kv_heads, head_dim; // GQA
  uint32_t window;                        //
  bool has_sinks;                         //
  uint32_t nope, rope, v_dim, rank;       // MLA
  uint32_t top_k;                         // keys that a token sees (sees_key); 0: all
  uint32_t group;                         // or groups of so many keys, beside its own
  uint32_t block, top_blocks;             // GQA, likewise of blocks of so many keys
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
  float *kept_k[MAX_SEQS], *kept_v[MAX_SEQS]; // what pages keep of k and v
  ref_weight kv_b;
  double *kv_b_values;
  double *ks[MAX_SEQS], *vs[MAX_SEQS]; // [n_heads][len]: the keys and values of each head
  float *sinks;                        // [n_heads]
  double scale;
  uint32_t max_pages;
  size_t page_bytes;
  char *pages;
  int32_t *page_table;                                 // on the device
  bool prompt;                                         // what the next step's tokens are, of GQA
  int32_t q_begin[MAX_SEQS + 1], position[MAX_TOKENS]; // of the last step
} world;

static inline td_kv_rows rows_of(const world *w) {
  return w->l->mla ? (td_kv_rows){1, w->entry, w->l->rope}
                   : (td_kv_rows){2 * w->l->n_kv_heads, w->l->head_dim, 0};
}

static inline size_t token_bytes(const world *w) {
  const td_kv_rows rows = rows_of(w);
  return w->l->kv_dtype == TD_F8E4M3 ? td_kv_f8_token_bytes(&rows)
                                     : rows.n * rows.dim * td_dtype_bytes(w->l->kv_dtype);
}

// BF16 is exact in pages of BF16 and F16.
static inline float *keep(const world *w, const float *all, size_t n_tokens) {
  const td_kv_rows rows = rows_of(w);
  const size_t n = n_tokens * w->entry;
  float *kept = malloc(n * sizeof *kept);
  memcpy(kept, all, n * sizeof *kept);
  for (size_t i = 0; i < n && w->l->kv_dtype == TD_F8E4M3; i += rows.dim)
    ref_through_f8(kept + i, rows.dim, rows.n_bf16);
  return kept;
}

static inline td_kv_view view_of(const world *w) {
  return (td_kv_view){.pages = w->pages,
                      .page_bytes = w->page_bytes,
                      .dtype = w->l->kv_dtype,
                      .n_bf16 = rows_of(w).n_bf16};
}

static inline void make_pages(world *w) {
  const layout *l = w->l;
  for (uint32_t s = 0; s < l->n_seqs; s++) {
    uint32_t n = (l->len[s] + l->page_tokens - 1) / l->page_tokens + 1;
    if (n > w->max_pages) w->max_pages = n;
  }
  size_t n_pages = (size_t)l->n_seqs * w->max_pages;
  w->page_bytes = l->page_tokens * token_bytes(w) + 64;
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

// What one position gives a head: its key, and its value.
static inline void naive_key(const world *w, uint32_t s, uint32_t p, uint32_t head, double *k,
                             double *v) {
  const layout *l = w->l;
  const float *entry = w->kept_k[s] + (size_t)p * w->entry;
  if (!l->mla) {
    size_t at = (size_t)(head / (l->n_heads / l->n_kv_heads)) * l->head_dim;
    for (uint32_t d = 0; d < l->head_dim; d++) {
      k[d] = entry[at + d];
      v[d] = w->kept_v[s][(size_t)p * w->entry + at + d];
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

// Of what pages keep now.
static inline void make_keys(world *w) {
  const layout *l = w->l;
  for (uint32_t s = 0; s < l->n_seqs; s++) {
    const size_t n = (size_t)l->n_heads * l->len[s];
    free(w->ks[s]);
    free(w->vs[s]);
    w->ks[s] = ref_doubles(n * w->k_dim);
    w->vs[s] = ref_doubles(n * w->out_dim);
    for (size_t i = 0; i < n; i++)
      naive_key(w, s, (uint32_t)(i % l->len[s]), (uint32_t)(i / l->len[s]), w->ks[s] + i * w->k_dim,
                w->vs[s] + i * w->out_dim);
  }
}

static inline void make_world(world *w, const layout *l, cuda_fixture *f) {
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
    w->kept_k[s] = keep(w, w->k[s], l->len[s]);
    w->kept_v[s] = keep(w, w->v[s], l->len[s]);
  }
  if (l->mla) {
    uint32_t rows = l->n_heads * (l->nope + l->v_dim);
    w->kv_b = ref_make_weight(&f->rng, l->kv_b_dtype, rows, l->rank, 128, 128);
    w->kv_b_values = ref_doubles((size_t)rows * l->rank);
    for (size_t i = 0; i < (size_t)rows * l->rank; i++)
      w->kv_b_values[i] = ref_at(&w->kv_b.w, (uint32_t)(i / l->rank), (uint32_t)(i % l->rank));
  }
  make_keys(w);
  w->sinks = ref_floats(&f->rng, l->n_heads);
  for (uint32_t h = 0; h < l->n_heads; h++) // from none of the weight to nearly all of it
    w->sinks[h] = w->sinks[h] * 2 + (float)(h % 3) * 4 - 4;
  make_pages(w);
}

static inline void free_world(world *w) {
  for (uint32_t s = 0; s < w->l->n_seqs; s++) {
    free(w->q[s]);
    free(w->k[s]);
    free(w->v[s]);
    free(w->kept_k[s]);
    free(w->kept_v[s]);
    free(w->ks[s]);
    free(w->vs[s]);
  }
  ref_free_weight(&w->kv_b);
  free(w->kv_b_values);
  free(w->sinks);
}

// The rows [from[s], to[s]) of every sequence, one after the other, on the device.
static inline uint16_t *gather(world *w, float *const *rows, size_t width, const uint32_t *from,
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

static inline td_batch_view make_batch(world *w, const uint32_t *from, const uint32_t *to) {
  int32_t seq[MAX_TOKENS], *position = w->position, *q_begin = w->q_begin;
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

// Block i of those that position p sees with a KV head: spread over all that it could see, with
// every other head its own the last.
static inline uint32_t selected_block(const layout *l, uint32_t p, uint32_t kv_head, uint32_t i) {
  const uint32_t n = p / l->block + 1, top = l->top_blocks;
  return kv_head % 2 ? i * n / top : n - 1 - (top - 1 - i) * n / top;
}

static inline int32_t *put_blocks(world *w, uint32_t n) {
  const layout *l = w->l;
  if (!l->block) return NULL;
  const size_t row = l->n_kv_heads * l->top_blocks;
  int32_t *all = malloc(n * row * sizeof *all);
  for (uint32_t t = 0; t < n; t++) {
    const uint32_t p = (uint32_t)w->position[t];
    const bool selects = p / l->block >= l->top_blocks;
    for (uint32_t i = 0; i < row; i++) { // what is not written is not read either
      const uint32_t block = selected_block(l, p, i / l->top_blocks, i % l->top_blocks);
      all[t * row + i] = selects ? (int32_t)block : -7;
    }
  }
  int32_t *out = cuda_put(w->f, all, n * row * sizeof *all);
  free(all);
  return out;
}

// Key, or group, i that position p sees: they are spread over all that it could see.
static inline uint32_t selected_key(const layout *l, uint32_t p, uint32_t i) {
  const uint32_t n = l->group ? (p + 1) / l->group : p + 1;
  return i * n / l->top_k;
}

static inline int32_t *put_selected(world *w, uint32_t n) {
  const layout *l = w->l;
  if (!l->top_k) return NULL;
  int32_t *all = malloc((size_t)n * l->top_k * sizeof *all);
  for (uint32_t t = 0; t < n; t++)
    for (uint32_t i = 0; i < l->top_k; i++)
      all[t * l->top_k + i] = (int32_t)selected_key(l, (uint32_t)w->position[t], i);
  int32_t *out = cuda_put(w->f, all, (size_t)n * l->top_k * sizeof *all);
  free(all);
  return out;
}

static inline void run_gqa(world *w, const td_batch_view *batch, const td_kv_view *kv,
                           const uint16_t *q, const uint16_t *k, const uint16_t *v, uint16_t *out) {
  const layout *l = w->l;
  td_op_kv_store(w->f->stream, &(td_kv_store_args){.batch = *batch,
                                                   .kv = *kv,
                                                   .k = k,
                                                   .v = v,
                                                   .k_stride = w->entry,
                                                   .v_stride = w->entry,
                                                   .n_heads = l->n_kv_heads,
                                                   .head_dim = l->head_dim});
  td_op_attn_gqa(w->f->stream, &(td_attn_gqa_args){.batch = *batch,
                                                   .kv = *kv,
                                                   .q = q,
                                                   .out = out,
                                                   .n_heads = l->n_heads,
                                                   .n_kv_heads = l->n_kv_heads,
                                                   .head_dim = l->head_dim,
                                                   .window = l->window,
                                                   .blocks = put_blocks(w, batch->n_tokens),
                                                   .block = l->block,
                                                   .top_blocks = l->top_blocks,
                                                   .selected = put_selected(w, batch->n_tokens),
                                                   .top_k = l->top_k,
                                                   .group = l->group,
                                                   .sinks = l->has_sinks ? w->sinks : NULL,
                                                   .scale = (float)w->scale,
                                                   .prompt = w->prompt});
}

static inline void store_mla(world *w, const td_batch_view *batch, const td_kv_view *kv,
                             const uint16_t *k) {
  td_op_kv_store(w->f->stream, &(td_kv_store_args){.batch = *batch,
                                                   .kv = *kv,
                                                   .k = k,
                                                   .k_stride = w->entry,
                                                   .n_heads = 1,
                                                   .head_dim = w->entry});
}

static inline bool sees_group(const layout *l, uint32_t p, uint32_t group) {
  const uint32_t n_groups = (p + 1) / l->group;
  bool is_seen = n_groups <= l->top_k || group == n_groups;
  for (uint32_t i = 0; i < l->top_k && !is_seen; i++)
    is_seen = selected_key(l, p, i) == group;
  return is_seen;
}

static inline bool sees_block(const layout *l, uint32_t p, uint32_t kv_head, uint32_t block) {
  bool is_seen = p / l->block < l->top_blocks;
  for (uint32_t i = 0; i < l->top_blocks && !is_seen; i++)
    is_seen = selected_block(l, p, kv_head, i) == block;
  return is_seen;
}

static inline bool sees_key(const layout *l, uint32_t p, uint32_t head, uint32_t j) {
  if (l->block) return sees_block(l, p, head / (l->n_heads / l->n_kv_heads), j / l->block);
  if (l->group) return sees_group(l, p, j / l->group);
  if (!l->top_k || p < l->top_k) return true;
  const uint32_t i = (j * l->top_k + p) / (p + 1);
  return i < l->top_k && selected_key(l, p, i) == j;
}

static inline void run_mla(world *w, const td_batch_view *batch, const td_kv_view *kv,
                           const uint16_t *q, const uint16_t *k, uint16_t *out) {
  const layout *l = w->l;
  store_mla(w, batch, kv, k);
  td_op_attn_mla(w->f->stream, &(td_attn_mla_args){.batch = *batch,
                                                   .kv = *kv,
                                                   .q = q,
                                                   .kv_b = &w->kv_b.w,
                                                   .selected = put_selected(w, batch->n_tokens),
                                                   .top_k = l->top_k,
                                                   .group = l->group,
                                                   .out = out,
                                                   .n_heads = l->n_heads,
                                                   .nope_dim = l->nope,
                                                   .rope_dim = l->rope,
                                                   .v_dim = l->v_dim,
                                                   .kv_lora_rank = l->rank,
                                                   .scale = (float)w->scale,
                                                   .absorbed = l->absorbed});
}

// Attention of position p, and what each element may err by: keys (MLA expanded), weights and the
// result are rounded to BF16, half a unit each, and sums of 64 products to F16 four times. A score
// that errs by e changes its weight by the factor exp(e).
static inline void naive_attention(const world *w, uint32_t s, uint32_t head, uint32_t p,
                                   const double *ks, const double *vs, double *out, double *slack) {
  const float *q = w->q[s] + ((size_t)p * w->l->n_heads + head) * w->k_dim;
  const uint32_t window = w->l->window, first = window && p + 1 > window ? p + 1 - window : 0;
  const double sink = w->l->has_sinks ? w->sinks[head] : -INFINITY;
  double total = 0, worst = 0, largest = sink, score[MAX_TOKENS];
  const double f16_error = cuda_f16_error(w->f, 4);
  double key_ulp = w->l->mla ? ULP_BF16 / 2 : 0;
  for (uint32_t j = first; j <= p; j++) {
    double size = 0;
    score[j] = -INFINITY;
    if (!sees_key(w->l, p, head, j)) continue;
    score[j] = 0;
    for (uint32_t d = 0; d < w->k_dim; d++) {
      double product = q[d] * ks[(size_t)j * w->k_dim + d] * w->scale;
      score[j] += product;
      size += fabs(product);
    }
    worst = fmax(worst, size * (key_ulp + f16_error + 600 * ULP_F32));
    largest = fmax(largest, score[j]);
  }
  for (uint32_t j = first; j <= p; j++) {
    score[j] = exp(score[j] - largest);
    total += score[j];
  }
  total += exp(sink - largest);
  double weight_error = 2 * (exp(worst) - 1) + ULP_BF16 + f16_error + 600 * ULP_F32;
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

static inline void check_outputs(const world *w, const float *got, const uint32_t *from,
                                 const uint32_t *to) {
  const layout *l = w->l;
  double out[256], slack[256];
  size_t row0 = 0;
  for (uint32_t s = 0; s < l->n_seqs; s++) {
    for (uint32_t head = 0; head < l->n_heads; head++) {
      const size_t first = (size_t)head * l->len[s];
      const double *ks = w->ks[s] + first * w->k_dim, *vs = w->vs[s] + first * w->out_dim;
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
  }
}

// The outputs, checked; to be freed.
static inline float *step(world *w, const uint32_t *from, const uint32_t *to) {
  td_batch_view batch = make_batch(w, from, to);
  const td_kv_view kv = view_of(w);
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
static inline void check_company(world *w, const float *alone) {
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
static inline void check_layout(const layout *l) {
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
