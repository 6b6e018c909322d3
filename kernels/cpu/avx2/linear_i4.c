// kernels/cpu/avx2/linear_i4.c - INT4 in groups, with zero points or without; see linear_q4.h.
#include "kernels/cpu/avx2/nibbles.h"

#define Q4_TABLE int4_table
#define Q4_ZEROS 1

#include "kernels/cpu/linear/linear_q4.h"

#include "kernels/cpu/linear/gemm_q4.h"

enum { DWORD_COLS = 8 };

static inline void columns_of(vi words, vf out[8]) {
  for (int i = 0; i < 8; i++)
    out[i] = int4_low(_mm256_srli_epi32(words, 4 * i));
}

#include "kernels/cpu/avx2/gemm_prompt.h"

void linear_i4__avx2(const td_linear_args *args) {
  if (q4_fits(args->w) && args->prompt) {
    linear_prompt(args);
  } else if (q4_fits(args->w)) {
    linear_q4(args);
  } else {
    linear_i4__scalar(args);
  }
}
