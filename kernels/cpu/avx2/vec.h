// kernels/cpu/avx2/vec.h - vectors of eight floats, the operations used by *_vec.h.
// vf_*_n access only the first n < VL elements and touch no memory after them; missing elements are
// zeros.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define TD_VEC_NAME(family) family##__avx2

typedef __m256 vf;
enum {
  VL = 8,
  GEMV_ROWS = 4,    // rows that share the loads of one or two tokens
  BATCH_ROWS = 2,   // for up to four tokens
  BATCH_ROWS_8 = 1, // for up to eight tokens
  FEW_TOKENS = 8,   // maximum tokens without decoding rows into the cache
  X_FLOATS = 4096,  // packed x of few tokens, half of a small L1
  GEMM_ROWS = 2,    // register tile
  GEMM_TOKENS = 6,
};

static inline __m256i mask_n(uint32_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

static inline vf vf_zero(void) {
  return _mm256_setzero_ps();
}
static inline vf vf_set1(float f) {
  return _mm256_set1_ps(f);
}
static inline vf vf_load(const float *p) {
  return _mm256_loadu_ps(p);
}
static inline vf vf_load_n(const float *p, uint32_t n) {
  return _mm256_maskload_ps(p, mask_n(n));
}
static inline void vf_store(float *p, vf v) {
  _mm256_storeu_ps(p, v);
}
static inline void vf_store_n(float *p, vf v, uint32_t n) {
  _mm256_maskstore_ps(p, mask_n(n), v);
}
static inline vf vf_fma(vf a, vf b, vf c) {
  return _mm256_fmadd_ps(a, b, c);
}
static inline vf vf_add(vf a, vf b) {
  return _mm256_add_ps(a, b);
}
static inline vf vf_sub(vf a, vf b) {
  return _mm256_sub_ps(a, b);
}
static inline vf vf_mul(vf a, vf b) {
  return _mm256_mul_ps(a, b);
}
static inline vf vf_div(vf a, vf b) {
  return _mm256_div_ps(a, b);
}
// Returns b if either operand is NaN.
static inline vf vf_max(vf a, vf b) {
  return _mm256_max_ps(a, b);
}
static inline vf vf_min(vf a, vf b) {
  return _mm256_min_ps(a, b);
}
static inline vf vf_round(vf a) {
  return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
static inline vf vf_power2(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
// The smaller (larger) of a and |v|; a if v is NaN or, for the smaller, x is 0.
static inline vf vf_min_abs(vf a, vf v, vf x) {
  vf zero = _mm256_cmp_ps(x, vf_zero(), _CMP_EQ_OQ); // turns v into NaN
  return _mm256_min_ps(_mm256_or_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), v), zero), a);
}
static inline vf vf_max_abs(vf a, vf v) {
  return _mm256_max_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), v), a);
}
// p * 2^n for integer n within +-250: two factors, so that subnormal results round once.
static inline vf vf_scale2(vf p, vf n) {
  __m256i whole = _mm256_cvtps_epi32(n);
  __m256i half = _mm256_srai_epi32(whole, 1);
  return _mm256_mul_ps(_mm256_mul_ps(p, vf_power2(half)), vf_power2(_mm256_sub_epi32(whole, half)));
}
static inline float vf_max_all(vf a) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

// The lane sums of four vectors.
static inline void vf_sum4(vf a, vf b, vf c, vf d, float out[4]) {
  vf all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}

