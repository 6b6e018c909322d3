// kernels/cpu/avx512bf16/linear_i4.c - INT4 in groups, activations rounded to BF16; see
// linear_q4.h. Weights with zero points have no table of values; for them activations are rounded
// to 16 bits.
#include "kernels/cpu/avx512bf16/nibbles.h"

#define Q4_TABLE          int4_table
#define Q4_ZEROS          0
#define Q4_EXACT          linear_i4__avx512
#define Q4_STORED(X, arg) X(ONE_BF16, arg) X(SOME_BF16, arg) X(SOME_F16, arg)

#include "kernels/cpu/avx512bf16/linear_q4.h"

void linear_i4__avx512bf16(const td_linear_args *args) {
  if (args->w->zero) {
    linear_i4__avx512int16(args);
  } else if (q4_fits(args->w)) {
    linear_q4(args);
  } else {
    linear_i4__avx512(args);
  }
}
