// src/engine/attn/index.h - what the kinds of attention whose keys an indexer selects share.
// Internal to engine/attn/.
#pragma once

#include "engine/attn/ops.h"
#include "engine/rows.h"

enum { TD_POOL_RUNNING = 3 }; // numbers a channel that is being pooled has

// Adds pooled keys and the open one, beside entries, to what a layer has in a page.
void td_index_add_keys(const td_model_config *config, td_attn_cache *cache);
void td_index_describe(const td_model_config *config, td_attn_kind kind, td_buf *out);

// A selection for the tokens of a group, but for what is of its kind. q: queries of all tokens.
static inline td_select_args td_index_selection(const td_engine *e, const step_group *group,
                                                td_kv_view keys, void *q) {
  const td_model_config *c = e->config;
  const size_t q_dim = (size_t)c->index_heads * c->index_dim;
  return (td_select_args){.batch = group->view,
                          .kv = keys,
                          .q = td_rows_offset(e, q, group->token_begin * q_dim),
                          .n_heads = c->index_heads,
                          .dim = c->index_dim,
                          .top_k = c->index_top_k,
                          .group = c->index_group};
}

// Pools keys of the microbatch's group g into a layer's state, in a page of which the open key is
// first, and returns the pooled keys. args: what is of its kind.
static inline td_kv_view td_index_pool(td_engine *e, const td_microbatch *p, uint32_t layer_idx,
                                       int g, td_pool_args args) {
  const td_model_config *c = e->config;
  td_kv_view state = td_engine_beside_view(e, layer_idx);
  args.batch = p->groups[g].view;
  args.state = state;
  args.trail = td_engine_trail(e, layer_idx, g);
  args.entry_at = td_attn_open_floats(c);
  args.dim = c->index_dim;
  args.group = c->index_group;
  td_op_pool(e->stream, &args);
  state.pages += args.entry_at * sizeof(float);
  return state;
}
