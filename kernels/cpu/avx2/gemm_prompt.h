// kernels/cpu/avx2/gemm_prompt.h - y = W x for prefill in FP32, one row per lane.
// Include after vec.h and these definitions:
//   DWORD_COLS   columns in 32 bits of a row
//   columns_of   the weights in 32 bits of each of VL rows: vector i has column i
//   Q4_ZEROS     if there may be zero points: 1, and linear_q4.h's zeros_to_f32
//
// Nothing is summed across lanes. Every (row, token) pair has one total, kept in y. A run ends
// after PART columns or earlier; its products are summed from zero and added to the total. Scales
// other than FP32 have so few digits that weight times scale is exact (divided by 16, so that it is
// finite as well). FP32 scales multiply the sums of runs, which then also end with groups. None of
// this depends on the number of tokens, so results agree to the last bit.
//
// TILE_ROWS rows and PART columns of weights are transposed and decoded into L1 and used for one
// tile of tokens after the other; x of a block of tokens stays in L2. ROW_VECTORS vectors of rows
// times TOKENS tokens need ROW_VECTORS + TOKENS loads, which take less time than the
// multiplications at two a cycle.
//
// The order of additions differs from decode's: with one lane per row, a single token would wait
// for each addition, and the rows of a tile are not one stream of memory.
#pragma once

#include "kernels/cpu/common/numeric.h"
#include "kernels/cpu/common/scales.h"
#include "kernels/cpu/common/transpose.h"
#include "kernels/cpu/common/vec_math.h"

#ifndef Q4_ZEROS
#define Q4_ZEROS 0
#endif

enum {
  ROW_VECTORS = 3,
  TILE_ROWS = ROW_VECTORS * VL,
  TOKENS = 4,
  PART = 256,
  CHUNK = 4 * DWORD_COLS, // columns in 16 bytes
  MOST_TOKENS = 192,      // per block
  X_FLOATS_L2 = MOST_TOKENS * PART,
  PART_GROUPS = PART / 8 + 2 * VL, // groups per part, plus room for whole vectors
};

// Some rows times some tokens. Lives on the stack.
typedef struct {
  _Alignas(64) float w[PART * TILE_ROWS]; // [column][row]
  float x[X_FLOATS_L2];                   // [tile][column of the span][token of the tile]
  vf scale[PART_GROUPS * ROW_VECTORS];    // [group of the part][vector of rows]
  vf zero[Q4_ZEROS ? PART_GROUPS * ROW_VECTORS : 1];
  const td_linear_args *a;
  size_t row_bytes;
  uint32_t n_tiles;      // tiles of tokens
  uint32_t span, n_span; // columns of x [span, span + n_span)
  uint32_t row, n_rows;  // the tile
  uint32_t k, n;         // the part: columns [k, k + n)
  uint32_t group_cols;   // columns of weights that share scales
  bool scaled_weights, scaled_sums;
  const char *next; // weights decoded next: TILE_ROWS rows from here on
} prompt;

static uint32_t prompt_tile_begin(const prompt *g, uint32_t tile) {
  return tile * g->a->n_tokens / g->n_tiles;
}

// Number of rows in the tile's vector v.
static uint32_t vector_rows(const prompt *g, uint32_t v) {
  const uint32_t left = g->n_rows < v * VL ? 0 : g->n_rows - v * VL;
  return left < VL ? left : VL;
}

static size_t bytes_before(uint32_t k) {
  return (size_t)k / DWORD_COLS * 4;
}

// ---- activations ----------------------------------------------------------------------------

static const float *prompt_x(const prompt *g, uint32_t token) {
  return g->a->x + (g->a->x_rows ? g->a->x_rows[token] : token) * g->a->ldx + g->span;
}

// Packs the span's columns of the tokens, tile by tile. A short tile repeats a token.
static void pack_prompt(prompt *g) {
  float *out = g->x;
  for (uint32_t i = 0; i < g->n_tiles; i++) {
    const float *x[TOKENS];
    const uint32_t begin = prompt_tile_begin(g, i), n = prompt_tile_begin(g, i + 1) - begin;
    for (uint32_t t = 0; t < TOKENS; t++)
      x[t] = prompt_x(g, begin + (t < n ? t : 0));
    uint32_t k = 0;
    for (; k + VL <= g->n_span; k += VL, out += TOKENS * VL)
      vf_mix4(x[0] + k, x[1] + k, x[2] + k, x[3] + k, out);
    for (; k < g->n_span; k++, out += TOKENS) {
      for (uint32_t t = 0; t < TOKENS; t++)
        out[t] = x[t][k];
    }
  }
}

