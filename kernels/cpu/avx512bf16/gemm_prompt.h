// kernels/cpu/avx512bf16/gemm_prompt.h - y = W x for prefill, sixteen rows per vector.
// Include after vec.h, finite_range.h and these definitions:
//   DWORD_COLS    columns in 32 bits of a row
//   pairs_of      the weights in 32 bits of each of 16 rows: vector i has columns i and
//                 i + DWORD_COLS / 2
//   HAS_SCALES    whether there are scales; groups have MIN_GROUP columns or more
//   put_scales    the scales of up to 16 rows from `row` on, for n groups from `first` on: one
//                 vector per group, at out + i * step
//   whole_scale   factor of all results
//   look          accumulates what tiny_of needs from stored weights, starting with all ones
//   tiny_of       mask of 16-bit positions whose weights are so small that products may be lost
//   LEAST         smallest nonzero activation for products with other weights; the largest is
//                 1 / LEAST
//   linear_exact  the FP32 kernel, for tokens and rows that do not qualify
//
// A lane is a row, so nothing is summed across lanes, and a group's scales are a vector that
// multiplies the group's sum. Every (row, token) pair has one total. A run ends with its group or
// after PART columns; its products are summed from zero and, times the scale, added to the total.
// All paths keep this order, so they agree to the last bit:
//   up to FEW_OF_A_PROMPT tokens
//                    16 rows at a time, straight from memory
//   more             TILE_ROWS rows and PART columns of weights are transposed and decoded into L1
//                    and used for one tile of tokens after the other. x of SPAN columns of a block
//                    of tokens stays in L2, and so do totals. ROW_VECTORS vectors of rows times
//                    TOKENS tokens need ROW_VECTORS + TOKENS loads, at two loads a cycle.
// The order differs from decode's (linear_rows.h, linear_q4.h): with one lane per row, a single
// token would wait for each addition, and 16 rows are not one stream of memory.
#pragma once

#include "kernels/cpu/avx512bf16/exact_rows.h"
#include "kernels/cpu/avx512bf16/turn_lines.h"
#include "kernels/cpu/common/numeric.h"
#include "kernels/cpu/common/transpose.h"
#include "kernels/cpu/common/vec_math.h"

enum {
  ROW_VECTORS = 4,
  TILE_ROWS = ROW_VECTORS * VL,
  TOKENS = 6,
  FEW = 16, // tokens whose sums of a run fit registers
  // A word of 4-bit codes is four steps with each token, so for 4-bit weights decoding through L1
  // pays from fewer tokens.
  FEW_OF_A_PROMPT = DWORD_COLS == 8 ? 12 : FEW,
  PART = 256,
  SPAN = 1024,
  CHUNK = 4 * DWORD_COLS, // columns in 16 bytes
  MOST_TOKENS = 192,      // per block
  MOST_ROWS = 512,
  X_STRIDE = SPAN + PL, // padded, so that rows of x fall into different L1 sets
  FEW_COLS = 16384,     // maximum columns with few tokens
  MAX_RUNS = FEW_COLS / MIN_GROUP + FEW_COLS / PART + 1,
  SPAN_GROUPS = SPAN / MIN_GROUP + 2
};

// Pairs of columns, and the index of their group's scales.
typedef struct {
  uint16_t n_pairs, group;
} prompt_run;

// Some rows times some tokens. Lives on the stack.
typedef struct {
  _Alignas(64) packed w[TILE_ROWS * PART]; // [pair][ROW_VECTORS][row][2]
  packed x[MOST_TOKENS * X_STRIDE];        // [token], columns in the order of pairs
  vf total[MOST_ROWS / VL * MOST_TOKENS];  // [tile of rows][tile of tokens][vector][token]
  vf scale[HAS_SCALES ? SPAN_GROUPS * ROW_VECTORS : 1]; // [group of the span][vector]
  x_range range[MOST_TOKENS];
  bool tiny[MOST_ROWS];
  const td_linear_args *a;
  size_t row_bytes;
  uint32_t row0, n_rows, token0, n_tokens; // the block
  uint32_t n_tiles;                        // tiles of tokens
  uint32_t span, n_span;                   // columns [span, span + n_span)
  prompt_run runs[MAX_RUNS];               // runs of a part, or of a row
  uint32_t n_runs, n_alike;         // n_alike: first runs of a row that are equal and whole chunks
  const char *next;                 // weights decoded next: TILE_ROWS rows from here on
  uint32_t n_next_lines, next_rows; // lines per row; rows to prefetch per share
} prompt;

