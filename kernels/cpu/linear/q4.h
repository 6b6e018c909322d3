// kernels/cpu/linear/q4.h - words of 4-bit codes and their scales, as vectors.
// Include after defining Q4_CODES(name), which maps to int4_name or fp4_name, defined by an ISA's
// int4.h and fp4.h:
//   load     loads VL words at p; may read three bytes more
//   load_n   loads the first n <= 4 VL bytes of them, followed by zeros; reads no more
//   pair     values of codes 2 i and 2 i + 1 of every word; for INT4 with zero point 8
#ifndef KERNELS_CPU_Q4_H
#define KERNELS_CPU_Q4_H

#include <stdbool.h>

#include "kernels/cpu/common/dequant.h"
#include "kernels/cpu/common/scales.h"
#include "kernels/cpu/common/vec_math.h"

#define TD_UNROLL _Pragma("GCC unroll 32")

// Loads a block of words of which n_bytes are readable.
TD_INLINE void load_words(const uint8_t *p, size_t n_bytes, vi v[4]) {
  if (n_bytes >= sizeof(vi) + 3) {
    Q4_CODES(load)(p, v);
  } else {
    Q4_CODES(load_n)(p, n_bytes < sizeof(vi) ? (uint32_t)n_bytes : (uint32_t)sizeof(vi), v);
  }
}

#endif
