// kernels/cpu/linear/linear_q4.h - y = W x for rows of 4-bit codes (TD_I4, TD_F4E2M1) with a scale
// per group.
// Include after an ISA's and dtype's codes and
//   Q4_TABLE    see q4.h
//   Q4_ZEROS    1 if there may be zero points
//   Q4_EXACT    if activations are rounded: the kernel for tokens that cannot be
//
// A block is VL words of eight codes, 8 VL columns, as STEPS vectors of packed weights. Codes are
// extracted by their position in the words: vector i of a block has column 8 j + i in lane j or,
// with two lanes per word, 4 j + i. So words are not unpacked to column order; instead x is
// reordered once for all rows of a call, with zeros after the last column.
//
// Every (row, token) pair has one accumulator of VL lanes. In each block the products are summed
// from zero, in the order of i, and the sums times the scale of each lane's group are added to the
// accumulator. All paths keep this order, so they agree to the last bit:
//   1 token          Q4_GEMV_ROWS rows at a time share the loads of x; memory-bound
//   2 to 16 tokens   Q4_BATCH_ROWS rows times two or three tokens, Q4_BATCH_ROWS_8 rows times up to
//                    Q4_TOKENS, with sums in registers; a window of columns is as long as the x of
//                    all tokens fits L1
//   more             gemm_q4.h, codes decoded into the cache; not in BF16
#pragma once

#include "kernels/cpu/linear/q4.h"
#include "kernels/decl.h"

#ifdef Q4_EXACT
#include "kernels/cpu/common/finite_range.h"
#else
typedef char x_range; // unused
#endif

enum {
  BLOCK = 8 * VL, // columns
  STEPS = BLOCK / PL,
  X_COLS = 32768 / sizeof(packed), // reordered x that fits L1
  X_COLS_SHARED = 8192,            // the same for several tokens, whose totals need room too
  MAX_SCALES = X_COLS / 8,         // per row: a lane is eight columns with at most one scale
  LIST = MAX_SCALES + 2 * VL, // padded, because whole vectors are written and read past the end
  PANEL = 128,                // rows that share reordered x
  MAX_TOKENS = 2 * Q4_TOKENS, // for more, decoding into the cache pays
  MAX_ROWS = 4,               // per tile, at most
  TAIL_BYTES = 2 * sizeof(vi) + 64, // bytes after the blocks that can be read in place
  ROWS_AHEAD = 8,                   // prefetch distance for several tokens, which use rows in parts
};

// How a block's scales are found. A row's scales are converted to F32 and put in a list, per_block
// entries for each block or, for longer groups, for each 2^shift blocks. Lane j uses entry
// spread[j].
typedef struct {
  uint32_t per_block, shift;
  bool stored; // the list has the scales as stored; otherwise they are repeated
  size_t of_row, in_all;
  vi spread;
} q4_groups;

static q4_groups groups_of(const td_weight *w) {
  uint32_t size = w->scale_cols, index[VL];
  q4_groups g = {.per_block = 1, .stored = true, .of_row = td_weight_groups(w)};
  g.in_all = g.of_row * w->rows;
  if (size >= w->cols) {
    g.shift = 31;
  } else if (size % BLOCK == 0) {
    g.stored = (size / BLOCK & (size / BLOCK - 1)) == 0;
    while (g.stored && (uint32_t)BLOCK << g.shift < size)
      g.shift++;
  } else {
    g.stored = BLOCK % size == 0;
    g.per_block = g.stored ? BLOCK / size : VL;
  }
  for (uint32_t j = 0; j < VL; j++)
    index[j] = j * g.per_block / VL;
  g.spread = vi_load(index);
  return g;
}

// A window: columns [k, k + n), k at the start of a block, and their scales in each row.
typedef struct {
  uint32_t k, n, n_blocks;
  uint32_t begin, n_stored; // scales
  uint32_t first;    // block, counted from the start of the first scale's group, at which k is
  uint32_t n_listed; // entries that the list needs
} q4_window;

static q4_window window_of(const td_weight *w, const q4_groups *g, uint32_t k, uint32_t n) {
  q4_window win = {.k = k, .n = n, .n_blocks = (n + BLOCK - 1) / BLOCK};
  win.begin = k / w->scale_cols;
  win.n_stored = (k + n - 1) / w->scale_cols - win.begin + 1;
  win.first = g->shift < 31 ? k / BLOCK & ((1u << g->shift) - 1) : 0;
  win.n_listed = g->shift ? win.n_stored : win.n_blocks * g->per_block;
  return win;
}

