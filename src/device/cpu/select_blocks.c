// src/device/cpu/select_blocks.c - which blocks of keys a token's attention is confined to, for
// each head of an indexer: those with the largest of their keys' scores. A score depends on its
// query and key alone, in every kind of step: the products of all heads with a page's keys are a
// matrix product in the kernel for many tokens.
#include <math.h>

#include "device/cpu/select_run.h"

enum {
  TILE_HEADS = 64,  // heads of a tile's tokens
  RANGE_KEYS = 1024 // keys of an item, at least; whole pages and blocks
};

// Blocks that the token sees, its own the last.
static uint32_t n_seen(const void *args, uint32_t token) {
  const td_select_blocks_args *a = args;
  return (uint32_t)a->batch.position[token] / a->block + 1;
}

// The largest scores so far of a tile's rows in the blocks that the page at position begin is in.
static void score_page(const td_select_run *run, size_t tile_idx, uint32_t begin, unsigned member) {
  const td_select_blocks_args *a = run->args;
  const td_attn_tile *tile = &run->tiles[tile_idx];
  const uint32_t page_tokens = a->batch.page_tokens, left = td_attn_n_keys(&a->batch, tile) - begin;
  const uint32_t n = left < page_tokens ? left : page_tokens;
  const char *page = td_attn_page(&a->batch, &a->kv, tile->seq, begin);
  const float *products = td_select_multiply(run, tile, page, n, member);
  for (uint32_t row = 0; row < tile->n * a->n_heads; row++) {
    const uint32_t token = tile->token + row / a->n_heads;
    const uint32_t n_visible = td_attn_visible(&a->batch, token, begin, begin + n);
    const float *from = products + (size_t)row * page_tokens;
    float *scores = td_select_scores(run, tile_idx, row);
    for (uint32_t j = 0; j < n_visible; j++) {
      float *score = &scores[(begin + j) / a->block];
      if (from[j] > *score) *score = from[j];
    }
  }
}

static void score_item(void *ctx, size_t item, unsigned member) {
  const td_select_run *run = ctx;
  const td_select_blocks_args *a = run->args;
  const size_t tile_idx = item / run->n_ranges;
  const td_attn_tile *tile = &run->tiles[tile_idx];
  const uint32_t n_keys = td_attn_n_keys(&a->batch, tile);
  const uint32_t begin = (uint32_t)(item % run->n_ranges) * run->range, end = begin + run->range;
  for (uint32_t row = 0; row < tile->n * a->n_heads; row++) {
    float *scores = td_select_scores(run, tile_idx, row);
    for (uint32_t b = begin / a->block; b < end / a->block && b < run->max_scores; b++)
      scores[b] = -INFINITY;
  }
  for (uint32_t at = begin; at < end && at < n_keys; at += a->batch.page_tokens)
    score_page(run, tile_idx, at, member);
}

static void select_row(void *ctx, size_t item, unsigned member) {
  (void)member;
  const td_select_run *run = ctx;
  const td_select_blocks_args *a = run->args;
  const td_attn_tile *tile = &run->tiles[item / run->tile_rows];
  const uint32_t row = (uint32_t)(item % run->tile_rows), token = tile->token + row / a->n_heads;
  if (row >= tile->n * a->n_heads || n_seen(a, token) <= a->top_blocks) return;
  float *scores = td_select_scores(run, item / run->tile_rows, row);
  const uint32_t n = n_seen(a, token);
  for (uint32_t i = 0; i < a->n_local; i++)
    scores[n - 1 - i] = INFINITY;
  int32_t *out = a->selected + ((size_t)token * a->n_heads + row % a->n_heads) * a->top_blocks;
  td_select_largest(scores, n, a->top_blocks, out);
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
  td_status status = td_cpu_check_batch(&a->batch, &a->kv, (td_kv_rows){1, a->dim, 0}, err);
  if (status == TD_OK) status = td_dev_check_select_blocks(a, err);
  if (status != TD_OK || a->batch.n_tokens == 0) return status;
  const uint32_t page_tokens = a->batch.page_tokens, step = common_multiple(page_tokens, a->block);
  const uint32_t tile_tokens = a->n_heads < TILE_HEADS ? TILE_HEADS / a->n_heads : 1;
  td_select_run run = {
      .args = a,
      .n_seen = n_seen,
      .most = a->top_blocks,
      .q = a->q,
      .n_heads = a->n_heads,
      .keys = {.dtype = a->kv.dtype, .rows = page_tokens, .cols = a->dim},
      .tile_tokens = tile_tokens,
      .tile_rows = tile_tokens * a->n_heads,
      .range = step < RANGE_KEYS ? RANGE_KEYS / step * step : step,
  };
  status = td_select_tiles(stream, &run, &a->batch, err);
  if (status != TD_OK || run.n_tiles == 0) return status;
  run.n_ranges = (run.max_scores * a->block + run.range - 1) / run.range;
  return td_select_waves(stream, &run, score_item, select_row, err);
}
