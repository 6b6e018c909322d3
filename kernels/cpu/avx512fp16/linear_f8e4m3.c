// kernels/cpu/avx512fp16/linear_f8e4m3.c - FP8 weights with scales; see linear_bytes.h.
// A code in the upper byte of a 16-bit lane, arithmetically shifted right by one and with the
// second highest bit cleared, is its value times 2^-8 as FP16, subnormals included. NaN becomes
// 1.875.
#include "kernels/cpu/avx512fp16/vec.h"

#include "kernels/decl.h"

typedef uint8_t elem;
enum { DOWN = 256, TOP = 9 }; // 64 products of 1.75 2^9 are 57344

static inline vh half_of(__m512i shifted) {
  return _mm512_castsi512_ph(_mm512_and_si512(shifted, _mm512_set1_epi16((short)0xbf80)));
}

// The lower byte times 128 gives the same bits.
static inline vh even_of(__m512i line) {
  return half_of(_mm512_maddubs_epi16(_mm512_set1_epi16(128), line));
}

static inline vh odd_of(__m512i line) {
  return half_of(_mm512_srai_epi16(line, 1));
}

// Largest magnitude of each byte position, with all signs set; NaN has the largest.
static inline __m512i look(__m512i seen, __m512i line) {
  return _mm512_max_epu8(seen, _mm512_or_si512(line, _mm512_set1_epi8((char)0x80)));
}

static inline _Bool has_nan(__m512i seen) {
  return _mm512_cmpeq_epi8_mask(seen, _mm512_set1_epi8((char)0xff)) != 0;
}

static inline void linear_exact(const td_linear_args *args) {
  linear_f8e4m3__avx512(args);
}

#include "kernels/cpu/avx512fp16/linear_bytes.h"

void linear_f8e4m3__avx512fp16(const td_linear_args *args) {
  linear_bytes(args);
}
