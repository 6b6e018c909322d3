// src/engine/attn/groups.c - grouped-query attention over groups of keys, of which an indexer
// selects the best for each token by the mean of its own keys (Qwen4-Exp). A token also sees the
// keys of the group that it is in, up to itself. Mean keys, and the one that is open, are a state
// beside keys and values.
#include "engine/attn/kinds.h"

// The microbatch's rows. words: selections, then keys.
typedef struct {
  void *h, *q;
  int32_t *selected;
  float *key;
} index_rows;

static index_rows rows_of(const td_engine *e, const td_microbatch *p) {
  const td_model_config *c = e->config;
  const size_t q_dim = (size_t)c->index_heads * c->index_dim;
  float *keys = (float *)e->act_words + (size_t)e->opts.max_step_tokens * c->index_top_k;
  return (index_rows){.h = td_rows_at(e, p, e->h, c->dim),
                      .q = td_rows_at(e, p, e->act[TD_ACT_Q_A], q_dim),
                      .selected = (int32_t *)e->act_words + (size_t)p->begin * c->index_top_k,
                      .key = keys + (size_t)p->begin * c->index_dim};
}

// Rows [begin, begin + n) of the indexer's matrix, which has queries first and then the key.
static td_linear_op_args rows_of_matrix(const td_engine *e, const td_layer *layer, const void *h,
                                        uint32_t begin, uint32_t n, void *y) {
  return (td_linear_op_args){.w = &layer->index_q,
                             .x = h,
                             .y = y,
                             .x_stride = e->config->dim,
                             .y_stride = n,
                             .row_begin = begin,
                             .n_rows = n};
}

static void project(td_engine *e, const td_microbatch *p, const td_layer *layer) {
  const td_model_config *c = e->config;
  const index_rows at = rows_of(e, p);
  const uint32_t q_dim = c->index_heads * c->index_dim;
  td_gqa_project(e, p, layer);
  if (!p->n_tokens) return;
  td_rows_linear_op(e, p, rows_of_matrix(e, layer, at.h, 0, q_dim, at.q));
  td_linear_op_args key = rows_of_matrix(e, layer, at.h, q_dim, c->index_dim, at.key);
  key.out_f32 = true;
  td_rows_linear_op(e, p, key);
  td_index_turn(e, p, layer, at.q, NULL);
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
                                          (td_pool_args){.x = at.key + t * c->index_dim,
                                                         .stride = c->index_dim,
                                                         .norm = layer->index_norm,
                                                         .cos_sin = e->cos_sin,
                                                         .rot_dim = td_rope_dims(c),
                                                         .rotates_first = true,
                                                         .eps = c->rms_eps});
    td_select_args args = td_index_selection(e, group, keys, at.q);
    args.selected = at.selected + t * c->index_top_k;
    td_op_select(e->stream, &args);
  }
  td_gqa_attend(e, p, layer, layer_idx, at.selected);
}

// ---- what follows from the configuration --------------------------------------------------------

size_t td_attn_open_floats(const td_model_config *c) {
  return (size_t)TD_POOL_RUNNING * c->index_dim;
}

void td_index_add_keys(const td_model_config *c, td_attn_cache *out) {
  out->is_beside = true;
  out->state_bytes = out->undo_bytes = td_attn_open_floats(c) * sizeof(float);
  out->pool_group = c->index_group;
  out->pool_bytes = c->index_dim * sizeof(float);
}

static td_attn_cache cache(const td_model_config *c) {
  td_attn_cache out = td_gqa_cache(c);
  out.may_leave = false;
  td_index_add_keys(c, &out);
  return out;
}

static td_attn_rows act(const td_model_config *c) {
  td_attn_rows out = td_gqa_act(c);
  out.act[TD_ACT_Q_A] = (size_t)c->index_heads * c->index_dim;
  out.words = (size_t)c->index_top_k + c->index_dim; // a key
  return out;
}

// With the scores of all pooled keys.
static double flops(const td_model_config *c, double n, double n_past) {
  const double most = (double)td_most_selected(c->index_top_k, c->index_group);
  const double seen = n_past + n / 2;
  return td_attn_pair_flops(c->index_heads, c->index_dim, n, n_past) / c->index_group +
         4 * n * (seen < most ? seen : most) * c->n_heads * c->head_dim;
}

void td_index_describe(const td_model_config *c, td_attn_kind kind, td_buf *out) {
  td_buf_printf(
      out,
      "selection     %u groups of %u keys for a token, by %u heads, %u wide, in %u of the "
      "%u layers\n",
      c->index_top_k, c->index_group, c->index_heads, c->index_dim, td_model_n_attn(c, kind),
      c->n_layers);
}

static void describe(const td_model_config *c, td_buf *out) {
  td_gqa_describe(c, out);
  td_index_describe(c, TD_ATTN_GROUPS, out);
}

const td_attn_ops td_attn_groups = {
    {cache, act, flops, describe, 512, true, "attention to groups of keys that an indexer selects"},
    project,
    td_gqa_store,
    attend};
