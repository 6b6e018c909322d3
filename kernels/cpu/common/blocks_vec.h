// kernels/cpu/common/blocks_vec.h - the codes of kernels/blocks.h, 32 columns at a time.
// Include after an ISA's vec.h, whose vf_from_bytes converts VL of sixteen signed bytes.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/common/gguf.h"
#include "kernels/cpu/common/grids.h"
#include "kernels/cpu/common/vec_math.h"

static inline __m256i gguf_byte(int byte) {
  return _mm256_set1_epi8((char)byte);
}

static inline __m256i gguf_load(const uint8_t *p) {
  return _mm256_loadu_si256((const __m256i *)(const void *)p);
}

// Bits [shift, shift + 8) of 32 bytes, with those of the next byte above; the mask removes them.
static inline __m256i gguf_bits(const uint8_t *p, unsigned shift, int mask) {
  return _mm256_and_si256(_mm256_srli_epi16(gguf_load(p), (int)shift), gguf_byte(mask));
}

// 16 bytes of nibbles: the lower ones are the first 16 columns.
static inline __m256i gguf_nibbles(const uint8_t *p) {
  const __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)p);
  const __m256i shifts = _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4);
  return _mm256_and_si256(_mm256_srlv_epi32(_mm256_broadcastsi128_si256(bytes), shifts),
                          gguf_byte(15));
}

// 0xff where a bit is set, a byte each.
static inline __m256i gguf_set_bits(uint32_t bits) {
  const __m256i each = _mm256_set1_epi64x((long long)0x8040201008040201ull);
  const __m256i from = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202,
                                          0x0303030303030303);
  const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32((int)bits), from);
  return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, each), each);
}

// Nibbles with the fifth bit of each at `high`.
static inline __m256i gguf_five(const uint8_t *p, const uint8_t *high) {
  const __m256i is_set = gguf_set_bits(gguf_word(high));
  return _mm256_or_si256(gguf_nibbles(p), _mm256_and_si256(is_set, gguf_byte(16)));
}

// The unsigned values of nibbles that are places in a table.
static inline __m256i gguf_values(const int8_t table[16], __m256i places) {
  const __m128i values = _mm_loadu_si128((const __m128i *)(const void *)table);
  const __m256i both = _mm256_xor_si256(_mm256_broadcastsi128_si256(values), gguf_byte(128));
  return _mm256_shuffle_epi8(both, places);
}

static inline __m256i gguf_above(__m256i low, __m256i high, int shift) {
  return _mm256_or_si256(low, _mm256_slli_epi16(high, shift));
}

// TQ1_0's digits of 32 columns: see gguf_trit. Bytes times powers of 3, without what passes 255.
TD_INLINE __m256i gguf_trits(const uint8_t *b, unsigned part) {
  enum { FIRST = 5 }; // parts in the first 32 bytes
  static const int16_t powers[8][2] = {{1, 1},   {3, 3}, {9, 9},  {27, 27},
                                       {81, 81}, {1, 3}, {9, 27}, {81, 0}};
  const __m128i later = _mm_loadu_si128((const __m128i *)(const void *)(b + TQ1_0_LATER));
  __m256i times = _mm256_set_m128i(_mm_set1_epi16(powers[part][1]),
                                   _mm_set1_epi16(powers[part][0]));
  __m256i bytes = part < FIRST ? gguf_bits(b, 0, 255) : _mm256_broadcastsi128_si256(later);
  if (part == 7) {
    int last;
    memcpy(&last, b + TQ1_0_LAST, sizeof last);
    bytes = _mm256_inserti128_si256(bytes, _mm_set1_epi32(last), 1);
    times = _mm256_inserti128_si256(times, _mm_setr_epi16(1, 1, 3, 3, 9, 9, 27, 27), 1);
  }
  const __m256i low = _mm256_and_si256(_mm256_mullo_epi16(bytes, times), _mm256_set1_epi16(255));
  const __m256i high = _mm256_and_si256(bytes, _mm256_set1_epi16(-256));
  const __m256i rest = _mm256_or_si256(low, _mm256_mullo_epi16(high, times));
  const __m256i one = _mm256_cmpeq_epi8(_mm256_max_epu8(rest, gguf_byte(86)), rest);
  const __m256i two = _mm256_cmpeq_epi8(_mm256_max_epu8(rest, gguf_byte(171)), rest);
  return _mm256_sub_epi8(_mm256_setzero_si256(), _mm256_add_epi8(one, two));
}

