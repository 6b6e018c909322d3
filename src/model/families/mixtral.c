// src/model/families/mixtral.c - Mixtral-8x7B, 8x22B.
#include "model/families/family.h"

static const td_config_key keys[] = {
    TD_BODY_KEYS(32000, 4096, 32, 32, 131072),
    TD_GQA_KEY(8),
    TD_KEY("intermediate_size", NULL, expert_dim, 1, TD_MAX_DIM, 14336),
    TD_KEY("num_local_experts", "num_experts", n_experts, 1, TD_MAX_EXPERTS, 8),
    TD_KEY("num_experts_per_tok", NULL, top_k, 1, TD_MAX_EXPERTS, 2),
};

static td_status read_rest(const td_config_reader *r) {
  if (td_json_get(r->root, "sliding_window"))
    return td_config_fail(r, TD_EUNSUPPORTED, "sliding_window is not supported");
  return td_config_bool(r, r->root, "rope_interleave", &r->out->rope_interleaved);
}

static const td_tensor_spec layer[] = {
    TD_NORM_PLACES,
    TD_GQA_PLACES,
    TD_RENAMED(ROUTER, "block_sparse_moe.gate.weight", router, EXPERTS, MODEL, 0,
               "mlp.gate.weight"),
    TD_W_EXPERT_PLACES(0),
};

const td_family td_family_mixtral = {
    .model_types = {"mixtral"},
    .experts = "block_sparse_moe.experts",
    .ignores = {"norm_topk_prob", "attention_bias"},
    .expert_layers = TD_EXPERTS_ALL,
    .defaults = {.attn = TD_ATTN_GQA,
                 .rms_eps = 1e-5f,
                 .rope_theta = 1e6,
                 .norm_topk = true,
                 TD_TOKEN_IDS(1, 2)},
    .read = read_rest,
    TD_FAMILY_PARTS,
};
