// src/engine/attn/delta.c - gated delta nets: a recurrent state in place of keys and values.
#include "engine/attn/kinds.h"

#include "engine/rows.h"

size_t td_delta_mix(td_engine *e, const td_microbatch *p, const td_weight *const w[3],
                    const void *x, size_t x_stride, size_t at, size_t stride) {
  td_linear_op_args a = {.w = w[0],
                         .x = x,
                         .y = td_rows_offset(e, e->act[TD_ACT_MIXED], at),
                         .x_stride = x_stride,
                         .y_stride = stride};
  at += w[0]->rows;
  for (int i = 1; i < 3 && w[i]; i++) {
    a.also[i - 1] = (td_linear_also){
        .w = w[i], .y = td_rows_offset(e, e->act[TD_ACT_MIXED], at), .y_stride = stride};
    at += w[i]->rows;
  }
  td_rows_linear_op(e, p, a);
  return at;
}

void td_delta_attend(td_engine *e, const td_microbatch *p, const td_layer *layer,
                     uint32_t layer_idx, const td_delta_inputs *in) {
  const td_model_config *c = e->config;
  const td_delta_shape shape = td_attn_delta_shape(c);
  const td_kv_view state = td_engine_kv_view(e, layer_idx);
  const size_t channels = td_delta_channels(&shape), values = layer->o.cols;
  const size_t of_gates = td_delta_decays(&shape) + 1;
  for (int g = 0; g < N_GROUPS; g++) {
    const step_group *group = &p->groups[g];
    if (!group->view.n_tokens) continue;
    const size_t t = group->token_begin;
    const td_state_trail trail = td_engine_trail(e, layer_idx, g);
    void *qkv = td_rows_offset(e, e->act[TD_ACT_Q], t * channels);
    float *gates = (float *)e->act_words + t * c->delta_v_heads * of_gates;
    td_op_delta_conv(e->stream, &(td_delta_conv_args){
                                    .batch = group->view,
                                    .state = state,
                                    .shape = shape,
                                    .trail = trail,
                                    .x = td_rows_offset(e, e->act[TD_ACT_MIXED], t * in->stride),
                                    .x_stride = in->stride,
                                    .q = in->q,
                                    .k = in->k,
                                    .v = in->v,
                                    .a = in->a,
                                    .b = in->b,
                                    .conv = layer->delta_conv,
                                    .decay = layer->delta_decay,
                                    .bias = layer->delta_bias,
                                    .bound = c->delta_bound,
                                    .out = qkv,
                                    .gates = gates});
    td_op_delta_rule(e->stream, &(td_delta_rule_op_args){
                                    .batch = group->view,
                                    .state = state,
                                    .shape = shape,
                                    .trail = trail,
                                    .qkv = qkv,
                                    .gates = gates,
                                    .out = td_rows_offset(e, e->act[TD_ACT_OUT], t * values),
                                    .prompt = g == GROUP_PREFILL});
  }
  td_rows_norm(e, e->act[TD_ACT_OUT], layer->delta_norm, c->delta_v_dim,
               p->n_tokens * c->delta_v_heads, c->rms_eps);
  td_op_gate_rows(e->stream, &(td_gate_rows_args){.x = e->act[TD_ACT_OUT],
                                                  .gate = e->act[TD_ACT_MIXED],
                                                  .gate_stride = in->stride,
                                                  .part = in->z,
                                                  .n_tokens = p->n_tokens,
                                                  .n_groups = c->delta_k_heads,
                                                  .dim = layer->o.cols / c->delta_k_heads,
                                                  .silu = in->has_silu_gate});
}

void td_delta_project(td_engine *e, const td_microbatch *p, const td_layer *layer) {
  (void)e, (void)p, (void)layer;
}

void td_delta_store(td_engine *e, const td_attn_store *s) {
  (void)e, (void)s;
}

// y = W h as a part of each row of mixed, from element `at` on; returns the element after it.
static size_t mix(td_engine *e, const td_microbatch *p, const td_weight *w, size_t at,
                  size_t stride) {
  const td_weight *const all[] = {w, NULL, NULL};
  return td_delta_mix(e, p, all, e->h, e->config->dim, at, stride);
}

