// kernels/cpu/linear/q4.h - words of 4-bit codes and their scales, as vectors.
// Include after an ISA's nibbles.h and
//   Q4_TABLE   int4_table or fp4_table: the values of codes, for INT4 with zero point 8
// nibbles.h has, each with that table as an argument:
//   nibbles_load     loads VL words at p; may read three bytes more
//   nibbles_load_n   loads the first n <= 4 VL bytes of them, followed by zeros; reads no more
//   nibbles_pair     values of codes 2 i and 2 i + 1 of every word
#pragma once

#include <stdbool.h>

#include "kernels/cpu/common/dequant.h"
#include "kernels/cpu/common/scales.h"
#include "kernels/cpu/common/vec_math.h"

#define TD_UNROLL _Pragma("GCC unroll 32")

// Loads a block of words of which n_bytes are readable.
TD_INLINE void load_words(const uint8_t *p, size_t n_bytes, vi v[4]) {
  if (n_bytes >= sizeof(vi) + 3) {
    nibbles_load(p, Q4_TABLE(), v);
  } else {
    nibbles_load_n(p, n_bytes < sizeof(vi) ? (uint32_t)n_bytes : (uint32_t)sizeof(vi), Q4_TABLE(),
                   v);
  }
}
