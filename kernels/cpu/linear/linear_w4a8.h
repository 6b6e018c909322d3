// kernels/cpu/linear/linear_w4a8.h - y = W x for rows of 4-bit codes with x quantized to 8 bits.
// Include after an ISA's vec.h and these definitions, on vectors of 32-bit lanes:
//   VECTORS, TILE_TOKENS   the register tile: VECTORS VL rows times this many tokens
//   a8_dot                 sum + the four products u x of every lane, u at most 24, x signed
//   A8_STEP_WORDS          words (up to 4) per step, whose products may be summed separately
//   a8_begin, a8_end       initial sum of a step, from acc; acc after the step, from the acc before
//                          it and the sum
//   a8_set1, a8_mul, a8_to_float
//   a8_words               16 bytes of VL rows: word j of row i in lane i of vector j
//   a8_low, a8_high        the lower and upper codes of every byte
//   a8_lookup              table[code] for every byte
//   a8_largest             the largest magnitude of 16 n floats, as bits
//   a8_round               16 floats times a factor, rounded to nearest, as bytes in the order
//                          below
//   a8_sum                 the sum of n bytes, n a multiple of 16
// With A8_FEW products are those of avx512amx/w4a8_tiles.h, which needs less of that.
//
// A token has a scale per block of columns (w4a8.h), its largest magnitude / 127; a row of weights
// has one scale in a block. The sum of code times x over the block is an exact integer, and total =
// fma(sum, weight scale * token scale, total), block after block. Nothing else is rounded, so every
// ISA gives the same bits, for any number of tokens. |error| <= sum |w| scale / 2 over the columns
// (from rounding x), plus that of the FP32 sum.
//
// Lanes are rows. The weights of a strip of rows and a window of columns are reordered and made
// unsigned once for BLOCK_TOKENS tokens (L1); x is quantized once per call. Eight columns are two
// words of four: columns 0 2 4 6, then 1 3 5 7, which is what masking nibbles gives.
#pragma once

#include "kernels/cpu/common/scales.h"
#include "kernels/cpu/common/vec_math.h"
#include "kernels/cpu/linear/w4a8.h"
#include "kernels/decl.h"

#define TD_UNROLL _Pragma("GCC unroll 32")

#ifndef A8_STEP_WORDS
#define A8_STEP_WORDS 1
static inline vi a8_begin(vi acc) {
  return acc;
}
static inline vi a8_end(vi acc, vi sum) {
  (void)acc;
  return sum;
}
#endif

enum {
  STRIP = VECTORS * VL, // rows
  WINDOW = 512,         // columns
  BLOCKS = WINDOW / A8_LEAST_BLOCK,
  BLOCK_TOKENS = 96,
  X_BYTES = 512 << 10, // of quantized x; a token of A8_MOST_COLS fits
  X_BLOCKS = X_BYTES / A8_LEAST_BLOCK,
};

// Some tokens times a strip of rows. Lives on the stack.
typedef struct {
  _Alignas(64) int8_t x[X_BYTES];  // [window][token][WINDOW]
  float x_scale[X_BLOCKS];         // [window][token][blocks of a window]
  int32_t x_sum[X_BLOCKS];         // sums of quantized values, same shape
  uint8_t w[WINDOW / 4][STRIP][4]; // of the window, as are w_scale and zero
  float w_scale[BLOCKS][STRIP];
  int32_t zero[BLOCKS][STRIP]; // unused without zero points
  _Alignas(64) float total[BLOCK_TOKENS][STRIP];
  const td_linear_args *a;
  uint32_t token0, n_tokens;
  uint32_t row0, n_rows;       // of the strip
  uint32_t block, n_in_window; // columns per block; blocks per window
  uint32_t k, n, n_blocks;     // the window
  bool is_fp4;
} a8;

static int8_t *a8_x(a8 *g, uint32_t window, uint32_t token) {
  return g->x + ((size_t)window * g->n_tokens + token) * WINDOW;
}

