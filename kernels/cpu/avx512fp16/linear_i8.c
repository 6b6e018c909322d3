// kernels/cpu/avx512fp16/linear_i8.c - INT8 weights with scales; see linear_bytes.h.
#include "kernels/cpu/avx512fp16/vec.h"

#include "kernels/decl.h"

typedef int8_t elem;
enum { DOWN = 1, TOP = 2 }; // 64 products of 128 2^2 are 32768

// The lower byte times 1, as a signed 16-bit number.
static inline vh even_of(__m512i line) {
  return _mm512_cvtepi16_ph(_mm512_maddubs_epi16(_mm512_set1_epi16(1), line));
}

static inline vh odd_of(__m512i line) {
  return _mm512_cvtepi16_ph(_mm512_srai_epi16(line, 8));
}

// No code is NaN.
static inline __m512i look(__m512i seen, __m512i line) {
  (void)line;
  return seen;
}

static inline _Bool has_nan(__m512i seen) {
  (void)seen;
  return 0;
}

static inline void linear_exact(const td_linear_args *args) {
  linear_i8__avx512(args);
}

#include "kernels/cpu/avx512fp16/linear_bytes.h"

void linear_i8__avx512fp16(const td_linear_args *args) {
  linear_bytes(args);
}
