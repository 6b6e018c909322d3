// src/model/families/deepseek_v3.c - DeepSeek V3, V3.1, R1; Kimi K2; Moonlight.
#include "model/families/family.h"

static const td_config_key keys[] = {
    TD_BODY_KEYS(129280, 7168, 61, 128, 4096),
    TD_MLA_KEYS(512, 128, 64, 128),
    TD_DENSE_KEY(18432),
    TD_ROUTED_KEYS(256, 8, 2048, 8, 4),
    TD_MTP_KEY,
};

static td_status read_rest(const td_config_reader *r) {
  td_status st = td_config_read_mla(r, 1536);
  return st == TD_OK ? td_config_read_deepseek_experts(r) : st;
}

static const td_tensor_spec layer[] = {
    TD_NORM_PLACES,
    TD_MLA_PLACES,
    TD_ROUTED_PLACES,
};

const td_family td_family_deepseek_v3 = {
    .model_types = {"deepseek_v3", "kimi_k2"},
    .ignores = {"mlp_layer_types"},
    .defaults = {.attn = TD_ATTN_MLA, TD_ROUTED_DEFAULTS},
    TD_FAMILY_PARTS,
};
