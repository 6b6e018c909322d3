// kernels/cpu/avx512amx/blocks_tiles.h - the products of linear/linear_blocks.h by AMX's tiles: a
// group of columns of up to 16 tokens times a vector of rows. Sums are the same integers as by
// vectors, and are added in the same order. BLOCKS_FEW: the kernel of the same bits for what tiles
// do not speed up.
#pragma once

#include "kernels/cpu/avx512amx/tiles.h"

enum { FOUR = 4 }; // tokens are added in fours

static uint32_t tile_begin(const product *g, uint32_t tile) {
  return tile * (g->n_slots / FOUR) / g->n_tiles * FOUR;
}

// Tile 0 is codes, 1 and 2 are x, and the others are sums of this step and the one before. The last
// tile of tokens has the most; others may multiply tokens of the next.
static void begin_tokens(product *g) {
  g->n_slots = (g->n_tokens + FOUR - 1) / FOUR * FOUR;
  g->n_tiles = (g->n_slots + MOST_TILE_TOKENS - 1) / MOST_TILE_TOKENS;
  shape_tiles(1, 2, GROUP_COLS, g->n_slots - tile_begin(g, g->n_tiles - 1));
}

static uint32_t rows_of_one(const product *g) {
  (void)g;
  return 0;
}

// Of a group and a vector of rows: sums of each token by a and by b of x (avx512/blocks.h), a row a
// lane. In 8 bits there is no a.
typedef struct {
  _Alignas(64) int32_t a[MOST_TILE_TOKENS][VL], b[MOST_TILE_TOKENS][VL];
} tile_sums;

// A part's products, a step for each group of a vector of rows and a tile of tokens: tiles multiply
// two steps ahead of the vectors that add sums, so that nothing waits for a tile.
typedef struct {
  const product *g;
  tile_sums *sums; // of even and of odd steps
  uint32_t part, n_groups, n_vectors;
  uint32_t n_steps;
  // what tiles multiply next
  uint32_t step, group, vector, tile;
  const int8_t *x;
  const uint8_t *w;
  size_t x_stride;
} tile_steps;

// Multiplies a step to sums A and B, and stores the sums of the one before.
#define MULTIPLY_STEP(A, B, OTHER_A, OTHER_B, OTHER)                                               \
  if (s->step < s->n_steps) {                                                                      \
    _tile_loadd(0, s->w, sizeof s->g->w[0]);                                                       \
    if (!is_a8) {                                                                                  \
      _tile_loadd(1, s->x, s->x_stride);                                                           \
      _tile_zero(A);                                                                               \
      _tile_dpbssd(A, 1, 0);                                                                       \
    }                                                                                              \
    _tile_loadd(2, s->x + (is_a8 ? 0 : GROUP_COLS), s->x_stride);                                  \
    _tile_zero(B);                                                                                 \
    _tile_dpbssd(B, 2, 0);                                                                         \
  }                                                                                                \
  if (s->step > 0 && s->step <= s->n_steps) {                                                      \
    if (!is_a8) _tile_stored(OTHER_A, s->sums[OTHER].a, 64);                                       \
    _tile_stored(OTHER_B, s->sums[OTHER].b, 64);                                                   \
  }

TD_INLINE void next_step(const bool is_a8, tile_steps *s) {
  if (s->step % 2) {
    MULTIPLY_STEP(5, 6, 3, 4, 0)
  } else {
    MULTIPLY_STEP(3, 4, 5, 6, 1)
  }
  s->step++;
  s->x += (is_a8 ? 1 : 2) * GROUP_COLS;
  s->w += GROUP_COLS / 4 * sizeof s->g->w[0];
  if (++s->group < s->n_groups) return;
  s->group = 0;
  if (++s->vector == s->n_vectors) {
    s->vector = 0;
    s->tile++;
  }
  s->x = x_of_tile(s->g, s->part, tile_begin(s->g, s->tile)).x;
  s->w = s->g->w[0][s->vector];
}

