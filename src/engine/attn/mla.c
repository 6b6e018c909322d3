// src/engine/attn/mla.c - multi-head latent attention: all heads' keys and values are expanded from
// one latent, and share a rotary key.
#include "engine/attn/kinds.h"

#include <math.h>

#include "engine/rows.h"

// The microbatch's rows; k: latents and rotary keys.
typedef struct {
  void *h, *q, *q_a, *k, *out;
} mla_rows;

static mla_rows rows_of(const td_engine *e, const td_microbatch *p) {
  const td_model_config *c = e->config;
  const size_t q_dim = (size_t)c->n_heads * (c->nope_dim + c->rope_dim);
  return (mla_rows){.h = td_rows_at(e, p, e->h, c->dim),
                    .q = td_rows_at(e, p, e->act[TD_ACT_Q], q_dim),
                    .q_a = td_rows_at(e, p, e->act[TD_ACT_Q_A], c->q_lora_rank),
                    .k = td_rows_at(e, p, e->act[TD_ACT_K], c->kv_lora_rank + c->rope_dim),
                    .out = td_rows_at(e, p, e->act[TD_ACT_OUT], (size_t)c->n_heads * c->v_dim)};
}

// Norms queries and latents in place, or latents alone.
static void norm_latents(td_engine *e, const td_microbatch *p, const td_layer *layer,
                         const mla_rows *at) {
  const td_model_config *c = e->config;
  const size_t entry = c->kv_lora_rank + c->rope_dim;
  td_rmsnorm_args args = {.x = at->k,
                          .w = layer->kv_a_norm,
                          .out = at->k,
                          .x_stride = entry,
                          .out_stride = entry,
                          .n_rows = p->n_tokens,
                          .dim = c->kv_lora_rank,
                          .eps = c->latents_eps ? c->rms_eps : TD_MLA_NORM_EPS};
  if (!p->n_tokens) return;
  if (c->q_lora_rank) {
    args.also = (td_norm_also){.x = args.x,
                               .w = args.w,
                               .out = args.out,
                               .x_stride = entry,
                               .out_stride = entry,
                               .dim = args.dim};
    args.x = args.out = at->q_a;
    args.w = layer->q_a_norm;
    args.x_stride = args.out_stride = args.dim = c->q_lora_rank;
  }
  td_op_rmsnorm(e->stream, &args);
}

// q = q_b(norm(q_a h)) or q_proj h; kv = [norm(latent), rope(key)].
void td_mla_project(td_engine *e, const td_microbatch *p, const td_layer *layer) {
  const td_model_config *c = e->config;
  const mla_rows at = rows_of(e, p);
  uint32_t head = c->nope_dim + c->rope_dim, entry = c->kv_lora_rank + c->rope_dim;
  td_vec none = {0};
  const td_linear_also of_h[] = {
      c->q_lora_rank ? (td_linear_also){.w = &layer->q_a, .bias = layer->q_a_bias, .y = at.q_a}
                     : (td_linear_also){.w = &layer->q, .y = at.q},
      {.w = &layer->kv_a, .bias = layer->kv_a_bias, .y = at.k},
  };
  td_rows_linear_all(e, p, of_h, TD_COUNT(of_h), at.h, c->dim);
  norm_latents(e, p, layer, &at);
  if (c->q_lora_rank) td_rows_linear(e, p, &layer->q_b, none, at.q_a, c->q_lora_rank, at.q);
  const td_rope_heads q = {.x = td_rows_offset(e, at.q, c->nope_dim),
                           .token_stride = (size_t)c->n_heads * head,
                           .head_stride = head,
                           .n_heads = c->n_heads};
  const td_rope_heads k = {.x = td_rows_offset(e, at.k, c->kv_lora_rank),
                           .token_stride = entry,
                           .head_stride = entry,
                           .n_heads = 1};
  if (!c->has_no_rope) td_rows_rope(e, p, q, k, e->cos_sin, c->rope_dim);
  td_rows_scale_queries(e, p, c->n_heads * head);
}

void td_mla_store(td_engine *e, const td_attn_store *s) {
  const uint32_t entry = e->config->kv_lora_rank + e->config->rope_dim;
  td_op_kv_store(e->stream, &(td_kv_store_args){.batch = s->batch,
                                                .kv = s->kv,
                                                .k = s->entry[TD_ACT_K],
                                                .k_stride = entry,
                                                .n_heads = 1,
                                                .head_dim = entry});
}

int32_t *td_mla_selected(const td_engine *e, const td_microbatch *p, size_t token_begin) {
  return (int32_t *)e->act_words + (p->begin + token_begin) * e->config->index_top_k;
}

