// kernels/cpu/avx512bf16/linear_q4.h - y = W x for rows of 4-bit codes, activations rounded to
// BF16.
// Include after what kernels/cpu/linear/linear_q4.h needs and
//   Q4_STORED      the forms of stored scales that linear_direct reads in place
// Decode uses that header's code for few tokens, however many there are, or linear_direct; prefill
// uses gemm_prompt.h.
#pragma once

#include "kernels/cpu/avx512bf16/dequant.h"
#include "kernels/cpu/linear/linear_q4.h"

enum { DWORD_COLS = 8, HAS_SCALES = 1, MIN_GROUP = 8 };

static inline void pairs_of(vi dwords, pv out[4]) {
  const vi table = Q4_TABLE();
  TD_UNROLL for (int i = 0; i < 4; i++) {
    out[i] = pv_of(_mm512_permutexvar_epi16(_mm512_srli_epi16(dwords, 4 * i), table));
  }
}

static void put_scales(const td_weight *w, uint32_t row, uint32_t n_rows, uint32_t first,
                       uint32_t n, vf *out, size_t step);

static inline float whole_scale(const td_weight *w) {
  return w->dtype == TD_F4E2M1 ? w->global_scale : 1;
}

static inline void linear_exact(const td_linear_args *args) {
  Q4_EXACT(args);
}

#include "kernels/cpu/avx512bf16/gemm_prompt.h"

// Scale i of those that a dword of each row holds.
TD_INLINE vf scale_in(vi dwords, td_dtype dtype, uint32_t i) {
  const uint32_t bytes = (uint32_t)td_dtype_bytes(dtype);
  if (dtype == TD_F32) return (vf)dwords;
  dwords = _mm512_srl_epi32(dwords, _mm_cvtsi32_si128((int)(8 * bytes * i)));
  if (dtype == TD_BF16) return (vf)_mm512_slli_epi32(dwords, 16);
  _Alignas(64) char in_order[sizeof(vf)];
  if (bytes == 2) {
    _mm256_store_si256((void *)in_order, _mm512_cvtepi32_epi16(dwords));
  } else {
    _mm_store_si128((void *)in_order, _mm512_cvtepi32_epi8(dwords));
  }
  return scales_from(in_order, dtype);
}

// Transposed in stored form.
static void put_scales(const td_weight *w, uint32_t row, uint32_t n_rows, uint32_t first,
                       uint32_t n, vf *out, size_t step) {
  const size_t bytes = td_dtype_bytes(w->scale_dtype), of_row = td_weight_groups(w) * bytes;
  const uint32_t in_dword = (uint32_t)(4 / bytes);
  const char *from = (const char *)w->scale + row * of_row + first * bytes;
  size_t left = (w->rows - row - n_rows + 1) * of_row - first * bytes; // from the last row's on
  for (uint32_t i = 0; i < n; from += 16, left -= left < 16 ? left : 16) {
    vi dwords[4];
    transpose_rows(from, of_row, n_rows, left, dwords);
    for (uint32_t j = 0; j < 4 * in_dword && i < n; i++, j++, out += step)
      *out = scale_in(dwords[j / in_dword], w->scale_dtype, j % in_dword);
  }
}

// ---- decode with scales read in place -----------------------------------------------------------
// The same additions as linear_few, without its intermediate buffers: scales are read where they
// are stored, and sums stay in registers. One token takes rows one by one: the hardware prefetcher
// identifies a stream by the load instruction, and four copies of the loop are slower. Several
// tokens share each weight, and two rows share each load of x.

enum {
  DIRECT_TOKENS = 4, // per tile
  DIRECT_ROWS = 2,   // rows per step with several tokens
  DIRECT_X = 131072, // elements of reordered x, in L2
  // Prefetch distances in bytes, into L1 and L2, for the interleaved schedule.
  CODES_AHEAD = 6144,
  CODES_FAR_AHEAD = 16384,
  SCALES_AHEAD = 1024,
  // For one token and the sequential schedule both distances are this.
  STREAM_AHEAD = 12288,
  // Sequential schedule: x of a tile must fit L1. If whole rows are too long for that, PART_ROWS
  // rows at a time go through one part of their columns, then through the next.
  STREAM_X = 16384,
  PART_ROWS = 32
};

