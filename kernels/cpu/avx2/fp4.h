// kernels/cpu/avx2/fp4.h - the values of E2M1 codes, for q4.h.
// A table gives the magnitude; the permutation looks at the three lowest bits of each lane only.
#ifndef KERNELS_CPU_AVX2_FP4_H
#define KERNELS_CPU_AVX2_FP4_H

#include "kernels/cpu/avx2/vec.h"

static inline vi fp4_ready(vi words) {
  return words;
}

// The code's magnitude is in the lowest bits of index, its sign the highest bit of sign.
static inline vf fp4_value(vi index, vi sign) {
  vf magnitude = vf_permute(_mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6), index);
  return _mm256_xor_ps(magnitude, _mm256_and_ps(_mm256_castsi256_ps(sign), vf_set1(-0.0f)));
}

static inline vf fp4_low(vi words) {
  return fp4_value(words, _mm256_slli_epi32(words, 28));
}

static inline vf fp4_high(vi words) {
  return fp4_value(_mm256_srli_epi32(words, 4), _mm256_slli_epi32(words, 24));
}

#endif
