// kernels/cpu/avx512bf16/linear_i4.c - INT4 in groups without zero points, activations rounded to
// BF16; see linear_q4.h.
#include "kernels/cpu/avx512bf16/int4.h"

#define Q4_CODES(name) int4_##name
#define Q4_ZEROS       0
#define Q4_EXACT       linear_i4__avx512

static inline vi q4_table(void) {
  return int4_table();
}

#include "kernels/cpu/avx512bf16/linear_q4.h"

void linear_i4__avx512bf16(const td_linear_args *args) {
  if (q4_fits(args->w) && !args->w->zero) {
    linear_q4(args);
  } else {
    linear_i4__avx512(args);
  }
}
