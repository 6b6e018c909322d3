// kernels/cpu/avx2/nibbles.h - converts words of eight 4-bit codes to floats by a table of sixteen
// values: INT4's (code - 8) or E2M1's; for q4.h.
// All values fit BF16, so its two bytes are looked up for all codes of a block at once. The bytes
// are then combined in halves of lanes, and a shift or a mask makes either half an F32. That is
// half of the instructions that shifts and conversions of each vector would take, and few of them
// need the multiplication ports.
#pragma once

#include "kernels/cpu/avx2/vec.h"
#include "kernels/cpu/common/packed_f32.h"

enum {
  Q4_GEMV_ROWS = 1,    // rows that share the loads of one token
  Q4_BATCH_ROWS = 1,   // rows that share the loads of two or three tokens
  Q4_BATCH_ROWS_8 = 1, // rows with up to Q4_TOKENS tokens
  Q4_TOKENS = 8,
  Q4_AHEAD = 1024, // prefetch distance in bytes, for one token
};

// The upper and lower bytes of each value as BF16, each stored twice.
typedef struct {
  __m256i high, low;
} nibbles_table;

static inline __m256i nibbles_twice(const uint8_t bytes[16]) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)bytes));
}

static inline nibbles_table int4_table(void) {
  static const uint8_t high[16] = {0xc1, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0xbf,
                                   0,    0x3f, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40};
  static const uint8_t low[16] = {0, 0xe0, 0xc0, 0xa0, 0x80, 0x40, 0,    0x80,
                                  0, 0x80, 0,    0x40, 0x80, 0xa0, 0xc0, 0xe0};
  return (nibbles_table){.high = nibbles_twice(high), .low = nibbles_twice(low)};
}

static inline nibbles_table fp4_table(void) {
  static const uint8_t high[16] = {0,    0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40,
                                   0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0};
  static const uint8_t low[16] = {0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0,
                                  0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0};
  return (nibbles_table){.high = nibbles_twice(high), .low = nibbles_twice(low)};
}

// The value of the lowest four bits: the code with its highest bit flipped, as a signed number.
static inline vf int4_low(vi words) {
  vi flipped = _mm256_xor_si256(words, _mm256_set1_epi32(8));
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(flipped, 28), 28));
}

// The value of the lowest four bits: a table gives the magnitude; the permutation uses three bits
// only.
static inline vf fp4_low(vi words) {
  vf magnitude = vf_permute(_mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6), words);
  vf sign = _mm256_castsi256_ps(_mm256_slli_epi32(words, 28));
  return _mm256_xor_ps(magnitude, _mm256_and_ps(sign, vf_set1(-0.0f)));
}

// Lower halves of v[c + 2 u]: code 4 u + c; upper halves: code 4 u + 2 + c.
static inline void nibbles_split(__m256i words, nibbles_table table, vi v[4]) {
  // Bytes 0 and 1 of a half's words, then bytes 2 and 3, so that lanes remain words below.
  static const uint8_t order[16] = {0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15};
  const __m256i mask = _mm256_set1_epi8(15);
  words = _mm256_shuffle_epi8(words, nibbles_twice(order));
  for (int c = 0; c < 2; c++) {
    __m256i code = _mm256_and_si256(c ? _mm256_srli_epi16(words, 4) : words, mask);
    __m256i low = _mm256_shuffle_epi8(table.low, code);
    __m256i high = _mm256_shuffle_epi8(table.high, code);
    v[c] = _mm256_unpacklo_epi8(low, high);
    v[c + 2] = _mm256_unpackhi_epi8(low, high);
  }
}

static inline void nibbles_load(const uint8_t *p, nibbles_table table, vi v[4]) {
  nibbles_split(vi_load(p), table, v);
}

static inline void nibbles_load_n(const uint8_t *p, uint32_t n, nibbles_table table, vi v[4]) {
  nibbles_split(n < 4 * VL ? vi_load_n(p, n) : vi_load(p), table, v);
}

static inline vf nibbles_half(vi v, int upper) {
  vi upper_half = _mm256_set1_epi32((int)0xffff0000);
  return _mm256_castsi256_ps(upper ? _mm256_and_si256(v, upper_half) : _mm256_slli_epi32(v, 16));
}

// Values of codes 2 i and 2 i + 1 of every word, which were looked up when they were loaded.
static inline void nibbles_pair(const vi v[4], int i, nibbles_table table, vf *lo, vf *hi) {
  (void)table;
  *lo = nibbles_half(v[i / 2 * 2], i % 2);
  *hi = nibbles_half(v[i / 2 * 2 + 1], i % 2);
}

static inline void q4_order(const float *x, packed *out, size_t step) {
  vf_order8(x, out, step);
}

// Subtracts zero points.
static inline void q4_less(pv *lo, pv *hi, vf zero) {
  *lo = vf_sub(*lo, zero);
  *hi = vf_sub(*hi, zero);
}
