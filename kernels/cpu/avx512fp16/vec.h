// kernels/cpu/avx512fp16/vec.h - vectors of 32 FP16 numbers, in addition to those of 16 FP32
// numbers.
#pragma once

#include "kernels/cpu/avx512/vec.h"

typedef __m512h vh;

enum {
  VHL = 32,         // lanes
  CHAIN_STEPS = 16, // maximum FP16 additions to one sum before it continues in FP32
};

static inline vh vh_zero(void) {
  return _mm512_setzero_ph();
}
static inline vh vh_load(const _Float16 *p) {
  return _mm512_loadu_ph(p);
}
static inline void vh_store(_Float16 *p, vh a) {
  _mm512_storeu_ph(p, a);
}
static inline vh vh_fma(vh a, vh b, vh c) {
  return _mm512_fmadd_ph(a, b, c);
}
static inline vh vh_add(vh a, vh b) {
  return _mm512_add_ph(a, b);
}
// Rounds to nearest even; lanes 0 to 15 come from lo.
static inline vh vh_from_vf(vf lo, vf hi) {
  __m256i l = _mm256_castph_si256(_mm512_cvtxps_ph(lo)),
          h = _mm256_castph_si256(_mm512_cvtxps_ph(hi));
  return _mm512_castsi512_ph(_mm512_inserti64x4(_mm512_castsi256_si512(l), h, 1));
}
// Stores the same, with one shuffle less.
static inline void vh_store_vf(_Float16 *p, vf lo, vf hi) {
  _mm256_storeu_ph(p, _mm512_cvtxps_ph(lo));
  _mm256_storeu_ph(p + 16, _mm512_cvtxps_ph(hi));
}
// The lower and upper lanes as FP32; going through memory saves a shuffle.
static inline void vh_widen(vh a, vf *lo, vf *hi) {
  _Alignas(64) _Float16 lanes[VHL];
  vh_store(lanes, a);
  __asm__("" : "+m"(lanes));
  *lo = _mm512_cvtxph_ps(_mm256_load_ph(lanes));
  *hi = _mm512_cvtxph_ps(_mm256_load_ph(lanes + VL));
}
// The sum of lower and upper lanes; an addition is cheaper than a conversion.
static inline vf vh_fold(vh a) {
  _Alignas(64) _Float16 lanes[VHL];
  vh_store(lanes, a);
  __asm__("" : "+m"(lanes));
  return _mm512_cvtxph_ps(_mm256_add_ph(_mm256_load_ph(lanes), _mm256_load_ph(lanes + VL)));
}
