// kernels/cpu/avx512bf16/linear_q4.h - y = W x for rows of 4-bit codes, activations rounded to
// BF16, for each dtype's file to include behind what kernels/cpu/linear_q4.h needs and
//   q4_table       the values of codes, twice
// An answer's tokens go the ways of few there, however many they are, a prompt's that of
// gemm_prompt.h.
#ifndef KERNELS_CPU_AVX512BF16_LINEAR_Q4_H
#define KERNELS_CPU_AVX512BF16_LINEAR_Q4_H

#include "kernels/cpu/avx512bf16/codes.h"
#include "kernels/cpu/linear_q4.h"

enum { DWORD_COLS = 8, HAS_SCALES = 1, MIN_GROUP = 8 };

static inline void pairs_of(vi dwords, pv out[4]) {
  const vi table = q4_table();
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

// Scale i of those that a dword of each row has.
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

// Turned as they are stored.
static void put_scales(const td_weight *w, uint32_t row, uint32_t n_rows, uint32_t first,
                       uint32_t n, vf *out, size_t step) {
  const size_t bytes = td_dtype_bytes(w->scale_dtype), of_row = td_weight_groups(w) * bytes;
  const uint32_t in_dword = (uint32_t)(4 / bytes);
  const char *from = (const char *)w->scale + row * of_row + first * bytes;
  size_t left = (w->rows - row - n_rows + 1) * of_row - first * bytes; // from the last row's on
  for (uint32_t i = 0; i < n; from += 16, left -= left < 16 ? left : 16) {
    vi dwords[4];
    turn_some(from, of_row, n_rows, left, dwords);
    for (uint32_t j = 0; j < 4 * in_dword && i < n; i++, j++, out += step)
      *out = scale_in(dwords[j / in_dword], w->scale_dtype, j % in_dword);
  }
}

// ---- one or two tokens of answers -------------------------------------------------------------
// The same additions as of more, without what those are kept in: scales come from where they are
// stored, sums are registers. One loop takes every row: the processor's prefetch knows a stream by
// the instruction that loads it, and four copies of the loop read a tenth slower.

enum {
  FEWEST = 2, // tokens; three's multiplications alone are slower than memory
  // Bytes into L1, and into L2: Zen 4 reads up to half as much again with the latter, and a tenth
  // more where the former finds what it brought.
  CODES_AHEAD = 6144,
  CODES_FAR_AHEAD = 16384,
  SCALES_AHEAD = 1024
};

// How a block's scales are stored, of those that have a way here.
typedef enum { ONE_BF16, FOUR_BF16, FOUR_E8M0, OTHER } stored_scales;

static stored_scales stored_as(const td_weight *w) {
  const bool is_bf16 = w->scale_dtype == TD_BF16;
  if (is_bf16 && w->scale_cols == BLOCK) return ONE_BF16;
  if (w->scale_cols != BLOCK / 4) return OTHER;
  return is_bf16 ? FOUR_BF16 : w->scale_dtype == TD_F8E8M0 ? FOUR_E8M0 : OTHER;
}

// Each lane's scale of a block, whose first is at p. E8M0 codes are neither 0 nor 255.
TD_INLINE vf block_scale(const stored_scales stored, const char *p) {
  // lane by lane, the code of its quarter as the highest bytes
  const vi high_half = _mm512_set_epi64(0x0706ffff0706ffff, 0x0706ffff0706ffff, 0x0504ffff0504ffff,
                                        0x0504ffff0504ffff, 0x0302ffff0302ffff, 0x0302ffff0302ffff,
                                        0x0100ffff0100ffff, 0x0100ffff0100ffff);
  const vi high_byte = _mm512_set_epi64(0x03ffffff03ffffff, 0x03ffffff03ffffff, 0x02ffffff02ffffff,
                                        0x02ffffff02ffffff, 0x01ffffff01ffffff, 0x01ffffff01ffffff,
                                        0x00ffffff00ffffff, 0x00ffffff00ffffff);
  int64_t four;
  int32_t bytes;
  int16_t one;
  switch (stored) {
  case ONE_BF16:
    memcpy(&one, p, sizeof one);
    return (vf)_mm512_slli_epi32(_mm512_set1_epi16(one), 16);
  case FOUR_BF16:
    memcpy(&four, p, sizeof four);
    return (vf)_mm512_shuffle_epi8(_mm512_set1_epi64(four), high_half);
  default:
    memcpy(&bytes, p, sizeof bytes);
    return (vf)_mm512_srli_epi32(_mm512_shuffle_epi8(_mm512_set1_epi32(bytes), high_byte), 1);
  }
}

static bool has_extreme_e8m0(const uint8_t *p, size_t n) {
  __mmask64 found = 0;
  for (size_t i = 0; i < n; i += sizeof(vi)) {
    const __mmask64 there = n - i < sizeof(vi) ? ((__mmask64)1 << (n - i)) - 1 : ~(__mmask64)0;
    const vi next = _mm512_add_epi8(_mm512_maskz_loadu_epi8(there, p + i), _mm512_set1_epi8(1));
    found |= _mm512_mask_cmp_epu8_mask(there, next, _mm512_set1_epi8(1), _MM_CMPINT_LE);
  }
  return found != 0;
}

// The lanes of a row's sums with T tokens; x [block][STEPS][T][PL].
TD_INLINE void dot_row(const stored_scales stored, const int T, const uint8_t *codes,
                       const char *scales, uint32_t n_blocks, const packed *x, vf *sums) {
  const size_t step = stored == ONE_BF16 ? 2 : stored == FOUR_BF16 ? 8 : 4;
  const vi table = q4_table();
  vf total[FEWEST];
  TD_UNROLL for (int t = 0; t < T; t++) total[t] = vf_zero();
  for (uint32_t b = 0; b < n_blocks; b++, x += T * BLOCK) {
    vi words = vi_load(codes + b * sizeof(vi));
    __asm__("" : "+v"(words)); // one load, not one in each shift
    vf sum[FEWEST];
    TD_UNROLL for (int t = 0; t < T; t++) sum[t] = vf_zero();
    const uintptr_t here = (uintptr_t)codes + b * sizeof(vi);
    __builtin_prefetch((const void *)(here + CODES_FAR_AHEAD), 0, 2);
    __builtin_prefetch((const void *)(here + CODES_AHEAD));
    TD_UNROLL for (int i = 0; i < STEPS; i++) {
      const vi at_i = i ? _mm512_srli_epi16(words, 4 * i) : words;
      const pv w = pv_of(_mm512_permutexvar_epi16(at_i, table));
      TD_UNROLL for (int t = 0; t < T; t++)
          sum[t] = pv_fma(w, pv_load(x + (i * T + t) * PL), sum[t]);
    }
    const vf scale = block_scale(stored, scales + b * step);
    TD_UNROLL for (int t = 0; t < T; t++) total[t] = vf_fma(sum[t], scale, total[t]);
  }
  TD_UNROLL for (int t = 0; t < T; t++) sums[t] = total[t];
}

TD_INLINE void dot_fewest(const stored_scales stored, const int T, const td_linear_args *a,
                          const packed *x) {
  const td_weight *w = a->w;
  const size_t row_bytes = w->cols / 2, n_scales = td_weight_groups(w);
  const size_t scale_bytes = n_scales * td_dtype_bytes(w->scale_dtype);
  const uint8_t *codes = (const uint8_t *)w->data + a->row_begin * row_bytes;
  const char *scales = (const char *)w->scale + a->row_begin * scale_bytes;
  const uint32_t n_rows = a->row_end - a->row_begin;
  for (uint32_t row = 0; row < n_rows; row += 4) {
    vf of[4][FEWEST];
    _Pragma("GCC unroll 1") for (uint32_t i = 0; i < 4; i++) {
      const uint32_t r = row + i < n_rows ? row + i : n_rows - 1;
      for (size_t at = 0; at < scale_bytes; at += 64)
        __builtin_prefetch((const void *)((uintptr_t)scales + r * scale_bytes + SCALES_AHEAD + at));
      dot_row(stored, T, codes + r * row_bytes, scales + r * scale_bytes, w->cols / BLOCK, x,
              of[i]);
    }
    TD_UNROLL for (int t = 0; t < T; t++) {
      float sum[4], *y = a->y + (size_t)t * a->ldy + a->row_begin - a->y_row0;
      vf_sum4(of[0][t], of[1][t], of[2][t], of[3][t], sum);
      for (uint32_t i = 0; i < 4 && row + i < n_rows; i++)
        y[row + i] = finish(w, a->row_begin + row + i, false, sum[i]);
    }
  }
}

#define FEWEST_OF(T)                                                                               \
  case T:                                                                                          \
    switch (stored) {                                                                              \
    case ONE_BF16: dot_fewest(ONE_BF16, T, a, x); break;                                           \
    case FOUR_BF16: dot_fewest(FOUR_BF16, T, a, x); break;                                         \
    default: dot_fewest(FOUR_E8M0, T, a, x); break;                                                \
    }                                                                                              \
    break;

static void linear_fewest(const td_linear_args *a, stored_scales stored) {
  const uint32_t n = a->n_tokens;
  _Alignas(64) packed x[X_COLS];
  x_range range[FEWEST];
  for (uint32_t t = 0; t < n; t++) {
    range[t] = empty_range();
    order_x(a->x + (a->x_rows ? a->x_rows[t] : t) * a->ldx, a->w->cols, x + t * PL, n * PL,
            &range[t]);
  }
  switch (n) {
    FEWEST_OF(1)
    FEWEST_OF(2)
  }
  for (uint32_t t = 0; t < n; t++)
    end_token(a, t, range[t]);
}
_Static_assert(FEWEST == 2, "a case for every number of tokens");

// OTHER: it is one for linear_few.
static stored_scales fewest_fit(const td_linear_args *a) {
  const td_weight *w = a->w;
  const size_t n_scales = td_weight_groups(w), n_rows = a->row_end - a->row_begin;
  if (a->n_tokens > FEWEST || w->cols % BLOCK || w->cols > X_COLS / a->n_tokens) return OTHER;
  const stored_scales stored = stored_as(w);
  const uint8_t *scales = (const uint8_t *)w->scale + a->row_begin * n_scales;
  return stored == FOUR_E8M0 && has_extreme_e8m0(scales, n_rows * n_scales) ? OTHER : stored;
}

static void linear_answers(const td_linear_args *a) {
  const stored_scales stored = fewest_fit(a);
  if (stored == OTHER) {
    linear_few(a);
  } else {
    linear_fewest(a, stored);
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

#endif
