// kernels/cpu/avx512fp16/kmajor_gptq.h - AutoGPTQ's layout for linear_kmajor.h: a word holds eight
// columns of one row.
// A cache line is eight columns of 16 rows. Code t of the 16-bit words gives columns t and t + 4,
// adjacent, of each row.
#pragma once

#include "kernels/cpu/avx512fp16/q4.h"
#include "kernels/cpu/common/scales.h"

enum {
  LINES = 8,
  LINE_ROWS = 16,
  VECTORS = LINES,
  ZEROS = 2 * VECTORS,
  TOTALS = VECTORS,
  TURN_COLS = 8,
  TURN_STEPS = 4,
  WORD_ROWS = 1,
  AHEAD = 24,
  NEAR = 6,
};

// A sum has at most 32 products.
#define X_SCALE 0.5f

// Steps of 16 columns, in pairs.
static inline void put_steps(__m256h x, uint32_t *out) {
  __m256i columns = _mm256_castph_si256(x);
  __m256i pairs = _mm256_unpacklo_epi16(columns, _mm256_srli_si256(columns, 8));
  _mm256_storeu_si256((__m256i *)out, pairs);
}

static void zeros_of(const td_weight *w, size_t group, uint32_t row0, const __mmask16 *mask,
                     vh zero[ZEROS]) {
  const size_t words_a_group = ((size_t)w->rows + 7) / 8;
  for (int i = 0; i < LINES; i++) {
    vi z = _mm512_set1_epi32(8);
    if (w->zero) {
      const vi place = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
      const uint32_t *from = w->zero + group * words_a_group + row0 / 8 + 2 * i;
      uint32_t first = mask[i] ? from[0] + w->zero_add : 0;
      uint32_t second = mask[i] >> 8 ? from[1] + w->zero_add : 0;
      z = _mm512_mask_set1_epi32(_mm512_set1_epi32((int)first), 0xff00, (int)second);
      z = _mm512_and_si512(_mm512_srlv_epi32(z, place), _mm512_set1_epi32(15));
    }
    q4_zero both = q4_zero_of(_mm512_or_si512(z, _mm512_slli_epi32(z, 16)));
    zero[2 * i] = both.even;
    zero[2 * i + 1] = both.odd;
  }
}

static void totals_from_rows(const float *rows, float *totals) {
  memcpy(totals, rows, TOTALS * VL * sizeof *totals);
}

static void rows_from_totals(const float *totals, float *rows) {
  memcpy(rows, totals, TOTALS * VL * sizeof *totals);
}

TD_INLINE void end_chain(vh sum, const float *scale, float *total) {
  vh transposed = _mm512_castsi512_ph(_mm512_rol_epi32(_mm512_castph_si512(sum), 16));
  vi both = _mm512_castph_si512(_mm512_add_ph(sum, transposed));
  vf wide = _mm512_cvtxph_ps(_mm256_castsi256_ph(_mm512_cvtepi32_epi16(both)));
  vf_store(total, vf_fma(wide, vf_load(scale), vf_load(total)));
}
