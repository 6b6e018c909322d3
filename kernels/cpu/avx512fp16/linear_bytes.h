// kernels/cpu/avx512fp16/linear_bytes.h - y = W x for rows of bytes with chains of FP16 additions.
// Include after vec.h and these definitions:
//   elem             the stored byte
//   DOWN             weights are decoded divided by this power of two
//   TOP              x is scaled below 2^TOP, so that no FP16 sum exceeds 65504
//   even_of, odd_of  the weights of a line's even and odd columns
//   look             accumulates over lines what has_nan needs
//   linear_exact     the FP32 kernel, for tokens and scales that do not qualify
//
// A line is 64 columns of one row, a chain CHAIN_STEPS vectors (512 columns), a window two chains.
// A (row, token) pair has FP16 sums of 32 lanes, which begin at zero in each chain; even and odd
// columns of each line are added in turn. The two sums of a window are added, then the two halves
// of that, and the 16 sums are added to the pair's FP32 total. All paths keep this order, so they
// agree to the last bit:
//   1 to 16 tokens  a few rows at a time, straight from memory, each weight decoded once for
//                   eight tokens
//   more            gemm_vec.h
// Each window of a token is multiplied by a power of two that brings its largest activation to
// [2^(TOP - 1), 2^TOP) and converted to FP16; the total corrects for it. A scale shared by a band
// of rows multiplies x first; one of whole rows multiplies the result. Rounding errors are bounded
// in error_bound of tests/unit/kernel_test.h.
#pragma once

#include <math.h>
#include <stdbool.h>

#include "kernels/cpu/common/numeric.h"
#include "kernels/cpu/common/prefetch.h"
#include "kernels/cpu/common/vec_math.h"
#include "kernels/decl.h"

#define TD_UNROLL _Pragma("GCC unroll 32")

enum {
  LINE = 64,
  CHAIN = CHAIN_STEPS * VHL, // columns
  X_WINDOW = 2 * CHAIN,      // columns
  MIN_BAND = 16,             // rows
  PANEL_ROWS = 128,          // rows that share packed x
  ROWS_1 = GEMV_ROWS,
  ROWS_2 = GEMV_ROWS,
  PREFETCH_ROWS_BYTES = AHEAD_MORE,
  MAX_ROWS = 4,      // rows that share a load of x
  TILE_TOKENS = 8,   // at most
  PANEL_TOKENS = 16, // at most
  X_HALVES = 16384   // elements of packed x, in L1
};

TD_INLINE const float *token_x(const td_linear_args *a, uint32_t t) {
  return a->x + (a->x_rows ? a->x_rows[t] : t) * a->ldx;
}

TD_INLINE const elem *row_data(const td_weight *w, uint32_t row) {
  return (const elem *)w->data + (size_t)row * w->cols;
}

static inline bool scale_is_rows(const td_weight *w) {
  return w->scale_cols >= w->cols;
}

TD_INLINE __m512i load_line(const elem *w) {
  return _mm512_loadu_si512(w);
}

// The first n < LINE columns, and zeros.
TD_INLINE __m512i load_line_n(const elem *w, uint32_t n) {
  return _mm512_maskz_loadu_epi8(((__mmask64)1 << n) - 1, w);
}

// Whether the result is the sum of all lanes.
static inline bool is_sum(const td_weight *w) {
  return !scale_is_rows(w);
}

// The result, from the sum of all lanes.
TD_INLINE float finish(const td_weight *w, uint32_t row, bool nan, float sum) {
  if (nan) return NAN;
  return is_sum(w) ? sum : sum * row_scales(w, row)[0];
}

// ---- activations ----------------------------------------------------------------------------

// A window's columns of a token, with zeros up to a whole line.
typedef struct {
  const float *x;
  uint32_t n_lines;
  _Alignas(64) float scale[X_WINDOW / LINE]; // of each line, followed by zeros
} window;

