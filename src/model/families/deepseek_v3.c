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
  td_model_config *c = r->out;
  uint32_t n_dense = 3, every = 1;
  double scaling = 2.5;
  td_status st = td_config_uint(r, r->root, "first_k_dense_replace", 0, INT32_MAX, &n_dense);
  if (st == TD_OK) st = td_config_uint(r, r->root, "moe_layer_freq", 1, TD_MAX_LAYERS, &every);
  if (st == TD_OK && every != 1) {
    st = td_fail(r->err, TD_EUNSUPPORTED, "%s: moe_layer_freq other than 1 is not supported",
                 r->file);
  }
  if (st == TD_OK) {
    st = td_config_double(r, r->root, "routed_scaling_factor", 1e-6, 1e6, &scaling);
  }
  if (st == TD_OK) st = td_config_expect_str(r, "scoring_func", "sigmoid");
  if (st == TD_OK) st = td_config_expect_str(r, "topk_method", "noaux_tc");
  if (st != TD_OK) return st;
  c->routed_scaling = (float)scaling;
  for (uint32_t i = n_dense; i < c->n_layers; i++)
    td_config_set_moe(c, i);
  return td_config_check_groups(r);
}

static td_status read_rest(const td_config_reader *r) {
  td_model_config *c = r->out;
  td_status st = TD_OK;
  // null means that q_proj is a single matrix.
  c->q_lora_rank = 1536;
  if (cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(r->root, "q_lora_rank"))) {
    c->q_lora_rank = 0;
  } else {
    st = td_config_uint(r, r->root, "q_lora_rank", 1, TD_MAX_DIM, &c->q_lora_rank);
  }
  if (st == TD_OK) st = td_config_bool(r, r->root, "rope_interleave", &c->rope_interleaved);
  if (st == TD_OK) st = read_experts(r);
  if (st == TD_OK && c->rope_dim % 2) st = td_config_bad(r, "qk_rope_head_dim must be even");
  return st;
}

static const td_tensor_spec layer[] = {
    TD_NORM_PLACES,
    TD_MATRIX(WEIGHT, "self_attn.q_proj.weight", q, TD_DIM_Q, TD_DIM_MODEL, TD_IF_Q_WHOLE),
    TD_MATRIX(WEIGHT, "self_attn.o_proj.weight", o, TD_DIM_MODEL, TD_DIM_OUT, 0),
    TD_VECTOR("self_attn.o_proj.bias", o_bias, TD_DIM_MODEL, TD_IF_BIAS),
    TD_MATRIX(WEIGHT, "self_attn.q_a_proj.weight", q_a, TD_DIM_Q_LORA, TD_DIM_MODEL, TD_IF_Q_LORA),
    TD_VECTOR("self_attn.q_a_proj.bias", q_a_bias, TD_DIM_Q_LORA, TD_IF_Q_LORA | TD_IF_BIAS),
    TD_VECTOR("self_attn.q_a_layernorm.weight", q_a_norm, TD_DIM_Q_LORA, TD_IF_Q_LORA),
    TD_MATRIX(WEIGHT, "self_attn.q_b_proj.weight", q_b, TD_DIM_Q, TD_DIM_Q_LORA, TD_IF_Q_LORA),
    TD_MATRIX(LATENT, "self_attn.kv_a_proj_with_mqa.weight", kv_a, TD_DIM_KV_A, TD_DIM_MODEL, 0),
    TD_VECTOR("self_attn.kv_a_proj_with_mqa.bias", kv_a_bias, TD_DIM_KV_A, TD_IF_BIAS),
    TD_VECTOR("self_attn.kv_a_layernorm.weight", kv_a_norm, TD_DIM_KV_LORA, 0),
    TD_MATRIX(LATENT, "self_attn.kv_b_proj.weight", kv_b, TD_DIM_KV_B, TD_DIM_KV_LORA, 0),
    TD_DENSE_PLACES,
    TD_EXPERT_PLACES,
    TD_MATRIX(F32, "mlp.gate.e_score_correction_bias", router_bias, TD_DIM_EXPERTS, TD_DIM_ONE,
              TD_IF_MOE),
    TD_MATRIX(WEIGHT, "mlp.shared_experts.gate_proj.weight", mlp_gate, TD_DIM_SHARED, TD_DIM_MODEL,
              TD_IF_MOE | TD_IF_SHARED),
    TD_MATRIX(WEIGHT, "mlp.shared_experts.up_proj.weight", mlp_up, TD_DIM_SHARED, TD_DIM_MODEL,
              TD_IF_MOE | TD_IF_SHARED),
    TD_MATRIX(WEIGHT, "mlp.shared_experts.down_proj.weight", mlp_down, TD_DIM_MODEL, TD_DIM_SHARED,
              TD_IF_MOE | TD_IF_SHARED),
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
