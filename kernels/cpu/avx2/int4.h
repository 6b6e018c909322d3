// kernels/cpu/avx2/int4.h - the values of INT4 codes, for q4.h.
// code - 8 is the code with its highest bit flipped, as a signed number.
#ifndef KERNELS_CPU_AVX2_INT4_H
#define KERNELS_CPU_AVX2_INT4_H

#include "kernels/cpu/avx2/vec.h"

static inline vi int4_ready(vi words) {
  return _mm256_xor_si256(words, _mm256_set1_epi8((char)0x88));
}

static inline vf int4_signed(vi high) { // the code is in the four highest bits
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(high, 28));
}

static inline vf int4_low(vi words) {
  return int4_signed(_mm256_slli_epi32(words, 28));
}

static inline vf int4_high(vi words) {
  return int4_signed(_mm256_slli_epi32(words, 24));
}

#endif
