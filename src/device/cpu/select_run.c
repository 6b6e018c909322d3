// src/device/cpu/select_run.c - tiles, waves and products of the operators that select keys.
#include "device/cpu/select_run.h"

#include <string.h>

static const size_t max_score_bytes = (size_t)64 << 20; // of a wave

td_status td_select_tiles(td_cpu_stream *stream, td_select_run *run, const td_batch_view *batch,
                          td_err *err) {
  td_attn_tile *tiles;
  uint32_t n;
  td_status status = td_attn_make_tiles(stream, batch, run->tile_tokens, &tiles, &n, err);
  if (status != TD_OK) return status;
  run->tiles = tiles;
  run->n_tiles = run->max_scores = 0;
  for (uint32_t i = 0; i < n; i++) {
    const uint32_t n_seen = run->n_seen(run->args, tiles[i].token + tiles[i].n - 1);
    if (n_seen <= run->most) continue;
    tiles[run->n_tiles++] = tiles[i];
    if (n_seen > run->max_scores) run->max_scores = n_seen;
  }
  return TD_OK;
}

td_status td_select_waves(td_cpu_stream *stream, td_select_run *run, td_select_item *score,
                          td_select_item *select, td_err *err) {
  const size_t products = (size_t)run->tile_tokens * run->n_heads * run->keys.rows;
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
    td_cpu_for(stream, n * run->n_ranges, score, run);
    td_cpu_for(stream, n * run->tile_rows, select, run);
  }
  return TD_OK;
}

float *td_select_multiply(const td_select_run *run, const td_attn_tile *tile, const char *page,
                          uint32_t n, unsigned member) {
  td_weight w = run->keys;
  w.data = page;
  float *out = (float *)(run->member + member * run->member_bytes);
  td_kernels_linear_exact (&w)(&(td_linear_args){
      .w = &w,
      .x = run->q + (size_t)tile->token * run->n_heads * w.cols,
      .y = out,
      .ldx = w.cols,
      .ldy = w.rows,
      .n_tokens = tile->n * run->n_heads,
      .row_end = n,
      .prompt = true,
  });
  return out;
}

// ---- the largest ----

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

void td_select_largest(const float *scores, uint32_t n, uint32_t k, int32_t *out) {
  uint32_t n_equal, n_out = 0;
  const uint32_t least = find_least(scores, n, k, &n_equal);
  for (uint32_t j = 0; j < n && n_out < k; j++) {
    const uint32_t rank = rank_of(scores[j]);
    if (rank < least || (rank == least && n_equal == 0)) continue;
    n_equal -= rank == least;
    out[n_out++] = (int32_t)j;
  }
}
