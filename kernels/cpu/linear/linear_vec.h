// kernels/cpu/linear/linear_vec.h - y = W x in FP32, for any weights that convert to vectors of
// floats.
// Include after an ISA's vec.h and these definitions (linear_plain.h has most of them for simple
// formats):
//   elem          the stored element
//   HAS_SCALES    whether there are scales
//   DOWN          weights are decoded divided by this power of two; the result corrects for it
//   GROUP         columns loaded at once: a cache line
//   codes, load_codes, load_codes_n    such a group of one row (_n: the first n < GROUP, and zeros)
//   plain         whether vector_of gives the weights of some groups; otherwise any_vector_of does,
//                 and has_nan reports NaN that the values do not show
//   SHARED        if vector_of works for any codes but NaN: this many vectors of a row are decoded
//                 together because they share work; with watched, watch and watched_nan, which
//                 report afterwards whether codes of some rows are NaN
//   ORDER_X       if columns of a group are not in order: stores a group of x in vector_of's order
//   X_UP          if weights are decoded so small that x must be packed multiplied by a power of
//                 two; the result corrects for the rest of DOWN. Then also X_FITS_FROM, X_FITS_TO
//                 for the range of x, and natural_of and NATURAL_DOWN instead of any_vector_of and
//                 DOWN where x is used unchanged
//
// Every (row, token) pair has one accumulator of VL lanes, to which a row's vectors are added in
// order. All paths keep this order, so they agree to the last bit:
//   up to FEW_TOKENS  a few rows at a time, straight from memory, each weight decoded once for
//                     eight tokens
//   more              gemm_vec.h, each weight decoded once for a block of tokens
// A scale of whole rows multiplies the sum. A scale that changes along rows but is shared by a band
// of rows is multiplied into x, once for the band: one rounding per product, as small as that of
// its addition. A token for which such a product leaves the range of FP32 is computed run by run
// with each run's sum scaled, and so are scales shared by few rows.
#pragma once

#include "kernels/cpu/common/finite_range.h"
#include "kernels/cpu/common/packed_f32.h"
#include "kernels/cpu/common/prefetch.h"
#include "kernels/decl.h"

#define TD_UNROLL _Pragma("GCC unroll 32")
#ifndef ORDER_X
#define ORDER_X (void)
#endif
#ifndef X_UP
#define X_UP         1.0f
#define X_FITS_FROM  X_LEAST
#define X_FITS_TO    X_MOST
#define NATURAL_DOWN DOWN
#define natural_of   any_vector_of
#endif

enum {
  VECTORS = GROUP / VL,
  MIN_BAND = 16,    // rows
  PANEL_ROWS = 128, // rows that share packed x
  ROWS_1 = GEMV_ROWS,
  ROWS_2 = GEMV_ROWS,
  PREFETCH_ROWS_BYTES = AHEAD_MORE,
  MAX_ROWS = 4,     // rows that share a load of x
  TILE_TOKENS = 8,  // at most
  PANEL_TOKENS = 16 // at most
};

TD_INLINE const float *token_x(const td_linear_args *a, uint32_t t) {
  return a->x + (a->x_rows ? a->x_rows[t] : t) * a->ldx;
}

TD_INLINE const elem *row_data(const td_weight *w, uint32_t row) {
  return (const elem *)w->data + (size_t)row * w->cols;
}

// A row's group from column k on, of which `left` columns are the row's.
TD_INLINE codes group_at(const elem *row, uint32_t k, uint32_t left, elem room[GROUP]) {
  return left < GROUP ? load_codes_n(row + k, left, room) : load_codes(row + k);
}

static inline bool scale_is_rows(const td_weight *w) {
  return w->scale_cols >= w->cols;
}

// Whether the result is the sum of all lanes.
static inline bool is_sum(const td_weight *w) {
  (void)w;
  return !HAS_SCALES;
}

