// src/engine/attn/gqa.c - grouped-query attention, with windows, sinks and gates.
#include <math.h>

#include "engine/attn/kinds.h"
#include "engine/attn/window.h"
#include "engine/rows.h"

td_gqa_heads td_gqa_heads_of(const td_model_config *c, td_attn_kind kind) {
  return kind == TD_ATTN_GQA_WIDE ? (td_gqa_heads){c->wide_kv_heads, c->wide_head_dim}
                                  : (td_gqa_heads){c->n_kv_heads, c->head_dim};
}

// The microbatch's rows.
typedef struct {
  void *h, *q, *k, *v, *out;
} gqa_rows;

static gqa_rows rows_of(const td_engine *e, const td_microbatch *p, td_gqa_heads heads) {
  const td_model_config *c = e->config;
  const size_t q_dim = c->n_heads * (size_t)heads.dim, kv_dim = (size_t)heads.n_kv * heads.dim;
  return (gqa_rows){.h = td_rows_at(e, p, e->h, c->dim),
                    .q = td_rows_at(e, p, e->act[TD_ACT_Q], q_dim),
                    .k = td_rows_at(e, p, e->act[TD_ACT_K], kv_dim),
                    .v = td_rows_at(e, p, e->act[TD_ACT_V], kv_dim),
                    .out = td_rows_at(e, p, e->act[TD_ACT_OUT], q_dim)};
}

// Queries and gates of the microbatch, head by head.
static void *gated_queries_of(const td_engine *e, const td_microbatch *p) {
  return td_rows_at(e, p, e->act[TD_ACT_MIXED],
                    2 * (size_t)e->config->n_heads * e->config->head_dim);
}

// q = the norms of the queries in mixed, where each head's gate follows it.
static void norm_gated_queries(td_engine *e, const td_microbatch *p, const td_layer *layer,
                               void *q) {
  const td_model_config *c = e->config;
  if (!p->n_tokens) return;
  td_op_rmsnorm(e->stream, &(td_rmsnorm_args){.x = gated_queries_of(e, p),
                                              .w = layer->q_norm,
                                              .out = q,
                                              .x_stride = 2 * (size_t)c->head_dim,
                                              .out_stride = c->head_dim,
                                              .n_rows = p->n_tokens * c->n_heads,
                                              .dim = c->head_dim,
                                              .eps = c->rms_eps});
}

// Values by themselves or, without a matrix of their own, the keys.
static void norm_values(td_engine *e, const td_microbatch *p, const td_layer *layer,
                        const gqa_rows *at, td_gqa_heads heads) {
  if (!p->n_tokens) return;
  td_op_rmsnorm(e->stream, &(td_rmsnorm_args){.x = layer->v.data ? at->v : at->k,
                                              .out = at->v,
                                              .x_stride = heads.dim,
                                              .out_stride = heads.dim,
                                              .n_rows = p->n_tokens * heads.n_kv,
                                              .dim = heads.dim,
                                              .eps = e->config->rms_eps});
}

