#include "kernels/cpu/avx2/w4a8.h"

void linear_q4_a8__avx2(const td_linear_args *args) {
  linear_a8(args);
}