// The result, from the sum of all lanes.
TD_INLINE float finish(const td_weight *w, uint32_t row, bool nan, float sum) {
  if (nan) return NAN;
  if (!HAS_SCALES) return sum;
  if (!scale_is_rows(w)) return sum * DOWN;
  float scale = row_scales(w, row)[0];
  return fabsf(scale) < 0x1p127f / DOWN ? sum * (scale * DOWN) : sum * DOWN * scale;
}

// ---- activations ----------------------------------------------------------------------------

// Packs n columns of a token, vector i at out + i * step, zeros up to a whole group.
static void pack_plain_x(const float *x, uint32_t n, size_t step, float *out) {
  for (uint32_t at = 0; at < n; at += GROUP, out += VECTORS * step) {
    vf v[VECTORS];
    TD_UNROLL for (uint32_t j = 0; j < VECTORS; j++) {
      const uint32_t begin = at + j * VL, left = n < begin ? 0 : n - begin;
      v[j] = left < VL ? vf_load_n(x + begin, left) : vf_load(x + begin);
    }
    ORDER_X(v);
    TD_UNROLL for (int j = 0; j < VECTORS; j++) vf_store(out + (size_t)j * step, v[j]);
  }
}

// The same for columns [k, k + n), multiplied by scales if there are any.
static void pack_x(const td_weight *w, const float *scales, const float *x, uint32_t k, uint32_t n,
                   size_t step, float *out, x_range *range) {
  if (!scales) {
    pack_plain_x(x + k, n, step, out);
    return;
  }
  x_range r = *range;
  const uint32_t run = w->scale_cols;
  uint32_t left_of_run = run - k % run;
  scales += k / run;
  x += k;
  for (uint32_t at = 0; at < n; at += GROUP, out += VECTORS * step) {
    vf v[VECTORS];
    TD_UNROLL for (uint32_t j = 0; j < VECTORS; j++, left_of_run -= VL) {
      const uint32_t begin = at + j * VL, left = n < begin ? 0 : n - begin;
      if (left_of_run == 0) {
        left_of_run = run;
        scales += left > 0;
      }
      vf xv = left < VL ? vf_load_n(x + begin, left) : vf_load(x + begin);
      v[j] = vf_mul(xv, vf_set1(*scales));
      r = range_with(r, v[j], xv);
      v[j] = vf_mul(v[j], vf_set1(X_UP));
    }
    ORDER_X(v);
    TD_UNROLL for (int j = 0; j < VECTORS; j++) vf_store(out + (size_t)j * step, v[j]);
  }
  *range = r;
}

// Second, exact check for a token whose range failed: true if every scale * x is in range, ignoring
// zeros.
static bool token_fits(const td_weight *w, const float *scales, const float *x) {
  for (uint32_t k = 0, n; k < w->cols; k += n, scales++) {
    n = run_length(w, k, w->cols);
    bool bad = false;
    for (uint32_t i = k; *scales != 0 && i < k + n; i++) {
      const float size = fabsf(*scales * x[i]);
      bad |= (x[i] != 0) & !((size >= X_FITS_FROM) & (size < X_FITS_TO));
    }
    if (bad) return false;
  }
  return true;
}

// ---- run by run -----------------------------------------------------------------------------

// Products of a run of one row, from column k0 on.
static vf run_products(const elem *w, uint32_t k0, const float *x, uint32_t n, bool *nan) {
  elem room[GROUP];
  vf acc = vf_zero();
  for (uint32_t k = 0; k < n; k += GROUP) {
    codes c = group_at(w, k0 + k, n - k, room);
    for (uint32_t j = 0; j < VECTORS && k + j * VL < n; j++) {
      uint32_t at = k + j * VL;
      vf xv = n - at < VL ? vf_load_n(x + at, n - at) : vf_load(x + at);
      acc = vf_fma(natural_of(&c, (int)j), xv, acc);
    }
    *nan |= has_nan(&c);
  }
  return acc;
}

