// kernels/cpu/attn_vec.h - one block of attention in vectors, for each ISA's and cache dtype's file
// to include after its vec.h and these definitions: elem, and load_kv, load_kv_n, which give VL
// (the first n < VL) elements as floats.
//
// QUERIES at a time share the loads of keys and values; every (query, key) score has one
// accumulator over the dimensions, every (query, dimension) of the result one over the keys, in
// order, so a query's result does not depend on its neighbours.
#ifndef KERNELS_CPU_ATTN_VEC_H
#define KERNELS_CPU_ATTN_VEC_H

#include <math.h>

#include "kernels/cpu/vec_math.h"
#include "kernels/decl.h"

enum { QUERIES = 4, KEYS = VL == 16 ? 4 : 2, VALUES = VL == 16 ? 4 : 2 };

#define TD_UNROLL _Pragma("GCC unroll 8")

// What comes next, on its way into L2: so many lines a step that all of it comes in time.
typedef struct {
  const char *at, *end;
  const char *then; // as many bytes again, behind those; NULL: none
  size_t n_bytes;
  uint32_t n_lines; // a step
} attn_next;

static inline attn_next attn_next_of(const td_attn_block_args *a, uint32_t n_steps) {
  if (!a->next_k || !n_steps) return (attn_next){0};
  const size_t n_lines = a->next_bytes / 64 * (a->next_v ? 2 : 1);
  return (attn_next){.at = a->next_k,
                     .end = (const char *)a->next_k + a->next_bytes,
                     .then = a->next_v,
                     .n_bytes = a->next_bytes,
                     .n_lines = (uint32_t)((n_lines + n_steps - 1) / n_steps)};
}

TD_INLINE void attn_fetch(attn_next *next) {
  for (uint32_t i = 0; i < next->n_lines; i++) {
    __builtin_prefetch(next->at, 0, 2);
    next->at += 64;
    if (next->at < next->end) continue;
    if (!next->then) {
      next->n_lines = 0;
      return;
    }
    next->at = next->then;
    next->end = next->then + next->n_bytes;
    next->then = NULL;
  }
}

// s[q][j] for Q queries and KEYS keys from j on, of which the first n exist.
TD_INLINE void score_tile(const int Q, const td_attn_block_args *a, uint32_t q0, uint32_t j,
                          uint32_t n, attn_next *ahead, float (*s)[TD_ATTN_KEYS]) {
  const float *q[QUERIES];
  const elem *k[4];
  vf acc[QUERIES * 4];
  for (int i = 0; i < Q; i++)
    q[i] = a->q + (q0 + (uint32_t)i) * a->ldq;
  for (uint32_t i = 0; i < KEYS; i++) {
    k[i] = (const elem *)a->k + (size_t)(j + (i < n ? i : 0)) * a->ldk;
  }
  TD_UNROLL for (int i = 0; i < Q * 4; i++) acc[i] = vf_zero();
  attn_next next = *ahead;
  uint32_t d = 0;
  for (; d + VL <= a->k_dim; d += VL) {
    vf kv[KEYS];
    attn_fetch(&next);
    TD_UNROLL for (int i = 0; i < KEYS; i++) kv[i] = load_kv(k[i] + d);
    TD_UNROLL for (int i = 0; i < Q; i++) {
      vf qv = vf_load(q[i] + d);
      TD_UNROLL for (int c = 0; c < KEYS; c++) acc[i * 4 + c] = vf_fma(qv, kv[c], acc[i * 4 + c]);
    }
  }
  *ahead = next;
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

// Turns the first n scores into probabilities relative to the new maximum, which it keeps, and
// zeros behind them; adds to l. Returns what the old sums are worth now.
TD_INLINE float softmax_row(const td_attn_block_args *a, uint32_t q, float *s, uint32_t n) {
  for (uint32_t j = n; j < TD_ATTN_KEYS; j++)
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

// acc[q][d..] = acc * decay + sum over keys [0, n[q]) of p * v, for VALUES vectors (W of them; the
// last short by having `left` elements when W is 1 and left is not 0).
TD_INLINE void value_tile(const int Q, const int W, const td_attn_block_args *a, uint32_t q0,
                          uint32_t d, uint32_t left, const uint32_t *n, const float *decay,
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
  const elem *v = (const elem *)a->v + d;
  for (uint32_t j = 0; j < common; j++) {
    vf vv[VALUES];
    TD_UNROLL for (int c = 0; c < W; c++) {
      vv[c] = left ? load_kv_n(v + j * a->ldv, left) : load_kv(v + j * a->ldv + c * VL);
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
      vf weight = vf_set1(p[i][j]);
      TD_UNROLL for (int c = 0; c < W; c++) {
        vf vv = left ? load_kv_n(v + j * a->ldv, left) : load_kv(v + j * a->ldv + c * VL);
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

// Queries [q0, q0 + Q), each of which sees some key.
TD_INLINE void attend(const int Q, const td_attn_block_args *a, uint32_t q0, attn_next *next) {
  _Alignas(64) float s[QUERIES][TD_ATTN_KEYS];
  const uint32_t *n = a->n_visible + q0;
  float decay[QUERIES];
  uint32_t most = 0;
  for (int i = 0; i < Q; i++)
    most = n[i] > most ? n[i] : most;
  for (uint32_t j = 0; j < most; j += KEYS)
    score_tile(Q, a, q0, j, most - j, next, s);
  for (int i = 0; i < Q; i++)
    decay[i] = softmax_row(a, q0 + (uint32_t)i, s[i], n[i]);
  uint32_t d = 0;
  for (; d + VALUES * VL <= a->v_dim; d += VALUES * VL) {
    value_tile(Q, VALUES, a, q0, d, 0, n, decay, s);
  }
  for (; d + VL <= a->v_dim; d += VL)
    value_tile(Q, 1, a, q0, d, 0, n, decay, s);
  if (d < a->v_dim) value_tile(Q, 1, a, q0, d, a->v_dim - d, n, decay, s);
}

static void attend_4(const td_attn_block_args *a, uint32_t q0, attn_next *next) {
  attend(QUERIES, a, q0, next);
}

static void attend_1(const td_attn_block_args *a, uint32_t q0, attn_next *next) {
  attend(1, a, q0, next);
}

static void attend_all(const td_attn_block_args *a) {
  uint32_t n_tiles = (a->n_q + QUERIES - 1) / QUERIES * (TD_ATTN_KEYS / KEYS);
  attn_next next = attn_next_of(a, n_tiles * (a->k_dim / VL));
  uint32_t q = 0;
  while (q < a->n_q) {
    const uint32_t *n = a->n_visible + q;
    if (q + QUERIES <= a->n_q && n[0] && n[1] && n[2] && n[3]) {
      attend_4(a, q, &next);
      q += QUERIES;
    } else {
      if (n[0]) attend_1(a, q, &next);
      q++;
    }
  }
}

#endif
