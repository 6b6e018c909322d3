// kernels/cpu/avx2int16/linear_i4_gptq.h - y = W x for INT4 as AutoGPTQ stores it (words of eight
// columns of a row, beside them the next row's) with x rounded to 16 bits, for each ISA's file to
// include behind
//   Q16_EXACT   the version for matrices and tokens that this is not for
//
// Lanes are rows. Sums and their scales are those of linear_q4.h, and so is the error: a sum over a
// block of columns is exact, so all numbers of tokens agree to the last bit. A strip of rows is
// read from top to bottom, a block of columns for all tokens of a call, whose x rests in L2.
#ifndef KERNELS_CPU_AVX2INT16_LINEAR_I4_GPTQ_H
#define KERNELS_CPU_AVX2INT16_LINEAR_I4_GPTQ_H

#include "kernels/cpu/avx2/vec.h"
#include "kernels/cpu/avx2int16/round.h"
#include "kernels/cpu/scales.h"
#include "kernels/decl.h"

#define TD_UNROLL _Pragma("GCC unroll 32")

enum {
  VECTORS = 8,
  STRIP = VECTORS * VL, // rows: four lines of memory side by side
  LINE_WORDS = 16,
  TOKENS = 6,                  // of a tile, at most
  MOST_TOKENS = 24,            // of a call's block
  X_COLS = 8192 * MOST_TOKENS, // of all of them
  X_BLOCKS = X_COLS / A8_LEAST_BLOCK,
};

_Static_assert(VL == 8, "a vector has the rows of a word of zero points");

// Some tokens times a strip; lives on the stack.
typedef struct {
  _Alignas(64) int16_t x[X_COLS]; // [tile][octet][token][pairs of i, i + 4]
  float x_scale[X_BLOCKS];        // [tile][block][token]
  uint32_t x_sum[X_BLOCKS];
  _Alignas(64) float total[MOST_TOKENS][STRIP];
  _Alignas(64) uint32_t words[A8_MOST_BLOCK / OCTET][STRIP]; // of less than a strip
  vf scale[VECTORS];
  vi zero[VECTORS];
  bool fits[MOST_TOKENS];
  const td_linear_args *a;
  uint32_t token0, n_tokens, n_tiles;
  uint32_t block, n_blocks; // columns that have a scale in x
  uint32_t row0, n_rows;    // the strip
} gptq16;

static uint32_t tile_begin(const gptq16 *g, uint32_t tile) {
  return tile * g->n_tokens / g->n_tiles;
}

// All columns of the tokens, tile by tile.
static void round_tokens(gptq16 *g) {
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
                                          g->block, out + (size_t)k * n, (size_t)n * OCTET,
                                          &g->x_scale[at], &g->x_sum[at]);
      }
    }
  }
}

// ---- weights --------------------------------------------------------------------------------

static const uint32_t *words_at(const td_weight *w, uint32_t row, uint32_t k) {
  return (const uint32_t *)w->data + (size_t)k / OCTET * w->rows + row;
}

// What the strip's rows are scaled by, and their zero points; row0 is a multiple of 8.
static void find_group(gptq16 *g, size_t group) {
  const td_weight *w = g->a->w;
  const size_t at = group * w->rows + g->row0, n = td_weight_groups(w) * w->rows;
  const size_t zero_words = ((size_t)w->rows + 7) / 8;
  _Alignas(64) float scale[STRIP] = {0};
  scales_to_f32((const char *)w->scale + at * td_dtype_bytes(w->scale_dtype), w->scale_dtype,
                n - at, g->n_rows, scale);
  for (uint32_t v = 0; v < VECTORS; v++) {
    g->scale[v] = vf_load(scale + v * VL);
    g->zero[v] = _mm256_set1_epi32(8);
    if (!w->zero || v * VL >= g->n_rows) continue;
    const uint32_t word = w->zero[group * zero_words + g->row0 / 8 + v] + w->zero_add;
    g->zero[v] = _mm256_and_si256(vi_spread4(&word), _mm256_set1_epi32(15));
  }
}

