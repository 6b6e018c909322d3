// kernels/cpu/avx512bf16/linear_rows.h - y = W x for rows of weights that are BF16 or convert to
// it, with activations rounded to BF16.
// Include after vec.h and these definitions:
//   elem           the stored element
//   HAS_SCALES     whether there are scales
//   load_line      64 bytes of one row; load_line_n: the first n elements of a line, and zeros
//   vector_of      one of a line's VECTORS vectors of weights
//   put_x          stores a line of x in the order that vector_of has, vector i at out + i * step
// and what gemm_prompt.h needs, except for scales.
//
// Every (row, token) pair has a total of 16 lanes. Columns are cut into windows: the sum of a
// window begins at zero, its vectors are added in order, and it is added to the total. A single
// chain of additions for a whole row would be slower than memory, since each addition waits six
// cycles for the previous one. Rows are multiplied straight from memory, each weight decoded once
// for eight tokens, 16 tokens per call. Any number of tokens keeps this order, so results agree to
// the last bit.
//
// So do both schedules (td_gemv_schedule). The sequential one reads one row at a time as a single
// stream and keeps x in L1. The interleaved one alternates between the chains of two windows or of
// four rows and may read x from L2. Which one is faster depends on the CPU. Prefill uses
// gemm_prompt.h.
//
// A scale of whole rows multiplies the sum. A scale that changes along rows but is shared by a band
// of rows multiplies x before it is rounded. Rounding errors are bounded in error_bound of
// tests/unit/kernel_test.h.
#pragma once

#include "kernels/cpu/common/prefetch.h"
#include "kernels/decl.h"

#define TD_UNROLL _Pragma("GCC unroll 32")

enum { MIN_GROUP = 64 };
static void put_scales(const td_weight *w, uint32_t row, uint32_t n_rows, uint32_t first,
                       uint32_t n, vf *out, size_t step);
static inline float whole_scale(const td_weight *w);

#include "kernels/cpu/avx512bf16/gemm_prompt.h"