// ---- weights --------------------------------------------------------------------------------

// Transposes the entries of n_rows lists to vectors, times a factor.
static void put_lists(float (*list)[PART_GROUPS], uint32_t n_rows, uint32_t n, float times, vf *out,
                      size_t step) {
  for (uint32_t i = 0; i < n; i++) {
    float of_rows[VL] = {0};
    for (uint32_t r = 0; r < n_rows; r++)
      of_rows[r] = list[r][i];
    out[i * step] = vf_mul(vf_load(of_rows), vf_set1(times));
  }
}

// The scales of n_rows rows from `row` on, for n groups from `first` on: a vector per group, at out
// + i * step. Scale blocks of many rows usually cover all of them.
static void put_scales(const td_weight *w, uint32_t row, uint32_t n_rows, uint32_t first,
                       uint32_t n, float times, vf *out, size_t step) {
  float list[VL][PART_GROUPS];
  const size_t groups = td_weight_groups(w),
               in_all = (w->rows - 1) / w->scale_rows * groups + groups;
  const bool same = row / w->scale_rows == (row + n_rows - 1) / w->scale_rows;
  for (uint32_t r = 0; r < (same ? 1 : n_rows); r++) {
    const size_t at = (row + r) / w->scale_rows * groups + first;
    const char *from = (const char *)w->scale + at * td_dtype_bytes(w->scale_dtype);
    scales_to_f32(from, w->scale_dtype, in_all - at, n, list[r]);
  }
  if (!same) put_lists(list, n_rows, n, times, out, step);
  for (uint32_t i = 0; same && i < n; i++)
    out[i * step] = vf_set1(list[0][i] * times);
}

#if Q4_ZEROS
// The same for zero points, minus 8.
static void put_zeros(const td_weight *w, uint32_t row, uint32_t n_rows, uint32_t first, uint32_t n,
                      vf *out, size_t step) {
  float list[VL][PART_GROUPS];
  const size_t groups = td_weight_groups(w), in_all = ((size_t)w->rows + 7) / 8 * groups;
  for (uint32_t r = 0; r < n_rows; r++) {
    const size_t at = (row + r) / 8 * groups + first;
    zeros_to_f32(w->zero + at, (row + r) % 8, in_all - at, n, list[r]);
  }
  put_lists(list, n_rows, n, 1, out, step);
}
#endif

// Decodes the weights of VL rows, vector v of the tile. scaled: multiplies them by scales.
TD_INLINE void decode_rows(prompt *g, uint32_t v, const bool scaled) {
  const uint32_t row = g->row + v * VL, n_rows = vector_rows(g, v);
  const size_t n_bytes = g->row_bytes - bytes_before(g->k);
  const char *w = (const char *)g->a->w->data + row * g->row_bytes + bytes_before(g->k);
  const bool zeros = Q4_ZEROS && g->a->w->zero;
  const vf *scale = g->scale + v, *zero = g->zero + (Q4_ZEROS ? v : 0);
  uint32_t in_group = g->group_cols - g->k % g->group_cols;
  float *out = g->w + v * VL;
  // Prefetch into L1, a line ahead; at the end of the part, the first line of the next rows.
  const size_t part_bytes = bytes_before(g->n);
  const char *ahead = w + 64;
  for (uint32_t at = 0; at < g->n; at += CHUNK) {
    const size_t byte = bytes_before(at);
    if (byte % 64 == 0) ahead = byte + 64 < part_bytes ? w + byte + 64 : w + VL * g->row_bytes;
    TD_UNROLL for (int i = 0; i < VL / 4; i++, ahead += g->row_bytes) __builtin_prefetch(ahead);
    vi dwords[4];
    transpose_rows(w + byte, g->row_bytes, n_rows, n_bytes - byte, dwords);
    TD_UNROLL for (int i = 0; i < 4; i++, out += DWORD_COLS * TILE_ROWS) {
      vf cols[DWORD_COLS];
      columns_of(dwords[i], cols);
      TD_UNROLL for (int j = 0; j < DWORD_COLS; j++) {
        if (zeros) cols[j] = vf_sub(cols[j], *zero);
        if (scaled) cols[j] = vf_mul(cols[j], *scale);
        vf_store(out + j * TILE_ROWS, cols[j]);
      }
      if (!scaled && !Q4_ZEROS) continue;
      in_group -= DWORD_COLS;
      if (in_group == 0) {
        in_group = g->group_cols;
        scale += ROW_VECTORS, zero += Q4_ZEROS ? ROW_VECTORS : 0;
      }
    }
  }
}

