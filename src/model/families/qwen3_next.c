// src/model/families/qwen3_next.c - Qwen3-Next-80B-A3B, Qwen3-Coder-Next: three layers of four are
// gated delta nets, every fourth has gated attention.
#include "model/families/delta_net.h"

static const td_config_key keys[] = {
    {"vocab_size", NULL, TD_CONFIG_FIELD(n_vocab), 1, 1u << 24, 151936},
    {"hidden_size", NULL, TD_CONFIG_FIELD(dim), 1, TD_MAX_DIM, 2048},
    {"num_hidden_layers", NULL, TD_CONFIG_FIELD(n_layers), 1, TD_MAX_LAYERS, 48},
    {"num_attention_heads", NULL, TD_CONFIG_FIELD(n_heads), 1, TD_MAX_HEADS, 16},
    {"num_key_value_heads", NULL, TD_CONFIG_FIELD(n_kv_heads), 1, TD_MAX_HEADS, 2},
    {"max_position_embeddings", NULL, TD_CONFIG_FIELD(max_position), 1, 1u << 30, 32768},
    {"intermediate_size", NULL, TD_CONFIG_FIELD(dense_dim), 1, TD_MAX_DIM, 5632},
    {"moe_intermediate_size", NULL, TD_CONFIG_FIELD(expert_dim), 1, TD_MAX_DIM, 512},
    {"shared_expert_intermediate_size", NULL, TD_CONFIG_FIELD(shared_dim), 1, TD_MAX_DIM, 512},
    {"num_experts", "num_local_experts", TD_CONFIG_FIELD(n_experts), 1, TD_MAX_EXPERTS, 512},
    {"num_experts_per_tok", NULL, TD_CONFIG_FIELD(top_k), 1, TD_MAX_EXPERTS, 10},
    TD_DELTA_KEYS,
};

static td_status read_rest(const td_config_reader *r) {
  td_status st = td_config_read_head_dim(r, 256);
  if (st == TD_OK) st = td_config_read_sparse_step(r);
  return st == TD_OK ? td_config_read_delta(r) : st;
}

static const td_tensor_spec layer[] = {
    TD_GATED_PLACES,
    TD_DENSE_PLACES,
    TD_DELTA_PLACES,
    TD_MATRIX(WEIGHT, "linear_attn.in_proj_qkvz.weight", delta_qkv, TD_DIM_DELTA_QKVZ, TD_DIM_MODEL,
              TD_IF_DELTA),
    TD_MATRIX(ROUTER, "linear_attn.in_proj_ba.weight", delta_b, TD_DIM_DELTA_PAIRS, TD_DIM_MODEL,
              TD_IF_DELTA),
};

const td_family td_family_qwen3_next = {
    .model_types = {"qwen3_next"},
    .has_partial_rotary = true,
    .has_norm1 = true,
    .mtp = "mtp.",
    .defaults = {TD_DELTA_DEFAULTS, .delta_grouped = true},
    .keys = keys,
    .n_keys = TD_COUNT(keys),
    .read = read_rest,
    .layer = layer,
    .n_layer = TD_COUNT(layer),
};
