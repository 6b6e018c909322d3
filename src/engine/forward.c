// src/engine/forward.c - one forward pass for every architecture, as operators on a stream.
#include "engine/engine_impl.h"
#include "engine/ranks.h"
#include "engine/rope.h"
#include "engine/window.h"

// Epsilon of the norms inside MLA, whatever rms_norm_eps is (DeepSeek's modeling code).
#define MLA_NORM_EPS 1e-6f

static void *offset(const td_engine *e, void *base, size_t elements) {
  return (char *)base + elements * e->act_bytes;
}

void *td_engine_rows_at(const td_engine *e, const td_microbatch *p, void *base, size_t row) {
  return offset(e, base, td_rank_is_active(e) ? p->begin * row : 0);
}

static void linear(td_engine *e, const td_microbatch *p, const td_weight *w, td_vec bias,
                   const void *x, size_t x_stride, void *y) {
  if (!p->n_tokens) return; // as a rank of several may have none
  td_op_linear(e->stream, &(td_linear_op_args){.w = w,
                                               .bias = bias,
                                               .x = x,
                                               .y = y,
                                               .x_stride = x_stride,
                                               .y_stride = w->rows,
                                               .n_tokens = p->n_tokens,
                                               .n_prompt = p->groups[GROUP_PREFILL].view.n_tokens,
                                               .weights_on_device = td_engine_is_in_slot(e, w)});
}

// Norms n_rows rows of dim elements in place, stride apart.
static void norm_rows(td_engine *e, void *x, td_vec w, size_t stride, uint32_t n_rows, float eps) {
  if (!n_rows) return;
  td_op_rmsnorm(e->stream, &(td_rmsnorm_args){.x = x,
                                              .w = w,
                                              .out = x,
                                              .x_stride = stride,
                                              .out_stride = stride,
                                              .n_rows = n_rows,
                                              .dim = w.n,
                                              .eps = eps});
}

// h = norm(x), after x += delta when a block's output is still pending.
static void norm_residual(td_engine *e, const td_microbatch *p, td_vec w, bool pending) {
  if (!p->n_tokens) return;
  uint32_t dim = e->config->dim;
  td_op_rmsnorm(e->stream, &(td_rmsnorm_args){.x = pending ? p->delta : p->x,
                                              .residual = pending ? p->x : NULL,
                                              .w = w,
                                              .out = td_engine_rows_at(e, p, e->h, dim),
                                              .x_stride = dim,
                                              .out_stride = dim,
                                              .n_rows = p->n_tokens,
                                              .dim = dim,
                                              .eps = e->config->rms_eps});
}

static void rope(td_engine *e, const td_microbatch *p, void *x, size_t token_stride,
                 size_t head_stride, uint32_t n_heads, uint32_t rot_dim) {
  if (!p->n_tokens) return;
  td_op_rope(e->stream, &(td_rope_args){.x = x,
                                        .cos_sin = e->cos_sin,
                                        .position = p->position,
                                        .token_stride = token_stride,
                                        .head_stride = head_stride,
                                        .n_tokens = p->n_tokens,
                                        .n_heads = n_heads,
                                        .rot_dim = rot_dim,
                                        .interleaved = e->config->rope_interleaved});
}

// Multiplies the queries by their positions' factors, if the model has such.
static void scale_queries(td_engine *e, const td_microbatch *p, uint32_t q_dim) {
  if (!e->query_scale || !p->n_tokens) return;
  td_op_scale_rows(e->stream, &(td_scale_rows_args){.x = td_engine_rows_at(e, p, e->q, q_dim),
                                                    .factor = e->query_scale,
                                                    .position = p->position,
                                                    .n_tokens = p->n_tokens,
                                                    .dim = q_dim});
}

// The microbatch's rows of the buffers that attention reads.
typedef struct {
  void *h, *q, *q_a, *k, *v, *out; // k: latents and rope keys of MLA
} attention_rows;

static attention_rows attention_rows_of(const td_engine *e, const td_microbatch *p) {
  const td_model_config *c = e->config;
  const bool mla = c->attn == TD_ATTN_MLA;
  const size_t head = mla ? c->nope_dim + c->rope_dim : c->head_dim;
  const size_t kv_dim = mla ? c->kv_lora_rank + c->rope_dim : (size_t)c->n_kv_heads * c->head_dim;
  return (attention_rows){
      .h = td_engine_rows_at(e, p, e->h, c->dim),
      .q = td_engine_rows_at(e, p, e->q, c->n_heads * head),
      .q_a = td_engine_rows_at(e, p, e->q_a, c->q_lora_rank),
      .k = td_engine_rows_at(e, p, e->kv, kv_dim),
      .v = mla ? NULL : td_engine_rows_at(e, p, e->v, kv_dim),
      .out = td_engine_rows_at(e, p, e->attn, c->n_heads * (mla ? c->v_dim : head))};
}