static inline vf vf_from_half(const uint16_t *p) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
static inline vf vf_from_half_n(const uint16_t *p, uint32_t n) {
  uint16_t part[VL] = {0};
  memcpy(part, p, n * sizeof *p);
  return vf_from_half(part);
}
static inline void vf_to_half(uint16_t *p, vf v) {
  _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
static inline void vf_to_half_n(uint16_t *p, vf v, uint32_t n) {
  uint16_t part[VL];
  vf_to_half(part, v);
  memcpy(p, part, n * sizeof *p);
}

static inline vf vf_from_bf16(const uint16_t *p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
static inline vf vf_from_bf16_n(const uint16_t *p, uint32_t n) {
  uint16_t part[VL] = {0};
  memcpy(part, p, n * sizeof *p);
  return vf_from_bf16(part);
}

// E4M3 codes times 2^-8, exact except for NaN codes, which come out as 1.875. The code's bits are
// an F16 with an exponent too low by eight, and F16C conversion handles F16 subnormals.
static inline void vf_from_e4m3(const uint8_t *p, vf *lo, vf *hi) {
  __m256i half = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
  half = _mm256_and_si256(_mm256_slli_epi16(half, 7), _mm256_set1_epi16((short)0xbf80));
  *lo = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
  *hi = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
}
// n < 2 VL
static inline void vf_from_e4m3_n(const uint8_t *p, uint32_t n, vf *lo, vf *hi) {
  uint8_t part[2 * VL] = {0};
  memcpy(part, p, n);
  vf_from_e4m3(part, lo, hi);
}

// Whether any of the codes is NaN.
static inline int e4m3_has_nan(const uint8_t *p, uint32_t n) {
  const __m256i magnitude = _mm256_set1_epi8(0x7f);
  __m256i found = _mm256_setzero_si256();
  uint32_t i = 0;
  for (; i + 32 <= n; i += 32) {
    __m256i codes = _mm256_loadu_si256((const __m256i *)(p + i));
    found = _mm256_or_si256(found,
                            _mm256_cmpeq_epi8(_mm256_and_si256(codes, magnitude), magnitude));
  }
  int any = _mm256_movemask_epi8(found) != 0;
  for (; i < n; i++)
    any |= (p[i] & 0x7f) == 0x7f;
  return any;
}

// Part i of sixteen signed bytes, VL of them.
static inline vf vf_from_bytes(__m128i bytes, int i) {
  if (i) bytes = _mm_srli_si128(bytes, VL);
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}

static inline vf vf_from_i8(const int8_t *p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}

// VL E4M3 codes, NaN included.
static inline vf vf_from_e4m3_exact(const uint8_t *p) {
  __m128i codes = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p));
  __m128i half = _mm_and_si128(_mm_slli_epi16(codes, 7), _mm_set1_epi16((short)0xbf80));
  __m128i magnitude = _mm_and_si128(codes, _mm_set1_epi16(0x7f));
  __m256i nan = _mm256_cvtepi16_epi32(_mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f)));
  return _mm256_or_ps(vf_mul(_mm256_cvtph_ps(half), vf_set1(256)), _mm256_castsi256_ps(nan));
}

// VL E8M0 codes: 2^(code - 127); 0 is subnormal, 0xff NaN.
static inline vf vf_from_e8m0(const uint8_t *p) {
  __m256i codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
  __m256i zero = _mm256_cmpeq_epi32(codes, _mm256_setzero_si256());
  __m256i nan = _mm256_cmpeq_epi32(codes, _mm256_set1_epi32(255));
  __m256i bits = _mm256_or_si256(_mm256_slli_epi32(codes, 23), nan);
  bits = _mm256_or_si256(bits, _mm256_and_si256(zero, _mm256_set1_epi32(0x00400000)));
  return _mm256_castsi256_ps(bits);
}

