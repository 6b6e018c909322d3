// kernels/cpu/linear_vec.h - y = W x in vectors, for each ISA's and dtype's file to include after
// its vec.h and these definitions:
//   elem, load2, load2_n   the stored element; 2 VL of them (n < 2 VL of them) as floats
//   SCALED                 1 where sums are taken run by run and scaled, by add_run
//   add_run                total + acc * scale
//   has_nan                whether some codes are NaN although load2 does not show it
//
// Every (row, token) pair has one accumulator of VL lanes, element k of a run goes to lane k % VL
// in the order of k, and a run ends with a scale block or after RUN columns. All paths keep to
// that, so they agree to the last bit:
//   1 token         rows straight from memory, GEMV_ROWS at a time
//   2 to 4 tokens   the same with BATCH_ROWS, each weight decoded once for all tokens
//   more            BLOCK_ROWS x up to RUN weights are decoded into L1/L2 and multiplied in
//                   register tiles of GEMM_ROWS x GEMM_TOKENS; totals rest in memory
#ifndef KERNELS_CPU_LINEAR_VEC_H
#define KERNELS_CPU_LINEAR_VEC_H

#include <math.h>

#include "kernels/cpu/numeric.h"
#include "kernels/cpu/vec_math.h"
#include "kernels/decl.h"

#define TD_UNROLL _Pragma("GCC unroll 8")