static td_delta_inputs project_inputs(td_engine *e, const td_microbatch *p, const td_layer *layer) {
  const td_model_config *c = e->config;
  const size_t heads = c->delta_v_heads / c->delta_k_heads, k = c->delta_k_dim;
  const size_t v = heads * c->delta_v_dim, keys = c->delta_k_heads * k;
  const size_t values = c->delta_k_heads * v, head = 2 * (k + v);
  td_delta_inputs in = {.stride = 2 * (keys + values + c->delta_v_heads),
                        .has_silu_gate = !c->delta_sigmoid};
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

static void attend(td_engine *e, const td_microbatch *p, const td_layer *layer,
                   uint32_t layer_idx) {
  if (!p->n_tokens) return;
  const td_delta_inputs in = project_inputs(e, p, layer);
  td_delta_attend(e, p, layer, layer_idx, &in);
}

// ---- what follows from the configuration --------------------------------------------------------

td_delta_shape td_attn_delta_shape(const td_model_config *c) {
  return (td_delta_shape){.n_k_heads = c->delta_k_heads,
                          .n_v_heads = c->delta_v_heads,
                          .k_dim = c->delta_k_dim,
                          .v_dim = c->delta_v_dim,
                          .n_taps = c->delta_taps,
                          .is_tiled = c->delta_tiled,
                          .by_channel = c->delta_by_channel};
}

td_ngram_places td_attn_ngram_places(const td_model_config *c) {
  const td_delta_shape shape = td_attn_delta_shape(c);
  td_ngram_places out = {.rows = td_delta_state_bytes(&shape) / sizeof(float)};
  out.ids = out.end = out.rows;
  if (!c->ngram_size) return out;
  const size_t n_past = td_ngram_past(c->ngram_taps, c->ngram_size);
  out.ids += n_past * c->n_streams * c->dim;
  out.end = out.ids + c->ngram_size - 1;
  return out;
}

td_attn_cache td_delta_cache(const td_model_config *c) {
  const size_t n_bytes = td_attn_ngram_places(c).end * sizeof(float);
  return (td_attn_cache){.state_bytes = n_bytes, .undo_bytes = n_bytes};
}

td_attn_rows td_delta_act(const td_model_config *c) {
  const td_delta_shape shape = td_attn_delta_shape(c);
  const size_t values = (size_t)c->delta_v_heads * c->delta_v_dim;
  const size_t channels = td_delta_channels(&shape);
  const size_t inputs = channels + values + 2 * (size_t)c->delta_v_heads;
  const size_t of_ngrams = c->ngram_size ? c->ngram_dim : 0;
  return (td_attn_rows){.act = {[TD_ACT_Q] = channels,
                                [TD_ACT_OUT] = values,
                                [TD_ACT_MIXED] = inputs > of_ngrams ? inputs : of_ngrams},
                        .words = 2 * (size_t)c->delta_v_heads};
}

// 7 for each element of the states.
double td_delta_flops(const td_model_config *c, double n, double n_past) {
  (void)n_past;
  return 7.0 * n * c->delta_v_heads * c->delta_k_dim * c->delta_v_dim;
}

static void describe(const td_model_config *c, td_buf *out) {
  td_buf_printf(out,
                "delta nets    in %u of the %u layers instead: %u heads of keys, %u of values, "
                "%u and %u wide\n",
                td_model_n_attn(c, TD_ATTN_DELTA), c->n_layers, c->delta_k_heads, c->delta_v_heads,
                c->delta_k_dim, c->delta_v_dim);
  if (!c->ngram_size) return;
  uint32_t n = 0;
  for (uint32_t i = 0; i < c->n_layers; i++)
    n += td_layers_have(c->ngram_layers, i);
  td_buf_printf(
      out, "n-grams       of up to %u tokens, %u rows of a table each, in %u of the %u layers\n",
      c->ngram_size, c->ngram_heads, n, c->n_layers);
}

const td_attn_ops td_attn_delta = {
    {td_delta_cache, td_delta_act, td_delta_flops, describe, 512, true, NULL},
    td_delta_project,
    td_delta_store,
    attend};
