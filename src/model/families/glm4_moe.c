// src/model/families/glm4_moe.c - GLM-4.5, 4.6, 4.7 and their Air variants; the language model of
// GLM-4.5V and 4.6V; Solar Open.
#include "model/families/family.h"

static const td_config_key keys[] = {
    TD_BODY_KEYS(151552, 4096, 46, 96, 131072), TD_GQA_KEY(8), TD_DENSE_KEY(10944),
    TD_ROUTED_KEYS(128, 8, 1408, 1, 1),         TD_MTP_KEY,
};

static const td_config_key vl_keys[] = {
    TD_BODY_KEYS(151424, 4096, 46, 96, 65536),
    TD_GQA_KEY(8),
    TD_DENSE_KEY(10944),
    TD_ROUTED_KEYS(128, 8, 1408, 1, 1),
    TD_KEY("num_nextn_predict_layers", NULL, n_mtp_layers, 0, 64, 0),
};

static const td_config_key solar_keys[] = {
    TD_BODY_KEYS(196608, 4096, 48, 64, 131072),
    TD_GQA_KEY(8),
    TD_ROUTED_KEYS(128, 8, 1280, 1, 1),
};

static td_status read_rest(const td_config_reader *r) {
  bool norms = false;
  const td_status st = td_config_bool(r, r->root, "use_qk_norm", &norms);
  if (norms) r->out->qk_norm = TD_QK_NORM_HEAD;
  return st;
}

static const td_tensor_spec layer[] = {
    TD_NORM_PLACES,
    TD_GQA_PLACES,
    TD_QK_NORM_PLACES,
    TD_ROUTED_PLACES,
};

const td_family td_family_glm4_moe = {
    .model_types = {"glm4_moe"},
    .ignores = {"mlp_layer_types"},
    .has_partial_rotary = true,
    .n_dense = 1,
    .scaling = "routed_scaling_factor",
    .defaults = {.attn = TD_ATTN_GQA,
                 .rms_eps = 1e-5f,
                 .partial_rotary = 0.5,
                 .router_sigmoid = true,
                 .norm_topk = true,
                 .bos_id = -1},
    .read = read_rest,
    TD_FAMILY_PARTS,
};

const td_family td_family_glm4v_moe = {
    .model_types = {"glm4v_moe_text"},
    .ignores = {"mlp_layer_types"},
    .has_partial_rotary = true,
    .n_dense = 1,
    .scaling = "routed_scaling_factor",
    .defaults = {.attn = TD_ATTN_GQA,
                 .attention_bias = true,
                 .rms_eps = 1e-5f,
                 .partial_rotary = 0.5,
                 .axes = {8, 12, 12},
                 .router_sigmoid = true,
                 .norm_topk = true,
                 .bos_id = -1},
    TD_FAMILY_PARTS_OF(vl_keys),
};

const td_family td_family_solar_open = {
    .model_types = {"solar_open"},
    .ignores = {"mlp_layer_types", "first_k_dense_replace"},
    .scaling = "routed_scaling_factor",
    .defaults = {.attn = TD_ATTN_GQA,
                 .head_dim = 128,
                 .rms_eps = 1e-5f,
                 .rope_theta = 1e6,
                 .router_sigmoid = true,
                 .norm_topk = true,
                 .bos_id = -1},
    TD_FAMILY_PARTS_OF(solar_keys),
};
