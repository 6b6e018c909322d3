// kernels/cpu/avx512/linear_blocks.h - y = W x for GGUF's blocks, with x rounded to 15 bits.
// Include after BLOCK_DTYPE and BLOCKS_EXACT, the kernel for tokens that do not qualify.
//
// A token has a scale per 256 columns, its largest magnitude / 16256, so that x is scale * (128 a +
// b) with signed bytes a and b. Codes are unsigned bytes, and VNNI multiplies four columns of
// sixteen rows by one of those bytes each: sums of a group of 16 or 32 columns are exact integers.
// total = fma(sum * token scale, weight scale, total), group after group, and where weights have
// offsets, total = fma(offset, sum of the group's x, total). All paths are one, so a token's bits
// do not depend on its batch. |error| <= sum |w| scale / 2 over the columns, from rounding x, plus
// that of the FP32 sum.
// Lanes are rows: TILE_ROWS rows and PART columns are transposed and decoded into L1 (a fifth of
// the work of one token) and used for one tile of tokens after the other; x of a block of tokens
// stays in L2.
#ifndef KERNELS_CPU_AVX512_LINEAR_BLOCKS_H
#define KERNELS_CPU_AVX512_LINEAR_BLOCKS_H

#include <math.h>
#include <stdbool.h>

#include "kernels/cpu/avx512/blocks_rows.h"
#include "kernels/cpu/common/numeric.h"
#include "kernels/decl.h"

enum {
  ROW_VECTORS = 2,
  TILE_ROWS = ROW_VECTORS * VL,
  TOKENS = 6, // per tile: 2 x 6 sums of a and of b, and what is loaded, fill the registers
  PART = 256,
  GROUPS = PART / GROUP_COLS,
  DWORDS = PART / 4,
  MOST_TOKENS = 96, // per block
  MOST_ROWS = 512,
  X_COLS = 192 << 10, // over all tokens of a block
  X_PAD = 64,         // bytes between tokens, so that they fall into different L1 sets
  X_MOST_INT = 16256, // 127 * 128
};
#define X_LEAST_MAX 0x1p-100f
#define X_MOST_MAX  0x1p100f

// Some rows times some tokens. Lives on the stack.
typedef struct {
  _Alignas(64) uint8_t w[DWORDS][ROW_VECTORS][64];
  vf scale[GROUPS][ROW_VECTORS], offset[GROUPS][ROW_VECTORS];
  _Alignas(64) int8_t x[X_COLS * 2 + MOST_TOKENS * X_PAD];    // [token][dword][a or b][4]
  float x_scale[X_COLS / PART + MOST_TOKENS];                 // [token][part]
  int32_t x_less[X_COLS / GROUP_COLS + MOST_TOKENS * GROUPS]; // [token][group]: -LESS * sum of x
  float x_sum[HAS_OFFSETS ? X_COLS / GROUP_COLS + MOST_TOKENS * GROUPS : 1];
  vf total[MOST_ROWS / VL * MOST_TOKENS]; // [vector of rows][token]
  bool fits[MOST_TOKENS];
  const td_linear_args *a;
  size_t row_bytes;
  uint32_t row0, n_rows, token0, n_tokens; // the block
  uint32_t n_tiles;                        // of tokens
  uint32_t span, n_span;                   // columns [span, span + n_span)
  uint32_t n_parts;                        // of the span
  const char *ahead;                       // memory that is read after the tile's rows
} product;

// ---- activations ----------------------------------------------------------------------------

// The largest magnitude; NaN if any is NaN.
static float largest_of(const float *x, uint32_t n) {
  const vi magnitude = _mm512_set1_epi32(0x7fffffff);
  vi most = _mm512_setzero_si512();
  for (uint32_t k = 0; k < n; k += VL) // NaN and infinity are larger than all others as integers
    most = _mm512_max_epi32(most, _mm512_and_si512(vi_load(x + k), magnitude));
  return f32_from_bits((uint32_t)_mm512_reduce_max_epi32(most));
}

