#include "kernels/cpu/avx2int16/kmajor_awq.h"

#define Q16_EXACT linear_i4_awq__avx2
#include "kernels/cpu/avx2int16/linear_kmajor.h"

void linear_i4_awq__avx2int16(const td_linear_args *args) {
  linear_kmajor16(args);
}
