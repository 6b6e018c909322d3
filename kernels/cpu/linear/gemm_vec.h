// kernels/cpu/linear/gemm_vec.h - GEMM for weights in rows: y = W x for many tokens, with rows
// decoded into the cache.
// The loop nest shared by linear kernels. Include after a vec.h and these definitions:
//   packed, PL      element type of packed w and x, and lanes per vector of them (pv, pv_load)
//   sv              a vector of sums, with sv_add and pv_fma, which adds products to one
//   PAIR_STEPS      in longer runs, this many vectors are summed separately and then added to the
//                   sum of the others; 0: none
//   WINDOW_RUNS     maximum runs per window
//   gemm_scale      the scale of a run of one row; lanes_of converts it to gemm_lanes
//   begin_sum       initial value of the sum for a run of one row and token, given the total
//   x_range         what pack_token records of a token, if anything
//   finish          the result, from the sum of all lanes
//   is_sum          whether the result is that sum, except for rows with NaN
// Define after it, for a format's order of columns:
//   find_window     the runs of the window that begins at column g->k
//   pack_token      packs a token's columns of the window, vector i at out + i * step, and sets
//                   the token's x_scale if end_sum uses it
//   end_sum         a row and token's total after a run, from the total before it
//   decode_row      decodes a row's weights in the same order, and the row's scales
//   stored_row      address of a row's columns from k on, for prefetching
//   end_block       final work when a block's results are written
//
// Every (row, token) pair has one total of VL lanes, along columns. A product of R rows and T
// tokens loads R + T vectors for R T multiplications, so the caches are the limit, not registers. A
// window of WINDOW columns is packed for up to BLOCK_TOKENS tokens (L2) and decoded for GROUP_ROWS
// rows at a time, in the order in which the register tile of GEMM_ROWS x GEMM_TOKENS reads them.
// The weights of a group and the x of a tile of tokens fit L1 together. Totals stay in L2; they are
// vectors, so at most BLOCK_TOTALS pairs are in work at once. Runs are padded with zeros to whole
// vectors, which adds zeros to sums.
#pragma once

#include "kernels/cpu/common/numeric.h"
#include "kernels/cpu/common/vec_math.h"
#include "kernels/decl.h"

enum {
  WINDOW = 2048 / sizeof(packed),
  WINDOW_VECTORS = WINDOW / PL,
  GROUP_ROWS = 3 * GEMM_ROWS,
  BLOCK_TOKENS = 96,
  BLOCK_TOTALS = 128 * BLOCK_TOKENS + GROUP_ROWS * BLOCK_TOKENS,
  BLOCK_ROWS = 256,                      // at most
  X_LINES = WINDOW * sizeof(float) / 64, // cache lines of a token's window, before packing
};

// A block: some rows times some tokens. Lives on the stack.
typedef struct {
  _Alignas(64) packed w[GROUP_ROWS * WINDOW]; // [GROUP_ROWS / GEMM_ROWS][vector][GEMM_ROWS][PL]
  packed x[BLOCK_TOKENS * WINDOW];            // [tile][vector][token of the tile][PL]
  vf total[BLOCK_TOTALS];                     // [row / GEMM_ROWS][tile][row][token of the tile]
  gemm_scale scale[GROUP_ROWS][WINDOW_RUNS];  // of the group's rows, by run of the window
  float x_scale[BLOCK_TOKENS];                // see pack_token
  bool nan[BLOCK_ROWS];
  bool sums_are_final; // finish changes nothing but NaN
  x_range range[BLOCK_TOKENS];
  const td_linear_args *a;
  const float *x_scales;                    // for pack_token; may be NULL
  uint32_t row0, n_rows, token0, n_tokens;  // the block
  uint32_t n_tiles, tile[BLOCK_TOKENS + 1]; // first token of each tile, counted in the block
  uint32_t k, n;                            // columns [k, k + n) of the window
  uint32_t n_runs, n_vectors;               // of the window
  uint32_t run_vectors[WINDOW_RUNS];        // vectors per run
  uint32_t after_row, after_token;          // first row and token of the block after this one
  const char *next[GROUP_ROWS];             // addresses of the next group's weights, to prefetch
  uint32_t n_next_lines;                    // cache lines per row
  uint32_t share_lines, share_x_lines;      // lines to prefetch per tile of tokens
  uint32_t next_row, next_line;             // next line to prefetch
  uint32_t next_token, next_x_line;         // same for the next window's activations
} gemm;