// Form of a block's stored scales, if linear_direct supports it. A file has the forms in Q4_STORED.
typedef enum { ONE_BF16, SOME_BF16, SOME_F16, FOUR_E8M0, EIGHT_E4M3, OTHER } stored_scales;

static stored_scales stored_as(const td_weight *w) {
  const uint32_t n = BLOCK % w->scale_cols == 0 ? BLOCK / w->scale_cols : 0;
  const bool some = n == 1 || n == 2 || n == 4;
  switch (w->scale_dtype) {
  case TD_BF16: return n == 1 ? ONE_BF16 : some ? SOME_BF16 : OTHER;
  case TD_F16: return some ? SOME_F16 : OTHER;
  case TD_F8E8M0: return n == 4 ? FOUR_E8M0 : OTHER;
  case TD_F8E4M3: return n == 8 ? EIGHT_E4M3 : OTHER;
  default: return OTHER;
  }
}

// For SOME_: mask of the scales' 16-bit words, and the byte permutation that gives lane i scale i n
// / 16.
typedef struct {
  __mmask16 there;
  vi bytes;
} scale_places;

static scale_places places_of(const td_weight *w) {
  const uint32_t n = BLOCK / w->scale_cols;
  const vi i = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  // first byte of each scale, then its second
  const vi first = _mm512_slli_epi32(
      _mm512_srli_epi32(_mm512_mullo_epi32(i, _mm512_set1_epi32((int)n)), 4), 1);
  vi bytes = _mm512_or_si512(first, _mm512_slli_epi32(first, 8));
  bytes = _mm512_add_epi32(bytes, _mm512_set1_epi32(0x100));
  if (w->scale_dtype == TD_F16) {
    bytes = _mm512_castsi256_si512(_mm512_cvtepi32_epi16(bytes));
  } else { // the low half of the lane is zero
    bytes = _mm512_or_si512(_mm512_slli_epi32(bytes, 16), _mm512_set1_epi32(0xffff));
  }
  return (scale_places){(__mmask16)((1u << 2 * n) - 1), bytes};
}

// Each lane's scale of a block; the block's first scale is at p. Requires: no E8M0 code 0 or 255,
// no E4M3 NaN.
TD_INLINE vf block_scale(const stored_scales stored, const scale_places *places, const char *p) {
  // per lane, the code of its quarter as the highest byte
  const vi high_byte = _mm512_set_epi64(0x03ffffff03ffffff, 0x03ffffff03ffffff, 0x02ffffff02ffffff,
                                        0x02ffffff02ffffff, 0x01ffffff01ffffff, 0x01ffffff01ffffff,
                                        0x00ffffff00ffffff, 0x00ffffff00ffffff);
  // the code of each eighth as the upper byte of two words
  const __m256i upper_byte = _mm256_set_epi64x(0x07ff07ff06ff06ff, 0x05ff05ff04ff04ff,
                                               0x03ff03ff02ff02ff, 0x01ff01ff00ff00ff);
  int64_t eight;
  int32_t four;
  int16_t one;
  __m128i some;
  __m256i words;
  switch (stored) {
  case ONE_BF16:
    memcpy(&one, p, sizeof one);
    return (vf)_mm512_slli_epi32(_mm512_set1_epi16(one), 16);
  case SOME_BF16:
    some = _mm_maskz_loadu_epi8(places->there, p);
    return (vf)_mm512_shuffle_epi8(_mm512_broadcastq_epi64(some), places->bytes);
  case SOME_F16:
    some = _mm_maskz_loadu_epi8(places->there, p);
    words = _mm256_shuffle_epi8(_mm256_broadcastq_epi64(some),
                                _mm512_castsi512_si256(places->bytes));
    return _mm512_cvtph_ps(words);
  case FOUR_E8M0:
    memcpy(&four, p, sizeof four);
    return (vf)_mm512_srli_epi32(_mm512_shuffle_epi8(_mm512_set1_epi32(four), high_byte), 1);
  default: // interpreted as F16, the values are 2^-8 times too small
    memcpy(&eight, p, sizeof eight);
    words = _mm256_srai_epi16(_mm256_shuffle_epi8(_mm256_set1_epi64x(eight), upper_byte), 1);
    words = _mm256_and_si256(words, _mm256_set1_epi16((short)0xbfff));
    return vf_mul(_mm512_cvtph_ps(words), vf_set1(0x1p8f));
  }
}