// Converts n zero points minus 8 to F32: those at nibble position `place` of their words, of which
// `left` words are stored.
static void zeros_to_f32(const uint32_t *from, uint32_t place, size_t left, uint32_t n,
                         float *out) {
  size_t at = 0;
  for (; at < n && at + VL <= left; at += VL)
    vf_store(out + at, vf_zero_points(from + at, place));
  if (at >= n) return;
  uint32_t part[VL] = {0};
  memcpy(part, from + at, (left - at) * sizeof *part);
  vf_store(out + at, vf_zero_points(part, place));
}

// The list of a row's scales (or zero points) in a window, followed by zeros.
static void list_groups(const td_weight *w, const q4_groups *g, const q4_window *win, uint32_t row,
                        bool zeros, float *list) {
  float found[LIST];
  float *to = g->stored ? list : found;
  if (zeros) {
    size_t at = row / 8 * g->of_row + win->begin, n = ((size_t)w->rows + 7) / 8 * g->of_row;
    zeros_to_f32(w->zero + at, row % 8, n - at, win->n_stored, to);
  } else {
    size_t at = row * g->of_row + win->begin;
    const char *from = (const char *)w->scale + at * td_dtype_bytes(w->scale_dtype);
    scales_to_f32(from, w->scale_dtype, g->in_all - at, win->n_stored, to);
  }
  uint32_t step = BLOCK / g->per_block, i = g->stored ? win->n_stored : 0;
  for (; !g->stored && i < win->n_listed && i * step < win->n; i++)
    list[i] = found[(win->k + i * step) / w->scale_cols - win->begin];
  for (; i < win->n_listed; i++)
    list[i] = 0;
}

#ifdef Q4_EXACT
TD_INLINE x_range block_range(x_range range, const float *x) {
  for (uint32_t i = 0; i < BLOCK; i += VL)
    range = range_with(range, vf_load(x + i), vf_load(x + i));
  return range;
}
#else
static x_range empty_range(void) {
  return 0;
}
static x_range block_range(x_range range, const float *x) {
  (void)x;
  return range;
}
#endif

// Reorders n columns of x, vector i at out + i step; n is at most whole blocks.
static void order_x(const float *x, uint32_t n, packed *out, size_t step, x_range *range) {
  x_range r = *range;
  uint32_t k = 0;
  for (; k + BLOCK <= n; k += BLOCK, out += STEPS * step) {
    r = block_range(r, x + k);
    q4_order(x + k, out, step);
  }
  if (k < n) {
    _Alignas(64) float part[BLOCK] = {0};
    memcpy(part, x + k, (n - k) * sizeof *x);
    r = block_range(r, part);
    q4_order(part, out, step);
  }
  *range = r;
}

// Recomputes a token whose activations cannot be rounded.
static void end_token(const td_linear_args *a, uint32_t token, x_range range) {
#ifdef Q4_EXACT
  if (range_within(range, X_LEAST, X_MOST)) return;
  td_linear_args one = one_token(a, token, a->row_begin, a->row_end);
  Q4_EXACT(&one);
#else
  (void)a, (void)token, (void)range;
#endif
}

// Some blocks of some rows.
typedef struct {
  const uint8_t *codes[MAX_ROWS];
  const float (*scales)[LIST], (*zeros)[LIST]; // per row
  uint32_t n_blocks;
  uint32_t first; // block of the lists' first group
  size_t ahead;   // prefetch distance in bytes
} q4_tile;

// acc[r][t] = products of a block, starting from zero; x [STEPS][T][PL].
TD_INLINE void dot_block(const int R, const int T, vi (*words)[4], const vf *zero, const packed *x,
                         vf *acc) {
  TD_UNROLL for (int i = 0; i < R * T; i++) acc[i] = vf_zero();
  TD_UNROLL for (int i = 0; i < STEPS / 2; i++) {
    pv lo[MAX_ROWS], hi[MAX_ROWS];
    TD_UNROLL for (int r = 0; r < R; r++) {
      nibbles_pair(words[r], i, Q4_TABLE(), &lo[r], &hi[r]);
      if (zero) q4_less(&lo[r], &hi[r], zero[r]);
    }
    TD_UNROLL for (int t = 0; t < 2 * T; t++, x += PL) {
      pv xv = pv_load(x);
      if (R > 1) __asm__("" : "+v"(xv)); // one load instead of one per multiplication
      TD_UNROLL for (int r = 0; r < R; r++) {
        vf *sum = &acc[r * T + t % T];
        *sum = pv_fma(t < T ? lo[r] : hi[r], xv, *sum);
      }
    }
  }
}

