// kernels/cpu/linear/q4.h - words of 4-bit codes and their scales, as vectors. To be included after
// Q4_CODES(name), which makes int4_name or fp4_name of what int4.h and fp4.h of an ISA define:
//   load     the words at p, VL of them, made ready; may read three bytes more
//   load_n   the first n <= 4 VL bytes of them, zeros behind; reads no more
//   pair     codes 2 i and 2 i + 1 of every word, as their values: those that INT4 has with zero
//            point 8
#ifndef KERNELS_CPU_Q4_H
#define KERNELS_CPU_Q4_H

#include <stdbool.h>

#include "kernels/cpu/common/dequant.h"
#include "kernels/cpu/common/scales.h"
#include "kernels/cpu/common/vec_math.h"

#define TD_UNROLL _Pragma("GCC unroll 32")

// A block of words of which n_bytes may be read.
TD_INLINE void load_words(const uint8_t *p, size_t n_bytes, vi v[4]) {
  if (n_bytes >= sizeof(vi) + 3) {
    Q4_CODES(load)(p, v);
  } else {
    Q4_CODES(load_n)(p, n_bytes < sizeof(vi) ? (uint32_t)n_bytes : (uint32_t)sizeof(vi), v);
  }
}

#endif
