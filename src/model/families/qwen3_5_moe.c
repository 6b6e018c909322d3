// src/model/families/qwen3_5_moe.c - the language models of Qwen3.5 and Qwen3.6 with experts: as
// Qwen3-Next, with separate input projections of the delta nets.
#include "model/families/delta_net.h"

static const td_config_key keys[] = {
    TD_BODY_KEYS(248320, 2048, 40, 16, 32768),
    TD_GQA_KEY(2),
    TD_KEY("moe_intermediate_size", NULL, expert_dim, 1, TD_MAX_DIM, 512),
    TD_KEY("shared_expert_intermediate_size", NULL, shared_dim, 1, TD_MAX_DIM, 512),
    TD_EXPERT_KEYS(256, 8),
    TD_DELTA_KEYS,
};

static td_status read_rest(const td_config_reader *r) {
  const td_status st = td_config_bool(r, r->root, "linear_tiled_heads", &r->out->delta_tiled);
  return st == TD_OK ? td_config_read_delta(r) : st;
}

static const td_tensor_spec layer[] = {
    TD_GATED_PLACES,
    TD_DELTA_PLACES,
    TD_DELTA_INPUT_PLACES,
};

const td_family td_family_qwen3_5_moe = {
    .model_types = {"qwen3_5_moe_text"},
    .ignores = {"norm_topk_prob"},
    .has_partial_rotary = true,
    .has_norm1 = true,
    .mtp = "mtp.",
    .has_mtp_apart = true,
    .expert_layers = TD_EXPERTS_ALL,
    .defaults = {TD_DELTA_DEFAULTS, .axes = {11, 11, 10}, .axes_interleaved = true},
    .read = read_rest,
    TD_FAMILY_PARTS,
};
