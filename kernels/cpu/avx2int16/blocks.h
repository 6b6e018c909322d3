// kernels/cpu/avx2int16/blocks.h - vectors of words, and products of pairs of 16-bit numbers,
// for linear/linear_blocks.h. Codes of four columns of a row are a lane of two vectors, columns 0
// and 2, 1 and 3.
#pragma once

#include "kernels/cpu/avx2/vec.h"
#include "kernels/cpu/avx2int16/round.h"
#include "kernels/cpu/common/blocks_vec.h"

#define TD_UNROLL _Pragma("GCC unroll 64")

// ---- vectors of words ---------------------------------------------------------------------------

TD_INLINE vi vi_zero(void) {
  return _mm256_setzero_si256();
}
TD_INLINE vi vi_set1(int i) {
  return _mm256_set1_epi32(i);
}
TD_INLINE vi vi_and(vi a, vi b) {
  return _mm256_and_si256(a, b);
}
TD_INLINE vi vi_or(vi a, vi b) {
  return _mm256_or_si256(a, b);
}
TD_INLINE vi vi_xor(vi a, vi b) {
  return _mm256_xor_si256(a, b);
}
TD_INLINE vi vi_add(vi a, vi b) {
  return _mm256_add_epi32(a, b);
}
TD_INLINE vi vi_sub(vi a, vi b) {
  return _mm256_sub_epi32(a, b);
}
TD_INLINE vi vi_mul(vi a, vi b) {
  return _mm256_mullo_epi32(a, b);
}
TD_INLINE vi vi_srl(vi a, unsigned n) {
  return _mm256_srli_epi32(a, (int)n);
}
TD_INLINE vi vi_sll(vi a, unsigned n) {
  return _mm256_slli_epi32(a, (int)n);
}
TD_INLINE vi vi_sra(vi a, unsigned n) {
  return _mm256_srai_epi32(a, (int)n);
}
TD_INLINE vf vf_from_vi(vi a) {
  return _mm256_cvtepi32_ps(a);
}
TD_INLINE vi vi_from_vf(vf a) {
  return _mm256_cvtps_epi32(a);
}
TD_INLINE vf vf_from_bits(vi a) {
  return _mm256_castsi256_ps(a);
}
// a < b ? then : otherwise, signed.
TD_INLINE vi vi_where_less(vi a, vi b, vi then, vi otherwise) {
  return _mm256_blendv_epi8(otherwise, then, _mm256_cmpgt_epi32(b, a));
}
TD_INLINE int vi_sum(vi a) {
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  half = _mm_add_epi32(half, _mm_unpackhi_epi64(half, half));
  return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_srli_epi64(half, 32)));
}
// 16 bytes, twice.
TD_INLINE vi vi_repeat16(const void *p) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
}
// Byte i becomes byte at[i] < 16 of table's same 16 bytes.
TD_INLINE vi vi_bytes_at(vi table, vi at) {
  return _mm256_shuffle_epi8(table, at);
}
// The F16 in the lower half of each lane.
TD_INLINE vf vf_from_low_halves(vi a) {
  a = _mm256_shuffle_epi8(a, _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 0,
                                                                       1, 4, 5, 8, 9, 12, 13)));
  a = _mm256_permute4x64_epi64(a, 0x08);
  return _mm256_cvtph_ps(_mm256_castsi256_si128(a));
}
TD_INLINE int vi_word(const char *p) {
  int word;
  memcpy(&word, p, sizeof word);
  return word;
}
// A word of each of the first n rows, `apart` bytes apart; zeros after them.
TD_INLINE vi vi_gather(const void *from, size_t apart, uint32_t n) {
  const char *p = from, *q = p + 4 * apart;
  if (n == VL) {
    return _mm256_setr_epi32(vi_word(p), vi_word(p + apart), vi_word(p + 2 * apart),
                             vi_word(p + 3 * apart), vi_word(q), vi_word(q + apart),
                             vi_word(q + 2 * apart), vi_word(q + 3 * apart));
  }
  int word[VL] = {0};
  for (uint32_t i = 0; i < n; i++)
    word[i] = vi_word(p + i * apart);
  return _mm256_loadu_si256((const vi *)word);
}

// ---- products -----------------------------------------------------------------------------------

enum {
  ROW_VECTORS = 2,
  TOKENS = 6,      // per tile: 2 x 6 sums, 2 of weights, x and a product fill the registers
  FOUR_BYTES = 64, // the codes of four columns of VL rows
  X_FOUR = 8,      // bytes of four columns of x
  A8_BYTES = 2,    // of a column of x in 8 bits
};

