// kernels/cpu/common/blocks_vec.h - the groups of kernels/blocks.h, sixteen columns at a time.
// Include after an ISA's vec.h, whose vf_from_bytes converts VL of sixteen signed bytes.
#ifndef KERNELS_CPU_BLOCKS_VEC_H
#define KERNELS_CPU_BLOCKS_VEC_H

#include <immintrin.h>

#include "kernels/cpu/common/gguf.h"

static const int8_t iq4_values[16] = GGUF_IQ4_VALUES, mxfp4_values[16] = GGUF_MXFP4_VALUES;

static inline __m128i gguf_load(const uint8_t *p) {
  return _mm_loadu_si128((const __m128i *)(const void *)p);
}

// Bits [shift, shift + 8) of bytes, with those of the next byte above; the mask removes them.
static inline __m128i gguf_bits(const uint8_t *p, unsigned shift, int mask) {
  return _mm_and_si128(_mm_srl_epi16(gguf_load(p), _mm_cvtsi32_si128((int)shift)),
                       _mm_set1_epi8((char)mask));
}

// Sixteen bits from p on, as bytes of 0 or 0xff.
static inline __m128i gguf_mask(const uint8_t *p) {
  const __m128i each = _mm_set1_epi64x((long long)0x8040201008040201ull);
  __m128i v = _mm_cvtsi32_si128(p[0] | p[1] << 8);
  v = _mm_shuffle_epi8(v, _mm_set_epi64x(0x0101010101010101, 0));
  return _mm_cmpeq_epi8(_mm_and_si128(v, each), each);
}

static inline __m128i gguf_table(const int8_t values[16], __m128i codes) {
  return _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(const void *)values), codes);
}

// Nibbles of blocks of 32, with the fifth bit of each at p.
static inline __m128i gguf_five(const uint8_t *codes, const uint8_t *p, unsigned group) {
  const __m128i high = _mm_and_si128(gguf_mask(p + 2 * group), _mm_set1_epi8(16));
  return _mm_or_si128(gguf_bits(codes, 4 * group, 15), high);
}

static inline __m128i gguf_bits_k(const uint8_t *codes, unsigned group) {
  return gguf_bits(codes + group / 8 * 32 + group % 2 * 16, group % 8 / 2 * 2, 3);
}

static inline __m128i gguf_nibbles_k(const uint8_t *codes, unsigned group) {
  return gguf_bits(codes + group / 4 * 32 + group % 2 * 16, group / 2 % 2 * 4, 15);
}

// The codes of a group.
static inline __m128i gguf_codes_of(td_dtype dtype, const uint8_t *b, unsigned group) {
  switch (dtype) {
  case TD_Q8_0: return gguf_load(b + Q8_0_CODES + 16 * group);
  case TD_Q4_0: return _mm_sub_epi8(gguf_bits(b + Q4_0_CODES, 4 * group, 15), _mm_set1_epi8(8));
  case TD_Q4_1: return gguf_bits(b + Q4_1_CODES, 4 * group, 15);
  case TD_Q5_0:
    return _mm_sub_epi8(gguf_five(b + Q5_0_CODES, b + Q5_0_HIGH, group), _mm_set1_epi8(16));
  case TD_Q5_1: return gguf_five(b + Q5_1_CODES, b + Q5_1_HIGH, group);
  case TD_Q2_K: return gguf_bits_k(b + Q2_K_CODES, group);
  case TD_Q3_K: {
    const __m128i high = gguf_bits(b + group % 2 * 16, group / 2, 1);
    const __m128i up = _mm_sub_epi8(_mm_slli_epi16(high, 2), _mm_set1_epi8(4));
    return _mm_add_epi8(gguf_bits_k(b + Q3_K_CODES, group), up);
  }
  case TD_Q4_K: return gguf_nibbles_k(b + Q4_K_CODES, group);
  case TD_Q5_K: {
    const __m128i high = gguf_bits(b + Q5_K_HIGH + group % 2 * 16, group / 2, 1);
    return _mm_or_si128(gguf_nibbles_k(b + Q5_K_CODES, group), _mm_slli_epi16(high, 4));
  }
  case TD_Q6_K: {
    const uint8_t *low = b + group / 8 * 64 + group / 2 % 2 * 32 + group % 2 * 16;
    const __m128i codes = _mm_or_si128(gguf_bits(low, group % 8 / 4 * 4, 15),
                                       _mm_slli_epi16(gguf_bits_k(b + Q6_K_HIGH, group), 4));
    return _mm_sub_epi8(codes, _mm_set1_epi8(32));
  }
  case TD_IQ4_NL: return gguf_table(iq4_values, gguf_bits(b + IQ4_NL_CODES, 4 * group, 15));
  case TD_IQ4_XS:
    return gguf_table(iq4_values, gguf_bits(b + IQ4_XS_CODES + group / 2 * 16, group % 2 * 4, 15));
  case TD_MXFP4: return gguf_table(mxfp4_values, gguf_bits(b + MXFP4_CODES, 4 * group, 15));
  default: return _mm_setzero_si128();
  }
}

// A row of a matrix.
static inline void decode_blocks(const td_dtype dtype, const uint8_t *row, uint32_t cols,
                                 float *out) {
  const td_block block = td_dtype_block(dtype);
  for (uint32_t k = 0; k < cols; k += block.cols, row += block.bytes) {
    for (unsigned g = 0; g < block.cols / BLOCK_GROUP; g++, out += BLOCK_GROUP) {
      const gguf_scale s = gguf_scale_of(dtype, row, g);
      const __m128i codes = gguf_codes_of(dtype, row, g);
      for (int i = 0; i < BLOCK_GROUP / VL; i++) {
        vf_store(out + i * VL,
                 vf_fma(vf_from_bytes(codes, i), vf_set1(s.scale), vf_set1(s.offset)));
      }
    }
  }
}

#endif
