// src/engine/attn/kinds.h - what kinds of attention share. Internal to engine/attn/.
#pragma once

#include "engine/attn/ops.h"
#include "engine/attn/rope.h"
#include "engine/rows.h"

// ---- grouped-query attention --------------------------------------------------------------------

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

// ---- latent attention ---------------------------------------------------------------------------

// Epsilon of the norms inside MLA, whatever rms_norm_eps is (DeepSeek's modeling code), but for
// td_model_config.latents_eps.
#define TD_MLA_NORM_EPS 1e-6f

enum { TD_MLA_MIN_CHUNK = 1024 };

// Of td_attn_spec.
td_attn_cache td_mla_cache(const td_model_config *config);
td_attn_rows td_mla_act(const td_model_config *config);
double td_mla_flops(const td_model_config *config, double n, double n_past);
void td_mla_describe(const td_model_config *config, td_buf *out);
td_attn_rows td_dsa_act(const td_model_config *config);
double td_dsa_shared_flops(const td_model_config *config, double n, double n_past);

// Leaves the normed queries of low rank in TD_ACT_Q_A.
void td_mla_project(td_engine *engine, const td_microbatch *part, const td_layer *layer);
void td_mla_store(td_engine *engine, const td_attn_store *entries);
// top_k: tokens see the keys selected for them; 0: all.
void td_mla_attend(td_engine *engine, const td_microbatch *part, const td_layer *layer,
                   uint32_t layer_idx, uint32_t top_k);
// The selections of the microbatch's tokens from token_begin on, [index_top_k] each. They stay from
// layer to layer, in act_words, before the weights of the indexer's heads (dsa.c).
int32_t *td_mla_selected(const td_engine *engine, const td_microbatch *part, size_t token_begin);

// ---- recurrent states by the delta rule ---------------------------------------------------------

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

// ---- keys that an indexer selects ---------------------------------------------------------------

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

// The plane of the indexer's keys, as pages: behind entries of so many elements a token.
static inline td_kv_view td_index_plane(const td_engine *e, td_kv_view kv, size_t entry) {
  kv.pages += e->layout.page_tokens * entry * td_dtype_bytes(kv.dtype);
  return kv;
}

// Stores keys there, of the entries k.
static inline void td_index_store(td_engine *e, const td_attn_store *s, size_t entry,
                                  const void *k) {
  const uint32_t dim = e->config->index_dim;
  td_op_kv_store(e->stream, &(td_kv_store_args){.batch = s->batch,
                                                .kv = td_index_plane(e, s->kv, entry),
                                                .k = k,
                                                .k_stride = dim,
                                                .n_heads = 1,
                                                .head_dim = dim});
}

// Norms and turns queries, and turns keys unless they are NULL, as the model's own.
static inline void td_index_turn(td_engine *e, const td_microbatch *p, const td_layer *layer,
                                 void *q, void *k) {
  const td_model_config *c = e->config;
  const uint32_t dim = c->index_dim, n_heads = c->index_heads;
  td_rows_norm(e, q, layer->index_q_norm, dim, p->n_tokens * n_heads, c->rms_eps);
  td_rows_rope(e, p,
               (td_rope_heads){
                   .x = q, .token_stride = n_heads * dim, .head_stride = dim, .n_heads = n_heads},
               (td_rope_heads){.x = k, .token_stride = dim, .head_stride = dim, .n_heads = 1},
               e->cos_sin, td_rope_dims(c));
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