static void decode_tile(prompt *g) {
  const uint32_t first = g->k / g->group_cols, n = (g->k + g->n - 1) / g->group_cols - first + 1;
  for (uint32_t v = 0; v < ROW_VECTORS; v++) {
    const uint32_t row = g->row + v * VL, n_rows = vector_rows(g, v);
    if (n_rows == 0) continue; // results of these rows are not stored
    if (g->scaled_weights || g->scaled_sums) {
      put_scales(g->a->w, row, n_rows, first, n, g->scaled_weights ? 0x1p-4f : 1, g->scale + v,
                 ROW_VECTORS);
    }
#if Q4_ZEROS
    if (g->a->w->zero) put_zeros(g->a->w, row, n_rows, first, n, g->zero + v, ROW_VECTORS);
#endif
    if (g->scaled_weights) {
      decode_rows(g, v, true);
    } else {
      decode_rows(g, v, false);
    }
  }
}

// Finds what follows the part: the tile's next part, the next tile, the first tile's next span, or
// the rows after all.
static void find_next_part(prompt *g, uint32_t row_end) {
  const td_linear_args *a = g->a;
  uint32_t row = g->row, k = g->k + g->n;
  if (k == g->span + g->n_span) {
    const bool over = row + g->n_rows == row_end;
    row = !over ? row + g->n_rows : k < a->w->cols ? a->row_begin : row_end;
    k = !over ? g->span : k < a->w->cols ? k : 0;
  }
  g->next = (const char *)a->w->data + row * g->row_bytes + bytes_before(k);
  if (row == row_end && a->next) g->next = a->next;
}

// Prefetches a share of it, for each tile of tokens.
static void fetch_next_part(prompt *g) {
  enum { LINES = PART / DWORD_COLS * 4 / 64 + 1 };
  for (uint32_t r = 0; r < TILE_ROWS; r += g->n_tiles, g->next += g->row_bytes) {
    for (uint32_t i = 0; i < LINES; i++)
      __builtin_prefetch(g->next + i * (size_t)64, 0, 2);
  }
}

// ---- products -------------------------------------------------------------------------------

// acc [ROW_VECTORS][T] = products of n columns.
TD_INLINE void dot_run(const int T, const float *w, const float *x, uint32_t n, vf *acc) {
  enum { R = ROW_VECTORS };
  TD_UNROLL for (int i = 0; i < R * T; i++) acc[i] = vf_zero();
  for (; n > 0; n--, w += TILE_ROWS, x += TOKENS) {
    vf wv[R];
    TD_UNROLL for (int r = 0; r < R; r++) wv[r] = vf_load(w + r * VL);
    TD_UNROLL for (int t = 0; t < T; t++) {
      vf xv = vf_set1(x[t]);
      __asm__("" : "+v"(xv)); // one load instead of one per multiplication
      TD_UNROLL for (int r = 0; r < R; r++) acc[r * T + t] = vf_fma(wv[r], xv, acc[r * T + t]);
    }
  }
}