// The indices of a part's four entries of eight columns, and of its eight of four.
TD_INLINE __m128i gguf_index_eights(td_dtype dtype, const uint8_t *b, unsigned part) {
  if (dtype == TD_IQ2_XS) {
    const __m128i q = _mm_loadl_epi64((const __m128i *)(const void *)(b + 2 + part * 8));
    return _mm_and_si128(_mm_cvtepu16_epi32(q), _mm_set1_epi32(511));
  }
  const uint8_t *at = b + (dtype == TD_IQ2_XXS ? 2 + part * 8
                           : dtype == TD_IQ1_M ? part * 4
                                               : 2 + part * 4);
  const __m128i low = _mm_cvtepu8_epi32(_mm_cvtsi32_si128((int)gguf_word(at)));
  int high, mask = 0x700;
  __m128i by;
  if (dtype == TD_IQ2_XXS) return low;
  if (dtype == TD_IQ2_S) {
    high = b[66 + part] << 8, mask = 0x300, by = _mm_setr_epi32(0, 2, 4, 6);
  } else if (dtype == TD_IQ1_S) {
    high = (b[34 + part * 2] | b[35 + part * 2] << 8) << 8, by = _mm_setr_epi32(0, 3, 6, 9);
  } else {
    high = (b[32 + part * 2] | b[33 + part * 2] << 8) << 8, by = _mm_setr_epi32(0, 4, 8, 12);
  }
  const __m128i bits = _mm_srlv_epi32(_mm_set1_epi32(high), by);
  return _mm_or_si128(low, _mm_and_si128(bits, _mm_set1_epi32(mask)));
}

TD_INLINE __m256i gguf_index_fours(td_dtype dtype, const uint8_t *b, unsigned part) {
  const __m128i q = _mm_loadl_epi64((const __m128i *)(const void *)(b + 2 + part * 8));
  const __m256i low = _mm256_cvtepu8_epi32(q);
  if (dtype == TD_IQ3_XXS) return low;
  const __m256i bits = _mm256_sllv_epi32(_mm256_set1_epi32(b[66 + part]),
                                         _mm256_setr_epi32(8, 7, 6, 5, 4, 3, 2, 1));
  return _mm256_or_si256(low, _mm256_and_si256(bits, _mm256_set1_epi32(256)));
}

// Entries of a grid, before signs.
TD_INLINE __m256i gguf_grid_eights(const uint64_t *grid, td_dtype dtype, const uint8_t *b,
                                   unsigned part) {
  return _mm256_i32gather_epi64((const long long *)(const void *)grid,
                                gguf_index_eights(dtype, b, part), 8);
}

TD_INLINE __m256i gguf_grid_fours(const uint32_t *grid, td_dtype dtype, const uint8_t *b,
                                  unsigned part) {
  return _mm256_i32gather_epi32((const int *)(const void *)grid, gguf_index_fours(dtype, b, part),
                                4);
}

// signs: gguf_grid_signs of the part.
TD_INLINE __m256i gguf_grid_codes(td_dtype dtype, const uint8_t *b, unsigned part, uint32_t signs) {
  __m256i codes;
  switch (dtype) {
  case TD_IQ2_XXS: codes = gguf_grid_eights(td_grid_iq2_xxs, dtype, b, part); break;
  case TD_IQ2_XS: codes = gguf_grid_eights(td_grid_iq2_xs, dtype, b, part); break;
  case TD_IQ2_S: codes = gguf_grid_eights(td_grid_iq2_s, dtype, b, part); break;
  case TD_IQ3_XXS: codes = gguf_grid_fours(td_grid_iq3_xxs, dtype, b, part); break;
  case TD_IQ3_S: codes = gguf_grid_fours(td_grid_iq3_s, dtype, b, part); break;
  default: codes = gguf_grid_eights(td_grid_iq1, dtype, b, part); break;
  }
#ifdef __AVX512BW__
  if (GGUF_IS_IQ1(dtype)) return _mm256_mask_sub_epi8(codes, signs, codes, gguf_byte(2));
  codes = _mm256_mask_sub_epi8(codes, signs, _mm256_setzero_si256(), codes);
#else
  const __m256i mask = gguf_set_bits(signs);
  if (GGUF_IS_IQ1(dtype)) return _mm256_add_epi8(codes, _mm256_add_epi8(mask, mask));
  codes = _mm256_sub_epi8(_mm256_xor_si256(codes, mask), mask);
#endif
  return _mm256_xor_si256(codes, gguf_byte(128));
}

