// kernels/cpu/avx2int16/linear_kmajor.h - y = W x for column-major INT4 (TD_LAYOUT_GPTQ,
// TD_LAYOUT_AWQ) with x rounded to 16 bits.
// Include after
//   Q16_EXACT   the kernel for matrices and tokens that do not qualify
//   WORD_COLS, WORD_ROWS, word_at, codes_of, zeros_of, rows_to_lanes, lanes_to_rows, X_PAIRS
//               of a layout: kmajor_gptq.h, kmajor_awq.h
//
// Lanes are rows. Sums, scales and error are those of linear_q4.h: the sum over a block of columns
// is exact, so results for any number of tokens agree to the last bit. A strip of rows is read from
// top to bottom, a block of columns at a time for all tokens of a call. Their x stays in L2; the
// parts of the strip are in L1 one after the other. A strip is wide enough to read several adjacent
// cache lines.
#pragma once

#include "kernels/cpu/avx2int16/kmajor.h"
#include "kernels/cpu/common/scales.h"
#include "kernels/decl.h"

enum {
  STRIP = 512, // rows
  N_PARTS = STRIP / PART,
  STRIP_WORDS = STRIP / WORD_ROWS,
  LINE_WORDS = 16,
  TOKENS = 6,                  // per tile, at most
  MOST_TOKENS = 24,            // per block of a call
  X_COLS = 8192 * MOST_TOKENS, // over all tokens
  X_BLOCKS = X_COLS / A8_LEAST_BLOCK,
};

// Prefetch position: n adjacent cache lines, `left` of which are not prefetched yet; then the lines
// one step further.
typedef struct {
  const uint32_t *line;
  uint32_t n, left;
} fetching;

// Some tokens times a strip. Lives on the stack.
typedef struct {
  _Alignas(64) int16_t x[X_COLS]; // [tile][octet][token][4 pairs of columns]
  float x_scale[X_BLOCKS];        // [tile][block][token]
  uint32_t x_sum[X_BLOCKS];
  _Alignas(64) float total[N_PARTS][MOST_TOKENS][PART];
  // copies, zero-padded where words are missing
  _Alignas(64) uint32_t words[A8_MOST_BLOCK / WORD_COLS][STRIP_WORDS];
  _Alignas(64) float scale[STRIP];
  vi zero[STRIP / VL];
  bool fits[MOST_TOKENS];
  const td_linear_args *a;
  uint32_t token0, n_tokens, n_tiles;
  uint32_t block, n_blocks;       // columns per scale of x
  uint32_t row0, n_rows, n_parts; // the strip
  size_t step;                    // words from a column, or group of columns, to the next
  fetching ahead;
} cols16;

static uint32_t tile_begin(const cols16 *g, uint32_t tile) {
  return tile * g->n_tokens / g->n_tiles;
}

// Rounds all columns of the tokens, tile by tile.
static void round_tokens(cols16 *g) {
  const td_linear_args *a = g->a;
  const uint32_t cols = a->w->cols, padded = g->n_blocks * g->block;
  for (uint32_t i = 0; i < g->n_tiles; i++) {
    const uint32_t begin = tile_begin(g, i), n = tile_begin(g, i + 1) - begin;
    for (uint32_t t = 0; t < n; t++) {
      const uint32_t token = g->token0 + begin + t;
      const float *x = a->x + (a->x_rows ? a->x_rows[token] : token) * a->ldx;
      int16_t *out = g->x + (size_t)begin * padded + t * OCTET;
      g->fits[begin + t] = true;
      for (uint32_t b = 0; b < g->n_blocks; b++) {
        const uint32_t k = b * g->block, at = begin * g->n_blocks + b * n + t;
        g->fits[begin + t] &= round_block(x + k, cols - k < g->block ? cols - k : g->block,
                                          g->block, X_PAIRS, out + (size_t)k * n, (size_t)n * OCTET,
                                          &g->x_scale[at], &g->x_sum[at]);
      }
    }
  }
}

