// kernels/cpu/avx2int16/fp4.h - MXFP4 and NVFP4, activations rounded to 16 bits; see linear_q4.h.
#pragma once

#include "kernels/cpu/avx2/vec.h"
#include "kernels/cpu/linear/w4a8.h"

// Codes are represented as twice their values plus this.
enum { LESS = A8_FP4_MIDDLE };
#define UNIT                 0.5f
#define Q16_RESULT(w, total) vf_mul(total, vf_set1((w)->global_scale))
#ifndef Q16_EXACT
#define Q16_EXACT linear_f4e2m1__avx2
#endif

static inline void pairs_of(__m256i dwords, __m256i out[4]) {
  const __m256i mask = _mm256_set1_epi8(15), even = _mm256_set1_epi16(0xff);
  for (int i = 0; i < 2; i++) {
    const __m256i codes = _mm256_and_si256(_mm256_srli_epi32(dwords, 4 * i), mask);
    const __m256i values = vi_from_e2m1(codes);
    out[i] = _mm256_and_si256(values, even);
    out[i + 2] = _mm256_srli_epi16(values, 8);
  }
}

#include "kernels/cpu/avx2int16/linear_q4.h"
