// kernels/cpu/avx512fp16/linear_i4.c - INT4 in groups, with zero points or without; see
// linear_q4.h.
#include <immintrin.h>

#define Q4_UPPER                                                                                   \
  _mm_setr_epi8((char)0xc8, (char)0xc7, (char)0xc6, (char)0xc5, (char)0xc4, (char)0xc2,            \
                (char)0xc0, (char)0xbc, 0, 0x3c, 0x40, 0x42, 0x44, 0x45, 0x46, 0x47)
#define Q4_ZEROS 1
#define Q4_EXACT linear_i4__avx512

#include "kernels/cpu/avx512fp16/linear_q4.h"

void linear_i4__avx512fp16(const td_linear_args *args) {
  linear_q4(args);
}