void td_gqa_project(td_engine *e, const td_microbatch *p, const td_layer *layer) {
  const td_model_config *c = e->config;
  const td_gqa_heads heads = td_gqa_heads_of(c, layer->kind);
  const gqa_rows at = rows_of(e, p, heads);
  uint32_t q_dim = c->n_heads * heads.dim, kv_dim = heads.n_kv * heads.dim;
  const td_linear_also of_h[] = {
      {.w = &layer->q,
       .bias = layer->q_bias,
       .y = c->has_attn_gate ? gated_queries_of(e, p) : at.q},
      {.w = &layer->k, .bias = layer->k_bias, .y = at.k},
      {.w = &layer->v, .bias = layer->v_bias, .y = at.v},
  };
  td_rows_linear_all(e, p, of_h, layer->v.data ? 3 : 2, at.h, c->dim);
  if (c->norms_values) norm_values(e, p, layer, &at, heads);
  if (c->has_attn_gate) {
    norm_gated_queries(e, p, layer, at.q);
    td_rows_norm(e, at.k, layer->k_norm, c->head_dim, p->n_tokens * c->n_kv_heads, c->rms_eps);
  } else if (c->qk_norm == TD_QK_NORM_HEAD) {
    td_rows_norm(e, at.q, layer->q_norm, heads.dim, p->n_tokens * c->n_heads, c->rms_eps);
    td_rows_norm(e, at.k, layer->k_norm, heads.dim, p->n_tokens * heads.n_kv, c->rms_eps);
  } else if (c->qk_norm == TD_QK_NORM_ALL) {
    td_rows_norm(e, at.q, layer->q_norm, q_dim, p->n_tokens, c->rms_eps);
    td_rows_norm(e, at.k, layer->k_norm, kv_dim, p->n_tokens, c->rms_eps);
  }
  const td_rope_heads q = {
      .x = at.q, .token_stride = q_dim, .head_stride = heads.dim, .n_heads = c->n_heads};
  const td_rope_heads k = {
      .x = at.k, .token_stride = kv_dim, .head_stride = heads.dim, .n_heads = heads.n_kv};
  const bool is_wide = layer->kind == TD_ATTN_GQA_WIDE;
  if (layer->has_window || !c->only_windows_rotate)
    td_rows_rope(e, p, q, k, is_wide ? e->wide_cos_sin : e->cos_sin,
                 is_wide ? heads.dim : td_rope_dims(c));
  td_rows_scale_queries(e, p, q_dim);
}

void td_gqa_store_heads(td_engine *e, const td_attn_store *s, td_gqa_heads heads) {
  const size_t kv_dim = (size_t)heads.n_kv * heads.dim;
  td_op_kv_store(e->stream, &(td_kv_store_args){.batch = s->batch,
                                                .kv = s->kv,
                                                .k = s->entry[TD_ACT_K],
                                                .v = s->entry[TD_ACT_V],
                                                .k_stride = kv_dim,
                                                .v_stride = kv_dim,
                                                .n_heads = heads.n_kv,
                                                .head_dim = heads.dim});
}

void td_gqa_store(td_engine *e, const td_attn_store *s) {
  td_gqa_store_heads(e, s, td_gqa_heads_of(e->config, TD_ATTN_GQA));
}

void td_gqa_attend(td_engine *e, const td_microbatch *p, const td_layer *layer, uint32_t layer_idx,
                   const int32_t *selected) {
  const td_model_config *c = e->config;
  const td_gqa_heads heads = td_gqa_heads_of(c, layer->kind);
  const gqa_rows at = rows_of(e, p, heads);
  const size_t q_dim = (size_t)c->n_heads * heads.dim;
  const bool has_blocks = selected && c->index_block, has_groups = selected && c->index_group;
  const size_t n_selected = has_blocks ? (size_t)c->n_kv_heads * c->index_top_blocks
                                       : c->index_top_k;
  for (int g = 0; g < N_GROUPS; g++) {
    const step_group *group = &p->groups[g];
    if (!group->view.n_tokens) continue;
    const size_t t = group->token_begin;
    td_op_attn_gqa(e->stream,
                   &(td_attn_gqa_args){.batch = td_layer_batch(e, group, layer_idx),
                                       .kv = td_layer_kv(e, layer_idx, g == GROUP_DECODE),
                                       .q = td_rows_offset(e, at.q, t * q_dim),
                                       .out = td_rows_offset(e, at.out, t * q_dim),
                                       .n_heads = c->n_heads,
                                       .n_kv_heads = heads.n_kv,
                                       .head_dim = heads.dim,
                                       .window = td_model_window(c, layer_idx),
                                       .blocks = has_blocks ? selected + t * n_selected : NULL,
                                       .block = c->index_block,
                                       .top_blocks = c->index_top_blocks,
                                       .selected = has_groups ? selected + t * n_selected : NULL,
                                       .top_k = c->index_top_k,
                                       .group = c->index_group,
                                       .sinks = layer->sinks,
                                       .scale = c->unit_scores ? 1 : (float)(1.0 / sqrt(heads.dim)),
                                       .prompt = g == GROUP_PREFILL});
  }
  if (!c->has_attn_gate || !p->n_tokens) return;
  td_op_gate_rows(e->stream,
                  &(td_gate_rows_args){.x = at.out,
                                       .gate = gated_queries_of(e, p),
                                       .gate_stride = 2 * q_dim,
                                       .part = {.offset = c->head_dim, .stride = 2 * c->head_dim},
                                       .n_tokens = p->n_tokens,
                                       .n_groups = c->n_heads,
                                       .dim = c->head_dim});
}

