// kernels/cpu/avx512amx/blocks_tiles.h - the products of linear/linear_blocks.h by AMX's tiles,
// where x is in 8 bits: a group of columns of up to 16 tokens times a vector of rows. Sums are the
// same integers as by vectors, and are added in the same order. BLOCKS_FEW: the kernel of the same
// bits for what tiles do not speed up.
#pragma once

#include "kernels/cpu/avx512amx/tiles.h"

enum { FOUR = 4 }; // tokens are added in fours

static uint32_t tile_begin(const product *g, uint32_t tile) {
  return tile * (g->n_slots / FOUR) / g->n_tiles * FOUR;
}

// Tile 0 is codes, 1 is x, and the others are sums. The last tile of tokens has the most; others
// may multiply tokens of the next.
static void begin_tokens(product *g) {
  g->n_slots = (g->n_tokens + FOUR - 1) / FOUR * FOUR;
  g->n_tiles = (g->n_slots + MOST_TILE_TOKENS - 1) / MOST_TILE_TOKENS;
  shape_tiles(1, 1, GROUP_COLS, g->n_slots - tile_begin(g, g->n_tiles - 1));
}

static uint32_t rows_of_one(const product *g) {
  (void)g;
  return 0;
}

// Of a group: sums of each token, a row a lane.
typedef struct {
  _Alignas(64) int32_t of[MOST_TILE_TOKENS][VL];
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

// Multiplies a step, and stores the sums of the one before.
#define MULTIPLY_STEP(THIS, OTHER, I)                                                              \
  if (s->step < s->n_steps) {                                                                      \
    _tile_loadd(1, s->x, s->x_stride);                                                             \
    _tile_loadd(0, s->w, sizeof s->g->w[0]);                                                       \
    _tile_zero(THIS);                                                                              \
    _tile_dpbssd(THIS, 1, 0);                                                                      \
  }                                                                                                \
  if (s->step > 0 && s->step <= s->n_steps) _tile_stored(OTHER, s->sums[I].of, 64);

TD_INLINE void next_step(tile_steps *s) {
  if (s->step % 2) {
    MULTIPLY_STEP(3, 2, 0)
  } else {
    MULTIPLY_STEP(2, 3, 1)
  }
  s->step++;
  s->x += GROUP_COLS;
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
TD_INLINE void add_groups(const int T, tile_steps *s, uint32_t vector, const tile_x *x,
                          uint32_t n_tokens, vf *total) {
  const product *g = s->g;
  vf part[MOST_TILE_TOKENS];
  TD_UNROLL for (int t = 0; t < T; t++) part[t] = vf_zero();
  for (uint32_t i = 0; i < s->n_groups; i++) {
    const tile_sums *sums = &s->sums[s->step % 2];
    next_step(s);
    const vf scale = g->scale[i][vector], offset = HAS_OFFSETS ? g->offset[i][vector] : scale;
    const float *scale_x = x->scale + i * g->n_slots, *sum_x = x->sum + i * g->n_slots;
    TD_UNROLL for (int t = 0; t < T; t++) {
      const vf by = IS_SHORT ? vf_mul(scale, vf_set1(scale_x[t])) : scale;
      part[t] = vf_fma(vf_from_vi(vi_load(sums->of[t])), by, part[t]);
      if (HAS_OFFSETS) part[t] = vf_fma(offset, vf_set1(sum_x[t]), part[t]);
    }
  }
  TD_UNROLL for (int t = 0; t < T; t++) {
    const vf scale = vf_set1(IS_SHORT ? 1 : x->scale[t]);
    if ((uint32_t)t < n_tokens) total[t] = vf_fma(part[t], scale, total[t]);
  }
}

// Decoded rows from `row` on times the block's tokens, over n columns of a part.
static void multiply_rows(product *g, uint32_t row, uint32_t n_vectors, uint32_t part, uint32_t n) {
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
  next_step(&s);
  next_step(&s);
  for (uint32_t i = 0; i < g->n_tiles * n_vectors; i++) {
    const uint32_t tile = i / n_vectors, v = i % n_vectors;
    const uint32_t t = tile_begin(g, tile), n_slots = tile_begin(g, tile + 1) - t;
    const uint32_t left = g->n_tokens - t, n_tokens = left < n_slots ? left : n_slots;
    const tile_x x = x_of_tile(g, part, t);
    vf *total = g->total + ((size_t)row / VL + v) * g->n_tokens + t;
    if (n_slots <= 8) {
      add_groups(8, &s, v, &x, n_tokens, total);
    } else if (n_slots == 12) {
      add_groups(12, &s, v, &x, n_tokens, total);
    } else {
      add_groups(16, &s, v, &x, n_tokens, total);
    }
  }
}

static bool left_to_others(const td_linear_args *a) {
  const bool is_left = !a->x_int8 || a->n_tokens < TD_TILES_LEAST_TOKENS;
  if (is_left) BLOCKS_FEW(a);
  return is_left;
}
