// kernels/cpu/linear/kmajor_gptq.h - AutoGPTQ's layout for linear_kmajor.h: a word holds eight
// columns of one row.
// Lanes are rows in order.
#pragma once

enum {
  STRIP = 64,
  VECTORS = STRIP / VL,
  RUN_COLS = 32,  // decoded, they fit L1
  WHOLE_COLS = 8, // granularity of columns
  AHEAD = 128,    // prefetch distance in columns
};

#include "kernels/cpu/linear/kmajor.h"

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

// k is a multiple of 8. The columns of a last word past n are decoded too, but not used.
static void decode(const td_weight *w, uint32_t row0, uint32_t n_rows, uint32_t k, uint32_t n,
                   const vf *zero, float *out) {
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
        nibbles_pair(word, i, Q4_TABLE(), &lo, &hi);
        vf_store(decoded_at(out, c + 2 * (uint32_t)i, v), vf_sub(lo, zero[v]));
        vf_store(decoded_at(out, c + 2 * (uint32_t)i + 1, v), vf_sub(hi, zero[v]));
      }
    }
  }
}

// sum[v] += products of n columns from k on, whole words. A load that continued into the next
// strip's line would have to wait for it.
TD_INLINE void dot_columns(const bool zeros, const td_weight *w, uint32_t row0, uint32_t k,
                           uint32_t n, const vf *zero, const float *x, vf *sum) {
  const uint32_t *words = (const uint32_t *)w->data + (size_t)k / 8 * w->rows + row0;
  vf acc[VECTORS];
  TD_UNROLL for (int v = 0; v < VECTORS; v++) acc[v] = sum[v];
  for (uint32_t c = 0; c < n; c += 8, words += w->rows) {
    TD_UNROLL for (int v = 0; v < VECTORS; v++) {
      vi word[4];
      vf lo, hi;
      __builtin_prefetch((const void *)((uintptr_t)(words + v * VL) + (size_t)AHEAD / 2 * w->rows),
                         0, 2);
      if (v < VECTORS - 1) {
        nibbles_load((const uint8_t *)(words + v * VL), Q4_TABLE(), word);
      } else {
        nibbles_load_n((const uint8_t *)(words + v * VL), sizeof(vi), Q4_TABLE(), word);
      }
      TD_UNROLL for (int i = 0; i < 4; i++) {
        nibbles_pair(word, i, Q4_TABLE(), &lo, &hi);
        acc[v] = vf_fma(zeros ? vf_sub(lo, zero[v]) : lo, vf_set1(x[c + 2 * i]), acc[v]);
        acc[v] = vf_fma(zeros ? vf_sub(hi, zero[v]) : hi, vf_set1(x[c + 2 * i + 1]), acc[v]);
      }
    }
  }
  TD_UNROLL for (int v = 0; v < VECTORS; v++) sum[v] = acc[v];
}
