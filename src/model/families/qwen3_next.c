// src/model/families/qwen3_next.c - Qwen3-Next-80B-A3B, Qwen3-Coder-Next: three layers of four are
// gated delta nets, every fourth has gated attention.
#include "model/families/delta_net.h"

static const td_config_key keys[] = {
    TD_BODY_KEYS(151936, 2048, 48, 16, 32768),
    TD_GQA_KEY(2),
    TD_DENSE_KEY(5632),
    TD_KEY("moe_intermediate_size", NULL, expert_dim, 1, TD_MAX_DIM, 512),
    TD_KEY("shared_expert_intermediate_size", NULL, shared_dim, 1, TD_MAX_DIM, 512),
    TD_EXPERT_KEYS(512, 10),
    TD_DELTA_KEYS,
};

static const td_tensor_spec layer[] = {
    TD_GATED_PLACES,
    TD_DENSE_PLACES,
    TD_DELTA_PLACES,
    TD_MATRIX(WEIGHT, "linear_attn.in_proj_qkvz.weight", delta_qkv, DELTA_QKVZ, MODEL,
              TD_IF(DELTA)),
    TD_MATRIX(ROUTER, "linear_attn.in_proj_ba.weight", delta_b, DELTA_PAIRS, MODEL, TD_IF(DELTA)),
};

const td_family td_family_qwen3_next = {
    .model_types = {"qwen3_next"},
    .has_partial_rotary = true,
    .has_norm1 = true,
    .mtp = "mtp.",
    .has_mtp_apart = true,
    .expert_layers = TD_EXPERTS_STEP,
    .defaults = {TD_DELTA_DEFAULTS, .delta_grouped = true},
    .read = td_config_read_delta,
    TD_FAMILY_PARTS,
};