// totals [R][step] += the rows' products with T tokens; x [block][STEPS][T][PL]. one: every block
// has a single scale.
TD_INLINE void dot_tile(const int R, const int T, const bool zeros, const bool one,
                        const q4_tile *tile, const q4_groups *g, const packed *x, vf *totals,
                        size_t step) {
  enum { IN_REGISTERS = 8 };
  vf acc[MAX_ROWS * Q4_TOKENS], sum[IN_REGISTERS];
  if (R * T <= IN_REGISTERS) {
    TD_UNROLL for (int i = 0; i < R * T; i++) sum[i] = totals[(size_t)(i / T) * step + i % T];
  }
  for (uint32_t b = 0; b < tile->n_blocks; b++, x += T * BLOCK) {
    vi words[MAX_ROWS][4];
    vf zero[MAX_ROWS];
    uint32_t at = ((b + tile->first) >> g->shift) * g->per_block;
    TD_UNROLL for (int r = 0; r < R; r++) {
      const uint8_t *codes = tile->codes[r] + b * sizeof(vi);
      __builtin_prefetch((const void *)((uintptr_t)codes + tile->ahead));
      nibbles_load(codes, Q4_TABLE(), words[r]);
      if (zeros) zero[r] = vf_permute(vf_load(tile->zeros[r] + at), g->spread);
    }
    dot_block(R, T, words, zeros ? zero : NULL, x, acc);
    TD_UNROLL for (int r = 0; r < R; r++) {
      const float *scales = tile->scales[r] + at;
      vf scale = one ? vf_set1(*scales) : vf_permute(vf_load(scales), g->spread);
      TD_UNROLL for (int t = 0; t < T; t++) {
        vf *total = R * T <= IN_REGISTERS ? &sum[r * T + t] : &totals[(size_t)r * step + (size_t)t];
        *total = vf_fma(acc[r * T + t], scale, *total);
      }
    }
    // Keeps the compiler from holding more totals in registers, of which there are too few.
    if (R * T > IN_REGISTERS) __asm__ volatile("" ::: "memory");
  }
  if (R * T <= IN_REGISTERS) {
    TD_UNROLL for (int i = 0; i < R * T; i++) totals[(size_t)(i / T) * step + i % T] = sum[i];
  }
}

TD_INLINE uint32_t rows_with(uint32_t n_tokens) {
  return n_tokens == 1 ? Q4_GEMV_ROWS : n_tokens < 4 ? Q4_BATCH_ROWS : Q4_BATCH_ROWS_8;
}

#define DOT_TOKENS(T)                                                                              \
  case T:                                                                                          \
    if (Q4_ZEROS && zeros) {                                                                       \
      dot_tile(rows_with(T), T, true, false, tile, g, x, totals, step);                            \
    } else {                                                                                       \
      dot_tile(rows_with(T), T, false, false, tile, g, x, totals, step);                           \
    }                                                                                              \
    return;

static void dot_tokens(uint32_t n_tokens, bool zeros, const q4_tile *tile, const q4_groups *g,
                       const packed *x, vf *totals, size_t step) {
  switch (n_tokens) {
    DOT_TOKENS(2)
    DOT_TOKENS(3)
    DOT_TOKENS(4)
    DOT_TOKENS(5)
    DOT_TOKENS(6)
    DOT_TOKENS(7)
    DOT_TOKENS(8)
  default: break;
  }
  if (Q4_ZEROS && zeros) {
    dot_tile(Q4_GEMV_ROWS, 1, true, false, tile, g, x, totals, step);
  } else if (g->per_block == 1) {
    dot_tile(Q4_GEMV_ROWS, 1, false, true, tile, g, x, totals, step);
  } else {
    dot_tile(Q4_GEMV_ROWS, 1, false, false, tile, g, x, totals, step);
  }
}
_Static_assert(Q4_TOKENS <= 8, "a case for every number of tokens");

// Some rows times all tokens. Lives on the stack.
typedef struct {
  _Alignas(64) packed x[X_COLS]; // [tokens of Q4_TOKENS][block][STEPS][token][PL]
  x_range range[MAX_TOKENS];
  float scales[MAX_ROWS][LIST], zeros[MAX_ROWS][LIST];
  vf total[(PANEL + MAX_ROWS) * MAX_TOKENS]; // [row][token]
  uint8_t tail[MAX_ROWS][TAIL_BYTES];
  const td_linear_args *a;
  q4_groups groups;
  q4_window win;
  size_t row_bytes;
  uint32_t row0, n_rows;
  uint32_t tile_rows, apart;                                  // rows per tile, and their distance
  uint32_t n_token_tiles, tokens[MAX_TOKENS / Q4_TOKENS + 1]; // first token of each tile
} panel;

