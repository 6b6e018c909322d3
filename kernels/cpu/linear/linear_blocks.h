// kernels/cpu/linear/linear_blocks.h - y = W x for GGUF's blocks, with x rounded to 15 bits, or
// to 8. Include after an ISA's blocks.h and these definitions:
//   BLOCK_DTYPE   the format
//   BLOCKS_EXACT  the kernel for tokens that do not qualify
// One token goes without codes in memory, through multiply_codes, or, if ROW_SUMS of blocks.h says
// so of the format, through order_x and row_sums.
//
// A token has a scale per 256 columns, a part: its largest magnitude / 16256. Codes are unsigned
// numbers, and the sum of code times x over a group of 16 or 32 columns is an exact integer:
// part = fma(sum, weight scale, part), group after group, and where weights have offsets,
// part = fma(offset, sum of the group's x, part). Then total = fma(part, token scale, total). All
// paths do that, so a token's bits do not depend on its batch, nor on the ISA. |error| <=
// sum |w| scale / 2 over the columns, from rounding x, plus that of the FP32 sum.
// In 8 bits (x_int8) the scale is the largest magnitude / 127 of as many columns as a block has,
// 256 or 32, as llama.cpp rounds. Of 32: part = fma(sum, weight scale * token scale, part), the
// group's sum of x in offsets is scaled too, and total = part + total. Lanes are rows: TILE_ROWS
// rows and PART columns are transposed and decoded into L1 and used for one tile of tokens after
// the other; x of a block of tokens stays in L2.
#pragma once

#include <math.h>
#include <stdbool.h>

#include "kernels/cpu/common/numeric.h"
#include "kernels/cpu/linear/blocks_rows.h"
#include "kernels/decl.h"

enum {
  TILE_ROWS = ROW_VECTORS * VL,
  PART = 256,
  GROUPS = PART / GROUP_COLS,
  DWORDS = PART / 4,
  MOST_TOKENS = 96, // per block
  MOST_ROWS = 512,
  X_COLS = 192 << 10, // over all tokens of a block
  MOST_GROUPS = X_COLS / GROUP_COLS + MOST_TOKENS * GROUPS,
  X_PAD = 64,         // bytes between tokens, so that they fall into different L1 sets
  X_MOST_INT = 16256, // 127 * 128: two signed bytes hold it
  X_MOST_A8 = 127,
};
// What codes in memory are too large by, and columns of x whose halves lie apart in memory.
#ifdef BLOCKS_FEW
#define CODES_LESS 0
#define X_RUN      GROUP_COLS
#else
#define CODES_LESS gguf_less(BLOCK_DTYPE)
#define X_RUN      4
#endif
#define X_LEAST_MAX 0x1p-100f
#define X_MOST_MAX  0x1p100f

// Some rows times some tokens. Lives on the stack.
typedef struct {
  _Alignas(64) uint8_t w[DWORDS][ROW_VECTORS][FOUR_BYTES];
  vf scale[GROUPS][ROW_VECTORS], offset[GROUPS][ROW_VECTORS];
  _Alignas(64) int8_t x[X_COLS * 2 + MOST_TOKENS * X_PAD]; // [token][four columns][X_FOUR]
  float x_scale[MOST_GROUPS];                              // [part or group][n_slots]
  int32_t x_less[MOST_GROUPS]; // [group][n_slots]: - CODES_LESS * sum of x
  float x_sum[HAS_OFFSETS ? MOST_GROUPS : 1];
  vf total[MOST_ROWS / VL * MOST_TOKENS]; // [vector of rows][token]
  bool fits[MOST_TOKENS];
  uint32_t x_bytes;     // of a column of x; an only token's always 2, as product_of_one takes them
  bool scales_by_group; // of x
  const td_linear_args *a;
  size_t row_bytes;
  uint32_t row0, n_rows, token0, n_tokens; // the block
  uint32_t n_tiles;                        // of tokens
  uint32_t n_slots;                        // tokens that there are scales for, some unused
  uint32_t span, n_span;                   // columns [span, span + n_span)
  uint32_t n_parts;                        // of the span
  const char *ahead;                       // memory that is read after the tile's rows
} product;

// ---- activations ----------------------------------------------------------------------------

static bool can_round(float most) {
  return most == 0 || (most >= X_LEAST_MAX && most < X_MOST_MAX);
}

