// kernels/cpu/avx512fp16/linear_f4e2m1.c - MXFP4 and NVFP4; see linear_q4.h.
#include <immintrin.h>

#define Q4_UPPER                                                                                   \
  _mm_setr_epi8(0, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46, (char)0x80, (char)0xb8, (char)0xbc,   \
                (char)0xbe, (char)0xc0, (char)0xc2, (char)0xc4, (char)0xc6)
#define Q4_ZEROS 0
#define Q4_EXACT linear_f4e2m1__avx512

#include "kernels/cpu/avx512fp16/linear_q4.h"

void linear_f4e2m1__avx512fp16(const td_linear_args *args) {
  linear_q4(args);
}
