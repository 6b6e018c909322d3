// kernels/cpu/avx2/w4a8.h - 4-bit weights times activations in 8 bits; see linear_w4a8.h.
#pragma once

#include "kernels/cpu/avx2/vec.h"

#ifdef __AVXVNNI__
enum { VECTORS = 2, TILE_TOKENS = 6 };

static inline vi a8_dot(vi sum, vi u, vi x) {
  return _mm256_dpbusd_avx_epi32(sum, u, x);
}
#else
enum { VECTORS = 2, TILE_TOKENS = 4 };
#define A8_STEP_WORDS 4

// Sums are kept in 16-bit pairs, which stay below 2^15: 4 * 2 * 24 * 127.
static inline vi a8_begin(vi acc) {
  (void)acc;
  return _mm256_setzero_si256();
}
static inline vi a8_dot(vi sum, vi u, vi x) {
  return _mm256_add_epi16(sum, _mm256_maddubs_epi16(u, x));
}
static inline vi a8_end(vi acc, vi sum) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(sum, _mm256_set1_epi16(1)));
}
#endif
static inline vi a8_set1(int32_t i) {
  return _mm256_set1_epi32(i);
}
static inline vi a8_mul(vi a, vi b) {
  return _mm256_mullo_epi32(a, b);
}
static inline vf a8_to_float(vi a) {
  return _mm256_cvtepi32_ps(a);
}
static inline void vi_store(void *p, vi a) {
  _mm256_storeu_si256((__m256i *)p, a);
}

static inline __m128i a8_load16(const void *p) {
  return _mm_loadu_si128((const __m128i *)p);
}
static inline void a8_words(const uint8_t *const *rows, size_t at, vi words[4]) {
  vi_transpose4(vi_load_two(rows[0] + at, rows[4] + at), vi_load_two(rows[1] + at, rows[5] + at),
                vi_load_two(rows[2] + at, rows[6] + at), vi_load_two(rows[3] + at, rows[7] + at),
                words);
}

static inline vi a8_low(vi words) {
  return _mm256_and_si256(words, _mm256_set1_epi8(15));
}
static inline vi a8_high(vi words) {
  return _mm256_and_si256(_mm256_srli_epi32(words, 4), _mm256_set1_epi8(15));
}
static inline vi a8_lookup(vi codes) {
  return vi_from_e2m1(codes);
}

static inline uint32_t a8_largest(const float *x, uint32_t n) {
  return vf_largest(x, 16 * n);
}

static inline void a8_round(const float *x, float times, int8_t *out) {
  const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  vi a = _mm256_cvtps_epi32(vf_mul(vf_load(x), vf_set1(times)));
  vi b = _mm256_cvtps_epi32(vf_mul(vf_load(x + VL), vf_set1(times)));
  vi words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
  __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words),
                                  _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128((__m128i *)out, _mm_shuffle_epi8(bytes, order));
}

static inline int32_t a8_sum(const int8_t *x, uint32_t n) {
  __m128i sum = _mm_setzero_si128();
  for (uint32_t i = 0; i < n; i += 16) {
    __m128i pairs = _mm_maddubs_epi16(_mm_set1_epi8(1), a8_load16(x + i));
    sum = _mm_add_epi32(sum, _mm_madd_epi16(pairs, _mm_set1_epi16(1)));
  }
  sum = _mm_add_epi32(sum, _mm_unpackhi_epi64(sum, sum));
  return _mm_cvtsi128_si32(sum) + _mm_extract_epi32(sum, 1);
}

#include "kernels/cpu/linear/linear_w4a8.h"
