// src/engine/attn/ops.h - a step's operators of each kind of attention, a row each. Internal to
// engine/.
//
// A file NAME.c of this folder defines static functions of the names below and ends with
// `const td_attn_ops td_attn_NAME = TD_ATTN_OPS_HERE;`. What is missing does not compile.
#pragma once

#include "engine/engine_impl.h"

// Entries of the batch's tokens, and the pages that take them.
typedef struct {
  td_batch_view batch;
  td_kv_view kv;
  const void *entry[TD_N_ENTRIES];
} td_attn_store;

typedef struct {
  // From h of the microbatch's tokens to queries and entries, in the buffers.
  void (*project)(td_engine *engine, const td_microbatch *part, const td_layer *layer);
  void (*store)(td_engine *engine, const td_attn_store *entries);
  // To TD_ACT_OUT, when the entries of these tokens are stored.
  void (*attend)(td_engine *engine, const td_microbatch *part, const td_layer *layer,
                 uint32_t layer_idx);
} td_attn_ops;

// In the order of the fields, so that a kind without one of them does not compile.
#define TD_ATTN_OPS_HERE                                                                           \
  { project, store, attend }

#define TD_ATTN_ROW(KIND, name) extern const td_attn_ops td_attn_##name;
TD_ATTN_KINDS(TD_ATTN_ROW)
#undef TD_ATTN_ROW

const td_attn_ops *td_attn_ops_of(const td_model_config *config, uint32_t layer_idx);
// Queues the entries of the microbatch's tokens into the layer's pages.
void td_attn_store_rows(td_engine *engine, const td_microbatch *part, uint32_t layer_idx);
