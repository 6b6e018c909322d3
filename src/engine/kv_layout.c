// src/engine/kv_layout.c - the parts of a KV page.
#include "engine/kv_layout.h"

enum { LONG_PAGE = 512, STATE_SHARE = 4, PAGE_BLOCKS = 8 };

size_t td_kv_entry_elements(const td_model_config *c) {
  if (c->attn == TD_ATTN_MLA) return c->kv_lora_rank + c->rope_dim;
  return 2 * (size_t)c->n_kv_heads * c->head_dim;
}

td_delta_shape td_delta_shape_of(const td_model_config *c) {
  return (td_delta_shape){.n_k_heads = c->delta_k_heads,
                          .n_v_heads = c->delta_v_heads,
                          .k_dim = c->delta_k_dim,
                          .v_dim = c->delta_v_dim,
                          .n_taps = c->delta_taps};
}

static uint32_t n_windows(const td_model_config *c) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < c->n_layers; i++)
    n += td_model_window(c, i) > 0;
  return n;
}

// Blocks that a token's window can touch, if they are fewer than a page has; else 0.
static uint32_t blocks_of(const td_model_config *c, uint32_t block_tokens) {
  if (c->delta_taps || c->attn == TD_ATTN_MLA || !block_tokens || !n_windows(c)) return 0;
  const uint64_t n = ((uint64_t)c->window - 1 + block_tokens - 1) / block_tokens + 1;
  return n < PAGE_BLOCKS ? (uint32_t)n : 0;
}

static size_t delta_bytes(const td_model_config *c) {
  const td_delta_shape shape = td_delta_shape_of(c);
  return td_delta_state_bytes(&shape);
}

static uint32_t default_page_tokens(const td_model_config *c, size_t token_bytes) {
  if (blocks_of(c, LONG_PAGE / PAGE_BLOCKS)) return LONG_PAGE;
  uint32_t n = TD_KV_PAGE_TOKENS;
  if (!c->delta_taps) return n;
  const uint32_t n_delta = td_model_n_delta(c, c->n_layers);
  const size_t states = n_delta * delta_bytes(c), of_token = (c->n_layers - n_delta) * token_bytes;
  while (n < LONG_PAGE && states > STATE_SHARE * of_token * n)
    n *= 2;
  return n;
}

td_kv_layout td_kv_layout_of(const td_model_config *c, td_dtype kv_dtype, uint32_t page_tokens) {
  const size_t token_bytes = td_kv_entry_elements(c) * td_dtype_bytes(kv_dtype);
  td_kv_layout out = {.page_tokens = page_tokens ? page_tokens
                                                 : default_page_tokens(c, token_bytes)};
  out.block_tokens = out.page_tokens / PAGE_BLOCKS;
  out.n_blocks = blocks_of(c, out.block_tokens);
  out.n_states = c->delta_taps ? td_model_n_delta(c, c->n_layers) : out.n_blocks ? n_windows(c) : 0;
  out.n_layers = c->n_layers - out.n_states;
  out.part_bytes = out.page_tokens * token_bytes;
  if (c->delta_taps && out.n_states) out.state_bytes = delta_bytes(c);
  if (out.n_blocks) out.state_bytes = out.n_blocks * out.block_tokens * token_bytes;
  return out;
}

bool td_kv_layout_is_state(const td_kv_layout *layout, const td_model_config *c,
                           uint32_t layer_idx) {
  return td_model_is_delta(c, layer_idx) || (layout->n_blocks && td_model_window(c, layer_idx));
}

void td_kv_layout_to_need(const td_kv_layout *layout, td_kv_need *need) {
  need->kv_bytes_per_token = td_kv_layout_token_bytes(layout);
  need->n_layers = layout->n_layers;
  need->n_states = layout->n_states;
  need->state_bytes = layout->state_bytes;
  need->page_tokens = layout->page_tokens;
}
