// src/device/cpu/select.c - which keys a token's attention is confined to: the indexer's scores,
// and the largest of them. A score depends on its query and key alone, in every kind of step: the
// products of all heads with a page's keys are a matrix product in the kernel for many tokens, and
// are summed in the order of heads.
#include <string.h>

#include "device/cpu/attn.h"

enum {
  TILE_ROWS = 192,  // heads of a tile's tokens, so that their products stay in the cache
  RANGE_KEYS = 1024 // keys of an item, at least a page
};
static const size_t max_score_bytes = (size_t)64 << 20; // of a wave

typedef struct {
  const td_select_keys_args *a;
  const td_attn_tile *tiles; // of the wave
  uint32_t tile_tokens;      // at most
  uint32_t range_pages;      // pages of an item
  uint32_t n_ranges, max_keys;
  float *scores; // [tiles of the wave][tile_tokens][max_keys]
  char *member;  // products of a tile's heads with a page's keys
  size_t member_bytes;
} select_run;

// Keys that the token sees: positions, or entries of whole groups.
static uint32_t n_seen(const td_select_keys_args *a, uint32_t token) {
  const uint32_t n = (uint32_t)a->batch.position[token] + 1;
  return a->group ? n / a->group : n;
}

// Those that the tile's last token sees.
static uint32_t n_keys_of(const td_select_keys_args *a, const td_attn_tile *tile) {
  return n_seen(a, tile->token + tile->n - 1);
}

// Keys of a page.
static uint32_t keys_of_page(const td_select_keys_args *a) {
  return a->group ? td_pool_entries(a->batch.page_tokens, a->group) : a->batch.page_tokens;
}

// Whether the token sees more keys than are selected.
static bool selects(const td_select_keys_args *a, uint32_t token) {
  return n_seen(a, token) > a->top_k;
}

static float *scores_at(const select_run *run, size_t tile, uint32_t i) {
  return run->scores + (tile * run->tile_tokens + i) * run->max_keys;
}

// Products of the tile's heads with n keys of a page.
static void multiply(const select_run *run, const td_attn_tile *tile, const char *keys, uint32_t n,
                     float *out) {
  const td_select_keys_args *a = run->a;
  const td_weight w = {.data = keys, .dtype = a->kv.dtype, .rows = keys_of_page(a), .cols = a->dim};
  td_kernels_linear_exact (&w)(&(td_linear_args){
      .w = &w,
      .x = (const float *)a->q + (size_t)tile->token * a->n_heads * a->dim,
      .y = out,
      .ldx = a->dim,
      .ldy = keys_of_page(a),
      .n_tokens = tile->n * a->n_heads,
      .row_end = n,
      .prompt = true,
  });
}

// Scores of a tile's tokens with the keys of one page.
static void score_page(const select_run *run, size_t tile_idx, uint32_t begin, float *products) {
  const td_select_keys_args *a = run->a;
  const td_attn_tile *tile = &run->tiles[tile_idx];
  const uint32_t page_keys = keys_of_page(a), left = n_keys_of(a, tile) - begin;
  const uint32_t n = left < page_keys ? left : page_keys;
  const uint32_t position = a->group ? (begin + 1) * a->group - 1 : begin;
  multiply(run, tile, td_attn_page(&a->batch, &a->kv, tile->seq, position), n, products);
  for (uint32_t row = 0; row < tile->n * a->n_heads; row++) {
    float *p = products + (size_t)row * page_keys;
    for (uint32_t j = 0; j < n; j++)
      p[j] = p[j] > 0 ? p[j] : 0;
  }
  for (uint32_t i = 0; i < tile->n; i++) {
    float *scores = scores_at(run, tile_idx, i) + begin;
    memset(scores, 0, n * sizeof *scores);
    td_kernels()->axpy(&(td_axpy_args){.y = scores,
                                       .x = products + (size_t)i * a->n_heads * page_keys,
                                       .a = a->weights + (size_t)(tile->token + i) * a->n_heads,
                                       .n = n,
                                       .ldx = page_keys,
                                       .n_rows = a->n_heads});
  }
}

static void score_item(void *ctx, size_t item, unsigned member) {
  const select_run *run = ctx;
  const td_attn_tile *tile = &run->tiles[item / run->n_ranges];
  const uint32_t page_keys = keys_of_page(run->a);
  const uint32_t range = run->range_pages * page_keys;
  const uint32_t n_keys = n_keys_of(run->a, tile);
  const uint32_t begin = (uint32_t)(item % run->n_ranges) * range;
  float *products = (float *)(run->member + member * run->member_bytes);
  for (uint32_t at = begin; at < begin + range && at < n_keys; at += page_keys)
    score_page(run, item / run->n_ranges, at, products);
}

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