// Queries and gates of the microbatch, head by head.
static void *gated_queries_of(const td_engine *e, const td_microbatch *p) {
  return td_engine_rows_at(e, p, e->mixed, 2 * (size_t)e->config->n_heads * e->config->head_dim);
}

// q = the norms of the queries in mixed, where each head's gate follows it.
static void norm_gated_queries(td_engine *e, const td_microbatch *p, const td_layer *layer) {
  const td_model_config *c = e->config;
  if (!p->n_tokens) return;
  td_op_rmsnorm(e->stream, &(td_rmsnorm_args){.x = gated_queries_of(e, p),
                                              .w = layer->q_norm,
                                              .out = attention_rows_of(e, p).q,
                                              .x_stride = 2 * (size_t)c->head_dim,
                                              .out_stride = c->head_dim,
                                              .n_rows = p->n_tokens * c->n_heads,
                                              .dim = c->head_dim,
                                              .eps = c->rms_eps});
}

static void project_gqa(td_engine *e, const td_microbatch *p, const td_layer *layer) {
  const td_model_config *c = e->config;
  const attention_rows at = attention_rows_of(e, p);
  uint32_t q_dim = c->n_heads * c->head_dim, kv_dim = c->n_kv_heads * c->head_dim;
  linear(e, p, &layer->q, layer->q_bias, at.h, c->dim,
         c->has_attn_gate ? gated_queries_of(e, p) : at.q);
  linear(e, p, &layer->k, layer->k_bias, at.h, c->dim, at.k);
  linear(e, p, &layer->v, layer->v_bias, at.h, c->dim, at.v);
  if (c->has_attn_gate) {
    norm_gated_queries(e, p, layer);
    norm_rows(e, at.k, layer->k_norm, c->head_dim, p->n_tokens * c->n_kv_heads, c->rms_eps);
  } else if (c->qk_norm == TD_QK_NORM_HEAD) {
    norm_rows(e, at.q, layer->q_norm, c->head_dim, p->n_tokens * c->n_heads, c->rms_eps);
    norm_rows(e, at.k, layer->k_norm, c->head_dim, p->n_tokens * c->n_kv_heads, c->rms_eps);
  } else if (c->qk_norm == TD_QK_NORM_ALL) {
    norm_rows(e, at.q, layer->q_norm, q_dim, p->n_tokens, c->rms_eps);
    norm_rows(e, at.k, layer->k_norm, kv_dim, p->n_tokens, c->rms_eps);
  }
  rope(e, p, at.q, q_dim, c->head_dim, c->n_heads, td_rope_dims(c));
  rope(e, p, at.k, kv_dim, c->head_dim, c->n_kv_heads, td_rope_dims(c));
  scale_queries(e, p, q_dim);
}

// The microbatch's keys and values into the layer's pages.
static void store_gqa(td_engine *e, const td_microbatch *p, uint32_t layer_idx) {
  const td_model_config *c = e->config;
  const size_t kv_dim = c->n_kv_heads * c->head_dim;
  for (int g = 0; g < N_GROUPS; g++) {
    const step_group *group = &p->groups[g];
    if (!group->view.n_tokens) continue;
    const size_t t = group->token_begin;
    td_kv_store_gqa_args store = {.batch = td_layer_batch(e, group, layer_idx),
                                  .kv = td_layer_kv(e, layer_idx, g == GROUP_DECODE),
                                  .k = offset(e, e->kv, t * kv_dim),
                                  .v = offset(e, e->v, t * kv_dim),
                                  .k_stride = kv_dim,
                                  .v_stride = kv_dim,
                                  .n_kv_heads = c->n_kv_heads,
                                  .head_dim = c->head_dim};
    td_op_kv_store_gqa(e->stream, &store);
    if (td_engine_has_state(e, layer_idx))
      continue; // it leaves the device with its page (kv_transfer.h)
    if (g == GROUP_PREFILL) td_kv_outlet_layer(e, layer_idx);
    if (g == GROUP_DECODE && td_kv_outlet_is_active(e)) {
      store.kv = td_kv_outlet_view(e, layer_idx);
      td_op_kv_store_gqa(e->stream, &store);
    }
  }
}