static void find_window(gemm *g);
static void pack_token(gemm *g, uint32_t token, size_t step, packed *out);
static void decode_row(gemm *g, uint32_t row, uint32_t place, packed *out);
static const char *stored_row(const td_weight *w, uint32_t row, uint32_t k);
TD_INLINE vf end_sum(const gemm *g, sv sum, gemm_lanes scale, uint32_t token, vf total);
static void end_block(const gemm *g);

// Tiles of tokens, as even as possible, since a tile of few tokens is slow.
static void cut_tokens(gemm *g) {
  g->n_tiles = (g->n_tokens + GEMM_TOKENS - 1) / GEMM_TOKENS;
  for (uint32_t i = 0; i <= g->n_tiles; i++)
    g->tile[i] = i * g->n_tokens / g->n_tiles;
}

static const float *gemm_x(const td_linear_args *a, uint32_t t) {
  return a->x + (a->x_rows ? a->x_rows[t] : t) * a->ldx;
}

static void pack_tokens(gemm *g) {
  for (uint32_t i = 0; i < g->n_tiles; i++) {
    uint32_t begin = g->tile[i], n = g->tile[i + 1] - begin;
    for (uint32_t t = 0; t < n; t++) {
      pack_token(g, begin + t, n * PL, g->x + (size_t)begin * WINDOW + t * PL);
    }
  }
}

// Rows past the last one are zeros.
static void decode_group(gemm *g, uint32_t group) {
  for (uint32_t i = 0; i < GROUP_ROWS; i++) {
    packed *out = g->w + i / GEMM_ROWS * GEMM_ROWS * WINDOW + i % GEMM_ROWS * PL;
    if (group + i < g->n_rows) {
      decode_row(g, group + i, i, out);
      continue;
    }
    for (uint32_t v = 0; v < g->n_vectors; v++)
      memset(out + v * GEMM_ROWS * PL, 0, PL * sizeof *out);
    memset(g->scale[i], 0, g->n_runs * sizeof g->scale[i][0]);
  }
}

// What the next group needs: the group after this one, the first group's next window, or the next
// block.
static void find_next(gemm *g, uint32_t group) {
  bool last = group + GROUP_ROWS >= g->n_rows, over = last && g->k + g->n == g->a->w->cols;
  uint32_t row = over ? g->after_row : g->row0 + (last ? 0 : group + GROUP_ROWS);
  uint32_t k = over ? 0 : last ? g->k + g->n : g->k, end = k + WINDOW;
  if (end > g->a->w->cols) end = g->a->w->cols;
  for (uint32_t i = 0; i < GROUP_ROWS; i++) {
    uint32_t r = row + i < g->a->w->rows ? row + i : g->a->w->rows - 1;
    g->next[i] = stored_row(g->a->w, r, k);
  }
  size_t bytes = (size_t)(stored_row(g->a->w, g->row0, end) - stored_row(g->a->w, g->row0, k));
  g->n_next_lines = (uint32_t)((bytes + 63) / 64);
  g->share_lines = g->n_next_lines * GROUP_ROWS / g->n_tiles + 1;
  g->next_row = g->next_line = 0;
}

// Prefetches a share of the next group's lines, so that they are cached when it is decoded.
static void fetch_weights(gemm *g) {
  uint32_t share = g->share_lines;
  while (share > 0 && g->next_row < GROUP_ROWS) {
    const char *row = g->next[g->next_row];
    for (; share > 0 && g->next_line < g->n_next_lines; share--, g->next_line++)
      __builtin_prefetch(row + g->next_line * (size_t)64, 0, 2);
    if (g->next_line == g->n_next_lines) g->next_row++, g->next_line = 0;
  }
}

