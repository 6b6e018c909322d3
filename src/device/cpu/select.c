// src/device/cpu/select.c - which keys, or blocks of keys, a token's attention is confined to: the
// indexer's scores, and the largest of each row of them. A score depends on its query and key
// alone, in every kind of step: the products of all heads with a page's keys are a matrix product
// in the kernel for many tokens, and are summed in the order of heads. Tiles of tokens are scored
// in waves, ranges of keys in parallel.
#include <math.h>
#include <string.h>

#include "device/cpu/attn.h"

// Heads of a tile's tokens, so that their products stay in the cache; keys of an item, at least:
// whole pages and blocks.
enum { TILE_HEADS = 192, TILE_BLOCK_HEADS = 64, RANGE_KEYS = 1024 };
static const size_t max_score_bytes = (size_t)64 << 20; // of a wave

typedef struct {
  const td_select_args *a;
  td_weight keys;                         // a page's, without data
  uint32_t heads;                         // whose scores are a row each: of blocks n_heads, else 1
  uint32_t tile_rows, range;              // rows of scores of a tile; keys of an item
  const td_attn_tile *tiles;              // of the wave
  uint32_t n_tiles, max_scores, n_ranges; // of a row; items of a tile
  float *scores;                          // [tiles of the wave][tile_rows][max_scores]
  char *member;                           // products of a tile's heads with a page's keys
  size_t member_bytes;
} select_run;

// What the token sees: positions, entries of whole groups, or blocks, its own the last.
static uint32_t n_seen(const td_select_args *a, uint32_t token) {
  const uint32_t n = (uint32_t)a->batch.position[token] + 1;
  return a->block ? (n - 1) / a->block + 1 : a->group ? n / a->group : n;
}

// Positions or entries that the tile's last token sees.
static uint32_t n_keys_of(const td_select_args *a, const td_attn_tile *tile) {
  return a->block ? td_attn_n_keys(&a->batch, tile) : n_seen(a, tile->token + tile->n - 1);
}

static float *scores_of(const select_run *run, size_t tile, uint32_t row) {
  return run->scores + (tile * run->tile_rows + row) * run->max_scores;
}

// ---- scores -------------------------------------------------------------------------------------

// scores[j] = sum_h products[h][j], of n keys.
static void sum_heads(float *scores, const float *products, uint32_t n, size_t stride,
                      uint32_t n_heads) {
  for (uint32_t h = 0; h < n_heads; h++)
    for (uint32_t j = 0; j < n; j++)
      scores[j] += products[h * stride + j];
}

