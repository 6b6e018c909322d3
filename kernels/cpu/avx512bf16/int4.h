// kernels/cpu/avx512bf16/int4.h - the values of INT4 codes, for q4.h: code - 8.
#ifndef KERNELS_CPU_AVX512BF16_INT4_H
#define KERNELS_CPU_AVX512BF16_INT4_H

#include "kernels/cpu/avx512bf16/nibbles.h"

static inline vi int4_table(void) {
  static const uint16_t values[16] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
                                      0xc000, 0xbf80, 0,      0x3f80, 0x4000, 0x4040,
                                      0x4080, 0x40a0, 0x40c0, 0x40e0};
  return nibbles_table(values);
}

static inline void int4_load(const uint8_t *p, vi v[4]) {
  nibbles_load(p, v);
}

static inline void int4_load_n(const uint8_t *p, uint32_t n, vi v[4]) {
  nibbles_load_n(p, n, v);
}

static inline void int4_pair(const vi v[4], int i, pv *lo, pv *hi) {
  nibbles_pair(v, i, int4_table(), lo, hi);
}

#endif