enum {
  LINE = 64 / sizeof(elem), // columns
  VECTORS = LINE / PL,
  MIN_BAND = 16,    // rows
  TILE_TOKENS = 8,  // at most
  PANEL_ROWS = 128, // rows that share packed x
  ROWS_1 = sizeof(elem) == 1 ? 2 : 4,
  ROWS_2 = 4,
  PREFETCH_ROWS_BYTES = PREFETCH_GEMV_BYTES,
  // Sequential: up to this many tokens, rows are taken one by one. With more, byte weights are
  // compute-bound, and two rows share the loads of x.
  STREAM_TOKENS = sizeof(elem) == 1 ? 4 : 8,
  // Sequential, byte weights, up to this many tokens: prefetches into L1 at distance
  // AHEAD_IN_ORDER. L2 alone is too far away; twice the distance, or the x of more tokens, would
  // not fit L1.
  IN_ORDER_TOKENS = sizeof(elem) == 1 ? 2 : 0,
  AHEAD_IN_ORDER = 6144,
  // Sequential, one token, byte weights: rows up to this length are taken in pairs, because they
  // have few windows to interleave, and prefetched data is in L1 when the second row is due.
  PAIR_COLS = sizeof(elem) == 1 ? 2047 : 0,
  // Sequential, byte weights, from this many tokens: each row prefetches the next rows column by
  // column into L1, and the rows after those into L2, so no address needs a lookup. Not for BF16,
  // which gains nothing.
  BY_ROWS_TOKENS = sizeof(elem) == 1 ? 5 : TILE_TOKENS + 1,
  // Interleaved, one token, BF16: rows up to this length use no software prefetch, because some
  // CPUs' hardware prefetchers are faster alone. For longer rows they are slower; for byte weights
  // there is no difference.
  OWN_COLS = sizeof(elem) > 1 ? 2048 : 0,
  MAX_ROWS = 4,      // rows that share a load of x
  PANEL_TOKENS = 16, // at most
  // Elements of packed x, sequential and interleaved. BF16 rows are twice as long in bytes, so they
  // are always cut to what leaves x in L1.
  STREAM_LANES = 16384,
  X_LANES = sizeof(elem) == 1 ? 65536 : STREAM_LANES,
  // Columns per window. Chains end before the CPU's reorder buffer is full; a line of bytes is two
  // additions.
  X_WINDOW = 512 * sizeof(elem),
  // Windows of a byte row in flight at once; more would fill the reorder buffer with waiting
  // additions. BF16's single chain is faster than memory.
  WINDOWS = sizeof(elem) == 1 ? 2 : 1
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

// Whether the result is the sum of all lanes.
static inline bool is_sum(const td_weight *w) {
  return !HAS_SCALES || !scale_is_rows(w);
}

// The result, from the sum of all lanes. NaN codes make it NaN; rows that are tiny are recomputed.
TD_INLINE float finish(const td_weight *w, uint32_t row, bool tiny, float sum) {
  (void)tiny;
  return is_sum(w) ? sum : sum * row_scales(w, row)[0];
}

// Usually one scale serves all rows, or each row has its own.
static void put_scales(const td_weight *w, uint32_t row, uint32_t n_rows, uint32_t first,
                       uint32_t n, vf *out, size_t step) {
  const bool same = row / w->scale_rows == (row + n_rows - 1) / w->scale_rows;
  for (uint32_t i = 0; i < n; i++, out += step) {
    float of_rows[VL] = {0};
    for (uint32_t r = 0; !same && r < n_rows; r++)
      of_rows[r] = row_scales(w, row + r)[first + i];
    *out = same ? vf_set1(row_scales(w, row)[first + i]) : vf_load(of_rows);
  }
}

static inline float whole_scale(const td_weight *w) {
  (void)w;
  return 1;
}

// ---- activations ----------------------------------------------------------------------------

// Packs columns [k, k + n) of a token, multiplied by scales if there are any, vector i at out + i *
// step; zeros up to a whole line.
static void pack_x(const td_weight *w, const float *scales, const float *x, uint32_t k, uint32_t n,
                   size_t step, packed *out, x_range *range) {
  x_range r[LINE / VL]; // independent, so that none waits for another
  TD_UNROLL for (int j = 0; j < LINE / VL; j++) r[j] = j ? empty_range() : *range;
  const uint32_t run = scales ? w->scale_cols : UINT32_MAX;
  uint32_t left = scales ? run - k % run : run;
  const float *scale = scales ? scales + k / run : &(float){1};
  x += k;
  for (uint32_t at = 0; at < n; at += LINE, left -= LINE, out += VECTORS * step) {
    if (left == 0) left = run, scale++;
    vf v[LINE / VL];
    TD_UNROLL for (uint32_t j = 0; j < LINE / VL; j++) {
      const uint32_t begin = at + j * VL, lanes = n < begin ? 0 : n - begin;
      vf xv = lanes < VL ? vf_load_n(x + begin, lanes) : vf_load(x + begin);
      v[j] = vf_mul(xv, vf_set1(*scale));
      r[j] = range_with(r[j], v[j], xv);
    }
    put_x(v, out, step);
  }
  *range = r[0];
  TD_UNROLL for (int j = 1; j < LINE / VL; j++) *range = both_ranges(*range, r[j]);
}

// ---- few tokens -----------------------------------------------------------------------------

// Some rows times all tokens, in tiles of up to TILE_TOKENS. Lives on the stack.
typedef struct {
  _Alignas(64) packed x[X_LANES];      // columns [k, k + n): [tile][vector][token of the tile][PL]
  vf total[PANEL_ROWS * PANEL_TOKENS]; // [row][token], over columns before k
  x_range range[PANEL_TOKENS];
  const td_linear_args *a;
  uint32_t row0, n_rows, k, n;
  uint32_t n_padded;    // n rounded up to whole lines
  distance ahead[2];    // prefetch distances to L2 and L1
  bool nan[PANEL_ROWS]; // rows with tiny weights
} panel;

// acc [R][T] += products of a line of each row; x [VECTORS][T][PL].
TD_INLINE void add_line(const int R, const int T, const vi *line, const packed *x, vf *acc,
                        vi *seen) {
  TD_UNROLL for (int r = 0; r < R; r++) seen[r] = look(seen[r], line[r]);
  TD_UNROLL for (int j = 0; j < VECTORS; j++) {
    pv w[MAX_ROWS];
    TD_UNROLL for (int r = 0; r < R; r++) w[r] = vector_of(line[r], j);
    TD_UNROLL for (int t = 0; t < T; t++) {
      pv xv = pv_load(x + (j * T + t) * PL);
      __asm__("" : "+v"(xv)); // one load instead of one per multiplication
      TD_UNROLL for (int r = 0; r < R; r++) acc[r * T + t] = pv_fma(w[r], xv, acc[r * T + t]);
    }
  }
}

static bool is_final(const panel *p) {
  return is_sum(p->a->w);
}

static bool is_stream(const panel *p) {
  return p->a->way == TD_GEMV_SEQUENTIAL;
}

static bool single_row_tiles(const panel *p) {
  const uint32_t n = p->a->n_tokens;
  if (sizeof(elem) == 1 && n == 1) return !is_stream(p) || p->a->w->cols > PAIR_COLS;
  return is_stream(p) ? n <= STREAM_TOKENS : n <= 2 && p->a->w->cols <= OWN_COLS;
}

#include "kernels/cpu/linear/panel_vec.h"

// Position along some rows.
typedef struct {
  const elem *w[MAX_ROWS];
  const packed *x;
  uint32_t k;
  fetch in_l2, in_l1;
  vi seen[MAX_ROWS];
} walk;

// What is prefetched, and to which cache.
typedef enum {
  AT_DISTANCE, // at a byte distance into L2; for several tokens also into L1 at the end
  BY_ROWS,     // the next rows into L1, the ones after them into L2
  IN_ORDER     // at a byte distance into L1
} fetching;

// acc [R][T] += products of less than a line, up to column end.
TD_INLINE void add_tail(const int R, const int T, walk *at, uint32_t end, vf *acc) {
  vi line[MAX_ROWS];
  if (at->k == end) return;
  TD_UNROLL for (int r = 0; r < R; r++) line[r] = load_line_n(at->w[r] + at->k, end - at->k);
  add_line(R, T, line, at->x, acc, at->seen);
  at->k = end;
}

// acc [R][T] = products of the columns up to end.
TD_INLINE void dot_window(const int R, const int T, const fetching how, const panel *p,
                          uint32_t row, walk *at, uint32_t end, vf *acc) {
  const bool by_rows = how == BY_ROWS;
  const bool into_l2 = how != IN_ORDER && (T > 1 || is_stream(p) || p->a->w->cols > OWN_COLS);
  const bool into_l1 = how == IN_ORDER || T > 2 || (T == 2 && !is_stream(p));
  vi line[MAX_ROWS];
  TD_UNROLL for (int i = 0; i < R * T; i++) acc[i] = vf_zero();
  for (; at->k + LINE <= end; at->k += LINE, at->x += T * LINE) {
    if (how == AT_DISTANCE && at->k >= at->in_l2.until) {
      at->in_l2 = fetch_of(p, row, (uint32_t)R, at->k, p->ahead[0]);
    }
    if (!by_rows && into_l1 && at->k >= at->in_l1.until) {
      at->in_l1 = fetch_of(p, row, (uint32_t)R, at->k, p->ahead[1]);
    }
    TD_UNROLL for (int r = 0; r < R; r++) {
      const uintptr_t here = (uintptr_t)(at->w[r] + at->k);
      if (into_l2) __builtin_prefetch((const void *)(here + at->in_l2.offset), 0, 2);
      if (into_l1) __builtin_prefetch((const void *)(here + at->in_l1.offset));
      // keeps the prefetch before the load, which is 2 % faster
      if (by_rows) __asm__ volatile("" ::: "memory");
      line[r] = load_line(at->w[r] + at->k);
      __asm__("" : "+v"(line[r])); // one load, which may cross cache lines
    }
    add_line(R, T, line, at->x, acc, at->seen);
  }
  add_tail(R, T, at, end, acc);
}

// Lines of columns from an unaligned address, assembled from aligned cache lines. Tensors are
// unaligned in files, and loads across cache lines are up to a tenth slower.
typedef struct {
  const vi *line; // next aligned line
  vi held;        // previous aligned line
  vi places;      // byte positions of the columns in those two
} lines;

static inline lines lines_from(const elem *w) {
  // bytes of the held line before the columns
  const uint32_t before = ((uint32_t)(uintptr_t)w - 1) % sizeof(vi) + 1;
  const vi fours = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const vi bytes = _mm512_add_epi32(_mm512_set1_epi32(0x03020100),
                                    _mm512_mullo_epi32(fours, _mm512_set1_epi32(0x04040404)));
  const char *line = (const char *)w - before;
  const __mmask64 there = before < sizeof(vi) ? ~(__mmask64)0 << before : 0;
  return (lines){.line = (const vi *)(line + sizeof(vi)),
                 .held = _mm512_maskz_loadu_epi8(there, line),
                 .places = _mm512_add_epi8(bytes, _mm512_set1_epi8((char)before))};
}

// The next line of columns. The aligned line loaded for it contains some of them, and may extend
// past the end of the tensor.
TD_INLINE vi next_line(lines *l) {
  vi next;
  // asm, because C does not allow reading past the end
  __asm__("vmovdqa64 %1, %0" : "=v"(next) : "m"(*l->line));
  const vi columns = _mm512_permutex2var_epi8(l->held, l->places, next);
  l->held = next;
  l->line++;
  return columns;
}

// acc [WINDOWS][T] = products of the next windows of a row, interleaved. Prefetches go in memory
// order, or the hardware prefetcher would not follow both windows.
TD_INLINE void dot_windows(const int T, const fetching how, const panel *p, uint32_t row, walk *at,
                           vf *acc) {
  const elem *w = at->w[0] + at->k, *line_on = w;
  fetch in_l2[WINDOWS] = {0};
  lines of[WINDOWS];
  if (how == IN_ORDER && at->k >= at->in_l1.until) {
    at->in_l1 = fetch_of(p, row, 1, at->k, p->ahead[1]);
  }
  TD_UNROLL for (int i = 0; i < WINDOWS; i++) of[i] = lines_from(w + i * X_WINDOW);
  TD_UNROLL for (int i = 0; i < WINDOWS * T; i++) acc[i] = vf_zero();
  for (uint32_t step = 0; step < X_WINDOW; step += LINE) {
    TD_UNROLL for (int i = 0; i < WINDOWS; i++, line_on += LINE) {
      const uint32_t on = (uint32_t)i * X_WINDOW + step, k = at->k + on;
      vi line;
      if (how == IN_ORDER) {
        __builtin_prefetch((const void *)((uintptr_t)line_on + at->in_l1.offset));
        line = next_line(&of[i]);
      } else {
        if (k >= in_l2[i].until) in_l2[i] = fetch_of(p, row, 1, k, p->ahead[0]);
        __builtin_prefetch((const void *)((uintptr_t)(w + on) + in_l2[i].offset), 0, 2);
        // keeps the prefetch before the load; after it, rows are 4 % slower
        __asm__ volatile("" ::: "memory");
        line = load_line(w + on);
        __asm__("" : "+v"(line)); // one load
      }
      add_line(1, T, &line, at->x + on * T, &acc[i * T], at->seen);
    }
  }
  at->k += WINDOWS * X_WINDOW;
  at->x += WINDOWS * X_WINDOW * T;
}

// acc [2] = one token's products of the columns up to end of two rows, interleaved. Prefetches go
// in memory order.
TD_INLINE void dot_pair(const panel *p, uint32_t row, walk *at, uint32_t end, vf *acc) {
  if (at->k >= at->in_l1.until) at->in_l1 = fetch_of(p, row, 1, at->k, p->ahead[1]);
  uintptr_t ahead = (uintptr_t)(at->w[0] + 2 * at->k) + at->in_l1.offset;
  lines of[2] = {lines_from(at->w[0] + at->k), lines_from(at->w[1] + at->k)};
  vi line[2];
  acc[0] = acc[1] = vf_zero();
  for (; at->k + LINE <= end; at->k += LINE, at->x += LINE) {
    TD_UNROLL for (int r = 0; r < 2; r++, ahead += 64) {
      __builtin_prefetch((const void *)ahead);
      line[r] = next_line(&of[r]);
    }
    add_line(2, 1, line, at->x, acc, at->seen);
  }
  add_tail(2, 1, at, end, acc);
}

// Distance in bytes from the panel's row to the row n further on; if R rows from there are not all
// in the panel, to what follows the panel.
TD_INLINE size_t rows_on(const int R, const panel *p, uint32_t row, uint32_t n) {
  if (row + n + (uint32_t)R <= p->n_rows) return (size_t)n * p->a->w->cols * sizeof(elem);
  return behind_panel(p, 0) - (uintptr_t)(row_data(p->a->w, p->row0 + row) + p->k);
}

TD_INLINE void dot_rows_in(const int R, const int T, const fetching how, panel *p, uint32_t row,
                           uint32_t token) {
  const size_t stride = p->a->n_tokens, at_pair = row * stride + token;
  vf total[MAX_ROWS * TILE_TOKENS], acc[MAX_ROWS * TILE_TOKENS];
  walk at = {.x = p->x + (size_t)token * p->n_padded};
  TD_UNROLL for (int r = 0; r < R; r++) {
    at.w[r] = row_data(p->a->w, p->row0 + row + (uint32_t)r) + p->k;
    at.seen[r] = _mm512_set1_epi32(-1);
  }
  TD_UNROLL for (int i = 0; i < R * T; i++) {
    total[i] = p->k > 0 ? p->total[at_pair + (size_t)(i / T) * stride + i % T] : vf_zero();
  }
  if (how == BY_ROWS) {
    at.in_l2.offset = rows_on(R, p, row, 2 * (uint32_t)R);
    at.in_l1.offset = rows_on(R, p, row, (uint32_t)R);
  }
  const bool by_windows = R == 1 && WINDOWS > 1 && (how == IN_ORDER || (T == 1 && !is_stream(p)));
  while (by_windows && at.k + WINDOWS * X_WINDOW <= p->n) {
    dot_windows(T, how, p, row, &at, acc);
    TD_UNROLL for (int i = 0; i < WINDOWS * T; i++) total[i % T] = vf_add(total[i % T], acc[i]);
  }
  while (at.k < p->n) {
    const uint32_t end = p->n - at.k < X_WINDOW ? p->n : at.k + X_WINDOW;
    if (R == 2 && how == IN_ORDER) {
      dot_pair(p, row, &at, end, acc);
    } else {
      dot_window(R, T, how, p, row, &at, end, acc);
    }
    TD_UNROLL for (int i = 0; i < R * T; i++) total[i] = vf_add(total[i], acc[i]);
    if (R * T > 8) __asm__ volatile("" : "+m"(total)); // registers are used up
  }
  TD_UNROLL for (int r = 0; r < R; r++) p->nan[row + (uint32_t)r] |= tiny_of(at.seen[r]) != 0;
  if (p->k + p->n < p->a->w->cols) {
    TD_UNROLL for (int i = 0; i < R * T; i++) {
      p->total[at_pair + (size_t)(i / T) * stride + i % T] = total[i];
    }
    return;
  }
  put_sums(R, T, p, row, token, total);
}

// Rows [row, row + R) of the panel times tokens [token, token + T).
TD_INLINE void dot_rows(const int R, const int T, panel *p, uint32_t row, uint32_t token) {
  const bool in_order = T <= IN_ORDER_TOKENS && (R == 1 || (R == 2 && T == 1));
  if (T >= BY_ROWS_TOKENS && is_stream(p)) {
    dot_rows_in(R, T, BY_ROWS, p, row, token);
  } else if (in_order && is_stream(p)) {
    dot_rows_in(R, T, IN_ORDER, p, row, token);
  } else {
    dot_rows_in(R, T, AT_DISTANCE, p, row, token);
  }
}

static void pack_panel(panel *p, const float *scales) {
  for (uint32_t i = 0; i < panel_tiles(p); i++) {
    uint32_t begin = panel_tile_begin(p, i), n = panel_tile_begin(p, i + 1) - begin;
    packed *out = p->x + (size_t)begin * p->n_padded;
    for (uint32_t t = 0; t < n; t++) {
      pack_x(p->a->w, scales, token_x(p->a, begin + t), p->k, p->n, n * PL, out + t * PL,
             &p->range[begin + t]);
    }
  }
}

static void linear_band(const td_linear_args *a, const float *scales) {
  panel p;
  p.a = a;
  const uint32_t lanes = is_stream(&p) ? STREAM_LANES : X_LANES;
  uint32_t cols = a->w->cols, step = lanes / a->n_tokens / X_WINDOW * X_WINDOW;
  for (p.row0 = a->row_begin; p.row0 < a->row_end; p.row0 += p.n_rows) {
    p.n_rows = a->row_end - p.row0 < PANEL_ROWS ? a->row_end - p.row0 : PANEL_ROWS;
    memset(p.nan, 0, sizeof p.nan);
    for (uint32_t t = 0; t < a->n_tokens; t++)
      p.range[t] = empty_range();
    for (p.k = 0; p.k < cols; p.k += p.n) {
      p.n = cols - p.k < step ? cols - p.k : step;
      p.n_padded = (p.n + LINE - 1) / LINE * LINE;
      set_ahead(&p);
      if (a->n_tokens <= IN_ORDER_TOKENS && is_stream(&p))
        p.ahead[1] = distance_of(&p, AHEAD_IN_ORDER);
      pack_panel(&p, scales);
      dot_panel(&p);
    }
    finish_panel(&p);
    for (uint32_t t = 0; t < a->n_tokens; t++)
      end_rows(a, t, p.range[t], p.nan, p.row0, p.row0 + p.n_rows);
  }
}

// ---- all ------------------------------------------------------------------------------------

// For up to PANEL_TOKENS tokens.
static void linear_few(const td_linear_args *a) {
  if (!HAS_SCALES || scale_is_rows(a->w)) {
    linear_band(a, NULL);
  } else {
    linear_bands(a);
  }
}

static inline void linear_rows(const td_linear_args *a) {
  const td_weight *w = a->w;
  if (a->n_tokens == 0) return;
  if (HAS_SCALES && !scale_is_rows(w) && (w->scale_cols % LINE > 0 || w->scale_rows < MIN_BAND)) {
    linear_exact(a);
  } else if (a->prompt) {
    linear_prompt(a);
  } else {
    in_parts(a, PANEL_TOKENS, linear_few);
  }
}
