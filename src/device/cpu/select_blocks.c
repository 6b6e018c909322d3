// src/device/cpu/select_blocks.c - which blocks of keys a token's attention is confined to, for
// each head of an indexer: those with the largest of their keys' scores. A score depends on its
// query and key alone, in every kind of step: the products of all heads with a page's keys are a
// matrix product in the kernel for many tokens.
#include <math.h>

#include "device/cpu/attn.h"

enum {
  TILE_ROWS = 64,   // heads of a tile's tokens
  RANGE_KEYS = 1024 // keys of an item, at least; whole pages and blocks
};
static const size_t max_score_bytes = (size_t)64 << 20; // of a wave

typedef struct {
  const td_select_blocks_args *a;
  const td_attn_tile *tiles; // of the wave
  uint32_t tile_tokens;      // at most
  uint32_t range;            // keys of an item
  uint32_t n_ranges, max_blocks;
  float *scores; // [tiles of the wave][tile_tokens][n_heads][max_blocks]
  char *member;  // products of a tile's heads with a page's keys
  size_t member_bytes;
} blocks_run;

// Blocks that the token sees, its own the last.
static uint32_t n_seen(const td_select_blocks_args *a, uint32_t token) {
  return (uint32_t)a->batch.position[token] / a->block + 1;
}

static float *scores_at(const blocks_run *run, size_t tile, uint32_t row) {
  const size_t n_rows = (size_t)run->tile_tokens * run->a->n_heads;
  return run->scores + (tile * n_rows + row) * run->max_blocks;
}

// Products of the tile's heads with n keys of a page.
static void multiply(const blocks_run *run, const td_attn_tile *tile, const char *keys, uint32_t n,
                     float *out) {
  const td_select_blocks_args *a = run->a;
  const uint32_t page_tokens = a->batch.page_tokens;
  const td_weight w = {.data = keys, .dtype = a->kv.dtype, .rows = page_tokens, .cols = a->dim};
  td_kernels_linear_exact (&w)(&(td_linear_args){
      .w = &w,
      .x = (const float *)a->q + (size_t)tile->token * a->n_heads * a->dim,
      .y = out,
      .ldx = a->dim,
      .ldy = page_tokens,
      .n_tokens = tile->n * a->n_heads,
      .row_end = n,
      .prompt = true,
  });
}

// The largest scores so far of a tile's rows in the blocks that the page at position begin is in.
static void score_page(const blocks_run *run, size_t tile_idx, uint32_t begin, float *products) {
  const td_select_blocks_args *a = run->a;
  const td_attn_tile *tile = &run->tiles[tile_idx];
  const uint32_t page_tokens = a->batch.page_tokens;
  const uint32_t left = td_attn_n_keys(&a->batch, tile) - begin;
  const uint32_t n = left < page_tokens ? left : page_tokens;
  multiply(run, tile, td_attn_page(&a->batch, &a->kv, tile->seq, begin), n, products);
  for (uint32_t row = 0; row < tile->n * a->n_heads; row++) {
    const uint32_t token = tile->token + row / a->n_heads;
    const uint32_t n_visible = td_attn_visible(&a->batch, token, begin, begin + n);
    const float *from = products + (size_t)row * page_tokens;
    float *scores = scores_at(run, tile_idx, row);
    for (uint32_t j = 0; j < n_visible; j++) {
      float *score = &scores[(begin + j) / a->block];
      if (from[j] > *score) *score = from[j];
    }
  }
}

static void score_item(void *ctx, size_t item, unsigned member) {
  const blocks_run *run = ctx;
  const size_t tile_idx = item / run->n_ranges;
  const td_attn_tile *tile = &run->tiles[tile_idx];
  const uint32_t n_keys = td_attn_n_keys(&run->a->batch, tile);
  const uint32_t begin = (uint32_t)(item % run->n_ranges) * run->range, end = begin + run->range;
  float *products = (float *)(run->member + member * run->member_bytes);
  for (uint32_t row = 0; row < tile->n * run->a->n_heads; row++) {
    float *scores = scores_at(run, tile_idx, row);
    for (uint32_t b = begin / run->a->block; b < end / run->a->block && b < run->max_blocks; b++)
      scores[b] = -INFINITY;
  }
  for (uint32_t at = begin; at < end && at < n_keys; at += run->a->batch.page_tokens)
    score_page(run, tile_idx, at, products);
}