static size_t a8_at(const a8 *g, uint32_t window, uint32_t token) {
  return ((size_t)window * g->n_tokens + token) * g->n_in_window;
}

// Quantizes columns [k, k + n) of a token, n at most a window; zeros after them.
static void round_window(a8 *g, const float *x, uint32_t n, uint32_t window, uint32_t token) {
  int8_t *out = a8_x(g, window, token);
  size_t at = a8_at(g, window, token);
  _Alignas(64) float part[A8_MOST_BLOCK];
  for (uint32_t k = 0; k < n; k += g->block, at++) {
    const float *from = x + k;
    if (n - k < g->block) {
      memset(part, 0, g->block * sizeof *part);
      memcpy(part, from, (n - k) * sizeof *part);
      from = part;
    }
    a8_scale scale = a8_scale_of(a8_largest(from, g->block / 16));
    g->x_scale[at] = scale.scale;
    for (uint32_t i = 0; i < g->block; i += 16)
      a8_round(from + i, scale.times, out + k + i);
    g->x_sum[at] = a8_sum(out + k, g->block);
  }
}

static void round_tokens(a8 *g) {
  const td_linear_args *a = g->a;
  uint32_t cols = a->w->cols;
  for (uint32_t k = 0; k < cols; k += WINDOW) {
    uint32_t n = cols - k < WINDOW ? cols - k : WINDOW;
    for (uint32_t t = 0; t < g->n_tokens; t++) {
      size_t row = a->x_rows ? a->x_rows[g->token0 + t] : g->token0 + t;
      round_window(g, a->x + row * a->ldx + k, n, k / WINDOW, t);
    }
  }
}

// What codes are larger by than numbers, without zero points.
static int32_t codes_less(const a8 *g) {
  return g->is_fp4 ? A8_FP4_MIDDLE : 8;
}

// A token's total of VL rows += a block's sums, scaled.
TD_INLINE void add_block(a8 *g, uint32_t block, int v, uint32_t t, vf x_scale, vi sums) {
  float *total = &g->total[t][v * VL];
  const vf both = vf_mul(vf_load(&g->w_scale[block][v * VL]), x_scale);
  vf_store(total, vf_fma(a8_to_float(sums), both, vf_load(total)));
}

#ifdef A8_FEW
#include "kernels/cpu/avx512amx/w4a8_tiles.h"
#else
#include "kernels/cpu/linear/w4a8_vec.h"
#endif

// Rows past the strip's last one repeat it.
static uint32_t strip_row(const a8 *g, uint32_t i) {
  return g->row0 + (i < g->n_rows ? i : g->n_rows - 1);
}

// Prefetch distance in bytes: two windows on, or as far into the next strip.
static size_t a8_ahead(const td_weight *w, uint32_t k) {
  size_t row_bytes = td_weight_row_bytes(w), ahead = WINDOW;
  return ahead + (k / 2 + ahead < row_bytes ? 0 : (STRIP - 1) * row_bytes);
}

static void decode_codes(a8 *g, uint32_t v) {
  const td_weight *w = g->a->w;
  size_t row_bytes = td_weight_row_bytes(w), begin = g->k / 2, ahead = a8_ahead(w, g->k);
  size_t n_bytes = row_bytes - begin < WINDOW / 2 ? row_bytes - begin : WINDOW / 2;
  const uint8_t *rows[VL];
  for (uint32_t i = 0; i < VL; i++) {
    rows[i] = (const uint8_t *)w->data + strip_row(g, v * VL + i) * row_bytes + begin;
    for (uint32_t b = 0; b < WINDOW / 2; b += 64)
      __builtin_prefetch((const void *)((uintptr_t)rows[i] + ahead + b));
  }
  _Alignas(64) uint8_t tail[VL][16];
  for (size_t b = 0; b < n_bytes; b += 16) {
    if (n_bytes - b < 16) {
      memset(tail, 0, sizeof tail);
      for (uint32_t i = 0; i < VL; i++)
        rows[i] = memcpy(tail[i], rows[i] + b, n_bytes - b);
    }
    vi words[4];
    a8_words(rows, n_bytes - b < 16 ? 0 : b, words);
    TD_UNROLL for (int j = 0; j < 4; j++) {
      vi low = a8_low(words[j]), high = a8_high(words[j]);
      uint32_t at = (uint32_t)(b / 2) + 2 * (uint32_t)j;
      put_codes(g, at, v, g->is_fp4 ? a8_lookup(low) : low);
      put_codes(g, at + 1, v, g->is_fp4 ? a8_lookup(high) : high);
    }
  }
}

