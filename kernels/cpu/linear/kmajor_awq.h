// kernels/cpu/linear/kmajor_awq.h - AutoAWQ's layout for linear_kmajor.h: a word holds eight rows
// of one column.
// The eight vectors of a strip are the eight nibble positions of VL words. A column of a strip is
// two cache lines.
#pragma once

enum {
  STRIP = 256,
  VECTORS = STRIP / VL,
  RUN_COLS = 16,  // decoded, they fit L1
  WHOLE_COLS = 1, // granularity of columns
  PASS_COLS = 32,
  AHEAD = 48, // prefetch distance in columns
};

#include "kernels/cpu/linear/kmajor.h"

// The row, of a word's eight, that is at nibble position place.
static inline uint32_t awq_row(uint32_t place) {
  return place % 4 * 2 + place / 4;
}

static inline uint32_t row_of(uint32_t lane) {
  return lane / (8 * VL) * (8 * VL) + lane % VL * 8 + awq_row(lane / VL % 8);
}

static inline const uint32_t *words_at(const td_weight *w, uint32_t row0, uint32_t k) {
  return (const uint32_t *)w->data + (size_t)k * (w->rows / 8) + row0 / 8;
}

// Prefetches both lines together, since they are adjacent in memory.
static inline void fetch_column(const uint32_t *words) {
  __builtin_prefetch(words, 0, 2);
  __builtin_prefetch(words + 16, 0, 2);
}

// Unpacks VL words of column k, of rows from row0 + s on. Words past row n_rows of the strip are
// not read.
TD_INLINE void unpack(const uint32_t *words, uint32_t s, uint32_t n_rows, vf out[8]) {
  vi v[4];
  load_words((const uint8_t *)(words + s / 8), n_rows > s ? (n_rows - s) / 8 * sizeof *words : 0,
             v);
  TD_UNROLL for (int i = 0; i < 4; i++)
      nibbles_pair(v, i, Q4_TABLE(), &out[2 * i], &out[2 * i + 1]);
}

static void zeros_of(const td_weight *w, size_t group, uint32_t row0, uint32_t n_rows, vf *zero) {
  for (int v = 0; v < VECTORS; v++)
    zero[v] = vf_zero();
  for (uint32_t s = 0; w->zero && s < STRIP; s += 8 * VL)
    unpack(w->zero + group * (w->rows / 8) + row0 / 8, s, n_rows, zero + s / VL);
}

static void scales_of(const td_weight *w, size_t group, uint32_t row0, uint32_t n_rows, vf *scale) {
  _Alignas(64) float found[STRIP] = {0}, ordered[8 * VL];
  size_t at = group * w->rows + row0, n = td_weight_groups(w) * w->rows;
  const char *from = (const char *)w->scale + at * td_dtype_bytes(w->scale_dtype);
  scales_to_f32(from, w->scale_dtype, n - at, n_rows, found);
  for (uint32_t s = 0; s < STRIP; s += 8 * VL, scale += 8) {
    vf_order8(found + s, ordered, VL);
    for (uint32_t v = 0; v < 8; v++)
      scale[v] = vf_load(ordered + awq_row(v) * VL);
  }
}

static void decode(const td_weight *w, uint32_t row0, uint32_t n_rows, uint32_t k, uint32_t n,
                   const vf *zero, float *out) {
  const uint32_t *words = words_at(w, row0, k);
  for (uint32_t c = 0; c < n; c++, words += w->rows / 8) {
    fetch_column(words + (size_t)AHEAD * (w->rows / 8));
    for (uint32_t s = 0; s < STRIP; s += 8 * VL) {
      vf value[8];
      unpack(words, s, n_rows, value);
      TD_UNROLL for (uint32_t v = 0; v < 8; v++) {
        vf_store(decoded_at(out, c, s / VL + v), vf_sub(value[v], zero[s / VL + v]));
      }
    }
  }
}

// sum[v] += products of n columns from k on. A load that continued into the next strip's line would
// have to wait for it. Registers may require several passes over a run of columns; prefetches are
// spread evenly over those.
TD_INLINE void dot_columns(const bool zeros, const td_weight *w, uint32_t row0, uint32_t k,
                           uint32_t n, const vf *zero, const float *x, vf *sum) {
  enum { IN_REGISTERS = VL, PASSES = VECTORS / IN_REGISTERS };
  const size_t step = w->rows / 8, ahead = AHEAD * step;
  for (uint32_t begin = 0; begin < n; begin += PASS_COLS) {
    uint32_t end = n - begin < PASS_COLS ? n : begin + PASS_COLS;
    for (uint32_t pass = 0; pass < PASSES; pass++, sum += IN_REGISTERS, zero += IN_REGISTERS) {
      const uint32_t *strip = words_at(w, row0, k + begin),
                     *words = strip + pass * (IN_REGISTERS / 8 * VL);
      vf acc[IN_REGISTERS];
      TD_UNROLL for (int i = 0; i < IN_REGISTERS; i++) acc[i] = sum[i];
      for (uint32_t c = begin; c < end; c++, words += step, strip += step) {
        vf xv = vf_set1(x[c]);
        vi v[4];
        if (c % PASSES == pass) fetch_column(strip + ahead);
        TD_UNROLL for (int i = 0; i < IN_REGISTERS; i += 2) {
          vf lo, hi;
          if (i % 8 == 0)
            nibbles_load_n((const uint8_t *)(words + i / 8 * VL), sizeof(vi), Q4_TABLE(), v);
          nibbles_pair(v, i % 8 / 2, Q4_TABLE(), &lo, &hi);
          acc[i] = vf_fma(zeros ? vf_sub(lo, zero[i]) : lo, xv, acc[i]);
          acc[i + 1] = vf_fma(zeros ? vf_sub(hi, zero[i + 1]) : hi, xv, acc[i + 1]);
        }
      }
      TD_UNROLL for (int i = 0; i < IN_REGISTERS; i++) sum[i] = acc[i];
    }
    sum -= VECTORS;
    zero -= VECTORS;
  }
}