// Returns the largest magnitude of scaled columns that are not NaN, as bits.
static uint32_t largest_of(const td_weight *w, const float *scales, uint32_t k, window *win) {
  const uint32_t run_lines = scales ? w->scale_cols / LINE : UINT32_MAX;
  uint32_t left = scales ? run_lines - k / LINE % run_lines : UINT32_MAX; // lines left in the run
  const float *scale = scales ? scales + k / w->scale_cols : &(float){1};
  __m512i most = _mm512_setzero_si512();
  for (uint32_t i = 0, end; i < win->n_lines; i = end, left = run_lines, scale++) {
    vf a = vf_zero(), b = vf_zero();
    for (end = win->n_lines - i < left ? win->n_lines : i + left; i < end; i++) {
      const float *x = win->x + i * LINE;
      a = vf_max_abs(vf_max_abs(a, vf_load(x)), vf_load(x + VL));
      b = vf_max_abs(vf_max_abs(b, vf_load(x + 2 * VL)), vf_load(x + 3 * VL));
      win->scale[i] = *scale;
    }
    vf product = vf_mul(vf_max_abs(a, b), vf_set1(fabsf(*scale)));
    most = _mm512_max_epu32(most, _mm512_castps_si512(product));
  }
  return _mm512_reduce_max_epu32(most);
}

// Multiplies the scales by the power. Returns whether the factors of x and the products are well
// within the range of FP32, or zero.
static bool scale_fits(window *win, float most, float power) {
  const vf scale = vf_load(win->scale), factor = vf_mul(scale, vf_set1(power));
  vf_store(win->scale, factor);
  const vf size = _mm512_abs_ps(factor);
  __mmask16 fits = _mm512_cmp_ps_mask(size, vf_set1(0x1p-100f), _CMP_GE_OQ) &
                   _mm512_cmp_ps_mask(size, vf_set1(0x1p100f), _CMP_LT_OQ);
  fits |= _mm512_cmp_ps_mask(scale, vf_zero(), _CMP_EQ_OQ);
  if (fits != 0xffff) return false;
  if (most != 0) return (most >= 0x1p-100f) & (most < 0x1p100f);
  for (uint32_t i = 0; i < win->n_lines * LINE; i++) {
    if (win->x[i] != 0 && win->scale[i / LINE] != 0) return false;
  }
  return true;
}
_Static_assert(X_WINDOW / LINE == VL, "scales of a window are a vector");

// Packs columns [k, k + n) of a token, n <= X_WINDOW, as even and odd columns of each line, vector
// i at out + i * step. Returns the factor of the sum of their products.
static float pack_window(const td_weight *w, const float *scales, const float *x, uint32_t k,
                         uint32_t n, size_t step, _Float16 *out, bool *unfit) {
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  _Alignas(64) float part[X_WINDOW];
  window win = {.x = x + k, .n_lines = (n + LINE - 1) / LINE};
  if (n % LINE > 0) {
    memset(part + n / LINE * LINE, 0, LINE * sizeof *part);
    win.x = memcpy(part, x + k, n * sizeof *part);
  }
  uint32_t most = largest_of(w, scales, k, &win);
  int up = most > 0 ? TOP + 126 - (int)(most >> 23) : 0;
  if (!scale_fits(&win, f32_from_bits(most), f32_from_bits((uint32_t)(127 + up) << 23))) {
    *unfit = true; // the token is recomputed in FP32
    memset(win.scale, 0, sizeof win.scale);
  }
  for (uint32_t i = 0; i < win.n_lines; i++, out += 2 * step) {
    const vf scale = vf_set1(win.scale[i]);
    vf v[LINE / VL];
    TD_UNROLL for (int j = 0; j < LINE / VL; j++) {
      v[j] = vf_mul(vf_load(win.x + i * LINE + j * VL), scale);
    }
    vh_store_vf(out, _mm512_permutex2var_ps(v[0], even, v[1]),
                _mm512_permutex2var_ps(v[2], even, v[3]));
    vh_store_vf(out + step, _mm512_permutex2var_ps(v[0], odd, v[1]),
                _mm512_permutex2var_ps(v[2], odd, v[3]));
  }
  return f32_from_bits((uint32_t)(127 - up) << 23) * DOWN;
}

