// kernels/cpu/avx512fp16/linear_i4_gptq.c - INT4 as AutoGPTQ stores it; see linear_kmajor.h.
#include <immintrin.h>

#define Q4_EXACT linear_i4_gptq__avx512

#include "kernels/cpu/avx512fp16/kmajor_gptq.h"
#include "kernels/cpu/avx512fp16/linear_kmajor.h"

void linear_i4_gptq__avx512fp16(const td_linear_args *args) {
  linear_kmajor(args);
}