// Adds the products of the part to the totals of the tile and T tokens.
TD_INLINE void prompt_tile(const int T, const prompt *g, uint32_t tile) {
  enum { R = ROW_VECTORS };
  const td_linear_args *a = g->a;
  const float *w = g->w, *x = g->x + ((size_t)tile * g->n_span + (g->k - g->span)) * TOKENS;
  float *y = a->y + prompt_tile_begin(g, tile) * a->ldy + g->row - a->y_row0;
  vf total[R * TOKENS], acc[R * TOKENS];
  TD_UNROLL for (int r = 0; r < R; r++) {
    const uint32_t n_rows = vector_rows(g, (uint32_t)r);
    TD_UNROLL for (int t = 0; t < T; t++) {
      const float *from = y + t * a->ldy + r * VL;
      total[r * T + t] = g->k == 0     ? vf_zero()
                         : n_rows < VL ? vf_load_n(from, n_rows)
                                       : vf_load(from);
    }
  }
  const vf *scale = g->scale;
  uint32_t in_group = g->scaled_sums ? g->group_cols - g->k % g->group_cols : PART;
  for (uint32_t at = 0, n; at < g->n; at += n, w += n * TILE_ROWS, x += n * TOKENS, scale += R) {
    n = g->n - at < in_group ? g->n - at : in_group;
    in_group = g->group_cols;
    dot_run(T, w, x, n, acc);
    TD_UNROLL for (int i = 0; i < R * T; i++) {
      total[i] = g->scaled_sums ? vf_fma(acc[i], scale[i / T], total[i]) : vf_add(acc[i], total[i]);
    }
    // Keeps the compiler from holding totals in registers, of which there are too few.
    __asm__ volatile("" : "+m"(total));
  }
  const bool last = g->k + g->n == a->w->cols;
  const vf up = vf_set1(g->scaled_weights && last ? 16 : 1);
  const vf whole = vf_set1(a->w->dtype == TD_F4E2M1 && last ? a->w->global_scale : 1);
  TD_UNROLL for (int r = 0; r < R; r++) {
    const uint32_t n_rows = vector_rows(g, (uint32_t)r);
    TD_UNROLL for (int t = 0; t < T; t++) {
      float *to = y + t * a->ldy + r * VL;
      const vf v = vf_mul(vf_mul(total[r * T + t], up), whole);
      if (n_rows < VL) {
        vf_store_n(to, v, n_rows);
      } else {
        vf_store(to, v);
      }
    }
  }
}

#define PROMPT_TILE(T)                                                                             \
  case T: prompt_tile(T, g, tile); return;

// Not inlined, since its caller's constants would take registers.
__attribute__((noinline)) static void prompt_any_tile(uint32_t n_tokens, const prompt *g,
                                                      uint32_t tile) {
  switch (n_tokens) {
    PROMPT_TILE(1)
    PROMPT_TILE(2)
    PROMPT_TILE(3)
    PROMPT_TILE(4)
  default: return;
  }
}
_Static_assert(TOKENS == 4, "a case for every size of tile");

// A tile of rows times the block's tokens, over the span's columns.
static void prompt_rows(prompt *g) {
  const uint32_t row_end = g->a->row_end, span_end = g->span + g->n_span;
  for (g->k = g->span; g->k < span_end; g->k += g->n) {
    g->n = span_end - g->k < PART ? span_end - g->k : PART;
    decode_tile(g);
    find_next_part(g, row_end);
    for (uint32_t i = 0; i < g->n_tiles; i++) {
      fetch_next_part(g);
      prompt_any_tile(prompt_tile_begin(g, i + 1) - prompt_tile_begin(g, i), g, i);
    }
  }
}

// Whether groups begin at dword boundaries.
static inline bool prompt_fits(const td_weight *w) {
  return !w->scale || w->scale_cols % 8 == 0 || w->scale_cols >= w->cols;
}

// For up to MOST_TOKENS tokens.
static void prompt_block(const td_linear_args *a) {
  const td_weight *w = a->w;
  prompt g;
  g.a = a;
  g.row_bytes = td_weight_row_bytes(w);
  g.group_cols = w->scale && w->scale_cols < w->cols ? w->scale_cols : w->cols;
  g.scaled_weights = w->scale && w->scale_dtype != TD_F32;
  g.scaled_sums = w->scale && w->scale_dtype == TD_F32;
  g.n_tiles = (a->n_tokens + TOKENS - 1) / TOKENS;
  const uint32_t most = X_FLOATS_L2 / (g.n_tiles * TOKENS) / PART * PART;
  for (g.span = 0; g.span < w->cols; g.span += g.n_span) {
    g.n_span = w->cols - g.span < most ? w->cols - g.span : most;
    pack_prompt(&g);
    for (g.row = a->row_begin; g.row < a->row_end; g.row += g.n_rows) {
      g.n_rows = a->row_end - g.row < TILE_ROWS ? a->row_end - g.row : TILE_ROWS;
      prompt_rows(&g);
    }
  }
}

static void linear_prompt(const td_linear_args *a) {
  in_parts(a, MOST_TOKENS, prompt_block);
}
