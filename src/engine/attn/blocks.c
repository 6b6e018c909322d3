// src/engine/attn/blocks.c - grouped-query attention over the blocks of keys that an indexer
// selects for each token and KV head (MiniMax-M3): a head of the indexer for each KV head scores
// all keys, and of a block the best score counts. The indexer's keys are a plane of a layer's part
// of a page, behind keys and values.
#include "engine/attn/kinds.h"

// The microbatch's rows.
typedef struct {
  void *h, *q, *k;
  int32_t *selected;
} index_rows;

static size_t n_selected(const td_model_config *c) {
  return (size_t)c->index_heads * c->index_top_blocks;
}

static index_rows rows_of(const td_engine *e, const td_microbatch *p) {
  const td_model_config *c = e->config;
  const size_t q_dim = (size_t)c->index_heads * c->index_dim;
  return (index_rows){.h = td_rows_at(e, p, e->h, c->dim),
                      .q = td_rows_at(e, p, e->act[TD_ACT_MIXED], q_dim),
                      .k = td_rows_at(e, p, e->act[TD_ACT_INDEX], c->index_dim),
                      .selected = (int32_t *)e->act_words + p->begin * n_selected(c)};
}

static void project(td_engine *e, const td_microbatch *p, const td_layer *layer) {
  const td_model_config *c = e->config;
  const index_rows at = rows_of(e, p);
  const td_vec none = {0};
  td_gqa_project(e, p, layer);
  if (!p->n_tokens) return; // as a rank of several may have none
  td_rows_linear(e, p, &layer->index_q, none, at.h, c->dim, at.q);
  td_rows_linear(e, p, &layer->index_k, none, at.h, c->dim, at.k);
  td_rows_norm(e, at.k, layer->index_norm, c->index_dim, p->n_tokens, c->rms_eps);
  td_index_turn(e, p, layer, at.q, at.k);
}

// Elements of a token's keys and values.
static size_t entry_of(const td_model_config *c) {
  return 2 * (size_t)c->n_kv_heads * c->head_dim;
}

static void store(td_engine *e, const td_attn_store *s) {
  td_gqa_store(e, s);
  td_index_store(e, s, entry_of(e->config), s->entry[TD_ACT_INDEX]);
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
    args.selected = at.selected + group->token_begin * n_selected(c);
    args.top_k = c->index_top_blocks;
    args.block = c->index_block;
    args.n_local = c->index_local_blocks;
    td_op_select(e->stream, &args);
  }
  td_gqa_attend(e, p, layer, layer_idx, at.selected);
}

// ---- what follows from the configuration --------------------------------------------------------

static td_attn_cache cache(const td_model_config *c) {
  td_attn_cache out = td_gqa_cache(c);
  out.entry[TD_ACT_INDEX] = c->index_dim;
  return out;
}

static td_attn_rows act(const td_model_config *c) {
  td_attn_rows out = td_gqa_act(c);
  out.act[TD_ACT_MIXED] = (size_t)c->index_heads * c->index_dim;
  out.words = (size_t)c->index_heads * c->index_top_blocks;
  return out;
}

// With the scores of all keys.
static double flops(const td_model_config *c, double n, double n_past) {
  const double most = (double)c->index_top_blocks * c->index_block, seen = n_past + n / 2;
  return td_attn_pair_flops(c->index_heads, c->index_dim, n, n_past) +
         4 * n * (seen < most ? seen : most) * c->n_heads * c->head_dim;
}

static void describe(const td_model_config *c, td_buf *out) {
  if (!td_model_n_attn(c, TD_ATTN_GQA)) td_gqa_describe(c, out);
  td_buf_printf(out,
                "selection     %u blocks of %u keys for a token and KV head, by heads %u wide, in "
                "%u of the %u layers\n",
                c->index_top_blocks, c->index_block, c->index_dim,
                td_model_n_attn(c, TD_ATTN_BLOCKS), c->n_layers);
}

const td_attn_ops td_attn_blocks = {
    {cache, act, flops, describe, 512, true, "attention to blocks that an indexer selects"},
    project,
    store,
    attend};