// Tiles of tokens, as even as possible, since a tile of few tokens is slow.
static uint32_t prompt_tile_begin(const prompt *g, uint32_t tile) {
  return tile * g->n_tokens / g->n_tiles;
}

// ---- activations ----------------------------------------------------------------------------

// Reorders 32 numbers to the order of pairs.
TD_INLINE pv pair_columns(vi v) {
  static const _Alignas(64) uint16_t places[3][32] = {
      {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
       16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31},
      {0,  2,  1,  3,  4,  6,  5,  7,  8,  10, 9,  11, 12, 14, 13, 15,
       16, 18, 17, 19, 20, 22, 21, 23, 24, 26, 25, 27, 28, 30, 29, 31},
      {0,  4,  1,  5,  2,  6,  3,  7,  8,  12, 9,  13, 10, 14, 11, 15,
       16, 20, 17, 21, 18, 22, 19, 23, 24, 28, 25, 29, 26, 30, 27, 31},
  };
  if (DWORD_COLS == 2) return pv_of(v);
  return pv_of(_mm512_permutexvar_epi16(vi_load(places[DWORD_COLS / 4]), v));
}

static const float *prompt_x(const prompt *g, uint32_t token) {
  const uint32_t t = g->token0 + token;
  return g->a->x + (g->a->x_rows ? g->a->x_rows[t] : t) * g->a->ldx;
}

// Packs the span's columns of a token, with zeros up to a whole vector.
static void pack_token(prompt *g, uint32_t token, packed *out) {
  const float *x = prompt_x(g, token) + g->span;
  x_range r[2] = {g->span > 0 ? g->range[token] : empty_range(), empty_range()};
  for (uint32_t k = 0; k < g->n_span; k += PL) {
    const uint32_t left = g->n_span - k;
    vf lo = left < VL ? vf_load_n(x + k, left) : vf_load(x + k), hi = vf_zero();
    if (left > VL) hi = left < PL ? vf_load_n(x + k + VL, left - VL) : vf_load(x + k + VL);
    r[0] = range_with(r[0], lo, lo);
    r[1] = range_with(r[1], hi, hi);
    pv_store(out + k, pair_columns(pv_from_vf(lo, hi)));
  }
  g->range[token] = both_ranges(r[0], r[1]);
}

// Packs the span's columns of all tokens. Prefetches later tokens meanwhile: the hardware
// prefetcher needs a while to follow a token, and these are short.
static void pack_tokens(prompt *g, size_t stride) {
  for (uint32_t t = 0; t < g->n_tokens; t++) {
    const float *x = prompt_x(g, t + 8 < g->n_tokens ? t + 8 : t) + g->span;
    for (uint32_t k = 0; k < g->n_span; k += 16)
      __builtin_prefetch(x + k, 0, 2);
    pack_token(g, t, g->x + t * stride);
  }
}

// ---- weights --------------------------------------------------------------------------------

static size_t bytes_before(uint32_t k) {
  return (size_t)k / DWORD_COLS * 4;
}

// Records the rows, of up to 16, that have tiny weights.
static void note_tiny(prompt *g, uint32_t row, uint32_t n_rows, vi seen) {
  const __mmask32 tiny = tiny_of(seen);
  for (uint32_t r = 0; tiny && r < n_rows; r++)
    g->tiny[row + r] |= tiny >> 2 * r & 3;
}

