// src/model/families/hy_v3.c - Hy3 (Tencent Hunyuan).
#include "model/families/family.h"

static const td_config_key keys[] = {
    TD_BODY_KEYS(120832, 4096, 80, 64, 131072),
    TD_GQA_KEY(8),
    TD_DENSE_KEY(13312),
    TD_KEY("moe_intermediate_size", "expert_hidden_dim", expert_dim, 1, TD_MAX_DIM, 1536),
    TD_EXPERT_KEYS(192, 8),
    TD_KEY("num_shared_experts", NULL, n_shared_experts, 0, 256, 1),
    TD_KEY("num_nextn_predict_layers", NULL, n_mtp_layers, 0, 64, 1),
};

static td_status read_rest(const td_config_reader *r) {
  bool norms = true, sigmoid = true;
  td_status st = td_config_bool(r, r->root, "qk_norm", &norms);
  if (st == TD_OK) st = td_config_bool(r, r->root, "moe_router_use_sigmoid", &sigmoid);
  if (st != TD_OK) return st;
  if (!norms) return td_config_bad(r, "qk_norm must be true");
  return sigmoid ? TD_OK : td_config_bad(r, "moe_router_use_sigmoid must be true");
}

static const td_tensor_spec layer[] = {
    TD_NORM_PLACES,
    TD_GQA_PLACES,
    TD_OUT_BIAS_PLACE,
    TD_QK_NORM_PLACES,
    TD_DENSE_PLACES,
    TD_RENAMED(ROUTER, "mlp.gate.weight", router, EXPERTS, MODEL, TD_IF(MOE),
               "mlp.router.gate.weight"),
    TD_RENAMED(F32, "mlp.e_score_correction_bias", router_bias, EXPERTS, ONE, TD_IF(MOE),
               "mlp.expert_bias"),
    TD_EACH_EXPERT_PLACES,
    TD_MLP_RENAMED("mlp.shared_experts", SHARED, TD_IF(MOE) | TD_IF(SHARED), "mlp.shared_mlp"),
};

const td_family td_family_hy_v3 = {
    .model_types = {"hy_v3"},
    .ignores = {"norm_topk_prob", "first_k_dense_replace"},
    .n_dense = 1,
    .scaling = "router_scaling_factor",
    .defaults = {.attn = TD_ATTN_GQA,
                 .head_dim = 128,
                 .routed_scaling = 2.826f,
                 .qk_norm = TD_QK_NORM_HEAD,
                 .rms_eps = 1e-5f,
                 .rope_theta = 11158840,
                 .router_sigmoid = true,
                 .norm_topk = true,
                 .bos_id = -1},
    .read = read_rest,
    TD_FAMILY_PARTS,
};
