// kernels/cpu/avx512/fp4.h - the values of E2M1 codes, for q4.h.
#ifndef KERNELS_CPU_AVX512_FP4_H
#define KERNELS_CPU_AVX512_FP4_H

#include "kernels/cpu/avx512/nibbles.h"

static inline vf fp4_table(void) {
  return _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
}

static inline vf fp4_low(vi words) {
  return vf_permute(fp4_table(), words);
}

static inline void fp4_load(const uint8_t *p, vi v[4]) {
  nibbles_load(p, v);
}

static inline void fp4_load_n(const uint8_t *p, uint32_t n, vi v[4]) {
  nibbles_load_n(p, n, v);
}

static inline void fp4_pair(const vi v[4], int i, vf *lo, vf *hi) {
  nibbles_pair(v, i, fp4_table(), lo, hi);
}

#endif