static void order_tokens(panel *p) {
  const td_linear_args *a = p->a;
  packed *out = p->x;
  for (uint32_t i = 0; i < p->n_token_tiles; i++) {
    uint32_t begin = p->tokens[i], n = p->tokens[i + 1] - begin;
    for (uint32_t t = 0; t < n; t++) {
      const float *x = a->x + (a->x_rows ? a->x_rows[begin + t] : begin + t) * a->ldx;
      order_x(x + p->win.k, p->win.n, out + t * PL, (size_t)n * PL, &p->range[begin + t]);
    }
    out += (size_t)n * p->win.n_blocks * BLOCK;
  }
}

// A tile of rows, its blocks from `skip` on, times all tokens.
static void dot_token_tiles(panel *p, uint32_t row, const q4_tile *tile, uint32_t skip) {
  const packed *x = p->x;
  uint32_t n_tokens = p->a->n_tokens;
  for (uint32_t i = 0; i < p->n_token_tiles; i++) {
    uint32_t begin = p->tokens[i], n = p->tokens[i + 1] - begin;
    dot_tokens(n, p->a->w->zero != NULL, tile, &p->groups, x + (size_t)skip * n * BLOCK,
               p->total + (size_t)row * n_tokens + begin, (size_t)p->apart * n_tokens);
    x += (size_t)n * p->win.n_blocks * BLOCK;
  }
}

// Number of the window's blocks that can be read as whole vectors plus three bytes in every row up
// to this one.
static uint32_t blocks_within(const panel *p, uint32_t row) {
  size_t in_row = p->row_bytes - p->win.k / 2;
  size_t in_data = (size_t)(p->a->w->rows - 1 - row) * p->row_bytes + in_row;
  size_t n = in_data < 3 ? 0 : (in_data - 3) / sizeof(vi);
  if (in_row / sizeof(vi) < n) n = in_row / sizeof(vi);
  return n < p->win.n_blocks ? (uint32_t)n : p->win.n_blocks;
}

// The remaining blocks of a tile, from zero-padded copies.
static void dot_tail(panel *p, uint32_t row, q4_tile *tile) {
  uint32_t done = tile->n_blocks;
  size_t at = done * sizeof(vi), left = p->row_bytes - p->win.k / 2 - at;
  size_t needed = (p->win.n_blocks - done) * sizeof(vi);
  for (uint32_t i = 0; i < p->tile_rows; i++) {
    memset(p->tail[i], 0, sizeof p->tail[i]);
    tile->codes[i] = memcpy(p->tail[i], tile->codes[i] + at, left < needed ? left : needed);
  }
  tile->n_blocks = p->win.n_blocks - done;
  tile->first += done;
  dot_token_tiles(p, row, tile, done);
}

// Prefetch distance: within this window, to the next one, or to the next panel's first.
static size_t bytes_ahead(const panel *p, uint32_t row) {
  if (p->a->n_tokens == 1) return Q4_AHEAD;
  size_t bytes = ROWS_AHEAD * p->row_bytes;
  if (row + ROWS_AHEAD < p->apart) return bytes;
  if (p->win.k + p->win.n == p->a->w->cols) return bytes - p->win.k / 2;
  return bytes - p->apart * p->row_bytes + p->win.n / 2;
}

// Prefetches all scales of the tile ROWS_AHEAD rows on, in this panel or the next. A window uses
// few of a row's scales, which the hardware prefetcher does not follow.
static void fetch_scales(const panel *p, uint32_t row) {
  const td_weight *w = p->a->w;
  const size_t n_bytes = p->groups.of_row * td_dtype_bytes(w->scale_dtype);
  size_t at = p->row0 + row + ROWS_AHEAD;
  if (row + ROWS_AHEAD >= p->apart) at += p->n_rows - p->apart;
  for (uint32_t i = 0; i < p->tile_rows; i++, at += p->apart) {
    const uintptr_t from = (uintptr_t)w->scale + at * n_bytes;
    for (size_t b = 0; b < n_bytes; b += 64)
      __builtin_prefetch((const void *)(from + b), 0, 2);
  }
}

