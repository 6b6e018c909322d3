// kernels/cpu/delta/delta_vec.h - vector kernels of gated delta nets. Included by each ISA's
// delta.c after its vec.h.
//
// delta_rule: a state of k_dim x 32 floats (16 KiB for k_dim 128) stays in the L1 cache while all
// positions of a call pass over it. A position takes 3 fused operations, a product, a load and a
// store for each vector of the state: one pass updates it and sums q S of the position and k S of
// the next. With 16 registers k S takes a pass of its own. Where each row of the state has a decay
// g of its own, k g stands for k in k S: a product a row, not one of the columns.
#pragma once

#include "kernels/cpu/common/vec_math.h"
#include "kernels/decl.h"

#define TD_UNROLL _Pragma("GCC unroll 8")

// Vectors of a row of the state; rows whose sums are kept apart, so that eight sums hide the
// latency of the fused operations.
enum { DELTA_VECTORS = TD_DELTA_COLUMNS / VL, DELTA_ROWS = 8 / DELTA_VECTORS };
// Whether registers hold the sums of this token's q S and of the next one's k S.
enum { IN_ONE_PASS = DELTA_VECTORS <= 2 };

TD_INLINE vf sigmoid_of(vf x) {
  return vf_div(vf_set1(1), vf_add(vf_set1(1), vf_exp(vf_sub(vf_zero(), x))));
}

void TD_VEC_NAME(sigmoid_row)(const td_sigmoid_row_args *a) {
  size_t i = 0;
  for (; i + VL <= a->n; i += VL)
    vf_store(a->out + i, vf_mul(sigmoid_of(vf_load(a->gate + i)), vf_load(a->x + i)));
  const uint32_t left = (uint32_t)(a->n - i);
  if (!left) return;
  vf x = vf_load_n(a->x + i, left);
  vf_store_n(a->out + i, vf_mul(sigmoid_of(vf_load_n(a->gate + i, left)), x), left);
}

void TD_VEC_NAME(conv_silu)(const td_conv_silu_args *a) {
  size_t i = 0;
  for (; i + VL <= a->n; i += VL) {
    vf sum = vf_zero();
    for (uint32_t j = 0; j < a->n_taps; j++)
      sum = vf_fma(vf_load(a->w + j * a->ldw + i), vf_load(a->x[j] + i), sum);
    vf_store(a->out + i, vf_mul(sum, sigmoid_of(sum)));
  }
  const uint32_t left = (uint32_t)(a->n - i);
  if (!left) return;
  vf sum = vf_zero();
  for (uint32_t j = 0; j < a->n_taps; j++)
    sum = vf_fma(vf_load_n(a->w + j * a->ldw + i, left), vf_load_n(a->x[j] + i, left), sum);
  vf_store_n(a->out + i, vf_mul(sum, sigmoid_of(sum)), left);
}

// The sums of DELTA_ROWS rows, added up pairwise.
TD_INLINE void add_rows(vf sum[DELTA_ROWS][DELTA_VECTORS], vf out[DELTA_VECTORS]) {
  TD_UNROLL for (int v = 0; v < DELTA_VECTORS; v++) {
    vf all = sum[0][v];
    TD_UNROLL for (int r = 1; r < DELTA_ROWS; r++) all = vf_add(all, sum[r][v]);
    out[v] = all;
  }
}

TD_INLINE void clear(vf sum[DELTA_ROWS][DELTA_VECTORS]) {
  TD_UNROLL for (int r = 0; r < DELTA_ROWS; r++) {
    TD_UNROLL for (int v = 0; v < DELTA_VECTORS; v++) sum[r][v] = vf_zero();
  }
}

// Of each row i of the state: k[i], or with decays of each row k[i] g[i].
typedef struct {
  const float *k, *g; // g NULL: no decays
} delta_keys;

TD_INLINE float key_of(delta_keys k, uint32_t row) {
  return k.g ? k.k[row] * k.g[row] : k.k[row];
}

