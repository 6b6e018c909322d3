// kernels/cpu/avx512/linear_f4e2m1.c - MXFP4 and NVFP4; see linear_q4.h.
// A table gives the value; the permutation looks at the four lowest bits of each lane only.
#include "kernels/cpu/avx512/vec.h"

#define Q4_TOKENS 8
#define Q4_ZEROS  0

static inline vi q4_ready(vi words) {
  return words;
}

static inline vf q4_low(vi words) {
  return vf_permute(
      _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6), words);
}

static inline vf q4_high(vi words) {
  return q4_low(_mm512_srli_epi32(words, 4));
}

#include "kernels/cpu/linear_q4.h"

void linear_f4e2m1__avx512(const td_linear_args *args) {
  if (q4_fits(args->w)) {
    linear_q4(args);
  } else {
    linear_f4e2m1__scalar(args);
  }
}
