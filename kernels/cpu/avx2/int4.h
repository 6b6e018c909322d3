// kernels/cpu/avx2/int4.h - the values of INT4 codes, for q4.h: code - 8.
#ifndef KERNELS_CPU_AVX2_INT4_H
#define KERNELS_CPU_AVX2_INT4_H

#include "kernels/cpu/avx2/nibbles.h"

static inline nibbles_table int4_table(void) {
  static const uint8_t high[16] = {0xc1, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0xbf,
                                   0,    0x3f, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40};
  static const uint8_t low[16] = {0, 0xe0, 0xc0, 0xa0, 0x80, 0x40, 0,    0x80,
                                  0, 0x80, 0,    0x40, 0x80, 0xa0, 0xc0, 0xe0};
  return (nibbles_table){.high = nibbles_twice(high), .low = nibbles_twice(low)};
}

// The value of the lowest four bits: the code with its highest bit flipped, as a signed number.
static inline vf int4_low(vi words) {
  vi flipped = _mm256_xor_si256(words, _mm256_set1_epi32(8));
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(flipped, 28), 28));
}

static inline void int4_load(const uint8_t *p, vi v[4]) {
  nibbles_split(vi_load(p), int4_table(), v);
}

static inline void int4_load_n(const uint8_t *p, uint32_t n, vi v[4]) {
  nibbles_split(n < 4 * VL ? vi_load_n(p, n) : vi_load(p), int4_table(), v);
}

static inline void int4_pair(const vi v[4], int i, vf *lo, vf *hi) {
  nibbles_pair(v, i, lo, hi);
}

#endif
