// src/model/families/qwen3_5_moe.c - the language models of Qwen3.5 and Qwen3.6 with experts: as
// Qwen3-Next, with separate input projections of the delta nets.
#include "model/families/delta_net.h"

static const td_config_key keys[] = {
    {"vocab_size", NULL, TD_CONFIG_FIELD(n_vocab), 1, 1u << 24, 248320},
    {"hidden_size", NULL, TD_CONFIG_FIELD(dim), 1, TD_MAX_DIM, 2048},
    {"num_hidden_layers", NULL, TD_CONFIG_FIELD(n_layers), 1, TD_MAX_LAYERS, 40},
    {"num_attention_heads", NULL, TD_CONFIG_FIELD(n_heads), 1, TD_MAX_HEADS, 16},
    {"num_key_value_heads", NULL, TD_CONFIG_FIELD(n_kv_heads), 1, TD_MAX_HEADS, 2},
    {"max_position_embeddings", NULL, TD_CONFIG_FIELD(max_position), 1, 1u << 30, 32768},
    {"moe_intermediate_size", NULL, TD_CONFIG_FIELD(expert_dim), 1, TD_MAX_DIM, 512},
    {"shared_expert_intermediate_size", NULL, TD_CONFIG_FIELD(shared_dim), 1, TD_MAX_DIM, 512},
    {"num_experts", "num_local_experts", TD_CONFIG_FIELD(n_experts), 1, TD_MAX_EXPERTS, 256},
    {"num_experts_per_tok", NULL, TD_CONFIG_FIELD(top_k), 1, TD_MAX_EXPERTS, 8},
    TD_DELTA_KEYS,
};

static td_status read_rest(const td_config_reader *r) {
  td_status st = td_config_read_head_dim(r, 256);
  for (uint32_t i = 0; i < r->out->n_layers; i++)
    td_config_set_moe(r->out, i);
  return st == TD_OK ? td_config_read_delta(r) : st;
}

static const td_tensor_spec layer[] = {
    TD_GATED_PLACES,
    TD_DELTA_PLACES,
    TD_MATRIX(WEIGHT, "linear_attn.in_proj_qkv.weight", delta_qkv, TD_DIM_DELTA_QKV, TD_DIM_MODEL,
              TD_IF_DELTA),
    TD_MATRIX(WEIGHT, "linear_attn.in_proj_z.weight", delta_z, TD_DIM_DELTA_V, TD_DIM_MODEL,
              TD_IF_DELTA),
    TD_MATRIX(ROUTER, "linear_attn.in_proj_b.weight", delta_b, TD_DIM_DELTA_HEADS, TD_DIM_MODEL,
              TD_IF_DELTA),
    TD_MATRIX(ROUTER, "linear_attn.in_proj_a.weight", delta_a, TD_DIM_DELTA_HEADS, TD_DIM_MODEL,
              TD_IF_DELTA),
};

const td_family td_family_qwen3_5_moe = {
    .model_types = {"qwen3_5_moe_text"},
    .has_partial_rotary = true,
    .has_norm1 = true,
    .mtp = "mtp.",
    .defaults = {TD_DELTA_DEFAULTS},
    .keys = keys,
    .n_keys = TD_COUNT(keys),
    .read = read_rest,
    .layer = layer,
    .n_layer = TD_COUNT(layer),
};
