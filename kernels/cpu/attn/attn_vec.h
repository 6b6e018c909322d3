// kernels/cpu/attn/attn_vec.h - one attention block in vectors.
// Include after an ISA's vec.h and, for the dtype of the cache, elem, load_kv and load_kv_n, which
// load VL (the first n < VL) elements as floats.
//
// A tile of QUERIES shares the loads of keys and values; the tiles of a group take turns with the
// keys that L1 holds. Every (query, key) score has one accumulator over the dimensions and every
// (query, dimension) of the result one over the keys, in order, so a query's result does not depend
// on the other queries. With transposed keys a score is one lane; otherwise its lanes are added at
// the end.
#pragma once

#include <math.h>

#include "kernels/cpu/common/transpose.h"
#include "kernels/cpu/common/vec_math.h"
#include "kernels/decl.h"

enum {
  QUERIES = 4,
  KEYS = VL == 16 ? 4 : 2,
  VALUES = VL == 16 ? 4 : 2,
  GROUP_QUERIES = 32,
  KEY_BYTES = 18432, // keys that tiles share in turns: with a tile's queries they fit L1
  STEP_LINES = 2,    // see attn_next
};

#define TD_UNROLL _Pragma("GCC unroll 8")

// Prefetches what comes next into L2, evenly over all steps, so that memory is busy but its queue
// stays short. STEP_LINES can be read while QUERIES are computed.
typedef struct {
  const char *at, *end;
  uint32_t n_bytes; // per step, up to STEP_LINES * 64
} attn_next;

static attn_next attn_next_of(const void *from, size_t n_bytes, uint32_t n_steps) {
  static const char nothing;
  if (!from || !n_steps) return (attn_next){.at = &nothing, .end = &nothing};
  const size_t a_step = (n_bytes + n_steps - 1) / n_steps;
  return (attn_next){.at = from,
                     .end = (const char *)from + n_bytes,
                     .n_bytes = a_step < STEP_LINES * 64 ? (uint32_t)a_step : STEP_LINES * 64};
}

TD_INLINE const char *attn_fetch(attn_next next, const char *at) {
  TD_UNROLL for (int i = 0; i < STEP_LINES; i++) __builtin_prefetch(at + i * 64, 0, 2);
  return at + next.n_bytes;
}

static attn_next attn_next_on(attn_next next, uint32_t n_steps) {
  next.at += (size_t)n_steps * next.n_bytes;
  if (next.at >= next.end) next.n_bytes = 0;
  return next;
}

// Where the value of key j is, from dimension d on. is_spread: keys are in rows.
TD_INLINE const elem *value_at(const td_attn_block_args *a, const bool is_spread, uint32_t j,
                               uint32_t d) {
  if (!is_spread) return (const elem *)a->v + j * a->ldv + d;
  return (const elem *)(const void *)(a->rows[j] + ((const char *)a->v - (const char *)a->k)) + d;
}

// s[q][j] for Q queries and KEYS keys from j on, of which the first n exist.
TD_INLINE void score_tile(const int Q, const td_attn_block_args *a, uint32_t q0, uint32_t j,
                          uint32_t n, attn_next next, float (*s)[TD_ATTN_KEYS]) {
  const float *q[QUERIES];
  const elem *k[4];
  vf acc[QUERIES * 4];
  for (int i = 0; i < Q; i++)
    q[i] = a->q + (q0 + (uint32_t)i) * a->ldq;
  for (uint32_t i = 0; i < KEYS; i++) {
    const uint32_t at = j + (i < n ? i : 0);
    k[i] = a->rows ? (const elem *)(const void *)a->rows[at] : (const elem *)a->k + at * a->ldk;
  }
  TD_UNROLL for (int i = 0; i < Q * 4; i++) acc[i] = vf_zero();
  const char *ahead = next.at;
  uint32_t d = 0;
  for (; d + VL <= a->k_dim; d += VL) {
    vf kv[KEYS];
    ahead = attn_fetch(next, ahead);
    TD_UNROLL for (int i = 0; i < KEYS; i++) kv[i] = load_kv(k[i] + d);
    TD_UNROLL for (int i = 0; i < Q; i++) {
      vf qv = vf_load(q[i] + d);
      TD_UNROLL for (int c = 0; c < KEYS; c++) acc[i * 4 + c] = vf_fma(qv, kv[c], acc[i * 4 + c]);
    }
  }
  uint32_t left = a->k_dim - d;
  if (left) {
    vf kv[KEYS];
    TD_UNROLL for (int i = 0; i < KEYS; i++) kv[i] = load_kv_n(k[i] + d, left);
    TD_UNROLL for (int i = 0; i < Q; i++) {
      vf qv = vf_load_n(q[i] + d, left);
      TD_UNROLL for (int c = 0; c < KEYS; c++) acc[i * 4 + c] = vf_fma(qv, kv[c], acc[i * 4 + c]);
    }
  }
  TD_UNROLL for (int i = 0; i < Q; i++) {
    float sum[4];
    vf_sum4(acc[i * 4], acc[i * 4 + 1], acc[i * 4 + 2], acc[i * 4 + 3], sum);
    for (uint32_t c = 0; c < KEYS; c++)
      s[i][j + c] = sum[c];
  }
}

