// kernels/cpu/linear_cols.h - y = W x for INT4 stored by columns (TD_LAYOUT_GPTQ, TD_LAYOUT_AWQ),
// in vectors, for each ISA's and layout's file to include after its vec.h and
//   Q4_CODES                                       see q4.h
//   VECTORS, decode, scales_of, zeros_of, row_of   a layout's: cols_gptq.h, cols_awq.h
//
// A lane is a row here. A strip is VECTORS VL rows, beginning at a multiple of 8; row_of says which
// of them is which lane. A run of its columns, no longer than a group, is decoded into L1, zero
// points taken off, and then used for all tokens. Every (row, token) pair has a sum, the products
// of one group, in the order of the columns, and a total, to which the sum times the scale is added
// at the group's end: the same for any number of tokens.
#ifndef KERNELS_CPU_LINEAR_COLS_H
#define KERNELS_CPU_LINEAR_COLS_H

#include "kernels/decl.h"

enum { RUN_COLS = 32, RUN_TOKENS = 32 };

// Some rows times some tokens; lives on the stack.
typedef struct {
  _Alignas(64) float w[RUN_COLS][STRIP]; // decoded
  vf sum[RUN_TOKENS][VECTORS], total[RUN_TOKENS][VECTORS];
  const float *x[RUN_TOKENS];
  vf zero[VECTORS], scale[VECTORS];
  uint32_t row0, n_rows, n_tokens;
} strip;

static void multiply(strip *s, uint32_t k, uint32_t n) {
  for (uint32_t t = 0; t < s->n_tokens; t++) {
    vf sum[VECTORS];
    for (int v = 0; v < VECTORS; v++)
      sum[v] = s->sum[t][v];
    for (uint32_t c = 0; c < n; c++) {
      vf x = vf_set1(s->x[t][k + c]);
      for (int v = 0; v < VECTORS; v++)
        sum[v] = vf_fma(vf_load(&s->w[c][v * VL]), x, sum[v]);
    }
    for (int v = 0; v < VECTORS; v++)
      s->sum[t][v] = sum[v];
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

// Rows of the strip that lie in [row_begin, row_end) are written.
static void linear_strip(strip *s, const td_linear_args *a, uint32_t t0) {
  const td_weight *w = a->w;
  for (uint32_t t = 0; t < s->n_tokens; t++) {
    s->x[t] = a->x + (a->x_rows ? a->x_rows[t0 + t] : t0 + t) * a->ldx;
    for (int v = 0; v < VECTORS; v++)
      s->sum[t][v] = s->total[t][v] = vf_zero();
  }
  uint32_t n;
  for (uint32_t k = 0; k < w->cols; k += n) {
    size_t group = k / w->scale_cols;
    if (k % w->scale_cols == 0) {
      zeros_of(w, group, s->row0, s->n_rows, s->zero);
      scales_of(w, group, s->row0, s->n_rows, s->scale);
    }
    n = run_length(w, k, RUN_COLS);
    decode(w, s->row0, s->n_rows, k, n, s->zero, s->w);
    multiply(s, k, n);
    if (k + n == w->cols || (k + n) % w->scale_cols == 0) end_group(s);
  }
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

static inline void linear_cols(const td_linear_args *a) {
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

#endif
