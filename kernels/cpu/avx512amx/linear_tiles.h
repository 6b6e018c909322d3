// kernels/cpu/avx512amx/linear_tiles.h - y = W x for prompts by AMX's tiles, of weights that are
// BF16 or convert to it. Include after vec.h of avx512bf16, finite_range.h and these definitions:
//   LINE_BYTES     of a row that are decoded at once, LINE_COLS columns: a multiple of 32
//   decode_line    their vectors of 32 numbers
//   put_x          stores as many of x in the order of those, vector i at out + i * step
//   HAS_SCALES     whether there are scales
//   scales_of      scales of a row, for n groups from `first` on; may write VL - 1 more
//   whole_scale    factor of all results
//   look, tiny_of, LEAST, linear_exact   as of avx512bf16/gemm_prompt.h
//   TILES_REST     the kernel for decode, and for groups that tiles do not fit
//
// x is the sum of two BF16 numbers, which are 16 bits of it. A run ends with its group or after
// PART columns: 32 columns of a row times the first of these numbers are added to its sum, then
// times the second, and the sum times the scale is added to the total. That is the same for any
// number of tokens. Rows are tiles' rows, as they are stored, and tokens are columns: weights are
// turned nowhere, and x is once for MOST_ROWS rows. |error| <= (2^-18 + n 2^-24) sum |w x|, and
// 2^-126 for each product: what is smaller counts as 0.
#pragma once

#include "kernels/cpu/avx512amx/tiles.h"
#include "kernels/cpu/avx512bf16/exact_rows.h"
#include "kernels/cpu/avx512bf16/turn_lines.h"

enum {
  STRIP = 4 * VL, // rows
  PART = 128,
  SPAN = 1024,
  MOST_TOKENS = 128, // per block
  MOST_ROWS = 1024,
  W_STRIDE = PART + PL, // padded, so that rows fall into different L1 sets
  TILE = VL * PL,       // numbers in a tile
  X_STEP = 2 * TILE,    // of 32 columns of a tile of tokens
  LEAST_GROUP = 32,     // columns
  SPAN_GROUPS = SPAN / LEAST_GROUP + 2 + VL,
};

// Some rows times some tokens. Lives on the stack.
typedef struct {
  _Alignas(64) packed w[2][STRIP * W_STRIDE]; // a part that is multiplied, and the next
  _Alignas(64) packed x[MOST_TOKENS / VL * (SPAN / PL) * X_STEP]; // [tile][step][part of x][tile]
  vf total[MOST_ROWS * MOST_TOKENS / VL];                         // [strip][tile][row]
  float scale[STRIP][SPAN_GROUPS];                                // of the span
  x_range range[MOST_TOKENS];
  bool tiny[MOST_ROWS];
  const td_linear_args *a;
  size_t row_bytes;
  uint32_t row0, n_rows, token0, n_tokens, n_tiles; // the block
  uint32_t span, n_span;                            // columns [span, span + n_span)
} prompt;

// ---- activations ----------------------------------------------------------------------------

TD_INLINE vf rounded(vf v) {
  return vf_widen_bf16((__m256i)_mm512_cvtneps_pbh(v));
}

// The two parts of x, of up to 16 tokens and PART columns: [part][32 columns][token].
typedef packed x_lines[2][PART / PL][VL][PL];

static void split_token(const float *x, uint32_t n, uint32_t i, x_lines lines, x_range *range) {
  enum { N = LINE_COLS / VL };
  x_range r = *range;
  for (uint32_t k = 0; k < n; k += LINE_COLS) {
    vf v[N], rest[N];
    TD_UNROLL for (int j = 0; j < N; j++) {
      const vf all = vf_load(x + k + j * VL);
      r = range_with(r, all, all);
      v[j] = rounded(all);
      rest[j] = vf_sub(all, v[j]);
    }
    put_x(v, lines[0][k / PL][i], VL * PL);
    put_x(rest, lines[1][k / PL][i], VL * PL);
  }
  *range = r;
}