static void run_by_run(const td_linear_args *a, uint32_t token) {
  enum { RUN = 512 };
  const float *x = token_x(a, token);
  float *y = a->y + token * a->ldy;
  for (uint32_t row = a->row_begin; row < a->row_end; row++) {
    const float *scales = row_scales(a->w, row);
    bool nan = false;
    vf total = vf_zero();
    for (uint32_t k = 0, n; k < a->w->cols; k += n) {
      n = run_length(a->w, k, RUN);
      vf acc = run_products(row_data(a->w, row), k, x + k, n, &nan);
      float scale = scales[k / a->w->scale_cols];
      bool fits = fabsf(scale) < 0x1p127f / NATURAL_DOWN;
      if (!fits) acc = vf_mul(acc, vf_set1(NATURAL_DOWN));
      total = vf_fma(acc, vf_set1(fits ? scale * NATURAL_DOWN : scale), total);
    }
    y[row - a->y_row0] = nan ? NAN : vf_sum(total);
  }
}

// Recomputes a token whose scaled activations are out of range.
static void mend(const td_linear_args *a, const float *scales, uint32_t token, x_range range) {
  if (!range_within(range, X_FITS_FROM, X_FITS_TO) && !token_fits(a->w, scales, token_x(a, token)))
    run_by_run(a, token);
}

// ---- few tokens -----------------------------------------------------------------------------

// Some rows times all tokens, in tiles of up to TILE_TOKENS. Lives on the stack.
typedef struct {
  _Alignas(64) float x[X_FLOATS];      // columns [k, k + n): [tile][vector][token of the tile][VL]
  vf total[PANEL_ROWS * PANEL_TOKENS]; // [row][token], over columns before k
  x_range range[PANEL_TOKENS];
  const td_linear_args *a;
  uint32_t row0, n_rows, k, n;
  uint32_t n_padded; // n rounded up to whole groups
  distance ahead[2]; // prefetch distances to L2 and L1
  bool nan[PANEL_ROWS];
} panel;

// acc [R][T] += products of a group of each row.
#ifdef SHARED
TD_INLINE void add_group(const int R, const int T, const codes *c, const float *x, vf *acc,
                         bool *nan, watched *seen) {
  (void)nan;
  TD_UNROLL for (int first = 0; first < VECTORS; first += SHARED) {
    TD_UNROLL for (int r = 0; r < R; r++) {
      vf w[SHARED];
      *seen = watch(*seen, &c[r], first);
      TD_UNROLL for (int j = 0; j < SHARED; j++) w[j] = vector_of(&c[r], first + j);
      TD_UNROLL for (int j = 0; j < SHARED; j++) {
        TD_UNROLL for (int t = 0; t < T; t++) {
          const vf xv = vf_load(x + ((first + j) * T + t) * VL);
          acc[r * T + t] = vf_fma(w[j], xv, acc[r * T + t]);
        }
      }
    }
  }
}
#else
typedef char watched; // unused
static watched watch_none(void) {
  return 0;
}
static bool watched_nan(watched seen) {
  (void)seen;
  return false;
}

TD_INLINE void add_group(const int R, const int T, const codes *c, const float *x, vf *acc,
                         bool *nan, watched *seen) {
  (void)seen;
  if (__builtin_expect(plain(R, c), 1)) {
    TD_UNROLL for (int j = 0; j < VECTORS; j++) {
      vf w[MAX_ROWS];
      TD_UNROLL for (int r = 0; r < R; r++) w[r] = vector_of(&c[r], j);
      TD_UNROLL for (int t = 0; t < T; t++) {
        vf xv = vf_load(x + (j * T + t) * VL);
        __asm__("" : "+v"(xv)); // one load instead of one per multiplication
        TD_UNROLL for (int r = 0; r < R; r++) acc[r * T + t] = vf_fma(w[r], xv, acc[r * T + t]);
      }
    }
    return;
  }
  TD_UNROLL for (int r = 0; r < R; r++) {
    nan[r] |= has_nan(&c[r]);
    TD_UNROLL for (int j = 0; j < VECTORS; j++) {
      vf w = any_vector_of(&c[r], j);
      TD_UNROLL for (int t = 0; t < T; t++) {
        acc[r * T + t] = vf_fma(w, vf_load(x + (j * T + t) * VL), acc[r * T + t]);
      }
    }
  }
}
#endif