static void attend_gqa(td_engine *e, const td_microbatch *p, const td_layer *layer,
                       uint32_t layer_idx) {
  const td_model_config *c = e->config;
  const attention_rows at = attention_rows_of(e, p);
  const size_t q_dim = c->n_heads * c->head_dim;
  for (int g = 0; g < N_GROUPS; g++) {
    const step_group *group = &p->groups[g];
    if (!group->view.n_tokens) continue;
    const size_t t = group->token_begin;
    td_op_attn_gqa(e->stream,
                   &(td_attn_gqa_args){.batch = td_layer_batch(e, group, layer_idx),
                                       .kv = td_layer_kv(e, layer_idx, g == GROUP_DECODE),
                                       .q = offset(e, at.q, t * q_dim),
                                       .out = offset(e, at.out, t * q_dim),
                                       .n_heads = c->n_heads,
                                       .n_kv_heads = c->n_kv_heads,
                                       .head_dim = c->head_dim,
                                       .window = td_model_window(c, layer_idx),
                                       .sinks = layer->sinks,
                                       .scale = e->attention_scale,
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

// y = W h as a part of each row of mixed, from element `at` on; returns the element after it.
static size_t mix(td_engine *e, const td_microbatch *p, const td_weight *w, size_t at,
                  size_t stride) {
  td_op_linear(e->stream, &(td_linear_op_args){.w = w,
                                               .x = e->h,
                                               .y = offset(e, e->mixed, at),
                                               .x_stride = e->config->dim,
                                               .y_stride = stride,
                                               .n_tokens = p->n_tokens,
                                               .n_prompt = p->groups[GROUP_PREFILL].view.n_tokens,
                                               .weights_on_device = td_engine_is_in_slot(e, w)});
  return at + w->rows;
}

// Where the inputs of a delta net are in a row of mixed.
typedef struct {
  size_t stride;
  td_row_part q, k, v, z, b, a;
} delta_inputs;

static delta_inputs project_delta(td_engine *e, const td_microbatch *p, const td_layer *layer) {
  const td_model_config *c = e->config;
  const size_t heads = c->delta_v_heads / c->delta_k_heads, k = c->delta_k_dim;
  const size_t v = heads * c->delta_v_dim, keys = c->delta_k_heads * k;
  const size_t values = c->delta_k_heads * v, head = 2 * (k + v);
  delta_inputs in = {.stride = 2 * (keys + values + c->delta_v_heads)};
  size_t at = mix(e, p, &layer->delta_qkv, 0, in.stride);
  if (c->delta_grouped) {
    mix(e, p, &layer->delta_b, at, in.stride);
    in.q = (td_row_part){0, head};
    in.k = (td_row_part){k, head};
    in.v = (td_row_part){2 * k, head};
    in.z = (td_row_part){2 * k + v, head};
    in.b = (td_row_part){at, 2 * heads};
    in.a = (td_row_part){at + heads, 2 * heads};
    return in;
  }
  in.q = (td_row_part){0, k};
  in.k = (td_row_part){keys, k};
  in.v = (td_row_part){2 * keys, v};
  in.z = (td_row_part){at, v};
  at = mix(e, p, &layer->delta_z, at, in.stride);
  in.b = (td_row_part){at, heads};
  at = mix(e, p, &layer->delta_b, at, in.stride);
  in.a = (td_row_part){at, heads};
  mix(e, p, &layer->delta_a, at, in.stride);
  return in;
}

// attn = the delta net's output before its last projection.
static void run_delta(td_engine *e, const td_microbatch *p, const td_layer *layer,
                      uint32_t layer_idx) {
  const td_model_config *c = e->config;
  if (!p->n_tokens) return;
  const delta_inputs in = project_delta(e, p, layer);
  const td_delta_shape shape = td_delta_shape_of(c);
  const td_kv_view state = td_engine_kv_view(e, layer_idx);
  const size_t channels = td_delta_channels(&shape), values = layer->o.cols;
  for (int g = 0; g < N_GROUPS; g++) {
    const step_group *group = &p->groups[g];
    if (!group->view.n_tokens) continue;
    const size_t t = group->token_begin;
    void *qkv = offset(e, e->q, t * channels);
    float *gates = e->gates + 2 * t * c->delta_v_heads;
    td_op_delta_conv(e->stream, &(td_delta_conv_args){.batch = group->view,
                                                      .state = state,
                                                      .shape = shape,
                                                      .x = offset(e, e->mixed, t * in.stride),
                                                      .x_stride = in.stride,
                                                      .q = in.q,
                                                      .k = in.k,
                                                      .v = in.v,
                                                      .a = in.a,
                                                      .b = in.b,
                                                      .conv = layer->delta_conv,
                                                      .decay = layer->delta_decay,
                                                      .bias = layer->delta_bias,
                                                      .out = qkv,
                                                      .gates = gates});
    td_op_delta_rule(e->stream, &(td_delta_rule_op_args){.batch = group->view,
                                                         .state = state,
                                                         .shape = shape,
                                                         .qkv = qkv,
                                                         .gates = gates,
                                                         .out = offset(e, e->attn, t * values)});
  }
  norm_rows(e, e->attn, layer->delta_norm, c->delta_v_dim, p->n_tokens * c->delta_v_heads,
            c->rms_eps);
  td_op_gate_rows(e->stream, &(td_gate_rows_args){.x = e->attn,
                                                  .gate = e->mixed,
                                                  .gate_stride = in.stride,
                                                  .part = in.z,
                                                  .n_tokens = p->n_tokens,
                                                  .n_groups = c->delta_k_heads,
                                                  .dim = layer->o.cols / c->delta_k_heads,
                                                  .silu = true});
}

// q = q_b(norm(q_a h)) or q_proj h; kv = [norm(latent), rope(key)].
static void project_mla(td_engine *e, const td_microbatch *p, const td_layer *layer) {
  const td_model_config *c = e->config;
  const attention_rows at = attention_rows_of(e, p);
  uint32_t head = c->nope_dim + c->rope_dim, entry = c->kv_lora_rank + c->rope_dim;
  td_vec none = {0};
  if (c->q_lora_rank) {
    linear(e, p, &layer->q_a, layer->q_a_bias, at.h, c->dim, at.q_a);
    norm_rows(e, at.q_a, layer->q_a_norm, c->q_lora_rank, p->n_tokens, MLA_NORM_EPS);
    linear(e, p, &layer->q_b, none, at.q_a, c->q_lora_rank, at.q);
  } else {
    linear(e, p, &layer->q, none, at.h, c->dim, at.q);
  }
  linear(e, p, &layer->kv_a, layer->kv_a_bias, at.h, c->dim, at.k);
  norm_rows(e, at.k, layer->kv_a_norm, entry, p->n_tokens, MLA_NORM_EPS);
  rope(e, p, offset(e, at.q, c->nope_dim), (size_t)c->n_heads * head, head, c->n_heads,
       c->rope_dim);
  rope(e, p, offset(e, at.k, c->kv_lora_rank), entry, entry, 1, c->rope_dim);
  scale_queries(e, p, c->n_heads * head);
}

// The microbatch's latents and rope keys into the layer's pages.
static void store_mla(td_engine *e, const td_microbatch *p, uint32_t layer_idx) {
  const uint32_t entry = e->config->kv_lora_rank + e->config->rope_dim;
  for (int g = 0; g < N_GROUPS; g++) {
    const step_group *group = &p->groups[g];
    if (!group->view.n_tokens) continue;
    td_kv_store_mla_args store = {.batch = group->view,
                                  .kv = td_engine_kv_view(e, layer_idx),
                                  .entry = offset(e, e->kv, (size_t)group->token_begin * entry),
                                  .entry_dim = entry};
    td_op_kv_store_mla(e->stream, &store);
    if (g == GROUP_PREFILL) td_kv_outlet_layer(e, layer_idx);
    if (g == GROUP_DECODE && td_kv_outlet_is_active(e)) {
      store.kv = td_kv_outlet_view(e, layer_idx);
      td_op_kv_store_mla(e->stream, &store);
    }
  }
}

static void attend_mla(td_engine *e, const td_microbatch *p, const td_layer *layer,
                       uint32_t layer_idx) {
  const td_model_config *c = e->config;
  const attention_rows at = attention_rows_of(e, p);
  size_t q_dim = (size_t)c->n_heads * (c->nope_dim + c->rope_dim);
  size_t out_dim = (size_t)c->n_heads * c->v_dim;
  for (int g = 0; g < N_GROUPS; g++) {
    const step_group *group = &p->groups[g];
    if (!group->view.n_tokens) continue;
    size_t t = group->token_begin;
    td_op_attn_mla(e->stream,
                   &(td_attn_mla_args){.batch = group->view,
                                       .kv = td_engine_kv_view(e, layer_idx),
                                       .q = offset(e, at.q, t * q_dim),
                                       .kv_b = &layer->kv_b,
                                       .out = offset(e, at.out, t * out_dim),
                                       .n_heads = c->n_heads,
                                       .nope_dim = c->nope_dim,
                                       .rope_dim = c->rope_dim,
                                       .v_dim = c->v_dim,
                                       .kv_lora_rank = c->kv_lora_rank,
                                       .scale = e->attention_scale,
                                       .absorbed = g == GROUP_DECODE,
                                       .weights_on_device = td_engine_is_in_slot(e, &layer->kv_b)});
  }
}

void td_engine_copy_outputs(td_engine *e) {
  uint32_t n_vocab = e->config->n_vocab;
  if (e->dev_routing) {
    size_t n = td_engine_routing_at(e, e->config->n_layers);
    td_op_copy(e->stream, e->routing, e->dev_routing, n * sizeof *e->routing);
  }
  if (e->n_rows == 0) return;
  if (!e->is_ranked) {
    td_op_copy(e->stream, e->logits, e->dev_logits, (size_t)e->n_rows * n_vocab * sizeof(float));
    return;
  }
  td_op_top_logits(e->stream, &(td_top_logits_args){.logits = e->dev_logits,
                                                    .temperature = e->temperature,
                                                    .out = e->dev_top,
                                                    .n_rows = e->n_rows,
                                                    .n_vocab = n_vocab});
  td_op_copy_direct(e->stream, e->top, e->dev_top, e->n_rows * sizeof *e->top);
}

// Final norm and lm_head for the rows whose logits are wanted.
static void head(td_engine *e) {
  const td_model_config *c = e->config;
  const td_microbatch *p = &e->whole;
  const td_weight *lm_head = td_model_lm_head(e->model);
  td_op_add(e->stream, p->x, p->delta, (size_t)p->n_tokens * c->dim);
  td_op_gather_rows(e->stream, e->h, p->x, e->rows, e->n_rows, c->dim);
  if (td_rank_is_active(e)) td_rank_gather_rows(e);
  norm_rows(e, e->h, td_model_final_norm(e->model), c->dim, e->n_rows, c->rms_eps);
  td_op_linear(e->stream, &(td_linear_op_args){.w = lm_head,
                                               .x = e->h,
                                               .y = e->dev_logits,
                                               .x_stride = c->dim,
                                               .y_stride = c->n_vocab,
                                               .n_tokens = e->n_rows,
                                               .out_f32 = true});
}

// h, and from it queries, keys and values.
static void begin_attention(td_engine *e, const td_microbatch *p, uint32_t layer_idx) {
  const td_layer *layer = td_engine_layer(e, layer_idx);
  norm_residual(e, p, layer->attn_norm, layer_idx > 0);
  if (td_model_is_delta(e->config, layer_idx)) return; // it has its own
  if (e->config->attn == TD_ATTN_MLA) {
    project_mla(e, p, layer);
  } else {
    project_gqa(e, p, layer);
  }
}

// Behind the KV entries of these tokens and those before: h for what follows attention.
static void end_attention(td_engine *e, const td_microbatch *p, uint32_t layer_idx) {
  const td_layer *layer = td_engine_layer(e, layer_idx);
  if (td_model_is_delta(e->config, layer_idx)) {
    run_delta(e, p, layer, layer_idx);
  } else if (e->config->attn == TD_ATTN_MLA) {
    attend_mla(e, p, layer, layer_idx);
  } else {
    attend_gqa(e, p, layer, layer_idx);
  }
  linear(e, p, &layer->o, layer->o_bias, attention_rows_of(e, p).out, layer->o.cols, p->delta);
  norm_residual(e, p, layer->mlp_norm, true);
}

static void store_kv(td_engine *e, const td_microbatch *p, uint32_t layer_idx) {
  if (td_model_is_delta(e->config, layer_idx)) return;
  if (e->config->attn == TD_ATTN_MLA) {
    store_mla(e, p, layer_idx);
  } else {
    store_gqa(e, p, layer_idx);
  }
}

// One layer, except that offloaded experts' sums may still be missing from delta.
static void begin_layer(td_engine *e, const td_microbatch *p, uint32_t layer_idx) {
  const td_layer *layer = td_engine_layer(e, layer_idx);
  td_dense_stream_use(e, layer_idx, TD_DENSE_ATTN);
  begin_attention(e, p, layer_idx);
  td_window_enter(e, layer_idx);
  store_kv(e, p, layer_idx);
  end_attention(e, p, layer_idx);
  td_window_leave(e, layer_idx);
  td_dense_stream_leave(e, TD_DENSE_ATTN);
  td_dense_stream_use(e, layer_idx, TD_DENSE_MLP);
  if (layer->is_moe) {
    td_engine_moe_begin(e, p, layer_idx);
  } else {
    td_engine_mlp(e, p, layer, false);
  }
  td_dense_stream_leave(e, TD_DENSE_MLP);
  if (e->plan.way[layer_idx] != TD_LAYER_STREAMED) td_dense_stream_fetch_ahead(e, layer_idx);
}

// The end of the layer before and one layer, of a step of several ranks, half by half: what one is
// exchanged for goes on while the other is computed.
static void begin_ranks_layer(td_engine *e, uint32_t layer_idx) {
  td_rank *r = e->rank;
  const uint32_t n_layers = e->config->n_layers;
  for (uint32_t h = 0; h < r->n_halves; h++) {
    if (layer_idx > 0 && td_model_layer(e->model, layer_idx - 1)->is_moe)
      td_engine_moe_ranks_end(e, h, layer_idx - 1);
    if (layer_idx == n_layers) continue;
    begin_attention(e, &r->halves[h].own, layer_idx);
    td_rank_gather_kv(e, &r->halves[h]);
  }
  if (layer_idx == n_layers) return;
  const td_layer *layer = td_model_layer(e->model, layer_idx);
  td_window_enter(e, layer_idx);
  for (uint32_t h = 0; h < r->n_halves; h++) {
    td_rank_store(e, &r->halves[h], layer_idx);
    end_attention(e, &r->halves[h].own, layer_idx);
    if (layer->is_moe) {
      td_rank_gather_hidden(e, &r->halves[h]);
    } else {
      td_engine_mlp(e, &r->halves[h].own, layer, false);
    }
  }
  td_window_leave(e, layer_idx);
  if (layer->is_moe) td_engine_moe_ranks_begin(e, layer_idx);
}

static void embed(td_engine *e) {
  if (!e->n_tokens) return;
  td_op_embed(e->stream, &(td_embed_args){.table = td_model_embed(e->model),
                                          .ids = e->tokens,
                                          .out = e->whole.x,
                                          .n_tokens = e->n_tokens});
}

// Whether logits are wanted, of any rank's tokens.
static bool has_rows(const td_engine *e) {
  return td_rank_is_active(e) ? e->rank->n_all_rows > 0 : e->n_rows > 0;
}

// Alternates between microbatches: while one waits for its experts, the other is computed.
bool td_engine_forward_piece(td_engine *e) {
  td_engine_cursor *at = &e->cursor;
  const uint32_t n_layers = e->config->n_layers, layer_idx = at->layer_idx;
  if (at->group < at->n_groups) {
    td_engine_moe_group(e, &e->microbatches[0], layer_idx - 1, at->group++);
    if (at->group == at->n_groups) td_dense_stream_fetch_ahead(e, layer_idx - 1);
    return true;
  }
  if (layer_idx > n_layers) return false;
  if (layer_idx == 0) embed(e);
  if (td_rank_is_active(e)) begin_ranks_layer(e, layer_idx);
  for (uint32_t k = 0; !td_rank_is_active(e) && k < e->plan.n_microbatches; k++) {
    if (layer_idx > 0) td_engine_moe_end(e, &e->microbatches[k], layer_idx - 1);
    if (layer_idx < n_layers) begin_layer(e, &e->microbatches[k], layer_idx);
  }
  const bool is_streamed = layer_idx < n_layers && e->plan.way[layer_idx] == TD_LAYER_STREAMED;
  *at = (td_engine_cursor){.layer_idx = layer_idx + 1};
  if (is_streamed) td_engine_stream_range(e, &at->group, &at->n_groups);
  if (layer_idx == n_layers && has_rows(e)) head(e);
  return true;
}

void td_engine_forward(td_engine *e) {
  e->cursor = (td_engine_cursor){.layer_idx = 0}; // a device may ask for the operators twice
  while (td_engine_forward_piece(e)) {
  }
}
