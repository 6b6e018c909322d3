// kernels/cpu/avx512bf16/vec.h - vectors of 32 BF16 numbers, whose products two by two are added to
// those of 16 FP32 numbers: what packed_f32.h is for FP32.
#ifndef KERNELS_CPU_AVX512BF16_VEC_H
#define KERNELS_CPU_AVX512BF16_VEC_H

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
// Lane i gains the products of lanes 2 i + 1 and 2 i, in that order, each rounded to FP32. What is
// subnormal counts as 0.
static inline vf pv_fma(pv a, pv b, vf c) {
  return _mm512_dpbf16_ps(c, a, b);
}
// Rounded to nearest even; lanes 0 to 15 from lo.
static inline vi pv_from_vf(vf lo, vf hi) {
  return (vi)_mm512_cvtne2ps_pbh(hi, lo);
}

static inline vi four_rows(const char *p, size_t apart) {
  vi v = _mm512_castsi128_si512(_mm_loadu_si128((const void *)p));
  v = _mm512_inserti32x4(v, _mm_loadu_si128((const void *)(p + 4 * apart)), 1);
  v = _mm512_inserti32x4(v, _mm_loadu_si128((const void *)(p + 8 * apart)), 2);
  return _mm512_inserti32x4(v, _mm_loadu_si128((const void *)(p + 12 * apart)), 3);
}

// 16 bytes of VL rows: vector i has dword i of each.
static inline void vi_turn(const char *p, size_t apart, vi out[4]) {
  vi a = four_rows(p, apart), b = four_rows(p + apart, apart);
  vi c = four_rows(p + 2 * apart, apart), d = four_rows(p + 3 * apart, apart);
  vi ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
  out[0] = _mm512_unpacklo_epi64(ab, cd);
  out[1] = _mm512_unpackhi_epi64(ab, cd);
  ab = _mm512_unpackhi_epi32(a, b), cd = _mm512_unpackhi_epi32(c, d);
  out[2] = _mm512_unpacklo_epi64(ab, cd);
  out[3] = _mm512_unpackhi_epi64(ab, cd);
}

#endif