// Recomputes one token in FP32.
static void mend(const td_linear_args *a, uint32_t token) {
  td_linear_args one = one_token(a, token, a->row_begin, a->row_end);
  linear_exact(&one);
}

// ---- few tokens -----------------------------------------------------------------------------

// Some rows times all tokens, in tiles of up to TILE_TOKENS. Lives on the stack.
typedef struct {
  _Alignas(64) _Float16 x[X_HALVES];   // columns [k, k + n): [tile][vector][token of the tile][VHL]
  float x_scale[X_HALVES / X_WINDOW];  // [tile][window][token of the tile]
  vf total[PANEL_ROWS * PANEL_TOKENS]; // [row][token], over columns before k
  const td_linear_args *a;
  uint32_t row0, n_rows, k, n;
  distance ahead[2]; // prefetch distances to L2 and L1
  bool nan[PANEL_ROWS], unfit[PANEL_TOKENS];
} panel;

// acc [R][T] += products of a line of each row; x [2][T][VHL].
TD_INLINE void add_line(const int R, const int T, const __m512i *line, const _Float16 *x, vh *acc,
                        __m512i *seen) {
  TD_UNROLL for (int r = 0; r < R; r++) seen[r] = look(seen[r], line[r]);
  TD_UNROLL for (int odd = 0; odd < 2; odd++) {
    vh w[MAX_ROWS];
    TD_UNROLL for (int r = 0; r < R; r++) w[r] = odd ? odd_of(line[r]) : even_of(line[r]);
    TD_UNROLL for (int t = 0; t < T; t++) {
      vh xv = vh_load(x + (odd * T + t) * VHL);
      __asm__("" : "+v"(xv)); // one load instead of one per multiplication
      TD_UNROLL for (int r = 0; r < R; r++) acc[r * T + t] = vh_fma(w[r], xv, acc[r * T + t]);
    }
  }
}

static bool is_final(const panel *p) {
  return is_sum(p->a->w) && !memchr(p->nan, true, p->n_rows);
}

static bool single_row_tiles(const panel *p) {
  (void)p;
  return false;
}

#include "kernels/cpu/linear/panel_vec.h"

// Position along some rows.
typedef struct {
  const elem *w[MAX_ROWS];
  const _Float16 *x;
  uint32_t k;
  fetch in_l2, in_l1;
  __m512i seen[MAX_ROWS];
} walk;

// acc [R][T] = products of the columns up to end.
TD_INLINE void dot_chain(const int R, const int T, const panel *p, uint32_t row, walk *at,
                         uint32_t end, vh *acc) {
  __m512i line[MAX_ROWS];
  TD_UNROLL for (int i = 0; i < R * T; i++) acc[i] = vh_zero();
  for (; at->k + LINE <= end; at->k += LINE, at->x += T * LINE) {
    if (at->k >= at->in_l2.until) at->in_l2 = fetch_of(p, row, (uint32_t)R, at->k, p->ahead[0]);
    if (at->k >= at->in_l1.until) at->in_l1 = fetch_of(p, row, (uint32_t)R, at->k, p->ahead[1]);
    TD_UNROLL for (int r = 0; r < R; r++) {
      const uintptr_t w = (uintptr_t)(at->w[r] + at->k);
      __builtin_prefetch((const void *)(w + at->in_l2.offset), 0, 2);
      __builtin_prefetch((const void *)(w + at->in_l1.offset));
      line[r] = load_line(at->w[r] + at->k);
    }
    add_line(R, T, line, at->x, acc, at->seen);
  }
  if (at->k < end) {
    TD_UNROLL for (int r = 0; r < R; r++) line[r] = load_line_n(at->w[r] + at->k, end - at->k);
    add_line(R, T, line, at->x, acc, at->seen);
    at->k = end;
  }
}

