// src/model/families/olmoe.c - OLMoE-1B-7B: the queries of all heads are normed together, as are
// the keys.
#include "model/families/family.h"

static const td_config_key keys[] = {
    TD_BODY_KEYS(50304, 2048, 16, 16, 4096),
    TD_GQA_KEY(16),
    TD_KEY("intermediate_size", NULL, expert_dim, 1, TD_MAX_DIM, 2048),
    TD_EXPERT_KEYS(64, 8),
};

static td_status read_rest(const td_config_reader *r) {
  if (!td_json_get(r->root, "clip_qkv")) return TD_OK;
  return td_config_fail(r, TD_EUNSUPPORTED, "clip_qkv is not supported");
}

static const td_tensor_spec layer[] = {
    TD_NORM_PLACES,
    TD_GQA_PLACES,
    TD_OUT_BIAS_PLACE,
    TD_VECTOR("self_attn.q_norm.weight", q_norm, Q, 0),
    TD_VECTOR("self_attn.k_norm.weight", k_norm, KV, 0),
    TD_EXPERT_PLACES,
};

const td_family td_family_olmoe = {
    .model_types = {"olmoe"},
    .ignores = {"mlp_layer_types", "first_k_dense_replace"},
    .defaults = {.attn = TD_ATTN_GQA,
                 .qk_norm = TD_QK_NORM_ALL,
                 .rms_eps = 1e-5f,
                 TD_TOKEN_IDS(-1, 50279)},
    .read = read_rest,
    TD_FAMILY_PARTS,
};
