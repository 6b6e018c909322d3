// src/model/families/glm4_moe.c - GLM-4.5, 4.6, 4.7 and their Air variants.
#include "model/families/family.h"

static const td_config_key keys[] = {
    {"vocab_size", NULL, TD_CONFIG_FIELD(n_vocab), 1, 1u << 24, 151552},
    {"hidden_size", NULL, TD_CONFIG_FIELD(dim), 1, TD_MAX_DIM, 4096},
    {"num_hidden_layers", NULL, TD_CONFIG_FIELD(n_layers), 1, TD_MAX_LAYERS, 46},
    {"num_attention_heads", NULL, TD_CONFIG_FIELD(n_heads), 1, TD_MAX_HEADS, 96},
    {"num_key_value_heads", NULL, TD_CONFIG_FIELD(n_kv_heads), 1, TD_MAX_HEADS, 8},
    {"max_position_embeddings", NULL, TD_CONFIG_FIELD(max_position), 1, 1u << 30, 131072},
    {"intermediate_size", NULL, TD_CONFIG_FIELD(dense_dim), 1, TD_MAX_DIM, 10944},
    {"moe_intermediate_size", NULL, TD_CONFIG_FIELD(expert_dim), 1, TD_MAX_DIM, 1408},
    {"n_routed_experts", "num_local_experts", TD_CONFIG_FIELD(n_experts), 1, TD_MAX_EXPERTS, 128},
    {"num_experts_per_tok", NULL, TD_CONFIG_FIELD(top_k), 1, TD_MAX_EXPERTS, 8},
    {"n_shared_experts", NULL, TD_CONFIG_FIELD(n_shared_experts), 0, 256, 1},
    {"n_group", NULL, TD_CONFIG_FIELD(n_groups), 1, TD_MAX_EXPERTS, 1},
    {"topk_group", NULL, TD_CONFIG_FIELD(topk_groups), 1, TD_MAX_EXPERTS, 1},
    {"num_nextn_predict_layers", "num_mtp_layers", TD_CONFIG_FIELD(n_mtp_layers), 0, 64, 1},
};

static td_status read_rest(const td_config_reader *r) {
  td_model_config *c = r->out;
  bool norms = false;
  td_status st = td_config_read_head_dim(r, c->dim / c->n_heads);
  if (st == TD_OK) st = td_config_bool(r, r->root, "use_qk_norm", &norms);
  if (norms) c->qk_norm = TD_QK_NORM_HEAD;
  if (st == TD_OK) st = td_config_read_moe_layers(r, 1);
  if (st == TD_OK) st = td_config_read_scaling(r, "routed_scaling_factor", 1);
  return st == TD_OK ? td_config_check_groups(r) : st;
}

static const td_tensor_spec layer[] = {
    TD_NORM_PLACES,   TD_GQA_PLACES,    TD_QK_NORM_PLACES,
    TD_DENSE_PLACES,  TD_EXPERT_PLACES, TD_ROUTER_BIAS_PLACE("mlp.gate.e_score_correction_bias"),
    TD_SHARED_PLACES,
};

const td_family td_family_glm4_moe = {
    .model_types = {"glm4_moe"},
    .has_partial_rotary = true,
    .defaults = {.attn = TD_ATTN_GQA,
                 .rms_eps = 1e-5f,
                 .partial_rotary = 0.5,
                 .router_sigmoid = true,
                 .norm_topk = true,
                 .bos_id = -1},
    .keys = keys,
    .n_keys = TD_COUNT(keys),
    .read = read_rest,
    .layer = layer,
    .n_layer = TD_COUNT(layer),
};
