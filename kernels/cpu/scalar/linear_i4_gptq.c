// kernels/cpu/scalar/linear_i4_gptq.c - see linear.h.
#include "kernels/cpu/scalar/linear.h"

void linear_i4_gptq__scalar(const td_linear_args *args) {
  linear_rows(args);
}
