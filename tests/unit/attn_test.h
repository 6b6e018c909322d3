// tests/unit/attn_test.h - one layer's attention over whole sequences, with what a cache keeps of
// them, and which keys a naive attention in double sees.
#pragma once

#include "device/device.h"
#include "unit/ref.h"

enum { MAX_SEQS = 3, INDEX_HEADS = 5, INDEX_DIM = 12, INDEX_Q = INDEX_HEADS * INDEX_DIM };

// A model of one attention layer with its whole sequences, f32, and a paged cache for them.
typedef struct {
  bool mla, absorbed;
  bool prompt;                            // GQA
  uint32_t n_heads, n_kv_heads, head_dim; //
  uint32_t window;                        //
  bool has_sinks;                         //
  uint32_t nope, rope, v_dim, rank;       // MLA
  uint32_t top_k;                         // over selected keys, with GQA over groups
  uint32_t group;                         // or groups of keys, which a test selects
  uint32_t block, top_blocks, n_local;    // GQA over selected blocks, of INDEX_HEADS KV heads
  bool has_ties;                          // their scores tie, exactly
  uint32_t page_tokens, n_seqs, len[MAX_SEQS];
  td_dtype kv_b_dtype;
  td_dtype kv_dtype; // of the pages: TD_F16, TD_F32 or TD_F8E4M3
} layout;

typedef struct {
  layout l;
  uint32_t q_dim, out_dim;          // a head
  float *q[MAX_SEQS];               // [len][n_heads][q_dim]
  float *k[MAX_SEQS], *v[MAX_SEQS]; // GQA [len][n_kv_heads][head_dim]; MLA k: [len][rank + rope]
  float *kept_k[MAX_SEQS], *kept_v[MAX_SEQS]; // likewise, what E4M3 pages keep; TD_F8E4M3
  float *out[MAX_SEQS];                       // [len][n_heads][out_dim]
  // [len][INDEX_HEADS][INDEX_DIM], [len][INDEX_DIM], [len][INDEX_HEADS]
  float *index_q[MAX_SEQS], *index_k[MAX_SEQS], *index_weights[MAX_SEQS];
  int32_t *selected[MAX_SEQS]; // [len][selected_row]
  ref_weight kv_b;
  float scale;
  float *sinks; // [n_heads]
  uint32_t max_pages;
  size_t page_bytes;
  uint16_t *pages;
  int32_t *page_table; // [n_seqs][max_pages]
} world;

static uint32_t entry_floats(const layout *l) {
  return l->mla ? l->rank + l->rope : l->n_kv_heads * l->head_dim;
}

// Of a token.
static size_t selected_row(const layout *l) {
  return l->block ? (size_t)INDEX_HEADS * l->top_blocks : l->top_k;
}

// With ties: small multiples of a half, whose products and sums are exact.
static float *index_values(const layout *l, uint64_t *rng, size_t n) {
  float *out = ref_floats(rng, n);
  for (size_t i = 0; i < n && l->has_ties; i++)
    out[i] = rintf(out[i] * 2) / 2;
  return out;
}

static void make_index(world *w, uint64_t *rng, uint32_t s) {
  const size_t n = w->l.len[s];
  w->index_q[s] = index_values(&w->l, rng, n * INDEX_Q);
  w->index_k[s] = index_values(&w->l, rng, n * INDEX_DIM);
  w->index_weights[s] = index_values(&w->l, rng, n * INDEX_HEADS);
  w->selected[s] = calloc(n * selected_row(&w->l), sizeof(int32_t));
}

static td_kv_rows rows_of(const layout *l) {
  return l->mla ? (td_kv_rows){1, entry_floats(l), l->rope}
                : (td_kv_rows){2 * l->n_kv_heads, l->head_dim, 0};
}

static size_t token_bytes(const layout *l) {
  const td_kv_rows rows = rows_of(l);
  if (l->kv_dtype == TD_F8E4M3) return td_kv_f8_token_bytes(&rows);
  return (rows.n * rows.dim + (selected_row(l) ? INDEX_DIM : 0)) * td_dtype_bytes(l->kv_dtype);
}