// Packs n columns of a token that share a scale, a multiple of 32. False: it does not fit.
static bool pack_part(const product *g, const float *x, uint32_t n, int8_t *out, float *scale,
                      int32_t *less, float *sum) {
  const float most_int = g->a->x_int8 ? X_MOST_A8 : X_MOST_INT;
  const float most = f32_from_bits(vf_largest(x, n)); // NaN if any is
  const bool is_zero = most == 0, fits = can_round(most);
  *scale = fits ? most / most_int : 0;
  const vf inverse = vf_set1(fits && !is_zero ? most_int / most : 0);
  vi group = vi_zero();
  for (uint32_t k = 0; k < n; k += VL) {
    const vi q = vi_from_vf(vf_mul(vf_load(x + k), inverse));
    pack_columns(q, g->x_bytes, X_RUN, k, out);
    if (!CODES_LESS && !HAS_OFFSETS) continue;
    group = vi_add(group, q);
    if ((k + VL) % GROUP_COLS > 0) continue;
    const int32_t of_group = vi_sum(group);
    group = vi_zero();
    // Unsigned: what does not fit may pass the range.
    const size_t at = k / GROUP_COLS * (size_t)g->n_slots;
    less[at] = (int32_t)(0 - (uint32_t)CODES_LESS * (uint32_t)of_group);
    if (HAS_OFFSETS) sum[at] = (float)of_group * (g->scales_by_group ? *scale : 1);
  }
  return fits;
}

static size_t x_stride(const product *g) {
  return (size_t)g->n_span * g->x_bytes + X_PAD;
}

// Packs the span's columns of all tokens. Slots without one get zeros as scales.
static void pack_tokens(product *g) {
  const uint32_t step = g->scales_by_group ? GROUP_COLS : PART;
  if (g->n_slots > g->n_tokens) {
    const size_t n = (size_t)g->n_parts * GROUPS * g->n_slots;
    memset(g->x_scale, 0, n * sizeof *g->x_scale);
    if (HAS_OFFSETS) memset(g->x_sum, 0, n * sizeof *g->x_sum);
  }
  for (uint32_t t = 0; t < g->n_tokens; t++) {
    const td_linear_args *a = g->a;
    const uint32_t token = g->token0 + t;
    const float *x = a->x + (a->x_rows ? a->x_rows[token] : token) * a->ldx + g->span;
    for (uint32_t k = 0; k < g->n_span; k += step) {
      const uint32_t left = g->n_span - k;
      const size_t group = k / GROUP_COLS * (size_t)g->n_slots + t;
      g->fits[t] &= pack_part(g, x + k, left < step ? left : step,
                              g->x + t * x_stride(g) + k * g->x_bytes,
                              &g->x_scale[k / step * (size_t)g->n_slots + t], g->x_less + group,
                              g->x_sum + (HAS_OFFSETS ? group : 0));
    }
  }
}

// ---- weights --------------------------------------------------------------------------------

static size_t bytes_before(uint32_t k) {
  const td_block block = td_dtype_block(BLOCK_DTYPE);
  return (size_t)(k / block.cols) * block.bytes;
}

// Decodes columns [k, k + n) of vector v of the rows from `row` on. Prefetches as much of what is
// read after the tile, in the order of memory: a stream that the hardware prefetcher follows.
static void decode_rows(product *g, uint32_t row, uint32_t v, uint32_t k, uint32_t n) {
  const td_block block = td_dtype_block(BLOCK_DTYPE);
  const uint32_t left = g->n_rows - row - v * VL;
  row_blocks b = {.apart = g->row_bytes, .n_rows = left < VL ? left : VL, .ahead = g->ahead};
  g->ahead += bytes_before(n) * VL;
  b.p = (const uint8_t *)g->a->w->data + (size_t)(g->row0 + row + v * VL) * g->row_bytes +
        bytes_before(k);
  for (uint32_t at = 0; at < n; at += block.cols, b.p += block.bytes) {
    block_codes(&b, &(code_sink){.out = g->w[at / 4][v], .step = sizeof g->w[0]});
    block_scales(&b, &g->scale[at / GROUP_COLS][v], &g->offset[at / GROUP_COLS][v], ROW_VECTORS);
  }
  for (; b.ahead < g->ahead; b.ahead += 64)
    __builtin_prefetch(b.ahead, 0, 2);
}

// ---- products -------------------------------------------------------------------------------

// What a tile multiplies by: a part of the first token's x.
typedef struct {
  const int8_t *x;
  const float *scale, *sum;
  const int32_t *less;
} tile_x;

