// kernels/cpu/avx2int16/int4.h - INT4 in groups, activations rounded to 16 bits; see linear_q4.h.
#pragma once

#include "kernels/cpu/avx2/vec.h"

// Codes without zero points: code - 8.
enum { LESS = 8 };
#define UNIT                 1
#define Q16_RESULT(w, total) (total)
#ifndef Q16_EXACT
#define Q16_EXACT linear_i4__avx2
#endif

static inline void pairs_of(__m256i dwords, __m256i out[4]) {
  for (int i = 0; i < 4; i++)
    out[i] = _mm256_and_si256(_mm256_srli_epi32(dwords, 4 * i), _mm256_set1_epi32(0x000f000f));
}

#include "kernels/cpu/avx2int16/linear_q4.h"