// Values of every token are of another size.
static float *keep_f8(const layout *l, float *all, size_t n_tokens, bool is_v) {
  const td_kv_rows rows = rows_of(l);
  const size_t n = n_tokens * entry_floats(l);
  for (size_t i = 0; i < n && is_v; i++)
    all[i] *= ldexpf(1, (int)(i / entry_floats(l) % 7) * 4 - 12);
  float *kept = malloc(n * sizeof *kept);
  memcpy(kept, all, n * sizeof *kept);
  for (size_t i = 0; i < n; i += rows.dim)
    ref_through_f8(kept + i, rows.dim, rows.n_bf16);
  return kept;
}

static void make_world(world *w, const layout *l) {
  uint64_t rng = 42;
  *w = (world){.l = *l, .scale = 0.3f};
  w->sinks = ref_floats(&rng, l->n_heads);
  w->q_dim = l->mla ? l->nope + l->rope : l->head_dim;
  w->out_dim = l->mla ? l->v_dim : l->head_dim;
  for (uint32_t s = 0; s < l->n_seqs; s++) {
    size_t n = l->len[s];
    w->q[s] = ref_floats(&rng, n * l->n_heads * w->q_dim);
    w->k[s] = ref_floats(&rng, n * entry_floats(l));
    w->v[s] = ref_floats(&rng, n * entry_floats(l));
    if (l->kv_dtype == TD_F8E4M3) {
      w->kept_k[s] = keep_f8(l, w->k[s], n, false);
      w->kept_v[s] = keep_f8(l, w->v[s], n, true);
    }
    w->out[s] = calloc(n * l->n_heads * w->out_dim, sizeof(float));
    make_index(w, &rng, s);
    uint32_t pages = (l->len[s] + l->page_tokens - 1) / l->page_tokens;
    if (pages > w->max_pages) w->max_pages = pages;
  }
  if (l->mla) {
    w->kv_b = ref_make_weight(&rng, l->kv_b_dtype, l->n_heads * (l->nope + l->v_dim), l->rank, 128,
                              128);
  }
  w->max_pages += 1;
  size_t n_pages = (size_t)l->n_seqs * w->max_pages;
  w->page_bytes = l->page_tokens * token_bytes(l) + 64;
  w->pages = malloc(n_pages * w->page_bytes);
  memset(w->pages, 0xff, n_pages * w->page_bytes); // NaN: what was never stored must not be used
  w->page_table = malloc(n_pages * sizeof *w->page_table);
  for (size_t i = 0; i < n_pages; i++)
    w->page_table[i] = (int32_t)i;
  for (size_t i = n_pages - 1; i > 0; i--) {
    size_t j = ref_below(&rng, (uint32_t)i + 1);
    int32_t t = w->page_table[i];
    w->page_table[i] = w->page_table[j];
    w->page_table[j] = t;
  }
}

static void free_world(world *w) {
  for (uint32_t s = 0; s < w->l.n_seqs; s++) {
    free(w->q[s]);
    free(w->k[s]);
    free(w->v[s]);
    free(w->kept_k[s]);
    free(w->kept_v[s]);
    free(w->out[s]);
    free(w->index_q[s]);
    free(w->index_k[s]);
    free(w->index_weights[s]);
    free(w->selected[s]);
  }
  ref_free_weight(&w->kv_b);
  free(w->sinks);
  free(w->pages);
  free(w->page_table);
}

// The i-th of the groups that position p sees.
static uint32_t selected_group(const layout *l, uint32_t p, uint32_t i) {
  return i * ((p + 1) / l->group) / l->top_k;
}

// What the cache makes of a value.
static double cached(const world *w, double f) {
  return w->l.kv_dtype == TD_F16 ? ref_through_half(f) : f;
}

