// kernels/cpu/avx2int16/linear_q4.h - y = W x for rows of 4-bit codes with x rounded to 16 bits.
// Include after vec.h and these definitions:
//   LESS        what codes are larger by than their values, in units
//   UNIT        the value of one unit
//   pairs_of    the codes of a vector as 16-bit numbers: vector i has number i of each 16 bits
//   Q16_RESULT  a row's result from its sum
//   Q16_EXACT   the kernel for tokens that do not qualify
//
// A token has a scale per block of columns (w4a8.h), its largest magnitude / 32767. The sum of code
// times x over a block is an exact integer in 32 bits, since it stays below 128 * 24 * 2^15, and
// total = fma(sum * token scale, weight scale, total), block after block. So the order of additions
// within a block does not matter, and all paths, for prefill and decode, agree to the last bit.
// |error| <= sum |w| scale / 2 over the columns (from rounding x), plus that of the FP32 sum.
// Decoding to 16-bit integers takes a third of the instructions of decoding to floats.
//   up to FEW tokens  lanes are columns: weights are multiplied as they are loaded, and once per
//                     block the sums of VL rows are transposed to become lanes
//   more              lanes are rows: TILE_ROWS rows and PART columns are transposed and decoded
//                     into L1 and used for one tile of tokens after the other; x of a block of
//                     tokens stays in L2
#pragma once

#include <stdbool.h>

#include "kernels/cpu/avx2int16/round.h"
#include "kernels/cpu/common/transpose.h"
#include "kernels/decl.h"

#define TD_UNROLL _Pragma("GCC unroll 32")

enum {
  ROW_VECTORS = 2,
  TILE_ROWS = ROW_VECTORS * VL,
  TOKENS = 6, // per tile, at most: 2 x 6 sums, 2 of weights, x and a product fill the registers
  FEW = 4,
  CHUNK = 4 * OCTET,  // columns in 16 bytes
  STEP = 2 * CHUNK,   // columns per vector
  PART = 512,         // columns decoded at a time
  FEW_PART = 2048,    // columns whose scales are prepared at a time, for few tokens
  MOST_TOKENS = 192,  // per block
  X_COLS = 192 * 512, // over all tokens of a block
  X_BLOCKS = X_COLS / A8_LEAST_BLOCK,
  PART_GROUPS = FEW_PART / A8_LEAST_BLOCK,
  BEHIND = STEP / A8_LEAST_BLOCK, // maximum blocks past a row's end within its last step
};

// Some rows times some tokens. Lives on the stack.
typedef struct {
  _Alignas(64) int32_t w[PART / 2][TILE_ROWS]; // two codes each
  _Alignas(64) int16_t x[X_COLS]; // [tile][octet of the span][token][pairs of i, i + 4]
  float x_scale[X_BLOCKS];        // [tile][block of the span][token]
  int32_t x_less[X_BLOCKS];       // -LESS times the sum of x: corrects for codes' excess
  vf scale[(PART_GROUPS + BEHIND) * ROW_VECTORS]; // [group of the part][vector of rows]
  vi zero[(PART_GROUPS + BEHIND) * ROW_VECTORS];  // used if there are zero points
  char tail[VL][A8_MOST_BLOCK / 2];
  bool fits[MOST_TOKENS];
  const td_linear_args *a;
  size_t row_bytes;
  uint32_t block;          // columns per scale of x
  uint32_t blocks_a_group; // blocks per group of weights
  uint32_t n_tiles;        // tiles of tokens
  // columns of x [span, span + n_span); padded: including zeros after them
  uint32_t span, n_span, padded;
  uint32_t row, n_rows; // the tile
  uint32_t k, n;        // the part: columns [k, k + n)
} q16;

static uint32_t tile_begin(const q16 *g, uint32_t tile) {
  return tile * g->a->n_tokens / g->n_tiles;
}

// ---- activations ----------------------------------------------------------------------------

static const float *token_x(const q16 *g, uint32_t token) {
  return g->a->x + (g->a->x_rows ? g->a->x_rows[token] : token) * g->a->ldx + g->span;
}

