// kernels/cpu/avx2int16/kmajor_gptq.h - AutoGPTQ's layout for linear_kmajor.h: a word holds eight
// columns of one row; the next word is the next row's.
// Lanes are rows in stored order.
#pragma once

#include "kernels/cpu/avx2int16/kmajor.h"

enum { WORD_COLS = 8, WORD_ROWS = 1 };

#define X_PAIRS PAIRS_APART

static inline const uint32_t *word_at(const td_weight *w, uint32_t row, uint32_t k) {
  return (const uint32_t *)w->data + (size_t)k / WORD_COLS * w->rows + row;
}

// Pair i of an octet of columns, for vector v of a part's rows. words: the part's.
TD_INLINE vi codes_of(const int v, const int i, const uint32_t *words, size_t step) {
  (void)step;
  return codes_at(vi_load(words + v * VL), 4 * i);
}

// Zero points from a part's words.
static void zeros_of(const uint32_t *words, uint32_t add, vi zero[PART_VECTORS]) {
  for (int v = 0; v < PART_VECTORS; v++) {
    const uint32_t word = words[v] + add;
    zero[v] = _mm256_and_si256(vi_spread4(&word), _mm256_set1_epi32(15));
  }
}

static inline void rows_to_lanes(const float *rows, float *lanes) {
  memcpy(lanes, rows, PART * sizeof *rows);
}

static inline void lanes_to_rows(const float *lanes, float *rows) {
  memcpy(rows, lanes, PART * sizeof *lanes);
}