// Decodes the weights in N dwords of 16 rows to out; returns the address after them.
TD_INLINE packed *decode_dwords(const int N, const vi *dwords, packed *out, vi *seen) {
  TD_UNROLL for (int i = 0; i < N; i++) {
    pv pairs[DWORD_COLS / 2];
    *seen = look(*seen, dwords[i]);
    pairs_of(dwords[i], pairs);
    TD_UNROLL for (int j = 0; j < DWORD_COLS / 2; j++, out += ROW_VECTORS * PL) {
      pv_store(out, pairs[j]);
    }
  }
  return out;
}

// Decodes columns [k, k + n) of vector v of the block's rows from `row` on.
static void decode_rows(prompt *g, uint32_t row, uint32_t v, uint32_t k, uint32_t n) {
  enum { LINE_COLS = 4 * CHUNK };
  row += v * VL;
  const uint32_t n_rows = row >= g->n_rows ? 0 : g->n_rows - row < VL ? g->n_rows - row : VL;
  const size_t apart = g->row_bytes, n_bytes = apart - bytes_before(k);
  const char *w = (const char *)g->a->w->data + (g->row0 + row) * apart + bytes_before(k);
  packed *out = g->w + v * PL;
  vi seen = _mm512_set1_epi32(-1);
  uint32_t at = 0;
  for (; n_rows == VL && at + LINE_COLS <= n; at += LINE_COLS) {
    const char *line = w + bytes_before(at);
    // Prefetch into L1; at the end of the part, the first line of the next sixteen rows.
    const char *ahead = at + LINE_COLS < n ? line + 64 : w + VL * apart;
    vi dwords[VL];
    TD_UNROLL for (uint32_t r = 0; r < VL; r++) __builtin_prefetch(ahead + r * apart);
    turn_lines(line, apart, dwords);
    out = decode_dwords(VL, dwords, out, &seen);
  }
  for (; at < n; at += CHUNK) {
    const size_t byte = bytes_before(at);
    vi dwords[4];
    transpose_rows(w + byte, apart, n_rows, n_bytes - byte, dwords);
    out = decode_dwords(4, dwords, out, &seen);
  }
  note_tiny(g, row, n_rows, seen);
}

// Transposes the scales of n groups from `first` on, for n_vectors times 16 rows. Some rows may be
// past the last one.
static void turn_scales(const prompt *g, uint32_t row, uint32_t n_vectors, uint32_t first,
                        uint32_t n, vf *out) {
  for (uint32_t v = 0; v < n_vectors; v++, row += VL) {
    const uint32_t left = row < g->n_rows ? g->n_rows - row : 0;
    if (left > 0) {
      put_scales(g->a->w, g->row0 + row, left < VL ? left : VL, first, n, out + v, n_vectors);
      continue;
    }
    for (uint32_t i = 0; i < n; i++)
      out[i * n_vectors + v] = vf_zero();
  }
}

static uint32_t group_of(const prompt *g, uint32_t k) {
  return HAS_SCALES ? k / g->a->w->scale_cols : 0;
}

// Cuts columns [k, k + n) into runs. Groups are counted from the group of column `first`.
static void find_runs(prompt *g, uint32_t first, uint32_t k, uint32_t n) {
  const uint32_t size = HAS_SCALES ? g->a->w->scale_cols : UINT32_MAX, end = k + n;
  g->n_runs = 0;
  for (uint32_t to; k < end; k = to) {
    const uint32_t in_group = size - k % size, in_part = PART - k % PART;
    to = k + (in_group < in_part ? in_group : in_part);
    if (to > end) to = end;
    const uint32_t n_dwords = (to - k + DWORD_COLS - 1) / DWORD_COLS;
    g->runs[g->n_runs++] = (prompt_run){.n_pairs = (uint16_t)(n_dwords * (DWORD_COLS / 2)),
                                        .group = (uint16_t)(group_of(g, k) - group_of(g, first))};
  }
}

