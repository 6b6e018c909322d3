// kernels/cpu/avx512bf16/nibbles.h - converts words of four 4-bit codes to BF16 by a table of
// sixteen values: INT4's (code - 8) or E2M1's; for q4.h. The table is stored twice, because the
// permutation uses the five lowest bits of each lane.
#pragma once

#include "kernels/cpu/avx512bf16/vec.h"

enum {
  Q4_GEMV_ROWS = 1,    // rows at a time with one token: one stream for the hardware prefetcher
  Q4_BATCH_ROWS = 2,   // rows that share the loads of two or three tokens
  Q4_BATCH_ROWS_8 = 1, // rows with up to Q4_TOKENS tokens; registers suffice for no more totals
  Q4_TOKENS = 8,
  Q4_AHEAD = 4096, // prefetch distance in bytes, for one token
};

static inline vi nibbles_table(const uint16_t values[16]) {
  return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)values));
}

static inline vi int4_table(void) {
  static const uint16_t values[16] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
                                      0xc000, 0xbf80, 0,      0x3f80, 0x4000, 0x4040,
                                      0x4080, 0x40a0, 0x40c0, 0x40e0};
  return nibbles_table(values);
}

static inline vi fp4_table(void) {
  static const uint16_t values[16] = {0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040,
                                      0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0,
                                      0xc000, 0xc040, 0xc080, 0xc0c0};
  return nibbles_table(values);
}

// Loads PL words at p; v[1] has the upper halves. Values are looked up by nibbles_pair.
static inline void nibbles_load(const uint8_t *p, vi table, vi v[4]) {
  (void)table;
  v[0] = vi_load(p);
  v[1] = _mm512_srli_epi16(v[0], 8);
}

// Loads the first n <= 2 PL bytes, followed by zeros; reads no more.
static inline void nibbles_load_n(const uint8_t *p, uint32_t n, vi table, vi v[4]) {
  (void)table;
  v[0] = n < 2 * PL ? vi_load_n(p, n) : vi_load(p);
  v[1] = _mm512_srli_epi16(v[0], 8);
}

// Values of codes 2 i and 2 i + 1 of every word.
static inline void nibbles_pair(const vi v[4], int i, vi table, pv *lo, pv *hi) {
  *lo = pv_of(_mm512_permutexvar_epi16(v[i], table));
  *hi = pv_of(_mm512_permutexvar_epi16(_mm512_srli_epi16(v[i], 4), table));
}

// Vector i has columns 4 j + i, i < 4: takes every second number twice.
static inline void q4_order(const float *x, packed *out, size_t step) {
  const vi even = _mm512_set_epi16(61, 57, 53, 49, 45, 41, 37, 33, 29, 25, 21, 17, 13, 9, 5, 1, 60,
                                   56, 52, 48, 44, 40, 36, 32, 28, 24, 20, 16, 12, 8, 4, 0);
  vi in[4], by4[4];
  for (int i = 0; i < 4; i++)
    in[i] = pv_from_vf(vf_load(x + i * PL), vf_load(x + i * PL + VL));
  const vi odd = _mm512_add_epi16(even, _mm512_set1_epi16(2));
  for (int i = 0; i < 2; i++) { // lower half: columns 4 j (4 j + 2); upper half: 4 j + 1 (4 j + 3)
    by4[2 * i] = _mm512_permutex2var_epi16(in[2 * i], even, in[2 * i + 1]);
    by4[2 * i + 1] = _mm512_permutex2var_epi16(in[2 * i], odd, in[2 * i + 1]);
  }
  for (int i = 0; i < 4; i++, out += step) {
    vi v = i % 2 == 0 ? _mm512_shuffle_i64x2(by4[i / 2], by4[i / 2 + 2], 0x44)
                      : _mm512_shuffle_i64x2(by4[i / 2], by4[i / 2 + 2], 0xee);
    pv_store(out, pv_of(v));
  }
}

// There are no zero points in this variant.
static inline void q4_less(pv *lo, pv *hi, vf zero) {
  (void)lo, (void)hi, (void)zero;
}
