// src/engine/attn/kda.c - Kimi delta attention (Kimi Team, "Kimi Linear", 2025): gated delta nets
// whose state has a decay for each channel of the keys. As many heads of queries, keys and values;
// decays and the output's gate may be by matrices of low rank.
#include "engine/attn/kinds.h"

// A row: queries, keys, values; decays, gate; low ranks of both, strengths.
static td_delta_inputs project_inputs(td_engine *e, const td_microbatch *p, const td_layer *layer) {
  const td_model_config *c = e->config;
  const size_t k = c->delta_k_dim, v = c->delta_v_dim, keys = c->delta_k_heads * k;
  const td_weight *const of_h[] = {&layer->q, &layer->k, &layer->v};
  const td_weight *const low[] = {&layer->delta_a_in, &layer->delta_z_in, &layer->delta_b};
  const td_weight *const decays[] = {&layer->delta_a, NULL, NULL};
  const td_weight *const gate[] = {&layer->delta_z, NULL, NULL};
  td_delta_inputs in = {.q = {0, k}, .k = {keys, k}, .v = {2 * keys, v}};
  const size_t values = layer->delta_z.rows, at = 3 * values, low_at = 5 * values;
  const size_t z_in = low_at + layer->delta_a_in.rows, b = z_in + layer->delta_z_in.rows;
  const char *row = e->act[TD_ACT_MIXED];
  in.a = (td_row_part){at, k};
  in.z = (td_row_part){at + values, v};
  in.b = (td_row_part){b, 1};
  in.stride = b + layer->delta_b.rows;
  td_delta_mix(e, p, of_h, e->h, c->dim, 0, in.stride);
  if (!layer->delta_a_in.data) { // at once: decays, gate, strengths
    const td_weight *const whole[] = {&layer->delta_a, &layer->delta_z, &layer->delta_b};
    td_delta_mix(e, p, whole, e->h, c->dim, at, in.stride);
    return in;
  }
  td_delta_mix(e, p, low, e->h, c->dim, low_at, in.stride);
  td_delta_mix(e, p, decays, row + low_at * e->act_bytes, in.stride, at, in.stride);
  td_delta_mix(e, p, gate, row + z_in * e->act_bytes, in.stride, at + values, in.stride);
  return in;
}

static void attend(td_engine *e, const td_microbatch *p, const td_layer *layer,
                   uint32_t layer_idx) {
  if (!p->n_tokens) return;
  const td_delta_inputs in = project_inputs(e, p, layer);
  td_delta_attend(e, p, layer, layer_idx, &in);
}

// ---- what follows from the configuration --------------------------------------------------------

// Inputs as of a delta net, the decays' own and those of both gates of low rank, as wide as a head.
static td_attn_rows act(const td_model_config *c) {
  const td_delta_shape shape = td_attn_delta_shape(c);
  td_attn_rows out = td_delta_act(c);
  const size_t decays = (size_t)shape.n_v_heads * td_delta_decays(&shape);
  out.act[TD_ACT_MIXED] += decays + 2 * (size_t)shape.v_dim;
  out.words = decays + shape.n_v_heads;
  return out;
}

static void describe(const td_model_config *c, td_buf *out) {
  td_buf_printf(out,
                "delta nets    in %u of the %u layers instead: %u heads, %u wide, with a decay for "
                "each channel\n",
                td_model_n_attn(c, TD_ATTN_KDA), c->n_layers, c->delta_v_heads, c->delta_v_dim);
}

const td_attn_ops td_attn_kda = {{td_delta_cache, act, td_delta_flops, describe, 512, true, NULL},
                                 td_delta_project,
                                 td_delta_store,
                                 attend};
