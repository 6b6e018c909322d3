// src/model/families/deepseek_v3.c - DeepSeek V3, V3.1, R1; Kimi K2; Moonlight.
#include "model/families/family.h"

static const td_config_key keys[] = {
    {"vocab_size", NULL, TD_CONFIG_FIELD(n_vocab), 1, 1u << 24, 129280},
    {"hidden_size", NULL, TD_CONFIG_FIELD(dim), 1, TD_MAX_DIM, 7168},
    {"num_hidden_layers", NULL, TD_CONFIG_FIELD(n_layers), 1, TD_MAX_LAYERS, 61},
    {"num_attention_heads", NULL, TD_CONFIG_FIELD(n_heads), 1, TD_MAX_HEADS, 128},
    {"max_position_embeddings", NULL, TD_CONFIG_FIELD(max_position), 1, 1u << 30, 4096},
    {"intermediate_size", NULL, TD_CONFIG_FIELD(dense_dim), 1, TD_MAX_DIM, 18432},
    {"moe_intermediate_size", NULL, TD_CONFIG_FIELD(expert_dim), 1, TD_MAX_DIM, 2048},
    {"n_routed_experts", "num_local_experts", TD_CONFIG_FIELD(n_experts), 1, TD_MAX_EXPERTS, 256},
    {"num_experts_per_tok", NULL, TD_CONFIG_FIELD(top_k), 1, TD_MAX_EXPERTS, 8},
    {"n_shared_experts", NULL, TD_CONFIG_FIELD(n_shared_experts), 0, 256, 1},
    {"n_group", NULL, TD_CONFIG_FIELD(n_groups), 1, TD_MAX_EXPERTS, 8},
    {"topk_group", NULL, TD_CONFIG_FIELD(topk_groups), 1, TD_MAX_EXPERTS, 4},
    {"kv_lora_rank", NULL, TD_CONFIG_FIELD(kv_lora_rank), 1, TD_MAX_DIM, 512},
    {"qk_nope_head_dim", NULL, TD_CONFIG_FIELD(nope_dim), 1, TD_MAX_HEAD_DIM, 128},
    {"qk_rope_head_dim", NULL, TD_CONFIG_FIELD(rope_dim), 2, TD_MAX_HEAD_DIM, 64},
    {"v_head_dim", NULL, TD_CONFIG_FIELD(v_dim), 1, TD_MAX_HEAD_DIM, 128},
    {"num_nextn_predict_layers", "num_mtp_layers", TD_CONFIG_FIELD(n_mtp_layers), 0, 64, 1},
};

static td_status read_experts(const td_config_reader *r) {
  uint32_t every = 1;
  td_status st = td_config_uint(r, r->root, "moe_layer_freq", 1, TD_MAX_LAYERS, &every);
  if (st == TD_OK && every != 1) {
    st = td_fail(r->err, TD_EUNSUPPORTED, "%s: moe_layer_freq other than 1 is not supported",
                 r->file);
  }
  if (st == TD_OK) st = td_config_read_moe_layers(r, 3);
  if (st == TD_OK) st = td_config_read_scaling(r, "routed_scaling_factor", 2.5);
  if (st == TD_OK) st = td_config_expect_str(r, "scoring_func", "sigmoid");
  if (st == TD_OK) st = td_config_expect_str(r, "topk_method", "noaux_tc");
  return st == TD_OK ? td_config_check_groups(r) : st;
}

static td_status read_rest(const td_config_reader *r) {
  td_status st = td_config_read_mla(r, 1536);
  return st == TD_OK ? read_experts(r) : st;
}

static const td_tensor_spec layer[] = {
    TD_NORM_PLACES,
    TD_MLA_PLACES,
    TD_DENSE_PLACES,
    TD_EXPERT_PLACES,
    TD_ROUTER_BIAS_PLACE("mlp.gate.e_score_correction_bias"),
    TD_SHARED_PLACES,
};

const td_family td_family_deepseek_v3 = {
    .model_types = {"deepseek_v3", "kimi_k2"},
    .defaults = {.attn = TD_ATTN_MLA,
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
