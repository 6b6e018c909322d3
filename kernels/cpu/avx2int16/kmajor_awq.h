// kernels/cpu/avx2int16/kmajor_awq.h - AutoAWQ's layout for linear_kmajor.h: a word holds eight
// rows of one column.
// The words of two columns are interleaved by 16 bits; lower halves hold rows 0 2 4 6, upper halves
// rows 1 3 5 7. Lanes 2 l and 2 l + 1 of vector 4 h + i are rows 2 i and 2 i + 1 of word 2 h + {0,
// 1, 4, 5}[l].
#pragma once

#include "kernels/cpu/avx2int16/kmajor.h"

enum { WORD_COLS = 1, WORD_ROWS = 8 };

#define X_PAIRS PAIRS_BESIDE

static inline const uint32_t *word_at(const td_weight *w, uint32_t row, uint32_t k) {
  return (const uint32_t *)w->data + (size_t)k * (w->rows / WORD_ROWS) + row / WORD_ROWS;
}

// Half h of a part's vectors.
TD_INLINE vi interleaved(const int h, vi even, vi odd) {
  return h == 0 ? _mm256_unpacklo_epi16(even, odd) : _mm256_unpackhi_epi16(even, odd);
}

// Pair i of an octet of columns, for vector v of a part's rows. words: the part's.
TD_INLINE vi codes_of(const int v, const int i, const uint32_t *words, size_t step) {
  const vi even = vi_load(words + (size_t)(2 * i) * step);
  const vi odd = vi_load(words + (size_t)(2 * i + 1) * step);
  return codes_at(interleaved(v / 4, even, odd), 4 * (v % 4));
}

// Zero points from a part's words.
static void zeros_of(const uint32_t *words, uint32_t add, vi zero[PART_VECTORS]) {
  (void)add;
  const vi even = vi_load(words);
  TD_UNROLL for (int v = 0; v < PART_VECTORS; v++) {
    zero[v] = codes_at(interleaved(v / 4, even, _mm256_setzero_si256()), 4 * (v % 4));
  }
}

// Transposes the rows of four words as pairs: pair i of word l becomes pair l of vector i, or back.
TD_INLINE void turn_pairs(const __m256d in[4], __m256d out[4]) {
  const __m256d ab0 = _mm256_unpacklo_pd(in[0], in[1]), ab1 = _mm256_unpackhi_pd(in[0], in[1]);
  const __m256d cd0 = _mm256_unpacklo_pd(in[2], in[3]), cd1 = _mm256_unpackhi_pd(in[2], in[3]);
  out[0] = _mm256_permute2f128_pd(ab0, cd0, 0x20);
  out[1] = _mm256_permute2f128_pd(ab1, cd1, 0x20);
  out[2] = _mm256_permute2f128_pd(ab0, cd0, 0x31);
  out[3] = _mm256_permute2f128_pd(ab1, cd1, 0x31);
}

// The part's word that is number l of half h.
TD_INLINE int word_of(const int h, const int l) {
  return 2 * h + l / 2 * 4 + l % 2;
}

static inline void rows_to_lanes(const float *rows, float *lanes) {
  TD_UNROLL for (int h = 0; h < 2; h++) {
    __m256d in[4], out[4];
    TD_UNROLL for (int l = 0; l < 4; l++) {
      in[l] = _mm256_castps_pd(vf_load(rows + word_of(h, l) * 8));
    }
    turn_pairs(in, out);
    TD_UNROLL for (int i = 0; i < 4; i++) {
      vf_store(lanes + (4 * h + i) * VL, _mm256_castpd_ps(out[i]));
    }
  }
}

static inline void lanes_to_rows(const float *lanes, float *rows) {
  TD_UNROLL for (int h = 0; h < 2; h++) {
    __m256d in[4], out[4];
    TD_UNROLL for (int i = 0; i < 4; i++) {
      in[i] = _mm256_castps_pd(vf_load(lanes + (4 * h + i) * VL));
    }
    turn_pairs(in, out);
    TD_UNROLL for (int l = 0; l < 4; l++) {
      vf_store(rows + word_of(h, l) * 8, _mm256_castpd_ps(out[l]));
    }
  }
}
