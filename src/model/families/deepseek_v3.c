// src/model/families/deepseek_v3.c - DeepSeek V3, V3.1, R1; Kimi K2; Moonlight. Built as it are
// DeepSeek V3.2, with an indexer in every layer; GLM-4.7-Flash; and GLM-5, where layers may attend
// to the keys that an earlier one selected.
#include "model/families/family.h"

static const td_config_key keys[] = {
    TD_BODY_KEYS(129280, 7168, 61, 128, 4096),
    TD_MLA_KEYS(512, 128, 64, 128),
    TD_DENSE_KEY(18432),
    TD_ROUTED_KEYS(256, 8, 2048, 8, 4),
    TD_MTP_KEY,
};

static const td_config_key v32_keys[] = {
    TD_BODY_KEYS(129280, 7168, 61, 128, 163840),
    TD_MLA_KEYS(512, 128, 64, 128),
    TD_INDEX_KEYS(64, 128, 2048),
    TD_DENSE_KEY(18432),
    TD_ROUTED_KEYS(256, 8, 2048, 8, 4),
    TD_MTP_KEY,
};

static const td_config_key glm_flash_keys[] = {
    TD_BODY_KEYS(154880, 2048, 47, 20, 202752),
    TD_MLA_KEYS(512, 192, 64, 256),
    TD_DENSE_KEY(10240),
    TD_ROUTED_KEYS(64, 4, 1536, 1, 1),
    TD_MTP_KEY,
};

static const td_config_key glm5_keys[] = {
    TD_BODY_KEYS(154880, 6144, 78, 64, 202752),
    TD_MLA_KEYS(512, 192, 64, 256),
    TD_INDEX_KEYS(32, 128, 2048),
    TD_DENSE_KEY(12288),
    TD_ROUTED_KEYS(256, 8, 2048, 1, 1),
    TD_MTP_KEY,
};

static td_status read_deepseek(const td_config_reader *r) {
  uint32_t every = 1;
  td_status st = td_config_uint(r, r->root, "moe_layer_freq", 1, TD_MAX_LAYERS, &every);
  if (st == TD_OK && every != 1)
    st = td_config_fail(r, TD_EUNSUPPORTED, "moe_layer_freq other than 1 is not supported");
  if (st == TD_OK) st = td_config_expect_str(r, "scoring_func", "sigmoid");
  return st == TD_OK ? td_config_expect_str(r, "topk_method", "noaux_tc") : st;
}

static td_status read_glm5(const td_config_reader *r) {
  td_status st = td_config_read_index_layers(r);
  if (st == TD_OK && r->out->kind[0] != TD_ATTN_DSA)
    st = td_config_bad(r, "the first layer must have an indexer");
  return st;
}

static const td_tensor_spec layer[] = {
    TD_NORM_PLACES,
    TD_MLA_PLACES,
    TD_INDEX_PLACES,
    TD_ROUTED_PLACES,
};

#define DEFAULTS(kind, q_lora, factor)                                                             \
  .attn = TD_ATTN_##kind, .q_lora_rank = q_lora, .routed_scaling = factor, TD_ROUTED_DEFAULTS

const td_family td_family_deepseek_v3 = {
    .model_types = {"deepseek_v3", "kimi_k2"},
    .ignores = {"mlp_layer_types"},
    .n_dense = 3,
    .scaling = "routed_scaling_factor",
    .defaults = {DEFAULTS(MLA, 1536, 2.5f)},
    .read = read_deepseek,
    TD_FAMILY_PARTS,
};

const td_family td_family_deepseek_v32 = {
    .model_types = {"deepseek_v32"},
    .n_dense = 3,
    .scaling = "routed_scaling_factor",
    .defaults = {DEFAULTS(DSA, 1536, 2.5f)},
    .read = read_deepseek,
    TD_FAMILY_PARTS_OF(v32_keys),
};

const td_family td_family_glm4_moe_lite = {
    .model_types = {"glm4_moe_lite"},
    .ignores = {"first_k_dense_replace"},
    .n_dense = 1,
    .scaling = "routed_scaling_factor",
    .defaults = {DEFAULTS(MLA, 768, 1.8f), .rms_eps = 1e-5f},
    TD_FAMILY_PARTS_OF(glm_flash_keys),
};

const td_family td_family_glm_moe_dsa = {
    .model_types = {"glm_moe_dsa"},
    .n_dense = 3,
    .scaling = "routed_scaling_factor",
    .defaults = {DEFAULTS(DSA, 2048, 2.5f), .rms_eps = 1e-5f, .index_interleaved = true},
    .read = read_glm5,
    TD_FAMILY_PARTS_OF(glm5_keys),
};