static void select_row(void *ctx, size_t item, unsigned member) {
  (void)member;
  const blocks_run *run = ctx;
  const td_select_blocks_args *a = run->a;
  const size_t n_rows = (size_t)run->tile_tokens * a->n_heads;
  const td_attn_tile *tile = &run->tiles[item / n_rows];
  const uint32_t row = (uint32_t)(item % n_rows), token = tile->token + row / a->n_heads;
  if (row >= tile->n * a->n_heads || n_seen(a, token) <= a->top_blocks) return;
  float *scores = scores_at(run, item / n_rows, row);
  const uint32_t n = n_seen(a, token);
  for (uint32_t i = 0; i < a->n_local; i++)
    scores[n - 1 - i] = INFINITY;
  int32_t *out = a->selected + ((size_t)token * a->n_heads + row % a->n_heads) * a->top_blocks;
  td_cpu_pick_largest(scores, n, a->top_blocks, out);
}

// Tiles whose last token sees no more blocks than are selected are dropped.
static uint32_t keep_selecting(const td_select_blocks_args *a, td_attn_tile *tiles, uint32_t n) {
  uint32_t n_kept = 0;
  for (uint32_t i = 0; i < n; i++)
    if (n_seen(a, tiles[i].token + tiles[i].n - 1) > a->top_blocks) tiles[n_kept++] = tiles[i];
  return n_kept;
}

static td_status run_waves(td_cpu_stream *stream, blocks_run *run, uint32_t n_tiles, td_err *err) {
  const size_t n_rows = (size_t)run->tile_tokens * run->a->n_heads;
  const size_t tile_bytes = n_rows * run->max_blocks * sizeof(float);
  size_t wave = max_score_bytes / tile_bytes > 0 ? max_score_bytes / tile_bytes : 1;
  if (wave > n_tiles) wave = n_tiles;
  void *scores;
  td_status status = td_cpu_scratch(stream, SCRATCH_PARTS, wave * tile_bytes, &scores, err);
  if (status != TD_OK) return status;
  run->scores = scores;
  for (uint32_t done = 0; done < n_tiles; done += wave, run->tiles += wave) {
    const size_t n = n_tiles - done < wave ? n_tiles - done : wave;
    td_cpu_for(stream, n * run->n_ranges, score_item, run);
    td_cpu_for(stream, n * n_rows, select_row, run);
  }
  return TD_OK;
}

static uint32_t common_multiple(uint32_t a, uint32_t b) {
  uint32_t x = a, y = b;
  while (y) {
    const uint32_t rest = x % y;
    x = y;
    y = rest;
  }
  return a / x * b;
}

td_status td_cpu_op_select_blocks(td_cpu_stream *stream, const td_select_blocks_args *a,
                                  td_err *err) {
  td_status status = td_cpu_check_batch(&a->batch, &a->kv, a->dim, err);
  if (status == TD_OK) status = td_dev_check_select_blocks(a, err);
  if (status != TD_OK || a->batch.n_tokens == 0) return status;
  blocks_run run = {.a = a, .tile_tokens = a->n_heads < TILE_ROWS ? TILE_ROWS / a->n_heads : 1};
  td_attn_tile *tiles;
  uint32_t n_tiles;
  status = td_attn_make_tiles(stream, &a->batch, run.tile_tokens, &tiles, &n_tiles, err);
  if (status != TD_OK) return status;
  n_tiles = keep_selecting(a, tiles, n_tiles);
  if (n_tiles == 0) return TD_OK;
  run.tiles = tiles;
  for (uint32_t i = 0; i < n_tiles; i++) {
    const uint32_t n = n_seen(a, tiles[i].token + tiles[i].n - 1);
    if (n > run.max_blocks) run.max_blocks = n;
  }
  const uint32_t page_tokens = a->batch.page_tokens, step = common_multiple(page_tokens, a->block);
  run.range = step < RANGE_KEYS ? RANGE_KEYS / step * step : step;
  run.n_ranges = (run.max_blocks * a->block + run.range - 1) / run.range;
  run.member_bytes = (size_t)run.tile_tokens * a->n_heads * page_tokens * sizeof(float);
  run.member_bytes = (run.member_bytes + 63) & ~(size_t)63;
  const unsigned n_threads = td_pool_size(td_cpu_dev_of(stream)->pool);
  void *member;
  status = td_cpu_scratch(stream, SCRATCH_MEMBER, n_threads * run.member_bytes, &member, err);
  if (status != TD_OK) return status;
  run.member = member;
  return run_waves(stream, &run, n_tiles, err);
}