void td_cpu_pick_largest(const float *scores, uint32_t n, uint32_t k, int32_t *out) {
  uint32_t n_equal, n_out = 0;
  const uint32_t least = find_least(scores, n, k, &n_equal);
  for (uint32_t j = 0; j < n && n_out < k; j++) {
    const uint32_t rank = rank_of(scores[j]);
    if (rank < least || (rank == least && n_equal == 0)) continue;
    n_equal -= rank == least;
    out[n_out++] = (int32_t)j;
  }
}

static void select_token(void *ctx, size_t item, unsigned member) {
  (void)member;
  const select_run *run = ctx;
  const td_select_keys_args *a = run->a;
  const td_attn_tile *tile = &run->tiles[item / run->tile_tokens];
  const uint32_t i = (uint32_t)(item % run->tile_tokens), token = tile->token + i;
  if (i >= tile->n || !selects(a, token)) return;
  td_cpu_pick_largest(scores_at(run, item / run->tile_tokens, i), n_seen(a, token), a->top_k,
                      a->selected + (size_t)token * a->top_k);
}

// Tiles whose last token sees no more keys than are selected are dropped.
static uint32_t keep_selecting(const td_select_keys_args *a, td_attn_tile *tiles, uint32_t n) {
  uint32_t n_kept = 0;
  for (uint32_t i = 0; i < n; i++)
    if (selects(a, tiles[i].token + tiles[i].n - 1)) tiles[n_kept++] = tiles[i];
  return n_kept;
}

static td_status run_waves(td_cpu_stream *stream, select_run *run, uint32_t n_tiles, td_err *err) {
  const size_t tile_bytes = (size_t)run->tile_tokens * run->max_keys * sizeof(float);
  size_t wave = max_score_bytes / tile_bytes > 0 ? max_score_bytes / tile_bytes : 1;
  if (wave > n_tiles) wave = n_tiles;
  void *scores;
  td_status status = td_cpu_scratch(stream, SCRATCH_PARTS, wave * tile_bytes, &scores, err);
  if (status != TD_OK) return status;
  run->scores = scores;
  for (uint32_t done = 0; done < n_tiles; done += wave, run->tiles += wave) {
    const size_t n = n_tiles - done < wave ? n_tiles - done : wave;
    td_cpu_for(stream, n * run->n_ranges, score_item, run);
    td_cpu_for(stream, n * run->tile_tokens, select_token, run);
  }
  return TD_OK;
}

td_status td_cpu_op_select_keys(td_cpu_stream *stream, const td_select_keys_args *a, td_err *err) {
  td_status status = td_cpu_check_batch(&a->batch, &a->kv, a->group ? 0 : a->dim, err);
  if (status == TD_OK) status = td_dev_check_select_keys(a, err);
  if (status != TD_OK || a->batch.n_tokens == 0) return status;
  const uint32_t page_keys = keys_of_page(a);
  select_run run = {.a = a,
                    .tile_tokens = a->n_heads < TILE_ROWS ? TILE_ROWS / a->n_heads : 1,
                    .range_pages = page_keys < RANGE_KEYS ? RANGE_KEYS / page_keys : 1};
  td_attn_tile *tiles;
  uint32_t n_tiles;
  status = td_attn_make_tiles(stream, &a->batch, run.tile_tokens, &tiles, &n_tiles, err);
  if (status != TD_OK) return status;
  n_tiles = keep_selecting(a, tiles, n_tiles);
  if (n_tiles == 0) return TD_OK;
  run.tiles = tiles;
  for (uint32_t i = 0; i < n_tiles; i++) {
    const uint32_t n_keys = n_keys_of(a, &tiles[i]);
    if (n_keys > run.max_keys) run.max_keys = n_keys;
  }
  const uint32_t range = run.range_pages * page_keys;
  run.n_ranges = (run.max_keys + range - 1) / range;
  run.member_bytes = (size_t)run.tile_tokens * a->n_heads * page_keys * sizeof(float);
  run.member_bytes = (run.member_bytes + 63) & ~(size_t)63;
  const unsigned n_threads = td_pool_size(td_cpu_dev_of(stream)->pool);
  void *member;
  status = td_cpu_scratch(stream, SCRATCH_MEMBER, n_threads * run.member_bytes, &member, err);
  if (status != TD_OK) return status;
  run.member = member;
  return run_waves(stream, &run, n_tiles, err);
}
