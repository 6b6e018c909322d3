// kernels/cpu/linear/linear_kmajor.h - y = W x for column-major INT4 (TD_LAYOUT_GPTQ,
// TD_LAYOUT_AWQ).
// Include after an ISA's codes and
//   Q4_TABLE                                       see q4.h
//   VECTORS, STRIP, WHOLE_COLS, row_of, zeros_of, scales_of, decode, dot_columns
//                                                  of a layout: kmajor_gptq.h, kmajor_awq.h
//
// A lane is a row. A strip is VECTORS VL rows beginning at a multiple of 8; row_of maps lanes to
// rows. Consecutive columns are a row of words apart in memory, so a strip is wide enough to read
// at least two adjacent cache lines per column; single lines come at half the speed.
//
// For one token, products are summed while codes are read. For more tokens a run of columns, no
// longer than a group, is decoded into L1 with zero points subtracted, and used for all tokens.
// Either way every (row, token) pair has a sum over the products of one group, in the order of
// columns, and a total, to which sum times scale is added at the group's end.
#pragma once

#include "kernels/decl.h"

enum { RUN_TOKENS = 32, TILE_TOKENS = VL / 4 }; // tokens per tile: its sums are in registers

// Some rows times some tokens. Lives on the stack.
typedef struct {
  _Alignas(64) float w[RUN_COLS * STRIP]; // decoded; see decoded_at
  vf sum[RUN_TOKENS][VECTORS], total[RUN_TOKENS][VECTORS];
  const float *x[RUN_TOKENS];
  vf zero[VECTORS], scale[VECTORS];
  uint32_t row0, n_rows, n_tokens;
} strip;

// TILE_VECTORS vectors from v on times T tokens from t on, over the decoded columns [k, k + n).
TD_INLINE void multiply_tile(const int T, strip *s, int v, uint32_t t, uint32_t k, uint32_t n) {
  vf sum[TILE_TOKENS * TILE_VECTORS];
  const float *x[TILE_TOKENS];
  for (int j = 0; j < T; j++)
    x[j] = s->x[t + (uint32_t)j] + k;
  TD_UNROLL for (int i = 0; i < T * TILE_VECTORS; i++) {
    sum[i] = s->sum[t + (uint32_t)(i / TILE_VECTORS)][v + i % TILE_VECTORS];
  }
  const float *decoded = decoded_at(s->w, 0, (uint32_t)v);
  for (uint32_t c = 0; c < n; c++, decoded += TILE_VECTORS * VL) {
    vf w[TILE_VECTORS];
    TD_UNROLL for (int i = 0; i < TILE_VECTORS; i++) w[i] = vf_load(decoded + i * VL);
    TD_UNROLL for (int i = 0; i < T * TILE_VECTORS; i++) {
      sum[i] = vf_fma(w[i % TILE_VECTORS], vf_set1(x[i / TILE_VECTORS][c]), sum[i]);
    }
  }
  TD_UNROLL for (int i = 0; i < T * TILE_VECTORS; i++) {
    s->sum[t + (uint32_t)(i / TILE_VECTORS)][v + i % TILE_VECTORS] = sum[i];
  }
}

static void multiply(strip *s, uint32_t k, uint32_t n) {
  for (int v = 0; v < VECTORS; v += TILE_VECTORS) {
    uint32_t t = 0;
    for (; t + TILE_TOKENS <= s->n_tokens; t += TILE_TOKENS)
      multiply_tile(TILE_TOKENS, s, v, t, k, n);
    for (; t < s->n_tokens; t++)
      multiply_tile(1, s, v, t, k, n);
  }
}

static void end_group(strip *s) {
  for (uint32_t t = 0; t < s->n_tokens; t++) {
    for (int v = 0; v < VECTORS; v++) {
      s->total[t][v] = vf_fma(s->sum[t][v], s->scale[v], s->total[t][v]);
      s->sum[t][v] = vf_zero();
    }
  }
}

// Adds the products of some columns from k on, up to the group's end at most. Returns the number of
// columns.
static uint32_t add_columns(strip *s, const td_weight *w, uint32_t k) {
  uint32_t n = run_length(w, k, w->cols / WHOLE_COLS * WHOLE_COLS - k);
  if (s->n_tokens > 1 || s->n_rows < STRIP || n == 0) {
    n = run_length(w, k, RUN_COLS);
    decode(w, s->row0, s->n_rows, k, n, s->zero, s->w);
    multiply(s, k, n);
  } else if (w->zero) {
    dot_columns(true, w, s->row0, k, n, s->zero, s->x[0] + k, s->sum[0]);
  } else {
    dot_columns(false, w, s->row0, k, n, s->zero, s->x[0] + k, s->sum[0]);
  }
  return n;
}

// Writes the rows of the strip that are in [row_begin, row_end).
static void write_strip(const strip *s, const td_linear_args *a, uint32_t t0) {
  for (uint32_t t = 0; t < s->n_tokens; t++) {
    _Alignas(64) float total[STRIP];
    for (int v = 0; v < VECTORS; v++)
      vf_store(total + v * VL, s->total[t][v]);
    for (uint32_t i = 0; i < STRIP; i++) {
      uint32_t row = s->row0 + row_of(i);
      if (row >= a->row_begin && row < a->row_end) {
        a->y[(t0 + t) * a->ldy + row - a->y_row0] = total[i];
      }
    }
  }
}

static void linear_strip(strip *s, const td_linear_args *a, uint32_t t0) {
  const td_weight *w = a->w;
  for (uint32_t t = 0; t < s->n_tokens; t++) {
    s->x[t] = a->x + (a->x_rows ? a->x_rows[t0 + t] : t0 + t) * a->ldx;
    for (int v = 0; v < VECTORS; v++)
      s->sum[t][v] = s->total[t][v] = vf_zero();
  }
  for (uint32_t k = 0; k < w->cols;) {
    size_t group = k / w->scale_cols;
    if (k % w->scale_cols == 0) {
      zeros_of(w, group, s->row0, s->n_rows, s->zero);
      scales_of(w, group, s->row0, s->n_rows, s->scale);
    }
    k += add_columns(s, w, k);
    if (k == w->cols || k % w->scale_cols == 0) end_group(s);
  }
  write_strip(s, a, t0);
}

static inline void linear_kmajor(const td_linear_args *a) {
  strip s;
  for (uint32_t row = a->row_begin / 8 * 8; row < a->row_end; row += STRIP) {
    s.row0 = row;
    s.n_rows = a->w->rows - row < STRIP ? a->w->rows - row : STRIP;
    for (uint32_t t = 0; t < a->n_tokens; t += RUN_TOKENS) {
      s.n_tokens = a->n_tokens - t < RUN_TOKENS ? a->n_tokens - t : RUN_TOKENS;
      linear_strip(&s, a, t);
    }
  }
}
