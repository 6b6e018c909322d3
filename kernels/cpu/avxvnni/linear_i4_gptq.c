#include "kernels/cpu/avx2int16/kmajor_gptq.h"

#define Q16_EXACT linear_i4_gptq__avx2
#include "kernels/cpu/avx2int16/linear_kmajor.h"

void linear_i4_gptq__avxvnni(const td_linear_args *args) {
  linear_kmajor16(args);
}
