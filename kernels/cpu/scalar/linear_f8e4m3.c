// kernels/cpu/scalar/linear_f8e4m3.c - see linear.h.
#include "kernels/cpu/scalar/linear.h"

void linear_f8e4m3__scalar(const td_linear_args *args) {
  linear_rows(args);
}