enum { RUN = 512, BLOCK_ROWS = 16, BLOCK_TOKENS = 16 * GEMM_TOKENS };

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
      TD_UNROLL for (int t = 0; t < T; t++) {
        total[r * T + t] = add_run(total[r * T + t], acc[r * T + t], scale);
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

// Some rows times some tokens; lives on the stack. Columns are taken by windows of whole runs.
typedef struct {
  _Alignas(64) float w[BLOCK_ROWS][RUN]; // decoded columns [k, k + n) of the rows: the window
  vf total[BLOCK_ROWS][BLOCK_TOKENS];    //
  const float *x[BLOCK_TOKENS];          //
  const float *scales[BLOCK_ROWS];       // of the row, by scale block
  int nan[BLOCK_ROWS];                   //
  uint32_t n_rows, n_tokens, k, n;       //
  uint32_t n_runs;                       // in the window
  struct {
    uint32_t n, scale_idx;
  } runs[RUN];
} block;

static void decode_window(block *b, const td_linear_args *a, uint32_t row) {
  for (uint32_t r = 0; r < b->n_rows; r++) {
    const elem *w = row_data(a, row + r) + b->k;
    b->nan[r] |= has_nan(w, b->n);
    uint32_t i = 0;
    vf lo, hi;
    for (; i + 2 * VL <= b->n; i += 2 * VL) {
      load2(w + i, &lo, &hi);
      vf_store(&b->w[r][i], lo);
      vf_store(&b->w[r][i + VL], hi);
    }
    if (i == b->n) continue;
    load2_n(w + i, b->n - i, &lo, &hi); // RUN is a multiple of 2 VL
    vf_store(&b->w[r][i], lo);
    vf_store(&b->w[r][i + VL], hi);
  }
}

// acc[r][t] += the products of n columns from k on; w is the first row's weight there.
TD_INLINE void dot_block(const int R, const int T, const float *w, const float *const *x,
                         uint32_t k, uint32_t n, vf *acc) {
  vf wv[R];
  uint32_t i = 0;
  for (; i + VL <= n; i += VL) {
    TD_UNROLL for (int r = 0; r < R; r++) wv[r] = vf_load(w + r * RUN + i);
    TD_UNROLL for (int t = 0; t < T; t++) {
      vf xv = vf_load(x[t] + k + i);
      TD_UNROLL for (int r = 0; r < R; r++) acc[r * T + t] = vf_fma(wv[r], xv, acc[r * T + t]);
    }
  }
  if (i == n) return;
  TD_UNROLL for (int r = 0; r < R; r++) wv[r] = vf_load_n(w + r * RUN + i, n - i);
  TD_UNROLL for (int t = 0; t < T; t++) {
    vf xv = vf_load_n(x[t] + k + i, n - i);
    TD_UNROLL for (int r = 0; r < R; r++) acc[r * T + t] = vf_fma(wv[r], xv, acc[r * T + t]);
  }
}

TD_INLINE void block_tile(const int R, const int T, block *b, uint32_t r0, uint32_t t0) {
  vf acc[R * T], *totals = &b->total[r0][t0];
  uint32_t at = 0;
  for (uint32_t i = 0; i < b->n_runs; i++) {
    TD_UNROLL for (int p = 0; p < R * T; p++) {
      acc[p] = SCALED ? vf_zero() : totals[p / T * BLOCK_TOKENS + p % T];
    }
    dot_block(R, T, &b->w[r0][at], b->x + t0, b->k + at, b->runs[i].n, acc);
    at += b->runs[i].n;
    TD_UNROLL for (int r = 0; r < R; r++) {
      float scale = SCALED ? b->scales[r0 + r][b->runs[i].scale_idx] : 1;
      TD_UNROLL for (int t = 0; t < T; t++) {
        vf *total = &totals[r * BLOCK_TOKENS + t];
        *total = SCALED ? add_run(*total, acc[r * T + t], scale) : acc[r * T + t];
      }
    }
  }
}

#define BLOCK_TOKENS_FN(name, T)                                                                   \
  static void name(block *b, uint32_t t0) {                                                        \
    uint32_t r = 0;                                                                                \
    for (; r + GEMM_ROWS <= b->n_rows; r += GEMM_ROWS)                                             \
      block_tile(GEMM_ROWS, T, b, r, t0);                                                          \
    for (; r < b->n_rows; r++)                                                                     \
      block_tile(1, T, b, r, t0);                                                                  \
  }
BLOCK_TOKENS_FN(block_1, 1)
BLOCK_TOKENS_FN(block_2, 2)
BLOCK_TOKENS_FN(block_3, 3)
BLOCK_TOKENS_FN(block_4, 4)
BLOCK_TOKENS_FN(block_5, 5)
BLOCK_TOKENS_FN(block_6, 6)

static void block_window(block *b) {
  static void (*const tiles[])(block *, uint32_t) = {
      NULL, block_1, block_2, block_3, block_4, block_5, block_6,
  };
  for (uint32_t t = 0; t < b->n_tokens; t += GEMM_TOKENS) {
    uint32_t left = b->n_tokens - t;
    tiles[left < GEMM_TOKENS ? left : GEMM_TOKENS](b, t);
  }
}

// The window from b->k on: as many whole runs as RUN columns hold.
static void find_runs(block *b, const td_weight *w) {
  b->n = b->n_runs = 0;
  while (b->k + b->n < w->cols) {
    uint32_t k = b->k + b->n, n = run_length(w, k, RUN);
    if (b->n + n > RUN) return;
    b->runs[b->n_runs].n = n;
    b->runs[b->n_runs++].scale_idx = SCALED ? k / w->scale_cols : 0;
    b->n += n;
  }
}

// Rows [row, row + n_rows) for tokens [t0, t0 + n_tokens).
static void linear_block(const td_linear_args *a, uint32_t row, uint32_t n_rows, uint32_t t0,
                         uint32_t n_tokens) {
  block b;
  b.n_rows = n_rows;
  b.n_tokens = n_tokens;
  for (uint32_t t = 0; t < n_tokens; t++)
    b.x[t] = token_x(a, t0 + t);
  for (uint32_t r = 0; r < n_rows; r++) {
    b.scales[r] = row_scales(a->w, row + r);
    b.nan[r] = 0;
    for (uint32_t t = 0; t < n_tokens; t++)
      b.total[r][t] = vf_zero();
  }
  for (b.k = 0; b.k < a->w->cols; b.k += b.n) {
    find_runs(&b, a->w);
    decode_window(&b, a, row);
    block_window(&b);
  }
  for (uint32_t t = 0; t < n_tokens; t++) {
    float *y = a->y + (t0 + t) * a->ldy + row - a->y_row0;
    for (uint32_t r = 0; r < n_rows; r++)
      y[r] = b.nan[r] ? NAN : vf_sum(b.total[r][t]);
  }
}

static void linear_blocks(const td_linear_args *a) {
  for (uint32_t t = 0; t < a->n_tokens; t += BLOCK_TOKENS) {
    uint32_t n_tokens = a->n_tokens - t < BLOCK_TOKENS ? a->n_tokens - t : BLOCK_TOKENS;
    for (uint32_t row = a->row_begin; row < a->row_end; row += BLOCK_ROWS) {
      uint32_t n_rows = a->row_end - row < BLOCK_ROWS ? a->row_end - row : BLOCK_ROWS;
      linear_block(a, row, n_rows, t, n_tokens);
    }
  }
}

static inline void linear_vec(const td_linear_args *a) {
  switch (a->n_tokens) {
  case 0: return;
  case 1: raw_1(a); return;
  case 2: raw_2(a); return;
  case 3: raw_3(a); return;
  case 4: raw_4(a); return;
  default: linear_blocks(a);
  }
}

#endif