static bool is_final(const panel *p) {
  return is_sum(p->a->w);
}

static bool single_row_tiles(const panel *p) {
  (void)p;
  return false;
}

#include "kernels/cpu/linear/panel_vec.h"

_Static_assert((int)FEW_TOKENS <= (int)PANEL_TOKENS, "a panel has room for them");

// Finds which of some rows have NaN among the panel's columns.
static void find_nan(panel *p, uint32_t row, uint32_t n_rows) {
  elem room[GROUP];
  for (uint32_t r = row; r < row + n_rows; r++) {
    const elem *w = row_data(p->a->w, p->row0 + r);
    for (uint32_t k = 0; k < p->n; k += GROUP) {
      codes c = group_at(w, p->k + k, p->n - k, room);
      p->nan[r] |= has_nan(&c);
    }
  }
}

// Rows [row, row + R) of the panel times tokens [token, token + T).
TD_INLINE void dot_rows(const int R, const int T, panel *p, uint32_t row, uint32_t token) {
  const elem *w[MAX_ROWS];
  codes c[MAX_ROWS];
  vf acc[MAX_ROWS * TILE_TOKENS];
  const size_t stride = p->a->n_tokens, at = row * stride + token;
  TD_UNROLL for (int r = 0; r < R; r++) {
    w[r] = row_data(p->a->w, p->row0 + row + (uint32_t)r);
  }
  TD_UNROLL for (int i = 0; i < R * T; i++) {
    acc[i] = p->k == 0 ? vf_zero() : p->total[at + (size_t)(i / T) * stride + (size_t)(i % T)];
  }
  const float *x = p->x + (size_t)token * p->n_padded;
  fetch in_l2 = {0}, in_l1 = {0};
  watched seen = watch_none();
  uint32_t k = 0, n = p->n;
  for (; k + GROUP <= n; k += GROUP, x += T * GROUP) {
    if (k >= in_l2.until) in_l2 = fetch_of(p, row, (uint32_t)R, k, p->ahead[0]);
    if (k >= in_l1.until) in_l1 = fetch_of(p, row, (uint32_t)R, k, p->ahead[1]);
    TD_UNROLL for (int r = 0; r < R; r++) {
      const uintptr_t from = (uintptr_t)(w[r] + p->k + k);
      __builtin_prefetch((const void *)(from + in_l2.offset), 0, 2);
      __builtin_prefetch((const void *)(from + in_l1.offset));
      c[r] = load_codes(w[r] + p->k + k);
    }
    add_group(R, T, c, x, acc, p->nan + row, &seen);
  }
  if (k < n) {
    elem room[MAX_ROWS][GROUP];
    TD_UNROLL for (int r = 0; r < R; r++) c[r] = group_at(w[r], p->k + k, n - k, room[r]);
    add_group(R, T, c, x, acc, p->nan + row, &seen);
  }
  if (watched_nan(seen)) find_nan(p, row, (uint32_t)R);
  if (p->k + n < p->a->w->cols) {
    TD_UNROLL for (int i = 0; i < R * T; i++) {
      p->total[at + (size_t)(i / T) * stride + (size_t)(i % T)] = acc[i];
    }
    return;
  }
  put_sums(R, T, p, row, token, acc);
}

static void pack_panel(panel *p, const float *scales) {
  for (uint32_t i = 0; i < panel_tiles(p); i++) {
    uint32_t begin = panel_tile_begin(p, i), n = panel_tile_begin(p, i + 1) - begin;
    float *out = p->x + (size_t)begin * p->n_padded;
    for (uint32_t t = 0; t < n; t++) {
      pack_x(p->a->w, scales, token_x(p->a, begin + t), p->k, p->n, n * VL, out + t * VL,
             &p->range[begin + t]);
    }
  }
}