static void round_token(q16 *g, uint32_t token, int16_t *out, size_t step, float *scale,
                        int32_t *less, size_t scale_step) {
  const float *x = token_x(g, token);
  for (uint32_t k = 0; k < g->padded; k += g->block, scale += scale_step, less += scale_step) {
    const uint32_t left = k < g->n_span ? g->n_span - k : 0;
    uint32_t sum;
    g->fits[token] &= round_block(x + (left ? k : 0), left < g->block ? left : g->block, g->block,
                                  PAIRS_APART, out + k / OCTET * step, step, scale, &sum);
    *scale *= UNIT;
    *less = (int32_t)(0 - sum * (g->a->w->zero ? 1 : LESS)); // any value if x is not finite
  }
}

// Rounds the span's columns of the tokens, tile by tile.
static void round_tokens(q16 *g) {
  const size_t n_blocks = g->padded / g->block;
  for (uint32_t i = 0; i < g->n_tiles; i++) {
    const uint32_t begin = tile_begin(g, i), n = tile_begin(g, i + 1) - begin;
    for (uint32_t t = 0; t < n; t++) {
      round_token(g, begin + t, g->x + (size_t)begin * g->padded + t * OCTET, (size_t)n * OCTET,
                  g->x_scale + begin * n_blocks + t, g->x_less + begin * n_blocks + t, n);
    }
  }
}

// ---- weights --------------------------------------------------------------------------------

// Number of rows in the tile's vector v.
static uint32_t vector_rows(const q16 *g, uint32_t v) {
  const uint32_t left = g->n_rows < v * VL ? 0 : g->n_rows - v * VL;
  return left < VL ? left : VL;
}

// Decodes byte i of every lane as a scale, special codes included.
static vf any_scale(vi dwords, td_dtype dtype, int i) {
  uint8_t bytes[VL][4], codes[VL];
  _mm256_storeu_si256((vi *)bytes, dwords);
  for (int r = 0; r < VL; r++)
    codes[r] = bytes[r][i];
  return dtype == TD_F8E8M0 ? vf_from_e8m0(codes) : vf_from_e4m3_exact(codes);
}

// Decodes the scales in a dword of each row, in order: as many as a dword holds.
TD_INLINE void scales_in(vi dwords, td_dtype dtype, vf out[4]) {
  const vi ones = _mm256_set1_epi8(-1), sign = _mm256_set1_epi8((char)0x80);
  const bool is_e8m0 = dtype == TD_F8E8M0;
  switch (dtype) {
  case TD_F32: out[0] = _mm256_castsi256_ps(dwords); return;
  case TD_BF16:
    out[0] = _mm256_castsi256_ps(_mm256_slli_epi32(dwords, 16));
    out[1] = _mm256_castsi256_ps(_mm256_and_si256(dwords, _mm256_set1_epi32((int)0xffff0000)));
    return;
  case TD_F16:
    TD_UNROLL for (int i = 0; i < 2; i++) {
      const vi half = _mm256_and_si256(_mm256_srli_epi32(dwords, 16 * i),
                                       _mm256_set1_epi32(0xffff));
      const vi both = _mm256_permute4x64_epi64(_mm256_packus_epi32(half, half), 0x08);
      out[i] = _mm256_cvtph_ps(_mm256_castsi256_si128(both));
    }
    return;
  default: break;
  }
  // NaN, and 2^-127 in E8M0. All other codes are an F32's bits once shifted into place.
  vi odd = _mm256_cmpeq_epi8(is_e8m0 ? dwords : _mm256_or_si256(dwords, sign), ones);
  if (is_e8m0) odd = _mm256_or_si256(odd, _mm256_cmpeq_epi8(dwords, _mm256_setzero_si256()));
  const bool plain = _mm256_testz_si256(odd, odd);
  const vi keep = _mm256_set1_epi32(is_e8m0 ? 0x7f800000 : (int)0x87f00000);
  TD_UNROLL for (int i = 0; i < 4; i++) {
    const vi top = _mm256_slli_epi32(dwords, 24 - 8 * i);
    const vi bits = is_e8m0 ? _mm256_srli_epi32(top, 1) : _mm256_srai_epi32(top, 4);
    const vf v = _mm256_castsi256_ps(_mm256_and_si256(bits, keep));
    out[i] = is_e8m0 ? v : vf_mul(v, vf_set1(0x1p120f));
    if (__builtin_expect(!plain, 0)) out[i] = any_scale(dwords, dtype, i);
  }
}

