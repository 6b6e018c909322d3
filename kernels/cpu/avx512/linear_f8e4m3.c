// kernels/cpu/avx512/linear_f8e4m3.c - FP8 weights with scales; see linear_vec.h.
// A code in the top byte of a 32-bit lane, arithmetically shifted right by 4, has its sign,
// exponent and fraction in place. Adding 112 to the exponent, which is setting three bits, gives
// the weight times 2^-8. That takes 10 operations for 64 weights, and 3 more to detect the codes
// for which it is wrong: zeros, subnormals and NaN, which are rare in real matrices.
#include <stdbool.h>

#include "kernels/cpu/avx512/vec.h"

typedef uint8_t elem;
enum { HAS_SCALES = 1, DOWN = 256, GROUP = 64 };

typedef struct {
  __m512i bytes;
} codes;

static inline codes load_codes(const elem *w) {
  return (codes){_mm512_loadu_si512(w)};
}

static inline codes load_codes_n(const elem *w, uint32_t n, elem room[GROUP]) {
  (void)room;
  return (codes){_mm512_maskz_loadu_epi8(((__mmask64)1 << n) - 1, w)};
}

// Magnitudes 0x08 to 0x7e, the normal numbers, map to 0x89 to 0xff and all others lower; NaN maps
// to 0.
static inline __m512i rank_codes(__m512i bytes) {
  return _mm512_add_epi8(_mm512_or_si512(bytes, _mm512_set1_epi8((char)0x80)), _mm512_set1_epi8(1));
}

static inline __attribute__((always_inline)) bool plain(int n, const codes *c) {
  __m512i lowest = rank_codes(c[0].bytes);
  for (int i = 1; i < n; i++)
    lowest = _mm512_min_epu8(lowest, rank_codes(c[i].bytes));
  return _mm512_cmple_epu8_mask(lowest, _mm512_set1_epi8((char)0x88)) == 0;
}

static inline bool has_nan(const codes *c) {
  return _mm512_testn_epi8_mask(rank_codes(c->bytes), _mm512_set1_epi8((char)0xff)) != 0;
}

// Byte 4 l + j of the result is code 16 j + l: lane l holds the codes that are added to it.
static inline __m512i gather_codes(__m512i bytes) {
  const __m512i from = _mm512_add_epi8(
      _mm512_set1_epi32(0x30201000),
      _mm512_set_epi32(0x0f0f0f0f, 0x0e0e0e0e, 0x0d0d0d0d, 0x0c0c0c0c, 0x0b0b0b0b, 0x0a0a0a0a,
                       0x09090909, 0x08080808, 0x07070707, 0x06060606, 0x05050505, 0x04040404,
                       0x03030303, 0x02020202, 0x01010101, 0x00000000));
  return _mm512_permutexvar_epi8(from, bytes);
}

// Inlined so that the compiler computes common parts once for all four vectors.
static inline __attribute__((always_inline)) vf vector_of(const codes *c, int j) {
  const __m512i keep = _mm512_set1_epi32((int)0x87f00000u), exponent = _mm512_set1_epi32(112 << 23);
  __m512i lanes = gather_codes(c->bytes);
  if (j % 2 == 0) lanes = _mm512_slli_epi16(lanes, 8);
  lanes = _mm512_srai_epi16(lanes, 4);
  if (j < 2) lanes = _mm512_slli_epi32(lanes, 16);
  return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(lanes, keep, exponent, 0xea));
}

// For any codes, but NaN comes out as 1.875. The code's bits are an F16 with an exponent too low by
// eight, and F16C conversion handles F16 subnormals.
static inline vf any_vector_of(const codes *c, int j) {
  __m256i two = j < 2 ? _mm512_castsi512_si256(c->bytes) : _mm512_extracti64x4_epi64(c->bytes, 1);
  __m128i one = j % 2 == 0 ? _mm256_castsi256_si128(two) : _mm256_extracti128_si256(two, 1);
  __m256i half = _mm256_slli_epi16(_mm256_cvtepi8_epi16(one), 7);
  return _mm512_cvtph_ps(_mm256_and_si256(half, _mm256_set1_epi16((short)0xbf80)));
}

#include "kernels/cpu/linear/linear_vec.h"

void linear_f8e4m3__avx512(const td_linear_args *args) {
  linear_vec(args);
}