static void linear_few(const td_linear_args *a, const float *scales) {
  panel p;
  p.a = a;
  uint32_t cols = a->w->cols, step = X_FLOATS / a->n_tokens / GROUP * GROUP;
  for (p.row0 = a->row_begin; p.row0 < a->row_end; p.row0 += p.n_rows) {
    p.n_rows = a->row_end - p.row0 < PANEL_ROWS ? a->row_end - p.row0 : PANEL_ROWS;
    memset(p.nan, 0, sizeof p.nan);
    for (uint32_t t = 0; t < a->n_tokens; t++)
      p.range[t] = empty_range();
    for (p.k = 0; p.k < cols; p.k += p.n) {
      p.n = cols - p.k < step ? cols - p.k : step;
      p.n_padded = (p.n + GROUP - 1) / GROUP * GROUP;
      set_ahead(&p);
      pack_panel(&p, scales);
      dot_panel(&p);
    }
    finish_panel(&p);
  }
  for (uint32_t t = 0; scales && t < a->n_tokens; t++)
    mend(a, scales, t, p.range[t]);
}

// ---- many tokens ----------------------------------------------------------------------------

enum { SCALED = 0, WINDOW_RUNS = 1 };
typedef char gemm_scale; // unused
TD_INLINE vf lanes_of(gemm_scale scale) {
  (void)scale;
  return vf_zero();
}
#include "kernels/cpu/linear/gemm_f32.h"

static void find_window(gemm *g) {
  uint32_t left = g->a->w->cols - g->k;
  g->n = left < WINDOW ? left : WINDOW;
  g->n_runs = 1;
  g->n_vectors = g->run_vectors[0] = (g->n + GROUP - 1) / GROUP * VECTORS;
}

static void pack_token(gemm *g, uint32_t token, size_t step, float *out) {
  if (g->k == 0) g->range[token] = empty_range();
  pack_x(g->a->w, g->x_scales, token_x(g->a, g->token0 + token), g->k, g->n, step, out,
         &g->range[token]);
}

static void decode_row(gemm *g, uint32_t row, uint32_t place, float *out) {
  (void)place;
  const elem *w = row_data(g->a->w, g->row0 + row);
  const size_t step = GEMM_ROWS * VL;
  elem room[GROUP];
  for (uint32_t k = 0; k < g->n; k += GROUP, out += VECTORS * step) {
    codes c = group_at(w, g->k + k, g->n - k, room);
    if (__builtin_expect(plain(1, &c), 1)) {
      TD_UNROLL for (int j = 0; j < VECTORS; j++) vf_store(out + j * step, vector_of(&c, j));
      continue;
    }
    TD_UNROLL for (int j = 0; j < VECTORS; j++) vf_store(out + j * step, any_vector_of(&c, j));
    g->nan[row] |= has_nan(&c);
  }
}

static const char *stored_row(const td_weight *w, uint32_t row, uint32_t k) {
  return (const char *)(row_data(w, row) + k);
}

static void end_block(const gemm *g) {
  td_linear_args rows = *g->a;
  rows.row_begin = g->row0;
  rows.row_end = g->row0 + g->n_rows;
  for (uint32_t t = 0; g->x_scales && t < g->n_tokens; t++)
    mend(&rows, g->x_scales, g->token0 + t, g->range[t]);
}

// ---- all ------------------------------------------------------------------------------------

static void linear_band(const td_linear_args *a, const float *scales) {
  if (a->n_tokens <= FEW_TOKENS) {
    linear_few(a, scales);
  } else {
    gemm_all(a, scales);
  }
}

static inline void linear_vec(const td_linear_args *a) {
  const td_weight *w = a->w;
  if (a->n_tokens == 0) return;
  if (!HAS_SCALES || scale_is_rows(w)) {
    linear_band(a, X_UP == 1 ? NULL : &(float){1});
    return;
  }
  if (w->scale_cols % VL > 0 || w->scale_rows < MIN_BAND) {
    for (uint32_t t = 0; t < a->n_tokens; t++)
      run_by_run(a, t);
    return;
  }
  linear_bands(a);
}
