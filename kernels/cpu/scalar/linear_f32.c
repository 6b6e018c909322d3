// kernels/cpu/scalar/linear_f32.c - see linear.h.
#include "kernels/cpu/scalar/linear.h"

void linear_f32__scalar(const td_linear_args *args) {
  linear_rows(args);
}
