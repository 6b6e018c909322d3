// src/model/config_ignored.c - finds the keys of config.json that a family's reference does not
// have although other families obey them.
#include <string.h>

#include "model/families/family.h"

void td_config_add_ignored(const td_config_reader *r, const char *key) {
  const char **ignored = r->out->ignored;
  size_t n = 0;
  while (ignored[n])
    n++;
  if (n < TD_MAX_IGNORED) ignored[n] = key;
}

// What a key says, where it says the same as the family computes.
typedef enum {
  FLAG,   // bool at the field
  FACTOR, // float
  COUNT,  // uint32_t
  ONE,    // nothing, if it is 1
  DENSE,  // how many of the first layers have no experts
  NOTHING // nothing but if it is false, 0, null or empty
} key_kind;

static const struct {
  const char *key;
  key_kind kind;
  size_t offset; // in td_model_config
} optional_keys[] = {
    {"norm_topk_prob", FLAG, offsetof(td_model_config, norm_topk)},
    {"route_norm", FLAG, offsetof(td_model_config, norm_topk)},
    {"attention_bias", FLAG, offsetof(td_model_config, attention_bias)},
    {"rope_interleave", FLAG, offsetof(td_model_config, rope_interleaved)},
    {"routed_scaling_factor", FACTOR, offsetof(td_model_config, routed_scaling)},
    {"router_scaling_factor", FACTOR, offsetof(td_model_config, routed_scaling)},
    {"swiglu_limit", FACTOR, offsetof(td_model_config, swiglu_limit)},
    {"n_group", COUNT, offsetof(td_model_config, n_groups)},
    {"topk_group", COUNT, offsetof(td_model_config, topk_groups)},
    {"n_shared_experts", COUNT, offsetof(td_model_config, n_shared_experts)},
    {"num_shared_experts", COUNT, offsetof(td_model_config, n_shared_experts)},
    {"shared_expert_intermediate_size", COUNT, offsetof(td_model_config, shared_dim)},
    {"decoder_sparse_step", ONE, 0},
    {"first_k_dense_replace", DENSE, 0},
    {"mlp_only_layers", NOTHING, 0},
    {"use_sliding_window", NOTHING, 0},
    {"sliding_window", COUNT, offsetof(td_model_config, window)},
};

static bool is_nothing(const cJSON *value) {
  return cJSON_IsFalse(value) || (cJSON_IsNumber(value) && value->valuedouble == 0) ||
         ((cJSON_IsArray(value) || cJSON_IsObject(value)) && !value->child);
}

static bool agrees(const td_model_config *c, key_kind kind, size_t offset, const cJSON *value) {
  const void *field = (const char *)c + offset;
  const double number = cJSON_IsNumber(value) ? value->valuedouble : -1;
  switch (kind) {
  case FLAG: return cJSON_IsTrue(value) == *(const bool *)field;
  case FACTOR: return (float)number == *(const float *)field;
  case COUNT: return number == *(const uint32_t *)field;
  case ONE: return number == 1;
  case DENSE:
    for (uint32_t i = 0; i < c->n_layers; i++)
      if (td_model_is_moe(c, i) != (i >= number)) return false;
    return true;
  case NOTHING: return is_nothing(value);
  }
  return true;
}

// Whether the family reads a key that no field has as it is written.
static bool is_taken(const td_config_reader *r, const char *key) {
  const bool is_step = strcmp(key, "decoder_sparse_step") == 0 ||
                       strcmp(key, "mlp_only_layers") == 0;
  if (is_step) return r->out->family->expert_layers == TD_EXPERTS_STEP;
  // A window that is switched off.
  if (strcmp(key, "sliding_window") == 0)
    return cJSON_IsFalse(td_json_get(r->root, "use_sliding_window"));
  return strcmp(key, "use_sliding_window") == 0 && !td_json_get(r->root, "sliding_window");
}

// Whether the family has experts in the layers that mlp_layer_types lists.
static bool agrees_by_layer(const td_model_config *c, const cJSON *types) {
  uint32_t i = 0;
  for (const cJSON *type = types->child; type && i < c->n_layers; type = type->next, i++) {
    const bool is_sparse = cJSON_IsString(type) && strcmp(type->valuestring, "dense") != 0;
    if (is_sparse != td_model_is_moe(c, i)) return false;
  }
  return i == c->n_layers;
}

void td_config_find_ignored(const td_config_reader *r) {
  const td_model_config *c = r->out;
  const cJSON *types = td_json_get(r->root, "mlp_layer_types");
  if (types && !agrees_by_layer(c, types)) td_config_add_ignored(r, "mlp_layer_types");
  for (size_t i = 0; i < TD_COUNT(optional_keys); i++) {
    const char *key = optional_keys[i].key;
    const cJSON *value = td_json_get(r->root, key);
    if (!value || is_taken(r, key)) continue;
    if (!agrees(c, optional_keys[i].kind, optional_keys[i].offset, value))
      td_config_add_ignored(r, key);
  }
}