// The same for activations that are packed next, spread over the window's groups.
static void fetch_x(gemm *g) {
  uint32_t share = g->share_x_lines;
  bool over = g->k + g->n == g->a->w->cols;
  uint32_t token0 = over ? g->after_token : g->token0, k = over ? 0 : g->k + g->n;
  uint32_t n_tokens = g->a->n_tokens - token0 < g->n_tokens ? g->a->n_tokens - token0 : g->n_tokens;
  while (share > 0 && g->next_token < n_tokens) {
    const float *x = gemm_x(g->a, token0 + g->next_token) + k;
    for (; share > 0 && g->next_x_line < X_LINES; share--, g->next_x_line++)
      __builtin_prefetch(x + g->next_x_line * 16, 0, 2);
    if (g->next_x_line == X_LINES) g->next_token++, g->next_x_line = 0;
  }
}

// acc [GEMM_ROWS][T] += products of n vectors of rows and tokens.
TD_INLINE void gemm_steps(const int T, uint32_t n, const packed *w, const packed *x, sv *acc) {
  enum { R = GEMM_ROWS };
  for (; n > 0; n--, w += R * PL, x += T * PL) {
    pv wv[R];
    TD_UNROLL for (int r = 0; r < R; r++) wv[r] = pv_load(w + r * PL);
    TD_UNROLL for (int t = 0; t < T; t++) {
      pv xv = pv_load(x + t * PL);
      __asm__("" : "+v"(xv)); // keeps xv in a register: one load instead of one per multiplication
      TD_UNROLL for (int r = 0; r < R; r++) acc[r * T + t] = pv_fma(wv[r], xv, acc[r * T + t]);
    }
  }
}

// totals [GEMM_ROWS][T] += products of the window. place: index of the first row in the group;
// token: index of the first token in the block.
TD_INLINE void gemm_tile(const int T, const gemm *g, uint32_t place, uint32_t token, vf *totals) {
  enum { R = GEMM_ROWS };
  const packed *w = g->w + place * WINDOW, *x = g->x + (size_t)token * WINDOW;
  sv acc[GEMM_ROWS * GEMM_TOKENS];
  for (uint32_t run = 0; run < g->n_runs; run++) {
    const bool first = g->k == 0 && run == 0;
    const uint32_t n = g->run_vectors[run], n_part = n > PAIR_STEPS ? PAIR_STEPS : 0;
    sv part[GEMM_ROWS * GEMM_TOKENS];
    if (PAIR_STEPS > 0) {
      TD_UNROLL for (int i = 0; i < R * T; i++) acc[i] = begin_sum(vf_zero());
      gemm_steps(T, n_part, w, x, acc);
      TD_UNROLL for (int i = 0; i < R * T; i++) part[i] = acc[i];
    }
    TD_UNROLL for (int i = 0; i < R * T; i++) acc[i] = begin_sum(first ? vf_zero() : totals[i]);
    gemm_steps(T, n - n_part, w + n_part * R * PL, x + n_part * T * PL, acc);
    w += n * R * PL, x += n * T * PL;
    TD_UNROLL for (int r = 0; r < R; r++) {
      gemm_lanes scale = lanes_of(g->scale[place + (uint32_t)r][run]);
      TD_UNROLL for (int t = 0; t < T; t++) {
        const int i = r * T + t;
        const sv sum = PAIR_STEPS > 0 ? sv_add(acc[i], part[i]) : acc[i];
        totals[i] = end_sum(g, sum, scale, token + (uint32_t)t, first ? vf_zero() : totals[i]);
      }
    }
    // Keeps the compiler from holding totals in registers, of which there are too few.
    __asm__ volatile("" ::: "memory");
  }
}

#define GEMM_TILE(T)                                                                               \
  case T: gemm_tile(T, g, place, token, totals); return;

// Not inlined, since its caller's constants would take registers.
__attribute__((noinline)) static void gemm_any_tile(uint32_t n_tokens, const gemm *g,
                                                    uint32_t place, uint32_t token, vf *totals) {
  switch (n_tokens) {
    GEMM_TILE(1)
    GEMM_TILE(2)
    GEMM_TILE(3)
    GEMM_TILE(4)
    GEMM_TILE(5)
    GEMM_TILE(6)
  default: return;
  }
}
_Static_assert(GEMM_TOKENS <= 6, "a case for every size of tile");

// Lane sums of GEMM_ROWS rows and as many tokens as make four pairs.
TD_INLINE void sum_tokens(uint32_t token, uint32_t n_tokens, const vf *totals, float sum[4]) {
  vf of[4];
  TD_UNROLL for (uint32_t i = 0; i < 4; i++) {
    const uint32_t t = token + i / GEMM_ROWS;
    of[i] = totals[i % GEMM_ROWS * n_tokens + (t < n_tokens ? t : token)];
  }
  vf_sum4(of[0], of[1], of[2], of[3], sum);
}

