// kernels/cpu/cols_gptq.h - AutoGPTQ's words of eight columns of one row, for linear_cols.h. Lanes
// are rows in their order.
#ifndef KERNELS_CPU_COLS_GPTQ_H
#define KERNELS_CPU_COLS_GPTQ_H

#include "kernels/cpu/q4.h"

enum {
  VECTORS = 4,
  STRIP = VECTORS * VL,
  AHEAD = 128, // columns between what is used and what is fetched
};

static inline uint32_t row_of(uint32_t lane) {
  return lane;
}

static void zeros_of(const td_weight *w, size_t group, uint32_t row0, uint32_t n_rows, vf *zero) {
  _Alignas(64) float value[STRIP] = {0};
  size_t words_a_group = ((size_t)w->rows + 7) / 8;
  for (uint32_t j = 0; w->zero && j < (n_rows + 7) / 8; j++) {
    uint32_t word = w->zero[group * words_a_group + row0 / 8 + j] + w->zero_add;
    for (uint32_t i = 0; i < 8; i++)
      value[8 * j + i] = (float)((int)(word >> 4 * i & 15) - 8);
  }
  for (int v = 0; v < VECTORS; v++)
    zero[v] = vf_load(value + v * VL);
}

static void scales_of(const td_weight *w, size_t group, uint32_t row0, uint32_t n_rows, vf *scale) {
  _Alignas(64) float value[STRIP] = {0};
  size_t at = group * w->rows + row0, n = td_weight_groups(w) * w->rows;
  const char *from = (const char *)w->scale + at * td_dtype_bytes(w->scale_dtype);
  scales_to_f32(from, w->scale_dtype, n - at, n_rows, value);
  for (int v = 0; v < VECTORS; v++)
    scale[v] = vf_load(value + v * VL);
}

// k is a multiple of 8. What a last word has behind column n is decoded, too, and not used.
static void decode(const td_weight *w, uint32_t row0, uint32_t n_rows, uint32_t k, uint32_t n,
                   const vf *zero, float (*out)[STRIP]) {
  for (uint32_t c = 0; c < n; c += 8) {
    const uint32_t *words = (const uint32_t *)w->data + (size_t)(k + c) / 8 * w->rows + row0;
    for (uint32_t v = 0; v < VECTORS; v++) {
      __builtin_prefetch((const void *)((uintptr_t)(words + v * VL) + (size_t)AHEAD / 2 * w->rows));
      uint32_t n_words = n_rows > v * VL ? n_rows - v * VL : 0;
      vi word[4];
      load_words((const uint8_t *)(words + v * VL), (n_words < VL ? n_words : VL) * sizeof *words,
                 word);
      TD_UNROLL for (int i = 0; i < 4; i++) {
        vf lo, hi;
        Q4_CODES(pair)(word, i, &lo, &hi);
        vf_store(&out[c + 2 * i][v * VL], vf_sub(lo, zero[v]));
        vf_store(&out[c + 2 * i + 1][v * VL], vf_sub(hi, zero[v]));
      }
    }
  }
}

#endif
