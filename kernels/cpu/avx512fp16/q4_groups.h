// kernels/cpu/avx512fp16/q4_groups.h - scales and zero points of a row's groups, for the lanes of
// q4.h.
// Those of a window are converted to F32 (zero points: to 16-bit integers) and listed: one entry
// for each group inside a window, or one per block of 16 columns if groups do not divide windows.
// Longer groups have one entry per 2^shift windows.
#pragma once

#include "kernels/cpu/avx512fp16/q4.h"
#include "kernels/cpu/common/scales.h"

// How list entries map to lanes. The two halves of a window's steps may have different groups, see
// q4.h.
typedef struct {
  uint32_t per_window, shift;
  bool halves; // the halves have different groups
  bool folds;  // see q4_folds
  bool stored; // the list is as stored; otherwise entries are repeated
  size_t of_row, in_all;
  vi lo[2], hi[2]; // list indices for lanes 0-15 and 16-31 in each half
  vi both[2];      // the same as 16-bit indices
} q4_groups;

// Whether every block of 16 columns has a single scale.
static inline bool q4_groups_fit(const td_weight *w) {
  return w->scale_cols % 16 == 0 || w->scale_cols >= w->cols;
}

// Whether the halves of a window's steps have different groups.
static inline bool q4_halves(const td_weight *w) {
  return w->scale_cols % 32 != 0 && w->scale_cols < w->cols;
}

// Whether lanes i and i + 16 always have the same scale.
static inline bool q4_folds(const td_weight *w) {
  return w->scale_cols % 128 == 0 || w->scale_cols >= w->cols;
}

static q4_groups q4_groups_of(const td_weight *w) {
  // The block of each lane in the first half of the steps; the second half has the block after it.
  static const uint16_t block_of[VHL] = {0,  8,  16, 24, 0,  8,  16, 24, 2,  10, 18,
                                         26, 2,  10, 18, 26, 4,  12, 20, 28, 4,  12,
                                         20, 28, 6,  14, 22, 30, 6,  14, 22, 30};
  uint32_t size = w->scale_cols;
  q4_groups g = {.per_window = 1, .stored = true, .folds = q4_folds(w)};
  g.of_row = td_weight_groups(w);
  g.in_all = g.of_row * w->rows;
  if (size >= w->cols) {
    g.shift = 31;
  } else if (size % Q4_WINDOW == 0 && (size & (size - 1)) == 0) {
    while ((uint32_t)Q4_WINDOW << g.shift < size)
      g.shift++;
  } else {
    g.stored = Q4_WINDOW % size == 0;
    g.per_window = g.stored ? Q4_WINDOW / size : Q4_BLOCKS;
    g.halves = q4_halves(w);
  }
  for (uint32_t half = 0; half < 2; half++) {
    vi block = _mm512_add_epi16(vi_load(block_of), _mm512_set1_epi16((short)(g.halves && half)));
    vi at = _mm512_mullo_epi16(block, _mm512_set1_epi16((short)g.per_window));
    at = _mm512_srli_epi16(at, 5); // divides by Q4_BLOCKS
    g.both[half] = at;
    g.lo[half] = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(at));
    g.hi[half] = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(at, 1));
  }
  return g;
}
_Static_assert(Q4_BLOCKS == 1 << 5, "for the shift");

// Columns [k, k + n), k at the start of a window, and their groups in each row.
typedef struct {
  uint32_t k, n, n_windows;
  uint32_t begin, n_stored; // groups
  uint32_t first;           // window, counted from the start of the first group, at which k is
  uint32_t n_listed;        // entries that the list needs
} q4_band;

static q4_band q4_band_of(const td_weight *w, const q4_groups *g, uint32_t k, uint32_t n) {
  q4_band band = {.k = k, .n = n, .n_windows = (n + Q4_WINDOW - 1) / Q4_WINDOW};
  band.begin = k / w->scale_cols;
  band.n_stored = (k + n - 1) / w->scale_cols - band.begin + 1;
  band.first = g->shift < 31 ? k / Q4_WINDOW & ((1u << g->shift) - 1) : 0;
  band.n_listed = g->shift ? band.n_stored : band.n_windows * g->per_window;
  return band;
}

// Index of a window's first list entry.
TD_INLINE uint32_t q4_list_at(const q4_groups *g, const q4_band *band, uint32_t window) {
  return ((window + band->first) >> g->shift) * g->per_window;
}

// The band's group for entry i of a list that is not as stored; n_stored past the row's end.
static uint32_t q4_group_of(const td_weight *w, const q4_band *band, uint32_t i) {
  uint32_t column = i * 16;
  return column < band->n ? (band->k + column) / w->scale_cols - band->begin : band->n_stored;
}

// Lists have room for whole vectors after n_listed; the rest of a window is 0.
static void q4_list_scales(const td_weight *w, const q4_groups *g, const q4_band *band,
                           uint32_t row, float *list) {
  size_t at = row * g->of_row + band->begin;
  const char *from = (const char *)w->scale + at * td_dtype_bytes(w->scale_dtype);
  scales_to_f32(from, w->scale_dtype, g->in_all - at, band->n_stored, list);
  list[band->n_stored] = 0;
  for (uint32_t i = band->n_listed; !g->stored && i-- > 0;) // backwards, since it is in place
    list[i] = list[q4_group_of(w, band, i)];
  for (uint32_t i = band->n_stored; g->stored && i < band->n_listed; i++)
    list[i] = 0;
}

static void q4_list_zeros(const td_weight *w, const q4_groups *g, const q4_band *band, uint32_t row,
                          uint16_t *list) {
  const uint32_t *from = w->zero + row / 8 * g->of_row + band->begin;
  const __m128i place = _mm_cvtsi32_si128((int)(row % 8 * 4));
  for (uint32_t i = 0; i < band->n_stored; i += VL) {
    uint32_t left = band->n_stored - i;
    vi words = left < VL ? vi_load_n(from + i, 4 * left) : vi_load(from + i);
    words = _mm512_srl_epi32(words, place);
    words = _mm512_and_si512(words, _mm512_set1_epi32(15));
    _mm256_storeu_si256((__m256i *)(list + i), _mm512_cvtepi32_epi16(words));
  }
  list[band->n_stored] = 0;
  for (uint32_t i = band->n_listed; !g->stored && i-- > 0;)
    list[i] = list[q4_group_of(w, band, i)];
  for (uint32_t i = band->n_stored; g->stored && i < band->n_listed; i++)
    list[i] = 0;
}
