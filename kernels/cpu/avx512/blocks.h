// kernels/cpu/avx512/blocks.h - vectors of words, and products by VNNI, for
// linear/linear_blocks.h.
// x is 128 a + b with signed bytes a and b, and the codes of four columns of a row are the unsigned
// bytes of a lane.
#pragma once

#include "kernels/cpu/avx512/vec.h"
#include "kernels/cpu/common/vec_math.h"
#include "kernels/decl.h"

#define TD_UNROLL _Pragma("GCC unroll 64")

// ---- vectors of words ---------------------------------------------------------------------------

TD_INLINE vi vi_zero(void) {
  return _mm512_setzero_si512();
}
TD_INLINE vi vi_set1(int i) {
  return _mm512_set1_epi32(i);
}
TD_INLINE vi vi_and(vi a, vi b) {
  return _mm512_and_si512(a, b);
}
TD_INLINE vi vi_or(vi a, vi b) {
  return _mm512_or_si512(a, b);
}
TD_INLINE vi vi_xor(vi a, vi b) {
  return _mm512_xor_si512(a, b);
}
TD_INLINE vi vi_add(vi a, vi b) {
  return _mm512_add_epi32(a, b);
}
TD_INLINE vi vi_sub(vi a, vi b) {
  return _mm512_sub_epi32(a, b);
}
TD_INLINE vi vi_mul(vi a, vi b) {
  return _mm512_mullo_epi32(a, b);
}
TD_INLINE vi vi_srl(vi a, unsigned n) {
  return _mm512_srli_epi32(a, n);
}
TD_INLINE vi vi_sll(vi a, unsigned n) {
  return _mm512_slli_epi32(a, n);
}
TD_INLINE vi vi_sra(vi a, unsigned n) {
  return _mm512_srai_epi32(a, n);
}
TD_INLINE vf vf_from_vi(vi a) {
  return _mm512_cvtepi32_ps(a);
}
TD_INLINE vi vi_from_vf(vf a) {
  return _mm512_cvtps_epi32(a);
}
TD_INLINE vf vf_from_bits(vi a) {
  return _mm512_castsi512_ps(a);
}
// a < b ? then : otherwise, signed.
TD_INLINE vi vi_where_less(vi a, vi b, vi then, vi otherwise) {
  return _mm512_mask_mov_epi32(otherwise, _mm512_cmplt_epi32_mask(a, b), then);
}
TD_INLINE int vi_sum(vi a) {
  return _mm512_reduce_add_epi32(a);
}
// 16 bytes, four times.
TD_INLINE vi vi_repeat16(const void *p) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p));
}
// Byte i becomes byte at[i] < 16 of table's same 16 bytes.
TD_INLINE vi vi_bytes_at(vi table, vi at) {
  return _mm512_shuffle_epi8(table, at);
}
// The F16 in the lower half of each lane.
TD_INLINE vf vf_from_low_halves(vi a) {
  return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(a));
}
// A word of each of the first n rows, `apart` bytes apart; zeros after them.
TD_INLINE vi vi_gather(const void *p, size_t apart, uint32_t n) {
  const vi rows = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_mask_i32gather_epi32(vi_zero(), mask_n(n), vi_mul(rows, vi_set1((int)apart)), p, 1);
}
// The largest magnitude of n floats, n a multiple of VL, as bits; NaN is above all.
TD_INLINE uint32_t vf_largest(const float *x, uint32_t n) {
  vi most = vi_zero();
  for (uint32_t i = 0; i < n; i += VL)
    most = _mm512_max_epi32(most, vi_and(vi_load(x + i), vi_set1(0x7fffffff)));
  return (uint32_t)_mm512_reduce_max_epi32(most);
}

// ---- products -----------------------------------------------------------------------------------

enum {
  ROW_VECTORS = 2,
  TOKENS = 6,      // per tile: 2 x 6 sums of a and of b, and what is loaded, fill the registers
  FOUR_BYTES = 64, // the codes of four columns of VL rows
  X_FOUR = 8,      // bytes of four columns of x
};

typedef struct {
  vi a, b;
} group_sum;

// VL columns of x: of four columns a, then b.
TD_INLINE void pack_fours(vi x, int8_t *out) {
  const vi a = vi_sra(vi_add(x, vi_set1(64)), 7), b = vi_sub(x, vi_sll(a, 7));
  const __m128i pair[2] = {_mm512_cvtepi32_epi8(a), _mm512_cvtepi32_epi8(b)};
  _mm_storeu_si128((__m128i *)(void *)out, _mm_unpacklo_epi32(pair[0], pair[1]));
  _mm_storeu_si128((__m128i *)(void *)(out + VL), _mm_unpackhi_epi32(pair[0], pair[1]));
}

TD_INLINE void put_codes(vi codes, uint8_t *out) {
  _mm512_storeu_si512(out, codes);
}

TD_INLINE group_sum begin_group(vi less) {
  return (group_sum){.a = vi_zero(), .b = less};
}

TD_INLINE vi end_group(group_sum sum) {
  return vi_add(vi_sll(sum.a, 7), sum.b);
}

TD_INLINE vi bytes_of_x(const int8_t *p) {
  int bytes;
  memcpy(&bytes, p, sizeof bytes);
  return vi_set1(bytes);
}

// sums [R][T] += four columns; x of a token is x_step from the next.
TD_INLINE void multiply_fours(const int R, const int T, const uint8_t *codes, const int8_t *x,
                              size_t x_step, group_sum *sums) {
  vi w[ROW_VECTORS];
  TD_UNROLL for (int r = 0; r < R; r++) w[r] = vi_load(codes + r * FOUR_BYTES);
  TD_UNROLL for (int t = 0; t < T; t++) {
    vi a = bytes_of_x(x + (size_t)t * x_step), b = bytes_of_x(x + (size_t)t * x_step + 4);
    __asm__("" : "+v"(a), "+v"(b)); // one load instead of one per multiplication
    TD_UNROLL for (int r = 0; r < R; r++) {
      group_sum *sum = &sums[r * T + t];
      sum->a = _mm512_dpbusd_epi32(sum->a, w[r], a);
      sum->b = _mm512_dpbusd_epi32(sum->b, w[r], b);
    }
  }
}

// sum += four columns of VL rows of one token.
TD_INLINE void multiply_codes(vi codes, const int8_t *x, group_sum *sum) {
  sum->a = _mm512_dpbusd_epi32(sum->a, codes, bytes_of_x(x));
  sum->b = _mm512_dpbusd_epi32(sum->b, codes, bytes_of_x(x + 4));
}
