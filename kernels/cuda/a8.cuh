// kernels/cuda/a8.cuh - the codes of products in 8 bits: what activations are rounded to, and what
// becomes of a sum of at most TD_CU_A8_BLOCK products of an activation and a weight.
#pragma once

#include "kernels/cuda/e4m3.cuh"

struct e4m3 {
  using sum_type = float;
  static constexpr float MOST = TD_CU_E4M3_MOST;
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
  static constexpr bool HAS_MMA = true;
#else
  static constexpr bool HAS_MMA = false;
#endif

  // Of a sum that began with FIRST, and of one that began with zero.
  static constexpr float FIRST = 0;
  __device__ static float value(float sum) {
    return sum;
  }
  __device__ static float value_from_zero(float sum) {
    return sum;
  }

  // Codes of four values times factor.
  __device__ static uint32_t codes(const float *v, float factor) {
    return e4m3x4_from_f32(v, factor);
  }
};

// Conversions have a fraction of the rate of FP32 sums, and none is needed: 1.5 * 2^23 plus an
// integer of less than 2^22 has that integer in its last bits.
struct int8 {
  using sum_type = int32_t;
  static constexpr float MOST = TD_CU_INT8_MOST;
  static constexpr bool HAS_MMA = true;

  static constexpr int32_t FIRST = 0x4b400000; // the bits of 1.5 * 2^23
  static_assert(TD_CU_A8_BLOCK * 127 * 128 < 1 << 22, "a step's sum");
  __device__ static float value(int32_t sum) {
    return __uint_as_float(static_cast<uint32_t>(sum)) - 0x1.8p23f;
  }
  __device__ static float value_from_zero(int32_t sum) { return value(FIRST + sum); }

  // Nearest even; 0 of NaN.
  __device__ static uint32_t code(float v, float factor) {
    return __float_as_uint(fmaf(v, factor, 0x1.8p23f)) & 0xff;
  }

  __device__ static uint32_t codes(const float *v, float factor) {
    return code(v[0], factor) | code(v[1], factor) << 8 | code(v[2], factor) << 16 |
           code(v[3], factor) << 24;
  }
};