// The scales of n_rows rows from `row` on, for n groups from `first` on: a vector per group, at out
// + i ROW_VECTORS, followed by zeros.
TD_INLINE void put_scales_of(td_dtype dtype, const td_weight *w, uint32_t row, uint32_t n_rows,
                             uint32_t first, uint32_t n, vf *out) {
  const size_t bytes = td_dtype_bytes(dtype), of_row = td_weight_groups(w) * bytes;
  const uint32_t in_dword = (uint32_t)(4 / bytes), in_all = 4 * in_dword;
  const char *from = (const char *)w->scale + row * of_row + first * bytes;
  size_t left = (w->rows - row - n_rows + 1) * of_row - first * bytes; // counted from the last row
  for (uint32_t i = 0; i < n; i += in_all, from += 16, left -= left < 16 ? left : 16) {
    const uint32_t n_here = n - i < in_all ? n - i : in_all;
    vi dwords[4];
    vf scales[4][4];
    transpose_rows(from, of_row, n_rows, left, dwords);
    TD_UNROLL for (uint32_t d = 0; d < 4; d++) {
      if (d * in_dword >= n_here) break;
      scales_in(dwords[d], dtype, scales[d]);
      TD_UNROLL for (uint32_t j = 0; j < in_dword; j++, out += ROW_VECTORS) *out = scales[d][j];
    }
    if (n_here % in_dword) out -= (in_dword - n_here % in_dword) * ROW_VECTORS;
  }
  for (uint32_t i = 0; i < BEHIND; i++, out += ROW_VECTORS)
    *out = vf_zero();
}

static void put_scales(const td_weight *w, uint32_t row, uint32_t n_rows, uint32_t first,
                       uint32_t n, vf *out) {
  switch (w->scale_dtype) {
  case TD_BF16: put_scales_of(TD_BF16, w, row, n_rows, first, n, out); return;
  case TD_F16: put_scales_of(TD_F16, w, row, n_rows, first, n, out); return;
  case TD_F8E8M0: put_scales_of(TD_F8E8M0, w, row, n_rows, first, n, out); return;
  case TD_F8E4M3: put_scales_of(TD_F8E4M3, w, row, n_rows, first, n, out); return;
  default: put_scales_of(TD_F32, w, row, n_rows, first, n, out);
  }
}

// The same for zero points. A word has those of eight rows.
static void put_zeros(const td_weight *w, uint32_t row, uint32_t n_rows, uint32_t first, uint32_t n,
                      vi *out) {
  const size_t of_rows = td_weight_groups(w);
  for (uint32_t i = 0; i < n; i++, out += ROW_VECTORS) {
    if (row % 8 == 0) {
      const uint32_t word = w->zero[row / 8 * of_rows + first + i];
      *out = _mm256_and_si256(vi_spread4(&word), _mm256_set1_epi32(15));
      continue;
    }
    int of_row[VL] = {0};
    for (uint32_t r = 0; r < n_rows; r++)
      of_row[r] = zero_at(w, row + r, first + i);
    *out = vi_load(of_row);
  }
  for (uint32_t i = 0; i < BEHIND; i++, out += ROW_VECTORS)
    *out = _mm256_setzero_si256();
}

// Scales and zero points of the part's blocks.
static void find_groups(q16 *g) {
  const td_weight *w = g->a->w;
  const uint32_t first = g->k / w->scale_cols, n = (g->k + g->n - 1) / w->scale_cols - first + 1;
  for (uint32_t v = 0; v < ROW_VECTORS; v++) {
    const uint32_t row = g->row + v * VL, n_rows = vector_rows(g, v);
    if (n_rows == 0) continue; // results of these rows are not stored
    put_scales(w, row, n_rows, first, n, g->scale + v);
    if (w->zero) put_zeros(w, row, n_rows, first, n, g->zero + v);
  }
}

