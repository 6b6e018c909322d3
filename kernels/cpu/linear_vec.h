// kernels/cpu/linear_vec.h - y = W x in vectors, for each ISA's and dtype's file to include after
// its vec.h and these definitions:
//   elem, load2, load2_n   the stored element; 2 VL of them (n < 2 VL of them) as floats
//   SCALED                 1 where sums are taken run by run and scaled
//   DOWN                   load2 gives weights over this power of two, which the scale makes good
//   has_nan                whether some codes are NaN although load2 does not show it
//
// Every (row, token) pair has one accumulator of VL lanes, element k of a run goes to lane k % VL
// in the order of k, and a run ends with a scale block or after RUN columns. All paths keep to
// that, so they agree to the last bit:
//   1 token         rows straight from memory, GEMV_ROWS at a time
//   2 to 4 tokens   the same with BATCH_ROWS, each weight decoded once for all tokens
//   more            gemm_vec.h, each weight decoded once for a block of tokens
#ifndef KERNELS_CPU_LINEAR_VEC_H
#define KERNELS_CPU_LINEAR_VEC_H

#include <math.h>

#include "kernels/cpu/numeric.h"
#include "kernels/cpu/vec_math.h"
#include "kernels/decl.h"

#define TD_UNROLL _Pragma("GCC unroll 32")

enum { RUN = 512 };

// Where a scale cannot take DOWN along, the sum does.
TD_INLINE bool sum_takes_down(float scale) {
  return DOWN > 1 && !(fabsf(scale) < 0x1p127f / DOWN);
}

TD_INLINE const float *token_x(const td_linear_args *a, uint32_t t) {
  return a->x + (a->x_rows ? a->x_rows[t] : t) * a->ldx;
}

// How far ahead of itself a single token's product asks for weights: the processor's own prefetch
// loses each row at a page's end, and there are GEMV_ROWS streams. Behind the rows' ends come the
// rows after them.
enum { AHEAD_BYTES = 2048 };
TD_INLINE size_t bytes_ahead(const int R, const td_weight *w, uint32_t k) {
  size_t row_bytes = w->cols * sizeof(elem);
  return AHEAD_BYTES + (k * sizeof(elem) + AHEAD_BYTES < row_bytes ? 0 : (R - 1) * row_bytes);
}

TD_INLINE const elem *row_data(const td_linear_args *a, uint32_t row) {
  return (const elem *)a->w->data + (size_t)row * a->w->cols;
}

// acc[r][t] += the run's products, weights from memory.
TD_INLINE void dot_raw(const int R, const int T, const elem *const *w, const float *const *x,
                       uint32_t k, uint32_t n, size_t ahead, vf *acc) {
  uint32_t end = k + n;
  vf lo, hi, x_lo[BATCH_TOKENS], x_hi[BATCH_TOKENS];
  for (; k + 2 * VL <= end; k += 2 * VL) {
    TD_UNROLL for (int t = 0; t < T; t++) {
      x_lo[t] = vf_load(x[t] + k);
      x_hi[t] = vf_load(x[t] + k + VL);
    }
    TD_UNROLL for (int r = 0; r < R; r++) {
      for (size_t b = 0; b + 64 <= 2 * VL * sizeof(elem); b += 64) // a line's worth, or leave it
        __builtin_prefetch((const char *)((uintptr_t)(w[r] + k) + ahead + b));
      load2(w[r] + k, &lo, &hi);
      TD_UNROLL for (int t = 0; t < T; t++) {
        acc[r * T + t] = vf_fma(lo, x_lo[t], acc[r * T + t]);
        acc[r * T + t] = vf_fma(hi, x_hi[t], acc[r * T + t]);
      }
    }
  }
  uint32_t left = end - k;
  if (left == 0) return;
  for (int t = 0; t < T; t++) {
    x_lo[t] = left < VL ? vf_load_n(x[t] + k, left) : vf_load(x[t] + k);
    x_hi[t] = left > VL ? vf_load_n(x[t] + k + VL, left - VL) : vf_zero();
  }
  TD_UNROLL for (int r = 0; r < R; r++) {
    load2_n(w[r] + k, left, &lo, &hi);
    TD_UNROLL for (int t = 0; t < T; t++) {
      acc[r * T + t] = vf_fma(lo, x_lo[t], acc[r * T + t]);
      acc[r * T + t] = vf_fma(hi, x_hi[t], acc[r * T + t]);
    }
  }
}

