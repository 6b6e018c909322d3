// kernels/cuda/e4m3.cuh - conversion from f32 to E4M3.
#pragma once

#include "kernels/cuda/common.cuh"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 890
// As the instruction does it.
__device__ inline uint32_t e4m3_from_f32(float v) {
  const uint32_t sign = __float_as_uint(v) >> 24 & 0x80;
  if (isnan(v)) return 0x7f;
  const float m = fminf(fabsf(v), TD_CU_E4M3_MOST);
  if (m < 0x1p-6f) return sign | static_cast<uint32_t>(rintf(m * 512)); // subnormal
  uint32_t bits = __float_as_uint(m);
  bits += 0x7ffffu + (bits >> 20 & 1);
  return sign | ((bits >> 20) - (120 << 3));
}
#endif

// Nearest even; beyond the largest finite value, that one. NaN stays.
__device__ inline uint32_t e4m3x2_from_f32(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return e4m3_from_f32(low) | e4m3_from_f32(high) << 8;
#endif
}

__device__ inline uint32_t e4m3x4_from_f32(const float *v, float factor) {
  return e4m3x2_from_f32(v[0] * factor, v[1] * factor) |
         e4m3x2_from_f32(v[2] * factor, v[3] * factor) << 16;
}