// Whether any of n codes, after adding `add` and masking, is at least `most`.
TD_INLINE bool has_code(const uint8_t *p, size_t n, uint8_t add, uint8_t mask, uint8_t most) {
  __mmask64 found = 0;
  for (size_t i = 0; i < n; i += sizeof(vi)) {
    const __mmask64 there = n - i < sizeof(vi) ? ((__mmask64)1 << (n - i)) - 1 : ~(__mmask64)0;
    vi codes = _mm512_maskz_loadu_epi8(there, p + i);
    codes = _mm512_and_si512(_mm512_add_epi8(codes, _mm512_set1_epi8((char)add)),
                             _mm512_set1_epi8((char)mask));
    found |= _mm512_mask_cmpge_epu8_mask(there, codes, _mm512_set1_epi8((char)most));
  }
  return found != 0;
}

// Whether there are codes that block_scale does not support: E8M0 0 and 255, E4M3 NaN.
static bool has_special(stored_scales stored, const uint8_t *p, size_t n) {
  if (stored == FOUR_E8M0) return has_code(p, n, 0xff, 0xff, 0xfe);
  return stored == EIGHT_E4M3 && has_code(p, n, 0, 0x7f, 0x7f);
}

// Some rows times all tokens. Lives on the stack.
typedef struct {
  _Alignas(64) packed x[DIRECT_X];      // [tile of tokens][block][STEPS][token][PL]
  vf carried[PART_ROWS][DIRECT_TOKENS]; // sums of a tile's rows over earlier parts
  x_range range[MAX_TOKENS];
  const td_linear_args *a;
  stored_scales stored;
  scale_places places;
  size_t row_bytes, scale_bytes;                          // per row
  size_t near, far;                                       // prefetch distances to L1 and L2
  uint32_t n_tiles, tile[MAX_TOKENS / DIRECT_TOKENS + 1]; // first token of each tile
} direct;

// Blocks [begin, end) of all rows. A single token has no parts.
typedef struct {
  uint32_t begin, end;
} part;

// Lane sums of R rows with T tokens from `token` on: this part's, plus those of earlier parts if
// there are any.
TD_INLINE void dot_step(const stored_scales stored, const int R, const int T, const direct *d,
                        part blocks, uint32_t row, uint32_t token, vf (*before)[DIRECT_TOKENS],
                        vf (*sums)[DIRECT_TOKENS]) {
  const uint32_t cols = d->a->w->cols, some = 2 * BLOCK / d->a->w->scale_cols;
  const size_t step = stored == ONE_BF16     ? 2
                      : stored == FOUR_E8M0  ? 4
                      : stored == EIGHT_E4M3 ? 8
                                             : some; // bytes of scales
  if (T == 1) blocks = (part){0, cols / BLOCK}; // constants; short rows are 4 % faster with them
  const uint8_t *codes = (const uint8_t *)d->a->w->data + row * d->row_bytes;
  const char *scales = (const char *)d->a->w->scale + row * d->scale_bytes;
  const packed *x = d->x + (size_t)token * cols + (size_t)blocks.begin * T * BLOCK;
  // Only the first tile prefetches codes.
  const bool fetches = T == 1 || token == 0;
  const size_t far = fetches ? d->far : 0, near = fetches ? d->near : 0;
  const vi table = Q4_TABLE();
  for (size_t at = 0; fetches && at < R * d->scale_bytes; at += 64)
    __builtin_prefetch((const void *)((uintptr_t)scales + SCALES_AHEAD + at));
  vf total[DIRECT_ROWS][DIRECT_TOKENS];
  TD_UNROLL for (int i = 0; i < R * T; i++) total[i / T][i % T] = vf_zero();
  if (blocks.begin > 0) {
    TD_UNROLL for (int i = 0; i < R * T; i++) total[i / T][i % T] = before[i / T][i % T];
  }
  for (uint32_t b = blocks.begin; b < blocks.end; b++, x += T * BLOCK) {
    vi words[DIRECT_ROWS];
    vf sum[DIRECT_ROWS][DIRECT_TOKENS];
    TD_UNROLL for (int r = 0; r < R; r++) {
      const uintptr_t here = (uintptr_t)codes + r * d->row_bytes + b * sizeof(vi);
      words[r] = vi_load((const uint8_t *)here);
      __asm__("" : "+v"(words[r])); // one load instead of one per shift
      __builtin_prefetch((const void *)(here + far), 0, 2);
      __builtin_prefetch((const void *)(here + near));
    }
    TD_UNROLL for (int i = 0; i < R * T; i++) sum[i / T][i % T] = vf_zero();
    TD_UNROLL for (int i = 0; i < STEPS; i++) {
      pv w[DIRECT_ROWS];
      TD_UNROLL for (int r = 0; r < R; r++) {
        const vi at_i = i ? _mm512_srli_epi16(words[r], 4 * i) : words[r];
        w[r] = pv_of(_mm512_permutexvar_epi16(at_i, table));
      }
      TD_UNROLL for (int t = 0; t < T; t++) {
        pv xv = pv_load(x + (i * T + t) * PL);
        if (R > 1) __asm__("" : "+v"(xv)); // one load instead of one per multiplication
        TD_UNROLL for (int r = 0; r < R; r++) sum[r][t] = pv_fma(w[r], xv, sum[r][t]);
      }
    }
    TD_UNROLL for (int r = 0; r < R; r++) {
      const vf scale = block_scale(stored, &d->places, scales + r * d->scale_bytes + b * step);
      TD_UNROLL for (int t = 0; t < T; t++) total[r][t] = vf_fma(sum[r][t], scale, total[r][t]);
    }
  }
  TD_UNROLL for (int i = 0; i < R * T; i++) sums[i / T][i % T] = total[i / T][i % T];
}

