// src/base/e4m3.h - conversion from f32 to E4M3 (include/tandem/types.h).
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#define TD_E4M3_MAX 448.0f

// Nearest even among E4M3's values, at most TD_E4M3_MAX in magnitude; NaN stays NaN. Adding 1.5
// times a power of two aligns the unit in the last place, which below 2^-6 is 2^-9.
static inline float td_e4m3_round(float f) {
  f = f < -TD_E4M3_MAX ? -TD_E4M3_MAX : f;
  f = f > TD_E4M3_MAX ? TD_E4M3_MAX : f;
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  const uint32_t exponent = bits & 0x7f800000, least = (127u - 6) << 23;
  bits = ((exponent < least ? least : exponent) + (20u << 23)) | 0x400000;
  float shift;
  memcpy(&shift, &bits, sizeof shift);
  return f + shift - shift;
}

// The code of what td_e4m3_round returns.
static inline uint8_t td_e4m3_code(float rounded) {
  const float a = fabsf(rounded);
  uint32_t bits;
  memcpy(&bits, &a, sizeof bits);
  const uint32_t magnitude = a < 0x1p-6f ? (uint32_t)(512 * a) : (bits >> 20) - (120 << 3);
  return (uint8_t)((bits > 0x7f800000 ? 0x7f : magnitude) | (signbit(rounded) ? 0x80 : 0));
}