// ---- weights --------------------------------------------------------------------------------

// Scales and zero points of the strip's rows.
static void find_group(cols16 *g, size_t group) {
  const td_weight *w = g->a->w;
  const size_t at = group * w->rows + g->row0, n = td_weight_groups(w) * w->rows;
  _Alignas(64) float rows[STRIP] = {0};
  scales_to_f32((const char *)w->scale + at * td_dtype_bytes(w->scale_dtype), w->scale_dtype,
                n - at, g->n_rows, rows);
  for (uint32_t p = 0; p < g->n_parts; p++)
    rows_to_lanes(rows + p * PART, g->scale + p * PART);
  if (!w->zero) {
    for (uint32_t v = 0; v < STRIP / VL; v++)
      g->zero[v] = _mm256_set1_epi32(8);
    return;
  }
  // A word has zero points of eight rows in either layout.
  uint32_t words[STRIP / 8] = {0};
  const size_t row_words = ((size_t)w->rows + 7) / 8;
  memcpy(words, w->zero + group * row_words + g->row0 / 8, (g->n_rows + 7) / 8 * sizeof words[0]);
  for (uint32_t p = 0; p < g->n_parts; p++)
    zeros_of(words + p * (PART / 8), w->zero_add, g->zero + p * PART_VECTORS);
}

// Copies n columns from k on, with zeros for missing columns and rows.
static const uint32_t *copy_words(cols16 *g, uint32_t k, uint32_t n) {
  memset(g->words, 0, sizeof g->words);
  const uint32_t *words = word_at(g->a->w, g->row0, k);
  for (uint32_t i = 0; i * WORD_COLS < n; i++, words += g->step)
    memcpy(g->words[i], words, (g->n_rows + WORD_ROWS - 1) / WORD_ROWS * sizeof *words);
  return g->words[0];
}

TD_INLINE void fetch_lines(const cols16 *g, fetching *f, uint32_t n) {
  for (; n > 0; n--, f->line += LINE_WORDS) {
    __builtin_prefetch(f->line, 0, 2);
    if (--f->left > 0) continue;
    f->line += g->step - (size_t)f->n * LINE_WORDS;
    f->left = f->n;
  }
}

// What follows the strip's block at column k.
static void find_next(cols16 *g, uint32_t k) {
  const td_linear_args *a = g->a;
  const uint32_t *next = NULL;
  if (k + g->block < a->w->cols) {
    next = word_at(a->w, g->row0, k + g->block);
  } else if (g->row0 + STRIP >= a->row_end && a->next) {
    next = a->next;
  } else {
    next = word_at(a->w, g->row0 + STRIP, 0);
  }
  const uint32_t n = (g->n_parts * (PART / WORD_ROWS) + LINE_WORDS - 1) / LINE_WORDS;
  g->ahead = (fetching){next, n, n};
}

// ---- products -------------------------------------------------------------------------------

// A part of the strip times a tile of tokens, over a block of columns.
typedef struct {
  const uint32_t *words;
  size_t step; // in words
  uint32_t n_octets;
  bool fetches; // prefetch what follows the block
  const int16_t *x;
  const uint32_t *sum;
  const float *x_scale;
  const vi *zero;
  const float *scale;
  float (*total)[PART];
} dots;

// Vectors at once for two tokens and for more, and independent sums for one token. AVX-512 has 32
// registers.
#if defined(__AVX512VL__)
enum { OF_TWO = 8, OF_MORE = 4, SUMS_OF_ONE = 2 };
#else
enum { OF_TWO = 4, OF_MORE = 2, SUMS_OF_ONE = 1 };
#endif

