// kernels/cpu/avx512fp16/linear_i4_awq.c - INT4 as AutoAWQ stores it; see linear_kmajor.h.
#include <immintrin.h>

#define Q4_EXACT linear_i4_awq__avx512

#include "kernels/cpu/avx512fp16/kmajor_awq.h"
#include "kernels/cpu/avx512fp16/linear_kmajor.h"

void linear_i4_awq__avx512fp16(const td_linear_args *args) {
  linear_kmajor(args);
}
