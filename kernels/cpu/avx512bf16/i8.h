// kernels/cpu/avx512bf16/i8.h - INT8 weights with scales, for linear_rows.h and
// avx512amx/linear_tiles.h. Tables of magnitudes, whose upper byte gets the code's sign. Entry 0
// holds 128: both have the same lower seven bits and the same lower byte, and 0 itself is masked
// instead of looked up.
#pragma once

#include <stdint.h>

typedef int8_t elem;
enum { HAS_SCALES = 1 };

#include "kernels/cpu/avx512bf16/bytes.h"
#include "kernels/decl.h"

// E(i): table entry for magnitude i, 0 to 127.
#define EIGHT(E, i)                                                                                \
  E(i), E((i) + 1), E((i) + 2), E((i) + 3), E((i) + 4), E((i) + 5), E((i) + 6), E((i) + 7)
#define ALL_CODES(E)                                                                               \
  EIGHT(E, 0), EIGHT(E, 8), EIGHT(E, 16), EIGHT(E, 24), EIGHT(E, 32), EIGHT(E, 40), EIGHT(E, 48),  \
      EIGHT(E, 56), EIGHT(E, 64), EIGHT(E, 72), EIGHT(E, 80), EIGHT(E, 88), EIGHT(E, 96),          \
      EIGHT(E, 104), EIGHT(E, 112), EIGHT(E, 120)
// BF16 bits of 1 to 127, and of 128 at index 0.
#define LOG2(i)                                                                                    \
  ((i) < 2 ? 0 : (i) < 4 ? 1 : (i) < 8 ? 2 : (i) < 16 ? 3 : (i) < 32 ? 4 : (i) < 64 ? 5 : 6)
#define BITS(i)  ((i) == 0 ? 134 << 7 : (127 + LOG2(i)) << 7 | ((i) << (7 - LOG2(i)) & 0x7f))
#define UPPER(i) BITS(i) >> 8
#define LOWER(i) BITS(i) & 0xff

static const _Alignas(64) uint8_t upper[128] = {ALL_CODES(UPPER)};
static const _Alignas(64) uint8_t lower[128] = {ALL_CODES(LOWER)};

static inline vi upper_of(vi line) {
  const vi sign = _mm512_set1_epi8((char)0x80);
  const vi plus = _mm512_maskz_permutex2var_epi8(_mm512_test_epi8_mask(line, line),
                                                 _mm512_load_si512(upper), _mm512_abs_epi8(line),
                                                 _mm512_load_si512(upper + 64));
  return _mm512_ternarylogic_epi32(plus, line, sign, 0xf8); // a | b & c
}

static inline vi lower_of(vi line) {
  return look_up(lower, _mm512_abs_epi8(line));
}

static inline void linear_exact(const td_linear_args *args) {
  linear_i8__avx512(args);
}