// The codes of 32 columns of a block as unsigned bytes, gguf_less too large.
TD_INLINE __m256i gguf_codes_of(td_dtype dtype, const uint8_t *b, unsigned part) {
  static const int8_t iq4[16] = GGUF_IQ4_VALUES, mxfp4[16] = GGUF_MXFP4_VALUES;
  const unsigned pairs_at = part / 4 * 32, pair = part % 4 * 2;
  switch (dtype) {
  case TD_Q8_0: return _mm256_xor_si256(gguf_bits(b + Q8_0_CODES, 0, 255), gguf_byte(128));
  case TD_Q4_0: return gguf_nibbles(b + Q4_0_CODES);
  case TD_Q4_1: return gguf_nibbles(b + Q4_1_CODES);
  case TD_Q5_0: return gguf_five(b + Q5_0_CODES, b + Q5_0_HIGH);
  case TD_Q5_1: return gguf_five(b + Q5_1_CODES, b + Q5_1_HIGH);
  case TD_Q2_K: return gguf_bits(b + Q2_K_CODES + pairs_at, pair, 3);
  case TD_Q3_K:
    return gguf_above(gguf_bits(b + Q3_K_CODES + pairs_at, pair, 3), gguf_bits(b, part, 1), 2);
  case TD_Q4_K: return gguf_bits(b + Q4_K_CODES + part / 2 * 32, part % 2 * 4, 15);
  case TD_Q5_K:
    return gguf_above(gguf_bits(b + Q5_K_CODES + part / 2 * 32, part % 2 * 4, 15),
                      gguf_bits(b + Q5_K_HIGH, part, 1), 4);
  case TD_Q6_K:
    return gguf_above(gguf_bits(b + part / 4 * 64 + part % 2 * 32, part % 4 / 2 * 4, 15),
                      gguf_bits(b + Q6_K_HIGH + pairs_at, pair, 3), 4);
  case TD_IQ4_NL: return gguf_values(iq4, gguf_nibbles(b + IQ4_NL_CODES));
  case TD_IQ4_XS: return gguf_values(iq4, gguf_nibbles(b + IQ4_XS_CODES + part * 16));
  case TD_MXFP4: return gguf_values(mxfp4, gguf_nibbles(b + MXFP4_CODES));
  case TD_TQ2_0: return gguf_bits(b + pairs_at, pair, 3);
  case TD_TQ1_0: return gguf_trits(b, part);
  default: return gguf_grid_codes(dtype, b, part, gguf_grid_signs(dtype, b, part));
  }
}

// gguf_grid_signs of a block's eight parts, of formats with GGUF_HAS_SEVENS.
TD_INLINE void gguf_block_signs(td_dtype dtype, const uint8_t *b, uint32_t signs[8]) {
  const __m256i odd = _mm256_broadcastsi128_si256(_mm_setr_epi8(
      0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0)); // of four bits
  __m256i s;
  if (dtype == TD_IQ2_XS) {
    const __m256i low = gguf_load(b + 2), high = gguf_load(b + 34);
    s = _mm256_packus_epi16(_mm256_srli_epi16(low, 9), _mm256_srli_epi16(high, 9));
    s = _mm256_permute4x64_epi64(s, 0xd8);
  } else {
    s = gguf_load(b + (dtype == TD_IQ2_XXS ? 2 : 66));
    if (dtype == TD_IQ2_XXS) { // every other word
      const __m256 low = _mm256_castsi256_ps(s), high = _mm256_castsi256_ps(gguf_load(b + 34));
      s = _mm256_castps_si256(_mm256_shuffle_ps(low, high, 0xdd));
      s = _mm256_permute4x64_epi64(s, 0xd8);
    }
    __m256i sevens = _mm256_and_si256(s, _mm256_set1_epi32(0x7f));
    for (int i = 1; i < 4; i++) {
      const __m256i next = _mm256_slli_epi32(s, i);
      sevens = _mm256_or_si256(sevens, _mm256_and_si256(next, _mm256_set1_epi32(0x7f << 8 * i)));
    }
    s = sevens;
  }
  const __m256i folded = _mm256_xor_si256(s, _mm256_srli_epi16(s, 4));
  const __m256i eighth = _mm256_shuffle_epi8(odd, _mm256_and_si256(folded, gguf_byte(15)));
  _mm256_storeu_si256((__m256i *)(void *)signs, _mm256_or_si256(s, eighth));
}

// gguf_codes_of; signs: gguf_block_signs.
TD_INLINE __m256i gguf_codes_with(td_dtype dtype, const uint8_t *b, unsigned part,
                                  const uint32_t signs[8]) {
  return GGUF_HAS_SEVENS(dtype) ? gguf_grid_codes(dtype, b, part, signs[part])
                                : gguf_codes_of(dtype, b, part);
}

// The codes themselves, signed, 16 columns each.
static inline void gguf_signed_codes(td_dtype dtype, const uint8_t *b, unsigned part,
                                     __m128i out[2]) {
  const __m256i all = _mm256_sub_epi8(gguf_codes_of(dtype, b, part), gguf_byte(gguf_less(dtype)));
  out[0] = _mm256_castsi256_si128(all);
  out[1] = _mm256_extracti128_si256(all, 1);
}

// A row of a matrix.
TD_INLINE void decode_blocks(const td_dtype dtype, const uint8_t *row, uint32_t cols, float *out) {
  const td_block block = td_dtype_block(dtype);
  for (uint32_t k = 0; k < cols; k += block.cols, row += block.bytes) {
    __m128i both[2];
    for (unsigned g = 0; g < block.cols / BLOCK_GROUP; g++, out += BLOCK_GROUP) {
      if (g % 2 == 0) gguf_signed_codes(dtype, row, g / 2, both);
      const gguf_scale s = gguf_scale_of(dtype, row, g);
      const __m128i codes = both[g % 2];
      for (int i = 0; i < BLOCK_GROUP / VL; i++) {
        vf_store(out + i * VL,
                 vf_fma(vf_from_bytes(codes, i), vf_set1(s.scale), vf_set1(s.offset)));
      }
    }
  }
}
