// kernels/cpu/avx512fp16/linear_q4.h - y = W x for rows of 4-bit codes (TD_I4, TD_F4E2M1) with a
// scale per group, with chains of FP16 additions.
// Include after these definitions:
//   Q4_UPPER    the upper bytes of the codes' values as FP16 (INT4: minus 8)
//   Q4_ZEROS    1 if there may be zero points
//   Q4_EXACT    see q4_results.h
//
// x is multiplied by a power of two per token (q4_power) and rounded to FP16. A window of columns
// (q4.h) is a chain: FP16 products and sums, 16 of them or 8 and 8. Its halves are added if they
// share scales (q4_folds). The result is converted to FP32, multiplied by each lane's scale and
// added to the (row, token) pair's single accumulator of VL lanes. All paths keep this order, so
// they agree to the last bit.
//
// Error: rounding x and each of 17 additions contribute at most 2^-11 of a product's or sum's
// magnitude, or half the smallest FP16, 2^-25 / 2^6 of the token's largest x. So |error| is at most
//   18 2^-11 sum |w x| + n 2^-31 (max |code| + 1) max |x| max |scale|
// plus that of the FP32 sums. Rounding errors are nearly independent, so typically it is about 6e-4
// of the root of the sum of squares.
#pragma once

#include "kernels/cpu/avx512fp16/q4_groups.h"
#include "kernels/cpu/avx512fp16/q4_results.h"

#define TD_UNROLL _Pragma("GCC unroll 32")

enum {
  X_HALVES = 16384,              // of x in order, in L1
  LIST = X_HALVES / 16 + 2 * VL, // with what whole vectors read behind the last
  PANEL = 128,                   // rows that share x in order
  TILE_TOKENS = 8,               // that share decoded weights
  MAX_TOKENS = 16,               // of a panel
  Q4_GEMV_ROWS = 4,              // streams of rows
  Q4_BATCH_ROWS = 2,             // rows that share loads of x
  MAX_ROWS = 4,                  // at least both, and the number that vf_sum4 takes
  BYTES_AHEAD = 1024,            // prefetch distance for one token
  ROWS_AHEAD = 8,                // prefetch distance for more, which use rows in parts
};

// Some windows of some rows.
typedef struct {
  float scales[MAX_ROWS][LIST];
  uint16_t zeros[MAX_ROWS][LIST];
  const uint8_t *codes[MAX_ROWS];
  uint32_t n_bytes; // bytes of codes per row
  size_t ahead;     // prefetch distance in bytes
} q4_tile;

// total + the lanes of a sum times their scales; if folds, lo and hi have the same scales.
TD_INLINE vf add_lanes(bool folds, vh sum, vf lo_scale, vf hi_scale, vf total) {
  if (folds) return vf_fma(vh_fold(sum), lo_scale, total);
  vf lo, hi;
  vh_widen(sum, &lo, &hi);
  return vf_fma(hi, hi_scale, vf_fma(lo, lo_scale, total));
}

// totals [R T] += sums of R rows and T tokens, with the scales of the lanes in this half of the
// steps.
TD_INLINE void add_sums(const int R, const int T, const bool folds, const q4_tile *tile,
                        const q4_groups *g, uint32_t at, int half, const vh *acc, vf *totals) {
  TD_UNROLL for (int r = 0; r < R; r++) {
    const float *list = tile->scales[r] + at;
    vf first = vf_load(list), second = vf_load(list + VL);
    vf lo = _mm512_permutex2var_ps(first, g->lo[half], second);
    vf hi = folds ? lo : _mm512_permutex2var_ps(first, g->hi[half], second);
    TD_UNROLL for (int i = r * T; i < (r + 1) * T; i++) {
      totals[i] = add_lanes(folds, acc[i], lo, hi, totals[i]);
    }
  }
}