// Of a tile's tokens with n keys of one page, key `begin` the first.
static void score_keys(const select_run *run, size_t tile_idx, uint32_t begin, uint32_t n,
                       float *products) {
  const td_select_args *a = run->a;
  const td_attn_tile *tile = &run->tiles[tile_idx];
  const uint32_t page_keys = run->keys.rows;
  for (uint32_t row = 0; row < tile->n * a->n_heads; row++) {
    float *p = products + (size_t)row * page_keys;
    for (uint32_t j = 0; j < n; j++)
      p[j] = p[j] > 0 ? p[j] : 0;
  }
  for (uint32_t i = 0; i < tile->n; i++) {
    float *scores = scores_of(run, tile_idx, i) + begin;
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

// The largest so far of a tile's rows in the blocks that the page is in.
static void score_blocks(const select_run *run, size_t tile_idx, uint32_t begin, uint32_t n,
                         const float *products) {
  const td_select_args *a = run->a;
  const td_attn_tile *tile = &run->tiles[tile_idx];
  for (uint32_t row = 0; row < tile->n * a->n_heads; row++) {
    const uint32_t token = tile->token + row / a->n_heads;
    const uint32_t n_visible = td_attn_visible(&a->batch, token, begin, begin + n);
    const float *from = products + (size_t)row * run->keys.rows;
    float *scores = scores_of(run, tile_idx, row);
    for (uint32_t j = 0; j < n_visible; j++) {
      float *score = &scores[(begin + j) / a->block];
      if (from[j] > *score) *score = from[j];
    }
  }
}

// Products of the tile's heads with the first n keys of a page, [tile->n * n_heads][keys.rows], in
// the memory of the thread.
static float *multiply(const select_run *run, const td_attn_tile *tile, const char *page,
                       uint32_t n, unsigned member) {
  td_weight w = run->keys;
  w.data = page;
  float *out = (float *)(run->member + member * run->member_bytes);
  td_kernels_linear_exact (&w)(&(td_linear_args){
      .w = &w,
      .x = (const float *)run->a->q + (size_t)tile->token * run->a->n_heads * w.cols,
      .y = out,
      .ldx = w.cols,
      .ldy = w.rows,
      .n_tokens = tile->n * run->a->n_heads,
      .row_end = n,
      .prompt = true,
  });
  return out;
}

static void score_item(void *ctx, size_t item, unsigned member) {
  const select_run *run = ctx;
  const td_select_args *a = run->a;
  const size_t tile_idx = item / run->n_ranges;
  const td_attn_tile *tile = &run->tiles[tile_idx];
  const uint32_t n_keys = n_keys_of(a, tile), page_keys = run->keys.rows;
  const uint32_t begin = (uint32_t)(item % run->n_ranges) * run->range, end = begin + run->range;
  for (uint32_t row = 0; a->block && row < tile->n * a->n_heads; row++) {
    float *scores = scores_of(run, tile_idx, row);
    for (uint32_t b = begin / a->block; b < end / a->block && b < run->max_scores; b++)
      scores[b] = -INFINITY;
  }
  for (uint32_t at = begin; at < end && at < n_keys; at += page_keys) {
    const uint32_t n = n_keys - at < page_keys ? n_keys - at : page_keys;
    const uint32_t position = a->group ? (at + 1) * a->group - 1 : at;
    float *products = multiply(run, tile, td_attn_page(&a->batch, &a->kv, tile->seq, position), n,
                               member);
    if (a->block)
      score_blocks(run, tile_idx, at, n, products);
    else
      score_keys(run, tile_idx, at, n, products);
  }
}

// ---- the largest --------------------------------------------------------------------------------

// A number that rises with f.
static uint32_t rank_of(float f) {
  uint32_t bits;
  memcpy(&bits, &f, sizeof bits);
  return bits >> 31 ? ~bits : bits | 1u << 31;
}

// The rank of the k-th largest of n scores, 0 < k <= n, and how many of that rank are among the
// first k.
static uint32_t find_least(const float *scores, uint32_t n, uint32_t k, uint32_t *n_equal) {
  enum { DIGIT_BITS = 8, N_DIGITS = 1 << DIGIT_BITS };
  uint32_t rank = 0, mask = 0;
  for (int shift = 32 - DIGIT_BITS; shift >= 0; shift -= DIGIT_BITS) {
    uint32_t count[N_DIGITS] = {0};
    for (uint32_t i = 0; i < n; i++) {
      const uint32_t r = rank_of(scores[i]);
      if ((r & mask) == rank) count[r >> shift & (N_DIGITS - 1)]++;
    }
    uint32_t digit = N_DIGITS - 1;
    for (; count[digit] < k; digit--)
      k -= count[digit];
    rank |= digit << shift;
    mask |= (uint32_t)(N_DIGITS - 1) << shift;
  }
  *n_equal = k;
  return rank;
}

// The indices of the k largest of n scores, 0 < k <= n, in rising order; of equal scores the lower
// index comes first.
static void select_largest(const float *scores, uint32_t n, uint32_t k, int32_t *out) {
  uint32_t n_equal, n_out = 0;
  const uint32_t least = find_least(scores, n, k, &n_equal);
  for (uint32_t j = 0; j < n && n_out < k; j++) {
    const uint32_t rank = rank_of(scores[j]);
    if (rank < least || (rank == least && n_equal == 0)) continue;
    n_equal -= rank == least;
    out[n_out++] = (int32_t)j;
  }
}

static void select_row(void *ctx, size_t item, unsigned member) {
  (void)member;
  const select_run *run = ctx;
  const td_select_args *a = run->a;
  const td_attn_tile *tile = &run->tiles[item / run->tile_rows];
  const uint32_t row = (uint32_t)(item % run->tile_rows), token = tile->token + row / run->heads;
  if (row >= tile->n * run->heads || n_seen(a, token) <= a->top_k) return;
  float *scores = scores_of(run, item / run->tile_rows, row);
  const uint32_t n = n_seen(a, token);
  for (uint32_t i = 0; i < a->n_local; i++)
    scores[n - 1 - i] = INFINITY;
  const size_t out = (size_t)token * run->heads + row % run->heads;
  select_largest(scores, n, a->top_k, a->selected + out * a->top_k);
}

// ---- the operator -------------------------------------------------------------------------------

// Drops tiles that select nothing.
static td_status make_tiles(td_cpu_stream *stream, select_run *run, uint32_t tile_tokens,
                            td_err *err) {
  td_attn_tile *tiles;
  uint32_t n;
  td_status status = td_attn_make_tiles(stream, &run->a->batch, tile_tokens, &tiles, &n, err);
  if (status != TD_OK) return status;
  run->tiles = tiles;
  for (uint32_t i = 0; i < n; i++) {
    const uint32_t seen = n_seen(run->a, tiles[i].token + tiles[i].n - 1);
    if (seen <= run->a->top_k) continue;
    tiles[run->n_tiles++] = tiles[i];
    if (seen > run->max_scores) run->max_scores = seen;
  }
  return TD_OK;
}

static td_status run_waves(td_cpu_stream *stream, select_run *run, uint32_t tile_tokens,
                           td_err *err) {
  const size_t products = (size_t)tile_tokens * run->a->n_heads * run->keys.rows;
  run->member_bytes = (products * sizeof(float) + 63) & ~(size_t)63;
  const unsigned n_threads = td_thread_pool_size(td_cpu_dev_of(stream)->pool);
  void *member, *scores;
  td_status status = td_cpu_scratch(stream, SCRATCH_MEMBER, n_threads * run->member_bytes, &member,
                                    err);
  if (status != TD_OK) return status;
  const size_t tile_bytes = (size_t)run->tile_rows * run->max_scores * sizeof(float);
  size_t wave = max_score_bytes / tile_bytes > 0 ? max_score_bytes / tile_bytes : 1;
  if (wave > run->n_tiles) wave = run->n_tiles;
  status = td_cpu_scratch(stream, SCRATCH_PARTS, wave * tile_bytes, &scores, err);
  if (status != TD_OK) return status;
  run->member = member;
  run->scores = scores;
  for (uint32_t done = 0; done < run->n_tiles; done += wave, run->tiles += wave) {
    const size_t n = run->n_tiles - done < wave ? run->n_tiles - done : wave;
    td_cpu_for(stream, n * run->n_ranges, score_item, run);
    td_cpu_for(stream, n * run->tile_rows, select_row, run);
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

td_status td_cpu_op_select(td_cpu_stream *stream, const td_select_args *a, td_err *err) {
  td_status status = td_cpu_check_batch(&a->batch, &a->kv,
                                        (td_kv_rows){a->group ? 0 : 1, a->dim, 0}, err);
  if (status == TD_OK) status = td_dev_check_select(a, err);
  if (status != TD_OK || a->batch.n_tokens == 0) return status;
  const uint32_t page_tokens = a->batch.page_tokens, block = a->block ? a->block : 1;
  const uint32_t page_keys = a->group ? td_pool_entries(page_tokens, a->group) : page_tokens;
  const uint32_t step = common_multiple(page_keys, block), heads = a->block ? a->n_heads : 1;
  const uint32_t tile_heads = a->block ? TILE_BLOCK_HEADS : TILE_HEADS;
  const uint32_t tile_tokens = a->n_heads < tile_heads ? tile_heads / a->n_heads : 1;
  select_run run = {.a = a,
                    .keys = {.dtype = a->kv.dtype, .rows = page_keys, .cols = a->dim},
                    .heads = heads,
                    .tile_rows = tile_tokens * heads,
                    .range = step < RANGE_KEYS ? RANGE_KEYS / step * step : step};
  status = make_tiles(stream, &run, tile_tokens, err);
  if (status != TD_OK || run.n_tiles == 0) return status;
  run.n_ranges = (run.max_scores * block + run.range - 1) / run.range;
  return run_waves(stream, &run, tile_tokens, err);
}