void td_mla_attend(td_engine *e, const td_microbatch *p, const td_layer *layer, uint32_t layer_idx,
                   uint32_t top_k) {
  const td_model_config *c = e->config;
  const mla_rows at = rows_of(e, p);
  size_t q_dim = (size_t)c->n_heads * (c->nope_dim + c->rope_dim);
  size_t out_dim = (size_t)c->n_heads * c->v_dim;
  for (int g = 0; g < N_GROUPS; g++) {
    const step_group *group = &p->groups[g];
    if (!group->view.n_tokens) continue;
    size_t t = group->token_begin;
    td_op_attn_mla(e->stream,
                   &(td_attn_mla_args){.batch = group->view,
                                       .kv = td_engine_kv_view(e, layer_idx),
                                       .q = td_rows_offset(e, at.q, t * q_dim),
                                       .kv_b = &layer->kv_b,
                                       .selected = top_k ? td_mla_selected(e, p, t) : NULL,
                                       .out = td_rows_offset(e, at.out, t * out_dim),
                                       .n_heads = c->n_heads,
                                       .nope_dim = c->nope_dim,
                                       .rope_dim = c->rope_dim,
                                       .v_dim = c->v_dim,
                                       .kv_lora_rank = c->kv_lora_rank,
                                       .top_k = top_k,
                                       .group = c->index_group,
                                       .scale = (float)(1.0 / sqrt(c->nope_dim + c->rope_dim) *
                                                        td_rope_score_factor(c)),
                                       .absorbed = g == GROUP_DECODE,
                                       .weights_on_device = td_engine_is_in_slot(e, &layer->kv_b)});
  }
}

static void gate_heads(td_engine *e, const td_microbatch *p, const td_layer *layer) {
  const td_model_config *c = e->config;
  float *gates = (float *)e->act_words + (size_t)p->begin * c->n_heads;
  const mla_rows at = rows_of(e, p);
  if (!p->n_tokens) return;
  td_rows_linear_exact(e, p, &layer->head_gate, at.h, gates);
  td_op_gate_rows(e->stream, &(td_gate_rows_args){.x = at.out,
                                                  .gate = gates,
                                                  .gate_stride = c->n_heads,
                                                  .part = {.offset = 0, .stride = 1},
                                                  .n_tokens = p->n_tokens,
                                                  .n_groups = c->n_heads,
                                                  .dim = c->v_dim,
                                                  .scalar = true});
}

static void attend(td_engine *e, const td_microbatch *p, const td_layer *layer,
                   uint32_t layer_idx) {
  td_mla_attend(e, p, layer, layer_idx, 0);
  if (e->config->has_head_gates) gate_heads(e, p, layer);
}

// ---- what follows from the configuration --------------------------------------------------------

td_attn_cache td_mla_cache(const td_model_config *c) {
  const uint32_t entry = c->kv_lora_rank + c->rope_dim;
  return (td_attn_cache){.entry = {[TD_ACT_K] = entry},
                         .f8 = {.n = 1, .dim = entry, .n_bf16 = c->rope_dim}};
}

td_attn_rows td_mla_act(const td_model_config *c) {
  return (td_attn_rows){.act = {[TD_ACT_Q] = (size_t)c->n_heads * (c->nope_dim + c->rope_dim),
                                [TD_ACT_Q_A] = c->q_lora_rank,
                                [TD_ACT_OUT] = (size_t)c->n_heads * c->v_dim},
                        .words = c->has_head_gates ? c->n_heads : 0};
}

double td_attn_expand_flops(const td_model_config *c, double n_past) {
  return 2.0 * n_past * c->kv_lora_rank * c->n_heads * (c->nope_dim + c->v_dim);
}

double td_mla_flops(const td_model_config *c, double n, double n_past) {
  return td_attn_pair_flops(c->n_heads, (double)(c->nope_dim + c->rope_dim) + c->v_dim, n, n_past) +
         td_attn_expand_flops(c, n_past);
}

void td_mla_describe(const td_model_config *c, td_buf *out) {
  td_buf_printf(out, "attention     %u heads, MLA: keys and values of rank %u", c->n_heads,
                c->kv_lora_rank);
  if (c->rope_dim)
    td_buf_printf(out, " and %u %s", c->rope_dim, c->has_no_rope ? "shared" : "rotary");
  td_buf_str(out, ", ");
  if (c->q_lora_rank)
    td_buf_printf(out, "queries of rank %u\n", c->q_lora_rank);
  else
    td_buf_str(out, "queries of full rank\n");
}

const td_attn_ops td_attn_mla = {
    {td_mla_cache, td_mla_act, td_mla_flops, td_mla_describe, TD_MLA_MIN_CHUNK, true, NULL},
    td_mla_project,
    td_mla_store,
    attend};