// totals [R T] += products of a window; x [16][T][VHL]; at: the window's index in the lists.
TD_INLINE void dot_window(const int R, const int T, const bool zeros, const q4_tile *tile,
                          const q4_groups *g, uint32_t at, vi (*words)[4], const _Float16 *x,
                          vf *totals) {
  const vi table = q4_table(Q4_UPPER);
  vh acc[MAX_ROWS * TILE_TOKENS];
  q4_zero zero[MAX_ROWS];
  TD_UNROLL for (int i = 0; i < R * T; i++) acc[i] = vh_zero();
  TD_UNROLL for (int step = 0; step < CHAIN_STEPS; step++, x += T * VHL) {
    const int half = step / 8;
    if (zeros && step % 8 == 0 && (half == 0 || g->halves)) {
      TD_UNROLL for (int r = 0; r < R; r++) {
        vi list = vi_load(tile->zeros[r] + at);
        zero[r] = q4_zero_of(_mm512_permutexvar_epi16(g->both[half], list));
      }
    }
    vh value[MAX_ROWS];
    TD_UNROLL for (int r = 0; r < R; r++) {
      value[r] = zeros ? q4_value_less(words[r][step / 4], step % 4, zero[r])
                       : q4_value(words[r][step / 4], step % 4, table);
    }
    TD_UNROLL for (int t = 0; t < T; t++) {
      vh xv = vh_load(x + t * VHL);
      if (R > 1) __asm__("" : "+v"(xv)); // one load instead of one per multiplication
      TD_UNROLL for (int r = 0; r < R; r++) {
        acc[r * T + t] = vh_fma(value[r], xv, acc[r * T + t]);
      }
    }
    if (step == 7 && g->halves) {
      add_sums(R, T, false, tile, g, at, 0, acc, totals);
      TD_UNROLL for (int i = 0; i < R * T; i++) acc[i] = vh_zero();
    }
  }
  if (g->folds) {
    add_sums(R, T, true, tile, g, at, 1, acc, totals);
  } else {
    add_sums(R, T, false, tile, g, at, 1, acc, totals);
  }
}

// totals [R][step] += the rows' products with T tokens; x [window][16][T][VHL].
TD_INLINE void dot_tile(const int R, const int T, const bool zeros, const q4_tile *tile,
                        const q4_groups *g, const q4_band *band, const _Float16 *x, vf *totals,
                        size_t step) {
  vf sum[MAX_ROWS * TILE_TOKENS];
  TD_UNROLL for (int i = 0; i < R * T; i++) sum[i] = totals[(size_t)(i / T) * step + i % T];
  for (uint32_t b = 0; b < band->n_windows; b++, x += T * Q4_WINDOW) {
    uint32_t begin = b * Q4_WINDOW_BYTES;
    vi words[MAX_ROWS][4];
    TD_UNROLL for (int r = 0; r < R; r++) {
      const uint8_t *codes = tile->codes[r] + begin;
      TD_UNROLL for (int i = 0; i < Q4_WINDOW_BYTES; i += 64) {
        __builtin_prefetch((const void *)((uintptr_t)codes + tile->ahead + (size_t)i));
      }
      q4_load(codes, tile->n_bytes - begin, words[r]);
    }
    dot_window(R, T, zeros, tile, g, q4_list_at(g, band, b), words, x, sum);
    // Keeps the compiler from holding more sums in registers, of which there are too few.
    if (R * T > 8) __asm__ volatile("" : "+m"(sum));
  }
  TD_UNROLL for (int i = 0; i < R * T; i++) totals[(size_t)(i / T) * step + i % T] = sum[i];
}

#define DOT_TOKENS(T, R)                                                                           \
  case T:                                                                                          \
    if (Q4_ZEROS && zeros) {                                                                       \
      dot_tile(R, T, true, tile, g, band, x, totals, step);                                        \
    } else {                                                                                       \
      dot_tile(R, T, false, tile, g, band, x, totals, step);                                       \
    }                                                                                              \
    return;

static void dot_tokens(uint32_t n_tokens, bool zeros, const q4_tile *tile, const q4_groups *g,
                       const q4_band *band, const _Float16 *x, vf *totals, size_t step) {
  switch (n_tokens) {
    DOT_TOKENS(1, Q4_GEMV_ROWS)
    DOT_TOKENS(2, Q4_BATCH_ROWS)
    DOT_TOKENS(3, Q4_BATCH_ROWS)
    DOT_TOKENS(4, Q4_BATCH_ROWS)
    DOT_TOKENS(5, Q4_BATCH_ROWS)
    DOT_TOKENS(6, Q4_BATCH_ROWS)
    DOT_TOKENS(7, Q4_BATCH_ROWS)
    DOT_TOKENS(8, Q4_BATCH_ROWS)
  default: return;
  }
}
_Static_assert(TILE_TOKENS == 8, "a case for every number of tokens");

