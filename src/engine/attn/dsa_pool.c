// src/engine/attn/dsa_pool.c - latent attention over groups of keys, of which an indexer selects
// the best for each token by a key pooled of the group's own (GLM-5.3). A token also sees the keys
// of the group that it is in, up to itself. Pooled keys, and the one that is open, are a state
// beside the latents.
#include "engine/attn/kinds.h"

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

static void attend(td_engine *e, const td_microbatch *p, const td_layer *layer,
                   uint32_t layer_idx) {
  const td_model_config *c = e->config;
  const index_rows at = rows_of(e, p);
  for (int g = 0; g < N_GROUPS; g++) {
    const step_group *group = &p->groups[g];
    const size_t t = group->token_begin;
    if (!group->view.n_tokens) continue;
    const td_kv_view keys = td_index_pool(e, p, layer_idx, g,
                                          (td_pool_args){.x = at.key + t * at.stride,
                                                         .gate = at.gate + t * at.stride,
                                                         .stride = at.stride,
                                                         .bias = layer->index_pool.bias});
    td_select_args args = td_index_selection(e, group, keys, at.q);
    args.weights = at.weights + t * c->index_heads;
    args.selected = td_mla_selected(e, p, t);
    td_op_select(e->stream, &args);
  }
  td_mla_attend(e, p, layer, layer_idx, c->index_top_k);
}

// ---- what follows from the configuration --------------------------------------------------------

static td_attn_cache cache(const td_model_config *c) {
  td_attn_cache out = td_mla_cache(c);
  td_index_add_keys(c, &out);
  return out;
}

static td_attn_rows act(const td_model_config *c) {
  td_attn_rows out = td_dsa_act(c);
  out.words += 2 * (size_t)c->index_dim; // keys and gates
  return out;
}

// With the scores of all pooled keys.
static double flops(const td_model_config *c, double n, double n_past) {
  return td_attn_pair_flops(c->index_heads, c->index_dim, n, n_past) / c->index_group +
         td_dsa_shared_flops(c, n, n_past);
}

static void describe(const td_model_config *c, td_buf *out) {
  td_mla_describe(c, out);
  td_index_describe(c, TD_ATTN_DSA_POOL, out);
}

const td_attn_ops td_attn_dsa_pool = {{cache, act, flops, describe, TD_MLA_MIN_CHUNK, true,
                                       "attention to groups of keys that an indexer selects"},
                                      project,
                                      td_mla_store,
                                      attend};
