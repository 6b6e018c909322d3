// src/model/families/minimax_m2.c - MiniMax-M2, M2.1, M2.5: the queries of all heads are normed
// together, as are the keys.
#include "model/families/family.h"

static const td_config_key keys[] = {
    TD_BODY_KEYS(200064, 3072, 62, 48, 196608),
    TD_GQA_KEY(8),
    TD_KEY("intermediate_size", NULL, expert_dim, 1, TD_MAX_DIM, 1536),
    TD_KEY("num_local_experts", "num_experts", n_experts, 1, TD_MAX_EXPERTS, 256),
    TD_KEY("num_experts_per_tok", NULL, top_k, 1, TD_MAX_EXPERTS, 8),
    TD_KEY("num_mtp_modules", NULL, n_mtp_layers, 0, 64, 0),
};

static td_status read_rest(const td_config_reader *r) {
  td_model_config *c = r->out;
  uint32_t n = 0;
  // the older spelling of partial_rotary_factor
  td_status st = td_config_uint(r, r->root, "rotary_dim", 2, c->head_dim, &n);
  if (st == TD_OK && n && c->partial_rotary <= 0) c->partial_rotary = (double)n / c->head_dim;
  if (st == TD_OK) st = td_config_expect_str(r, "scoring_func", "sigmoid");
  return st == TD_OK ? td_config_expect_str(r, "qk_norm_type", "per_layer") : st;
}

#define BLOCK "block_sparse_moe"

static const td_tensor_spec layer[] = {
    TD_NORM_PLACES,
    TD_GQA_PLACES,
    TD_VECTOR("self_attn.q_norm.weight", q_norm, Q, 0),
    TD_VECTOR("self_attn.k_norm.weight", k_norm, KV, 0),
    TD_RENAMED(ROUTER, BLOCK ".gate.weight", router, EXPERTS, MODEL, 0, "mlp.gate.weight"),
    TD_RENAMED(F32, BLOCK ".e_score_correction_bias", router_bias, EXPERTS, ONE, 0,
               "mlp.e_score_correction_bias"),
    TD_W_EXPERT_PLACES(0),
};

const td_family td_family_minimax_m2 = {
    .model_types = {"minimax_m2"},
    .ignores = {"norm_topk_prob", "attention_bias"},
    .experts = BLOCK ".experts",
    .has_partial_rotary = true,
    .expert_layers = TD_EXPERTS_ALL,
    .defaults = {.attn = TD_ATTN_GQA,
                 .head_dim = 128,
                 .qk_norm = TD_QK_NORM_ALL,
                 .rope_theta = 5e6,
                 .router_sigmoid = true,
                 .norm_topk = true,
                 TD_TOKEN_IDS(200034, 200020)},
    .read = read_rest,
    TD_FAMILY_PARTS,
};