// ---- few tokens -----------------------------------------------------------------------------

// Some rows times all tokens. Lives on the stack.
typedef struct {
  _Alignas(64) _Float16 x[X_HALVES];         // [tile of tokens][window][16][token of the tile][VHL]
  q4_tile tile[2];                           // one is prepared while the other is in use
  vf total[(PANEL + MAX_ROWS) * MAX_TOKENS]; // [row][token]
  float power[MAX_TOKENS];                   // per token
  const td_linear_args *a;
  q4_groups groups;
  q4_band band;
  size_t row_bytes;
  uint32_t row0, n_rows;
  uint32_t tile_rows, apart; // rows per tile, and their distance
  uint32_t n_token_tiles;
} panel;

static uint32_t token_tile(const panel *p, uint32_t tile) {
  return tile * p->a->n_tokens / p->n_token_tiles;
}

static const uint8_t *tile_codes(const panel *p, uint32_t row) {
  uint32_t last = p->n_rows - 1;
  return (const uint8_t *)p->a->w->data + (p->row0 + (row < last ? row : last)) * p->row_bytes +
         p->band.k / 2;
}

// Packs x; prefetches the first tile's codes meanwhile.
static void pack_panel(panel *p) {
  _Float16 *out = p->x;
  for (uint32_t i = 0; i < p->n_token_tiles; i++) {
    uint32_t begin = token_tile(p, i), n = token_tile(p, i + 1) - begin;
    for (uint32_t w = 0; w < p->band.n_windows; w++, out += n * Q4_WINDOW) {
      uint32_t k = w * Q4_WINDOW, left = p->band.n - k;
      for (uint32_t r = 0; r < p->tile_rows && i == 0; r++) {
        for (uint32_t at = 0; at < Q4_WINDOW_BYTES; at += 64)
          __builtin_prefetch(tile_codes(p, r * p->apart) + k / 2 + at);
      }
      for (uint32_t t = 0; t < n; t++) {
        q4_pack(token_x(p->a, begin + t) + p->band.k + k, left < Q4_WINDOW ? left : Q4_WINDOW,
                p->power[begin + t], out + t * VHL, (size_t)n * VHL);
      }
    }
  }
}

// Prefetch distance: within this band, to the next one, or to the next panel's first.
static size_t bytes_ahead(const panel *p, uint32_t row) {
  if (p->a->n_tokens == 1) return BYTES_AHEAD;
  size_t bytes = ROWS_AHEAD * p->row_bytes;
  if (row + ROWS_AHEAD < p->apart) return bytes;
  if (p->band.k + p->band.n == p->a->w->cols) return bytes - p->band.k / 2;
  return bytes - p->apart * p->row_bytes + p->band.n / 2;
}

// A tile's rows are far apart, each the next one of its own stream: the hardware prefetcher follows
// such streams but loses short rows. Rows past the panel's last one repeat it, with separate
// totals. Lists are written one tile ahead of their use, because a vector load stalls on recent
// stores to parts of it.
static void prepare_tile(panel *p, uint32_t row) {
  const td_weight *w = p->a->w;
  q4_tile *tile = &p->tile[row % 2];
  size_t left = p->row_bytes - p->band.k / 2, whole = (size_t)p->band.n_windows * Q4_WINDOW_BYTES;
  tile->n_bytes = (uint32_t)(left < whole ? left : whole);
  tile->ahead = bytes_ahead(p, row);
  for (uint32_t i = 0; i < p->tile_rows; i++) {
    uint32_t at = row + i * p->apart, r = p->row0 + (at < p->n_rows ? at : p->n_rows - 1);
    tile->codes[i] = tile_codes(p, at);
    q4_list_scales(w, &p->groups, &p->band, r, tile->scales[i]);
    if (w->zero) q4_list_zeros(w, &p->groups, &p->band, r, tile->zeros[i]);
  }
}