// Rows [row, row + n), n <= 4, times T tokens from `token` on. carried: of these rows.
TD_INLINE void dot_four(const stored_scales stored, const int T, const direct *d, part blocks,
                        uint32_t row, uint32_t n, uint32_t token, vf (*carried)[DIRECT_TOKENS]) {
  const td_linear_args *a = d->a;
  const int R = T > 1 ? DIRECT_ROWS : 1;
  vf of[4][DIRECT_TOKENS];
  _Pragma("GCC unroll 1") for (uint32_t i = 0; i < 4; i += (uint32_t)R) {
    if (i + (uint32_t)R <= n) {
      dot_step(stored, R, T, d, blocks, row + i, token, carried + i, of + i);
    } else { // repeats the last row for missing ones
      TD_UNROLL for (int r = 0; r < R; r++)
          dot_step(stored, 1, T, d, blocks, row + n - 1, token, carried + i + r, of + i + r);
    }
  }
  if (T > 1 && blocks.end < a->w->cols / BLOCK) {
    for (uint32_t i = 0; i < 4; i++) {
      TD_UNROLL for (int t = 0; t < T; t++) carried[i][t] = of[i][t];
    }
    return;
  }
  TD_UNROLL for (int t = 0; t < T; t++) {
    float sum[4], *y = a->y + (token + (uint32_t)t) * a->ldy + row - a->y_row0;
    vf_sum4(of[0][t], of[1][t], of[2][t], of[3][t], sum);
    for (uint32_t i = 0; i < n; i++)
      y[i] = finish(a->w, row + i, false, sum[i]);
  }
}

#define DIRECT_AS(stored, T)                                                                       \
  case stored:                                                                                     \
    dot_four(stored, T, d, blocks, row, n, token, carried);                                        \
    break;
#define DIRECT_OF(T)                                                                               \
  case T:                                                                                          \
    switch (d->stored) {                                                                           \
      Q4_STORED(DIRECT_AS, T)                                                                      \
    default: break;                                                                                \
    }                                                                                              \
    break;

// Tile i of tokens times up to four rows.
static void dot_tile_of(direct *d, part blocks, uint32_t row, uint32_t end, uint32_t i) {
  const uint32_t n = end - row < 4 ? end - row : 4, token = d->tile[i];
  vf(*carried)[DIRECT_TOKENS] = d->carried + (row - d->a->row_begin) % PART_ROWS;
  switch (d->tile[i + 1] - token) {
    DIRECT_OF(1)
    DIRECT_OF(2)
    DIRECT_OF(3)
    DIRECT_OF(4)
  }
}
_Static_assert(DIRECT_TOKENS == 4, "a case for every number of tokens");

