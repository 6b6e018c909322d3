// kernels/cpu/avx2int16/round.h - rounds activations to 16-bit integers, and multiplies those.
// Include after avx2/vec.h.
#pragma once

#include <stdbool.h>

#include "kernels/cpu/common/vec_math.h"
#include "kernels/cpu/linear/w4a8.h"

enum { OCTET = 8 }; // columns per dword of codes

// Which columns of an octet are multiplied as a pair: j and j + 4, or 2 j and 2 j + 1.
typedef enum { PAIRS_APART, PAIRS_BESIDE } x_pairs;

// Rounds n columns of x to a block with one scale, the largest magnitude / 32767; zeros after them.
// Octet i is stored at out + i step, in pairs of columns. *sum: sum of the rounded numbers. Returns
// false if magnitudes are too far from 1.
TD_INLINE bool round_block(const float *x, uint32_t n, uint32_t block, x_pairs pairs, int16_t *out,
                           size_t step, float *scale, uint32_t *sum) {
  const __m128i apart = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
  _Alignas(64) float part[A8_MOST_BLOCK];
  if (n < block) {
    memset(part, 0, sizeof part);
    x = memcpy(part, x, n * sizeof *x);
  }
  const float most = f32_from_bits(vf_largest(x, block));
  const vf times = vf_set1(most > 0 ? 32767 / most : 0);
  vi sums = _mm256_setzero_si256();
  for (uint32_t i = 0; i < block; i += VL, out += step) {
    const vi whole = _mm256_cvtps_epi32(vf_mul(vf_load(x + i), times));
    const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(whole),
                                         _mm256_extracti128_si256(whole, 1));
    _mm_storeu_si128((__m128i *)out, pairs == PAIRS_APART ? _mm_shuffle_epi8(half, apart) : half);
    sums = _mm256_add_epi32(sums, whole);
  }
  __m128i all = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  all = _mm_add_epi32(all, _mm_unpackhi_epi64(all, all));
  *scale = most / 32767;
  *sum = (uint32_t)_mm_cvtsi128_si32(all) + (uint32_t)_mm_extract_epi32(all, 1);
  return most == 0 || (most >= 0x1p-100f && most < 0x1p100f);
}

// acc + pairwise products of 16-bit numbers: in two instructions, or (add_pairs) in as few as the
// ISA has.
TD_INLINE vi add_in_two(vi acc, vi w, vi x) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(w, x));
}

TD_INLINE vi add_pairs(vi acc, vi w, vi x) {
#if defined(__AVX512VNNI__)
  return _mm256_dpwssd_epi32(acc, w, x);
#elif defined(__AVXVNNI__)
  return _mm256_dpwssd_avx_epi32(acc, w, x);
#else
  return add_in_two(acc, w, x);
#endif
}

// The same two columns of a token in every row.
TD_INLINE vi pair_of(const int16_t *x) {
  int32_t pair;
  memcpy(&pair, x, sizeof pair);
  return _mm256_set1_epi32(pair);
}
