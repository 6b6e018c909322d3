// src/model/families/glm_moe_dsa.c - GLM-5: layers may attend to the keys that an earlier one
// selected.
#include "model/families/family.h"

static const td_config_key keys[] = {
    TD_BODY_KEYS(154880, 6144, 78, 64, 202752),
    TD_MLA_KEYS(512, 192, 64, 256),
    TD_INDEX_KEYS(32, 128, 2048),
    TD_DENSE_KEY(12288),
    TD_ROUTED_KEYS(256, 8, 2048, 1, 1),
    TD_MTP_KEY,
};

static td_status read_rest(const td_config_reader *r) {
  td_status st = td_config_read_dsa(r, 2048);
  if (st == TD_OK) st = td_config_read_index_layers(r);
  if (st == TD_OK && r->out->kind[0] != TD_ATTN_DSA)
    st = td_config_bad(r, "the first layer must have an indexer");
  if (st == TD_OK) st = td_config_read_moe_layers(r, 3);
  if (st == TD_OK) st = td_config_read_scaling(r, "routed_scaling_factor", 2.5);
  return st == TD_OK ? td_config_check_groups(r) : st;
}

static const td_tensor_spec layer[] = {
    TD_NORM_PLACES,
    TD_MLA_PLACES,
    TD_INDEX_PLACES,
    TD_ROUTED_PLACES,
};

const td_family td_family_glm_moe_dsa = {
    .model_types = {"glm_moe_dsa"},
    .defaults = {.attn = TD_ATTN_DSA,
                 .rms_eps = 1e-5f,
                 TD_ROUTED_DEFAULTS,
                 .index_interleaved = true},
    TD_FAMILY_PARTS,
};