// Rows [row, row + R) of the panel times tokens [token, token + T).
TD_INLINE void dot_rows(const int R, const int T, panel *p, uint32_t row, uint32_t token) {
  const size_t stride = p->a->n_tokens, at_pair = row * stride + token;
  const float *x_scale = p->x_scale + token * ((p->n + X_WINDOW - 1) / X_WINDOW);
  vf total[MAX_ROWS * TILE_TOKENS];
  walk at = {.x = p->x + (size_t)token * ((p->n + LINE - 1) / LINE * LINE)};
  TD_UNROLL for (int r = 0; r < R; r++) {
    at.w[r] = row_data(p->a->w, p->row0 + row + (uint32_t)r) + p->k;
    at.seen[r] = _mm512_setzero_si512();
  }
  TD_UNROLL for (int i = 0; i < R * T; i++) {
    total[i] = p->k > 0 ? p->total[at_pair + (size_t)(i / T) * stride + i % T] : vf_zero();
  }
  for (uint32_t end; at.k < p->n; x_scale += T) {
    vh first[MAX_ROWS * TILE_TOKENS], acc[MAX_ROWS * TILE_TOKENS];
    end = p->n - at.k < X_WINDOW ? p->n : at.k + X_WINDOW;
    dot_chain(R, T, p, row, &at, end - at.k > CHAIN ? at.k + CHAIN : at.k, first);
    dot_chain(R, T, p, row, &at, end, acc);
    TD_UNROLL for (int i = 0; i < R * T; i++) {
      total[i] = vf_fma(vh_fold(vh_add(first[i], acc[i])), vf_set1(x_scale[i % T]), total[i]);
    }
    __asm__ volatile("" : "+m"(total)); // registers are used up
  }
  TD_UNROLL for (int r = 0; r < R; r++) p->nan[row + (uint32_t)r] |= has_nan(at.seen[r]);
  if (p->k + p->n < p->a->w->cols) {
    TD_UNROLL for (int i = 0; i < R * T; i++) {
      p->total[at_pair + (size_t)(i / T) * stride + i % T] = total[i];
    }
    return;
  }
  put_sums(R, T, p, row, token, total);
}

static void pack_panel(panel *p, const float *scales) {
  const uint32_t n_padded = (p->n + LINE - 1) / LINE * LINE;
  const uint32_t n_windows = (p->n + X_WINDOW - 1) / X_WINDOW;
  for (uint32_t i = 0; i < panel_tiles(p); i++) {
    uint32_t begin = panel_tile_begin(p, i), n_tokens = panel_tile_begin(p, i + 1) - begin;
    for (uint32_t t = 0; t < n_tokens; t++) {
      const float *x = token_x(p->a, begin + t);
      _Float16 *out = p->x + (size_t)begin * n_padded + t * VHL;
      float *x_scale = p->x_scale + begin * n_windows + t;
      for (uint32_t k = 0; k < p->n; k += X_WINDOW, x_scale += n_tokens) {
        uint32_t n = p->n - k < X_WINDOW ? p->n - k : X_WINDOW;
        *x_scale = pack_window(p->a->w, scales, x, p->k + k, n, (size_t)n_tokens * VHL, out,
                               &p->unfit[begin + t]);
        out += (size_t)X_WINDOW * n_tokens;
      }
    }
  }
}