static void finish_tile(const gemm *g, uint32_t row, uint32_t token, uint32_t n_tokens,
                        const vf *totals) {
  const size_t ldy = g->a->ldy;
  bool as_they_are = g->sums_are_final && GEMM_ROWS == 4 && row + GEMM_ROWS <= g->n_rows;
  for (uint32_t r = 0; as_they_are && r < GEMM_ROWS; r++)
    as_they_are = !g->nan[row + r];
  float *y = g->a->y + (g->token0 + token) * ldy + g->row0 + row - g->a->y_row0;
  for (uint32_t t = 0; as_they_are && t < n_tokens; t++)
    sum_tokens(t, n_tokens, totals, y + t * ldy);
  for (uint32_t t = 0; !as_they_are && t < n_tokens; t += 4 / GEMM_ROWS) {
    float sum[4];
    sum_tokens(t, n_tokens, totals, sum);
    for (uint32_t i = 0; i < 4; i++) {
      const uint32_t r = i % GEMM_ROWS, at = t + i / GEMM_ROWS;
      if (row + r >= g->n_rows || at >= n_tokens) continue;
      y[at * ldy + r] = finish(g->a->w, g->row0 + row + r, g->nan[row + r], sum[i]);
    }
  }
}

static void gemm_window(gemm *g) {
  const uint32_t n_groups = (g->n_rows + GROUP_ROWS - 1) / GROUP_ROWS;
  g->share_x_lines = X_LINES * g->n_tokens / (n_groups * g->n_tiles) + 1;
  pack_tokens(g);
  g->next_token = g->next_x_line = 0;
  const bool last = g->k + g->n == g->a->w->cols;
  for (uint32_t group = 0; group < g->n_rows; group += GROUP_ROWS) {
    decode_group(g, group);
    find_next(g, group);
    for (uint32_t tile = 0; tile < g->n_tiles; tile++) {
      uint32_t t = g->tile[tile], n = g->tile[tile + 1] - t;
      fetch_weights(g);
      fetch_x(g);
      for (uint32_t r = 0; r < GROUP_ROWS && group + r < g->n_rows; r += GEMM_ROWS) {
        vf *totals = g->total + (size_t)(group + r) * g->n_tokens + t * GEMM_ROWS;
        gemm_any_tile(n, g, r, t, totals);
        if (last) finish_tile(g, group + r, t, n, totals);
      }
    }
  }
}

// Computes the block that g describes.
static void gemm_block(gemm *g) {
  memset(g->nan, 0, sizeof g->nan);
  for (g->k = 0; g->k < g->a->w->cols; g->k += g->n) {
    find_window(g);
    gemm_window(g);
  }
  end_block(g);
}

static void gemm_all(const td_linear_args *a, const float *x_scales) {
  gemm g;
  g.a = a;
  g.x_scales = x_scales;
  g.sums_are_final = is_sum(a->w);
  uint32_t n_blocks = (a->n_tokens + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
  for (uint32_t i = 0; i < n_blocks; i++) { // of even size
    g.token0 = (uint32_t)((uint64_t)i * a->n_tokens / n_blocks);
    uint32_t token_end = (uint32_t)((i + 1ull) * a->n_tokens / n_blocks);
    g.n_tokens = token_end - g.token0;
    cut_tokens(&g);
    uint32_t most = 128 * BLOCK_TOKENS / g.n_tokens;
    if (most > BLOCK_ROWS) most = BLOCK_ROWS;
    for (g.row0 = a->row_begin; g.row0 < a->row_end; g.row0 += g.n_rows) {
      uint32_t left = a->row_end - g.row0;
      g.n_rows = left < most ? left : most;
      // After the last block: other rows with the same tokens again, which is as likely as
      // anything.
      bool more_rows = g.n_rows < left, more_tokens = i + 1 < n_blocks;
      g.after_row = more_rows || !more_tokens ? g.row0 + g.n_rows : a->row_begin;
      g.after_token = more_rows ? g.token0 : more_tokens ? token_end : 0;
      gemm_block(&g);
    }
  }
}