// Turns scores [n_hidden, n) into probabilities relative to the new maximum, which is stored in m,
// followed by zeros; adds them to l. Returns the factor by which the old sums decay.
TD_INLINE float softmax_row(const td_attn_block_args *a, uint32_t q, float *s, uint32_t n) {
  for (uint32_t j = n; j < TD_ATTN_KEYS; j++)
    s[j] = -INFINITY;
  for (uint32_t j = 0; a->n_hidden && j < a->n_hidden[q]; j++)
    s[j] = -INFINITY;
  vf max = vf_set1(a->m[q]);
  for (uint32_t j = 0; j < n; j += VL)
    max = vf_max(vf_load(s + j), max);
  float m = vf_max_all(max);
  vf shift = vf_set1(m), sum = vf_zero();
  for (uint32_t j = 0; j < TD_ATTN_KEYS; j += VL) {
    if (j >= n) break;
    vf p = vf_exp(vf_sub(vf_load(s + j), shift));
    sum = vf_add(sum, p);
    vf_store(s + j, p);
  }
  float decay = expf(a->m[q] - m);
  a->l[q] = a->l[q] * decay + vf_sum(sum);
  a->m[q] = m;
  return decay;
}

// acc[q][d..] = acc * decay + sum over keys [0, n[q]) of p * v, for W vectors of values. With W ==
// 1 and left != 0, the vector has only `left` elements.
TD_INLINE void value_tile(const int Q, const int W, const bool is_spread,
                          const td_attn_block_args *a, uint32_t q0, uint32_t d, uint32_t left,
                          const uint32_t *n, const float *decay, attn_next next,
                          float (*p)[TD_ATTN_KEYS]) {
  vf acc[QUERIES * VALUES];
  uint32_t common = n[0];
  for (int i = 1; i < Q; i++)
    common = n[i] < common ? n[i] : common;
  TD_UNROLL for (int i = 0; i < Q; i++) {
    const float *from = a->acc + (q0 + (uint32_t)i) * a->ldacc + d;
    TD_UNROLL for (int c = 0; c < W; c++) {
      vf old = left ? vf_load_n(from, left) : vf_load(from + c * VL);
      acc[i * W + c] = vf_mul(old, vf_set1(decay[i]));
    }
  }
  const char *ahead = next.at;
  for (uint32_t j = 0; j < common; j++) {
    const elem *v = value_at(a, is_spread, j, d);
    vf vv[VALUES];
    ahead = attn_fetch(next, ahead);
    TD_UNROLL for (int c = 0; c < W; c++) {
      vv[c] = left ? load_kv_n(v, left) : load_kv(v + c * VL);
    }
    TD_UNROLL for (int i = 0; i < Q; i++) {
      vf weight = vf_set1(p[i][j]);
      TD_UNROLL for (int c = 0; c < W; c++) {
        acc[i * W + c] = vf_fma(weight, vv[c], acc[i * W + c]);
      }
    }
  }
  TD_UNROLL for (int i = 0; i < Q; i++) {
    for (uint32_t j = common; j < n[i]; j++) {
      const elem *v = value_at(a, is_spread, j, d);
      vf weight = vf_set1(p[i][j]);
      TD_UNROLL for (int c = 0; c < W; c++) {
        vf vv = left ? load_kv_n(v, left) : load_kv(v + c * VL);
        acc[i * W + c] = vf_fma(weight, vv, acc[i * W + c]);
      }
    }
    float *to = a->acc + (q0 + (uint32_t)i) * a->ldacc + d;
    TD_UNROLL for (int c = 0; c < W; c++) {
      if (left)
        vf_store_n(to, acc[i * W + c], left);
      else
        vf_store(to + c * VL, acc[i * W + c]);
    }
  }
}