// The key and value that head h of sequence s sees at position p, from what the cache keeps.
static void naive_kv(const world *w, uint32_t s, uint32_t h, uint32_t p, double *k, double *v) {
  const layout *l = &w->l;
  const bool is_f8 = l->kv_dtype == TD_F8E4M3;
  const float *ks = is_f8 ? w->kept_k[s] : w->k[s], *vs = is_f8 ? w->kept_v[s] : w->v[s];
  size_t e = entry_floats(l);
  if (!l->mla) {
    size_t at = p * e + (size_t)(h / (l->n_heads / l->n_kv_heads)) * l->head_dim;
    for (uint32_t d = 0; d < l->head_dim; d++) {
      k[d] = cached(w, ks[at + d]);
      v[d] = cached(w, vs[at + d]);
    }
    return;
  }
  double latent[640];
  for (uint32_t d = 0; d < e; d++)
    latent[d] = cached(w, ks[p * e + d]);
  for (uint32_t d = 0; d < l->nope + l->v_dim; d++) {
    double sum = 0;
    for (uint32_t c = 0; c < l->rank; c++) {
      sum += ref_at(&w->kv_b.w, h * (l->nope + l->v_dim) + d, c) * latent[c];
    }
    if (d < l->nope)
      k[d] = sum;
    else
      v[d - l->nope] = sum;
  }
  for (uint32_t d = 0; d < l->rope; d++)
    k[l->nope + d] = latent[l->rank + d];
}

static void naive_groups(const layout *l, uint32_t t, bool *sees) {
  const uint32_t n_groups = (t + 1) / l->group;
  for (uint32_t p = 0; p <= t; p++) {
    sees[p] = n_groups <= l->top_k || p / l->group == n_groups;
    for (uint32_t i = 0; i < l->top_k && !sees[p]; i++)
      sees[p] = selected_group(l, t, i) == p / l->group;
  }
}

// Which positions token t of sequence s sees: of scores in double, by their order and position.
static void naive_selection(const world *w, uint32_t s, uint32_t t, bool *sees) {
  const uint32_t top_k = w->l.top_k;
  double *score = ref_doubles(t + 1);
  for (uint32_t p = 0; p <= t; p++) {
    score[p] = 0;
    for (uint32_t h = 0; h < INDEX_HEADS; h++) {
      double dot = 0;
      for (uint32_t d = 0; d < INDEX_DIM; d++)
        dot += w->index_q[s][t * INDEX_Q + h * INDEX_DIM + d] *
               cached(w, w->index_k[s][p * INDEX_DIM + d]);
      score[p] += w->index_weights[s][t * INDEX_HEADS + h] * fmax(0, dot);
    }
  }
  uint32_t n = 0;
  for (uint32_t p = 0; p <= t; p++) {
    uint32_t n_before = 0;
    for (uint32_t other = 0; other <= t; other++)
      n_before += score[other] > score[p] || (score[other] == score[p] && other < p);
    sees[p] = !top_k || n_before < top_k;
    if (top_k && t >= top_k && sees[p] && w->selected[s][t * top_k + n++] != (int32_t)p)
      fail_msg("sequence %u token %u: position %u is not the selection's %u", s, t, p, n - 1);
  }
  free(score);
}

// Of those blocks, which positions token t of sequence s sees with KV head h.
static void naive_blocks(const world *w, uint32_t s, uint32_t h, uint32_t t, bool *sees) {
  const layout *l = &w->l;
  const uint32_t n_blocks = t / l->block + 1;
  double *score = ref_doubles(n_blocks);
  for (uint32_t b = 0; b < n_blocks; b++)
    score[b] = b + l->n_local >= n_blocks ? INFINITY : -INFINITY;
  for (uint32_t p = 0; p <= t; p++) {
    double dot = 0;
    for (uint32_t d = 0; d < INDEX_DIM; d++)
      dot += w->index_q[s][t * INDEX_Q + h * INDEX_DIM + d] *
             cached(w, w->index_k[s][p * INDEX_DIM + d]);
    score[p / l->block] = fmax(score[p / l->block], dot);
  }
  const int32_t *selected = w->selected[s] + t * selected_row(l) + (size_t)h * l->top_blocks;
  for (uint32_t b = 0, n = 0; b < n_blocks; b++) {
    uint32_t n_before = 0;
    for (uint32_t other = 0; other < n_blocks; other++)
      n_before += score[other] > score[b] || (score[other] == score[b] && other < b);
    const bool is_seen = n_before < l->top_blocks;
    for (uint32_t p = b * l->block; p <= t && p < (b + 1) * l->block; p++)
      sees[p] = is_seen;
    if (n_blocks > l->top_blocks && is_seen && selected[n++] != (int32_t)b)
      fail_msg("sequence %u token %u head %u: block %u is not the selection's %u", s, t, h, b,
               n - 1);
  }
  free(score);
}