// Packs a part of n columns of a token, a multiple of 32: a and b in turn, four columns each.
// False: it does not fit.
static bool pack_part(const float *x, uint32_t n, int8_t *out, float *scale, int32_t *less,
                      float *sum) {
  const float most = largest_of(x, n);
  const bool is_zero = most == 0, fits = is_zero || (most >= X_LEAST_MAX && most < X_MOST_MAX);
  *scale = fits ? most / X_MOST_INT : 0;
  const vf inverse = vf_set1(fits && !is_zero ? X_MOST_INT / most : 0);
  vi group = _mm512_setzero_si512();
  for (uint32_t k = 0; k < n; k += VL, out += 2 * VL) {
    const vi q = _mm512_cvtps_epi32(vf_mul(vf_load(x + k), inverse));
    const vi a = _mm512_srai_epi32(_mm512_add_epi32(q, _mm512_set1_epi32(64)), 7);
    const vi b = _mm512_sub_epi32(q, _mm512_slli_epi32(a, 7));
    const __m128i pair[2] = {_mm512_cvtepi32_epi8(a), _mm512_cvtepi32_epi8(b)};
    _mm_storeu_si128((__m128i *)(void *)out, _mm_unpacklo_epi32(pair[0], pair[1]));
    _mm_storeu_si128((__m128i *)(void *)(out + VL), _mm_unpackhi_epi32(pair[0], pair[1]));
    if (!LESS && !HAS_OFFSETS) continue;
    group = _mm512_add_epi32(group, q);
    if ((k + VL) % GROUP_COLS > 0) continue;
    const int32_t of_group = _mm512_reduce_add_epi32(group);
    group = _mm512_setzero_si512();
    // Unsigned: what does not fit may pass the range.
    if (LESS) less[k / GROUP_COLS] = (int32_t)((uint32_t)-LESS * (uint32_t)of_group);
    if (HAS_OFFSETS) sum[k / GROUP_COLS] = (float)of_group * *scale;
  }
  return fits;
}

static size_t x_stride(const product *g) {
  return (size_t)g->n_span * 2 + X_PAD;
}

