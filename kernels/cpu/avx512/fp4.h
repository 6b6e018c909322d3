// kernels/cpu/avx512/fp4.h - the values of E2M1 codes, for q4.h.
// A table gives the value; the permutation looks at the four lowest bits of each lane only.
#ifndef KERNELS_CPU_AVX512_FP4_H
#define KERNELS_CPU_AVX512_FP4_H

#include "kernels/cpu/avx512/vec.h"

static inline vi fp4_ready(vi words) {
  return words;
}

static inline vf fp4_low(vi words) {
  return vf_permute(
      _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6), words);
}

static inline vf fp4_high(vi words) {
  return fp4_low(_mm512_srli_epi32(words, 4));
}

#endif
