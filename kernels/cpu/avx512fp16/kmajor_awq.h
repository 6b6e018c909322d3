// kernels/cpu/avx512fp16/kmajor_awq.h - AutoAWQ's layout for linear_kmajor.h: a word holds eight
// rows of one column.
// A cache line is 128 rows of a column. Code t of the 16-bit words gives rows 8 j + 2 t and 8 j + 2
// t + 1 of each word j, adjacent.
#pragma once

#include "kernels/cpu/avx512fp16/q4.h"
#include "kernels/cpu/common/scales.h"

enum {
  LINES = 2,
  LINE_ROWS = 128,
  VECTORS = 4 * LINES,
  ZEROS = VECTORS,
  TOTALS = 2 * VECTORS,
  TURN_COLS = 1,
  TURN_STEPS = 1,
  WORD_ROWS = 8,
  AHEAD = 64,
  NEAR = 16,
};

// A sum has at most 16 products.
#define X_SCALE 1.0f

// Steps of 16 columns, the same in both halves of a pair.
static inline void put_steps(__m256h x, uint32_t *out) {
  vi low = _mm512_cvtepu16_epi32(_mm256_castph_si256(x));
  _mm512_storeu_si512(out, _mm512_or_si512(low, _mm512_slli_epi32(low, 16)));
}

static void zeros_of(const td_weight *w, size_t group, uint32_t row0, const __mmask16 *mask,
                     vh zero[ZEROS]) {
  for (int i = 0; i < LINES; i++) {
    vi words = _mm512_set1_epi32((int)0x88888888);
    if (w->zero) {
      const uint32_t *from = w->zero + group * (w->rows / 8) + row0 / 8 + i * VL;
      words = _mm512_maskz_loadu_epi32(mask[i], from);
    }
    for (int t = 0; t < 4; t++) {
      vi z = _mm512_and_si512(_mm512_srli_epi16(words, (unsigned)(4 * t)), _mm512_set1_epi16(15));
      zero[4 * i + t] = t % 2 ? q4_zero_of(z).odd : q4_zero_of(z).even;
    }
  }
}

// Reorders the rows of half a line, four vectors of pairs, to the order of codes, or back: pair i
// of the rows is code i % 4 of word i / 4.
static inline void rows_to_codes(const float *rows, float *codes) {
  const vi even = _mm512_setr_epi64(0, 4, 8, 12, 1, 5, 9, 13);
  const vi odd = _mm512_setr_epi64(2, 6, 10, 14, 3, 7, 11, 15);
  __m512d a = _mm512_loadu_pd(rows), b = _mm512_loadu_pd(rows + VL);
  __m512d c = _mm512_loadu_pd(rows + 2 * VL), d = _mm512_loadu_pd(rows + 3 * VL);
  __m512d ab01 = _mm512_permutex2var_pd(a, even, b), ab23 = _mm512_permutex2var_pd(a, odd, b);
  __m512d cd01 = _mm512_permutex2var_pd(c, even, d), cd23 = _mm512_permutex2var_pd(c, odd, d);
  _mm512_storeu_pd(codes, _mm512_shuffle_f64x2(ab01, cd01, 0x44));
  _mm512_storeu_pd(codes + 2 * VL, _mm512_shuffle_f64x2(ab01, cd01, 0xee));
  _mm512_storeu_pd(codes + 4 * VL, _mm512_shuffle_f64x2(ab23, cd23, 0x44));
  _mm512_storeu_pd(codes + 6 * VL, _mm512_shuffle_f64x2(ab23, cd23, 0xee));
}

static inline void codes_to_rows(const float *codes, float *rows) {
  const vi first = _mm512_setr_epi64(0, 4, 8, 12, 1, 5, 9, 13);
  const vi second = _mm512_setr_epi64(2, 6, 10, 14, 3, 7, 11, 15);
  __m512d a = _mm512_loadu_pd(codes), b = _mm512_loadu_pd(codes + 2 * VL);
  __m512d c = _mm512_loadu_pd(codes + 4 * VL), d = _mm512_loadu_pd(codes + 6 * VL);
  __m512d ab = _mm512_shuffle_f64x2(a, b, 0x44), cd = _mm512_shuffle_f64x2(c, d, 0x44);
  _mm512_storeu_pd(rows, _mm512_permutex2var_pd(ab, first, cd));
  _mm512_storeu_pd(rows + VL, _mm512_permutex2var_pd(ab, second, cd));
  ab = _mm512_shuffle_f64x2(a, b, 0xee), cd = _mm512_shuffle_f64x2(c, d, 0xee);
  _mm512_storeu_pd(rows + 2 * VL, _mm512_permutex2var_pd(ab, first, cd));
  _mm512_storeu_pd(rows + 3 * VL, _mm512_permutex2var_pd(ab, second, cd));
}

// Total 2 v has the first half of vector v's rows, 2 v + 1 the second half.
static void totals_from_rows(const float *rows, float *totals) {
  for (int i = 0; i < 2 * LINES; i++)
    rows_to_codes(rows + i * 4 * VL, totals + i / 2 * 8 * VL + i % 2 * VL);
}

static void rows_from_totals(const float *totals, float *rows) {
  for (int i = 0; i < 2 * LINES; i++)
    codes_to_rows(totals + i / 2 * 8 * VL + i % 2 * VL, rows + i * 4 * VL);
}

TD_INLINE void end_chain(vh sum, const float *scale, float *total) {
  vf lo, hi;
  vh_widen(sum, &lo, &hi);
  vf_store(total, vf_fma(lo, vf_load(scale), vf_load(total)));
  vf_store(total + VL, vf_fma(hi, vf_load(scale + VL), vf_load(total + VL)));
}
