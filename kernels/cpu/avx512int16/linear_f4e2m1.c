#define Q16_EXACT linear_f4e2m1__avx512
#include "kernels/cpu/avx2int16/fp4.h"

void linear_f4e2m1__avx512int16(const td_linear_args *args) {
  linear_q16(args);
}