// Number of blocks, from the part's first one on, that share its scales.
static uint32_t blocks_of_first_group(const q16 *g) {
  return g->blocks_a_group - g->k / g->block % g->blocks_a_group;
}

// Codes of the tile's vector v.
static const char *codes_at(const q16 *g, uint32_t v) {
  return (const char *)g->a->w->data + (g->row + v * VL) * g->row_bytes + g->k / 2;
}

// ---- products -------------------------------------------------------------------------------

// Initial sums of a tile in a block, which correct for codes being LESS larger than their values.
TD_INLINE void begin_block(const int R, const int T, const bool zeros, const int32_t *less,
                           const vi *zero, vi *acc) {
  TD_UNROLL for (int r = 0; r < R; r++) {
    TD_UNROLL for (int t = 0; t < T; t++) {
      const vi of_token = _mm256_set1_epi32(less[t]);
      acc[r * T + t] = zeros ? _mm256_mullo_epi32(zero[r], of_token) : of_token;
    }
  }
}

TD_INLINE void end_block(const int R, const int T, const float *x_scale, const vf *scale,
                         const vi *acc, vf *total) {
  TD_UNROLL for (int i = 0; i < R * T; i++) {
    const vf sum = vf_mul(_mm256_cvtepi32_ps(acc[i]), vf_set1(x_scale[i % T]));
    total[i] = vf_fma(sum, scale[i / T], total[i]);
  }
}

// Loads the totals so far from y, for the tile's vector r and token t.
TD_INLINE vf load_total(const q16 *g, const float *y, int r, int t) {
  const uint32_t n_rows = vector_rows(g, (uint32_t)r);
  const float *from = y + t * g->a->ldy + r * VL;
  if (g->k == 0) return vf_zero();
  return n_rows < VL ? vf_load_n(from, n_rows) : vf_load(from);
}

TD_INLINE void store_total(const q16 *g, float *y, int r, int t, vf total) {
  const uint32_t n_rows = vector_rows(g, (uint32_t)r);
  float *to = y + t * g->a->ldy + r * VL;
  if (g->k + g->n == g->a->w->cols) total = Q16_RESULT(g->a->w, total);
  if (n_rows < VL) {
    vf_store_n(to, total, n_rows);
  } else {
    vf_store(to, total);
  }
}

static float *tile_y(const q16 *g, uint32_t tile) {
  return g->a->y + tile_begin(g, tile) * g->a->ldy + g->row - g->a->y_row0;
}

// ---- few tokens -----------------------------------------------------------------------------

// Lanes are columns: a vector is STEP columns of a row. The vectors of VL rows are summed so that
// each row becomes a lane. In x, vector i of a step has column 4 j + i at 16-bit position j, as in
// pairs_of.

static void order_steps(int16_t *x, uint32_t n) {
  for (int16_t *step = x; step < x + n; step += STEP) {
    vi in[4], of[4];
    for (int i = 0; i < 4; i++)
      in[i] = vi_load_two(step + i * OCTET, step + (i + 4) * OCTET);
    vi_transpose4(in[0], in[1], in[2], in[3], of);
    for (int i = 0; i < 4; i++)
      _mm256_storeu_si256((vi *)(step + 16 * i), of[i]);
  }
}

// Products of a row's n_steps with T tokens, lane by lane. The x of consecutive tokens is `apart`
// elements apart.
TD_INLINE void dot_steps(const int n_steps, const int T, const char *row, const int16_t *x,
                         size_t apart, vi *sums) {
  TD_UNROLL for (int s = 0; s < n_steps; s++) {
    vi w[4];
    pairs_of(vi_load(row + s * STEP / 2), w);
    TD_UNROLL for (int t = 0; t < T; t++) {
      const int16_t *xs = x + (size_t)t * apart + s * STEP;
      TD_UNROLL for (int i = 0; i < 4; i++) {
        const vi xv = vi_load(xs + 16 * i);
        if (s == 0 && i == 0) {
          sums[t] = _mm256_madd_epi16(w[i], xv);
        } else { // for one token, the single instruction's latency is longer than that of two
          sums[t] = T == 1 ? add_in_two(sums[t], w[i], xv) : add_pairs(sums[t], w[i], xv);
        }
        // Forces the sum now; the compiler would keep products in registers, of which there are too
        // few.
        if (T > 2) __asm__ volatile("" : "+v"(sums[t]));
      }
    }
  }
}

