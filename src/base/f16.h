// src/base/f16.h - conversion between IEEE half precision and f32.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float td_f16_value(uint16_t h) {
  int exponent = h >> 10 & 31;
  float mantissa = (float)(h & 1023);
  float value = exponent == 0    ? ldexpf(mantissa, -24)
                : exponent == 31 ? (mantissa ? NAN : INFINITY)
                                 : ldexpf(1024 + mantissa, exponent - 25);
  return h & 0x8000 ? -value : value;
}

// Rounds to nearest, ties to even; NaN stays NaN.
static inline uint16_t td_f16_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
  bits &= 0x7FFFFFFF;
  if (bits > 0x7F800000) return sign | 0x7E00;
  if (bits >= 0x477FF000) return sign | 0x7C00; // 65520 and above round to infinity
  if (bits < 0x38800000)                        // subnormal: multiples of 2^-24
    return (uint16_t)(sign | (uint32_t)rintf(fabsf(value) * 0x1p24f));
  bits += 0xFFF + (bits >> 13 & 1); // a carry propagates into the exponent
  return (uint16_t)(sign | ((bits - 0x38000000) >> 13));
}
