// src/model/families/glm4_moe_lite.c - GLM-4.7-Flash.
#include "model/families/family.h"

static const td_config_key keys[] = {
    TD_BODY_KEYS(154880, 2048, 47, 20, 202752),
    TD_MLA_KEYS(512, 192, 64, 256),
    TD_DENSE_KEY(10240),
    TD_ROUTED_KEYS(64, 4, 1536, 1, 1),
    TD_MTP_KEY,
};

static td_status read_rest(const td_config_reader *r) {
  td_status st = td_config_read_mla(r, 768);
  if (st == TD_OK) st = td_config_read_moe_layers(r, 1);
  if (st == TD_OK) st = td_config_read_scaling(r, "routed_scaling_factor", 1.8);
  return st == TD_OK ? td_config_check_groups(r) : st;
}

static const td_tensor_spec layer[] = {
    TD_NORM_PLACES,
    TD_MLA_PLACES,
    TD_ROUTED_PLACES,
};

const td_family td_family_glm4_moe_lite = {
    .model_types = {"glm4_moe_lite"},
    .ignores = {"first_k_dense_replace"},
    .defaults = {.attn = TD_ATTN_MLA, .rms_eps = 1e-5f, TD_ROUTED_DEFAULTS},
    TD_FAMILY_PARTS,
};