// Packs columns [k, k + n) of up to 16 tokens from t on; the others get zeros.
static void pack_part(prompt *g, uint32_t t, uint32_t k, uint32_t n, packed *out) {
  _Alignas(64) x_lines lines;
  const td_linear_args *a = g->a;
  if (g->n_tokens - t < VL) memset(lines, 0, sizeof lines);
  for (uint32_t i = 0; i < VL && t + i < g->n_tokens; i++) {
    const uint32_t token = g->token0 + t + i;
    const float *x = a->x + (a->x_rows ? a->x_rows[token] : token) * a->ldx + k;
    split_token(x, n, i, lines, &g->range[t + i]);
  }
  for (uint32_t j = 0; j < n / PL; j++, out += X_STEP) {
    TD_UNROLL for (int part = 0; part < 2; part++) {
      vi turned[VL];
      turn_lines((const char *)lines[part][j], sizeof lines[0][0][0], turned);
      TD_UNROLL for (int i = 0; i < VL; i++) pv_store(out + part * TILE + i * PL, pv_of(turned[i]));
    }
  }
}

static void pack_tokens(prompt *g) {
  packed *out = g->x;
  for (uint32_t t = 0; t < g->n_tokens; t += VL) {
    for (uint32_t k = 0, n; k < g->n_span; k += n, out += n / PL * X_STEP) {
      n = g->n_span - k < PART ? g->n_span - k : PART;
      pack_part(g, t, g->span + k, n, out);
    }
  }
}

// ---- weights --------------------------------------------------------------------------------

static size_t bytes_before(uint32_t k) {
  return (size_t)k / LINE_COLS * LINE_BYTES;
}

// Columns [k, k + n) of a strip, of which rows from `row` on are still to be decoded.
typedef struct {
  packed *out;
  uint32_t strip, k, n, row;
} strip_part;

TD_INLINE vi decode_at(const uint8_t *w, uint32_t at, size_t ahead, packed *out, vi seen) {
  pv v[LINE_COLS / PL];
  w += bytes_before(at), out += at;
  if (bytes_before(at) % 64 == 0) __builtin_prefetch((const void *)((uintptr_t)w + ahead), 0, 2);
  decode_line(w, v, &seen);
  TD_UNROLL for (int j = 0; j < LINE_COLS / PL; j++) pv_store(out + j * PL, v[j]);
  return seen;
}

// Decodes n_rows more of a part; rows past the block's last one repeat it. Prefetches what is
// needed next: the strip's next columns, or the next strip.
TD_INLINE void decode_rows(prompt *g, strip_part *p, uint32_t n_rows) {
  const bool ends = p->k + p->n == g->n_span;
  const size_t ahead = ends ? STRIP * g->row_bytes - bytes_before(p->k) : bytes_before(p->n);
  for (uint32_t end = p->row + n_rows; p->row < end; p->row++) {
    const uint32_t row = p->strip + p->row < g->n_rows ? p->strip + p->row : g->n_rows - 1;
    const uint8_t *w = (const uint8_t *)g->a->w->data + (g->row0 + row) * g->row_bytes +
                       bytes_before(g->span + p->k);
    packed *out = p->out + p->row * W_STRIDE;
    vi seen = _mm512_set1_epi32(-1);
    if (p->n == PART) {
      TD_UNROLL for (uint32_t at = 0; at < PART; at += LINE_COLS)
          seen = decode_at(w, at, ahead, out, seen);
    } else {
      for (uint32_t at = 0; at < p->n; at += LINE_COLS)
        seen = decode_at(w, at, ahead, out, seen);
    }
    g->tiny[row] |= tiny_of(seen) != 0;
  }
}

static uint32_t group_of(const prompt *g, uint32_t k) {
  return HAS_SCALES ? k / g->a->w->scale_cols : 0;
}

static void decode_scales(prompt *g, uint32_t strip) {
  const uint32_t first = group_of(g, g->span), last = group_of(g, g->span + g->n_span - 1);
  for (uint32_t i = 0; i < STRIP; i++) {
    const uint32_t row = strip + i < g->n_rows ? strip + i : g->n_rows - 1;
    scales_of(g->a->w, g->row0 + row, first, last - first + 1, g->scale[i]);
  }
}

