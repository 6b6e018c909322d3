// src/model/families/glm4_moe_lite.c - GLM-4.7-Flash.
#include "model/families/family.h"

static const td_config_key keys[] = {
    {"vocab_size", NULL, TD_CONFIG_FIELD(n_vocab), 1, 1u << 24, 154880},
    {"hidden_size", NULL, TD_CONFIG_FIELD(dim), 1, TD_MAX_DIM, 2048},
    {"num_hidden_layers", NULL, TD_CONFIG_FIELD(n_layers), 1, TD_MAX_LAYERS, 47},
    {"num_attention_heads", NULL, TD_CONFIG_FIELD(n_heads), 1, TD_MAX_HEADS, 20},
    {"max_position_embeddings", NULL, TD_CONFIG_FIELD(max_position), 1, 1u << 30, 202752},
    {"intermediate_size", NULL, TD_CONFIG_FIELD(dense_dim), 1, TD_MAX_DIM, 10240},
    {"moe_intermediate_size", NULL, TD_CONFIG_FIELD(expert_dim), 1, TD_MAX_DIM, 1536},
    {"n_routed_experts", "num_local_experts", TD_CONFIG_FIELD(n_experts), 1, TD_MAX_EXPERTS, 64},
    {"num_experts_per_tok", NULL, TD_CONFIG_FIELD(top_k), 1, TD_MAX_EXPERTS, 4},
    {"n_shared_experts", NULL, TD_CONFIG_FIELD(n_shared_experts), 0, 256, 1},
    {"n_group", NULL, TD_CONFIG_FIELD(n_groups), 1, TD_MAX_EXPERTS, 1},
    {"topk_group", NULL, TD_CONFIG_FIELD(topk_groups), 1, TD_MAX_EXPERTS, 1},
    {"kv_lora_rank", NULL, TD_CONFIG_FIELD(kv_lora_rank), 1, TD_MAX_DIM, 512},
    {"qk_nope_head_dim", NULL, TD_CONFIG_FIELD(nope_dim), 1, TD_MAX_HEAD_DIM, 192},
    {"qk_rope_head_dim", NULL, TD_CONFIG_FIELD(rope_dim), 2, TD_MAX_HEAD_DIM, 64},
    {"v_head_dim", NULL, TD_CONFIG_FIELD(v_dim), 1, TD_MAX_HEAD_DIM, 256},
    {"num_nextn_predict_layers", "num_mtp_layers", TD_CONFIG_FIELD(n_mtp_layers), 0, 64, 1},
};

static td_status read_rest(const td_config_reader *r) {
  td_status st = td_config_read_mla(r, 768);
  if (st == TD_OK) st = td_config_read_moe_layers(r, 1);
  if (st == TD_OK) st = td_config_read_scaling(r, "routed_scaling_factor", 1.8);
  return st == TD_OK ? td_config_check_groups(r) : st;
}

static const td_tensor_spec layer[] = {
    TD_NORM_PLACES,
    TD_MLA_PLACES,
    TD_DENSE_PLACES,
    TD_EXPERT_PLACES,
    TD_ROUTER_BIAS_PLACE("mlp.gate.e_score_correction_bias"),
    TD_SHARED_PLACES,
};

const td_family td_family_glm4_moe_lite = {
    .model_types = {"glm4_moe_lite"},
    .defaults = {.attn = TD_ATTN_MLA,
                 .rms_eps = 1e-5f,
                 .router_sigmoid = true,
                 .norm_topk = true,
                 .rope_interleaved = true,
                 .bos_id = 0,
                 .eos_ids = {1},
                 .n_eos = 1},
    .keys = keys,
    .n_keys = TD_COUNT(keys),
    .read = read_rest,
    .layer = layer,
    .n_layer = TD_COUNT(layer),
};
