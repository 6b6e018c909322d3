// kernels/cpu/linear/w4a8.h - x in 8 bits and its scales, shared by all versions of linear_w4a8;
// blocks of columns also for avx2int16.
#pragma once

#include "kernels/cpu/common/dequant.h"

enum { A8_LEAST_BLOCK = 16, A8_MOST_BLOCK = 128, A8_MOST_COLS = 256 << 10 };
// FP4 codes are represented as twice their value plus 12.
enum { A8_FP4_MIDDLE = 12 };

// Columns of x per scale: the largest power of two that divides the weights' groups. 0: there is
// none.
static inline uint32_t x_block_cols(const td_weight *w) {
  uint32_t group = w->scale_cols >= w->cols ? A8_MOST_BLOCK : w->scale_cols;
  for (uint32_t n = A8_MOST_BLOCK; n >= A8_LEAST_BLOCK; n /= 2) {
    if (group % n == 0) return n;
  }
  return 0;
}

// The same; 0 if linear_w4a8 does not support the matrix.
static inline uint32_t a8_block(const td_weight *w) {
  return w->cols <= A8_MOST_COLS ? x_block_cols(w) : 0;
}

typedef struct {
  float scale, times; // scale of quantized values; factor for x before rounding
} a8_scale;

// From the bits of the largest magnitude. Non-finite values give NaN results.
static inline a8_scale a8_scale_of(uint32_t largest) {
  float most = f32_from_bits(largest);
  if (most < 0x1p-100f) return (a8_scale){0, 0}; // 127 / most could be infinite
  if (largest >= 0x7f800000u) return (a8_scale){f32_from_bits(0x7fc00000u), 0};
  return (a8_scale){most / 127, 127 / most};
}

static inline float a8_result(const td_weight *w, float total) {
  return w->dtype == TD_F4E2M1 ? 0.5f * total * w->global_scale : total;
}
