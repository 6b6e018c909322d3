// kernels/cpu/avx512bf16/linear_f8e4m3.c - FP8 weights with scales; see linear_rows.h.
// Two permutations of tables of 128 bytes give the upper and the lower byte of a code's BF16
// number, subnormal numbers and NaN included, of which the upper one takes the code's sign.
#include "kernels/cpu/avx512bf16/vec.h"

typedef uint8_t elem;
enum { HAS_SCALES = 1 };

static inline vi load_line(const elem *w) {
  return _mm512_loadu_si512(w);
}

static inline vi load_line_n(const elem *w, uint32_t n) {
  return _mm512_maskz_loadu_epi8(((__mmask64)1 << n) - 1, w);
}

// E(e, i): what i of 0 to 7 makes of exponent field e, one line of a table.
#define EIGHT(E, e) E(e, 0), E(e, 1), E(e, 2), E(e, 3), E(e, 4), E(e, 5), E(e, 6), E(e, 7)
#define ALL_CODES(S, E)                                                                            \
  EIGHT(S, 0), EIGHT(E, 1), EIGHT(E, 2), EIGHT(E, 3), EIGHT(E, 4), EIGHT(E, 5), EIGHT(E, 6),       \
      EIGHT(E, 7), EIGHT(E, 8), EIGHT(E, 9), EIGHT(E, 10), EIGHT(E, 11), EIGHT(E, 12),             \
      EIGHT(E, 13), EIGHT(E, 14), EIGHT(E, 15)
// BF16's bits of 2^(e - 7) (1 + i / 8), of i 2^-9 and, in place of 480, of NaN.
#define NORMAL(e, i) ((e) == 15 && (i) == 7 ? 0x7fc0 : (120 + (e)) << 7 | (i) << 4)
#define SUBNORMAL(e, i)                                                                            \
  ((i) == 0 ? 0 : (i) < 2 ? 118 << 7 : (i) < 4 ? 119 << 7 | ((i)-2) << 6 : 120 << 7 | ((i)-4) << 5)
#define UPPER(e, i)           NORMAL(e, i) >> 8
#define LOWER(e, i)           NORMAL(e, i) & 0xff
#define UPPER_SUBNORMAL(e, i) SUBNORMAL(e, i) >> 8
#define LOWER_SUBNORMAL(e, i) SUBNORMAL(e, i) & 0xff

static const _Alignas(64) uint8_t upper[128] = {ALL_CODES(UPPER_SUBNORMAL, UPPER)};
static const _Alignas(64) uint8_t lower[128] = {ALL_CODES(LOWER_SUBNORMAL, LOWER)};

static inline vi look_up(const uint8_t *table, vi line) {
  return _mm512_permutex2var_epi8(_mm512_load_si512(table), line, _mm512_load_si512(table + 64));
}

// Vector j has eights of columns: those of 16 i + 8 j, i < 4.
static inline pv vector_of(vi line, int j) {
  vi high = look_up(upper, line), low = look_up(lower, line);
  high = _mm512_ternarylogic_epi32(high, line, _mm512_set1_epi8((char)0x80), 0xf8); // a | b & c
  return pv_of(j == 0 ? _mm512_unpacklo_epi8(low, high) : _mm512_unpackhi_epi8(low, high));
}

static inline void put_x(const vf v[4], packed *out, size_t step) {
  const vi even = _mm512_setr_epi64(0, 1, 4, 5, 8, 9, 12, 13);
  const vi odd = _mm512_setr_epi64(2, 3, 6, 7, 10, 11, 14, 15);
  vi first = pv_from_vf(v[0], v[1]), second = pv_from_vf(v[2], v[3]);
  pv_store(out, pv_of(_mm512_permutex2var_epi64(first, even, second)));
  pv_store(out + step, pv_of(_mm512_permutex2var_epi64(first, odd, second)));
}

#include "kernels/cpu/x_range.h"
#include "kernels/decl.h"

static inline void linear_exact(const td_linear_args *args) {
  linear_f8e4m3__avx512(args);
}

// The smallest weight that is not 0 is 2^-9.
#define LEAST X_LEAST

static inline vi look(vi seen, vi line) {
  (void)line;
  return seen;
}

static inline bool is_tiny(vi seen) {
  (void)seen;
  return false;
}

#include "kernels/cpu/avx512bf16/linear_rows.h"

void linear_f8e4m3__avx512bf16(const td_linear_args *args) {
  linear_rows(args);
}
