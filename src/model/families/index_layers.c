// src/model/families/index_layers.c - which layers of GLM have an indexer, and which attend to what
// an earlier one selected.
#include <string.h>

#include "model/families/family.h"

static void set_index(td_model_config *c, uint32_t layer_idx, bool has_indexer) {
  if (c->kind[layer_idx] != TD_ATTN_KDA)
    c->kind[layer_idx] = (uint8_t)(has_indexer ? c->attn : TD_ATTN_DSA_SHARED);
}

// An entry for each layer: "full", with an indexer, or "shared".
static td_status read_index_types(const td_config_reader *r, const cJSON *types, const char *key) {
  td_model_config *c = r->out;
  uint32_t i = 0;
  for (const cJSON *type = types->child; type && i < c->n_layers; type = type->next, i++) {
    const char *name = cJSON_IsString(type) ? type->valuestring : "";
    const bool is_full = strcmp(name, "full") == 0;
    if (!is_full && strcmp(name, "shared") != 0)
      return td_config_fail(r, TD_EFORMAT, "%s must hold \"full\" or \"shared\"", key);
    set_index(c, i, is_full);
  }
  if (i == c->n_layers) return TD_OK;
  return td_config_fail(r, TD_EFORMAT, "%s must have an entry for each layer", key);
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

td_status td_config_read_index_layers(const td_config_reader *r) {
  const cJSON *types = td_json_get(r->root, "indexer_types");
  const cJSON *pattern = td_json_get(r->root, "index_topk_pattern");
  if (types) return read_index_types(r, types, "indexer_types");
  if (pattern && cJSON_IsString(pattern)) return read_index_letters(r, pattern->valuestring);
  return pattern ? read_index_types(r, pattern, "index_topk_pattern") : read_index_step(r);
}
