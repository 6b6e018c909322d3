// kernels/cpu/avx512bf16/fp4.h - the values of E2M1 codes, for q4.h.
#ifndef KERNELS_CPU_AVX512BF16_FP4_H
#define KERNELS_CPU_AVX512BF16_FP4_H

#include "kernels/cpu/avx512bf16/nibbles.h"

static inline vi fp4_table(void) {
  static const uint16_t values[16] = {0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
                                      0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0,
                                      0xc000, 0xc040, 0xc080, 0xc0c0};
  return nibbles_table(values);
}

static inline void fp4_load(const uint8_t *p, vi v[4]) {
  nibbles_load(p, v);
}

static inline void fp4_load_n(const uint8_t *p, uint32_t n, vi v[4]) {
  nibbles_load_n(p, n, v);
}

static inline void fp4_pair(const vi v[4], int i, pv *lo, pv *hi) {
  nibbles_pair(v, i, fp4_table(), lo, hi);
}

#endif