// Packs the span's columns of all tokens.
static void pack_tokens(product *g) {
  const size_t n_groups = (size_t)g->n_parts * GROUPS;
  for (uint32_t t = 0; t < g->n_tokens; t++) {
    const td_linear_args *a = g->a;
    const uint32_t token = g->token0 + t;
    const float *x = a->x + (a->x_rows ? a->x_rows[token] : token) * a->ldx + g->span;
    for (uint32_t i = 0; i < g->n_parts; i++) {
      const uint32_t left = g->n_span - i * PART;
      g->fits[t] &= pack_part(
          x + i * PART, left < PART ? left : PART, g->x + t * x_stride(g) + i * 2 * PART,
          &g->x_scale[t * g->n_parts + i], g->x_less + t * n_groups + i * GROUPS,
          g->x_sum + (HAS_OFFSETS ? t * n_groups + i * GROUPS : 0));
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
    block_codes(&b, g->w[at / 4][v], sizeof g->w[0]);
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

TD_INLINE vi dword_of(const int8_t *p) {
  int dword;
  memcpy(&dword, p, sizeof dword);
  return _mm512_set1_epi32(dword);
}

// total [R][..] of T tokens += a part of n_groups groups; a vector of rows is total_step from the
// next.
TD_INLINE void product_tile(const int R, const int T, const product *g, uint32_t n_groups,
                            const tile_x *x, vf *total, size_t total_step) {
  enum { STEPS = GROUP_COLS / 4 };
  for (uint32_t i = 0; i < n_groups; i++) {
    vi a[ROW_VECTORS * TOKENS], b[ROW_VECTORS * TOKENS];
    TD_UNROLL for (int t = 0; t < T; t++) {
      const vi less = LESS ? _mm512_set1_epi32(x->less[(size_t)t * x->group_step + i])
                           : _mm512_setzero_si512();
      TD_UNROLL for (int r = 0; r < R; r++) {
        a[r * T + t] = _mm512_setzero_si512();
        b[r * T + t] = less;
      }
    }
    TD_UNROLL for (uint32_t d = 0; d < STEPS; d++) {
      vi w[ROW_VECTORS];
      TD_UNROLL for (int r = 0; r < R; r++) w[r] = vi_load(g->w[i * STEPS + d][r]);
      TD_UNROLL for (int t = 0; t < T; t++) {
        const int8_t *of_x = x->x + (size_t)t * x->x_step + (i * STEPS + d) * 8;
        vi xa = dword_of(of_x), xb = dword_of(of_x + 4);
        __asm__("" : "+v"(xa), "+v"(xb)); // one load instead of one per multiplication
        TD_UNROLL for (int r = 0; r < R; r++) {
          a[r * T + t] = _mm512_dpbusd_epi32(a[r * T + t], w[r], xa);
          b[r * T + t] = _mm512_dpbusd_epi32(b[r * T + t], w[r], xb);
        }
      }
    }
    TD_UNROLL for (int t = 0; t < T; t++) {
      const vf scale = vf_set1(x->scale[(size_t)t * x->scale_step]);
      TD_UNROLL for (int r = 0; r < R; r++) {
        const vi sum = _mm512_add_epi32(_mm512_slli_epi32(a[r * T + t], 7), b[r * T + t]);
        vf *to = total + (size_t)r * total_step + t;
        *to = vf_fma(vf_mul(_mm512_cvtepi32_ps(sum), scale), g->scale[i][r], *to);
        if (HAS_OFFSETS)
          *to = vf_fma(g->offset[i][r], vf_set1(x->sum[(size_t)t * x->group_step + i]), *to);
      }
    }
    // Keeps the compiler from holding totals in registers, of which there are too few.
    __asm__ volatile("" ::: "memory");
  }
}

#define PRODUCT_TILE(T)                                                                            \
  case T:                                                                                          \
    if (n_vectors == 1) {                                                                          \
      product_tile(1, T, g, n_groups, x, total, g->n_tokens);                                      \
    } else {                                                                                       \
      product_tile(2, T, g, n_groups, x, total, g->n_tokens);                                      \
    }                                                                                              \
    return;

// Not inlined, since its caller's constants would take registers.
__attribute__((noinline)) static void product_any_tile(uint32_t n_vectors, uint32_t n_tokens,
                                                       const product *g, uint32_t n_groups,
                                                       const tile_x *x, vf *total) {
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
    const tile_x x = {.x = g->x + t * x_stride(g) + (size_t)part * 2 * PART,
                      .scale = g->x_scale + (size_t)t * g->n_parts + part,
                      .less = g->x_less + t * group_step + part * GROUPS,
                      .sum = g->x_sum + (HAS_OFFSETS ? t * group_step + part * GROUPS : 0),
                      .x_step = x_stride(g),
                      .scale_step = g->n_parts,
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

// Where the rows behind `row` of the block begin.
static const char *rows_behind(const product *g, uint32_t row) {
  const uint32_t behind = g->row0 + row + TILE_ROWS;
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
    for (uint32_t row = 0; row < g->n_rows; row += TILE_ROWS) {
      g->ahead = rows_behind(g, row);
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
  const uint32_t n_blocks = (a->n_tokens + MOST_TOKENS - 1) / MOST_TOKENS;
  for (uint32_t i = 0; i < n_blocks; i++) { // of even size
    g.token0 = (uint32_t)((uint64_t)i * a->n_tokens / n_blocks);
    g.n_tokens = (uint32_t)((i + 1ull) * a->n_tokens / n_blocks) - g.token0;
    const uint32_t most_span = X_COLS / g.n_tokens / PART * PART;
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

#endif
