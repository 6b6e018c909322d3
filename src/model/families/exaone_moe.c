// src/model/families/exaone_moe.c - K-EXAONE: layers with a window, beside some without positions.
#include "model/families/family.h"

static const td_config_key keys[] = {
    TD_BODY_KEYS(102400, 4096, 32, 32, 2048),
    TD_GQA_KEY(32),
    TD_DENSE_KEY(16384),
    TD_KEY("moe_intermediate_size", NULL, expert_dim, 1, TD_MAX_DIM, 1024),
    TD_EXPERT_KEYS(64, 8),
    TD_KEY("num_shared_experts", NULL, n_shared_experts, 0, 256, 1),
    TD_KEY("n_group", NULL, n_groups, 1, TD_MAX_EXPERTS, 1),
    TD_KEY("topk_group", NULL, topk_groups, 1, TD_MAX_EXPERTS, 1),
};

static td_status read_rest(const td_config_reader *r) {
  td_model_config *c = r->out;
  uint32_t step = 4;
  td_status st = TD_OK;
  c->only_windows_rotate = !td_config_has_no_window(r);
  if (c->only_windows_rotate && !td_json_get(r->root, "layer_types"))
    st = td_config_uint(r, r->root, "sliding_window_pattern", 1, INT32_MAX, &step);
  for (uint32_t i = 0; i < c->n_layers && c->only_windows_rotate; i++)
    if ((i + 1) % step) td_layers_add(c->window_layers, i);
  return st == TD_OK ? td_config_read_windows(r, 4096) : st;
}

static const td_tensor_spec layer[] = {
    TD_NORM_PLACES,
    TD_GQA_PLACES,
    TD_QK_NORM_PLACES,
    TD_DENSE_PLACES,
    TD_EXPERT_PLACES,
    TD_RENAMED(F32, "mlp.e_score_correction_bias", router_bias, EXPERTS, ONE, TD_IF(MOE),
               "mlp.gate.e_score_correction_bias"),
    TD_SHARED_PLACES,
};

const td_family td_family_exaone_moe = {
    .model_types = {"exaone_moe"},
    .ignores = {"attention_bias"},
    .mtp = "mtp.",
    .n_dense = 1,
    .scaling = "routed_scaling_factor",
    .defaults = {.attn = TD_ATTN_GQA,
                 .routed_scaling = 2.5f,
                 .qk_norm = TD_QK_NORM_HEAD,
                 .rms_eps = 1e-5f,
                 .router_sigmoid = true,
                 .norm_topk = true,
                 TD_TOKEN_IDS(1, 53)},
    .read = read_rest,
    TD_FAMILY_PARTS,
};
