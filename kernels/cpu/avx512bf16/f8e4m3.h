// kernels/cpu/avx512bf16/f8e4m3.h - FP8 weights with scales, for linear_rows.h and
// avx512amx/linear_tiles.h. The tables include subnormal numbers and NaN. The upper byte gets the
// code's sign.
#pragma once

#include <stdint.h>

typedef uint8_t elem;
enum { HAS_SCALES = 1 };

#include "kernels/cpu/avx512bf16/bytes.h"
#include "kernels/decl.h"

// E(e, i): table entry for exponent field e and fraction i, 0 to 7; EIGHT makes one line.
#define EIGHT(E, e) E(e, 0), E(e, 1), E(e, 2), E(e, 3), E(e, 4), E(e, 5), E(e, 6), E(e, 7)
#define ALL_CODES(S, E)                                                                            \
  EIGHT(S, 0), EIGHT(E, 1), EIGHT(E, 2), EIGHT(E, 3), EIGHT(E, 4), EIGHT(E, 5), EIGHT(E, 6),       \
      EIGHT(E, 7), EIGHT(E, 8), EIGHT(E, 9), EIGHT(E, 10), EIGHT(E, 11), EIGHT(E, 12),             \
      EIGHT(E, 13), EIGHT(E, 14), EIGHT(E, 15)
// BF16 bits of 2^(e - 7) (1 + i / 8), of i 2^-9 if subnormal, and NaN instead of 480.
#define NORMAL(e, i) ((e) == 15 && (i) == 7 ? 0x7fc0 : (120 + (e)) << 7 | (i) << 4)
#define SUBNORMAL(e, i)                                                                            \
  ((i) == 0 ? 0 : (i) < 2 ? 118 << 7 : (i) < 4 ? 119 << 7 | ((i)-2) * 64 : 120 << 7 | ((i)-4) * 32)
#define UPPER(e, i)           NORMAL(e, i) >> 8
#define LOWER(e, i)           NORMAL(e, i) & 0xff
#define UPPER_SUBNORMAL(e, i) SUBNORMAL(e, i) >> 8
#define LOWER_SUBNORMAL(e, i) SUBNORMAL(e, i) & 0xff

static const _Alignas(64) uint8_t upper[128] = {ALL_CODES(UPPER_SUBNORMAL, UPPER)};
static const _Alignas(64) uint8_t lower[128] = {ALL_CODES(LOWER_SUBNORMAL, LOWER)};

static inline vi upper_of(vi line) {
  const vi sign = _mm512_set1_epi8((char)0x80);
  return _mm512_ternarylogic_epi32(look_up(upper, line), line, sign, 0xf8); // a | b & c
}

static inline vi lower_of(vi line) {
  return look_up(lower, line);
}

static inline void linear_exact(const td_linear_args *args) {
  linear_f8e4m3__avx512(args);
}