// Finds what is needed after columns [k, k + n) of a tile of rows: the tile's next columns, the
// next tile, the first tile's next span, or the rows after the block.
static void find_next(prompt *g, uint32_t row, uint32_t k, uint32_t n) {
  const td_weight *w = g->a->w;
  uint32_t at = g->span + k + n;
  row += g->row0;
  if (k + n == g->n_span) {
    row += TILE_ROWS;
    if (row < g->row0 + g->n_rows) {
      at = g->span;
    } else if (at < w->cols) {
      row = g->row0;
    } else {
      at = 0;
    }
  }
  const uint32_t left = w->cols - at;
  g->next = (const char *)w->data + row * g->row_bytes + bytes_before(at);
  g->n_next_lines = (uint32_t)(bytes_before(left < PART ? left : PART) / 64) + 1;
  const uint32_t n_shares = ROW_VECTORS + g->n_tiles;
  g->next_rows = (TILE_ROWS + n_shares - 1) / n_shares;
}

// Prefetches a share of it; called for each vector of decoded rows and each tile of tokens.
static void fetch_next(prompt *g) {
  for (uint32_t r = 0; r < g->next_rows; r++, g->next += g->row_bytes) {
    for (uint32_t i = 0; i < g->n_next_lines; i++)
      __builtin_prefetch(g->next + i * (size_t)64, 0, 2);
  }
}

// Two columns of a token, broadcast to every row.
TD_INLINE vi two_columns(const packed *x) {
  int two;
  memcpy(&two, x, sizeof two);
  return _mm512_set1_epi32(two);
}

// ---- products -------------------------------------------------------------------------------

// totals [ROW_VECTORS][T] += products of a part; x is the first token's.
TD_INLINE void prompt_tile(const int T, const prompt *g, const packed *x, vf *totals) {
  enum { R = ROW_VECTORS };
  const packed *w = g->w;
  for (uint32_t i = 0; i < g->n_runs; i++) {
    vf acc[R * TOKENS];
    TD_UNROLL for (int j = 0; j < R * T; j++) acc[j] = vf_zero();
    for (uint32_t n = g->runs[i].n_pairs; n > 0; n--, w += R * PL, x += 2) {
      pv wv[R];
      TD_UNROLL for (int r = 0; r < R; r++) wv[r] = pv_load(w + r * PL);
      TD_UNROLL for (int t = 0; t < T; t++) {
        vi xv = two_columns(x + t * X_STRIDE);
        __asm__("" : "+v"(xv)); // one load instead of one per multiplication
        TD_UNROLL for (int r = 0; r < R; r++) {
          acc[r * T + t] = pv_fma(wv[r], pv_of(xv), acc[r * T + t]);
        }
      }
    }
    const vf *scale = g->scale + (HAS_SCALES ? g->runs[i].group * R : 0);
    TD_UNROLL for (int r = 0; r < R; r++) {
      TD_UNROLL for (int t = 0; t < T; t++) {
        vf *total = &totals[r * T + t];
        *total = HAS_SCALES ? vf_fma(acc[r * T + t], scale[r], *total)
                            : vf_add(acc[r * T + t], *total);
      }
    }
    // Keeps the compiler from holding totals in registers, of which there are too few.
    __asm__ volatile("" ::: "memory");
  }
}

#define PROMPT_TILE(T)                                                                             \
  case T: prompt_tile(T, g, x, totals); return;

// Not inlined, since its caller's constants would take registers.
__attribute__((noinline)) static void prompt_any_tile(uint32_t n_tokens, const prompt *g,
                                                      const packed *x, vf *totals) {
  switch (n_tokens) {
    PROMPT_TILE(1)
    PROMPT_TILE(2)
    PROMPT_TILE(3)
    PROMPT_TILE(4)
    PROMPT_TILE(5)
    PROMPT_TILE(6)
  default: return;
  }
}
_Static_assert(TOKENS == 6, "a case for every size of tile");

