// kernels/cpu/avx512bf16/vec.h - vectors of 32 BF16 numbers, whose pairwise products are added to
// 16 FP32 sums; the BF16 counterpart of packed_f32.h.
#pragma once

#include "kernels/cpu/avx512/vec.h"

typedef uint16_t packed;
typedef __m512bh pv;
enum { PL = 2 * VL };

static inline pv pv_of(vi bits) {
  return (pv)bits;
}
static inline pv pv_load(const packed *p) {
  return pv_of(_mm512_loadu_si512(p));
}
static inline void pv_store(packed *p, pv v) {
  _mm512_storeu_si512(p, (vi)v);
}
// Lane i += products of lanes 2 i + 1 and 2 i, in that order, each rounded to FP32. Subnormal
// numbers count as 0.
static inline vf pv_fma(pv a, pv b, vf c) {
  return _mm512_dpbf16_ps(c, a, b);
}
// Rounds to nearest even; lanes 0 to 15 come from lo.
static inline vi pv_from_vf(vf lo, vf hi) {
  return (vi)_mm512_cvtne2ps_pbh(hi, lo);
}
