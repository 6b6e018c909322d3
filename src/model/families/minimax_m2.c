// src/model/families/minimax_m2.c - MiniMax-M2, M2.1, M2.5: the queries of all heads are normed
// together, as are the keys.
#include "model/families/family.h"

static const td_config_key keys[] = {
    {"vocab_size", NULL, TD_CONFIG_FIELD(n_vocab), 1, 1u << 24, 200064},
    {"hidden_size", NULL, TD_CONFIG_FIELD(dim), 1, TD_MAX_DIM, 3072},
    {"num_hidden_layers", NULL, TD_CONFIG_FIELD(n_layers), 1, TD_MAX_LAYERS, 62},
    {"num_attention_heads", NULL, TD_CONFIG_FIELD(n_heads), 1, TD_MAX_HEADS, 48},
    {"num_key_value_heads", NULL, TD_CONFIG_FIELD(n_kv_heads), 1, TD_MAX_HEADS, 8},
    {"max_position_embeddings", NULL, TD_CONFIG_FIELD(max_position), 1, 1u << 30, 196608},
    {"intermediate_size", NULL, TD_CONFIG_FIELD(expert_dim), 1, TD_MAX_DIM, 1536},
    {"num_local_experts", "num_experts", TD_CONFIG_FIELD(n_experts), 1, TD_MAX_EXPERTS, 256},
    {"num_experts_per_tok", NULL, TD_CONFIG_FIELD(top_k), 1, TD_MAX_EXPERTS, 8},
    {"num_mtp_modules", NULL, TD_CONFIG_FIELD(n_mtp_layers), 0, 64, 0},
};

// rotary_dim is the older spelling of partial_rotary_factor.
static td_status read_rotary_dim(const td_config_reader *r) {
  td_model_config *c = r->out;
  uint32_t n = 0;
  td_status st = td_config_uint(r, r->root, "rotary_dim", 2, c->head_dim, &n);
  if (st == TD_OK && n && c->partial_rotary <= 0) c->partial_rotary = (double)n / c->head_dim;
  return st;
}

static td_status read_rest(const td_config_reader *r) {
  td_status st = td_config_read_head_dim(r, 128);
  if (st == TD_OK) st = read_rotary_dim(r);
  if (st == TD_OK) st = td_config_expect_str(r, "scoring_func", "sigmoid");
  if (st == TD_OK) st = td_config_expect_str(r, "qk_norm_type", "per_layer");
  for (uint32_t i = 0; i < r->out->n_layers; i++)
    td_config_set_moe(r->out, i);
  return st;
}

#define EXPERTS "block_sparse_moe"

static const td_tensor_spec layer[] = {
    TD_NORM_PLACES,
    TD_GQA_PLACES,
    TD_VECTOR("self_attn.q_norm.weight", q_norm, TD_DIM_Q, 0),
    TD_VECTOR("self_attn.k_norm.weight", k_norm, TD_DIM_KV, 0),
    TD_MATRIX(ROUTER, EXPERTS ".gate.weight", router, TD_DIM_EXPERTS, TD_DIM_MODEL, 0),
    TD_ROUTER_BIAS_PLACE(EXPERTS ".e_score_correction_bias"),
    TD_MATRIX(EXPERT, "w1.weight", gate, TD_DIM_EXPERT, TD_DIM_MODEL, 0),
    TD_MATRIX(EXPERT, "w3.weight", up, TD_DIM_EXPERT, TD_DIM_MODEL, 0),
    TD_MATRIX(EXPERT, "w2.weight", down, TD_DIM_MODEL, TD_DIM_EXPERT, 0),
};

const td_family td_family_minimax_m2 = {
    .model_types = {"minimax_m2"},
    .experts = EXPERTS ".experts",
    .has_partial_rotary = true,
    .defaults = {.attn = TD_ATTN_GQA,
                 .qk_norm = TD_QK_NORM_ALL,
                 .rope_theta = 5e6,
                 .router_sigmoid = true,
                 .norm_topk = true,
                 .routed_scaling = 1,
                 .n_groups = 1,
                 .topk_groups = 1,
                 .bos_id = 200034,
                 .eos_ids = {200020},
                 .n_eos = 1},
    .keys = keys,
    .n_keys = TD_COUNT(keys),
    .read = read_rest,
    .layer = layer,
    .n_layer = TD_COUNT(layer),
};