static void dot_rows(panel *p, uint32_t row) {
  uint32_t n_tokens = p->a->n_tokens;
  const _Float16 *x = p->x;
  for (uint32_t i = 0; i < p->n_token_tiles; i++) {
    uint32_t begin = token_tile(p, i), n = token_tile(p, i + 1) - begin;
    dot_tokens(n, p->a->w->zero != NULL, &p->tile[row % 2], &p->groups, &p->band, x,
               p->total + (size_t)row * n_tokens + begin, (size_t)p->apart * n_tokens);
    x += (size_t)n * p->band.n_windows * Q4_WINDOW;
  }
}

static void finish_panel(panel *p) {
  float sums[PANEL];
  size_t n = p->a->n_tokens;
  for (uint32_t t = 0; t < n; t++) {
    // there are MAX_ROWS more totals after the last row
    for (uint32_t r = 0; r < p->n_rows; r += 4) {
      const vf *total = p->total + r * n + t;
      vf_sum4(total[0], total[n], total[2 * n], total[3 * n], sums + r);
    }
    finish_token(p->a, t, p->power[t], p->row0, p->n_rows, sums);
  }
}
_Static_assert(PANEL % 4 == 0, "sums are by four");

static void dot_panel(panel *p) {
  const td_linear_args *a = p->a;
  uint32_t step = X_HALVES / a->n_tokens / Q4_WINDOW * Q4_WINDOW;
  for (size_t i = 0; i < (size_t)(p->n_rows + MAX_ROWS) * a->n_tokens; i++)
    p->total[i] = vf_zero();
  for (uint32_t k = 0; k < a->w->cols; k += step) {
    uint32_t left = a->w->cols - k;
    p->band = q4_band_of(a->w, &p->groups, k, left < step ? left : step);
    pack_panel(p);
    prepare_tile(p, 0);
    for (uint32_t row = 0; row < p->apart; row++) {
      if (row + 1 < p->apart) prepare_tile(p, row + 1);
      dot_rows(p, row);
    }
  }
  finish_panel(p);
}

// For up to MAX_TOKENS tokens.
static void linear_few(const td_linear_args *a) {
  panel p;
  p.a = a;
  p.groups = q4_groups_of(a->w);
  p.row_bytes = td_weight_row_bytes(a->w);
  p.tile_rows = a->n_tokens == 1 ? Q4_GEMV_ROWS : Q4_BATCH_ROWS;
  p.n_token_tiles = (a->n_tokens + TILE_TOKENS - 1) / TILE_TOKENS;
  for (uint32_t t = 0; t < a->n_tokens; t++)
    p.power[t] = q4_power(token_x(a, t), a->w->cols);
  for (p.row0 = a->row_begin; p.row0 < a->row_end; p.row0 += p.n_rows) {
    p.n_rows = a->row_end - p.row0 < PANEL ? a->row_end - p.row0 : PANEL;
    p.apart = (p.n_rows + p.tile_rows - 1) / p.tile_rows;
    dot_panel(&p);
  }
}

// ---- many tokens: runs are chains -----------------------------------------------------------

typedef float x_range; // the token's power
typedef struct {
  vf lo, hi;
} gemm_scale;
typedef gemm_scale gemm_lanes;
enum { PAIR_STEPS = 0, WINDOW_RUNS = 4 };

#include "kernels/cpu/avx512fp16/gemm_vh.h"
static inline bool is_sum(const td_weight *w) {
  (void)w;
  return true; // end_block computes the final results
}

TD_INLINE float finish(const td_weight *w, uint32_t row, bool nan, float sum) {
  (void)w;
  (void)row;
  (void)nan;
  return sum; // end_block computes the final results
}

#include "kernels/cpu/linear/gemm_vec.h"

TD_INLINE vf end_sum(const gemm *g, sv sum, gemm_lanes scale, uint32_t token, vf total) {
  (void)token;
  return add_lanes(q4_folds(g->a->w), sum, scale.lo, scale.hi, total);
}

_Static_assert(WINDOW % Q4_WINDOW == 0 && WINDOW_RUNS == WINDOW / Q4_WINDOW * 2, "runs");

