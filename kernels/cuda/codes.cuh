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

// Four codes, the lowest byte first.
__device__ inline void floats_from_e4m3x4(uint32_t codes, float *out) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  for (int i = 0; i < 2; i++) {
    uint32_t pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(codes >> 16 * i)));
    out[2 * i] = f32_from_f16(static_cast<uint16_t>(pair));
    out[2 * i + 1] = f32_from_f16(static_cast<uint16_t>(pair >> 16));
  }
#else
  // Bytes 0 and 2, 1 and 3 as F16, whose exponent has another bias.
  uint32_t even = (codes << 8 & 0x80008000u) | (codes << 7 & 0x3f803f80u);
  uint32_t odd = (codes & 0x80008000u) | (codes >> 1 & 0x3f803f80u);
  out[0] = f32_from_f16(static_cast<uint16_t>(even)) * 256.0f;
  out[1] = f32_from_f16(static_cast<uint16_t>(odd)) * 256.0f;
  out[2] = f32_from_f16(static_cast<uint16_t>(even >> 16)) * 256.0f;
  out[3] = f32_from_f16(static_cast<uint16_t>(odd >> 16)) * 256.0f;
  bool any_nan = ((codes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
  for (int i = 0; any_nan && i < 4; i++)
    out[i] = f32_from_e4m3(codes >> 8 * i & 0xff);
#endif
}

// Code i of eight, less zero: below 2^23 the bits of a float behind 2^23 are those of an integer.
__device__ inline float f32_from_i4(uint32_t codes, int i, float zero) {
  return __uint_as_float(0x4b000000u | (codes >> 4 * i & 15)) - (8388608.0f + zero);
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

// Where a row's scales lie, as the reads but TD_CU_READ_ANY have them.
struct row_scales {
  const char *first;
  uint32_t shift; // a column's bits that are not of its group's number
  bool is_f32, is_bf16;
};

// A division takes as long as decoding eight weights.
__device__ inline uint32_t group_shift(const td_weight &w) {
  return w.scale_cols >= w.cols ? 31 : 31 - __clz(static_cast<int>(w.scale_cols));
}

__device__ inline row_scales scales_of_row(const td_weight &w, uint32_t row) {
  row_scales s = {};
  s.shift = group_shift(w);
  s.is_f32 = w.scale_dtype == TD_F32;
  s.is_bf16 = w.scale_dtype == TD_BF16;
  bool is_power = (w.scale_rows & (w.scale_rows - 1)) == 0;
  size_t at = is_power ? row >> (31 - __clz(static_cast<int>(w.scale_rows))) : row / w.scale_rows;
  at *= weight_groups(w);
  s.first = static_cast<const char *>(w.scale) + at * (s.is_f32 ? 4 : 2);
  return s;
}

__device__ inline float scale_in(const row_scales &s, uint32_t col) {
  uint32_t group = col >> s.shift;
  if (s.is_f32) return reinterpret_cast<const float *>(s.first)[group];
  uint16_t half = reinterpret_cast<const uint16_t *>(s.first)[group];
  return s.is_bf16 ? f32_from_bf16(half) : f32_from_f16(half);
}

// Eight weights of a row from column k on, each times its own.
__device__ inline void scale_each(const td_weight &w, uint32_t row, uint32_t k, float *v) {
  for (uint32_t i = 0; w.scale && i < 8 && k + i < w.cols; i++)
    v[i] *= scale_at(w, row, (k + i) / w.scale_cols);
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
    floats_from_e4m3x4(raw.v.x, out);
    floats_from_e4m3x4(raw.v.y, out + 4);
  } else if constexpr (READ == TD_CU_READ_I4) {
    float zero = static_cast<float>(zero_at(w, row, k >> group_shift(w)));
    for (int i = 0; i < 8; i++)
      out[i] = f32_from_i4(raw.v, i, zero);
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
