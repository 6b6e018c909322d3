// kernels/cpu/avx512/linear_i4.c - INT4 in groups, with zero points or without; see linear_q4.h.
#include "kernels/cpu/avx512/nibbles.h"

#define Q4_TABLE int4_table
#define Q4_ZEROS 1

#include "kernels/cpu/linear/linear_q4.h"

#include "kernels/cpu/linear/gemm_q4.h"

void linear_i4__avx512(const td_linear_args *args) {
  if (q4_fits(args->w)) {
    linear_q4(args);
  } else {
    linear_i4__scalar(args);
  }
}
