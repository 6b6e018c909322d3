// tests/cuda_emu/cuda_fp16.h - F16 conversions as <cuda_fp16.h> has them.
#pragma once

#include "emu.h"

struct __half {
  unsigned short bits;
};

inline __half __ushort_as_half(unsigned short bits) {
  return {bits};
}
inline unsigned short __half_as_ushort(__half h) {
  return h.bits;
}

inline float __half2float(__half h) {
  unsigned exponent = h.bits >> 10 & 31, mantissa = h.bits & 1023;
  float magnitude;
  if (exponent == 31) {
    magnitude = mantissa ? NAN : INFINITY;
  } else if (exponent == 0) {
    magnitude = static_cast<float>(mantissa) * 0x1p-24f;
  } else {
    magnitude = __uint_as_float((exponent + 112) << 23 | mantissa << 13);
  }
  return h.bits & 0x8000 ? -magnitude : magnitude;
}

inline __half __float2half_rn(float f) {
  uint32_t bits = __float_as_uint(f), magnitude = bits & 0x7fffffffu;
  unsigned short sign = static_cast<unsigned short>(bits >> 16 & 0x8000);
  if (std::isnan(f)) return {0x7fff};
  if (magnitude >= 0x477ff000u) return {static_cast<unsigned short>(sign | 0x7c00)};
  if (magnitude < 0x38800000u) { // a multiple of 2^-24: the addition rounds
    uint32_t shifted = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u;
    return {static_cast<unsigned short>(sign | shifted)};
  }
  uint32_t rounded = magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1);
  return {static_cast<unsigned short>(sign | rounded >> 13)};
}
