// kernels/cpu/avx512/nibbles.h - converts words of eight 4-bit codes to floats by a table of
// sixteen values: INT4's (code - 8) or E2M1's; for q4.h.
// The permutation uses only the four lowest bits of each lane. So loads from the words' second,
// third and fourth byte replace shifts by 8, 16 and 24 bits, and a block of eight vectors costs
// four shifts and eight permutations, fewer than the free slots beside its multiplications.
#pragma once

#include "kernels/cpu/avx512/vec.h"
#include "kernels/cpu/common/packed_f32.h"

enum {
  Q4_GEMV_ROWS = 4,    // rows that share the loads of one token
  Q4_BATCH_ROWS = 2,   // rows that share the loads of two or three tokens
  Q4_BATCH_ROWS_8 = 2, // rows with up to Q4_TOKENS tokens
  Q4_TOKENS = 8,
  Q4_AHEAD = 1024, // prefetch distance in bytes, for one token
};

static inline vf int4_table(void) {
  return _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
}

static inline vf fp4_table(void) {
  return _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
}

static inline vf int4_low(vi words) {
  return vf_permute(int4_table(), words);
}

static inline vf fp4_low(vi words) {
  return vf_permute(fp4_table(), words);
}

// Loads VL words at p; reads three bytes more. Values are looked up by nibbles_pair.
static inline void nibbles_load(const uint8_t *p, vf table, vi v[4]) {
  (void)table;
  for (int i = 0; i < 4; i++)
    v[i] = vi_load(p + i);
}

// Loads the first n <= 4 VL bytes, followed by zeros; reads no more.
static inline void nibbles_load_n(const uint8_t *p, uint32_t n, vf table, vi v[4]) {
  (void)table;
  v[0] = n < 4 * VL ? vi_load_n(p, n) : vi_load(p);
  for (int i = 1; i < 4; i++)
    v[i] = vi_srl8(v[i - 1]);
}

// Values of codes 2 i and 2 i + 1 of every word.
static inline void nibbles_pair(const vi v[4], int i, vf table, vf *lo, vf *hi) {
  *lo = vf_permute(table, v[i]);
  *hi = vf_permute(table, _mm512_srli_epi32(v[i], 4));
}

static inline void q4_order(const float *x, packed *out, size_t step) {
  vf_order8(x, out, step);
}

// Subtracts zero points.
static inline void q4_less(pv *lo, pv *hi, vf zero) {
  *lo = vf_sub(*lo, zero);
  *hi = vf_sub(*hi, zero);
}
