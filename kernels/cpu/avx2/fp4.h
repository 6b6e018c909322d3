// kernels/cpu/avx2/fp4.h - the values of E2M1 codes, for q4.h.
#ifndef KERNELS_CPU_AVX2_FP4_H
#define KERNELS_CPU_AVX2_FP4_H

#include "kernels/cpu/avx2/nibbles.h"

static inline nibbles_table fp4_table(void) {
  static const uint8_t high[16] = {0,    0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40,
                                   0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0};
  static const uint8_t low[16] = {0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0,
                                  0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0};
  return (nibbles_table){.high = nibbles_twice(high), .low = nibbles_twice(low)};
}

// The value of the lowest four bits: a table gives the magnitude; the permutation uses three bits
// only.
static inline vf fp4_low(vi words) {
  vf magnitude = vf_permute(_mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6), words);
  vf sign = _mm256_castsi256_ps(_mm256_slli_epi32(words, 28));
  return _mm256_xor_ps(magnitude, _mm256_and_ps(sign, vf_set1(-0.0f)));
}

static inline void fp4_load(const uint8_t *p, vi v[4]) {
  nibbles_split(vi_load(p), fp4_table(), v);
}

static inline void fp4_load_n(const uint8_t *p, uint32_t n, vi v[4]) {
  nibbles_split(n < 4 * VL ? vi_load_n(p, n) : vi_load(p), fp4_table(), v);
}

static inline void fp4_pair(const vi v[4], int i, vf *lo, vf *hi) {
  nibbles_pair(v, i, lo, hi);
}

#endif
