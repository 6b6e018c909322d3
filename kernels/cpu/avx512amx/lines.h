// kernels/cpu/avx512amx/lines.h - what linear_tiles.h needs of formats that
// avx512bf16/linear_rows.h takes. Include after one.
#pragma once

#include "kernels/cpu/common/vec_math.h"
#include "kernels/decl.h"

#define TD_UNROLL _Pragma("GCC unroll 32")

enum { LINE_BYTES = 64, LINE_COLS = LINE_BYTES / sizeof(elem) };

TD_INLINE void decode_line(const uint8_t *p, pv out[LINE_COLS / PL], vi *seen) {
  const vi line = load_line((const elem *)(const void *)p);
  *seen = look(*seen, line);
  TD_UNROLL for (int j = 0; j < LINE_COLS / PL; j++) out[j] = vector_of(line, j);
}

static inline void scales_of(const td_weight *w, uint32_t row, uint32_t first, uint32_t n,
                             float *out) {
  memcpy(out, row_scales(w, row) + first, n * sizeof *out);
}

static inline float whole_scale(const td_weight *w) {
  (void)w;
  return 1;
}