static void find_window(gemm *g) {
  uint32_t left = g->a->w->cols - g->k;
  g->n = left < WINDOW ? left : WINDOW;
  uint32_t n_windows = (g->n + Q4_WINDOW - 1) / Q4_WINDOW, n = q4_halves(g->a->w) ? 2 : 1;
  g->n_runs = n * n_windows;
  g->n_vectors = CHAIN_STEPS * n_windows;
  for (uint32_t i = 0; i < g->n_runs; i++)
    g->run_vectors[i] = CHAIN_STEPS / n;
}

static void pack_token(gemm *g, uint32_t token, size_t step, packed *out) {
  const float *x = gemm_x(g->a, g->token0 + token);
  bool first = g->k == 0 && g->row0 == g->a->row_begin; // otherwise known from earlier rows
  if (first) g->range[token] = q4_power(x, g->a->w->cols);
  for (uint32_t k = 0; k < g->n; k += Q4_WINDOW, out += CHAIN_STEPS * step) {
    uint32_t n = g->n - k < Q4_WINDOW ? g->n - k : Q4_WINDOW;
    q4_pack(x + g->k + k, n, g->range[token], out, step);
  }
}

// The scales of a row's window, one entry for each of its runs.
static gemm_scale *put_scales(const q4_groups *g, const float *list, gemm_scale *out) {
  for (int half = g->halves ? 0 : 1; half < 2; half++, out++) {
    out->lo = _mm512_permutex2var_ps(vf_load(list), g->lo[half], vf_load(list + VL));
    out->hi = _mm512_permutex2var_ps(vf_load(list), g->hi[half], vf_load(list + VL));
  }
  return out;
}

static void decode_row(gemm *g, uint32_t row, uint32_t place, packed *out) {
  enum { MOST = WINDOW / 16 + 2 * VL };
  float scales[MOST];
  uint16_t zeros[MOST];
  const td_weight *w = g->a->w;
  const vi table = q4_table(Q4_UPPER);
  q4_groups groups = q4_groups_of(w);
  q4_band band = q4_band_of(w, &groups, g->k, g->n);
  row += g->row0;
  q4_list_scales(w, &groups, &band, row, scales);
  if (w->zero) q4_list_zeros(w, &groups, &band, row, zeros);
  const uint8_t *codes = (const uint8_t *)stored_row(w, row, g->k);
  uint32_t n_bytes = (uint32_t)(td_weight_row_bytes(w) - g->k / 2);
  gemm_scale *scale = g->scale[place];
  for (uint32_t b = 0; b < band.n_windows; b++, n_bytes -= Q4_WINDOW_BYTES) {
    uint32_t at = q4_list_at(&groups, &band, b);
    scale = put_scales(&groups, scales + at, scale);
    vi words[4];
    q4_load(codes + b * Q4_WINDOW_BYTES, n_bytes, words);
    TD_UNROLL for (int i = 0; i < CHAIN_STEPS; i++, out += GEMM_ROWS * PL) {
      if (Q4_ZEROS && w->zero) {
        vi zero = _mm512_permutexvar_epi16(groups.both[i / 8], vi_load(zeros + at));
        vh_store(out, q4_value_less(words[i / 4], i % 4, q4_zero_of(zero)));
      } else {
        vh_store(out, q4_value(words[i / 4], i % 4, table));
      }
    }
  }
}

static const char *stored_row(const td_weight *w, uint32_t row, uint32_t k) {
  return (const char *)w->data + row * td_weight_row_bytes(w) + k / 2;
}

static void end_block(const gemm *g) {
  float sums[BLOCK_ROWS];
  for (uint32_t t = 0; t < g->n_tokens; t++) {
    const float *y = g->a->y + (g->token0 + t) * g->a->ldy + g->row0 - g->a->y_row0;
    memcpy(sums, y, g->n_rows * sizeof *sums);
    finish_token(g->a, g->token0 + t, g->range[t], g->row0, g->n_rows, sums);
  }
}

static inline void linear_q4(const td_linear_args *a) {
  if (!q4_groups_fit(a->w)) {
    Q4_EXACT(a);
  } else if (a->n_tokens > MAX_TOKENS) {
    gemm_all(a, NULL);
  } else if (a->n_tokens > 0) {
    linear_few(a);
  }
}
