// kernels/cpu/avx512amx/nibbles.h - what linear_tiles.h needs of rows of 4-bit codes. Include after
//   Q4_TABLE   int4_table or fp4_table
//   Q4_EXACT   the kernel in FP32
#pragma once

#include "kernels/cpu/avx512bf16/dequant.h"
#include "kernels/cpu/avx512bf16/nibbles.h"
#include "kernels/cpu/common/dequant.h"
#include "kernels/cpu/common/scales.h"
#include "kernels/decl.h"

enum { LINE_BYTES = 16, LINE_COLS = 32, HAS_SCALES = 1 };

// The permutation uses the five lowest bits of a lane, and the table's halves are alike.
TD_INLINE void decode_line(const uint8_t *p, pv out[1], vi *seen) {
  const vi bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
  const vi codes = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12));
  (void)seen;
  out[0] = pv_of(_mm512_permutexvar_epi16(codes, Q4_TABLE()));
}

static inline void put_x(const vf v[2], packed *out, size_t step) {
  (void)step;
  pv_store(out, pv_of(pv_from_vf(v[0], v[1])));
}

static inline void scales_of(const td_weight *w, uint32_t row, uint32_t first, uint32_t n,
                             float *out) {
  const size_t at = row * td_weight_groups(w) + first;
  scales_to_f32((const char *)w->scale + at * td_dtype_bytes(w->scale_dtype), w->scale_dtype,
                w->rows * td_weight_groups(w) - at, n, out);
}

static inline float whole_scale(const td_weight *w) {
  return w->dtype == TD_F4E2M1 ? w->global_scale : 1;
}

static inline void linear_exact(const td_linear_args *args) {
  Q4_EXACT(args);
}
