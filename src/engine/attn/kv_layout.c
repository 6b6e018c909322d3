// src/engine/attn/kv_layout.c - the parts of a KV page.
#include "engine/attn/kv_layout.h"

#include "engine/attn/kind.h"

enum { LONG_PAGE = 512, STATE_SHARE = 4, PAGE_BLOCKS = 8 };

size_t td_kv_entry_elements(const td_model_config *c) {
  uint32_t most = 0;
  for (uint32_t i = 0; i < c->n_layers; i++) {
    const td_attn_cache cache = td_attn_of(c, i)->cache(c);
    const uint32_t n = td_attn_cache_elements(&cache);
    if (n > most) most = n;
  }
  return most;
}

typedef struct {
  uint32_t n;
  size_t bytes, beside_bytes; // of the largest, and of the largest beside entries
} states;

// Of the first n_layers layers, in pages of page_tokens tokens.
static states states_of(const td_model_config *c, uint32_t n_layers, uint32_t page_tokens) {
  states out = {0};
  for (uint32_t i = 0; i < n_layers; i++) {
    const td_attn_cache cache = td_attn_of(c, i)->cache(c);
    size_t n_bytes = cache.state_bytes;
    if (cache.pool_group)
      n_bytes += td_pool_entries(page_tokens, cache.pool_group) * cache.pool_bytes;
    size_t *most = cache.is_beside ? &out.beside_bytes : &out.bytes;
    out.n += n_bytes > 0 && !cache.is_beside;
    if (n_bytes > *most) *most = n_bytes;
  }
  return out;
}

// Whether entries may leave the page when they are behind the layer's window.
static bool has_window(const td_model_config *c, uint32_t layer_idx) {
  return td_model_window(c, layer_idx) && td_attn_of(c, layer_idx)->cache(c).may_leave;
}

static uint32_t n_windows(const td_model_config *c) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < c->n_layers; i++)
    n += has_window(c, i);
  return n;
}

// Blocks that a token's window can touch, if they are fewer than a page has; else 0.
static uint32_t blocks_of(const td_model_config *c, uint32_t block_tokens) {
  if (!block_tokens || !n_windows(c) || td_attn_has_states(c)) return 0;
  const uint64_t n = ((uint64_t)c->window - 1 + block_tokens - 1) / block_tokens + 1;
  return n < PAGE_BLOCKS ? (uint32_t)n : 0;
}

static uint32_t default_page_tokens(const td_model_config *c, size_t token_bytes) {
  if (blocks_of(c, LONG_PAGE / PAGE_BLOCKS)) return LONG_PAGE;
  uint32_t n = TD_KV_PAGE_TOKENS;
  const states all = states_of(c, c->n_layers, n);
  const size_t of_token = (c->n_layers - all.n) * token_bytes;
  while (n < LONG_PAGE && all.n * all.bytes > STATE_SHARE * of_token * n)
    n *= 2;
  return n;
}

// Of a token in the layer where they are most.
static size_t token_bytes_of(const td_model_config *c, td_dtype kv_dtype) {
  size_t most = 0;
  for (uint32_t i = 0; i < c->n_layers; i++) {
    const td_attn_cache cache = td_attn_of(c, i)->cache(c);
    const size_t n = td_attn_cache_bytes(&cache, kv_dtype);
    if (n > most) most = n;
  }
  return most;
}

static size_t round_up(size_t n, size_t to) {
  return (n + to - 1) / to * to;
}

td_kv_layout td_kv_layout_of(const td_model_config *c, td_dtype kv_dtype, uint32_t page_tokens) {
  enum { ALIGN = 64 };
  const size_t token_bytes = token_bytes_of(c, kv_dtype);
  td_kv_layout out = {.page_tokens = page_tokens ? page_tokens
                                                 : default_page_tokens(c, token_bytes)};
  out.block_tokens = out.page_tokens / PAGE_BLOCKS;
  out.n_blocks = blocks_of(c, out.block_tokens);
  const uint32_t n_layers = c->n_layers + c->n_draft_layers;
  const states all = states_of(c, n_layers, out.page_tokens);
  out.n_states = out.n_blocks ? n_windows(c) : all.n;
  out.n_layers = n_layers - out.n_states;
  out.part_bytes = out.page_tokens * token_bytes;
  if (all.beside_bytes) {
    out.beside_at = round_up(out.part_bytes, ALIGN);
    out.part_bytes = round_up(round_up(out.beside_at + all.beside_bytes, ALIGN), out.page_tokens);
  }
  out.state_bytes = out.n_blocks ? out.n_blocks * out.block_tokens * token_bytes : all.bytes;
  return out;
}

bool td_kv_layout_is_state(const td_kv_layout *layout, const td_model_config *c,
                           uint32_t layer_idx) {
  const td_attn_cache cache = td_attn_of(c, layer_idx)->cache(c);
  return (cache.state_bytes && !cache.is_beside) || (layout->n_blocks && has_window(c, layer_idx));
}

size_t td_kv_undo_bytes(const td_model_config *c, uint32_t layer_idx) {
  return td_attn_of(c, layer_idx)->cache(c).undo_bytes;
}

uint64_t td_kv_trail_bytes(const td_model_config *c, uint32_t max_drafts) {
  uint64_t n_bytes = 0;
  for (uint32_t i = 0; i < c->n_layers; i++)
    n_bytes += td_kv_undo_bytes(c, i);
  return n_bytes * max_drafts;
}

void td_kv_layout_to_need(const td_kv_layout *layout, td_kv_need *need) {
  need->kv_bytes_per_token = td_kv_layout_token_bytes(layout);
  need->n_layers = layout->n_layers;
  need->n_states = layout->n_states;
  need->state_bytes = layout->state_bytes;
  need->page_tokens = layout->page_tokens;
}
