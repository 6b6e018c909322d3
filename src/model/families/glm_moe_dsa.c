// src/model/families/glm_moe_dsa.c - GLM-5: layers may attend to the keys that an earlier one
// selected.
#include <string.h>

#include "model/families/family.h"

static const td_config_key keys[] = {
    TD_BODY_KEYS(154880, 6144, 78, 64, 202752),
    TD_MLA_KEYS(512, 192, 64, 256),
    TD_INDEX_KEYS(32, 128, 2048),
    TD_DENSE_KEY(12288),
    TD_ROUTED_KEYS(256, 8, 2048, 1, 1),
    TD_MTP_KEY,
};

static void set_index(td_model_config *c, uint32_t layer_idx, bool has_indexer) {
  const uint64_t bit = (uint64_t)1 << layer_idx % 64;
  c->index_layers[layer_idx / 64] &= ~bit;
  if (has_indexer) c->index_layers[layer_idx / 64] |= bit;
}

// An entry for each layer: "full", with an indexer, or "shared".
static td_status read_index_types(const td_config_reader *r, const cJSON *types, const char *key) {
  td_model_config *c = r->out;
  uint32_t i = 0;
  for (const cJSON *type = types->child; type && i < c->n_layers; type = type->next, i++) {
    const char *name = cJSON_IsString(type) ? type->valuestring : "";
    const bool is_full = strcmp(name, "full") == 0;
    if (!is_full && strcmp(name, "shared") != 0) {
      return td_fail(r->err, TD_EFORMAT, "%s: %s must hold \"full\" or \"shared\"", r->file, key);
    }
    set_index(c, i, is_full);
  }
  if (i == c->n_layers) return TD_OK;
  return td_fail(r->err, TD_EFORMAT, "%s: %s must have an entry for each layer", r->file, key);
}

// A letter for each layer: F or S.
static td_status read_index_letters(const td_config_reader *r, const char *letters) {
  td_model_config *c = r->out;
  if (strlen(letters) < c->n_layers)
    return td_config_bad(r, "index_topk_pattern must have a letter for each layer");
  for (uint32_t i = 0; i < c->n_layers; i++) {
    if (letters[i] != 'F' && letters[i] != 'S')
      return td_config_bad(r, "index_topk_pattern must hold F and S");
    set_index(c, i, letters[i] == 'F');
  }
  return TD_OK;
}

// Every index_topk_freq-th layer from index_skip_topk_offset - 1 on has an indexer, as have those
// before.
static td_status read_index_step(const td_config_reader *r) {
  td_model_config *c = r->out;
  uint32_t step = 1, offset = 2;
  td_status st = td_config_uint(r, r->root, "index_topk_freq", 0, INT32_MAX, &step);
  if (st == TD_OK) st = td_config_uint(r, r->root, "index_skip_topk_offset", 0, INT32_MAX, &offset);
  for (uint32_t i = 0; i < c->n_layers && st == TD_OK; i++) {
    const uint32_t n = i + 1 > offset ? i + 1 - offset : 0;
    set_index(c, i, n % (step ? step : 1) == 0);
  }
  return st;
}

static td_status read_index_layers(const td_config_reader *r) {
  const cJSON *types = td_json_get(r->root, "indexer_types");
  const cJSON *pattern = td_json_get(r->root, "index_topk_pattern");
  td_status st;
  if (types) {
    st = read_index_types(r, types, "indexer_types");
  } else if (pattern && cJSON_IsString(pattern)) {
    st = read_index_letters(r, pattern->valuestring);
  } else if (pattern) {
    st = read_index_types(r, pattern, "index_topk_pattern");
  } else {
    st = read_index_step(r);
  }
  if (st == TD_OK && !(r->out->index_layers[0] & 1))
    st = td_config_bad(r, "the first layer must have an indexer");
  return st;
}

static td_status read_rest(const td_config_reader *r) {
  td_status st = td_config_read_dsa(r, 2048);
  if (st == TD_OK) st = read_index_layers(r);
  if (st == TD_OK) st = td_config_read_moe_layers(r, 3);
  if (st == TD_OK) st = td_config_read_scaling(r, "routed_scaling_factor", 2.5);
  return st == TD_OK ? td_config_check_groups(r) : st;
}

static const td_tensor_spec layer[] = {
    TD_NORM_PLACES,   TD_MLA_PLACES,    TD_INDEX_PLACES,
    TD_DENSE_PLACES,  TD_EXPERT_PLACES, TD_ROUTER_BIAS_PLACE("mlp.gate.e_score_correction_bias"),
    TD_SHARED_PLACES,
};

const td_family td_family_glm_moe_dsa = {
    .model_types = {"glm_moe_dsa"},
    .defaults = {.attn = TD_ATTN_DSA,
                 .rms_eps = 1e-5f,
                 .router_sigmoid = true,
                 .norm_topk = true,
                 .rope_interleaved = true,
                 .index_interleaved = true,
                 .bos_id = 0,
                 .eos_ids = {1},
                 .n_eos = 1},
    TD_FAMILY_PARTS,
};