// Of less than a strip, octets of words with zeros behind each.
static const uint32_t *copy_words(gptq16 *g, const uint32_t *words, uint32_t n_octets) {
  memset(g->words, 0, sizeof g->words);
  for (uint32_t i = 0; i < n_octets; i++)
    memcpy(g->words[i], words + (size_t)i * g->a->w->rows, g->n_rows * sizeof *words);
  return g->words[0];
}

// ---- products -------------------------------------------------------------------------------

// A strip's words of a block.
typedef struct {
  const uint32_t *words, *ahead; // ahead: of what is read next
  size_t step;                   // words from an octet to the next
  uint32_t n_octets;
} gptq_block;

// Vectors [v, v + R) of the strip times T tokens, whose x, sums, scales and totals these are.
TD_INLINE void dot_vectors(const int R, const int T, const gptq16 *g, const gptq_block *b,
                           uint32_t v, const int16_t *x, const uint32_t *sum, const float *x_scale,
                           float (*total)[STRIP]) {
  vi acc[VECTORS * 2];
  const uint32_t *words = b->words + v * VL, *ahead = b->ahead + v * VL;
  TD_UNROLL for (int i = 0; i < R * T; i++) {
    acc[i] = _mm256_mullo_epi32(g->zero[v + (uint32_t)(i / T)],
                                _mm256_set1_epi32((int)(0 - sum[i % T])));
  }
  for (uint32_t o = 0; o < b->n_octets; o++, words += b->step, x += T * OCTET) {
    TD_UNROLL for (int r = 0; r < R; r += LINE_WORDS / VL) {
      __builtin_prefetch(ahead + r * VL, 0, 2);
    }
    ahead += g->a->w->rows;
    TD_UNROLL for (int i = 0; i < 4; i++) {
      TD_UNROLL for (int r = 0; r < R; r++) {
        const vi w = _mm256_and_si256(_mm256_srli_epi32(vi_load(words + r * VL), 4 * i),
                                      _mm256_set1_epi32(0x000f000f));
        TD_UNROLL for (int t = 0; t < T; t++) {
          vi *of = &acc[r * T + t];
          const vi xv = pair_of(x + t * OCTET + 2 * i);
          // Few sums would wait longer for one instruction than for two.
          *of = R * T > 8 ? add_pairs(*of, w, xv) : add_in_two(*of, w, xv);
          // At once, for there are no registers to keep products in, which the compiler would try.
          __asm__("" : "+v"(*of));
        }
      }
    }
  }
  TD_UNROLL for (int i = 0; i < R * T; i++) {
    float *of = &total[i % T][(v + (uint32_t)(i / T)) * VL];
    const vf scaled = vf_mul(_mm256_cvtepi32_ps(acc[i]), vf_set1(x_scale[i % T]));
    vf_store(of, vf_fma(scaled, g->scale[v + (uint32_t)(i / T)], vf_load(of)));
  }
}

#define DOT_TOKENS(T, R)                                                                           \
  case T:                                                                                          \
    for (uint32_t v = 0; v < VECTORS; v += (R))                                                    \
      dot_vectors(R, T, g, b, v, x, sum, x_scale, total);                                          \
    return;

// A tile of tokens; not inlined, for its caller's constants would take registers.
__attribute__((noinline)) static void dot_tile(const gptq16 *g, const gptq_block *b,
                                               uint32_t n_tokens, const int16_t *x,
                                               const uint32_t *sum, const float *x_scale,
                                               float (*total)[STRIP]) {
  switch (n_tokens) {
    DOT_TOKENS(1, 8)
    DOT_TOKENS(2, 4)
    DOT_TOKENS(3, 4)
    DOT_TOKENS(4, 2)
    DOT_TOKENS(5, 2)
    DOT_TOKENS(6, 2)
  default: return;
  }
}
_Static_assert(TOKENS == 6 && VECTORS == 8, "a case for every size of tile");

