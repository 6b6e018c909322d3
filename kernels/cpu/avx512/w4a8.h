// kernels/cpu/avx512/w4a8.h - 4-bit weights times activations in 8 bits; see
// linear_w4a8.h.
#pragma once

#include "kernels/cpu/avx512/vec.h"

enum { VECTORS = 2, TILE_TOKENS = 8 };

static inline vi a8_dot(vi sum, vi u, vi x) {
  return _mm512_dpbusd_epi32(sum, u, x);
}
static inline vi a8_set1(int32_t i) {
  return _mm512_set1_epi32(i);
}
static inline vi a8_mul(vi a, vi b) {
  return _mm512_mullo_epi32(a, b);
}
static inline vf a8_to_float(vi a) {
  return _mm512_cvtepi32_ps(a);
}
static inline void vi_store(void *p, vi a) {
  _mm512_storeu_si512(p, a);
}

static inline __m128i a8_load16(const uint8_t *p) {
  return _mm_loadu_si128((const __m128i *)p);
}
// Rows i, i + 4, i + 8, i + 12; the 4 x 4 transposes bring their words to lanes 4 j + i.
static inline vi a8_four_rows(const uint8_t *const *rows, size_t at, int i) {
  vi v = _mm512_castsi128_si512(a8_load16(rows[i] + at));
  v = _mm512_inserti32x4(v, a8_load16(rows[i + 4] + at), 1);
  v = _mm512_inserti32x4(v, a8_load16(rows[i + 8] + at), 2);
  return _mm512_inserti32x4(v, a8_load16(rows[i + 12] + at), 3);
}
static inline void a8_words(const uint8_t *const *rows, size_t at, vi words[4]) {
  vi a = a8_four_rows(rows, at, 0), b = a8_four_rows(rows, at, 1);
  vi c = a8_four_rows(rows, at, 2), d = a8_four_rows(rows, at, 3);
  vi ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
  words[0] = _mm512_unpacklo_epi64(ab, cd);
  words[1] = _mm512_unpackhi_epi64(ab, cd);
  ab = _mm512_unpackhi_epi32(a, b);
  cd = _mm512_unpackhi_epi32(c, d);
  words[2] = _mm512_unpacklo_epi64(ab, cd);
  words[3] = _mm512_unpackhi_epi64(ab, cd);
}

static inline vi a8_low(vi words) {
  return _mm512_and_si512(words, _mm512_set1_epi8(15));
}
static inline vi a8_high(vi words) {
  return _mm512_and_si512(_mm512_srli_epi32(words, 4), _mm512_set1_epi8(15));
}
static inline vi a8_lookup(vi codes) {
  const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), codes);
}

static inline uint32_t a8_largest(const float *x, uint32_t n) {
  vi most = _mm512_setzero_si512();
  for (uint32_t i = 0; i < n; i++) {
    vi bits = _mm512_and_si512(vi_load(x + i * VL), _mm512_set1_epi32(0x7fffffff));
    most = _mm512_max_epu32(most, bits);
  }
  return _mm512_reduce_max_epu32(most);
}

static inline void a8_round(const float *x, float times, int8_t *out) {
  const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
  vi whole = _mm512_cvtps_epi32(vf_mul(vf_load(x), vf_set1(times)));
  __m128i bytes = _mm_shuffle_epi8(_mm512_cvtsepi32_epi8(whole), order);
  _mm_storeu_si128((__m128i *)out, bytes);
}

static inline int32_t a8_sum(const int8_t *x, uint32_t n) {
  __m128i sum = _mm_setzero_si128();
  for (uint32_t i = 0; i < n; i += 16) {
    sum = _mm_dpbusd_epi32(sum, _mm_set1_epi8(1), _mm_loadu_si128((const __m128i *)(x + i)));
  }
  sum = _mm_add_epi32(sum, _mm_unpackhi_epi64(sum, sum));
  return _mm_cvtsi128_si32(sum) + _mm_extract_epi32(sum, 1);
}

#include "kernels/cpu/linear/linear_w4a8.h"
