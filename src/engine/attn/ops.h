// src/engine/attn/ops.h - a step's operators of each kind of attention, a row each. Internal to
// engine/.
//
// A file NAME.c of this folder, or that of a kind alike, has these functions and the row
// td_attn_NAME.
#pragma once

#include "engine/engine_impl.h"

// Entries of the batch's tokens, and the pages that take them.
typedef struct {
  td_batch_view batch;
  td_kv_view kv;
  const void *entry[TD_N_ENTRIES];
} td_attn_store;

typedef struct {
  td_attn_spec spec;
  // From h of the microbatch's tokens to queries and entries, in the buffers.
  void (*project)(td_engine *engine, const td_microbatch *part, const td_layer *layer);
  void (*store)(td_engine *engine, const td_attn_store *entries);
  // To TD_ACT_OUT, when the entries of these tokens are stored.
  void (*attend)(td_engine *engine, const td_microbatch *part, const td_layer *layer,
                 uint32_t layer_idx);
} td_attn_ops;

#define TD_ATTN_ROW(KIND, name) extern const td_attn_ops td_attn_##name;
TD_ATTN_KINDS(TD_ATTN_ROW)
#undef TD_ATTN_ROW

// Scores and sums of n tokens after n_past with the keys up to their own; dims: of a head's key and
// value together.
double td_attn_pair_flops(uint32_t n_heads, double dims, double n, double n_past);
// Of all kinds with a window and pooled keys.
void td_attn_describe_window(const td_model_config *config, td_buf *out);

const td_attn_ops *td_attn_ops_of(const td_model_config *config, uint32_t layer_idx);
// Queues the entries of the microbatch's tokens into the layer's pages.
void td_attn_store_rows(td_engine *engine, const td_microbatch *part, uint32_t layer_idx);
