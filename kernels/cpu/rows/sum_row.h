// kernels/cpu/rows/sum_row.h - sums of parts in BF16. Plain loops, which the compiler turns into
// vectors of the ISA whose rows.c includes them.
#pragma once

#include "kernels/cpu/common/numeric.h"

enum { SUM_BLOCK = 512 }; // sums that stay in L1 while parts are added

// Rounds to BF16, nearest even; NaN stays NaN. The result is an f32.
static inline float round_to_bf16(float f) {
  const uint32_t bits = bits_from_f32(f), odd = bits >> 16 & 1;
  const uint32_t rounded = bits + 0x7fff + odd, nan = bits | 0x400000;
  const uint32_t result = (bits & 0x7fffffff) > 0x7f800000 ? nan : rounded;
  return f32_from_bits(result & 0xffff0000);
}

static inline void add_bf16(float *restrict sum, const uint16_t *restrict part, size_t n) {
  for (size_t i = 0; i < n; i++)
    sum[i] += f32_from_bf16(part[i]);
}

static inline void add_rounded(float *restrict sum, const float *restrict part, size_t n) {
  for (size_t i = 0; i < n; i++)
    sum[i] += round_to_bf16(part[i]);
}

// The first part: not added to zeros, so that -0 stays -0.
static inline void set_sum(float *restrict sum, const void *part, bool is_f32, size_t begin,
                           size_t n) {
  const float *restrict f32 = (const float *)part + begin;
  const uint16_t *restrict bf16 = (const uint16_t *)part + begin;
  if (is_f32) {
    for (size_t i = 0; i < n; i++)
      sum[i] = round_to_bf16(f32[i]);
  } else {
    for (size_t i = 0; i < n; i++)
      sum[i] = f32_from_bf16(bf16[i]);
  }
}

static inline void store_bf16(uint16_t *restrict out, const float *restrict sum, size_t n) {
  for (size_t i = 0; i < n; i++)
    out[i] = (uint16_t)(bits_from_f32(round_to_bf16(sum[i])) >> 16);
}

static inline void sum_row(const td_sum_row_args *a) {
  float block[SUM_BLOCK];
  for (size_t begin = 0; begin < a->n; begin += SUM_BLOCK) {
    const size_t n = a->n - begin < SUM_BLOCK ? a->n - begin : SUM_BLOCK;
    float *sum = a->out_f32 ? (float *)a->out + begin : block;
    set_sum(sum, a->parts[0], a->f32_parts & 1, begin, n);
    for (uint32_t p = 1; p < a->n_parts; p++) {
      if (a->f32_parts >> p & 1) {
        add_rounded(sum, (const float *)a->parts[p] + begin, n);
      } else {
        add_bf16(sum, (const uint16_t *)a->parts[p] + begin, n);
      }
    }
    if (!a->out_f32) store_bf16((uint16_t *)a->out + begin, sum, n);
  }
}
