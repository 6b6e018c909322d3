// kernels/cpu/avx512bf16/turn_lines.h - a transposition of 16 cache lines.
#pragma once

#include "kernels/cpu/avx512/vec.h"

#define TD_UNROLL _Pragma("GCC unroll 32")

// Transposes a cache line of VL rows: vector i has dword i of each row. It is done at once, because
// rows are often a multiple of 2 KB apart and share a few L1 sets, so the lines would be evicted
// between four partial reads.
TD_INLINE void turn_lines(const char *p, size_t apart, vi out[VL]) {
  vi a[VL], b[VL];
  TD_UNROLL for (uint32_t r = 0; r < VL; r++) a[r] = vi_load(p + r * apart);
  TD_UNROLL for (int r = 0; r < VL; r += 2) {
    b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]);
    b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
  }
  // a[r + i]: dword i of each quarter, of the four rows from r on
  TD_UNROLL for (int r = 0; r < VL; r += 4) {
    a[r] = _mm512_unpacklo_epi64(b[r], b[r + 2]);
    a[r + 1] = _mm512_unpackhi_epi64(b[r], b[r + 2]);
    a[r + 2] = _mm512_unpacklo_epi64(b[r + 1], b[r + 3]);
    a[r + 3] = _mm512_unpackhi_epi64(b[r + 1], b[r + 3]);
  }
  TD_UNROLL for (int i = 0; i < 4; i++) {
    const vi low02 = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88);
    const vi low13 = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd);
    const vi high02 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
    const vi high13 = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
    out[i] = _mm512_shuffle_i32x4(low02, high02, 0x88);
    out[4 + i] = _mm512_shuffle_i32x4(low13, high13, 0x88);
    out[8 + i] = _mm512_shuffle_i32x4(low02, high02, 0xdd);
    out[12 + i] = _mm512_shuffle_i32x4(low13, high13, 0xdd);
  }
}
