// src/engine/attn/delta.h - operators that the kinds with a recurrent state by the delta rule
// share. Internal to engine/attn/.
#pragma once

#include "engine/attn/ops.h"

// Nothing: the inputs are projected with the rest, which needs no entries of other tokens, and
// operators write the state.
void td_delta_project(td_engine *engine, const td_microbatch *part, const td_layer *layer);
void td_delta_store(td_engine *engine, const td_attn_store *store);
// Of td_attn_spec.
td_attn_cache td_delta_cache(const td_model_config *config);
td_attn_rows td_delta_act(const td_model_config *config);
double td_delta_flops(const td_model_config *config, double n, double n_past);

// Where the inputs of a delta net are in a row of TD_ACT_MIXED.
typedef struct {
  size_t stride;
  td_row_part q, k, v, z, b, a;
  bool has_silu_gate; // z gates the output by its SiLU, else by its sigmoid
} td_delta_inputs;

// y = W x of one matrix, or up to three with the same x (NULL: no more), side by side as a part of
// each row of TD_ACT_MIXED, from element `at` on; returns the element after it.
size_t td_delta_mix(td_engine *engine, const td_microbatch *part, const td_weight *const w[3],
                    const void *x, size_t x_stride, size_t at, size_t stride);
// TD_ACT_OUT = the delta net's output before its last projection.
void td_delta_attend(td_engine *engine, const td_microbatch *part, const td_layer *layer,
                     uint32_t layer_idx, const td_delta_inputs *inputs);
