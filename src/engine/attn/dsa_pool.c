// src/engine/attn/dsa_pool.c - latent attention over groups of keys, of which an indexer selects
// the best for each token by a key pooled of the group's own (GLM-5.3). A token also sees the keys
// of the group that it is in, up to itself. Pooled keys, and the one that is open, are a state
// beside the latents.
#include "engine/attn/mla.h"
#include "engine/rows.h"

// The microbatch's rows. words: selections, weights of the indexer's heads, then keys and gates in
// f32, for the gates are exponents.
typedef struct {
  void *h, *q_a, *q;
  float *weights, *key, *gate;
  size_t stride; // floats of a row of key and gate
} index_rows;

static index_rows rows_of(const td_engine *e, const td_microbatch *p) {
  const td_model_config *c = e->config;
  const size_t q_dim = (size_t)c->index_heads * c->index_dim, n = e->opts.max_step_tokens;
  index_rows at = {.h = td_rows_at(e, p, e->h, c->dim),
                   .q_a = td_rows_at(e, p, e->act[TD_ACT_Q_A], c->q_lora_rank),
                   .q = td_rows_at(e, p, e->act[TD_ACT_MIXED], q_dim),
                   .stride = 2 * (size_t)c->index_dim};
  float *weights = (float *)e->act_words + n * c->index_top_k;
  at.weights = weights + (size_t)p->begin * c->index_heads;
  at.key = weights + n * c->index_heads + p->begin * at.stride;
  at.gate = at.key + c->index_dim;
  return at;
}

static void project(td_engine *e, const td_microbatch *p, const td_layer *layer) {
  const td_model_config *c = e->config;
  const index_rows at = rows_of(e, p);
  td_mla_project(e, p, layer);
  if (!p->n_tokens) return;
  td_rows_linear(e, p, &layer->index_q, (td_vec){0}, at.q_a, c->q_lora_rank, at.q);
  td_rows_linear_f32(e, p, &layer->index_k, at.h, at.key, at.stride);
  td_op_layernorm(e->stream, &(td_layernorm_args){.x = at.key,
                                                  .w = layer->index_norm,
                                                  .b = layer->index_norm_bias,
                                                  .stride = at.stride,
                                                  .n_rows = p->n_tokens,
                                                  .dim = c->index_dim,
                                                  .eps = TD_MLA_NORM_EPS,
                                                  .is_f32 = true});
  td_rows_linear_f32(e, p, &layer->index_pool.gate, at.h, at.gate, at.stride);
  td_rows_linear_exact(e, p, &layer->index_weights, at.h, at.weights);
}

// Of a page's state, the open key is first.
static void pool(td_engine *e, const step_group *group, td_kv_view state, td_state_trail trail,
                 const td_layer *layer, const index_rows *at) {
  const td_model_config *c = e->config;
  const size_t first = group->token_begin * at->stride;
  td_op_pool(e->stream, &(td_pool_args){.batch = group->view,
                                        .state = state,
                                        .trail = trail,
                                        .x = at->key + first,
                                        .gate = at->gate + first,
                                        .stride = at->stride,
                                        .bias = layer->index_pool.bias,
                                        .entry_at = td_attn_open_floats(c),
                                        .dim = c->index_dim,
                                        .group = c->index_group});
}

static void attend(td_engine *e, const td_microbatch *p, const td_layer *layer,
                   uint32_t layer_idx) {
  const td_model_config *c = e->config;
  const index_rows at = rows_of(e, p);
  const size_t q_dim = (size_t)c->index_heads * c->index_dim;
  for (int g = 0; g < N_GROUPS; g++) {
    const step_group *group = &p->groups[g];
    const size_t t = group->token_begin;
    td_kv_view state = td_engine_beside_view(e, layer_idx);
    if (!group->view.n_tokens) continue;
    pool(e, group, state, td_engine_trail(e, layer_idx, g), layer, &at);
    state.pages = (float *)state.pages + td_attn_open_floats(c);
    td_op_select_keys(e->stream, &(td_select_keys_args){.batch = group->view,
                                                        .kv = state,
                                                        .q = td_rows_offset(e, at.q, t * q_dim),
                                                        .weights = at.weights + t * c->index_heads,
                                                        .selected = td_mla_selected(e, p, t),
                                                        .n_heads = c->index_heads,
                                                        .dim = c->index_dim,
                                                        .top_k = c->index_top_k,
                                                        .group = c->index_group});
  }
  td_mla_attend(e, p, layer, layer_idx, c->index_top_k);
}

const td_attn_ops td_attn_dsa_pool = {project, td_mla_store, attend};
