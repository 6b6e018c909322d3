// kernels/cuda/dequant.cuh - value-by-value dequantization of stored weights of any format. Layouts
// are in tandem/types.h.
#pragma once

#include "kernels/cuda/common.cuh"

#define TD_HALF_VALUE(bits) f32_from_f16(bits)
#define TD_BITS_VALUE(bits) __uint_as_float(bits)
#include "kernels/blocks.h"

__device__ inline uint32_t weight_groups(const td_weight &w) {
  return w.scale_cols ? (w.cols + w.scale_cols - 1) / w.scale_cols : 0;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
// Converts the lower two bytes; all E4M3 codes are exact in F16.
__device__ inline uint32_t f16x2_from_e4m3x2(uint32_t codes) {
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(codes)));
  return pair;
}
#endif

// A magnitude shifted left by 7 is an F16 value but for the exponent bias, which differs by 8
// (hence * 256). NaN is handled apart.
__device__ inline float f32_from_e4m3(uint32_t code) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return f32_from_f16(static_cast<uint16_t>(f16x2_from_e4m3x2(code)));
#else
  uint32_t magnitude = code & 0x7f;
  float f = f32_from_f16(static_cast<uint16_t>(magnitude << 7)) * 256.0f;
  if (magnitude == 0x7f) f = __uint_as_float(0x7fc00000u);
  return code & 0x80 ? -f : f;
#endif
}

__device__ inline float f32_from_e2m1(uint32_t code) {
  uint32_t exponent = code >> 1 & 3, mantissa = code & 1;
  float f = exponent ? static_cast<float>((2 + mantissa) << (exponent - 1)) * 0.5f
                     : static_cast<float>(mantissa) * 0.5f;
  return code & 8 ? -f : f;
}

__device__ inline float f32_from_e8m0(uint32_t code) {
  if (code == 0xff) return __uint_as_float(0x7fc00000u);
  return __uint_as_float(code ? code << 23 : 0x00400000u);
}

__device__ inline uint32_t nibble_at(const void *words, size_t idx) {
  return static_cast<const uint8_t *>(words)[idx / 2] >> (idx % 2 * 4) & 15;
}

__device__ inline uint32_t code4_at(const td_weight &w, uint32_t row, uint32_t col) {
  size_t unit = w.dtype == TD_I4 ? 8 : 2;
  return nibble_at(w.data, (w.cols + unit - 1) / unit * unit * row + col);
}

// The zero point of a row's group.
__device__ inline int zero_at(const td_weight &w, uint32_t row, uint32_t group) {
  if (!w.zero) return 8;
  size_t word = static_cast<size_t>(row / 8) * weight_groups(w) + group;
  return static_cast<int>(w.zero[word] >> (row % 8 * 4) & 15);
}

// An element without its scale.
__device__ inline float dequant_at(const td_weight &w, uint32_t row, uint32_t col) {
  size_t i = static_cast<size_t>(row) * w.cols + col;
  switch (w.dtype) {
  case TD_BF16: return f32_from_bf16(static_cast<const uint16_t *>(w.data)[i]);
  case TD_F16: return f32_from_f16(static_cast<const uint16_t *>(w.data)[i]);
  case TD_F8E4M3: return f32_from_e4m3(static_cast<const uint8_t *>(w.data)[i]);
  case TD_I8: return static_cast<const int8_t *>(w.data)[i];
  case TD_I4:
    return static_cast<float>(static_cast<int>(code4_at(w, row, col)) -
                              zero_at(w, row, col / w.scale_cols));
  case TD_F4E2M1: return f32_from_e2m1(code4_at(w, row, col));
#define X(id, cols, bytes) case TD_##id:
    TD_BLOCK_DTYPES(X)
#undef X
    return gguf_value(&w, row, col);
  default: return static_cast<const float *>(w.data)[i];
  }
}

// The scale of a row's group, without the global scale; 1 if there are no scales.
__device__ inline float scale_at(const td_weight &w, uint32_t row, uint32_t group) {
  if (!w.scale) return 1;
  size_t at = static_cast<size_t>(row / w.scale_rows) * weight_groups(w) + group;
  switch (w.scale_dtype) {
  case TD_BF16: return f32_from_bf16(static_cast<const uint16_t *>(w.scale)[at]);
  case TD_F16: return f32_from_f16(static_cast<const uint16_t *>(w.scale)[at]);
  case TD_F8E4M3: return f32_from_e4m3(static_cast<const uint8_t *>(w.scale)[at]);
  case TD_F8E8M0: return f32_from_e8m0(static_cast<const uint8_t *>(w.scale)[at]);
  default: return static_cast<const float *>(w.scale)[at];
  }
}

__device__ inline float global_scale(const td_weight &w) {
  return w.dtype == TD_F4E2M1 ? w.global_scale : 1;
}

// An element times its scale and the global scale.
__device__ inline float weight_at(const td_weight &w, uint32_t row, uint32_t col) {
  float scale = w.scale ? scale_at(w, row, col / w.scale_cols) : 1;
  return dequant_at(w, row, col) * scale * global_scale(w);
}
