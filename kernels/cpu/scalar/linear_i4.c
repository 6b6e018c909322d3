// kernels/cpu/scalar/linear_i4.c - see linear.h.
#include "kernels/cpu/scalar/linear.h"

void linear_i4__scalar(const td_linear_args *args) {
  linear_rows(args);
}