TD_INLINE vi add_by_32(vi a, vi b) {
  return _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
}

TD_INLINE vi add_by_64(vi a, vi b) {
  return _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
}

// out [blocks of the steps][T] = sums of VL rows, one per lane.
TD_INLINE void sum_steps(const uint32_t block, const int T, const char *const *rows, size_t at,
                         const int16_t *x, size_t apart, vi *out) {
  enum { N = VL / 2 };
  const int n_steps = block > STEP ? 2 : 1, n_halves = block < STEP / 2 ? 2 : 1;
  vi all[VL][FEW], of[2][FEW][2]; // of[i]: of N rows, each half of a vector
  // Not unrolled for three and four tokens, since the code would exceed the CPU's cache of decoded
  // instructions.
  const int n_looped = T > 2 ? VL : 0, n_unrolled = T > 2 ? 0 : N;
  _Pragma("GCC unroll 1") for (int j = 0; j < n_looped; j++)
      dot_steps(n_steps, T, rows[j] + at, x, apart, all[j]);
  TD_UNROLL for (int i = 0; i < 2; i++) {
    vi(*r)[FEW] = all + i * N;
    TD_UNROLL for (int j = 0; j < n_unrolled; j++) {
      dot_steps(n_steps, T, rows[i * N + j] + at, x, apart, r[j]);
      // Keeps the compiler from holding x for the next row, or products not added yet, in
      // registers, of which there are too few.
      TD_UNROLL for (int t = 0; t < T; t++) __asm__ volatile("" : "+v"(r[j][t])::"memory");
    }
    TD_UNROLL for (int t = 0; t < T; t++) {
      if (n_halves == 1) {
        of[i][t][0] = add_by_64(add_by_32(r[0][t], r[1][t]), add_by_32(r[2][t], r[3][t]));
        continue;
      }
      of[i][t][0] = add_by_64(_mm256_unpacklo_epi32(r[0][t], r[1][t]),
                              _mm256_unpacklo_epi32(r[2][t], r[3][t]));
      of[i][t][1] = add_by_64(_mm256_unpackhi_epi32(r[0][t], r[1][t]),
                              _mm256_unpackhi_epi32(r[2][t], r[3][t]));
    }
  }
  TD_UNROLL for (int t = 0; t < T; t++) {
    TD_UNROLL for (int i = 0; i < n_halves; i++) {
      const vi low = _mm256_permute2x128_si256(of[0][t][i], of[1][t][i], 0x20);
      const vi high = _mm256_permute2x128_si256(of[0][t][i], of[1][t][i], 0x31);
      if (block >= STEP) {
        out[t] = _mm256_add_epi32(low, high);
      } else {
        out[i * T + t] = low;
        out[(n_halves + i) * T + t] = high;
      }
    }
  }
}

// Copies the rest of rows, less than a step, followed by zeros.
static void copy_tails(q16 *g, const char *const *rows, size_t at, const char **tails) {
  memset(g->tail, 0, sizeof g->tail);
  for (uint32_t i = 0; i < VL; i++)
    tails[i] = memcpy(g->tail[i], rows[i] + at, g->row_bytes - g->k / 2 - at);
}