// ---- products -------------------------------------------------------------------------------

// Sums of a run: of each row and each token, a token a lane.
typedef struct {
  _Alignas(64) float of[STRIP][VL];
} run_sums;

#define ADD_PRODUCTS(SUMS, W, I)                                                                   \
  _tile_loadd(W, w + I * VL * W_STRIDE, W_STRIDE * sizeof *w);                                     \
  _tile_dpbf16ps(SUMS, W, 2);                                                                      \
  _tile_dpbf16ps(SUMS, W, 3);                                                                      \
  if (next->row < STRIP) decode_rows(g, next, ROWS_A_TILE);

// Tiles 0 and 1 are weights, 2 and 3 the two parts of x, and the others sums of 16 rows each. While
// tiles multiply, vectors decode rows of the next part.
static void sum_run(prompt *g, const packed *w, const packed *x, uint32_t n_steps, run_sums *sums,
                    strip_part *next) {
  enum { ROWS_A_TILE = STRIP / (PART / PL) / 4 };
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (; n_steps > 0; n_steps--, x += X_STEP, w += PL) {
    _tile_loadd(2, x, PL * sizeof *x);
    _tile_loadd(3, x + TILE, PL * sizeof *x);
    ADD_PRODUCTS(4, 0, 0)
    ADD_PRODUCTS(5, 1, 1)
    ADD_PRODUCTS(6, 0, 2)
    ADD_PRODUCTS(7, 1, 3)
  }
  _tile_stored(4, sums->of[0], 64);
  _tile_stored(5, sums->of[VL], 64);
  _tile_stored(6, sums->of[2 * VL], 64);
  _tile_stored(7, sums->of[3 * VL], 64);
}
_Static_assert(STRIP == 4 * VL, "a tile of sums for each 16 rows");

// totals [STRIP] += a run's sums.
static void add_sums(const prompt *g, const run_sums *sums, uint32_t group, vf *totals) {
  TD_UNROLL for (int i = 0; i < STRIP; i++) {
    const vf sum = vf_load(sums->of[i]);
    totals[i] = HAS_SCALES ? vf_fma(sum, vf_set1(g->scale[i][group]), totals[i])
                           : vf_add(sum, totals[i]);
  }
}

// A decoded strip times a tile of tokens, over columns [k, k + n) of the span. While tiles multiply
// a run, vectors add the sums of the one before.
static void multiply_part(prompt *g, const strip_part *p, const packed *x, vf *totals,
                          strip_part *next) {
  const uint32_t k = p->k, n = p->n;
  __asm__ volatile("" : : : "memory"); // the compiler does not know what tiles load
  const uint32_t first = group_of(g, g->span), begin = g->span + k, end = begin + n;
  const uint32_t size = HAS_SCALES ? g->a->w->scale_cols : UINT32_MAX;
  run_sums sums[2];
  uint32_t i = 0, group = 0, at = begin;
  for (; at < end; i++) {
    const uint32_t in_group = size - at % size, left = end - at;
    const uint32_t n_run = in_group < left ? in_group : left;
    sum_run(g, p->out + (at - begin), x + (at - g->span) / PL * X_STEP, n_run / PL, &sums[i % 2],
            next);
    if (i > 0) add_sums(g, &sums[(i - 1) % 2], group, totals);
    group = group_of(g, at) - first;
    at += n_run;
  }
  add_sums(g, &sums[(i - 1) % 2], group, totals);
}

static void put_results(const prompt *g) {
  const td_linear_args *a = g->a;
  const vf scale = vf_set1(whole_scale(a->w));
  const vf *total = g->total;
  for (uint32_t strip = 0; strip < g->n_rows; strip += STRIP) {
    for (uint32_t t = 0; t < g->n_tokens; t += VL) {
      for (uint32_t r = strip; r < strip + STRIP; r += VL, total += VL) {
        if (r >= g->n_rows) continue;
        vi turned[VL];
        turn_lines((const char *)total, sizeof *total, turned);
        const uint32_t left = g->n_rows - r < VL ? g->n_rows - r : VL;
        float *y = a->y + (g->token0 + t) * a->ldy + g->row0 + r - a->y_row0;
        for (uint32_t i = 0; i < VL && t + i < g->n_tokens; i++, y += a->ldy)
          vf_store_n(y, vf_mul((vf)turned[i], scale), left);
      }
    }
  }
}