static void order_tiles(direct *d) {
  const td_linear_args *a = d->a;
  d->n_tiles = (a->n_tokens + DIRECT_TOKENS - 1) / DIRECT_TOKENS;
  for (uint32_t i = 0; i <= d->n_tiles; i++)
    d->tile[i] = i * a->n_tokens / d->n_tiles;
  for (uint32_t i = 0; i < d->n_tiles; i++) {
    const uint32_t begin = d->tile[i], n = d->tile[i + 1] - begin;
    for (uint32_t t = begin; t < begin + n; t++) {
      const float *x = a->x + (a->x_rows ? a->x_rows[t] : t) * a->ldx;
      packed *out = d->x + (size_t)begin * a->w->cols + (t - begin) * PL;
      d->range[t] = empty_range();
      order_x(x, a->w->cols, out, (size_t)n * PL, &d->range[t]);
    }
  }
}

// PART_ROWS rows at a time, each with its columns in even parts.
static void dot_parts(direct *d, uint32_t n_parts) {
  const td_linear_args *a = d->a;
  const uint32_t n_blocks = a->w->cols / BLOCK;
  d->near = DIRECT_ROWS * d->row_bytes; // the next rows of this part
  d->far = PART_ROWS * d->row_bytes;
  for (uint32_t row0 = a->row_begin, end; row0 < a->row_end; row0 = end) {
    end = a->row_end - row0 < PART_ROWS ? a->row_end : row0 + PART_ROWS;
    for (uint32_t i = 0; i < d->n_tiles * n_parts; i++) {
      const uint32_t at = i % n_parts;
      const part blocks = {at * n_blocks / n_parts, (at + 1) * n_blocks / n_parts};
      for (uint32_t row = row0; row < end; row += 4)
        dot_tile_of(d, blocks, row, end, i / n_parts);
    }
  }
}

static void linear_direct(const td_linear_args *a, stored_scales stored) {
  const bool is_stream = a->way == TD_GEMV_SEQUENTIAL;
  direct d;
  d.a = a;
  d.stored = stored;
  if (stored == SOME_BF16 || stored == SOME_F16) d.places = places_of(a->w);
  d.row_bytes = td_weight_row_bytes(a->w);
  d.scale_bytes = td_weight_groups(a->w) * td_dtype_bytes(a->w->scale_dtype);
  const bool one = is_stream && a->n_tokens == 1;
  d.near = one ? STREAM_AHEAD : CODES_AHEAD;
  d.far = one ? STREAM_AHEAD : CODES_FAR_AHEAD;
  order_tiles(&d);
  const uint32_t of_tile = (a->n_tokens + d.n_tiles - 1) / d.n_tiles * a->w->cols;
  if (is_stream && a->n_tokens > 1 && of_tile > STREAM_X) {
    dot_parts(&d, (of_tile + STREAM_X - 1) / STREAM_X);
  } else {
    const part all = {0, a->w->cols / BLOCK};
    for (uint32_t row = a->row_begin; row < a->row_end; row += 4) {
      for (uint32_t i = 0; i < d.n_tiles; i++)
        dot_tile_of(&d, all, row, a->row_end, i);
    }
  }
  for (uint32_t t = 0; t < a->n_tokens; t++)
    end_token(a, t, d.range[t]);
}

#define IS_STORED(stored, unused)                                                                  \
  case stored: break;

// OTHER: linear_few must compute it.
static stored_scales direct_fits(const td_linear_args *a) {
  const td_weight *w = a->w;
  const size_t n_scales = td_weight_groups(w), n_rows = a->row_end - a->row_begin;
  if (w->cols % BLOCK || w->cols > DIRECT_X / a->n_tokens) return OTHER;
  const stored_scales stored = stored_as(w);
  switch (stored) {
    Q4_STORED(IS_STORED, )
  default: return OTHER;
  }
  const uint8_t *scales = (const uint8_t *)w->scale + a->row_begin * n_scales;
  return has_special(stored, scales, n_rows * n_scales) ? OTHER : stored;
}

static void linear_answers(const td_linear_args *a) {
  const stored_scales stored = direct_fits(a);
  if (stored == OTHER) {
    linear_few(a);
  } else {
    linear_direct(a, stored);
  }
}

static inline void linear_q4(const td_linear_args *a) {
  if (a->n_tokens == 0) return;
  if (a->prompt) {
    linear_prompt(a);
    return;
  }
  in_parts(a, MAX_TOKENS, linear_answers);
}
