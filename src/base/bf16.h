// src/base/bf16.h - conversion between BF16 and f32.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

// Rounds to nearest even; NaN stays NaN.
static inline uint16_t td_bf16_of(float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16, nan = bits >> 16 | 0x40;
  return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? nan : rounded);
}

static inline float td_bf16_value(uint16_t bf16) {
  uint32_t bits = (uint32_t)bf16 << 16;
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

static inline void td_bf16_of_n(uint16_t *out, const float *f, size_t n) {
  for (size_t i = 0; i < n; i++)
    out[i] = td_bf16_of(f[i]);
}

static inline void td_bf16_values(float *out, const uint16_t *bf16, size_t n) {
  for (size_t i = 0; i < n; i++)
    out[i] = td_bf16_value(bf16[i]);
}
