// kernels/cpu/common/dequant.h - addresses and values of a matrix's elements, zero points and
// scales, one at a time, for every format. Layouts are in tandem/types.h.
#pragma once

#include "kernels/cpu/common/gguf.h"

static inline float f32_from_e2m1(unsigned code) {
  static const float values[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return code & 8 ? -values[code & 7] : values[code & 7];
}

static inline float f32_from_e8m0(uint8_t code) {
  if (code == 0xff) return f32_from_bits(0x7fc00000u);
  return f32_from_bits(code ? (uint32_t)code << 23 : 0x00400000u); // 2^-127 is subnormal
}

// Code idx of packed words. In little-endian words, codes are in byte order.
static inline unsigned nibble_at(const void *words, size_t idx) {
  return ((const uint8_t *)words)[idx / 2] >> idx % 2 * 4 & 15;
}

static inline unsigned code4_at(const td_weight *w, uint32_t row, uint32_t col) {
  return nibble_at((const char *)w->data + row * td_weight_row_bytes(w), col);
}

// The zero point of a row's group idx.
static inline int zero_at(const td_weight *w, uint32_t row, size_t group) {
  if (!w->zero) return 8;
  return (int)(w->zero[row / 8 * td_weight_groups(w) + group] >> row % 8 * 4 & 15);
}

// An element without its scale.
static inline float dequant_at(const td_weight *w, uint32_t row, uint32_t col) {
  switch (w->dtype) {
  case TD_I4: return (float)((int)code4_at(w, row, col) - zero_at(w, row, col / w->scale_cols));
  case TD_F4E2M1: return f32_from_e2m1(code4_at(w, row, col));
  case TD_I8: return ((const int8_t *)w->data)[(size_t)row * w->cols + col];
#define X(id, cols, bytes) case TD_##id:
    TD_BLOCK_DTYPES(X)
#undef X
    return gguf_value(w, row, col);
  default: return f32_from_any(w->data, w->dtype, (size_t)row * w->cols + col);
  }
}

// The scale of a row's group idx, without the global scale; 1 without scales.
static inline float scale_at(const td_weight *w, uint32_t row, size_t group) {
  if (!w->scale) return 1;
  size_t at = row / w->scale_rows * td_weight_groups(w) + group;
  if (w->scale_dtype == TD_F8E8M0) return f32_from_e8m0(((const uint8_t *)w->scale)[at]);
  return f32_from_any(w->scale, w->scale_dtype, at);
}

// An element of 8 bits or more times its scale.
static inline float weight_at(const td_weight *w, uint32_t row, uint32_t col) {
  return dequant_at(w, row, col) * (w->scale ? scale_at(w, row, col / w->scale_cols) : 1);
}
