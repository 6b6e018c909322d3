// kernels/cpu/avx512bf16/linear_f4e2m1.c - E2M1 in groups, activations rounded to BF16; see
// linear_q4.h.
#include "kernels/cpu/avx512bf16/nibbles.h"

#define Q4_TABLE          fp4_table
#define Q4_ZEROS          0
#define Q4_EXACT          linear_f4e2m1__avx512
#define Q4_STORED(X, arg) X(FOUR_E8M0, arg) X(EIGHT_E4M3, arg)

#include "kernels/cpu/avx512bf16/linear_q4.h"

void linear_f4e2m1__avx512bf16(const td_linear_args *args) {
  if (q4_fits(args->w)) {
    linear_q4(args);
  } else {
    linear_f4e2m1__avx512(args);
  }
}
