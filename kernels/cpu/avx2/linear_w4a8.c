#include "kernels/cpu/avx2/w4a8.h"

void linear_w4a8__avx2(const td_linear_args *args) {
  linear_w4a8_rows(args);
}