static void project(td_engine *e, const td_microbatch *p, const td_layer *layer) {
  td_gqa_project(e, p, layer);
}

static void attend(td_engine *e, const td_microbatch *p, const td_layer *layer,
                   uint32_t layer_idx) {
  td_gqa_attend(e, p, layer, layer_idx, NULL);
}

// ---- what follows from the configuration --------------------------------------------------------

td_attn_cache td_gqa_cache_of(td_gqa_heads heads) {
  const uint32_t kv_dim = heads.n_kv * heads.dim;
  return (td_attn_cache){.entry = {[TD_ACT_K] = kv_dim, [TD_ACT_V] = kv_dim},
                         .f8 = {.n = 2 * heads.n_kv, .dim = heads.dim},
                         .may_leave = true};
}

td_attn_cache td_gqa_cache(const td_model_config *c) {
  return td_gqa_cache_of(td_gqa_heads_of(c, TD_ATTN_GQA));
}

td_attn_rows td_gqa_act(const td_model_config *c) {
  const size_t heads = (size_t)c->n_heads * c->head_dim;
  return (td_attn_rows){.act = {[TD_ACT_Q] = heads,
                                [TD_ACT_OUT] = heads,
                                [TD_ACT_MIXED] = c->has_attn_gate ? 2 * heads : 0}};
}

static double flops(const td_model_config *c, double n, double n_past) {
  return td_attn_pair_flops(c->n_heads, c->head_dim + c->head_dim, n, n_past);
}

void td_gqa_describe(const td_model_config *c, td_buf *out) {
  uint32_t n_windows = 0;
  for (uint32_t i = 0; i < c->n_layers; i++)
    n_windows += td_model_window(c, i) > 0;
  td_buf_printf(out, "attention     %u heads, GQA: %u of keys and values, %u wide", c->n_heads,
                c->n_kv_heads, c->head_dim);
  if (c->rope_dim < c->head_dim) td_buf_printf(out, ", %u rotary", c->rope_dim);
  if (n_windows)
    td_buf_printf(out, ", %u positions in %u of the %u layers", c->window, n_windows, c->n_layers);
  td_buf_str(out, "\n");
}

const td_attn_ops td_attn_gqa = {
    {td_gqa_cache, td_gqa_act, flops, td_gqa_describe, 512, true, NULL},
    project,
    td_gqa_store,
    attend};

// ---- with heads of another width and number -----------------------------------------------------

static void wide_attend(td_engine *e, const td_microbatch *p, const td_layer *layer,
                        uint32_t layer_idx) {
  td_gqa_attend(e, p, layer, layer_idx, NULL);
}

static void wide_store(td_engine *e, const td_attn_store *s) {
  td_gqa_store_heads(e, s, td_gqa_heads_of(e->config, TD_ATTN_GQA_WIDE));
}

static td_attn_cache wide_cache(const td_model_config *c) {
  return td_gqa_cache_of(td_gqa_heads_of(c, TD_ATTN_GQA_WIDE));
}

static td_attn_rows wide_act(const td_model_config *c) {
  const size_t heads = (size_t)c->n_heads * c->wide_head_dim;
  return (td_attn_rows){.act = {[TD_ACT_Q] = heads, [TD_ACT_OUT] = heads}};
}

static double wide_flops(const td_model_config *c, double n, double n_past) {
  return td_attn_pair_flops(c->n_heads, 2.0 * c->wide_head_dim, n, n_past);
}

static void wide_describe(const td_model_config *c, td_buf *out) {
  td_buf_printf(out, "              in %u of the %u layers %u of keys and values, %u wide%s\n",
                td_model_n_attn(c, TD_ATTN_GQA_WIDE), c->n_layers, c->wide_kv_heads,
                c->wide_head_dim, c->wide_shares ? ", which are the values, too" : "");
}

const td_attn_ops td_attn_gqa_wide = {
    {wide_cache, wide_act, wide_flops, wide_describe, 512, false, NULL},
    td_gqa_project,
    wide_store,
    wide_attend};
