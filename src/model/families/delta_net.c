// src/model/families/delta_net.c - reads which layers are gated delta nets.
#include "model/families/delta_net.h"

td_status td_config_read_delta(const td_config_reader *r) {
  td_model_config *c = r->out;
  uint32_t interval = 4;
  uint64_t layers[TD_MAX_LAYERS / 64] = {0};
  td_status st = td_config_uint(r, r->root, "full_attention_interval", 1, INT32_MAX, &interval);
  if (st != TD_OK) return st;
  static const td_layer_name names[] = {
      {"linear_attention", true}, {"full_attention", false}, {"indexed_attention", false}};
  if (td_json_get(r->root, "layer_types")) {
    st = td_config_read_layer_names(r, "layer_types", names, c->index_group ? 3 : 2, layers);
  } else {
    for (uint32_t i = 0; i < c->n_layers; i++)
      if ((i + 1) % interval) td_layers_add(layers, i);
  }
  return st == TD_OK ? td_config_set_delta(r, layers) : st;
}

td_status td_config_read_kda_heads(const td_config_reader *r) {
  td_model_config *c = r->out;
  const cJSON *part;
  td_status st = td_config_part(r, "linear_attn_config", &part);
  if (st == TD_OK) st = td_config_uint(r, part, "head_dim", 1, TD_MAX_HEAD_DIM, &c->delta_v_dim);
  if (st == TD_OK) st = td_config_uint(r, part, "num_heads", 1, TD_MAX_HEADS, &c->delta_v_heads);
  if (st == TD_OK)
    st = td_config_uint(r, part, "short_conv_kernel_size", 2, TD_MAX_TAPS, &c->delta_taps);
  c->delta_k_heads = c->delta_v_heads;
  c->delta_k_dim = c->delta_v_dim;
  return st;
}

td_status td_config_set_delta(const td_config_reader *r, const uint64_t *layers) {
  const td_model_config *c = r->out;
  const td_attn_kind kind = c->delta_by_channel ? TD_ATTN_KDA : TD_ATTN_DELTA;
  td_config_set_kind(r, layers, kind);
  if (td_model_n_attn(c, kind) == c->n_layers)
    return td_config_bad(r, "at least one layer must be of type \"full_attention\"");
  if (c->delta_v_heads % c->delta_k_heads)
    return td_config_bad(r, "linear_num_key_heads must divide linear_num_value_heads");
  if ((uint64_t)c->delta_k_heads * c->delta_k_dim > TD_MAX_DIM ||
      (uint64_t)c->delta_v_heads * c->delta_v_dim > TD_MAX_DIM)
    return td_config_bad(r, "the heads of linear attention are too many or too wide");
  return TD_OK;
}