typedef vi group_sum;

// VL columns of x from column k on, in the order of codes.
TD_INLINE void pack_columns(vi x, uint32_t n_bytes, const uint32_t n_run, uint32_t k, int8_t *out) {
  (void)n_run;
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
  const __m128i all = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  _mm_storeu_si128((__m128i *)(void *)(out + k * n_bytes), _mm_shuffle_epi8(all, order));
}

TD_INLINE void put_codes(vi codes, uint8_t *out) {
  _mm256_storeu_si256((vi *)(void *)out, vi_and(codes, vi_set1(0x00ff00ff)));
  _mm256_storeu_si256((vi *)(void *)(out + FOUR_BYTES / 2), _mm256_srli_epi16(codes, 8));
}

TD_INLINE group_sum begin_group(vi less) {
  return less;
}

TD_INLINE vi end_group(group_sum sum) {
  return sum;
}

// sums [R][T] += four columns; x of a token is x_step from the next.
TD_INLINE void multiply_fours(const int R, const int T, const uint32_t n_bytes,
                              const uint8_t *codes, const int8_t *x, size_t x_step,
                              group_sum *sums) {
  (void)n_bytes;
  TD_UNROLL for (int half = 0; half < 2; half++, codes += FOUR_BYTES / 2, x += 4) {
    vi w[ROW_VECTORS];
    TD_UNROLL for (int r = 0; r < R; r++) w[r] = vi_load(codes + r * FOUR_BYTES);
    TD_UNROLL for (int t = 0; t < T; t++) {
      vi pair = pair_of((const int16_t *)(const void *)(x + (size_t)t * x_step));
      __asm__("" : "+v"(pair)); // one load instead of one per multiplication
      TD_UNROLL for (int r = 0; r < R; r++) {
        vi *sum = &sums[r * T + t];
        *sum = add_pairs(*sum, w[r], pair);
        // Forces the sum now; the compiler would keep products in registers, of which there are too
        // few.
        __asm__("" : "+v"(*sum));
      }
    }
  }
}

// ---- one token ----------------------------------------------------------------------------------

// Vectors are 32 columns of a row, whose sums become lanes: that takes fewer instructions than rows
// as lanes, whose codes are stored and loaded.
#define ROW_SUMS true

// From the order of pack_columns, of n columns, to that of row_sums: of 32 columns those of even
// places, then the others.
static void order_x(const int8_t *x, uint32_t n, int8_t *out) {
  for (uint32_t k = 0; k < n; k += 32, x += 64, out += 64) {
    const vf a = _mm256_castsi256_ps(vi_load(x)), b = _mm256_castsi256_ps(vi_load(x + 32));
    const vi even = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88));
    const vi odd = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd));
    _mm256_storeu_si256((vi *)(void *)out, _mm256_permute4x64_epi64(even, 0xd8));
    _mm256_storeu_si256((vi *)(void *)(out + 32), _mm256_permute4x64_epi64(odd, 0xd8));
  }
}

TD_INLINE vi add_by_32(vi a, vi b) {
  return vi_add(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
}

TD_INLINE vi add_by_64(vi a, vi b) {
  return vi_add(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
}

// The sums of VL rows over 32 columns, or over each half of them. signs: signs_of_rows.
TD_INLINE void row_sums(const td_dtype dtype, const int n_sums, const uint8_t *rows, size_t apart,
                        unsigned part, const int8_t *x, const uint32_t (*signs)[8], vi *sums) {
  vi of[VL];
  TD_UNROLL for (unsigned r = 0; r < VL; r++) {
    const vi codes = gguf_codes_with(dtype, rows + r * apart, part, signs[r]);
    const vi even = _mm256_madd_epi16(vi_and(codes, vi_set1(0x00ff00ff)), vi_load(x));
    of[r] = add_pairs(even, _mm256_srli_epi16(codes, 8), vi_load(x + 32));
  }
  const vi low = add_by_64(add_by_32(of[0], of[1]), add_by_32(of[2], of[3]));
  const vi high = add_by_64(add_by_32(of[4], of[5]), add_by_32(of[6], of[7]));
  sums[0] = _mm256_permute2x128_si256(low, high, 0x20);
  sums[n_sums - 1] = _mm256_permute2x128_si256(low, high, 0x31);
  if (n_sums == 1) sums[0] = vi_add(sums[0], _mm256_permute2x128_si256(low, high, 0x20));
}

// Never called: row_sums takes one token.
TD_INLINE void multiply_codes(vi codes, const int8_t *x, group_sum *sum) {
  (void)codes, (void)x, (void)sum;
}
