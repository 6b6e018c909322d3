// kernels/cpu/avx512fp16/q4.h - decodes windows of 4-bit codes to steps of 32 FP16 values, and
// reorders x to match.
// A window is 512 columns, 16 steps. Lane 8 i + 4 h + z of step 4 u + t has column
//   128 z + 32 i + 8 u + 4 h + t     h < 2; i, t, u, z < 4
// which is the position of code t of each 16-bit word after gathering the words of four cache lines
// by fours. So a lane has 16 columns of one group of 32 and, in each half of the steps (u < 2 and u
// >= 2), 8 columns of one group of 16.
//
// The values have at most three significant bits, so an FP16's lower byte is zero. The upper byte
// comes from a byte permutation, which uses a code and two more bits as index.
#pragma once

#include <stdbool.h>

#include "kernels/cpu/avx512fp16/vec.h"
#include "kernels/cpu/common/vec_math.h"

enum {
  Q4_WINDOW = VHL * CHAIN_STEPS, // columns
  Q4_WINDOW_BYTES = Q4_WINDOW / 2,
  Q4_BLOCKS = Q4_WINDOW / 16, // blocks of 16 columns, the smallest group
};

// Gathers the words of four vectors by fours: word 4 h + z of part i of the result is word 2 u + h
// of part i of vector z. A part is eight words.
static inline void q4_gather(const vi from[4], vi out[4]) {
  vi lo01 = _mm512_unpacklo_epi16(from[0], from[1]), hi01 = _mm512_unpackhi_epi16(from[0], from[1]);
  vi lo23 = _mm512_unpacklo_epi16(from[2], from[3]), hi23 = _mm512_unpackhi_epi16(from[2], from[3]);
  out[0] = _mm512_unpacklo_epi32(lo01, lo23);
  out[1] = _mm512_unpackhi_epi32(lo01, lo23);
  out[2] = _mm512_unpacklo_epi32(hi01, hi23);
  out[3] = _mm512_unpackhi_epi32(hi01, hi23);
}

// Loads the codes of a window, of which n bytes are readable; the rest counts as zeros.
static inline void q4_load(const uint8_t *p, uint32_t n, vi words[4]) {
  vi line[4];
  for (uint32_t i = 0; i < 4; i++) {
    if (n >= Q4_WINDOW_BYTES) {
      line[i] = vi_load(p + 64 * i);
    } else {
      uint32_t left = n > 64 * i ? n - 64 * i : 0;
      line[i] = _mm512_maskz_loadu_epi8(left < 64 ? ((__mmask64)1 << left) - 1 : ~(__mmask64)0,
                                        p + 64 * i);
    }
  }
  q4_gather(line, words);
}

// The upper bytes of 16 FP16 values, for q4_value.
static inline vi q4_table(__m128i upper) {
  return _mm512_broadcast_i32x4(upper);
}

// Value of code t of each word, from the table.
static inline vh q4_value(vi words, int t, vi table) {
  vi at = t == 0   ? _mm512_slli_epi16(words, 8)
          : t == 1 ? _mm512_slli_epi16(words, 4)
          : t == 2 ? words
                   : _mm512_srli_epi16(words, 4);
  return _mm512_castsi512_ph(_mm512_maskz_permutexvar_epi8(0xaaaaaaaaaaaaaaaau, at, table));
}

// A zero point z per lane, as 1024 + z and 64 + z.
typedef struct {
  vh even, odd;
} q4_zero;

static inline q4_zero q4_zero_of(vi z) {
  return (q4_zero){
      _mm512_castsi512_ph(_mm512_or_si512(z, _mm512_set1_epi16(0x6400))),
      _mm512_castsi512_ph(_mm512_or_si512(_mm512_slli_epi16(z, 4), _mm512_set1_epi16(0x5400)))};
}

// Code t of each word minus its zero point (the even form for even t). A code becomes the lowest
// bits of 1024 + q, or the bits above four zeros in 64 + q.
static inline vh q4_less(vi words, int t, vh zero) {
  vi at = t < 2 ? words : _mm512_srli_epi16(words, 8);
  vi mask = _mm512_set1_epi16(t % 2 ? 0x00f0 : 0x000f);
  vi one = _mm512_set1_epi16(t % 2 ? 0x5400 : 0x6400);
  vi value = _mm512_ternarylogic_epi32(at, mask, one, 0xea); // at & mask | one
  return _mm512_sub_ph(_mm512_castsi512_ph(value), zero);
}

static inline vh q4_value_less(vi words, int t, q4_zero zero) {
  return q4_less(words, t, t % 2 ? zero.odd : zero.even);
}

// The power of two by which x is multiplied. It brings the largest of n to [2^6, 2^7), so that 32
// products with codes of magnitude at most 15 have a sum below 65504. 0 if x is too large or too
// small for that, all zeros, or not finite; results are then 0 or NaN.
static inline float q4_power(const float *x, uint32_t n) {
  const vi magnitude = _mm512_set1_epi32(0x7fffffff);
  vi most = _mm512_setzero_si512();
  uint32_t i = 0;
  for (; i + VL <= n; i += VL)
    most = _mm512_max_epu32(most, _mm512_and_si512(vi_load(x + i), magnitude));
  vi last = _mm512_castps_si512(vf_load_n(x + i, n - i));
  uint32_t bits = _mm512_reduce_max_epu32(
      _mm512_max_epu32(most, _mm512_and_si512(last, magnitude)));
  uint32_t exponent = bits >> 23;
  if (exponent < 127 - 100 || exponent > 127 + 100) return 0;
  bits = (127 + 6 + 127 - exponent) << 23;
  float power;
  memcpy(&power, &bits, sizeof power);
  return power;
}

// Eight floats each from p and p + 32, times power.
static inline vf q4_two_parts(const float *p, vf power) {
  vf both = _mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(p)), _mm256_loadu_ps(p + 32),
                               1);
  return vf_mul(both, power);
}

// Packs n columns of x, at most a window, followed by zeros; step i at out + i * apart.
static inline void q4_pack(const float *x, uint32_t n, float power, _Float16 *out, size_t apart) {
  float all[Q4_WINDOW];
  if (n < Q4_WINDOW) {
    memset(all, 0, sizeof all);
    x = memcpy(all, x, n * sizeof *x);
  }
  for (uint32_t u = 0; u < 4; u++, x += 8) {
    vi columns[4], words[4];
    for (uint32_t z = 0; z < 4; z++) {
      const float *p = x + 128 * z;
      columns[z] = _mm512_castph_si512(
          vh_from_vf(q4_two_parts(p, vf_set1(power)), q4_two_parts(p + 64, vf_set1(power))));
    }
    q4_gather(columns, words); // by h, then pairs of t; each has two parts of four words
    for (int t = 0; t < 4; t++, out += apart) {
      vi h0 = words[t / 2], h1 = words[2 + t / 2];
      vi step = t % 2 ? _mm512_unpackhi_epi64(h0, h1) : _mm512_unpacklo_epi64(h0, h1);
      vh_store(out, _mm512_castsi512_ph(step));
    }
  }
}
