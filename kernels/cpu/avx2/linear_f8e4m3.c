// kernels/cpu/avx2/linear_f8e4m3.c - FP8 weights with scales; see linear_vec.h.
#include <stdbool.h>

#include "kernels/cpu/avx2/vec.h"

typedef uint8_t elem;
enum { HAS_SCALES = 1, DOWN = 1 << 20, GROUP = 64 };

typedef struct {
  const elem *at;
} codes;

static inline codes load_codes(const elem *w) {
  return (codes){w};
}

static inline codes load_codes_n(const elem *w, uint32_t n, elem room[GROUP]) {
  memset(room, 0, GROUP);
  memcpy(room, w, n);
  return (codes){room};
}

// Largest magnitude at each byte position over 32-code groups so far, with the sign bit set.
typedef __m256i watched;

static inline watched watch_none(void) {
  return _mm256_setzero_si256();
}

static inline __attribute__((always_inline)) watched watch(watched seen, const codes *c, int j) {
  __m256i bytes = _mm256_loadu_si256((const __m256i *)(c->at + j / 4 * 32));
  return _mm256_max_epu8(seen, _mm256_or_si256(bytes, _mm256_set1_epi8((char)0x80)));
}

static inline bool watched_nan(watched seen) {
  return _mm256_movemask_epi8(_mm256_cmpeq_epi8(seen, _mm256_set1_epi8(-1))) != 0;
}

static inline bool has_nan(const codes *c) {
  return watched_nan(watch(watch(watch_none(), c, 0), c, 4));
}

static inline bool plain(int n, const codes *c) {
  (void)n;
  return !has_nan(c);
}

// Byte j of every lane as its weight times 2^-120, except that NaN comes out as 480 times that. A
// code in the top of a 16-bit half, arithmetically shifted right by 4, has its sign, exponent and
// fraction where BF16 has them; two halves make a lane. Zeros and subnormals come out right too.
// Inlined so that common parts are computed once.
static inline __attribute__((always_inline)) vf byte_of(__m256i bytes, int j) {
  if (j % 2 == 0) bytes = _mm256_slli_epi16(bytes, 8);
  const __m256i keep = _mm256_set1_epi16((short)0x87f0);
  const __m256i halves = _mm256_and_si256(_mm256_srai_epi16(bytes, 4), keep);
  return _mm256_castsi256_ps(j < 2 ? _mm256_slli_epi32(halves, 16)
                                   : _mm256_and_si256(halves, _mm256_set1_epi32((int)0xffff0000)));
}

// Vector j has column 4 i + j % 4 of half a group in lane i.
static inline __attribute__((always_inline)) vf vector_of(const codes *c, int j) {
  return byte_of(_mm256_loadu_si256((const __m256i *)(c->at + j / 4 * 32)), j % 4);
}

static inline vf any_vector_of(const codes *c, int j) {
  return vector_of(c, j);
}

// Moves columns 4 i + j of half a group's four vectors to lane i of vector j.
static inline void order_half(vf v[4]) {
  vf a = _mm256_permute2f128_ps(v[0], v[2], 0x20), b = _mm256_permute2f128_ps(v[0], v[2], 0x31);
  vf c = _mm256_permute2f128_ps(v[1], v[3], 0x20), d = _mm256_permute2f128_ps(v[1], v[3], 0x31);
  vf ab = _mm256_unpacklo_ps(a, b), cd = _mm256_unpacklo_ps(c, d);
  v[0] = _mm256_shuffle_ps(ab, cd, 0x44);
  v[1] = _mm256_shuffle_ps(ab, cd, 0xee);
  ab = _mm256_unpackhi_ps(a, b), cd = _mm256_unpackhi_ps(c, d);
  v[2] = _mm256_shuffle_ps(ab, cd, 0x44);
  v[3] = _mm256_shuffle_ps(ab, cd, 0xee);
}

static inline void order_x(vf v[8]) {
  order_half(v);
  order_half(v + 4);
}
#define ORDER_X order_x
#define SHARED  4

// Range of x in which products are normal numbers and x is finite after X_UP.
#define X_UP         0x1p100f
#define X_FITS_FROM  0x1p-97f
#define X_FITS_TO    0x1p27f
#define NATURAL_DOWN 256

// Columns in order, times 2^-8; NaN comes out as 1.875. The code's bits are an F16 with an exponent
// too low by eight, and F16C conversion handles subnormals.
static inline vf natural_of(const codes *c, int j) {
  __m256i half = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(c->at + j / 2 * 16)));
  half = _mm256_and_si256(_mm256_slli_epi16(half, 7), _mm256_set1_epi16((short)0xbf80));
  return _mm256_cvtph_ps(j % 2 == 0 ? _mm256_castsi256_si128(half)
                                    : _mm256_extracti128_si256(half, 1));
}

#include "kernels/cpu/linear/linear_vec.h"

enum { DWORD_COLS = 4 };

static inline void columns_of(vi dwords, vf out[4]) {
  for (int j = 0; j < 4; j++)
    out[j] = vf_mul(byte_of(dwords, j), vf_set1(0x1p120f));
  const vi nan = _mm256_cmpeq_epi8(_mm256_or_si256(dwords, _mm256_set1_epi8((char)0x80)),
                                   _mm256_set1_epi8(-1));
  if (__builtin_expect(_mm256_movemask_epi8(nan) == 0, 1)) return;
  for (int j = 0; j < 4; j++) {
    vi of_column = _mm256_srai_epi32(_mm256_slli_epi32(nan, 24 - 8 * j), 24);
    out[j] = _mm256_or_ps(out[j], _mm256_castsi256_ps(of_column));
  }
}

#include "kernels/cpu/avx2/gemm_prompt.h"

void linear_f8e4m3__avx2(const td_linear_args *args) {
  if (args->prompt && prompt_fits(args->w)) {
    linear_prompt(args);
  } else {
    linear_vec(args);
  }
}
