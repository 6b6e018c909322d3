// kernels/cpu/linear_q4.h - y = W x for rows of 4-bit codes (TD_I4, TD_F4E2M1) with a scale a
// group, in vectors, for each ISA's and dtype's file to include after its vec.h and
//   Q4_CODES    see q4.h
//   Q4_TOKENS   4 or 8, whose accumulators find registers beside a row's decoded weights
//   Q4_ZEROS    1 where there may be zero points
//
// A block is VL words of eight codes, 8 VL columns. Codes are taken from their words place by
// place: vector i of a block has column 8 j + i in lane j. So x is brought into that order first,
// once for all rows of a call; what lies behind the last column is zero there.
//
// Every (row, token) pair has one accumulator of VL lanes. In each block the products are summed
// from zero, i by i, and the sums, times the scale of each lane's group, are added to it: the same
// for any number of tokens, of which Q4_TOKENS at a time share the decoding of a row.
#ifndef KERNELS_CPU_LINEAR_Q4_H
#define KERNELS_CPU_LINEAR_Q4_H

#include "kernels/cpu/q4.h"
#include "kernels/decl.h"

enum {
  BLOCK = 8 * VL,            // columns
  X_FLOATS = 8192,           // of x in order
  MAX_SCALES = X_FLOATS / 8, // of one row: a lane is eight columns, and has at most one
  AHEAD = 4096,              // bytes between what is used and what is fetched
  PANEL = 128,               // rows that share x in order
};

// How the scales of a block are found: a row's are made F32 and put in a list, per_block for each
// block, and lane j takes number spread[j] of them.
typedef struct {
  uint32_t per_block;
  vi spread;
} q4_groups;

static q4_groups groups_of(const td_weight *w) {
  uint32_t size = w->scale_cols, index[VL];
  q4_groups g = {.per_block = size >= w->cols || size % BLOCK == 0 ? 1
                              : BLOCK % size == 0                  ? BLOCK / size
                                                                   : VL};
  for (uint32_t j = 0; j < VL; j++)
    index[j] = j * g.per_block / VL;
  g.spread = vi_load(index);
  return g;
}

// Scales [begin, begin + n) of a row as F32; out has room for whole vectors.
static void convert_scales(const td_weight *w, uint32_t row, size_t begin, uint32_t n, float *out) {
  size_t at = row * td_weight_groups(w) + begin;
  scales_to_f32((const char *)w->scale + at * td_dtype_bytes(w->scale_dtype), w->scale_dtype, n,
                out);
}

// Zero points likewise, less 8.
static void convert_zeros(const td_weight *w, uint32_t row, size_t begin, uint32_t n, float *out) {
  const uint32_t *from = w->zero + row / 8 * td_weight_groups(w) + begin;
  for (uint32_t i = 0; i < n; i++)
    out[i] = (float)((int)((from[i] + w->zero_add) >> row % 8 * 4 & 15) - 8);
}

// The list of scales (or zero points) for the blocks of columns [k, k + n), zeros behind the last.
static void list_groups(const td_weight *w, const q4_groups *g, uint32_t row, uint32_t k,
                        uint32_t n, bool zeros, float *list) {
  float found[MAX_SCALES + VL];
  uint32_t size = w->scale_cols, n_blocks = (n + BLOCK - 1) / BLOCK;
  uint32_t begin = k / size, count = (k + n - 1) / size - begin + 1;
  bool is_list = g->per_block > 1 ? g->per_block * size == BLOCK : size == BLOCK;
  float *to = is_list ? list : found;
  if (zeros) {
    convert_zeros(w, row, begin, count, to);
  } else {
    convert_scales(w, row, begin, count, to);
  }
  uint32_t n_listed = n_blocks * g->per_block, step = BLOCK / g->per_block, i = 0;
  if (is_list) {
    i = count;
  } else {
    for (; i < n_listed && i * step < n; i++)
      list[i] = found[(k + i * step) / size - begin];
  }
  for (; i < n_listed + VL; i++) // loads of the last block's are whole vectors
    list[i] = 0;
}

// Columns [k, k + n) of x in the order above, n at most whole blocks.
static void order_x(const float *x, uint32_t n, float *out) {
  uint32_t k = 0;
  for (; k + BLOCK <= n; k += BLOCK)
    vf_order8(x + k, out + k);
  if (k == n) return;
  _Alignas(64) float part[BLOCK] = {0};
  memcpy(part, x + k, (n - k) * sizeof *x);
  vf_order8(part, out + k);
}

