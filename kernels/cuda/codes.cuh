// kernels/cuda/codes.cuh - weights as they are stored, decoded in registers: one value of any
// format at a time, or eight of a row at once. The layouts are in tandem/types.h.
#ifndef KERNELS_CUDA_CODES_CUH
#define KERNELS_CUDA_CODES_CUH

#include "kernels/cuda/common.cuh"

__device__ inline uint32_t weight_groups(const td_weight &w) {
  return w.scale_cols ? (w.cols + w.scale_cols - 1) / w.scale_cols : 0;
}

// E4M3 is F16 less 7 in the exponent's bias, but for its NaN.
__device__ inline float f32_from_e4m3(uint32_t code) {
  uint32_t magnitude = code & 0x7f;
  float f = f32_from_f16(static_cast<uint16_t>(magnitude << 7)) * 256.0f;
  if (magnitude == 0x7f) f = __uint_as_float(0x7fc00000u);
  return code & 0x80 ? -f : f;
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

// In which of a word's eight codes AWQ keeps row % 8.
__device__ inline uint32_t awq_place(uint32_t row) {
  return row % 2 * 4 + row % 8 / 2;
}

__device__ inline uint32_t code4_at(const td_weight &w, uint32_t row, uint32_t col) {
  size_t rows = w.rows;
  switch (w.layout) {
  case TD_LAYOUT_GPTQ: return nibble_at(w.data, (col / 8 * rows + row) * 8 + col % 8);
  case TD_LAYOUT_AWQ: return nibble_at(w.data, (col * (rows / 8) + row / 8) * 8 + awq_place(row));
  case TD_LAYOUT_ROWS: break;
  }
  size_t unit = w.dtype == TD_I4 ? 8 : 2;
  return nibble_at(w.data, (w.cols + unit - 1) / unit * unit * row + col);
}

// The zero point of a group of a row.
__device__ inline int zero_at(const td_weight &w, uint32_t row, uint32_t group) {
  if (!w.zero) return 8;
  size_t words = (static_cast<size_t>(w.rows) + 7) / 8;
  size_t word = w.layout == TD_LAYOUT_ROWS ? static_cast<size_t>(row / 8) * weight_groups(w) + group
                                           : group * words + row / 8;
  uint32_t place = w.layout == TD_LAYOUT_AWQ ? awq_place(row) : row % 8;
  return static_cast<int>((w.zero[word] + w.zero_add) >> (4 * place) & 15);
}

// An element without its scale.
__device__ inline float code_at(const td_weight &w, uint32_t row, uint32_t col) {
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
  default: return static_cast<const float *>(w.data)[i];
  }
}

// The scale of a group of a row, without the global one; 1 without scales.
__device__ inline float scale_at(const td_weight &w, uint32_t row, uint32_t group) {
  if (!w.scale) return 1;
  size_t at = w.layout == TD_LAYOUT_ROWS
                  ? static_cast<size_t>(row / w.scale_rows) * weight_groups(w) + group
                  : static_cast<size_t>(group) * w.rows + row;
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

// An element with its scale, the global one included.
__device__ inline float weight_at(const td_weight &w, uint32_t row, uint32_t col) {
  float scale = w.scale ? scale_at(w, row, col / w.scale_cols) : 1;
  return code_at(w, row, col) * scale * global_scale(w);
}

__device__ inline void floats_from_bf16x8(uint4 v, float *out) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
  for (int i = 0; i < 4; i++) {
    out[2 * i] = __uint_as_float(words[i] << 16);
    out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

// Eight weights of a row as they are stored; nothing where they are read one by one.
template <int READ> struct raw8 {};
template <> struct raw8<TD_CU_READ_BF16> { uint4 v; };
template <> struct raw8<TD_CU_READ_F8> { uint2 v; };
template <> struct raw8<TD_CU_READ_I4> { uint32_t v; };

// READ is one of td_cu_read, whose conditions hold.
template <int READ>
__device__ inline raw8<READ> load8(const td_weight &w, uint32_t row, uint32_t k) {
  size_t at = static_cast<size_t>(row) * w.cols + k;
  if constexpr (READ == TD_CU_READ_BF16) {
    return {*reinterpret_cast<const uint4 *>(static_cast<const uint16_t *>(w.data) + at)};
  } else if constexpr (READ == TD_CU_READ_F8) {
    return {*reinterpret_cast<const uint2 *>(static_cast<const uint8_t *>(w.data) + at)};
  } else if constexpr (READ == TD_CU_READ_I4) {
    return {static_cast<const uint32_t *>(w.data)[at / 8]};
  } else {
    return {};
  }
}

// What load8 has read from column k on, without scales; 0 beyond the last column.
template <int READ>
__device__ inline void decode8(const td_weight &w, uint32_t row, uint32_t k, const raw8<READ> &raw,
                               float *out) {
  if constexpr (READ == TD_CU_READ_BF16) {
    floats_from_bf16x8(raw.v, out);
  } else if constexpr (READ == TD_CU_READ_F8) {
    for (int i = 0; i < 4; i++) {
      out[i] = f32_from_e4m3(raw.v.x >> (8 * i) & 0xff);
      out[4 + i] = f32_from_e4m3(raw.v.y >> (8 * i) & 0xff);
    }
  } else if constexpr (READ == TD_CU_READ_I4) {
    int zero = zero_at(w, row, k / w.scale_cols);
    for (int i = 0; i < 8; i++)
      out[i] = static_cast<float>(static_cast<int>(raw.v >> (4 * i) & 15) - zero);
  } else {
    for (uint32_t i = 0; i < 8; i++)
      out[i] = k + i < w.cols ? code_at(w, row, k + i) : 0;
  }
}

// Eight activations of a row of n from column k on; 0 beyond the last.
template <int READ>
__device__ inline void activations8(const uint16_t *x, uint32_t k, uint32_t n, float *out) {
  if constexpr (READ == TD_CU_READ_ANY) {
    for (uint32_t i = 0; i < 8; i++)
      out[i] = k + i < n ? f32_from_bf16(x[k + i]) : 0;
  } else {
    floats_from_bf16x8(*reinterpret_cast<const uint4 *>(x + k), out);
  }
}

#endif
