// src/engine/attn/gqa.h - operators that the kinds of grouped-query attention share. Internal to
// engine/attn/.
#pragma once

#include "engine/attn/ops.h"

// Heads of keys and values in layers of a kind.
typedef struct {
  uint32_t n_kv, dim;
} td_gqa_heads;
td_gqa_heads td_gqa_heads_of(const td_model_config *config, td_attn_kind kind);
td_attn_cache td_gqa_cache_of(td_gqa_heads heads);
void td_gqa_store_heads(td_engine *engine, const td_attn_store *entries, td_gqa_heads heads);

// Of td_attn_spec.
td_attn_cache td_gqa_cache(const td_model_config *config);
td_attn_rows td_gqa_act(const td_model_config *config);
void td_gqa_describe(const td_model_config *config, td_buf *out);

void td_gqa_project(td_engine *engine, const td_microbatch *part, const td_layer *layer);
void td_gqa_store(td_engine *engine, const td_attn_store *entries);
// selected: what the microbatch's tokens see, blocks or groups of keys (td_op_select), as
// the model has them; NULL: they see all keys.
void td_gqa_attend(td_engine *engine, const td_microbatch *part, const td_layer *layer,
                   uint32_t layer_idx, const int32_t *selected);
