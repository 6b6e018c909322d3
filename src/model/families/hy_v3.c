// src/model/families/hy_v3.c - Hy3 (Tencent Hunyuan).
#include "model/families/family.h"

static const td_config_key keys[] = {
    {"vocab_size", NULL, TD_CONFIG_FIELD(n_vocab), 1, 1u << 24, 120832},
    {"hidden_size", NULL, TD_CONFIG_FIELD(dim), 1, TD_MAX_DIM, 4096},
    {"num_hidden_layers", NULL, TD_CONFIG_FIELD(n_layers), 1, TD_MAX_LAYERS, 80},
    {"num_attention_heads", NULL, TD_CONFIG_FIELD(n_heads), 1, TD_MAX_HEADS, 64},
    {"num_key_value_heads", NULL, TD_CONFIG_FIELD(n_kv_heads), 1, TD_MAX_HEADS, 8},
    {"max_position_embeddings", NULL, TD_CONFIG_FIELD(max_position), 1, 1u << 30, 131072},
    {"intermediate_size", NULL, TD_CONFIG_FIELD(dense_dim), 1, TD_MAX_DIM, 13312},
    {"moe_intermediate_size", NULL, TD_CONFIG_FIELD(expert_dim), 1, TD_MAX_DIM, 1536},
    {"num_experts", "num_local_experts", TD_CONFIG_FIELD(n_experts), 1, TD_MAX_EXPERTS, 192},
    {"num_experts_per_tok", NULL, TD_CONFIG_FIELD(top_k), 1, TD_MAX_EXPERTS, 8},
    {"num_shared_experts", NULL, TD_CONFIG_FIELD(n_shared_experts), 0, 256, 1},
    {"num_nextn_predict_layers", NULL, TD_CONFIG_FIELD(n_mtp_layers), 0, 64, 1},
};

static td_status read_rest(const td_config_reader *r) {
  td_status st = td_config_read_head_dim(r, 128);
  if (st == TD_OK) st = td_config_read_moe_layers(r, 1);
  return st == TD_OK ? td_config_read_scaling(r, "router_scaling_factor", 2.826) : st;
}

static const td_tensor_spec layer[] = {
    TD_NORM_PLACES,
    TD_GQA_PLACES,
    TD_OUT_BIAS_PLACE,
    TD_QK_NORM_PLACES,
    TD_DENSE_PLACES,
    TD_EXPERT_PLACES,
    TD_ROUTER_BIAS_PLACE("mlp.e_score_correction_bias"),
    TD_SHARED_PLACES,
};

const td_family td_family_hy_v3 = {
    .model_types = {"hy_v3"},
    .defaults = {.attn = TD_ATTN_GQA,
                 .qk_norm = TD_QK_NORM_HEAD,
                 .rms_eps = 1e-5f,
                 .rope_theta = 11158840,
                 .router_sigmoid = true,
                 .norm_topk = true,
                 .n_groups = 1,
                 .topk_groups = 1,
                 .bos_id = -1},
    .keys = keys,
    .n_keys = TD_COUNT(keys),
    .read = read_rest,
    .layer = layer,
    .n_layer = TD_COUNT(layer),
};