// VL words of 32 bits.
typedef __m256i vi;
static inline vi vi_load(const void *p) {
  return _mm256_loadu_si256((const __m256i *)p);
}
// The first n < 4 VL bytes, followed by zeros.
static inline vi vi_load_n(const void *p, uint32_t n) {
  uint8_t part[4 * VL] = {0};
  memcpy(part, p, n);
  return vi_load(part);
}
static inline vi vi_srl8(vi a) {
  return _mm256_srli_epi32(a, 8);
}
// Lane j has code j of the VL codes at p in its lowest bits, with other codes above it.
static inline vi vi_spread4(const void *p) {
  int word;
  memcpy(&word, p, sizeof word);
  return _mm256_srlv_epi32(_mm256_set1_epi32(word), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
}
// Lane j becomes a[from[j]].
static inline vf vf_permute(vf a, vi from) {
  return _mm256_permutevar8x32_ps(a, from);
}

// Transposes dwords: vector j gets dword j of eight rows; rows i and i + 4 are the halves of input
// i.
static inline void vi_transpose4(vi a, vi b, vi c, vi d, vi out[4]) {
  vi ab = _mm256_unpacklo_epi32(a, b), cd = _mm256_unpacklo_epi32(c, d);
  out[0] = _mm256_unpacklo_epi64(ab, cd);
  out[1] = _mm256_unpackhi_epi64(ab, cd);
  ab = _mm256_unpackhi_epi32(a, b), cd = _mm256_unpackhi_epi32(c, d);
  out[2] = _mm256_unpacklo_epi64(ab, cd);
  out[3] = _mm256_unpackhi_epi64(ab, cd);
}
// E2M1 codes, one per byte: twice the value plus 12.
static inline vi vi_from_e2m1(vi codes) {
  const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes);
}
// The largest magnitude of n floats, n a multiple of VL, as bits; NaN is above all.
static inline uint32_t vf_largest(const float *x, uint32_t n) {
  vi most = _mm256_setzero_si256();
  for (uint32_t i = 0; i < n; i += VL) {
    vi bits = _mm256_and_si256(vi_load(x + i), _mm256_set1_epi32(0x7fffffff));
    most = _mm256_max_epi32(most, bits);
  }
  __m128i half = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  half = _mm_max_epi32(half, _mm_unpackhi_epi64(half, half));
  return (uint32_t)_mm_cvtsi128_si32(_mm_max_epi32(half, _mm_srli_epi64(half, 32)));
}
// 16 bytes at p and 16 bytes at q.
static inline vi vi_load_two(const void *p, const void *q) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)p)),
                                 _mm_loadu_si128((const __m128i *)q), 1);
}
// Transposes 16 bytes of VL rows: vector i has dword i of each.
static inline void vi_transpose(const char *p, size_t apart, vi out[4]) {
  vi_transpose4(vi_load_two(p, p + 4 * apart), vi_load_two(p + apart, p + 5 * apart),
                vi_load_two(p + 2 * apart, p + 6 * apart),
                vi_load_two(p + 3 * apart, p + 7 * apart), out);
}

// out[4 k + t] = number k of vector t.
static inline void vf_mix4(const float *a, const float *b, const float *c, const float *d,
                           float *out) {
  vi of[4];
  vi_transpose4(vi_load(a), vi_load(b), vi_load(c), vi_load(d), of);
  for (int j = 0; j < 4; j++) {
    _mm_storeu_ps(out + 4 * j, _mm_castsi128_ps(_mm256_castsi256_si128(of[j])));
    _mm_storeu_ps(out + 16 + 4 * j, _mm_castsi128_ps(_mm256_extracti128_si256(of[j], 1)));
  }
}

// out[i step + j] = in[8 j + i] for j < VL, i < 8.
static inline void vf_order8(const float *in, float *out, size_t step) {
  vf a[8], b[8], c[8];
  for (int m = 0; m < 8; m++)
    a[m] = vf_load(in + m * VL);
  for (int m = 0; m < 8; m += 2) {
    b[m] = _mm256_unpacklo_ps(a[m], a[m + 1]);
    b[m + 1] = _mm256_unpackhi_ps(a[m], a[m + 1]);
  }
  for (int m = 0; m < 8; m += 4) {
    for (int h = 0; h < 2; h++) {
      c[m + 2 * h] = _mm256_shuffle_ps(b[m + h], b[m + h + 2], 0x44);
      c[m + 2 * h + 1] = _mm256_shuffle_ps(b[m + h], b[m + h + 2], 0xee);
    }
  }
  for (int i = 0; i < 4; i++) {
    vf_store(out + (size_t)i * step, _mm256_permute2f128_ps(c[i], c[i + 4], 0x20));
    vf_store(out + (size_t)(i + 4) * step, _mm256_permute2f128_ps(c[i], c[i + 4], 0x31));
  }
}

// Nibble `place` of each of VL words at p, after adding `add` to the words, minus 8.
static inline vf vf_zero_points(const uint32_t *p, uint32_t place) {
  __m256i words = _mm256_srl_epi32(vi_load(p), _mm_cvtsi32_si128((int)(4 * place)));
  words = _mm256_and_si256(words, _mm256_set1_epi32(15));
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(words, _mm256_set1_epi32(8)));
}
