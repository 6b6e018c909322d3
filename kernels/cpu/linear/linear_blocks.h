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
#define X_LEAST_MAX 0x1p-100f
#define X_MOST_MAX  0x1p100f

// Some rows times some tokens. Lives on the stack.
typedef struct {
  _Alignas(64) uint8_t w[DWORDS][ROW_VECTORS][FOUR_BYTES];
  vf scale[GROUPS][ROW_VECTORS], offset[GROUPS][ROW_VECTORS];
  _Alignas(64) int8_t x[X_COLS * 2 + MOST_TOKENS * X_PAD]; // [token][four columns][X_FOUR]
  float x_scale[MOST_GROUPS];                              // [token][part], or [token][group]
  int32_t x_less[MOST_GROUPS];                             // [token][group]: - gguf_less * sum of x
  float x_sum[HAS_OFFSETS ? MOST_GROUPS : 1];
  vf total[MOST_ROWS / VL * MOST_TOKENS]; // [vector of rows][token]
  bool fits[MOST_TOKENS];
  uint32_t x_bytes;     // of a column of x; an only token's always 2, as product_of_one takes them
  bool scales_by_group; // of x
  const td_linear_args *a;
  size_t row_bytes;
  uint32_t row0, n_rows, token0, n_tokens; // the block
  uint32_t n_tiles;                        // of tokens
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
  for (uint32_t k = 0; k < n; k += VL, out += g->x_bytes * VL) {
    const vi q = vi_from_vf(vf_mul(vf_load(x + k), inverse));
    pack_fours(q, g->x_bytes, out);
    if (!gguf_less(BLOCK_DTYPE) && !HAS_OFFSETS) continue;
    group = vi_add(group, q);
    if ((k + VL) % GROUP_COLS > 0) continue;
    const int32_t of_group = vi_sum(group);
    group = vi_zero();
    // Unsigned: what does not fit may pass the range.
    less[k / GROUP_COLS] = (int32_t)(0 - (uint32_t)gguf_less(BLOCK_DTYPE) * (uint32_t)of_group);
    if (HAS_OFFSETS) sum[k / GROUP_COLS] = (float)of_group * (g->scales_by_group ? *scale : 1);
  }
  return fits;
}

static size_t x_stride(const product *g) {
  return (size_t)g->n_span * g->x_bytes + X_PAD;
}

// Scales of x that a token has.
static size_t n_scales(const product *g) {
  return (size_t)g->n_parts * (g->scales_by_group ? GROUPS : 1);
}

