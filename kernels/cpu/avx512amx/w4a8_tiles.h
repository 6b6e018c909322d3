// kernels/cpu/avx512amx/w4a8_tiles.h - the products of linear/linear_w4a8.h by AMX's tiles: a block
// of columns of up to 16 tokens times a strip of rows. Sums are the same integers as by vectors.
// A8_FEW: the kernel of the same bits for what tiles do not speed up.
#pragma once

#include "kernels/cpu/avx512amx/tiles.h"

enum { TILE_COLS = 64 }; // of a block at once; smaller blocks gain nothing

// Signed codes, which without zero points are the numbers themselves.
TD_INLINE void put_codes(a8 *g, uint32_t word, uint32_t v, vi codes) {
  const __m512i less = _mm512_set1_epi8((char)codes_less(g));
  vi_store(g->w[word][v * VL], _mm512_sub_epi8(codes, less));
}

// Of a block and a vector of rows: sums of each token, a row a lane.
typedef struct {
  _Alignas(64) int32_t of[VECTORS][MOST_TILE_TOKENS][VL];
} tile_sums;

static uint32_t n_tiles(const a8 *g) {
  return (g->n_tokens + MOST_TILE_TOKENS - 1) / MOST_TILE_TOKENS;
}

static uint32_t tile_begin(const a8 *g, uint32_t tile) {
  return tile * g->n_tokens / n_tiles(g);
}

// Tiles 0 and 1 are codes, 2 is x, and the others are sums of this block and the one before. The
// last tile of tokens has the most; others may multiply a token of the next.
static void begin_tokens(const a8 *g) {
  shape_tiles(2, 1, TILE_COLS, g->n_tokens - tile_begin(g, n_tiles(g) - 1));
}

// Starts the sums of a block; x of a token is WINDOW from the next.
#define MULTIPLY_BLOCK(A, B)                                                                       \
  _tile_zero(A);                                                                                   \
  _tile_zero(B);                                                                                   \
  for (uint32_t k = 0; k < n_cols; k += TILE_COLS, x += TILE_COLS, w += TILE_COLS / 4) {           \
    _tile_loadd(2, x, WINDOW);                                                                     \
    _tile_loadd(0, w, sizeof *w);                                                                  \
    _tile_dpbssd(A, 2, 0);                                                                         \
    _tile_loadd(1, w[0][VL], sizeof *w);                                                           \
    _tile_dpbssd(B, 2, 1);                                                                         \
  }

TD_INLINE void multiply_block(uint32_t n_cols, const int8_t *x, uint8_t (*w)[STRIP][4], bool odd) {
  if (odd) {
    MULTIPLY_BLOCK(3, 4)
  } else {
    MULTIPLY_BLOCK(5, 6)
  }
}

TD_INLINE void store_sums(tile_sums *sums, bool odd) {
  if (odd) {
    _tile_stored(3, sums->of[0], 64);
    _tile_stored(4, sums->of[1], 64);
  } else {
    _tile_stored(5, sums->of[0], 64);
    _tile_stored(6, sums->of[1], 64);
  }
}
_Static_assert(VECTORS == 2, "tiles for every vector of rows");

// Adds block b's sums to the totals of tokens [t, end).
TD_INLINE void add_sums(const bool zeros, a8 *g, uint32_t window, uint32_t b, uint32_t t,
                        uint32_t end, const tile_sums *sums) {
  for (uint32_t i = 0; t + i < end; i++) {
    const size_t at = a8_at(g, window, t + i) + b;
    const vf scale = vf_set1(g->x_scale[at]);
    TD_UNROLL for (int v = 0; v < VECTORS; v++) {
      vi sum = vi_load(sums->of[v][i]);
      if (zeros) {
        const vi zero = _mm512_sub_epi32(vi_load(&g->zero[b][v * VL]), a8_set1(codes_less(g)));
        sum = _mm512_sub_epi32(sum, a8_mul(zero, a8_set1(g->x_sum[at])));
      }
      add_block(g, b, v, t + i, scale, sum);
    }
  }
}

// A block of a tile of tokens.
typedef struct {
  uint32_t b, t, end;
} tile_step;

// While tiles multiply a block, the sums of the one before are stored, and vectors add those of the
// one before that: nothing waits for a tile.
static void multiply_window(a8 *g, uint32_t window) {
  __asm__ volatile("" : : : "memory"); // the compiler does not know what tiles load
  tile_sums sums[2];
  tile_step steps[4];
  const uint32_t n = n_tiles(g) * g->n_blocks;
  for (uint32_t i = 0; i < n + 2; i++) {
    if (i < n) {
      const uint32_t tile = i / g->n_blocks, b = i % g->n_blocks, t = tile_begin(g, tile);
      steps[i % 4] = (tile_step){b, t, tile_begin(g, tile + 1)};
      multiply_block(g->block, a8_x(g, window, t) + b * g->block, g->w + b * g->block / 4, i % 2);
    }
    if (i >= 1 && i <= n) store_sums(&sums[(i - 1) % 2], (i - 1) % 2);
    if (i < 2) continue;
    const tile_step *s = &steps[(i - 2) % 4];
    if (g->a->w->zero) {
      add_sums(true, g, window, s->b, s->t, s->end, &sums[i % 2]);
    } else {
      add_sums(false, g, window, s->b, s->t, s->end, &sums[i % 2]);
    }
  }
}

static bool left_to_others(const td_linear_args *a) {
  const bool is_left = a->n_tokens < TD_TILES_LEAST_TOKENS || a8_block(a->w) < TILE_COLS;
  if (is_left) A8_FEW(a);
  return is_left;
}
