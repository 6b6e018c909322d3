// kernels/cpu/scalar/linear_f4e2m1.c - see linear.h.
#include "kernels/cpu/scalar/linear.h"

void linear_f4e2m1__scalar(const td_linear_args *args) {
  linear_rows(args);
}
