// src/device/cpu/select.c - which keys a token's attention is confined to: the indexer's scores,
// and the largest of them. A score depends on its query and key alone, in every kind of step: the
// products of all heads with a page's keys are a matrix product in the kernel for many tokens, and
// are summed in the order of heads.
#include <string.h>

#include "device/cpu/select_run.h"

enum {
  TILE_HEADS = 192, // heads of a tile's tokens, so that their products stay in the cache
  RANGE_KEYS = 1024 // keys of an item, at least a page
};

// Keys that the token sees: positions, or entries of whole groups.
static uint32_t n_seen(const void *args, uint32_t token) {
  const td_select_keys_args *a = args;
  const uint32_t n = (uint32_t)a->batch.position[token] + 1;
  return a->group ? n / a->group : n;
}

// Those that the tile's last token sees.
static uint32_t n_keys_of(const td_select_run *run, const td_attn_tile *tile) {
  return n_seen(run->args, tile->token + tile->n - 1);
}

// scores[j] = sum_h products[h][j], of n keys.
static void sum_heads(float *scores, const float *products, uint32_t n, size_t stride,
                      uint32_t n_heads) {
  for (uint32_t h = 0; h < n_heads; h++)
    for (uint32_t j = 0; j < n; j++)
      scores[j] += products[h * stride + j];
}

// Scores of a tile's tokens with the keys of one page, key `begin` the first.
static void score_page(const td_select_run *run, size_t tile_idx, uint32_t begin, unsigned member) {
  const td_select_keys_args *a = run->args;
  const td_attn_tile *tile = &run->tiles[tile_idx];
  const uint32_t page_keys = run->keys.rows, left = n_keys_of(run, tile) - begin;
  const uint32_t n = left < page_keys ? left : page_keys;
  const uint32_t position = a->group ? (begin + 1) * a->group - 1 : begin;
  const char *page = td_attn_page(&a->batch, &a->kv, tile->seq, position);
  float *products = td_select_multiply(run, tile, page, n, member);
  for (uint32_t row = 0; row < tile->n * a->n_heads; row++) {
    float *p = products + (size_t)row * page_keys;
    for (uint32_t j = 0; j < n; j++)
      p[j] = p[j] > 0 ? p[j] : 0;
  }
  for (uint32_t i = 0; i < tile->n; i++) {
    float *scores = td_select_scores(run, tile_idx, i) + begin;
    memset(scores, 0, n * sizeof *scores);
    if (!a->weights) {
      sum_heads(scores, products + (size_t)i * a->n_heads * page_keys, n, page_keys, a->n_heads);
      continue;
    }
    td_kernels()->axpy(&(td_axpy_args){.y = scores,
                                       .x = products + (size_t)i * a->n_heads * page_keys,
                                       .a = a->weights + (size_t)(tile->token + i) * a->n_heads,
                                       .n = n,
                                       .ldx = page_keys,
                                       .n_rows = a->n_heads});
  }
}

static void score_item(void *ctx, size_t item, unsigned member) {
  const td_select_run *run = ctx;
  const uint32_t n_keys = n_keys_of(run, &run->tiles[item / run->n_ranges]);
  const uint32_t begin = (uint32_t)(item % run->n_ranges) * run->range;
  for (uint32_t at = begin; at < begin + run->range && at < n_keys; at += run->keys.rows)
    score_page(run, item / run->n_ranges, at, member);
}

static void select_token(void *ctx, size_t item, unsigned member) {
  (void)member;
  const td_select_run *run = ctx;
  const td_select_keys_args *a = run->args;
  const td_attn_tile *tile = &run->tiles[item / run->tile_rows];
  const uint32_t i = (uint32_t)(item % run->tile_rows), token = tile->token + i;
  if (i >= tile->n || n_seen(a, token) <= a->top_k) return;
  td_select_largest(td_select_scores(run, item / run->tile_rows, i), n_seen(a, token), a->top_k,
                    a->selected + (size_t)token * a->top_k);
}

td_status td_cpu_op_select_keys(td_cpu_stream *stream, const td_select_keys_args *a, td_err *err) {
  td_status status = td_cpu_check_batch(&a->batch, &a->kv,
                                        (td_kv_rows){a->group ? 0 : 1, a->dim, 0}, err);
  if (status == TD_OK) status = td_dev_check_select_keys(a, err);
  if (status != TD_OK || a->batch.n_tokens == 0) return status;
  const uint32_t page_tokens = a->batch.page_tokens;
  const uint32_t page_keys = a->group ? td_pool_entries(page_tokens, a->group) : page_tokens;
  const uint32_t tile_tokens = a->n_heads < TILE_HEADS ? TILE_HEADS / a->n_heads : 1;
  td_select_run run = {
      .args = a,
      .n_seen = n_seen,
      .most = a->top_k,
      .q = a->q,
      .n_heads = a->n_heads,
      .keys = {.dtype = a->kv.dtype, .rows = page_keys, .cols = a->dim},
      .tile_tokens = tile_tokens,
      .tile_rows = tile_tokens,
      .range = page_keys < RANGE_KEYS ? RANGE_KEYS / page_keys * page_keys : page_keys,
  };
  status = td_select_tiles(stream, &run, &a->batch, err);
  if (status != TD_OK || run.n_tiles == 0) return status;
  run.n_ranges = (run.max_scores + run.range - 1) / run.range;
  return td_select_waves(stream, &run, score_item, select_token, err);
}