// Scales of row i of the strip, contiguous for the window.
static void decode_scales(a8 *g, uint32_t i) {
  const td_weight *w = g->a->w;
  uint32_t row = strip_row(g, i), first = g->k / w->scale_cols;
  uint32_t n_groups = (g->k + g->n - 1) / w->scale_cols - first + 1;
  size_t at = row * td_weight_groups(w) + first;
  _Alignas(64) float scales[BLOCKS + VL];
  scales_to_f32((const char *)w->scale + at * td_dtype_bytes(w->scale_dtype), w->scale_dtype,
                w->rows * td_weight_groups(w) - at, n_groups, scales);
  if (g->block == w->scale_cols) {
    for (uint32_t b = 0; b < g->n_blocks; b++)
      g->w_scale[b][i] = scales[b];
  } else {
    for (uint32_t b = 0; b < g->n_blocks; b++)
      g->w_scale[b][i] = scales[(g->k + b * g->block) / w->scale_cols - first];
  }
  for (uint32_t b = 0; w->zero && b < g->n_blocks; b++)
    g->zero[b][i] = zero_at(w, row, (g->k + b * g->block) / w->scale_cols);
}

static void a8_window(a8 *g, uint32_t window) {
  for (uint32_t v = 0; v < VECTORS && v * VL < g->n_rows; v++)
    decode_codes(g, v);
  for (uint32_t i = 0; i < STRIP; i++)
    decode_scales(g, i);
  multiply_window(g, window);
}

static void a8_strip(a8 *g) {
  const td_linear_args *a = g->a;
  memset(g->total, 0, g->n_tokens * sizeof g->total[0]);
  for (g->k = 0; g->k < a->w->cols; g->k += WINDOW) {
    g->n = a->w->cols - g->k < WINDOW ? a->w->cols - g->k : WINDOW;
    g->n_blocks = (g->n + g->block - 1) / g->block;
    a8_window(g, g->k / WINDOW);
  }
  for (uint32_t t = 0; t < g->n_tokens; t++) {
    float *y = a->y + (g->token0 + t) * a->ldy + g->row0 - a->y_row0;
    for (uint32_t i = 0; i < g->n_rows; i++)
      y[i] = a8_result(a->w, g->total[t][i]);
  }
}

static inline void linear_w4a8_rows(const td_linear_args *a) {
  if (left_to_others(a)) return;
  a8 g;
  g.a = a;
  g.is_fp4 = a->w->dtype == TD_F4E2M1;
  g.block = a8_block(a->w);
  g.n_in_window = WINDOW / g.block;
  uint32_t most = X_BYTES / ((a->w->cols + WINDOW - 1) / WINDOW * WINDOW);
  if (most > BLOCK_TOKENS) most = BLOCK_TOKENS;
  uint32_t n_blocks = (a->n_tokens + most - 1) / most;
  for (uint32_t i = 0; i < n_blocks; i++) { // of even size
    g.token0 = (uint32_t)((uint64_t)i * a->n_tokens / n_blocks);
    g.n_tokens = (uint32_t)((i + 1ull) * a->n_tokens / n_blocks) - g.token0;
    begin_tokens(&g);
    round_tokens(&g);
    for (g.row0 = a->row_begin; g.row0 < a->row_end; g.row0 += STRIP) {
      g.n_rows = a->row_end - g.row0 < STRIP ? a->row_end - g.row0 : STRIP;
      a8_strip(&g);
    }
  }
  end_tokens();
}