// Vectors [v, v + R) of the part times T tokens.
TD_INLINE void dot_vectors(const int R, const int T, const int v, cols16 *g, const dots *d) {
  enum { MOST_SUMS = TOKENS * PART_VECTORS / 2 };
  const int SUMS = T == 1 ? SUMS_OF_ONE : 1, N = R * T;
  vi acc[MOST_SUMS];
  const uint32_t *words = d->words;
  const int16_t *x = d->x;
  fetching ahead = g->ahead;
  TD_UNROLL for (int i = 0; i < N; i++) {
    acc[i] = _mm256_mullo_epi32(d->zero[v + i / T], _mm256_set1_epi32((int)(0 - d->sum[i % T])));
    if (SUMS > 1) acc[N + i] = _mm256_setzero_si256();
  }
  for (uint32_t o = 0; o < d->n_octets; o++, words += OCTET / WORD_COLS * d->step, x += T * OCTET) {
    uint32_t n_lines = d->fetches ? R * VL / LINE_WORDS : 0; // as many lines as are used
    // keeps the compiler from making two loops, with and without prefetching
    __asm__("" : "+r"(n_lines));
    fetch_lines(g, &ahead, n_lines);
    TD_UNROLL for (int i = 0; i < 4; i++) {
      vi w[PART_VECTORS];
      TD_UNROLL for (int t = 0; t < T; t++) {
        vi xv = pair_of(x + t * OCTET + 2 * i);
        __asm__("" : "+v"(xv)); // one load, not kept for the next vector
        TD_UNROLL for (int r = 0; r < R; r++) {
          if (t == 0) w[r] = codes_of(v + r, i, words, d->step);
          vi *of = &acc[i % SUMS * N + r * T + t];
          // With few sums, the latency of the single instruction is longer than that of two.
          *of = N * SUMS > 8 ? add_pairs(*of, w[r], xv) : add_in_two(*of, w[r], xv);
          // Forces the sum now; the compiler would keep products in registers, of which there are
          // too few.
          __asm__("" : "+v"(*of));
        }
      }
    }
  }
  g->ahead = ahead;
  TD_UNROLL for (int i = 0; i < N; i++) {
    if (SUMS > 1) acc[i] = _mm256_add_epi32(acc[i], acc[N + i]);
    const int at = (v + i / T) * VL;
    float *of = &d->total[i % T][at];
    const vf scaled = vf_mul(_mm256_cvtepi32_ps(acc[i]), vf_set1(d->x_scale[i % T]));
    vf_store(of, vf_fma(scaled, vf_load(d->scale + at), vf_load(of)));
  }
}

TD_INLINE void dot_part(const int R, const int T, cols16 *g, const dots *d) {
  TD_UNROLL for (int v = 0; v < PART_VECTORS; v += R) dot_vectors(R, T, v, g, d);
}

#define DOT_TOKENS(T, R)                                                                           \
  case T: dot_part(R, T, g, d); return;

// A tile of tokens. Not inlined, since its caller's constants would take registers.
__attribute__((noinline)) static void dot_tile(cols16 *g, const dots *d, uint32_t n_tokens) {
  switch (n_tokens) {
    DOT_TOKENS(1, 8)
    DOT_TOKENS(2, OF_TWO)
    DOT_TOKENS(3, OF_MORE)
    DOT_TOKENS(4, OF_MORE)
    DOT_TOKENS(5, OF_MORE)
    DOT_TOKENS(6, OF_MORE)
  default: return;
  }
}
_Static_assert(TOKENS == 6, "a case for every size of tile");

