// kernels/cpu/common/numeric.h - scalar helpers: small float formats, runs of columns with one
// scale, and calls for some of the tokens.
#pragma once

#include <string.h>

#include "tandem/kernels.h"

static inline float f32_from_bits(uint32_t bits) {
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

static inline uint32_t bits_from_f32(float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  return bits;
}

static inline float f32_from_bf16(uint16_t h) {
  return f32_from_bits((uint32_t)h << 16);
}

// E4M3 in the OCP sense: bias 7, subnormals, no infinities, 0x7f and 0xff are NaN.
static inline float f32_from_e4m3(uint8_t code) {
  uint32_t sign = (uint32_t)(code & 0x80) << 24;
  uint32_t magnitude = code & 0x7f;
  if (magnitude == 0x7f) return f32_from_bits(sign | 0x7fc00000u);
  if (magnitude < 8) {
    float f = (float)magnitude * 0x1p-9f;
    return sign ? -f : f;
  }
  return f32_from_bits(sign | ((magnitude << 20) + (120u << 23)));
}

static inline float f32_from_half(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16;
  uint32_t magnitude = h & 0x7fff;
  if (magnitude >= 0x7c00) return f32_from_bits(sign | 0x7f800000u | (magnitude & 0x3ff) << 13);
  if (magnitude < 0x400) {
    float f = (float)magnitude * 0x1p-24f;
    return sign ? -f : f;
  }
  return f32_from_bits(sign | ((magnitude << 13) + (112u << 23)));
}

// Rounds to nearest even, saturates at +-65504; NaN stays NaN.
static inline uint16_t half_from_f32(float f) {
  uint32_t bits = bits_from_f32(f);
  uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00;
  if (magnitude >= 0x477fe000u) return sign | 0x7bff; // 65504 and above
  if (magnitude < 0x38800000u) {                      // below 2^-14: a multiple of 2^-24
    // Adding 0.5 puts the ulp at 2^-24, so the addition itself rounds to nearest even.
    float shifted = f32_from_bits(magnitude) + 0.5f;
    return sign | (uint16_t)(bits_from_f32(shifted) - 0x3f000000u);
  }
  uint32_t odd = magnitude >> 13 & 1;
  uint32_t rounded = magnitude - (112u << 23) + 0xfff + odd;
  return sign | (uint16_t)(rounded >> 13);
}

static inline float f32_from_any(const void *data, td_dtype dtype, size_t idx) {
  switch (dtype) {
  case TD_BF16: return f32_from_bf16(((const uint16_t *)data)[idx]);
  case TD_F8E4M3: return f32_from_e4m3(((const uint8_t *)data)[idx]);
  case TD_F16: return f32_from_half(((const uint16_t *)data)[idx]);
  default: return ((const float *)data)[idx];
  }
}

// The F32 scales of a row, one per scale_cols columns; NULL without scales.
static inline const float *row_scales(const td_weight *w, uint32_t row) {
  if (!w->scale) return NULL;
  const uint32_t band = w->scale_rows == 1 ? row : row / w->scale_rows; // avoids a division per row
  return (const float *)w->scale + band * td_weight_groups(w);
}

// Length of the run of columns that starts at k: up to the end of the scale group or the row, at
// most max. Linear kernels sum run by run, so this determines summation order.
static inline uint32_t run_length(const td_weight *w, uint32_t k, uint32_t max) {
  uint32_t left = w->cols - k;
  if (w->scale) {
    uint32_t in_block = w->scale_cols - k % w->scale_cols;
    if (in_block < left) left = in_block;
  }
  return left < max ? left : max;
}

// The call limited to n tokens from `begin` on.
static inline td_linear_args tokens_of(const td_linear_args *a, uint32_t begin, uint32_t n) {
  td_linear_args some = *a;
  if (a->x_rows) {
    some.x_rows += begin;
  } else {
    some.x += begin * a->ldx;
  }
  some.y += begin * a->ldy;
  some.n_tokens = n;
  return some;
}

// Calls fn for all tokens of a call, at most `most` at a time, in parts as even as possible.
static inline void in_parts(const td_linear_args *a, uint32_t most, td_linear_fn fn) {
  const uint32_t n_parts = (a->n_tokens + most - 1) / most;
  for (uint32_t i = 0; i < n_parts; i++) {
    const uint32_t begin = (uint32_t)((uint64_t)a->n_tokens * i / n_parts);
    const uint32_t end = (uint32_t)((uint64_t)a->n_tokens * (i + 1) / n_parts);
    const td_linear_args part = tokens_of(a, begin, end - begin);
    fn(&part);
  }
}

// The call limited to one token and rows [row, end).
static inline td_linear_args one_token(const td_linear_args *a, uint32_t token, uint32_t row,
                                       uint32_t end) {
  td_linear_args one = tokens_of(a, token, 1);
  one.row_begin = row;
  one.row_end = end;
  return one;
}
