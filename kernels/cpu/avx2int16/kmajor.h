// kernels/cpu/avx2int16/kmajor.h - a part of column-major INT4: rows whose sums fit registers.
#pragma once

#include "kernels/cpu/avx2/vec.h"
#include "kernels/cpu/avx2int16/round.h"

#define TD_UNROLL _Pragma("GCC unroll 32")

enum { PART_VECTORS = 8, PART = PART_VECTORS * VL };

// Pairs of codes, each in the lowest four bits of 16.
TD_INLINE vi codes_at(vi words, int shift) {
  return _mm256_and_si256(_mm256_srli_epi32(words, shift), _mm256_set1_epi32(0x000f000f));
}
