// kernels/cpu/avx512/int4.h - the values of INT4 codes, for q4.h.
// A table gives code - 8; the permutation looks at the four lowest bits of each lane only.
#ifndef KERNELS_CPU_AVX512_INT4_H
#define KERNELS_CPU_AVX512_INT4_H

#include "kernels/cpu/avx512/vec.h"

static inline vi int4_ready(vi words) {
  return words;
}

static inline vf int4_low(vi words) {
  return vf_permute(_mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7), words);
}

static inline vf int4_high(vi words) {
  return int4_low(_mm512_srli_epi32(words, 4));
}

#endif