// Adds the products of the part to the totals of VL rows and T tokens.
TD_INLINE void few_part(const uint32_t block, const int T, const bool zeros, q16 *g,
                        const char *const *rows, const char **ahead, vf *total) {
  const uint32_t unit = block > STEP ? block : STEP, blocks = unit / block;
  const size_t of_token = g->padded / block, n_bytes = g->row_bytes - g->k / 2;
  const int16_t *x = g->x + (g->k - g->span);
  const float *x_scale = g->x_scale + (g->k - g->span) / block;
  const int32_t *less = g->x_less + (g->k - g->span) / block;
  const vf *scale = g->scale;
  const vi *zero = g->zero;
  uint32_t in_group = blocks_of_first_group(g);
  for (uint32_t k = 0; k < g->n; k += unit, x += unit) {
    vi sums[STEP / A8_LEAST_BLOCK * FEW];
    TD_UNROLL for (uint32_t i = 0; i < VL * unit / 2; i += 64, *ahead += 64) {
      __builtin_prefetch(*ahead, 0, 2);
    }
    if (__builtin_expect(n_bytes - k / 2 >= unit / 2, 1)) {
      sum_steps(block, T, rows, k / 2, x, g->padded, sums);
    } else {
      const char *tails[VL];
      copy_tails(g, rows, k / 2, tails);
      sum_steps(block, T, tails, 0, x, g->padded, sums);
    }
    TD_UNROLL for (uint32_t i = 0; i < blocks; i++, x_scale++, less++) {
      TD_UNROLL for (uint32_t t = 0; t < (uint32_t)T; t++) {
        vi sum = _mm256_set1_epi32(less[t * of_token]);
        if (zeros) sum = _mm256_mullo_epi32(*zero, sum);
        sum = _mm256_add_epi32(sum, sums[i * (uint32_t)T + t]);
        const vf of_block = vf_mul(_mm256_cvtepi32_ps(sum), vf_set1(x_scale[t * of_token]));
        total[t] = vf_fma(of_block, *scale, total[t]);
      }
      if (--in_group == 0) in_group = g->blocks_a_group, scale += ROW_VECTORS, zero += ROW_VECTORS;
    }
  }
}

// Prefetches the scales of the next rows.
static void fetch_scales(const q16 *g) {
  const td_weight *w = g->a->w;
  const size_t n_bytes = VL * td_weight_groups(w) * td_dtype_bytes(w->scale_dtype);
  const char *from = (const char *)w->scale + (g->row / VL + 1) * n_bytes;
  for (size_t i = 0; i < n_bytes; i += 64)
    __builtin_prefetch(from + i, 0, 2);
}

TD_INLINE void few_rows(const uint32_t block, const int T, const bool zeros, q16 *g) {
  const td_linear_args *a = g->a;
  const uint32_t end = g->span + g->n_span;
  for (g->row = a->row_begin; g->row < a->row_end; g->row += g->n_rows) {
    g->n_rows = a->row_end - g->row < VL ? a->row_end - g->row : VL;
    g->k = g->span;
    const char *rows[VL], *ahead = codes_at(g, 0) + g->n_rows * g->row_bytes;
    if (g->row + g->n_rows == a->row_end && a->next) ahead = a->next;
    fetch_scales(g);
    float *y = tile_y(g, 0);
    vf total[FEW];
    TD_UNROLL for (int t = 0; t < T; t++) total[t] = load_total(g, y, 0, t);
    for (; g->k < end; g->k += g->n) {
      g->n = end - g->k < FEW_PART ? end - g->k : FEW_PART;
      for (uint32_t i = 0; i < VL; i++)
        rows[i] = codes_at(g, 0) + (i < g->n_rows ? i : g->n_rows - 1) * g->row_bytes;
      find_groups(g);
      few_part(block, T, zeros, g, rows, &ahead, total);
    }
    g->k -= g->n; // back to the last part
    TD_UNROLL for (int t = 0; t < T; t++) store_total(g, y, 0, t, total[t]);
  }
}

#define FEW_OF(SIZE, T)                                                                            \
  case (SIZE) + (T):                                                                               \
    if (LESS == 8 && g->a->w->zero) {                                                              \
      few_rows(SIZE, T, true, g);                                                                  \
    } else {                                                                                       \
      few_rows(SIZE, T, false, g);                                                                 \
    }                                                                                              \
    return;
#define FEW_BLOCKS(SIZE) FEW_OF(SIZE, 1) FEW_OF(SIZE, 2) FEW_OF(SIZE, 3) FEW_OF(SIZE, 4)

