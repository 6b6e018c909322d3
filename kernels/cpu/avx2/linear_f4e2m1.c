// kernels/cpu/avx2/linear_f4e2m1.c - MXFP4 and NVFP4; see linear_q4.h.
// A table gives the magnitude; the permutation looks at the three lowest bits of each lane only.
#include "kernels/cpu/avx2/vec.h"

#define Q4_TOKENS 4
#define Q4_ZEROS  0

static inline vi q4_ready(vi words) {
  return words;
}

// The code's magnitude is in the lowest bits of index, its sign the highest bit of sign.
static inline vf q4_value(vi index, vi sign) {
  vf magnitude = vf_permute(_mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6), index);
  return _mm256_xor_ps(magnitude, _mm256_and_ps(_mm256_castsi256_ps(sign), vf_set1(-0.0f)));
}

static inline vf q4_low(vi words) {
  return q4_value(words, _mm256_slli_epi32(words, 28));
}

static inline vf q4_high(vi words) {
  return q4_value(_mm256_srli_epi32(words, 4), _mm256_slli_epi32(words, 24));
}

#include "kernels/cpu/linear_q4.h"

void linear_f4e2m1__avx2(const td_linear_args *args) {
  if (q4_fits(args->w)) {
    linear_q4(args);
  } else {
    linear_f4e2m1__scalar(args);
  }
}