// A tile of rows times the block's tokens, over columns [k, k + n) of the span.
static void prompt_part(prompt *g, uint32_t row, uint32_t k, uint32_t n) {
  find_next(g, row, k, n);
  for (uint32_t v = 0; v < ROW_VECTORS; v++) {
    fetch_next(g);
    decode_rows(g, row, v, g->span + k, n);
  }
  find_runs(g, g->span, g->span + k, n);
  vf *totals = g->total + (size_t)row / VL * g->n_tokens;
  for (uint32_t i = 0; i < g->n_tiles; i++) {
    const uint32_t t = prompt_tile_begin(g, i), n_tokens = prompt_tile_begin(g, i + 1) - t;
    fetch_next(g);
    prompt_any_tile(n_tokens, g, g->x + (size_t)t * X_STRIDE + k, totals + (size_t)t * ROW_VECTORS);
  }
}

static void end_block(const prompt *g) {
  for (uint32_t t = 0; t < g->n_tokens; t++)
    end_rows(g->a, g->token0 + t, g->range[t], g->tiny, g->row0, g->row0 + g->n_rows);
}

static void put_results(const prompt *g) {
  const td_linear_args *a = g->a;
  const vf scale = vf_set1(whole_scale(a->w));
  const vf *total = g->total;
  for (uint32_t row = 0; row < g->n_rows; row += TILE_ROWS) {
    for (uint32_t i = 0; i < g->n_tiles; i++) {
      const uint32_t begin = prompt_tile_begin(g, i), n = prompt_tile_begin(g, i + 1) - begin;
      for (uint32_t r = row; r < row + TILE_ROWS; r += VL) {
        const uint32_t left = r < g->n_rows ? g->n_rows - r : 0;
        float *y = a->y + (g->token0 + begin) * a->ldy + g->row0 + r - a->y_row0;
        for (uint32_t t = 0; t < n; t++, total++, y += a->ldy) {
          if (left >= VL) {
            vf_store(y, vf_mul(*total, scale));
          } else {
            vf_store_n(y, vf_mul(*total, scale), left);
          }
        }
      }
    }
  }
}