// out = k S
TD_INLINE void recall(const float *state, delta_keys k, uint32_t k_dim, vf out[DELTA_VECTORS]) {
  vf sum[DELTA_ROWS][DELTA_VECTORS];
  uint32_t i = 0;
  clear(sum);
  for (; i + DELTA_ROWS <= k_dim; i += DELTA_ROWS) {
    TD_UNROLL for (int r = 0; r < DELTA_ROWS; r++) {
      const float *row = state + (size_t)(i + (uint32_t)r) * TD_DELTA_COLUMNS;
      const vf factor = vf_set1(key_of(k, i + (uint32_t)r));
      TD_UNROLL for (int v = 0; v < DELTA_VECTORS; v++) {
        sum[r][v] = vf_fma(factor, vf_load(row + v * VL), sum[r][v]);
      }
    }
  }
  for (; i < k_dim; i++) {
    TD_UNROLL for (int v = 0; v < DELTA_VECTORS; v++) {
      const float *at = state + (size_t)i * TD_DELTA_COLUMNS + v * VL;
      sum[0][v] = vf_fma(vf_set1(key_of(k, i)), vf_load(at), sum[0][v]);
    }
  }
  add_rows(sum, out);
}

// Row i of S = g S + k d; sum += q times that row and, where a token follows, known += its key
// times that row, in the order of recall.
TD_INLINE void update_row(float *row, vf g, float k, float q, const vf d[DELTA_VECTORS],
                          vf sum[DELTA_VECTORS], const delta_keys *next, uint32_t i,
                          vf known[DELTA_VECTORS]) {
  TD_UNROLL for (int v = 0; v < DELTA_VECTORS; v++) {
    const vf s = vf_fma(vf_set1(k), d[v], vf_mul(g, vf_load(row + v * VL)));
    vf_store(row + v * VL, s);
    sum[v] = vf_fma(vf_set1(q), s, sum[v]);
    if (next) known[v] = vf_fma(vf_set1(key_of(*next, i)), s, known[v]);
  }
}

// out = q S after the update by k, whose decays are of each row or, one for all, `decay`; d becomes
// next S, if next is not NULL.
TD_INLINE void update(const td_delta_rule_args *a, const float *q, delta_keys k, float decay,
                      const delta_keys *next, vf d[DELTA_VECTORS], vf out[DELTA_VECTORS]) {
  vf sum[DELTA_ROWS][DELTA_VECTORS], known[DELTA_ROWS][DELTA_VECTORS];
  const vf g = vf_set1(decay);
  uint32_t i = 0;
  clear(sum);
  clear(known);
  for (; i + DELTA_ROWS <= a->k_dim; i += DELTA_ROWS) {
    TD_UNROLL for (int r = 0; r < DELTA_ROWS; r++) {
      const uint32_t row = i + (uint32_t)r;
      update_row(a->state + (size_t)row * TD_DELTA_COLUMNS, k.g ? vf_set1(k.g[row]) : g, k.k[row],
                 q[row], d, sum[r], next, row, known[r]);
    }
  }
  for (; i < a->k_dim; i++)
    update_row(a->state + (size_t)i * TD_DELTA_COLUMNS, k.g ? vf_set1(k.g[i]) : g, k.k[i], q[i], d,
               sum[0], next, i, known[0]);
  add_rows(sum, out);
  if (next) add_rows(known, d);
}

// Elements of vector v of a row that has n_cols columns; at least VL: all.
TD_INLINE uint32_t columns_in(uint32_t n_cols, int v) {
  const uint32_t begin = (uint32_t)v * VL;
  return n_cols > begin ? n_cols - begin : 0;
}