static tile_x x_of_tile(const product *g, uint32_t part, uint32_t token) {
  const size_t at = (size_t)part * GROUPS * g->n_slots + token;
  const size_t scale_at = g->scales_by_group ? at : (size_t)part * g->n_slots + token;
  return (tile_x){.x = g->x + token * x_stride(g) + (size_t)part * g->x_bytes * PART,
                  .scale = g->x_scale + scale_at,
                  .less = g->x_less + at,
                  .sum = g->x_sum + (HAS_OFFSETS ? at : 0)};
}

// Where the block's rows from `row` on begin, or what is read after its last one.
static const char *rows_behind(const product *g, uint32_t row) {
  const uint32_t behind = g->row0 + row;
  if (behind >= g->a->row_end && g->a->next) return g->a->next;
  return (const char *)g->a->w->data + behind * g->row_bytes + bytes_before(g->span);
}

#ifdef BLOCKS_FEW
#include "kernels/cpu/avx512amx/blocks_tiles.h"
#else
#include "kernels/cpu/linear/blocks_vec_products.h"
#endif

// A tile of rows times the block's tokens, over a part of the span.
static void product_part(product *g, uint32_t row, uint32_t part) {
  const uint32_t k = g->span + part * PART, left = g->n_span - part * PART;
  const uint32_t n = left < PART ? left : PART, rows_left = g->n_rows - row;
  const uint32_t n_vectors = rows_left < TILE_ROWS ? (rows_left + VL - 1) / VL : ROW_VECTORS;
  for (uint32_t v = 0; v < n_vectors; v++)
    decode_rows(g, row, v, k, n);
  multiply_rows(g, row, n_vectors, part, n);
}

static void put_results(const product *g) {
  const td_linear_args *a = g->a;
  const vf *total = g->total;
  for (uint32_t row = 0; row < g->n_rows; row += VL) {
    const uint32_t left = g->n_rows - row;
    float *y = a->y + g->token0 * a->ldy + g->row0 + row - a->y_row0;
    for (uint32_t t = 0; t < g->n_tokens; t++, total++, y += a->ldy)
      vf_store_n(y, *total, left < VL ? left : VL);
  }
}

// Computes the block that g describes.
static void product_block(product *g, uint32_t most_span) {
  const uint32_t cols = g->a->w->cols;
  memset(g->total, 0, sizeof(vf) * ((g->n_rows + VL - 1) / VL) * g->n_tokens);
  for (g->span = 0; g->span < cols; g->span += g->n_span) {
    g->n_span = cols - g->span < most_span ? cols - g->span : most_span;
    g->n_parts = (g->n_span + PART - 1) / PART;
    pack_tokens(g);
    for (uint32_t row = rows_of_one(g); row < g->n_rows; row += TILE_ROWS) {
      g->ahead = rows_behind(g, row + TILE_ROWS);
      for (uint32_t part = 0; part < g->n_parts; part++)
        product_part(g, row, part);
    }
  }
  put_results(g);
}

static void linear_blocks(const td_linear_args *a) {
  if (left_to_others(a)) return;
  product g;
  g.a = a;
  g.row_bytes = td_weight_row_bytes(a->w);
  g.scales_by_group = IS_SHORT && a->x_int8;
  const uint32_t n_blocks = (a->n_tokens + MOST_TOKENS - 1) / MOST_TOKENS;
  for (uint32_t i = 0; i < n_blocks; i++) { // of even size
    g.token0 = (uint32_t)((uint64_t)i * a->n_tokens / n_blocks);
    g.n_tokens = (uint32_t)((i + 1ull) * a->n_tokens / n_blocks) - g.token0;
    g.x_bytes = a->x_int8 && g.n_tokens > 1 ? A8_BYTES : 2;
    begin_tokens(&g);
    // One token's x may be there in two orders.
    const uint32_t most_span = X_COLS / (g.n_slots > 1 ? g.n_slots : 2) / PART * PART;
    for (uint32_t t = 0; t < g.n_tokens; t++)
      g.fits[t] = true;
    for (g.row0 = a->row_begin; g.row0 < a->row_end; g.row0 += g.n_rows) {
      const uint32_t left = a->row_end - g.row0;
      g.n_rows = left < MOST_ROWS ? left : MOST_ROWS;
      product_block(&g, most_span);
    }
    for (uint32_t t = 0; t < g.n_tokens; t++) {
      const td_linear_args one = one_token(a, g.token0 + t, a->row_begin, a->row_end);
      if (!g.fits[t]) BLOCKS_EXACT(&one);
    }
  }
  end_tokens();
}