TD_INLINE void raw_tile(const int R, const int T, const td_linear_args *a, uint32_t row) {
  const elem *w[R];
  const float *x[T], *scales[R];
  vf total[R * T], acc[R * T];
  int nan[R];
  for (int r = 0; r < R; r++) {
    w[r] = row_data(a, row + (uint32_t)r);
    scales[r] = row_scales(a->w, row + (uint32_t)r);
    nan[r] = 0;
  }
  for (int t = 0; t < T; t++)
    x[t] = token_x(a, (uint32_t)t);
  TD_UNROLL for (int i = 0; i < R * T; i++) total[i] = vf_zero();
  uint32_t n;
  for (uint32_t k = 0; k < a->w->cols; k += n) {
    n = run_length(a->w, k, RUN);
    size_t ahead = bytes_ahead(R, a->w, k);
    if (!SCALED) {
      dot_raw(R, T, w, x, k, n, ahead, total);
      continue;
    }
    TD_UNROLL for (int i = 0; i < R * T; i++) acc[i] = vf_zero();
    dot_raw(R, T, w, x, k, n, ahead, acc);
    TD_UNROLL for (int r = 0; r < R; r++) {
      float scale = scales[r][k / a->w->scale_cols];
      nan[r] |= has_nan(w[r] + k, n);
      if (!sum_takes_down(scale)) {
        scale *= DOWN;
      } else {
        TD_UNROLL for (int t = 0; t < T; t++)
            acc[r * T + t] = vf_mul(acc[r * T + t], vf_set1(DOWN));
      }
      TD_UNROLL for (int t = 0; t < T; t++) {
        total[r * T + t] = vf_fma(acc[r * T + t], vf_set1(scale), total[r * T + t]);
      }
    }
  }
  for (int r = 0; r < R; r++) {
    for (int t = 0; t < T; t++) {
      float sum = nan[r] ? NAN : vf_sum(total[r * T + t]);
      a->y[(size_t)t * a->ldy + row + (uint32_t)r - a->y_row0] = sum;
    }
  }
}

#define RAW_ROWS(name, R, T)                                                                       \
  static void name(const td_linear_args *a) {                                                      \
    uint32_t row = a->row_begin;                                                                   \
    for (; row + (R) <= a->row_end; row += (R))                                                    \
      raw_tile(R, T, a, row);                                                                      \
    for (; row < a->row_end; row++)                                                                \
      raw_tile(1, T, a, row);                                                                      \
  }
RAW_ROWS(raw_1, GEMV_ROWS, 1)
RAW_ROWS(raw_2, BATCH_ROWS, 2)
RAW_ROWS(raw_3, BATCH_ROWS, 3)
RAW_ROWS(raw_4, BATCH_ROWS, 4)

static float finish(const td_weight *w, bool nan, float sum) {
  (void)w;
  return nan ? NAN : sum;
}

typedef float gemm_scale;
TD_INLINE vf lanes_of(gemm_scale scale) {
  return vf_set1(scale);
}
#include "kernels/cpu/gemm_vec.h"

// As many whole runs as a window holds.
static void find_window(gemm *g) {
  const td_weight *w = g->a->w;
  g->n = g->n_runs = g->n_vectors = 0;
  while (g->k + g->n < w->cols) {
    uint32_t n = run_length(w, g->k + g->n, RUN), n_vectors = (n + VL - 1) / VL;
    if (g->n_vectors + n_vectors > WINDOW_VECTORS) return;
    g->run_vectors[g->n_runs++] = n_vectors;
    g->n_vectors += n_vectors;
    g->n += n;
  }
}

static void pack_token(const gemm *g, const float *x, size_t step, float *out) {
  uint32_t k = 0;
  for (uint32_t run = 0; run < g->n_runs; run++) {
    uint32_t end = k + run_length(g->a->w, g->k + k, RUN);
    for (; k + VL <= end; k += VL, out += step)
      vf_store(out, vf_load(x + k));
    if (k == end) continue;
    vf_store(out, vf_load_n(x + k, end - k));
    out += step;
    k = end;
  }
}

static void decode_row(gemm *g, uint32_t row, uint32_t place, float *out) {
  const elem *w = row_data(g->a, g->row0 + row) + g->k;
  const float *scales = row_scales(g->a->w, g->row0 + row);
  const size_t step = GEMM_ROWS * VL;
  g->nan[row] |= has_nan(w, g->n);
  uint32_t k = 0;
  vf lo, hi;
  for (uint32_t run = 0; run < g->n_runs; run++) {
    uint32_t end = k + run_length(g->a->w, g->k + k, RUN);
    if (SCALED) {
      float scale = scales[(g->k + k) / g->a->w->scale_cols];
      bool sum_takes = sum_takes_down(scale);
      g->scale[place][run] = sum_takes ? scale : scale * DOWN;
      g->up[place][run] = sum_takes ? DOWN : 1;
      g->any_up |= sum_takes;
    }
    for (; k + 2 * VL <= end; k += 2 * VL, out += 2 * step) {
      load2(w + k, &lo, &hi);
      vf_store(out, lo);
      vf_store(out + step, hi);
    }
    if (k == end) continue;
    load2_n(w + k, end - k, &lo, &hi);
    vf_store(out, lo);
    if (end - k > VL) vf_store(out + step, hi);
    out += end - k > VL ? 2 * step : step;
    k = end;
  }
}

static const char *stored_row(const td_weight *w, uint32_t row, uint32_t k) {
  return (const char *)w->data + ((size_t)row * w->cols + k) * sizeof(elem);
}

static inline void linear_vec(const td_linear_args *a) {
  switch (a->n_tokens) {
  case 0: return;
  case 1: raw_1(a); return;
  case 2: raw_2(a); return;
  case 3: raw_3(a); return;
  case 4: raw_4(a); return;
  default: gemm_all(a);
  }
}

#endif
