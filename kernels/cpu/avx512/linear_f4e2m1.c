// kernels/cpu/avx512/linear_f4e2m1.c - MXFP4 and NVFP4; see linear_q4.h.
#include "kernels/cpu/avx512/nibbles.h"

#define Q4_TABLE fp4_table
#define Q4_ZEROS 0

#include "kernels/cpu/linear/linear_q4.h"

#include "kernels/cpu/linear/gemm_q4.h"

void linear_f4e2m1__avx512(const td_linear_args *args) {
  if (q4_fits(args->w)) {
    linear_q4(args);
  } else {
    linear_f4e2m1__scalar(args);
  }
}