// has_each: a decay of each row.
TD_INLINE void apply_rule(const td_delta_rule_args *a, bool has_each) {
  vf d[DELTA_VECTORS], result[DELTA_VECTORS];
  for (uint32_t t = 0; t < a->n_tokens; t++) {
    const float *q = a->q + t * a->ldk, *value = a->v + t * a->ldv, *gates = a->gates + t * a->ldg;
    const delta_keys k = {a->k + t * a->ldk, has_each ? gates : NULL};
    const delta_keys next = {k.k + a->ldk, has_each ? gates + a->ldg : NULL};
    const vf g = vf_set1(gates[0]), b = vf_set1(gates[has_each ? a->k_dim : 1]);
    if (t == 0 || !IN_ONE_PASS) recall(a->state, k, a->k_dim, d);
    TD_UNROLL for (int v = 0; v < DELTA_VECTORS; v++) {
      const uint32_t n = columns_in(a->n_cols, v);
      vf x = n >= VL ? vf_load(value + v * VL) : n ? vf_load_n(value + v * VL, n) : vf_zero();
      d[v] = vf_mul(b, vf_sub(x, has_each ? d[v] : vf_mul(g, d[v])));
    }
    if (IN_ONE_PASS && t + 1 < a->n_tokens) {
      update(a, q, k, gates[0], &next, d, result);
    } else {
      update(a, q, k, gates[0], NULL, d, result);
    }
    TD_UNROLL for (int v = 0; v < DELTA_VECTORS; v++) {
      const uint32_t n = columns_in(a->n_cols, v);
      float *out = a->out + t * a->ldo + v * VL;
      if (n >= VL) {
        vf_store(out, result[v]);
      } else if (n) {
        vf_store_n(out, result[v], n);
      }
    }
  }
}

void TD_VEC_NAME(delta_rule)(const td_delta_rule_args *a) {
  if (a->n_decays > 1) {
    apply_rule(a, true);
  } else {
    apply_rule(a, false);
  }
}

// softplus(x) = max(x, 0) + ln(1 + u) with u = e^-|x|, and ln(1 + u) = 2 artanh(u / (2 + u)), whose
// series in z = (u / (2 + u))^2 <= 1/9 is cut where the rest is below 2^-26 of it.
TD_INLINE vf softplus_of(vf x) {
  const vf u = vf_exp(vf_sub(vf_zero(), vf_max(vf_sub(vf_zero(), x), x)));
  const vf s = vf_div(u, vf_add(u, vf_set1(2)));
  const vf z = vf_mul(s, s);
  vf p = vf_set1(1.0f / 13);
  p = vf_fma(p, z, vf_set1(1.0f / 11));
  p = vf_fma(p, z, vf_set1(1.0f / 9));
  p = vf_fma(p, z, vf_set1(1.0f / 7));
  p = vf_fma(p, z, vf_set1(1.0f / 5));
  p = vf_fma(p, z, vf_set1(1.0f / 3));
  p = vf_fma(p, z, vf_set1(1));
  return vf_fma(vf_add(s, s), p, vf_max(vf_zero(), x));
}

TD_INLINE vf decay_of(vf x, vf rate, float bound) {
  if (bound == 0) return vf_exp(vf_mul(rate, softplus_of(x)));
  return vf_exp(vf_mul(vf_set1(bound), sigmoid_of(vf_sub(vf_zero(), vf_mul(rate, x)))));
}

void TD_VEC_NAME(decay_row)(const td_decay_row_args *a) {
  const vf rate = vf_set1(-a->rate);
  size_t i = 0;
  for (; i + VL <= a->n; i += VL) {
    const vf x = vf_add(vf_load(a->x + i), vf_load(a->bias + i));
    vf_store(a->out + i, decay_of(x, rate, a->bound));
  }
  const uint32_t left = (uint32_t)(a->n - i);
  if (!left) return;
  const vf x = vf_add(vf_load_n(a->x + i, left), vf_load_n(a->bias + i, left));
  vf_store_n(a->out + i, decay_of(x, rate, a->bound), left);
}
