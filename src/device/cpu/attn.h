// src/device/cpu/attn.h - shared by the attention operators.
// A query's result depends on its sequence alone. Keys [0, position] are cut into splits of
// ATTN_SPLIT positions. A split is cut into blocks, which end at a page's end, at the split's end
// or after TD_ATTN_KEYS keys. The blocks of a split run in order by online softmax from a fresh
// state; the splits' states are merged in order. Chunks, batches and the number of threads change
// nothing of this.
#pragma once

#include "device/cpu/cpu.h"

enum { ATTN_SPLIT = 256 };

// Online softmax state of n_q queries: maxima m, sums l, weighted values acc.
typedef struct {
  float *m, *l; // [n_q]
  float *acc;   // [n_q][v_dim]
} td_attn_state;

// Consecutive queries of one sequence.
typedef struct {
  uint32_t seq, token, n; // tokens [token, token + n)
} td_attn_tile;

// Bytes of a state, a multiple of 64; the state stored at base.
size_t td_attn_state_bytes(uint32_t n_q, uint32_t v_dim);
td_attn_state td_attn_state_at(void *base, uint32_t n_q, uint32_t v_dim);
void td_attn_state_reset(const td_attn_state *state, uint32_t n_q, uint32_t v_dim);
// Merges part into total; part has the later keys.
void td_attn_merge(const td_attn_state *total, const td_attn_state *part, uint32_t n_q,
                   uint32_t v_dim);

// End of the block that starts at position begin, with n_keys keys in all.
uint32_t td_attn_block_end(uint32_t begin, uint32_t page_tokens, uint32_t n_keys);
static inline uint32_t td_attn_n_splits(uint32_t n_keys) {
  return (n_keys + ATTN_SPLIT - 1) / ATTN_SPLIT;
}
// Number of keys visible to the tile's last token.
static inline uint32_t td_attn_n_keys(const td_batch_view *b, const td_attn_tile *tile) {
  return (uint32_t)b->position[tile->token + tile->n - 1] + 1;
}
// Number of keys of the block [begin, end) visible to token t.
static inline uint32_t td_attn_visible(const td_batch_view *b, uint32_t t, uint32_t begin,
                                       uint32_t end) {
  uint32_t n_keys = (uint32_t)b->position[t] + 1;
  return n_keys <= begin ? 0 : n_keys < end ? n_keys - begin : end - begin;
}
// First position that token t sees.
static inline uint32_t td_attn_first(const td_batch_view *b, uint32_t t, uint32_t window) {
  const uint32_t n_keys = (uint32_t)b->position[t] + 1;
  return window && n_keys > window ? n_keys - window : 0;
}
static inline const char *td_attn_page(const td_batch_view *b, const td_kv_view *kv, uint32_t seq,
                                       uint32_t position) {
  int32_t page = b->page_table[(size_t)seq * b->max_pages + position / b->page_tokens];
  return kv->pages + (size_t)page * kv->page_bytes;
}

// Cuts the batch into tiles of at most tile_tokens tokens. *tiles is in SCRATCH_ITEMS.
td_status td_attn_make_tiles(td_cpu_stream *stream, const td_batch_view *b, uint32_t tile_tokens,
                             td_attn_tile **tiles, uint32_t *n_tiles, td_err *err);

// Attention where n_heads / n_kv_heads query heads share cached keys and values. Key i of a page
// and KV head h is at page + h * head_bytes + i * ld elements; its value is v_bytes after it. In
// E4M3 pages it is row h * page_tokens + i of `rows`, and its value is n_kv_heads * page_tokens
// rows after it, unless v_bytes is 0.
typedef struct {
  const td_batch_view *batch;
  const td_kv_view *kv;
  const float *q; // [n_tokens][n_heads][k_dim]
  float *out;     // [n_tokens][n_heads][v_dim]
  size_t head_bytes, v_bytes, ld;
  td_kv_rows rows;
  uint32_t n_heads, n_kv_heads, k_dim, v_dim;
  // [n_tokens][top_k] positions or groups that a token sees, as in td_attn_mla_args; or NULL.
  const int32_t *selected;
  uint32_t top_k, group;
  // As in td_attn_gqa_args.
  const int32_t *blocks;
  uint32_t block, top_blocks;
  uint32_t window;    // as in td_attn_gqa_args
  const float *sinks; //
  float scale;
  bool prompt; // prefill: transpose keys (td_attn_block_args) if the kernel can
} td_attn_shared;
td_status td_attn_run_shared(td_cpu_stream *stream, const td_attn_shared *a, td_err *err);