// Where reading goes on behind the strip.
static const uint32_t *next_strip(const gptq16 *g) {
  const td_linear_args *a = g->a;
  if (g->row0 + STRIP >= a->row_end && a->next) return a->next;
  return words_at(a->w, g->row0 + STRIP, 0);
}

static void do_strip(gptq16 *g) {
  const td_weight *w = g->a->w;
  const uint32_t padded = g->n_blocks * g->block;
  memset(g->total, 0, g->n_tokens * sizeof g->total[0]);
  for (uint32_t i = 0; i < g->n_blocks; i++) {
    const uint32_t k = i * g->block, left = w->cols - k < g->block ? w->cols - k : g->block;
    gptq_block b = {.words = words_at(w, g->row0, k), .step = w->rows};
    b.n_octets = (left + OCTET - 1) / OCTET;
    b.ahead = i + 1 < g->n_blocks ? words_at(w, g->row0, k + g->block) : next_strip(g);
    if (k % w->scale_cols == 0) find_group(g, k / w->scale_cols);
    if (g->n_rows < STRIP) {
      b.words = copy_words(g, b.words, b.n_octets);
      b.step = STRIP;
    }
    for (uint32_t tile = 0; tile < g->n_tiles; tile++) {
      const uint32_t begin = tile_begin(g, tile), n = tile_begin(g, tile + 1) - begin;
      const size_t at = begin * g->n_blocks + i * n;
      dot_tile(g, &b, n, g->x + (size_t)begin * padded + (size_t)k * n, g->x_sum + at,
               g->x_scale + at, g->total + begin);
    }
  }
}

// Rows of the strip that were asked for.
static void write_strip(const gptq16 *g) {
  const td_linear_args *a = g->a;
  const uint32_t begin = g->row0 < a->row_begin ? a->row_begin - g->row0 : 0;
  const uint32_t left = a->row_end - g->row0, end = left < STRIP ? left : STRIP;
  for (uint32_t t = 0; t < g->n_tokens; t++) {
    memcpy(a->y + (g->token0 + t) * a->ldy + g->row0 + begin - a->y_row0, &g->total[t][begin],
           (end - begin) * sizeof(float));
  }
}

static void do_tokens(gptq16 *g) {
  const td_linear_args *a = g->a;
  g->n_tiles = (g->n_tokens + TOKENS - 1) / TOKENS;
  round_tokens(g);
  for (g->row0 = a->row_begin / 8 * 8; g->row0 < a->row_end; g->row0 += STRIP) {
    g->n_rows = a->w->rows - g->row0 < STRIP ? a->w->rows - g->row0 : STRIP;
    do_strip(g);
    write_strip(g);
  }
  for (uint32_t t = 0; t < g->n_tokens; t++) {
    const td_linear_args one = one_token(a, g->token0 + t, a->row_begin, a->row_end);
    if (!g->fits[t]) Q16_EXACT(&one);
  }
}

static inline void linear_gptq16(const td_linear_args *a) {
  gptq16 g;
  g.a = a;
  g.block = x_block_cols(a->w);
  g.n_blocks = g.block > 0 ? (a->w->cols + g.block - 1) / g.block : 0;
  const uint32_t padded = g.n_blocks * g.block;
  if (g.block == 0 || padded > X_COLS) {
    Q16_EXACT(a);
    return;
  }
  if (a->row_begin == a->row_end) return;
  const uint32_t fit = X_COLS / padded, most = fit < MOST_TOKENS ? fit : MOST_TOKENS;
  const uint32_t n_parts = (a->n_tokens + most - 1) / most;
  for (uint32_t i = 0; i < n_parts; i++) { // even ones
    g.token0 = (uint32_t)((uint64_t)i * a->n_tokens / n_parts);
    g.n_tokens = (uint32_t)((i + 1ull) * a->n_tokens / n_parts) - g.token0;
    do_tokens(&g);
  }
}

#endif
