// src/engine/attn/dsa.c - latent attention over the keys that an indexer selects for each token:
// heads of its own score the keys of all positions, of which the best index_top_k are attended to.
// The indexer's keys are a second plane of a layer's part of a page, behind the latents.
//
// Left out of the published code, for neither changes a score but by rounding: the Hadamard
// rotation of queries and keys, which is orthogonal, and their storage in FP8.
#include "engine/attn/kinds.h"

// The microbatch's rows.
typedef struct {
  void *h, *q_a, *q, *k;
  float *weights;
} index_rows;

static index_rows rows_of(const td_engine *e, const td_microbatch *p) {
  const td_model_config *c = e->config;
  const size_t q_dim = (size_t)c->index_heads * c->index_dim;
  return (index_rows){.h = td_rows_at(e, p, e->h, c->dim),
                      .q_a = td_rows_at(e, p, e->act[TD_ACT_Q_A], c->q_lora_rank),
                      .q = td_rows_at(e, p, e->act[TD_ACT_MIXED], q_dim),
                      .k = td_rows_at(e, p, e->act[TD_ACT_V], c->index_dim),
                      .weights = (float *)e->act_words +
                                 (size_t)e->opts.max_step_tokens * c->index_top_k +
                                 (size_t)p->begin * c->index_heads};
}

// Rotates the first rope_dim elements of each head.
static void rotate(td_engine *e, const td_microbatch *p, void *x, uint32_t n_heads) {
  const td_model_config *c = e->config;
  const size_t stride = (size_t)n_heads * c->index_dim;
  td_op_rope(e->stream, &(td_rope_args){.heads = {.x = x,
                                                  .token_stride = stride,
                                                  .head_stride = c->index_dim,
                                                  .n_heads = n_heads},
                                        .cos_sin = e->cos_sin,
                                        .position = p->position,
                                        .n_tokens = p->n_tokens,
                                        .rot_dim = c->rope_dim,
                                        .interleaved = c->index_interleaved});
}

static void project_index(td_engine *e, const td_microbatch *p, const td_layer *layer) {
  const td_model_config *c = e->config;
  const index_rows at = rows_of(e, p);
  const td_vec none = {0};
  td_rows_linear(e, p, &layer->index_q, none, at.q_a, c->q_lora_rank, at.q);
  td_rows_linear(e, p, &layer->index_k, none, at.h, c->dim, at.k);
  td_op_layernorm(e->stream, &(td_layernorm_args){.x = at.k,
                                                  .w = layer->index_norm,
                                                  .b = layer->index_norm_bias,
                                                  .stride = c->index_dim,
                                                  .n_rows = p->n_tokens,
                                                  .dim = c->index_dim,
                                                  .eps = TD_MLA_NORM_EPS});
  rotate(e, p, at.q, c->index_heads);
  rotate(e, p, at.k, 1);
  td_rows_linear_exact(e, p, &layer->index_weights, at.h, at.weights);
}

static void project(td_engine *e, const td_microbatch *p, const td_layer *layer) {
  td_mla_project(e, p, layer);
  if (p->n_tokens) project_index(e, p, layer); // as a rank of several may have none
}

// Elements of a token's latent.
static size_t entry_of(const td_model_config *c) {
  return c->kv_lora_rank + c->rope_dim;
}

static void store(td_engine *e, const td_attn_store *s) {
  td_mla_store(e, s);
  td_index_store(e, s, entry_of(e->config), s->entry[TD_ACT_V]);
}

static void attend(td_engine *e, const td_microbatch *p, const td_layer *layer,
                   uint32_t layer_idx) {
  const td_model_config *c = e->config;
  const index_rows at = rows_of(e, p);
  const td_kv_view keys = td_index_plane(e, td_engine_kv_view(e, layer_idx), entry_of(c));
  for (int g = 0; g < N_GROUPS; g++) {
    const step_group *group = &p->groups[g];
    if (!group->view.n_tokens) continue;
    td_select_args args = td_index_selection(e, group, keys, at.q);
    args.weights = at.weights + group->token_begin * c->index_heads;
    args.selected = td_mla_selected(e, p, group->token_begin);
    td_op_select(e->stream, &args);
  }
  td_mla_attend(e, p, layer, layer_idx, c->index_top_k);
}

// ---- what follows from the configuration --------------------------------------------------------

// Positions that a token sees at most, or nearly.
static double n_selected(const td_model_config *c) {
  return (double)c->index_top_k * (c->index_group ? c->index_group : 1);
}

static td_attn_cache cache(const td_model_config *c) {
  td_attn_cache out = td_mla_cache(c);
  out.entry[TD_ACT_V] = c->index_dim;
  return out;
}

td_attn_rows td_dsa_act(const td_model_config *c) {
  td_attn_rows out = td_mla_act(c);
  out.act[TD_ACT_MIXED] = (size_t)c->index_heads * c->index_dim;
  out.words = (size_t)c->index_top_k + c->index_heads;
  return out;
}

// Beyond n_selected positions a token's attention is absorbed, over so many latents.
double td_dsa_shared_flops(const td_model_config *c, double n, double n_past) {
  const double most = n_selected(c), left = n_past < most ? most - n_past : 0;
  const double n_dense = left < n ? left : n, entry = (double)c->kv_lora_rank + c->rope_dim;
  return (n_dense > 0 ? td_mla_flops(c, n_dense, n_past) : 0) +
         2 * (n - n_dense) * most * c->n_heads * (entry + c->kv_lora_rank);
}

// With the scores of all keys.
static double flops(const td_model_config *c, double n, double n_past) {
  return td_attn_pair_flops(c->index_heads, c->index_dim, n, n_past) +
         td_dsa_shared_flops(c, n, n_past);
}

static void describe(const td_model_config *c, td_buf *out) {
  td_mla_describe(c, out);
  td_buf_printf(
      out, "selection     %u keys for a token, by %u heads, %u wide, in %u of the %u layers\n",
      c->index_top_k, c->index_heads, c->index_dim, td_model_n_attn(c, TD_ATTN_DSA), c->n_layers);
}

const td_attn_ops td_attn_dsa = {{cache, td_dsa_act, flops, describe, TD_MLA_MIN_CHUNK, true,
                                  "attention to keys that an indexer selects"},
                                 project,
                                 store,
                                 attend};

// ---- of the keys that an earlier layer selected -------------------------------------------------

static void shared_attend(td_engine *e, const td_microbatch *p, const td_layer *layer,
                          uint32_t layer_idx) {
  td_mla_attend(e, p, layer, layer_idx, e->config->index_top_k);
}

static void shared_describe(const td_model_config *c, td_buf *out) {
  (void)c, (void)out; // dsa.c counts them
}

const td_attn_ops td_attn_dsa_shared = {{td_mla_cache, td_mla_act, td_dsa_shared_flops,
                                         shared_describe, TD_MLA_MIN_CHUNK, true,
                                         "attention to keys that an indexer selects"},
                                        td_mla_project,
                                        td_mla_store,
                                        shared_attend};
