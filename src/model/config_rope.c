// src/model/config_rope.c - reads RoPE parameters and YaRN scaling.
#include <math.h>
#include <string.h>

#include "model/families/family.h"

// The object with RoPE parameters. As in transformers, a non-empty rope_scaling (older files) takes
// precedence over rope_parameters. NULL if there is none.
static td_status find_dict(const td_config_reader *r, const cJSON **out) {
  static const char *const keys[] = {"rope_scaling", "rope_parameters"};
  *out = NULL;
  for (size_t i = 0; i < TD_COUNT(keys); i++) {
    const cJSON *dict = td_json_get(r->root, keys[i]);
    if (!dict) continue;
    // Of pooled keys, the others' are plain (families/deepseek_v4.c); of layers with a window,
    // beside wide heads (families/gemma4.c).
    const char *const name = r->out->pool_theta > 0   ? "compress"
                             : r->out->wide_theta > 0 ? "sliding_attention"
                                                      : NULL;
    const cJSON *part = name ? td_json_get(dict, name) : NULL;
    if (part) dict = part;
    if (!cJSON_IsObject(dict))
      return td_config_fail(r, TD_EFORMAT, "%s must be an object", keys[i]);
    for (const cJSON *item = dict->child; item; item = item->next) {
      if (cJSON_IsObject(item)) {
        return td_config_fail(r, TD_EUNSUPPORTED,
                              "%s differs from layer to layer (%s), which is not supported",
                              keys[i], item->string);
      }
    }
    if (!dict->child) continue;
    *out = dict;
    return TD_OK;
  }
  return TD_OK;
}

// A parameter of YaRN; null selects its default.
static td_status optional(const td_config_reader *r, const cJSON *dict, const char *key, double min,
                          double max, double *out) {
  return td_json_get(dict, key) ? td_config_double(r, dict, key, min, max, out) : TD_OK;
}

static td_status read_yarn(const td_config_reader *r, const cJSON *dict) {
  td_model_config *c = r->out;
  td_yarn *y = &c->yarn;
  y->original_max_position = c->max_position;
  bool outside = td_json_get(r->root, "original_max_position_embeddings") != NULL;
  td_status st = td_config_uint(r, outside ? r->root : dict, "original_max_position_embeddings", 1,
                                1u << 30, &y->original_max_position);
  if (st != TD_OK) return st;
  c->query_span = y->original_max_position;
  double beta = 0;
  y->factor = fmax(1.0, (double)c->max_position / y->original_max_position);
  const struct {
    const char *key;
    double min, max, *out;
  } keys[] = {
      {"factor", 1, 1e6, &y->factor},
      {"beta_fast", 0, 1e6, &y->beta_fast},
      {"beta_slow", 0, 1e6, &y->beta_slow},
      {"mscale", 0, 1e3, &y->mscale},
      {"mscale_all_dim", 0, 1e3, &y->mscale_all_dim},
      {"attention_factor", 1e-6, 1e6, &y->attention_factor},
      {"llama_4_scaling_beta", 0, 1e3, &beta},
  };
  for (size_t i = 0; i < TD_COUNT(keys); i++) {
    st = optional(r, dict, keys[i].key, keys[i].min, keys[i].max, keys[i].out);
    if (st != TD_OK) return st;
  }
  if (beta > 0 && !c->family->defaults.query_span)
    td_config_add_ignored(r, "llama_4_scaling_beta");
  else
    c->query_beta = beta;
  if (y->beta_fast == 0) y->beta_fast = 32;
  if (y->beta_slow == 0) y->beta_slow = 1;
  bool truncated = true;
  st = td_config_bool(r, dict, "truncate", &truncated);
  y->untruncated = !truncated;
  // max_position_embeddings is published with or without the scaling applied.
  double scaled = y->factor * y->original_max_position;
  if (scaled > c->max_position) c->max_position = (uint32_t)fmin(scaled, 1u << 30);
  return st;
}

// Queries scale over original_max_position_embeddings, which only YaRN has.
static td_status check_default(const td_config_reader *r, const cJSON *dict) {
  double beta = 0;
  td_status st = dict ? optional(r, dict, "llama_4_scaling_beta", 0, 1e3, &beta) : TD_OK;
  if (st != TD_OK || beta == 0) return st;
  if (r->out->family->defaults.query_span) {
    return td_config_fail(r, TD_EUNSUPPORTED,
                          "llama_4_scaling_beta %g is supported with RoPE type \"yarn\" only",
                          beta);
  }
  td_config_add_ignored(r, "llama_4_scaling_beta");
  return TD_OK;
}

// How pairs are shared among axes, in families whose positions have some.
static td_status read_axes(const td_config_reader *r, const cJSON *list) {
  uint32_t *axes = r->out->axes;
  int n = 0;
  if (!axes[0] || !list) return TD_OK;
  for (const cJSON *item = cJSON_IsArray(list) ? list->child : NULL; item; item = item->next) {
    int64_t value;
    if (n == 3 || !td_json_whole(item, n ? 0 : 1, TD_MAX_HEAD_DIM, &value))
      return td_config_bad(r, "mrope_section must hold three numbers of pairs");
    axes[n++] = (uint32_t)value;
  }
  return n == 3 ? TD_OK : td_config_bad(r, "mrope_section must hold three numbers of pairs");
}

td_status td_config_read_rope(const td_config_reader *r) {
  td_model_config *c = r->out;
  if (c->rope_theta <= 0) c->rope_theta = 10000;
  if (c->has_no_rope) { // whatever config.json says of positions
    c->yarn = (td_yarn){.factor = 1, .beta_fast = 32, .beta_slow = 1};
    return TD_OK;
  }
  const cJSON *dict;
  td_status st = find_dict(r, &dict);
  // A family's default counts only where the file says nothing, as in transformers.
  if (dict || c->yarn.factor <= 0) {
    c->yarn = (td_yarn){.factor = 1, .beta_fast = 32, .beta_slow = 1};
    c->query_beta = 0;
    c->query_span = 0;
  }
  const char *type = "default";
  const cJSON *places[] = {r->root, dict}; // the last one found takes precedence
  for (size_t i = 0; i < TD_COUNT(places) && st == TD_OK; i++) {
    if (!places[i]) continue;
    st = optional(r, places[i], "rope_theta", 1.0001, 1e15, &c->rope_theta);
    if (st == TD_OK) st = optional(r, places[i], "partial_rotary_factor", 0, 1, &c->partial_rotary);
  }
  if (st == TD_OK && dict) st = read_axes(r, td_json_get(dict, "mrope_section"));
  if (st == TD_OK && dict) st = td_config_str(r, dict, "type", &type);
  if (st == TD_OK && dict) st = td_config_str(r, dict, "rope_type", &type);
  if (st != TD_OK) return st;
  if (strcmp(type, "yarn") == 0) return read_yarn(r, dict);
  if (strcmp(type, "default") == 0) return check_default(r, dict);
  return td_config_fail(r, TD_EUNSUPPORTED,
                        "RoPE type \"%.40s\" is not supported; supported are default and yarn",
                        type);
}
