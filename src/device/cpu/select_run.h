// src/device/cpu/select_run.h - shared by the operators that select keys: the scores of an
// indexer's heads with the keys that a token sees, and the largest of each row of scores. Tiles of
// tokens are scored in waves, ranges of keys in parallel.
#pragma once

#include "device/cpu/attn.h"

typedef struct {
  const void *args; // the operator's
  // How many scores of a row the token sees; a token that sees at most `most` selects nothing.
  uint32_t (*n_seen)(const void *args, uint32_t token);
  uint32_t most;
  const float *q; // [n_tokens][n_heads][keys.cols]
  uint32_t n_heads;
  td_weight keys;       // a page's, without data
  uint32_t tile_tokens; // at most
  uint32_t tile_rows;   // rows of scores of a tile
  uint32_t range;       // keys of an item
  uint32_t n_ranges;    // items of a tile
  // Set by td_select_tiles:
  const td_attn_tile *tiles; // of the wave
  uint32_t n_tiles, max_scores;
  // Set by td_select_waves:
  float *scores; // [tiles of the wave][tile_rows][max_scores]
  char *member;  // products of a tile's heads with a page's keys
  size_t member_bytes;
} td_select_run;

// Cuts the batch into tiles and drops tiles that select nothing.
td_status td_select_tiles(td_cpu_stream *stream, td_select_run *run, const td_batch_view *batch,
                          td_err *err);

// Wave by wave, scores items tile * n_ranges + range, then selects from items tile * tile_rows +
// row. ctx is run.
typedef void td_select_item(void *ctx, size_t item, unsigned member);
td_status td_select_waves(td_cpu_stream *stream, td_select_run *run, td_select_item *score,
                          td_select_item *select, td_err *err);

static inline float *td_select_scores(const td_select_run *run, size_t tile, uint32_t row) {
  return run->scores + (tile * run->tile_rows + row) * run->max_scores;
}

// Products of the tile's heads with the first n keys of a page, [tile->n * n_heads][keys.rows], in
// the memory of the thread.
float *td_select_multiply(const td_select_run *run, const td_attn_tile *tile, const char *page,
                          uint32_t n, unsigned member);

// The indices of the k largest of n scores, 0 < k <= n, in rising order; of equal scores the lower
// index comes first.
void td_select_largest(const float *scores, uint32_t n, uint32_t k, int32_t *out);
