// kernels/cpu/avx512/linear_i4_gptq.c - INT4 as AutoGPTQ stores it; see linear_kmajor.h.
#include "kernels/cpu/avx512/int4.h"

#define Q4_CODES(name) int4_##name

#include "kernels/cpu/linear/kmajor_gptq.h"
#include "kernels/cpu/linear/linear_kmajor.h"

void linear_i4_gptq__avx512(const td_linear_args *args) {
  if (args->w->scale_cols % 8 == 0 || args->w->scale_cols >= args->w->cols) {
    linear_kmajor(args);
  } else {
    linear_i4_gptq__scalar(args); // groups that begin within a word
  }
}
