// src/engine/attn/kv_layout.h - what a KV page holds. Pure arithmetic.
//
// A page has a part for every layer. Most layers keep the keys and values of all of its tokens
// there. Others keep a state of fixed size: what later tokens need. That is the recurrent state of
// a gated delta net, or, of a layer whose tokens see a short window, the keys and values of the
// last tokens (window.h): older ones leave the cache.
//
// A layer that keeps everything may have a state beside it (td_attn_cache.is_beside), in its part,
// behind the entries.
//
// A pool of pages is [n_layers][n_pages][part_bytes], then [n_states][n_pages][state_bytes].
#pragma once

#include <stdint.h>

#include "device/device.h"
#include "kv/plan.h"
#include "model/model.h"

typedef struct {
  uint32_t page_tokens;
  uint32_t n_layers, n_states;    // layers of either kind
  size_t part_bytes, state_bytes; // of one layer's part of a page
  size_t beside_at;               // where a part's state beside its entries is; 0: no layer has any
  // Layers with a window: a page has blocks of block_tokens tokens, of which the last n_blocks are
  // kept. n_blocks 0: these layers keep all of a page's tokens.
  uint32_t block_tokens, n_blocks;
} td_kv_layout;

// page_tokens 0: the default, TD_KV_PAGE_TOKENS; 512 with windows where states save memory; with
// recurrent states as many as keep them within four times the memory of keys and values, at most
// 512. A prompt's prefix is reused up to a multiple of page_tokens.
td_kv_layout td_kv_layout_of(const td_model_config *config, td_dtype kv_dtype,
                             uint32_t page_tokens);
// Elements of a token's keys and values, or latent, in the layer where they are most.
size_t td_kv_entry_elements(const td_model_config *config);
// Whether the layer keeps a state.
bool td_kv_layout_is_state(const td_kv_layout *layout, const td_model_config *config,
                           uint32_t layer_idx);

// Bytes of a page over all layers: keys and values of one token, states, both.
static inline size_t td_kv_layout_token_bytes(const td_kv_layout *layout) {
  return layout->n_layers * (layout->part_bytes / layout->page_tokens);
}
static inline size_t td_kv_layout_states_bytes(const td_kv_layout *layout) {
  return layout->n_states * layout->state_bytes;
}
static inline size_t td_kv_layout_page_bytes(const td_kv_layout *layout) {
  return layout->n_layers * layout->part_bytes + td_kv_layout_states_bytes(layout);
}
// The offset of a page's part in a pool of n_pages: of layers that keep all first, then of states.
static inline size_t td_kv_layout_part_at(const td_kv_layout *l, uint32_t part, size_t n_pages,
                                          size_t page) {
  if (part < l->n_layers) return (part * n_pages + page) * l->part_bytes;
  return l->n_layers * n_pages * l->part_bytes +
         ((part - l->n_layers) * n_pages + page) * l->state_bytes;
}
static inline size_t td_kv_layout_bytes_of_part(const td_kv_layout *l, uint32_t part) {
  return part < l->n_layers ? l->part_bytes : l->state_bytes;
}

// The first part that leaves the device with its page alone: from there on are states.
static inline uint32_t td_kv_layout_first_state(const td_kv_layout *layout) {
  return layout->beside_at ? 0 : layout->n_layers;
}

// Bytes of a layer's state between two drafts (td_state_trail).
size_t td_kv_undo_bytes(const td_model_config *config, uint32_t layer_idx);
// Bytes of all of them, for steps with max_drafts drafts: of the model's layers, not of one that
// drafts, which has nothing to restore.
uint64_t td_kv_trail_bytes(const td_model_config *config, uint32_t max_drafts);

// Fills what the plan of a pool needs to know about its pages.
void td_kv_layout_to_need(const td_kv_layout *layout, td_kv_need *need);