// Queries computed together: QUERIES of them or one, each of which sees some key.
typedef struct {
  uint32_t q, most; // the first query; maximum number of keys that any of them sees
  bool is_one;
} attn_tile;

typedef struct {
  const td_attn_block_args *a;
  uint32_t q0, n_tiles;
  attn_tile tiles[GROUP_QUERIES];
  float decay[GROUP_QUERIES];
  _Alignas(64) float s[GROUP_QUERIES][TD_ATTN_KEYS]; // scores, then probabilities
} attn_group;

// Cuts queries [q0, end) into tiles.
static void make_tiles(attn_group *g, uint32_t end) {
  g->n_tiles = 0;
  for (uint32_t q = g->q0; q < end;) {
    const uint32_t *n = g->a->n_visible + q;
    attn_tile t = {.q = q, .most = n[0], .is_one = true};
    if (q + QUERIES <= end && n[0] && n[1] && n[2] && n[3]) {
      t.is_one = false;
      for (int i = 1; i < QUERIES; i++)
        t.most = n[i] > t.most ? n[i] : t.most;
    }
    if (t.most) g->tiles[g->n_tiles++] = t;
    q += t.is_one ? 1 : QUERIES;
  }
}

static attn_next score_keys(attn_group *g, uint32_t begin, uint32_t end, attn_next next) {
  const td_attn_block_args *a = g->a;
  for (const attn_tile *t = g->tiles; t < g->tiles + g->n_tiles; t++) {
    const uint32_t last = t->most < end ? t->most : end, i = t->q - g->q0;
    for (uint32_t j = begin; j < last; j += KEYS) {
      if (t->is_one) {
        score_tile(1, a, t->q, j, t->most - j, next, g->s + i);
      } else {
        score_tile(QUERIES, a, t->q, j, t->most - j, next, g->s + i);
      }
      next = attn_next_on(next, a->k_dim / VL);
    }
  }
  return next;
}

static attn_next score_all(attn_group *g, attn_next next) {
  const uint32_t fit = KEY_BYTES / (g->a->k_dim * (uint32_t)sizeof(elem)) / KEYS * KEYS;
  const uint32_t step = fit > KEYS ? fit : KEYS;
  for (uint32_t j = 0; j < TD_ATTN_KEYS; j += step)
    next = score_keys(g, j, j + step, next);
  return next;
}

// Transposes keys; keys that no query sees become zeros.
static void turn_keys(const td_attn_block_args *a) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < a->n_q; i++)
    n = a->n_visible[i] > n ? a->n_visible[i] : n;
  const size_t row_bytes = a->ldk * sizeof(float);
  for (uint32_t j = 0; j < TD_ATTN_KEYS; j += VL) {
    const char *from = (const char *)a->k + j * row_bytes;
    const uint32_t n_rows = n < j ? 0 : n - j < VL ? n - j : VL;
    for (uint32_t d = 0; d < a->k_dim; d += 4) {
      const uint32_t left = a->k_dim - d;
      vi of[4];
      transpose_rows(from + d * sizeof(float), row_bytes, n_rows, left * sizeof(float), of);
      for (uint32_t i = 0; i < 4 && i < left; i++)
        vf_store(a->transposed + (size_t)(d + i) * TD_ATTN_KEYS + j, (vf)of[i]);
    }
  }
}

// s[q][j] for Q queries and VALUES vectors of transposed keys from j on.
TD_INLINE void turned_tile(const int Q, const td_attn_block_args *a, uint32_t q0, uint32_t j,
                           attn_next next, float (*s)[TD_ATTN_KEYS]) {
  const float *q[QUERIES], *k = a->transposed + j;
  const char *ahead = next.at;
  vf acc[QUERIES * VALUES];
  for (int i = 0; i < Q; i++)
    q[i] = a->q + (q0 + (uint32_t)i) * a->ldq;
  TD_UNROLL for (int i = 0; i < Q * VALUES; i++) acc[i] = vf_zero();
  for (uint32_t d = 0; d < a->k_dim; d++, k += TD_ATTN_KEYS) {
    vf kv[VALUES];
    ahead = attn_fetch(next, ahead);
    TD_UNROLL for (int c = 0; c < VALUES; c++) kv[c] = vf_load(k + c * VL);
    TD_UNROLL for (int i = 0; i < Q; i++) {
      vf qv = vf_set1(q[i][d]);
      TD_UNROLL for (int c = 0; c < VALUES; c++) {
        acc[i * VALUES + c] = vf_fma(qv, kv[c], acc[i * VALUES + c]);
      }
    }
  }
  TD_UNROLL for (int i = 0; i < Q; i++) {
    TD_UNROLL for (int c = 0; c < VALUES; c++) vf_store(s[i] + j + c * VL, acc[i * VALUES + c]);
  }
}

