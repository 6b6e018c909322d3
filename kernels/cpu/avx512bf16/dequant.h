// kernels/cpu/avx512bf16/dequant.h - what linear_rows.h and gemm_prompt.h ask of weights that may
// be near 0, where they are codes: none but 0 is less than 2^-9.
#ifndef KERNELS_CPU_AVX512BF16_CODES_H
#define KERNELS_CPU_AVX512BF16_CODES_H

#include "kernels/cpu/avx512bf16/vec.h"
#include "kernels/cpu/common/finite_range.h"

#define LEAST X_LEAST

static inline vi look(vi seen, vi line) {
  (void)line;
  return seen;
}

static inline __mmask32 tiny_of(vi seen) {
  (void)seen;
  return 0;
}

#endif