// A tile's rows are far apart, each the next one of its own stream: the hardware prefetcher follows
// such streams but loses short rows. Rows past the panel's last one repeat it, with separate
// totals.
static void dot_rows(panel *p, uint32_t row) {
  const td_weight *w = p->a->w;
  uint32_t end = p->n_rows - 1, last = row + (p->tile_rows - 1) * p->apart;
  if (p->a->n_tokens > 1 && p->win.k == 0) fetch_scales(p, row);
  q4_tile tile = {.scales = (const float(*)[LIST])p->scales,
                  .zeros = (const float(*)[LIST])p->zeros,
                  .n_blocks = blocks_within(p, p->row0 + (last < end ? last : end)),
                  .first = p->win.first,
                  .ahead = bytes_ahead(p, row)};
  for (uint32_t i = 0; i < p->tile_rows; i++) {
    uint32_t at = row + i * p->apart, r = p->row0 + (at < end ? at : end);
    tile.codes[i] = (const uint8_t *)w->data + r * p->row_bytes + p->win.k / 2;
    list_groups(w, &p->groups, &p->win, r, false, p->scales[i]);
    if (w->zero) list_groups(w, &p->groups, &p->win, r, true, p->zeros[i]);
  }
  dot_token_tiles(p, row, &tile, 0);
  if (tile.n_blocks < p->win.n_blocks) dot_tail(p, row, &tile);
}

static inline bool is_sum(const td_weight *w) {
  return w->dtype != TD_F4E2M1;
}

TD_INLINE float finish(const td_weight *w, uint32_t row, bool nan, float sum) {
  (void)row;
  (void)nan; // codes are never NaN, and NaN scales are in the sum
  return is_sum(w) ? sum : sum * w->global_scale;
}

static void q4_finish(panel *p) {
  const td_linear_args *a = p->a;
  size_t n_tokens = a->n_tokens;
  for (uint32_t r = 0; r < p->n_rows; r += 4) { // there are MAX_ROWS more totals after the last row
    for (uint32_t t = 0; t < n_tokens; t++) {
      const vf *total = p->total + r * n_tokens + t;
      float sum[4], *y = a->y + t * a->ldy + p->row0 - a->y_row0;
      vf_sum4(total[0], total[n_tokens], total[2 * n_tokens], total[3 * n_tokens], sum);
      for (uint32_t i = 0; i < 4 && r + i < p->n_rows; i++)
        y[r + i] = finish(a->w, p->row0 + r + i, false, sum[i]);
    }
  }
}

static void q4_panel(panel *p) {
  const td_linear_args *a = p->a;
  const uint32_t n_tokens = a->n_tokens, n_cols = n_tokens == 1 ? X_COLS : X_COLS_SHARED;
  const uint32_t step = n_cols / n_tokens / BLOCK * BLOCK;
  for (size_t i = 0; i < (size_t)(p->n_rows + MAX_ROWS) * n_tokens; i++)
    p->total[i] = vf_zero();
  for (uint32_t t = 0; t < n_tokens; t++)
    p->range[t] = empty_range();
  for (uint32_t k = 0; k < a->w->cols; k += step) {
    p->win = window_of(a->w, &p->groups, k, a->w->cols - k < step ? a->w->cols - k : step);
    order_tokens(p);
    for (uint32_t row = 0; row < p->apart; row++)
      dot_rows(p, row);
  }
  q4_finish(p);
}

// Whether groups begin at lane boundaries. Others are left to the scalar kernel.
static inline bool q4_fits(const td_weight *w) {
  return w->scale_cols % 8 == 0 || w->scale_cols >= w->cols;
}

// For up to MAX_TOKENS tokens.
static void linear_few(const td_linear_args *a) {
  panel p;
  p.a = a;
  p.groups = groups_of(a->w);
  p.row_bytes = td_weight_row_bytes(a->w);
  p.n_token_tiles = (a->n_tokens + Q4_TOKENS - 1) / Q4_TOKENS;
  p.tile_rows = rows_with(a->n_tokens / p.n_token_tiles);
  for (uint32_t i = 0; i <= p.n_token_tiles; i++)
    p.tokens[i] = i * a->n_tokens / p.n_token_tiles;
  for (p.row0 = a->row_begin; p.row0 < a->row_end; p.row0 += p.n_rows) {
    p.n_rows = a->row_end - p.row0 < PANEL ? a->row_end - p.row0 : PANEL;
    p.apart = (p.n_rows + p.tile_rows - 1) / p.tile_rows;
    q4_panel(&p);
  }
  for (uint32_t t = 0; t < a->n_tokens && a->row_begin < a->row_end; t++)
    end_token(a, t, p.range[t]);
}