static void linear_few(const td_linear_args *a, const float *scales) {
  panel p;
  p.a = a;
  memset(p.unfit, 0, sizeof p.unfit);
  uint32_t cols = a->w->cols, step = X_HALVES / a->n_tokens / X_WINDOW * X_WINDOW;
  for (p.row0 = a->row_begin; p.row0 < a->row_end; p.row0 += p.n_rows) {
    p.n_rows = a->row_end - p.row0 < PANEL_ROWS ? a->row_end - p.row0 : PANEL_ROWS;
    memset(p.nan, 0, sizeof p.nan);
    for (p.k = 0; p.k < cols; p.k += p.n) {
      p.n = cols - p.k < step ? cols - p.k : step;
      set_ahead(&p);
      pack_panel(&p, scales);
      dot_panel(&p);
    }
    finish_panel(&p);
  }
  for (uint32_t t = 0; t < a->n_tokens; t++) {
    if (p.unfit[t]) mend(a, t);
  }
}

// ---- many tokens ----------------------------------------------------------------------------

enum { PAIR_STEPS = CHAIN_STEPS, WINDOW_RUNS = 1 };
typedef char gemm_scale, gemm_lanes; // unused
typedef bool x_range;                // whether the token does not qualify
#include "kernels/cpu/avx512fp16/gemm_vh.h"
#include "kernels/cpu/linear/gemm_vec.h"

_Static_assert((int)X_WINDOW == (int)WINDOW, "windows are the same");

TD_INLINE vf end_sum(const gemm *g, sv sum, gemm_lanes scale, uint32_t token, vf total) {
  (void)scale;
  return vf_fma(vh_fold(sum), vf_set1(g->x_scale[token]), total);
}

static void find_window(gemm *g) {
  uint32_t left = g->a->w->cols - g->k;
  g->n = left < WINDOW ? left : WINDOW;
  g->n_runs = 1;
  g->n_vectors = g->run_vectors[0] = (g->n + LINE - 1) / LINE * 2;
}

static void pack_token(gemm *g, uint32_t token, size_t step, packed *out) {
  const float *x = token_x(g->a, g->token0 + token);
  if (g->k == 0) g->range[token] = false;
  g->x_scale[token] = pack_window(g->a->w, g->x_scales, x, g->k, g->n, step, out, &g->range[token]);
}

static void decode_row(gemm *g, uint32_t row, uint32_t place, packed *out) {
  const elem *w = row_data(g->a->w, g->row0 + row) + g->k;
  const size_t step = GEMM_ROWS * PL;
  __m512i seen = _mm512_setzero_si512();
  for (uint32_t k = 0; k < g->n; k += LINE, out += 2 * step) {
    __m512i line = g->n - k < LINE ? load_line_n(w + k, g->n - k) : load_line(w + k);
    seen = look(seen, line);
    vh_store(out, even_of(line));
    vh_store(out + step, odd_of(line));
  }
  g->nan[row] |= has_nan(seen);
  memset(g->scale[place], 0, sizeof g->scale[place]);
}

static const char *stored_row(const td_weight *w, uint32_t row, uint32_t k) {
  return (const char *)(row_data(w, row) + k);
}

static void end_block(const gemm *g) {
  td_linear_args rows = *g->a;
  rows.row_begin = g->row0;
  rows.row_end = g->row0 + g->n_rows;
  for (uint32_t t = 0; t < g->n_tokens; t++) {
    if (g->range[t]) mend(&rows, g->token0 + t);
  }
}

// ---- all ------------------------------------------------------------------------------------

static void linear_band(const td_linear_args *a, const float *scales) {
  if (a->n_tokens <= PANEL_TOKENS) {
    linear_few(a, scales);
  } else {
    gemm_all(a, scales);
  }
}

static inline void linear_bytes(const td_linear_args *a) {
  const td_weight *w = a->w;
  if (a->n_tokens == 0) return;
  if (scale_is_rows(w)) {
    linear_band(a, NULL);
    return;
  }
  if (w->scale_cols % LINE > 0 || w->scale_rows < MIN_BAND) {
    linear_exact(a);
    return;
  }
  linear_bands(a);
}
