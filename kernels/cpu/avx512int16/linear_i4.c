#define Q16_EXACT linear_i4__avx512
#include "kernels/cpu/avx2int16/int4.h"

void linear_i4__avx512int16(const td_linear_args *args) {
  linear_q16(args);
}
