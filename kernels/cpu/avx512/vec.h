// kernels/cpu/avx512/vec.h - vectors of sixteen floats, the operations used by *_vec.h.
// vf_*_n access only the first n < VL elements and touch no memory after them; missing elements are
// zeros.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define TD_VEC_NAME(family) family##__avx512

typedef __m512 vf;
enum {
  VL = 16,
  GEMV_ROWS = 4,    // rows that share the loads of one or two tokens
  BATCH_ROWS = 4,   // for up to four tokens
  BATCH_ROWS_8 = 2, // for up to eight tokens
  FEW_TOKENS = 16,  // maximum tokens without decoding rows into the cache
  X_FLOATS = 8192,  // packed x of few tokens, in L1
  GEMM_ROWS = 4,    // register tile
  GEMM_TOKENS = 6,
};

static inline __mmask16 mask_n(uint32_t n) {
  return (__mmask16)((1u << n) - 1);
}

static inline vf vf_zero(void) {
  return _mm512_setzero_ps();
}
static inline vf vf_set1(float f) {
  return _mm512_set1_ps(f);
}
static inline vf vf_load(const float *p) {
  return _mm512_loadu_ps(p);
}
static inline vf vf_load_n(const float *p, uint32_t n) {
  return _mm512_maskz_loadu_ps(mask_n(n), p);
}
static inline void vf_store(float *p, vf v) {
  _mm512_storeu_ps(p, v);
}
static inline void vf_store_n(float *p, vf v, uint32_t n) {
  _mm512_mask_storeu_ps(p, mask_n(n), v);
}
static inline vf vf_fma(vf a, vf b, vf c) {
  return _mm512_fmadd_ps(a, b, c);
}
static inline vf vf_add(vf a, vf b) {
  return _mm512_add_ps(a, b);
}
static inline vf vf_sub(vf a, vf b) {
  return _mm512_sub_ps(a, b);
}
static inline vf vf_mul(vf a, vf b) {
  return _mm512_mul_ps(a, b);
}
static inline vf vf_div(vf a, vf b) {
  return _mm512_div_ps(a, b);
}
// Returns b if either operand is NaN.
static inline vf vf_max(vf a, vf b) {
  return _mm512_max_ps(a, b);
}
static inline vf vf_min(vf a, vf b) {
  return _mm512_min_ps(a, b);
}
static inline vf vf_round(vf a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// The smaller (larger) of |a| and |v|; a if v is NaN or, for the smaller, x is 0.
static inline vf vf_min_abs(vf a, vf v, vf x) {
  return _mm512_mask_range_ps(a, _mm512_cmpneq_ps_mask(x, vf_zero()), a, v, 0x0a);
}
static inline vf vf_max_abs(vf a, vf v) {
  return _mm512_range_ps(a, v, 0x0b);
}
// p * 2^n for integer n.
static inline vf vf_scale2(vf p, vf n) {
  return _mm512_scalef_ps(p, n);
}
static inline float vf_max_all(vf a) {
  return _mm512_reduce_max_ps(a);
}

// The lane sums of four vectors.
static inline void vf_sum4(vf a, vf b, vf c, vf d, float out[4]) {
  vf ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  vf cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  __m512d abd = _mm512_castps_pd(ab), cdd = _mm512_castps_pd(cd);
  vf lo = _mm512_castpd_ps(_mm512_unpacklo_pd(abd, cdd));
  vf hi = _mm512_castpd_ps(_mm512_unpackhi_pd(abd, cdd));
  vf all = _mm512_add_ps(lo, hi);
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

static inline vf vf_from_half(const uint16_t *p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
static inline vf vf_from_half_n(const uint16_t *p, uint32_t n) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask_n(n), p));
}
static inline void vf_to_half(uint16_t *p, vf v) {
  _mm256_storeu_si256((__m256i *)p,
                      _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline void vf_to_half_n(uint16_t *p, vf v, uint32_t n) {
  _mm256_mask_storeu_epi16(p, mask_n(n),
                           _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

static inline vf vf_widen_bf16(__m256i h) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
static inline vf vf_from_bf16(const uint16_t *p) {
  return vf_widen_bf16(_mm256_loadu_si256((const __m256i *)p));
}
static inline vf vf_from_bf16_n(const uint16_t *p, uint32_t n) {
  return vf_widen_bf16(_mm256_maskz_loadu_epi16(mask_n(n), p));
}

// E4M3 codes times 2^-8, exact except for NaN codes, which come out as 1.875. The code's bits are
// an F16 with an exponent too low by eight, and F16C conversion handles F16 subnormals.
static inline void vf_widen_e4m3(__m256i codes, vf *lo, vf *hi) {
  __m512i half = _mm512_slli_epi16(_mm512_cvtepi8_epi16(codes), 7);
  half = _mm512_and_si512(half, _mm512_set1_epi16((short)0xbf80));
  *lo = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
  *hi = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
}
static inline void vf_from_e4m3(const uint8_t *p, vf *lo, vf *hi) {
  vf_widen_e4m3(_mm256_loadu_si256((const __m256i *)p), lo, hi);
}
// n < 2 VL
static inline void vf_from_e4m3_n(const uint8_t *p, uint32_t n, vf *lo, vf *hi) {
  vf_widen_e4m3(_mm256_maskz_loadu_epi8((1u << n) - 1, p), lo, hi);
}

// Whether any of the codes is NaN.
static inline int e4m3_has_nan(const uint8_t *p, uint32_t n) {
  const __m512i magnitude = _mm512_set1_epi8(0x7f);
  __mmask64 found = 0;
  uint32_t i = 0;
  for (; i + 64 <= n; i += 64) {
    __m512i codes = _mm512_loadu_si512(p + i);
    found |= _mm512_cmpeq_epi8_mask(_mm512_and_si512(codes, magnitude), magnitude);
  }
  if (i < n) {
    __m512i codes = _mm512_maskz_loadu_epi8(((__mmask64)1 << (n - i)) - 1, p + i);
    found |= _mm512_cmpeq_epi8_mask(_mm512_and_si512(codes, magnitude), magnitude);
  }
  return found != 0;
}

// Part i of sixteen signed bytes, VL of them.
static inline vf vf_from_bytes(__m128i bytes, int i) {
  (void)i;
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

static inline vf vf_from_i8(const int8_t *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

// VL E4M3 codes, NaN included.
static inline vf vf_from_e4m3_exact(const uint8_t *p) {
  __m128i codes = _mm_loadu_si128((const __m128i *)p), magnitude = _mm_set1_epi8(0x7f);
  __m256i half = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
  half = _mm256_and_si256(half, _mm256_set1_epi16((short)0xbf80));
  vf value = vf_mul(_mm512_cvtph_ps(half), vf_set1(256));
  __mmask16 nan = _mm_cmpeq_epi8_mask(_mm_and_si128(codes, magnitude), magnitude);
  return _mm512_mask_mov_ps(value, nan, _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
}

// VL E8M0 codes: 2^(code - 127); 0 is subnormal, 0xff NaN.
static inline vf vf_from_e8m0(const uint8_t *p) {
  __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
  __m512i bits = _mm512_slli_epi32(codes, 23);
  bits = _mm512_mask_mov_epi32(bits, _mm512_cmpeq_epi32_mask(codes, _mm512_setzero_si512()),
                               _mm512_set1_epi32(0x00400000));
  bits = _mm512_mask_mov_epi32(bits, _mm512_cmpeq_epi32_mask(codes, _mm512_set1_epi32(255)),
                               _mm512_set1_epi32(0x7fc00000));
  return _mm512_castsi512_ps(bits);
}

// VL words of 32 bits.
typedef __m512i vi;
static inline vi vi_four_rows(const char *p, size_t apart) {
  vi v = _mm512_castsi128_si512(_mm_loadu_si128((const void *)p));
  v = _mm512_inserti32x4(v, _mm_loadu_si128((const void *)(p + 4 * apart)), 1);
  v = _mm512_inserti32x4(v, _mm_loadu_si128((const void *)(p + 8 * apart)), 2);
  return _mm512_inserti32x4(v, _mm_loadu_si128((const void *)(p + 12 * apart)), 3);
}

// Transposes 16 bytes of VL rows: vector i has dword i of each.
static inline void vi_transpose(const char *p, size_t apart, vi out[4]) {
  vi a = vi_four_rows(p, apart), b = vi_four_rows(p + apart, apart);
  vi c = vi_four_rows(p + 2 * apart, apart), d = vi_four_rows(p + 3 * apart, apart);
  vi ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
  out[0] = _mm512_unpacklo_epi64(ab, cd);
  out[1] = _mm512_unpackhi_epi64(ab, cd);
  ab = _mm512_unpackhi_epi32(a, b), cd = _mm512_unpackhi_epi32(c, d);
  out[2] = _mm512_unpacklo_epi64(ab, cd);
  out[3] = _mm512_unpackhi_epi64(ab, cd);
}

static inline vi vi_load(const void *p) {
  return _mm512_loadu_si512(p);
}
// The first n < 4 VL bytes, followed by zeros.
static inline vi vi_load_n(const void *p, uint32_t n) {
  return _mm512_maskz_loadu_epi8(((__mmask64)1 << n) - 1, p);
}
static inline vi vi_srl8(vi a) {
  return _mm512_srli_epi32(a, 8);
}
// Lane j has code j of the VL codes at p in its lowest bits, with other codes above it.
static inline vi vi_spread4(const void *p) {
  const __m512i words = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  const __m512i places = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24,
                                           28);
  __m512i both = _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i *)p));
  return _mm512_srlv_epi32(_mm512_permutexvar_epi32(words, both), places);
}
// Lane j becomes a[from[j]].
static inline vf vf_permute(vf a, vi from) {
  return _mm512_permutexvar_ps(from, a);
}

// out[i step + j] = in[8 j + i] for j < VL, i < 8. Merges pairs of columns, then fours, eights and
// sixteens; the indices are positions in the two source vectors.
static inline void vf_order8(const float *in, float *out, size_t step) {
  const __m512i fours[2] = {
      _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27),
      _mm512_setr_epi32(4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31)};
  const __m512i eights[2] = {
      _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23),
      _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31)};
  vf a[8], b[2][4], c[2];
  for (int m = 0; m < 8; m++)
    a[m] = vf_load(in + m * VL);
  for (int h = 0; h < 2; h++) {
    for (int p = 0; p < 4; p++)
      b[h][p] = _mm512_permutex2var_ps(a[2 * p], fours[h], a[2 * p + 1]);
    for (int g = 0; g < 2; g++) {
      for (int p = 0; p < 2; p++)
        c[p] = _mm512_permutex2var_ps(b[h][2 * p], eights[g], b[h][2 * p + 1]);
      float *to = out + (size_t)(4 * h + 2 * g) * step;
      vf_store(to, _mm512_shuffle_f32x4(c[0], c[1], 0x44));
      vf_store(to + step, _mm512_shuffle_f32x4(c[0], c[1], 0xee));
    }
  }
}

// Nibble `place` of each of VL words at p, after adding `add` to the words, minus 8.
static inline vf vf_zero_points(const uint32_t *p, uint32_t place) {
  __m512i words = _mm512_srl_epi32(vi_load(p), _mm_cvtsi32_si128((int)(4 * place)));
  words = _mm512_and_si512(words, _mm512_set1_epi32(15));
  return _mm512_cvtepi32_ps(_mm512_sub_epi32(words, _mm512_set1_epi32(8)));
}
