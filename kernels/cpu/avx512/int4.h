// kernels/cpu/avx512/int4.h - the values of INT4 codes, for q4.h: code - 8.
#ifndef KERNELS_CPU_AVX512_INT4_H
#define KERNELS_CPU_AVX512_INT4_H

#include "kernels/cpu/avx512/nibbles.h"

static inline vf int4_table(void) {
  return _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
}

static inline vf int4_low(vi words) {
  return vf_permute(int4_table(), words);
}

static inline void int4_load(const uint8_t *p, vi v[4]) {
  nibbles_load(p, v);
}

static inline void int4_load_n(const uint8_t *p, uint32_t n, vi v[4]) {
  nibbles_load_n(p, n, v);
}

static inline void int4_pair(const vi v[4], int i, vf *lo, vf *hi) {
  nibbles_pair(v, i, int4_table(), lo, hi);
}

#endif