// Computes the block that g describes.
static void prompt_block(prompt *g) {
  const uint32_t n_rows = (g->n_rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
  memset(g->total, 0, sizeof(vf) * (n_rows / VL) * g->n_tokens);
  memset(g->tiny, 0, sizeof g->tiny);
  g->n_tiles = (g->n_tokens + TOKENS - 1) / TOKENS;
  for (g->span = 0; g->span < g->a->w->cols; g->span += g->n_span) {
    const uint32_t left = g->a->w->cols - g->span;
    g->n_span = left < SPAN ? left : SPAN;
    pack_tokens(g, X_STRIDE);
    for (uint32_t row = 0; row < g->n_rows; row += TILE_ROWS) {
      if (HAS_SCALES) {
        const uint32_t first = group_of(g, g->span);
        const uint32_t n = group_of(g, g->span + g->n_span - 1) - first + 1;
        turn_scales(g, row, ROW_VECTORS, first, n, g->scale);
      }
      for (uint32_t k = 0, n; k < g->n_span; k += n) {
        n = g->n_span - k < PART ? g->n_span - k : PART;
        prompt_part(g, row, k, n);
      }
    }
  }
  put_results(g);
  end_block(g);
}

// ---- few tokens -----------------------------------------------------------------------------

// Position along 16 rows, or those that are left.
typedef struct {
  const prompt *g;
  const char *w;
  // Prefetch address, in memory order: a stream that the hardware prefetcher follows.
  const char *ahead;
  uint32_t k, n_rows;
  const prompt_run *run;
  vi seen;
} few_walk;

// acc [T] += products of one dword of each row. x: its first column of the first token.
TD_INLINE void add_dword(const int T, few_walk *at, vi dwords, const packed *x, size_t stride,
                         vf *acc) {
  pv pairs[DWORD_COLS / 2];
  at->seen = look(at->seen, dwords);
  pairs_of(dwords, pairs);
  TD_UNROLL for (int j = 0; j < DWORD_COLS / 2; j++) {
    TD_UNROLL for (int t = 0; t < T; t++) {
      acc[t] = pv_fma(pairs[j], pv_of(two_columns(x + t * stride + 2 * j)), acc[t]);
    }
  }
}

// total [T] += acc [T], the sums of a run, which are then reset to zero.
TD_INLINE void end_run(const int T, const few_walk *at, const prompt_run *run, vf *acc, vf *total) {
  const vf *scales = at->g->total;
  TD_UNROLL for (int t = 0; t < T; t++) {
    total[t] = HAS_SCALES ? vf_fma(acc[t], scales[run->group], total[t]) : vf_add(acc[t], total[t]);
    acc[t] = vf_zero();
  }
}

// N equal runs of whole chunks, interleaved to hide the latency of additions.
TD_INLINE void add_runs(const int N, const int T, few_walk *at, size_t stride, vf *total) {
  const uint32_t n = 2u * at->run->n_pairs;
  const size_t apart = at->g->row_bytes, bytes = bytes_before(n);
  const packed *x = at->g->x + at->k;
  vf acc[DWORD_COLS / 2 * FEW];
  TD_UNROLL for (int i = 0; i < N * T; i++) acc[i] = vf_zero();
  for (uint32_t k = 0; k < n; k += CHUNK, at->w += 16, x += CHUNK) {
    TD_UNROLL for (int i = 0; i < 4 * N; i++, at->ahead += 64) __builtin_prefetch(at->ahead, 0, 2);
    TD_UNROLL for (int r = 0; r < N; r++) {
      vi dwords[4];
      vi_transpose(at->w + r * bytes, apart, dwords);
      TD_UNROLL for (int i = 0; i < 4; i++) {
        add_dword(T, at, dwords[i], x + r * n + i * DWORD_COLS, stride, acc + r * T);
      }
    }
  }
  TD_UNROLL for (int r = 0; r < N; r++) end_run(T, at, at->run + r, acc + r * T, total);
  at->w += (N - 1) * bytes;
  at->k += N * n;
  at->run += N;
}

// The remaining runs.
TD_INLINE void add_rest(const int T, few_walk *at, size_t stride, vf *total) {
  const uint32_t cols = at->g->a->w->cols;
  const size_t apart = at->g->row_bytes;
  const packed *x = at->g->x + at->k;
  uint32_t left = at->run->n_pairs;
  vf acc[FEW];
  TD_UNROLL for (int t = 0; t < T; t++) acc[t] = vf_zero();
  for (; at->k < cols; at->k += CHUNK, at->w += 16, x += CHUNK) {
    vi dwords[4];
    TD_UNROLL for (int i = 0; i < 4; i++, at->ahead += 64) __builtin_prefetch(at->ahead, 0, 2);
    transpose_rows(at->w, apart, at->n_rows, apart - bytes_before(at->k), dwords);
    TD_UNROLL for (int i = 0; i < 4; i++) {
      add_dword(T, at, dwords[i], x + i * DWORD_COLS, stride, acc);
      left -= DWORD_COLS / 2;
      if (left > 0) continue;
      end_run(T, at, at->run++, acc, total);
      left = at->run->n_pairs;
    }
  }
}

TD_INLINE void few_rows(const int T, prompt *g, uint32_t row, size_t stride) {
  // runs interleaved: more products per 16 bytes are longer chains of additions
  const int AT_ONCE = DWORD_COLS / 2 / T;
  const td_linear_args *a = g->a;
  const uint32_t n_left = g->n_rows - row;
  few_walk at = {.g = g, .n_rows = n_left < VL ? n_left : VL, .run = g->runs};
  at.w = (const char *)a->w->data + (g->row0 + row) * g->row_bytes;
  at.ahead = at.w + VL * g->row_bytes;
  if (a->next && g->row0 + row + VL >= a->row_end) at.ahead = a->next;
  at.seen = _mm512_set1_epi32(-1);
  vf total[FEW];
  TD_UNROLL for (int t = 0; t < T; t++) total[t] = vf_zero();
  if (AT_ONCE > 1 && at.n_rows == VL) {
    for (uint32_t n = g->n_alike / AT_ONCE; n > 0; n--)
      add_runs(AT_ONCE, T, &at, stride, total);
  }
  add_rest(T, &at, stride, total);
  const vf scale = vf_set1(whole_scale(a->w));
  float *y = a->y + g->token0 * a->ldy + g->row0 + row - a->y_row0;
  TD_UNROLL for (int t = 0; t < T; t++, y += a->ldy) {
    vf_store_n(y, vf_mul(total[t], scale), at.n_rows);
  }
  note_tiny(g, row, at.n_rows, at.seen);
}

#define FEW_ROWS(T)                                                                                \
  case T: few_rows(T, g, row, stride); return;

__attribute__((noinline)) static void few_any_rows(prompt *g, uint32_t row, size_t stride) {
  switch (g->n_tokens) {
    FEW_ROWS(1)
    FEW_ROWS(2)
    FEW_ROWS(3)
    FEW_ROWS(4)
    FEW_ROWS(5)
    FEW_ROWS(6)
    FEW_ROWS(7)
    FEW_ROWS(8)
    FEW_ROWS(9)
    FEW_ROWS(10)
    FEW_ROWS(11)
    FEW_ROWS(12)
    FEW_ROWS(13)
    FEW_ROWS(14)
    FEW_ROWS(15)
    FEW_ROWS(16)
  default: return;
  }
}
_Static_assert(FEW == 16, "a case for every number of tokens");
_Static_assert((int)FEW_COLS / MIN_GROUP <= (int)MOST_ROWS / VL * MOST_TOKENS,
               "totals have room for scales");

// Elements of x from one token to the next.
static size_t few_stride(const td_weight *w) {
  return ((size_t)w->cols + PL - 1) / PL * PL + PL;
}

static bool are_few(const td_linear_args *a) {
  return a->n_tokens <= FEW_OF_A_PROMPT && a->w->cols <= FEW_COLS &&
         a->n_tokens * few_stride(a->w) <= (size_t)MOST_TOKENS * X_STRIDE;
}

// Totals are in registers or on the stack here; scales are stored in g->total.
static void few_block(prompt *g) {
  const uint32_t cols = g->a->w->cols;
  const size_t stride = few_stride(g->a->w);
  memset(g->tiny, 0, sizeof g->tiny);
  g->span = 0;
  g->n_span = cols;
  pack_tokens(g, stride);
  find_runs(g, 0, 0, cols);
  g->runs[g->n_runs].n_pairs = UINT16_MAX; // sentinel after the last column
  const uint32_t n_pairs = g->runs[0].n_pairs;
  g->n_alike = 0;
  while (2 * n_pairs % CHUNK == 0 && g->runs[g->n_alike].n_pairs == n_pairs &&
         2 * n_pairs * (g->n_alike + 1) <= cols)
    g->n_alike++;
  for (uint32_t row = 0; row < g->n_rows; row += VL) {
    if (HAS_SCALES) turn_scales(g, row, 1, 0, group_of(g, cols - 1) + 1, g->total);
    few_any_rows(g, row, stride);
  }
  end_block(g);
}

static void linear_prompt(const td_linear_args *a) {
  prompt g;
  g.a = a;
  g.row_bytes = td_weight_row_bytes(a->w);
  const bool few = are_few(a);
  const uint32_t n_blocks = (a->n_tokens + MOST_TOKENS - 1) / MOST_TOKENS;
  for (uint32_t i = 0; i < n_blocks; i++) { // of even size
    g.token0 = (uint32_t)((uint64_t)i * a->n_tokens / n_blocks);
    g.n_tokens = (uint32_t)((i + 1ull) * a->n_tokens / n_blocks) - g.token0;
    for (g.row0 = a->row_begin; g.row0 < a->row_end; g.row0 += g.n_rows) {
      const uint32_t left = a->row_end - g.row0;
      g.n_rows = left < MOST_ROWS ? left : MOST_ROWS;
      if (few) {
        few_block(&g);
      } else {
        prompt_block(&g);
      }
    }
  }
}