static attn_next score_turned(attn_group *g, attn_next next) {
  for (const attn_tile *t = g->tiles; t < g->tiles + g->n_tiles; t++) {
    const uint32_t i = t->q - g->q0;
    for (uint32_t j = 0; j < t->most; j += VALUES * VL) {
      if (t->is_one) {
        turned_tile(1, g->a, t->q, j, next, g->s + i);
      } else {
        turned_tile(QUERIES, g->a, t->q, j, next, g->s + i);
      }
      next = attn_next_on(next, g->a->k_dim);
    }
  }
  return next;
}

// Adds W vectors of values from dimension d on; left: see value_tile.
TD_INLINE attn_next add_values(const int W, const bool is_spread, attn_group *g, uint32_t d,
                               uint32_t left, attn_next next) {
  const td_attn_block_args *a = g->a;
  for (const attn_tile *t = g->tiles; t < g->tiles + g->n_tiles; t++) {
    const uint32_t i = t->q - g->q0, *n = a->n_visible + t->q;
    if (t->is_one) {
      value_tile(1, W, is_spread, a, t->q, d, left, n, g->decay + i, next, g->s + i);
    } else {
      value_tile(QUERIES, W, is_spread, a, t->q, d, left, n, g->decay + i, next, g->s + i);
    }
    next = attn_next_on(next, t->most);
  }
  return next;
}

// Adds all values.
TD_INLINE attn_next add_all(const bool is_spread, attn_group *g, attn_next next) {
  const uint32_t v_dim = g->a->v_dim;
  uint32_t d = 0;
  for (; d + VALUES * VL <= v_dim; d += VALUES * VL)
    next = add_values(VALUES, is_spread, g, d, 0, next);
  for (; d < v_dim; d += VL)
    next = add_values(1, is_spread, g, d, v_dim - d < VL ? v_dim - d : 0, next);
  return next;
}

static void attend_all(const td_attn_block_args *a) {
  const uint32_t n_tiles = (a->n_q + QUERIES - 1) / QUERIES;
  const bool is_turned = a->transposed && sizeof(elem) == sizeof(float);
  const uint32_t n_scores = is_turned ? TD_ATTN_KEYS / (VALUES * VL) * a->k_dim
                                      : TD_ATTN_KEYS / KEYS * (a->k_dim / VL);
  // If keys are also the values, half of the next ones is prefetched with the scores, half with the
  // values.
  const size_t n_bytes = a->next_v ? a->next_bytes : a->next_bytes / 2;
  const char *next_v = a->next_v || !a->next_k ? a->next_v : (const char *)a->next_k + n_bytes;
  attn_next next[2] = {
      attn_next_of(a->next_k, n_bytes, n_tiles * n_scores),
      attn_next_of(next_v, n_bytes, n_tiles * TD_ATTN_KEYS * (a->v_dim / (VALUES * VL))),
  };
  if (is_turned) turn_keys(a);
  attn_group g = {.a = a};
  for (; g.q0 < a->n_q; g.q0 += GROUP_QUERIES) {
    const uint32_t end = a->n_q - g.q0 < GROUP_QUERIES ? a->n_q : g.q0 + GROUP_QUERIES;
    make_tiles(&g, end);
    next[0] = is_turned ? score_turned(&g, next[0]) : score_all(&g, next[0]);
    for (uint32_t i = 0; g.q0 + i < end; i++) {
      const uint32_t n = a->n_visible[g.q0 + i];
      if (n) g.decay[i] = softmax_row(a, g.q0 + i, g.s[i], n);
    }
    next[1] = a->rows ? add_all(true, &g, next[1]) : add_all(false, &g, next[1]);
  }
}
