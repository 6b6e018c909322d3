#include "kernels/cpu/avx2int16/int4.h"

void linear_i4__avxvnni(const td_linear_args *args) {
  linear_q16(args);
}