TD_INLINE const float *token_x(const td_linear_args *a, uint32_t t) {
  return a->x + (a->x_rows ? a->x_rows[t] : t) * a->ldx;
}

TD_INLINE const uint8_t *row_codes(const td_weight *w, uint32_t row, uint32_t k) {
  return (const uint8_t *)w->data + row * td_weight_row_bytes(w) + k / 2;
}

// What a row of columns [k, k + n) takes along.
typedef struct {
  const uint8_t *codes;
  size_t n_bytes; // left of the row
  const float *scales, *zeros;
  uint32_t n_blocks;
} q4_row;

// total[t] gains the row's products with T tokens; x [T][ldx] in order.
TD_INLINE void dot_row(const int T, const bool zeros, const q4_row *row, const q4_groups *g,
                       const float *x, size_t ldx, vf *total) {
  vf sum[Q4_TOKENS];
  TD_UNROLL for (int t = 0; t < T; t++) sum[t] = total[t];
  for (uint32_t b = 0; b < row->n_blocks; b++, x += BLOCK) {
    vi v[4];
    uintptr_t ahead = (uintptr_t)row->codes + b * sizeof(vi) + AHEAD; // of this row or the next
    __builtin_prefetch((const void *)ahead);
    load_words(row->codes + b * sizeof(vi), row->n_bytes - b * sizeof(vi), v);
    vf scale = vf_permute(vf_load(row->scales + b * g->per_block), g->spread);
    vf zero = zeros ? vf_permute(vf_load(row->zeros + b * g->per_block), g->spread) : vf_zero();
    vf acc[Q4_TOKENS];
    TD_UNROLL for (int t = 0; t < T; t++) acc[t] = vf_zero();
    TD_UNROLL for (int i = 0; i < 4; i++) {
      vf lo = Q4_CODES(low)(v[i]), hi = Q4_CODES(high)(v[i]);
      if (zeros) {
        lo = vf_sub(lo, zero);
        hi = vf_sub(hi, zero);
      }
      TD_UNROLL for (int t = 0; t < T; t++) {
        const float *xt = x + (size_t)t * ldx + 2 * i * VL;
        acc[t] = vf_fma(lo, vf_load(xt), acc[t]);
        acc[t] = vf_fma(hi, vf_load(xt + VL), acc[t]);
      }
    }
    TD_UNROLL for (int t = 0; t < T; t++) sum[t] = vf_fma(acc[t], scale, sum[t]);
  }
  TD_UNROLL for (int t = 0; t < T; t++) total[t] = sum[t];
}

#define DOT_TOKENS(T)                                                                              \
  case T:                                                                                          \
    if (Q4_ZEROS && zeros) {                                                                       \
      dot_row(T, true, row, g, x, ldx, total);                                                     \
    } else {                                                                                       \
      dot_row(T, false, row, g, x, ldx, total);                                                    \
    }                                                                                              \
    return;

static void dot_tokens(uint32_t n_tokens, bool zeros, const q4_row *row, const q4_groups *g,
                       const float *x, size_t ldx, vf *total) {
  switch (n_tokens) {
    DOT_TOKENS(1)
    DOT_TOKENS(2)
    DOT_TOKENS(3)
    DOT_TOKENS(4)
#if Q4_TOKENS > 4 // registers for as many accumulators
    DOT_TOKENS(5)
    DOT_TOKENS(6)
    DOT_TOKENS(7)
    DOT_TOKENS(8)
#endif
  default: return;
  }
}

TD_INLINE float finish(const td_weight *w, bool nan, float sum) {
  (void)nan; // codes are numbers; scales that are not are in the sum
  return w->dtype == TD_F4E2M1 ? sum * w->global_scale : sum;
}