static void few_tokens(q16 *g) {
  switch (g->block + g->a->n_tokens) {
    FEW_BLOCKS(16)
    FEW_BLOCKS(32)
    FEW_BLOCKS(64)
    FEW_BLOCKS(128)
  default: return;
  }
}
_Static_assert(FEW == 4 && A8_MOST_BLOCK == 2 * STEP, "a case for every block and number");

// ---- more -----------------------------------------------------------------------------------

static void decode_part(q16 *g) {
  find_groups(g);
  for (uint32_t v = 0; v < ROW_VECTORS; v++) {
    const uint32_t n_rows = vector_rows(g, v);
    const size_t n_bytes = g->row_bytes - g->k / 2;
    const char *w = codes_at(g, v);
    int32_t *out = &g->w[0][v * VL];
    if (n_rows == 0) continue;
    for (uint32_t k = 0; k < g->n; k += CHUNK) {
      vi dwords[4];
      transpose_rows(w + k / 2, g->row_bytes, n_rows, n_bytes - k / 2, dwords);
      TD_UNROLL for (int i = 0; i < 4; i++, out += 4 * TILE_ROWS) {
        vi pairs[4];
        pairs_of(dwords[i], pairs);
        TD_UNROLL for (int j = 0; j < 4; j++) {
          _mm256_store_si256((vi *)(out + j * TILE_ROWS), pairs[j]);
        }
      }
    }
  }
}

// Adds the products of the part to the totals of the tile and T tokens.
TD_INLINE void dot_tile(const int T, const bool zeros, const q16 *g, uint32_t tile) {
  enum { R = ROW_VECTORS };
  const uint32_t begin = tile_begin(g, tile), at = g->k - g->span;
  const int16_t *x = g->x + (size_t)begin * g->padded + (size_t)at * T;
  const size_t block0 = (size_t)begin * (g->padded / g->block) + at / g->block * (size_t)T;
  const float *x_scale = g->x_scale + block0;
  const int32_t *less = g->x_less + block0, *w = g->w[0];
  const vf *scale = g->scale;
  const vi *zero = g->zero;
  uint32_t in_group = blocks_of_first_group(g);
  float *y = tile_y(g, tile);
  vf total[R * TOKENS];
  TD_UNROLL for (int i = 0; i < R * T; i++) total[i] = load_total(g, y, i / T, i % T);
  for (uint32_t k = 0; k < g->n; k += g->block, x_scale += T, less += T) {
    const uint32_t n = g->n - k < g->block ? g->n - k : g->block;
    vi acc[R * TOKENS];
    begin_block(R, T, zeros, less, zero, acc);
    for (uint32_t i = 0; i < n; i += OCTET, x += T * OCTET) {
      TD_UNROLL for (int j = 0; j < OCTET / 2; j++, w += TILE_ROWS) {
        vi wv[R];
        TD_UNROLL for (int r = 0; r < R; r++) wv[r] = vi_load(w + r * VL);
        TD_UNROLL for (int t = 0; t < T; t++) {
          vi xv = pair_of(x + t * OCTET + 2 * j);
          __asm__("" : "+v"(xv)); // one load instead of one per multiplication
          TD_UNROLL for (int r = 0; r < R; r++) {
            vi *of = &acc[r * T + t];
            *of = add_pairs(*of, wv[r], xv);
            // Forces the sum now; the compiler would keep products in registers, of which there are
            // too few.
            __asm__("" : "+v"(*of));
          }
        }
      }
    }
    end_block(R, T, x_scale, scale, acc, total);
    // Keeps the compiler from holding totals in registers, of which there are too few.
    __asm__ volatile("" : "+m"(total));
    if (--in_group == 0) in_group = g->blocks_a_group, scale += R, zero += R;
  }
  TD_UNROLL for (int i = 0; i < R * T; i++) store_total(g, y, i / T, i % T, total[i]);
}