// total [n_tokens, at most T] of a vector of rows += their part.
TD_INLINE void add_groups(const int T, const bool is_a8, tile_steps *s, uint32_t vector,
                          const tile_x *x, uint32_t n_tokens, vf *total) {
  const product *g = s->g;
  const bool by_group = IS_SHORT && is_a8;
  vf part[MOST_TILE_TOKENS];
  TD_UNROLL for (int t = 0; t < T; t++) part[t] = vf_zero();
  for (uint32_t i = 0; i < s->n_groups; i++) {
    const tile_sums *sums = &s->sums[s->step % 2];
    next_step(is_a8, s);
    const vf scale = g->scale[i][vector], offset = HAS_OFFSETS ? g->offset[i][vector] : scale;
    const float *scale_x = x->scale + i * g->n_slots, *sum_x = x->sum + i * g->n_slots;
    TD_UNROLL for (int t = 0; t < T; t++) {
      const vf by = by_group ? vf_mul(scale, vf_set1(scale_x[t])) : scale;
      const vi b = vi_load(sums->b[t]);
      const vi sum = is_a8 ? b : end_group((group_sum){vi_load(sums->a[t]), b});
      part[t] = vf_fma(vf_from_vi(sum), by, part[t]);
      if (HAS_OFFSETS) part[t] = vf_fma(offset, vf_set1(sum_x[t]), part[t]);
    }
  }
  TD_UNROLL for (int t = 0; t < T; t++) {
    const vf scale = vf_set1(by_group ? 1 : x->scale[t]);
    if ((uint32_t)t < n_tokens) total[t] = vf_fma(part[t], scale, total[t]);
  }
}

// Decoded rows from `row` on times the block's tokens, over n columns of a part.
TD_INLINE void multiply_steps(const bool is_a8, product *g, uint32_t row, uint32_t n_vectors,
                              uint32_t part, uint32_t n) {
  __asm__ volatile("" : : : "memory"); // the compiler does not know what tiles load
  tile_sums sums[2];
  tile_steps s = {.g = g,
                  .sums = sums,
                  .x = x_of_tile(g, part, 0).x,
                  .w = g->w[0][0],
                  .x_stride = x_stride(g),
                  .part = part,
                  .n_groups = n / GROUP_COLS,
                  .n_vectors = n_vectors,
                  .n_steps = n / GROUP_COLS * n_vectors * g->n_tiles};
  next_step(is_a8, &s);
  next_step(is_a8, &s);
  for (uint32_t i = 0; i < g->n_tiles * n_vectors; i++) {
    const uint32_t tile = i / n_vectors, v = i % n_vectors;
    const uint32_t t = tile_begin(g, tile), n_slots = tile_begin(g, tile + 1) - t;
    const uint32_t left = g->n_tokens - t, n_tokens = left < n_slots ? left : n_slots;
    const tile_x x = x_of_tile(g, part, t);
    vf *total = g->total + ((size_t)row / VL + v) * g->n_tokens + t;
    if (n_slots <= 8) {
      add_groups(8, is_a8, &s, v, &x, n_tokens, total);
    } else if (n_slots == 12) {
      add_groups(12, is_a8, &s, v, &x, n_tokens, total);
    } else {
      add_groups(16, is_a8, &s, v, &x, n_tokens, total);
    }
  }
}

static void multiply_rows(product *g, uint32_t row, uint32_t n_vectors, uint32_t part, uint32_t n) {
  if (g->a->x_int8) {
    multiply_steps(true, g, row, n_vectors, part, n);
  } else {
    multiply_steps(false, g, row, n_vectors, part, n);
  }
}

static bool left_to_others(const td_linear_args *a) {
  // In 15 bits, of formats that take longest to decode, tiles gain something only later.
  const int later = IS_BY_ROW && !a->x_int8 ? 1 + GGUF_IS_FINE(BLOCK_DTYPE) : 0;
  const bool is_left = a->n_tokens < (uint32_t)TD_TILES_LEAST_TOKENS << later;
  if (is_left) BLOCKS_FEW(a);
  return is_left;
}