// Rows [row0, row0 + n_rows) times all tokens.
static void q4_panel(const td_linear_args *a, const q4_groups *g, uint32_t row0, uint32_t n_rows,
                     uint32_t n_tokens) {
  _Alignas(64) float x[X_FLOATS];
  float scales[MAX_SCALES + VL], zeros[MAX_SCALES + VL];
  vf total[PANEL][Q4_TOKENS];
  const td_weight *w = a->w;
  uint32_t step = X_FLOATS / n_tokens / BLOCK * BLOCK;
  for (uint32_t r = 0; r < n_rows; r++) {
    for (uint32_t t = 0; t < n_tokens; t++)
      total[r][t] = vf_zero();
  }
  for (uint32_t k = 0; k < w->cols; k += step) {
    uint32_t n = w->cols - k < step ? w->cols - k : step;
    for (uint32_t t = 0; t < n_tokens; t++)
      order_x(token_x(a, t) + k, n, x + (size_t)t * step);
    for (uint32_t r = 0; r < n_rows; r++) {
      q4_row row = {.codes = row_codes(w, row0 + r, k),
                    .n_bytes = td_weight_row_bytes(w) - k / 2,
                    .scales = scales,
                    .zeros = zeros,
                    .n_blocks = (n + BLOCK - 1) / BLOCK};
      list_groups(w, g, row0 + r, k, n, false, scales);
      if (w->zero) list_groups(w, g, row0 + r, k, n, true, zeros);
      dot_tokens(n_tokens, w->zero != NULL, &row, g, x, step, total[r]);
    }
  }
  for (uint32_t r = 0; r < n_rows; r++) {
    for (uint32_t t = 0; t < n_tokens; t++)
      a->y[t * a->ldy + row0 + r - a->y_row0] = finish(w, false, vf_sum(total[r][t]));
  }
}

// Whether groups begin with lanes. Others are left to the scalar version.
static inline bool q4_fits(const td_weight *w) {
  return w->scale_cols % 8 == 0 || w->scale_cols >= w->cols;
}

// Many tokens: runs are blocks, and every lane has its scale.
enum { SCALED = 1, DOWN = 1 };
typedef vf gemm_scale;
TD_INLINE vf lanes_of(gemm_scale scale) {
  return scale;
}
#include "kernels/cpu/gemm_vec.h"

static void find_window(gemm *g) {
  uint32_t left = g->a->w->cols - g->k;
  g->n = left < WINDOW ? left : WINDOW;
  g->n_runs = (g->n + BLOCK - 1) / BLOCK;
  g->n_vectors = g->n_runs * 8;
  for (uint32_t i = 0; i < g->n_runs; i++)
    g->run_vectors[i] = 8;
}

static void pack_token(const gemm *g, const float *x, size_t step, float *out) {
  _Alignas(64) float ordered[WINDOW];
  order_x(x, g->n, ordered);
  for (uint32_t i = 0; i < g->n_vectors; i++)
    vf_store(out + i * step, vf_load(ordered + i * VL));
}

static void decode_row(gemm *g, uint32_t row, uint32_t place, float *out) {
  float scales[MAX_SCALES + VL], zeros[MAX_SCALES + VL];
  const td_weight *w = g->a->w;
  const size_t step = GEMM_ROWS * VL;
  q4_groups groups = groups_of(w);
  row += g->row0;
  list_groups(w, &groups, row, g->k, g->n, false, scales);
  if (w->zero) list_groups(w, &groups, row, g->k, g->n, true, zeros);
  const uint8_t *codes = row_codes(w, row, g->k);
  size_t n_bytes = td_weight_row_bytes(w) - g->k / 2;
  for (uint32_t b = 0; b < g->n_runs; b++, codes += sizeof(vi), n_bytes -= sizeof(vi)) {
    vi v[4];
    load_words(codes, n_bytes, v);
    g->scale[place][b] = vf_permute(vf_load(scales + b * groups.per_block), groups.spread);
    vf zero = vf_zero();
    if (w->zero) zero = vf_permute(vf_load(zeros + b * groups.per_block), groups.spread);
    TD_UNROLL for (int i = 0; i < 4; i++, out += 2 * step) {
      vf lo = Q4_CODES(low)(v[i]), hi = Q4_CODES(high)(v[i]);
      vf_store(out, Q4_ZEROS ? vf_sub(lo, zero) : lo);
      vf_store(out + step, Q4_ZEROS ? vf_sub(hi, zero) : hi);
    }
  }
}

static const char *stored_row(const td_weight *w, uint32_t row, uint32_t k) {
  return (const char *)row_codes(w, row, k);
}

static inline void linear_q4(const td_linear_args *a) {
  if (a->n_tokens > Q4_TOKENS) {
    gemm_all(a);
    return;
  }
  q4_groups g = groups_of(a->w);
  for (uint32_t row = a->row_begin; row < a->row_end; row += PANEL) {
    uint32_t n_rows = a->row_end - row < PANEL ? a->row_end - row : PANEL;
    q4_panel(a, &g, row, n_rows, a->n_tokens);
  }
}

#endif
