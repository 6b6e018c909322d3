// kernels/cpu/cols_awq.h - AutoAWQ's words of eight rows of one column, for linear_cols.h. Vector v
// of a strip is place v of VL words.
#ifndef KERNELS_CPU_COLS_AWQ_H
#define KERNELS_CPU_COLS_AWQ_H

#include "kernels/cpu/q4.h"

enum {
  VECTORS = 8,
  STRIP = VECTORS * VL,
  AHEAD = 48, // columns between what is used and what is fetched
};

// Of the eight rows of a word, the one that place has.
static inline uint32_t awq_row(uint32_t place) {
  return place % 4 * 2 + place / 4;
}

static inline uint32_t row_of(uint32_t lane) {
  return lane % VL * 8 + awq_row(lane / VL);
}

TD_INLINE void unpack(const uint32_t *words, uint32_t n_rows, vf out[VECTORS]) {
  vi v[4];
  load_words((const uint8_t *)words, n_rows / 8 * sizeof *words, v);
  TD_UNROLL for (int i = 0; i < 4; i++) Q4_CODES(pair)(v, i, &out[2 * i], &out[2 * i + 1]);
}

static void zeros_of(const td_weight *w, size_t group, uint32_t row0, uint32_t n_rows, vf *zero) {
  for (int v = 0; v < VECTORS; v++)
    zero[v] = vf_zero();
  if (w->zero) unpack(w->zero + group * (w->rows / 8) + row0 / 8, n_rows, zero);
}

static void scales_of(const td_weight *w, size_t group, uint32_t row0, uint32_t n_rows, vf *scale) {
  _Alignas(64) float found[STRIP] = {0}, ordered[STRIP];
  size_t at = group * w->rows + row0, n = td_weight_groups(w) * w->rows;
  const char *from = (const char *)w->scale + at * td_dtype_bytes(w->scale_dtype);
  scales_to_f32(from, w->scale_dtype, n - at, n_rows, found);
  vf_order8(found, ordered, VL);
  for (uint32_t v = 0; v < VECTORS; v++)
    scale[v] = vf_load(ordered + awq_row(v) * VL);
}

static void decode(const td_weight *w, uint32_t row0, uint32_t n_rows, uint32_t k, uint32_t n,
                   const vf *zero, float (*out)[STRIP]) {
  const uint32_t *words = (const uint32_t *)w->data + row0 / 8;
  for (uint32_t c = 0; c < n; c++) {
    vf value[VECTORS];
    const uint32_t *at = words + (size_t)(k + c) * (w->rows / 8);
    __builtin_prefetch((const void *)((uintptr_t)at + (size_t)AHEAD * w->rows / 2));
    unpack(at, n_rows, value);
    TD_UNROLL for (int v = 0; v < VECTORS; v++) {
      vf_store(&out[c][v * VL], vf_sub(value[v], zero[v]));
    }
  }
}

#endif