static strip_part part_at(const prompt *g, uint32_t strip, uint32_t k, packed *out) {
  const uint32_t left = g->n_span - k;
  return (strip_part){.out = out,
                      .strip = strip,
                      .k = k,
                      .n = left < PART ? left : PART,
                      .row = strip < g->n_rows ? 0 : STRIP};
}

// Behind a block's last part: one of no rows.
static strip_part part_after(prompt *g, const strip_part *p) {
  const bool ends = p->k + p->n == g->n_span;
  packed *out = g->w[p->out == g->w[0]];
  return ends ? part_at(g, p->strip + STRIP, 0, out) : part_at(g, p->strip, p->k + p->n, out);
}

// Computes the block that g describes.
static void prompt_block(prompt *g) {
  const uint32_t n_strips = (g->n_rows + STRIP - 1) / STRIP;
  memset(g->total, 0, sizeof(vf) * n_strips * STRIP * g->n_tiles);
  memset(g->tiny, 0, sizeof g->tiny);
  for (uint32_t t = 0; t < g->n_tokens; t++)
    g->range[t] = empty_range();
  for (g->span = 0; g->span < g->a->w->cols; g->span += g->n_span) {
    const uint32_t left = g->a->w->cols - g->span;
    g->n_span = left < SPAN ? left : SPAN;
    pack_tokens(g);
    strip_part part = part_at(g, 0, 0, g->w[0]);
    decode_rows(g, &part, STRIP);
    while (part.strip < g->n_rows) {
      if (HAS_SCALES && part.k == 0) decode_scales(g, part.strip);
      strip_part next = part_after(g, &part);
      vf *totals = g->total + part.strip * g->n_tiles;
      for (uint32_t i = 0; i < g->n_tiles; i++)
        multiply_part(g, &part, g->x + i * (g->n_span / PL) * X_STEP, totals + i * STRIP, &next);
      if (next.row < STRIP) decode_rows(g, &next, STRIP - next.row);
      part = next;
    }
  }
  put_results(g);
  for (uint32_t t = 0; t < g->n_tokens; t++)
    end_rows(g->a, g->token0 + t, g->range[t], g->tiny, g->row0, g->row0 + g->n_rows);
}

static bool tiles_fit(const td_weight *w) {
  const uint32_t group = HAS_SCALES && w->scale_cols < w->cols ? w->scale_cols : w->cols;
  return w->cols % LINE_COLS == 0 && group % LINE_COLS == 0 && !w->zero;
}

static inline void linear_tiles(const td_linear_args *a) {
  if (!a->prompt || !tiles_fit(a->w)) {
    TILES_REST(a);
    return;
  }
  prompt g;
  g.a = a;
  g.row_bytes = td_weight_row_bytes(a->w);
  shape_tiles(4, 0, PL * sizeof(packed), VL);
  const uint32_t n_blocks = (a->n_tokens + MOST_TOKENS - 1) / MOST_TOKENS;
  for (uint32_t i = 0; i < n_blocks; i++) { // of even size
    g.token0 = (uint32_t)((uint64_t)i * a->n_tokens / n_blocks);
    g.n_tokens = (uint32_t)((i + 1ull) * a->n_tokens / n_blocks) - g.token0;
    g.n_tiles = (g.n_tokens + VL - 1) / VL;
    for (g.row0 = a->row_begin; g.row0 < a->row_end; g.row0 += g.n_rows) {
      const uint32_t left = a->row_end - g.row0;
      g.n_rows = left < MOST_ROWS ? left : MOST_ROWS;
      prompt_block(&g);
    }
  }
  end_tokens();
}
