// kernels/cpu/common/transpose.h - transposes 16 bytes of up to VL rows to vectors of dwords.
// Include after a vec.h that has vi_transpose.
#pragma once

#include "kernels/cpu/common/vec_math.h"

// Not inlined, because it is rare.
__attribute__((noinline)) static void turn_copy(const char *p, size_t apart, uint32_t n_rows,
                                                size_t n_bytes, vi out[4]) {
  char copy[VL][16] = {{0}};
  for (uint32_t r = 0; r < n_rows; r++)
    memcpy(copy[r], p + r * apart, n_bytes < 16 ? n_bytes : 16);
  vi_transpose(copy[0], 16, out);
}

// Transposes 16 bytes of n_rows rows, of which n_bytes are readable in each; missing ones are zero.
// Vector i has dword i of each row.
TD_INLINE void transpose_rows(const char *p, size_t apart, uint32_t n_rows, size_t n_bytes,
                              vi out[4]) {
  if (n_rows == VL && n_bytes >= 16) {
    vi_transpose(p, apart, out);
  } else {
    turn_copy(p, apart, n_rows, n_bytes, out);
  }
}
