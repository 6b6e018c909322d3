// kernels/cpu/avx512/linear_i4_awq.c - INT4 as AutoAWQ stores it; see linear_kmajor.h.
#include "kernels/cpu/avx512/int4.h"

#define Q4_CODES(name) int4_##name

#include "kernels/cpu/linear/kmajor_awq.h"
#include "kernels/cpu/linear/linear_kmajor.h"

void linear_i4_awq__avx512(const td_linear_args *args) {
  linear_kmajor(args);
}