// Packs the span's columns of all tokens.
static void pack_tokens(product *g) {
  const size_t n_groups = (size_t)g->n_parts * GROUPS;
  const uint32_t step = g->scales_by_group ? GROUP_COLS : PART;
  for (uint32_t t = 0; t < g->n_tokens; t++) {
    const td_linear_args *a = g->a;
    const uint32_t token = g->token0 + t;
    const float *x = a->x + (a->x_rows ? a->x_rows[token] : token) * a->ldx + g->span;
    for (uint32_t k = 0; k < g->n_span; k += step) {
      const uint32_t left = g->n_span - k;
      const size_t group = t * n_groups + k / GROUP_COLS;
      g->fits[t] &= pack_part(g, x + k, left < step ? left : step,
                              g->x + t * x_stride(g) + k * g->x_bytes,
                              &g->x_scale[t * n_scales(g) + k / step], g->x_less + group,
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
  size_t x_step, scale_step, group_step; // from token to token
} tile_x;

// total [R][..] of T tokens += a part of n_groups groups; a vector of rows is total_step from the
// next. is_a8: x is in 8 bits.
TD_INLINE void product_tile(const int R, const int T, const bool is_a8, const product *g,
                            uint32_t n_groups, const tile_x *x, vf *total, size_t total_step) {
  const uint32_t n_bytes = is_a8 && T > 1 ? A8_BYTES : 2; // as x_bytes
  const bool by_group = is_a8 && IS_SHORT;
  enum { STEPS = GROUP_COLS / 4 };
  const bool has_less = gguf_less(BLOCK_DTYPE) > 0;
  vf part[ROW_VECTORS * TOKENS];
  TD_UNROLL for (int i = 0; i < R * T; i++) part[i] = vf_zero();
  for (uint32_t i = 0; i < n_groups; i++) {
    group_sum sums[ROW_VECTORS * TOKENS];
    TD_UNROLL for (int t = 0; t < T; t++) {
      const vi less = has_less ? vi_set1(x->less[(size_t)t * x->group_step + i]) : vi_zero();
      TD_UNROLL for (int r = 0; r < R; r++) sums[r * T + t] = begin_group(less);
    }
    TD_UNROLL for (uint32_t d = 0; d < STEPS; d++) {
      const uint8_t *w = g->w[i * STEPS + d][0];
      multiply_fours(R, T, n_bytes, w, x->x + (i * STEPS + d) * 4 * n_bytes, x->x_step, sums);
    }
    TD_UNROLL for (int t = 0; t < T; t++) {
      const vf sum_x = vf_set1(HAS_OFFSETS ? x->sum[(size_t)t * x->group_step + i] : 0);
      const vf scale_x = vf_set1(by_group ? x->scale[(size_t)t * x->scale_step + i] : 1);
      TD_UNROLL for (int r = 0; r < R; r++) {
        vf *to = &part[r * T + t];
        const vf scale = by_group ? vf_mul(g->scale[i][r], scale_x) : g->scale[i][r];
        *to = vf_fma(vf_from_vi(end_group(sums[r * T + t])), scale, *to);
        if (HAS_OFFSETS) *to = vf_fma(g->offset[i][r], sum_x, *to);
      }
    }
    // Keeps the compiler from holding many sums in registers, of which there are too few.
    if (T > 1) __asm__ volatile("" : "+m"(part));
  }
  TD_UNROLL for (int t = 0; t < T; t++) {
    const vf scale = vf_set1(by_group ? 1 : x->scale[(size_t)t * x->scale_step]);
    TD_UNROLL for (int r = 0; r < R; r++) {
      vf *to = total + (size_t)r * total_step + t;
      *to = vf_fma(part[r * T + t], scale, *to);
    }
  }
}

#define PRODUCT_TILE(T)                                                                            \
  case T:                                                                                          \
    if (is_a8 && n_vectors == 1) {                                                                 \
      product_tile(1, T, true, g, n_groups, x, total, g->n_tokens);                                \
    } else if (is_a8) {                                                                            \
      product_tile(2, T, true, g, n_groups, x, total, g->n_tokens);                                \
    } else if (n_vectors == 1) {                                                                   \
      product_tile(1, T, false, g, n_groups, x, total, g->n_tokens);                               \
    } else {                                                                                       \
      product_tile(2, T, false, g, n_groups, x, total, g->n_tokens);                               \
    }                                                                                              \
    return;

// Not inlined, since its caller's constants would take registers.
__attribute__((noinline)) static void product_any_tile(uint32_t n_vectors, uint32_t n_tokens,
                                                       const product *g, uint32_t n_groups,
                                                       const tile_x *x, vf *total) {
  const bool is_a8 = g->a->x_int8 && (A8_BYTES == 1 || IS_SHORT); // or there is no difference
  switch (n_tokens) {
    PRODUCT_TILE(1)
    PRODUCT_TILE(2)
    PRODUCT_TILE(3)
    PRODUCT_TILE(4)
    PRODUCT_TILE(5)
    PRODUCT_TILE(6)
  default: return;
  }
}
_Static_assert(TOKENS == 6 && ROW_VECTORS == 2, "a case for every size of tile");

// ---- one token ----------------------------------------------------------------------------------

// One token's x in the order that block_sums takes.
static int8_t *ordered_x(product *g) {
  return ROW_SUMS ? g->x + X_COLS : g->x; // behind the only token's
}

// The sums of VL rows over a block, a row a lane; less [group], or 0.
TD_INLINE void block_sums(row_blocks *b, const int8_t *x, const int32_t *less, vi *sums) {
  const td_block block = td_dtype_block(BLOCK_DTYPE);
  const uint32_t n_groups = block.cols / GROUP_COLS;
  const bool has_less = gguf_less(BLOCK_DTYPE) > 0;
  if (ROW_SUMS) {
    enum { OF_32 = 32 / GROUP_COLS };
    row_signs signs;
    signs_of_rows(b, signs);
    if (IS_BY_ROW) { // much code
      for (uint32_t i = 0; i < n_groups; i += OF_32, x += 32 / 4 * X_FOUR)
        row_sums(BLOCK_DTYPE, OF_32, b->p, b->apart, i / OF_32, x, signs, sums + i);
    } else {
      TD_UNROLL for (uint32_t i = 0; i < n_groups; i += OF_32, x += 32 / 4 * X_FOUR)
          row_sums(BLOCK_DTYPE, OF_32, b->p, b->apart, i / OF_32, x, signs, sums + i);
    }
    if (!has_less) return;
    TD_UNROLL for (uint32_t i = 0; i < n_groups; i++) sums[i] = vi_add(sums[i], vi_set1(less[i]));
    return;
  }
  group_sum of[GROUPS];
  TD_UNROLL for (uint32_t i = 0; i < n_groups; i++)
      of[i] = begin_group(has_less ? vi_set1(less[i]) : vi_zero());
  block_codes(b, &(code_sink){.x = x, .sums = of});
  TD_UNROLL for (uint32_t i = 0; i < n_groups; i++) sums[i] = end_group(of[i]);
}

// VL rows times the block's only token, over the span.
static void product_of_one(product *g, uint32_t row) {
  const td_block block = td_dtype_block(BLOCK_DTYPE);
  const int8_t *x = ordered_x(g);
  const int32_t *less = g->x_less;
  const float *sum_x = g->x_sum, *scale_x = g->x_scale;
  row_blocks b = {.apart = g->row_bytes, .n_rows = VL, .ahead = g->ahead};
  b.p = (const uint8_t *)g->a->w->data + (size_t)(g->row0 + row) * g->row_bytes +
        bytes_before(g->span);
  for (uint32_t k = 0; k < g->n_span; k += PART) {
    const uint32_t n = g->n_span - k < PART ? g->n_span - k : PART;
    vf part = vf_zero();
    for (uint32_t at = 0; at < n; at += block.cols, b.p += block.bytes) {
      vf scale[GROUPS], offset[GROUPS];
      vi sums[GROUPS];
      g->ahead += block.bytes * VL;
      block_scales(&b, scale, offset, 1);
      block_sums(&b, x, less, sums);
      x += block.cols / 4 * X_FOUR;
      less += block.cols / GROUP_COLS;
      TD_UNROLL for (uint32_t i = 0; i < block.cols / GROUP_COLS; i++) {
        if (IS_SHORT && g->scales_by_group) scale[i] = vf_mul(scale[i], vf_set1(*scale_x++));
        part = vf_fma(vf_from_vi(sums[i]), scale[i], part);
        if (HAS_OFFSETS) part = vf_fma(offset[i], vf_set1(*sum_x++), part);
      }
      for (; b.ahead < g->ahead; b.ahead += 64)
        __builtin_prefetch(b.ahead, 0, 2);
    }
    vf *total = &g->total[row / VL];
    const bool is_scaled = IS_SHORT && g->scales_by_group;
    *total = vf_fma(part, vf_set1(is_scaled ? 1 : g->x_scale[k / PART]), *total);
  }
}

// A tile of rows times the block's tokens, over a part of the span.
static void product_part(product *g, uint32_t row, uint32_t part) {
  const uint32_t k = g->span + part * PART, left = g->n_span - part * PART;
  const uint32_t n = left < PART ? left : PART, rows_left = g->n_rows - row;
  const uint32_t n_vectors = rows_left <= VL ? 1 : ROW_VECTORS;
  const size_t group_step = (size_t)g->n_parts * GROUPS;
  for (uint32_t v = 0; v < n_vectors; v++)
    decode_rows(g, row, v, k, n);
  for (uint32_t i = 0; i < g->n_tiles; i++) {
    const uint32_t t = i * g->n_tokens / g->n_tiles, end = (i + 1) * g->n_tokens / g->n_tiles;
    const tile_x x = {.x = g->x + t * x_stride(g) + (size_t)part * g->x_bytes * PART,
                      .scale = g->x_scale + t * n_scales(g) + n_scales(g) / g->n_parts * part,
                      .less = g->x_less + t * group_step + part * GROUPS,
                      .sum = g->x_sum + (HAS_OFFSETS ? t * group_step + part * GROUPS : 0),
                      .x_step = x_stride(g),
                      .scale_step = n_scales(g),
                      .group_step = group_step};
    product_any_tile(n_vectors, end - t, g, n / GROUP_COLS, &x,
                     g->total + (size_t)row / VL * g->n_tokens + t);
  }
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

// Where the block's rows from `row` on begin, or what is read after its last one.
static const char *rows_behind(const product *g, uint32_t row) {
  const uint32_t behind = g->row0 + row;
  if (behind >= g->a->row_end && g->a->next) return g->a->next;
  return (const char *)g->a->w->data + behind * g->row_bytes + bytes_before(g->span);
}

// Computes the block that g describes.
static void product_block(product *g, uint32_t most_span) {
  const uint32_t cols = g->a->w->cols;
  memset(g->total, 0, sizeof(vf) * ((g->n_rows + VL - 1) / VL) * g->n_tokens);
  g->n_tiles = (g->n_tokens + TOKENS - 1) / TOKENS;
  for (g->span = 0; g->span < cols; g->span += g->n_span) {
    g->n_span = cols - g->span < most_span ? cols - g->span : most_span;
    g->n_parts = (g->n_span + PART - 1) / PART;
    pack_tokens(g);
    uint32_t row = 0;
    if (ROW_SUMS && g->n_tokens == 1) order_x(g->x, g->n_span, ordered_x(g));
    for (; g->n_tokens == 1 && row + VL <= g->n_rows; row += VL) {
      g->ahead = rows_behind(g, row + VL);
      product_of_one(g, row);
    }
    for (; row < g->n_rows; row += TILE_ROWS) {
      g->ahead = rows_behind(g, row + TILE_ROWS);
      for (uint32_t part = 0; part < g->n_parts; part++)
        product_part(g, row, part);
    }
  }
  put_results(g);
}

static void linear_blocks(const td_linear_args *a) {
  product g;
  g.a = a;
  g.row_bytes = td_weight_row_bytes(a->w);
  g.scales_by_group = IS_SHORT && a->x_int8;
  const uint32_t n_blocks = (a->n_tokens + MOST_TOKENS - 1) / MOST_TOKENS;
  for (uint32_t i = 0; i < n_blocks; i++) { // of even size
    g.token0 = (uint32_t)((uint64_t)i * a->n_tokens / n_blocks);
    g.n_tokens = (uint32_t)((i + 1ull) * a->n_tokens / n_blocks) - g.token0;
    g.x_bytes = a->x_int8 && g.n_tokens > 1 ? A8_BYTES : 2;
    // One token's x may be there in two orders.
    const uint32_t most_span = X_COLS / (g.n_tokens > 1 ? g.n_tokens : 2) / PART * PART;
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
}
