// kernels/cpu/avx512/blocks.h - vectors of words, and products by VNNI, for
// linear/linear_blocks.h.
// x is 128 a + b with signed bytes a and b, and the codes of four columns of a row are the unsigned
// bytes of a lane.
#pragma once

#include "kernels/cpu/avx512/vec.h"
#include "kernels/cpu/common/blocks_vec.h"
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
  A8_BYTES = 1,    // of a column of x in 8 bits
};

typedef struct {
  vi a, b;
} group_sum;

// VL columns of x from column k on, of n_bytes each: of every n_run columns (4, 16 or 32) a, then
// b; or all b.
TD_INLINE void pack_columns(vi x, uint32_t n_bytes, const uint32_t n_run, uint32_t k, int8_t *out) {
  __m128i *to = (__m128i *)(void *)(out + k * n_bytes);
  if (n_bytes == 1) {
    _mm_storeu_si128(to, _mm512_cvtepi32_epi8(x));
    return;
  }
  const vi high = vi_sra(vi_add(x, vi_set1(64)), 7), low = vi_sub(x, vi_sll(high, 7));
  const __m128i a = _mm512_cvtepi32_epi8(high), b = _mm512_cvtepi32_epi8(low);
  if (n_run > 4) to -= k % n_run / VL;
  _mm_storeu_si128(to, n_run > 4 ? a : _mm_unpacklo_epi32(a, b));
  _mm_storeu_si128(to + (n_run > 4 ? n_run / VL : 1), n_run > 4 ? b : _mm_unpackhi_epi32(a, b));
}

TD_INLINE void put_codes(vi codes, uint8_t *out) {
#ifdef BLOCKS_FEW // tiles take signed ones
  codes = _mm512_sub_epi8(codes, _mm512_set1_epi8((char)gguf_less(BLOCK_DTYPE)));
#endif
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

// sums [R][T] += four columns, of n_bytes each in x; x of a token is x_step from the next.
TD_INLINE void multiply_fours(const int R, const int T, const uint32_t n_bytes,
                              const uint8_t *codes, const int8_t *x, size_t x_step,
                              group_sum *sums) {
  vi w[ROW_VECTORS];
  TD_UNROLL for (int r = 0; r < R; r++) w[r] = vi_load(codes + r * FOUR_BYTES);
  TD_UNROLL for (int t = 0; t < T; t++) {
    const int8_t *at = x + (size_t)t * x_step;
    vi a = n_bytes == 2 ? bytes_of_x(at) : vi_zero(), b = bytes_of_x(at + 4 * (n_bytes - 1));
    if (n_bytes == 2) __asm__("" : "+v"(a)); // one load instead of one per multiplication
    __asm__("" : "+v"(b));
    TD_UNROLL for (int r = 0; r < R; r++) {
      group_sum *sum = &sums[r * T + t];
      if (n_bytes == 2) sum->a = _mm512_dpbusd_epi32(sum->a, w[r], a);
      sum->b = _mm512_dpbusd_epi32(sum->b, w[r], b);
    }
  }
}

// sum += four columns of VL rows of one token.
TD_INLINE void multiply_codes(vi codes, const int8_t *x, group_sum *sum) {
  sum->a = _mm512_dpbusd_epi32(sum->a, codes, bytes_of_x(x));
  sum->b = _mm512_dpbusd_epi32(sum->b, codes, bytes_of_x(x + 4));
}

// ---- one token ----------------------------------------------------------------------------------

// Vectors are 32 columns of two rows in formats that are decoded so.
#define ROW_SUMS IS_BY_ROW

// From the order of pack_columns, of n columns, to that of row_sums: of 32 columns a, then b.
TD_INLINE void order_x(const int8_t *x, uint32_t n, int8_t *out) {
  const vi order = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
  for (uint32_t k = 0; k < n; k += 32)
    _mm512_storeu_si512(out + 2 * k, _mm512_permutexvar_epi32(order, vi_load(x + 2 * k)));
}

TD_INLINE vi add_by_32(vi a, vi b) {
  return vi_add(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
}

TD_INLINE vi add_by_64(vi a, vi b) {
  return vi_add(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}

// The sums of VL rows over 32 columns, or over each half of them. signs: signs_of_rows.
TD_INLINE void row_sums(const td_dtype dtype, const int n_sums, const uint8_t *rows, size_t apart,
                        unsigned part, const int8_t *x, const uint32_t (*signs)[8], vi *sums) {
  const vi both = vi_load(x);
  const vi a = _mm512_shuffle_i64x2(both, both, 0x44), b = _mm512_shuffle_i64x2(both, both, 0xee);
  vi of[8]; // two rows each, so that the last shuffles put rows in order
  TD_UNROLL for (unsigned r = 0; r < 8; r++) {
    const unsigned one = r % 4 + r / 4 * 8, other = one + 4;
    const vi codes = _mm512_inserti64x4(
        _mm512_castsi256_si512(gguf_codes_with(dtype, rows + one * apart, part, signs[one])),
        gguf_codes_with(dtype, rows + other * apart, part, signs[other]), 1);
    of[r] = vi_sll(_mm512_dpbusd_epi32(vi_zero(), codes, a), 7);
    of[r] = _mm512_dpbusd_epi32(of[r], codes, b);
  }
  const vi low = add_by_64(add_by_32(of[0], of[1]), add_by_32(of[2], of[3]));
  const vi high = add_by_64(add_by_32(of[4], of[5]), add_by_32(of[6], of[7]));
  const vi first = _mm512_shuffle_i32x4(low, high, 0x88);
  const vi second = _mm512_shuffle_i32x4(low, high, 0xdd);
  sums[0] = n_sums == 1 ? vi_add(first, second) : first;
  if (n_sums > 1) sums[1] = second;
}
