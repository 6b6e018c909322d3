// kernels/cuda/kv_f8.cuh - rows of KV pages in E4M3 (tandem/kv_f8.h).
#pragma once

#include "kernels/cuda/attn.cuh"
#include "kernels/cuda/dequant8.cuh"
#include "tandem/kv_f8.h"

__device__ inline uint32_t f8_row_bytes(const td_kv_view &kv, uint32_t dim) {
  return 2 * dim - kv.n_codes;
}

__device__ inline uint32_t f8_blocks(const td_kv_view &kv) {
  return (kv.n_codes + TD_KV_F8_BLOCK - 1) / TD_KV_F8_BLOCK;
}

// Row `row` of a page, counted over all heads and positions: its codes and BF16, and its scales.
__device__ inline size_t f8_codes_at(const td_kv_view &kv, size_t row, uint32_t dim) {
  return row * f8_row_bytes(kv, dim);
}

__device__ inline size_t f8_scales_at(const td_kv_view &kv, size_t row) {
  return kv.scales_at + row * f8_blocks(kv) * sizeof(float);
}

// Eight codes times their scale, a power of two, so that all are exact.
__device__ inline uint4 f8_values(uint2 codes, float scale) {
  uint32_t pairs[4], factor = __float_as_uint(scale);
  factor = factor >> 16 | (factor & 0xffff0000u);
  pairs_from_e4m3(codes, pairs);
#pragma unroll
  for (int i = 0; i < 4; i++)
    pairs[i] = bf16x2_fma(pairs[i], factor, 0x80008000u);
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

// Columns [d, d + 8) of a row as BF16, d a multiple of 8.
__device__ inline uint4 f8_run(const td_kv_view &kv, const char *row, const float *scales,
                               uint32_t d) {
  if (d >= kv.n_codes)
    return *reinterpret_cast<const uint4 *>(row + kv.n_codes + (d - kv.n_codes) * 2);
  return f8_values(*reinterpret_cast<const uint2 *>(row + d), scales[d / TD_KV_F8_BLOCK]);
}

// The scale of a block whose largest magnitude is `most`; TD_CU_E4M3_MOST is 1.75 * 2^8.
__device__ inline float f8_scale(float most, float *inverse) {
  uint32_t bits = __float_as_uint(fmaxf(most, TD_CU_A8_LEAST_MOST));
  uint32_t exponent = (bits >> 23) - 8 + ((bits & 0x7fffff) > 0x600000);
  *inverse = __uint_as_float((254 - exponent) << 23);
  return __uint_as_float(exponent << 23);
}