#define DOT_TILE(T)                                                                                \
  case T:                                                                                          \
    if (LESS == 8 && g->a->w->zero) {                                                              \
      dot_tile(T, true, g, tile);                                                                  \
    } else {                                                                                       \
      dot_tile(T, false, g, tile);                                                                 \
    }                                                                                              \
    return;

// Not inlined, since its caller's constants would take registers.
__attribute__((noinline)) static void dot_any_tile(const q16 *g, uint32_t tile) {
  switch (tile_begin(g, tile + 1) - tile_begin(g, tile)) {
    DOT_TILE(3)
    DOT_TILE(4)
    DOT_TILE(5)
    DOT_TILE(6)
  default: return;
  }
}
_Static_assert(TOKENS == 6 && FEW >= 2, "a case for every size of tile");

// Address of the codes after the part: the tile's next part, or the next tile's first one.
static const char *codes_behind(const q16 *g) {
  const td_linear_args *a = g->a;
  if (g->k + g->n < g->span + g->n_span) return codes_at(g, 0) + g->n / 2;
  if (g->row + g->n_rows == a->row_end && a->next) return a->next;
  return codes_at(g, 0) + g->n_rows * g->row_bytes - (g->k - g->span) / 2;
}

static void more_rows(q16 *g) {
  enum { LINES = PART / 2 / 64 + 1 };
  const uint32_t end = g->span + g->n_span;
  for (g->k = g->span; g->k < end; g->k += g->n) {
    g->n = end - g->k < PART ? end - g->k : PART;
    decode_part(g);
    const char *next = codes_behind(g);
    uint32_t fetched = 0;
    for (uint32_t i = 0; i < g->n_tiles; i++) {
      for (; fetched < (i + 1) * TILE_ROWS / g->n_tiles; fetched++, next += g->row_bytes) {
        for (uint32_t line = 0; line < LINES; line++)
          __builtin_prefetch(next + line * (size_t)64, 0, 2);
      }
      dot_any_tile(g, i);
    }
  }
}

// ---- all ------------------------------------------------------------------------------------

// For up to MOST_TOKENS tokens.
static void q16_block(const td_linear_args *a) {
  const td_weight *w = a->w;
  q16 g;
  g.a = a;
  g.row_bytes = td_weight_row_bytes(w);
  g.block = a8_block(w);
  g.blocks_a_group = w->scale_cols < w->cols ? w->scale_cols / g.block : UINT32_MAX;
  g.n_tiles = a->n_tokens <= FEW ? 1 : (a->n_tokens + TOKENS - 1) / TOKENS;
  memset(g.fits, true, sizeof g.fits);
  const uint32_t most = X_COLS / a->n_tokens / PART * PART;
  for (g.span = 0; g.span < w->cols; g.span += g.n_span) {
    g.n_span = w->cols - g.span < most ? w->cols - g.span : most;
    const uint32_t unit = g.block > STEP ? g.block : STEP;
    g.padded = (g.n_span + unit - 1) / unit * unit;
    if (a->n_tokens <= FEW) {
      for (uint32_t t = 0; t < a->n_tokens; t++) {
        const size_t block0 = (size_t)t * (g.padded / g.block);
        int16_t *x = g.x + (size_t)t * g.padded;
        round_token(&g, t, x, OCTET, g.x_scale + block0, g.x_less + block0, 1);
        order_steps(x, g.padded);
      }
      few_tokens(&g);
      continue;
    }
    round_tokens(&g);
    for (g.row = a->row_begin; g.row < a->row_end; g.row += g.n_rows) {
      g.n_rows = a->row_end - g.row < TILE_ROWS ? a->row_end - g.row : TILE_ROWS;
      more_rows(&g);
    }
  }
  for (uint32_t t = 0; t < a->n_tokens && a->row_begin < a->row_end; t++) {
    const td_linear_args one = one_token(a, t, a->row_begin, a->row_end);
    if (!g.fits[t]) Q16_EXACT(&one);
  }
}

static inline void linear_q16(const td_linear_args *a) {
  if (a8_block(a->w) > 0) {
    in_parts(a, MOST_TOKENS, q16_block);
  } else {
    Q16_EXACT(a);
  }
}