// Block i of the columns.
static void do_block(cols16 *g, uint32_t i) {
  const td_weight *w = g->a->w;
  const uint32_t k = i * g->block, left = w->cols - k < g->block ? w->cols - k : g->block;
  const uint32_t padded = g->n_blocks * g->block;
  dots d = {.words = word_at(w, g->row0, k), .step = g->step};
  d.n_octets = (left + OCTET - 1) / OCTET;
  if (k % w->scale_cols == 0) find_group(g, k / w->scale_cols);
  if (g->n_rows % PART != 0 || left % OCTET != 0) {
    d.words = copy_words(g, k, left);
    d.step = STRIP_WORDS;
  }
  find_next(g, k);
  for (uint32_t p = 0; p < g->n_parts; p++, d.words += PART / WORD_ROWS) {
    d.zero = g->zero + p * PART_VECTORS;
    d.scale = g->scale + p * PART;
    for (uint32_t tile = 0; tile < g->n_tiles; tile++) {
      const uint32_t begin = tile_begin(g, tile), n = tile_begin(g, tile + 1) - begin;
      const size_t at = begin * g->n_blocks + i * n;
      d.x = g->x + (size_t)begin * padded + (size_t)k * n;
      d.sum = g->x_sum + at;
      d.x_scale = g->x_scale + at;
      d.total = g->total[p] + begin;
      d.fetches = tile == 0;
      dot_tile(g, &d, n);
    }
  }
}

// Writes the rows of the strip that were requested.
static void write_strip(const cols16 *g) {
  const td_linear_args *a = g->a;
  const uint32_t begin = g->row0 < a->row_begin ? a->row_begin - g->row0 : 0;
  const uint32_t left = a->row_end - g->row0, end = left < STRIP ? left : STRIP;
  for (uint32_t t = 0; t < g->n_tokens; t++) {
    _Alignas(64) float rows[STRIP];
    for (uint32_t p = 0; p < g->n_parts; p++)
      lanes_to_rows(g->total[p][t], rows + p * PART);
    memcpy(a->y + (g->token0 + t) * a->ldy + g->row0 + begin - a->y_row0, rows + begin,
           (end - begin) * sizeof(float));
  }
}

static void do_tokens(cols16 *g) {
  const td_linear_args *a = g->a;
  g->n_tiles = (g->n_tokens + TOKENS - 1) / TOKENS;
  round_tokens(g);
  for (g->row0 = a->row_begin / 8 * 8; g->row0 < a->row_end; g->row0 += STRIP) {
    const uint32_t asked = (a->row_end - g->row0 + PART - 1) / PART * PART;
    const uint32_t left = a->w->rows - g->row0, most = asked < STRIP ? asked : STRIP;
    g->n_rows = left < most ? left : most;
    g->n_parts = (g->n_rows + PART - 1) / PART;
    for (uint32_t p = 0; p < g->n_parts; p++)
      memset(g->total[p], 0, g->n_tokens * sizeof g->total[p][0]);
    for (uint32_t i = 0; i < g->n_blocks; i++)
      do_block(g, i);
    write_strip(g);
  }
  for (uint32_t t = 0; t < g->n_tokens; t++) {
    const td_linear_args one = one_token(a, g->token0 + t, a->row_begin, a->row_end);
    if (!g->fits[t]) Q16_EXACT(&one);
  }
}

static inline void linear_kmajor16(const td_linear_args *a) {
  cols16 g;
  g.a = a;
  g.block = x_block_cols(a->w);
  g.n_blocks = g.block > 0 ? (a->w->cols + g.block - 1) / g.block : 0;
  g.step = (size_t)a->w->rows / WORD_ROWS;
  const uint32_t padded = g.n_blocks * g.block;
  if (g.block == 0 || padded > X_COLS) {
    Q16_EXACT(a);
    return;
  }
  if (a->row_begin == a->row_end) return;
  const uint32_t fit = X_COLS / padded, most = fit < MOST_TOKENS ? fit : MOST_TOKENS;
  const uint32_t n_parts = (a->n_tokens + most - 1) / most;
  for (uint32_t i = 0; i < n_parts; i++) { // of even size
    g.token0 = (uint32_t)((uint64_t)i * a->n_tokens / n_parts);
    g.n_tokens = (uint32_t)((i + 1ull) * a->n_tokens / n_parts) - g.token0;
    do_tokens(&g);
  }
}
