// src/model/families/gpt_oss.c - gpt-oss-20b and 120b: attention with sinks, a window in every
// second layer, biases everywhere, experts in MXFP4 with a clamped activation.
#include <string.h>

#include "model/families/family.h"

static const td_config_key keys[] = {
    {"vocab_size", NULL, TD_CONFIG_FIELD(n_vocab), 1, 1u << 24, 201088},
    {"hidden_size", NULL, TD_CONFIG_FIELD(dim), 1, TD_MAX_DIM, 2880},
    {"num_hidden_layers", NULL, TD_CONFIG_FIELD(n_layers), 1, TD_MAX_LAYERS, 36},
    {"num_attention_heads", NULL, TD_CONFIG_FIELD(n_heads), 1, TD_MAX_HEADS, 64},
    {"num_key_value_heads", NULL, TD_CONFIG_FIELD(n_kv_heads), 1, TD_MAX_HEADS, 8},
    {"max_position_embeddings", NULL, TD_CONFIG_FIELD(max_position), 1, 1u << 30, 131072},
    {"intermediate_size", NULL, TD_CONFIG_FIELD(expert_dim), 1, TD_MAX_DIM, 2880},
    {"num_local_experts", "num_experts", TD_CONFIG_FIELD(n_experts), 1, TD_MAX_EXPERTS, 128},
    {"num_experts_per_tok", NULL, TD_CONFIG_FIELD(top_k), 1, TD_MAX_EXPERTS, 4},
    {"sliding_window", NULL, TD_CONFIG_FIELD(window), 1, 1u << 30, 128},
};

static void set_window(td_model_config *c, uint32_t layer_idx) {
  c->window_layers[layer_idx / 64] |= (uint64_t)1 << layer_idx % 64;
}

// layer_types; without it every second layer, from the first on, has a window.
static td_status read_windows(const td_config_reader *r) {
  td_model_config *c = r->out;
  const cJSON *types = td_json_get(r->root, "layer_types");
  for (uint32_t i = 0; !types && i < c->n_layers; i += 2)
    set_window(c, i);
  if (!types) return TD_OK;
  if (!cJSON_IsArray(types) || (uint32_t)cJSON_GetArraySize(types) != c->n_layers) {
    return td_config_bad(r, "layer_types must be an array with an entry for each layer");
  }
  uint32_t i = 0;
  for (const cJSON *type = types->child; type; type = type->next, i++) {
    const char *name = cJSON_IsString(type) ? type->valuestring : "";
    if (strcmp(name, "sliding_attention") == 0) {
      set_window(c, i);
    } else if (strcmp(name, "full_attention") != 0) {
      return td_config_bad(r, "layer_types must hold \"sliding_attention\" or "
                              "\"full_attention\"");
    }
  }
  return TD_OK;
}

static td_status read_rest(const td_config_reader *r) {
  td_model_config *c = r->out;
  double limit = 7, alpha = 1.702;
  td_status st = td_config_read_head_dim(r, 64);
  if (st == TD_OK) st = read_windows(r);
  if (st == TD_OK) st = td_config_double(r, r->root, "swiglu_limit", 1e-6, 1e6, &limit);
  if (st == TD_OK) st = td_config_double(r, r->root, "swiglu_alpha", 1e-6, 1e6, &alpha);
  c->swiglu_limit = (float)limit;
  c->swiglu_alpha = (float)alpha;
  for (uint32_t i = 0; i < c->n_layers; i++)
    td_config_set_moe(c, i);
  return st;
}

static const td_tensor_spec layer[] = {
    TD_NORM_PLACES,
    TD_GQA_PLACES,
    TD_OUT_BIAS_PLACE,
    TD_MATRIX(F32, "self_attn.sinks", sinks, TD_DIM_HEADS, TD_DIM_ONE, 0),
    TD_MATRIX(ROUTER, "mlp.router.weight", router, TD_DIM_EXPERTS, TD_DIM_MODEL, 0),
    TD_VECTOR("mlp.router.bias", logit_bias, TD_DIM_EXPERTS, 0),
    TD_MATRIX(EXPERT, "gate_up_proj", gate, TD_DIM_EXPERT_PAIRS, TD_DIM_MODEL, 0),
    TD_MATRIX(F32, "mlp.experts.gate_up_proj_bias", gate_bias, TD_DIM_EXPERTS, TD_DIM_EXPERT_PAIRS,
              0),
    TD_MATRIX(EXPERT, "down_proj", down, TD_DIM_MODEL, TD_DIM_EXPERT, 0),
    TD_MATRIX(F32, "mlp.experts.down_proj_bias", down_bias, TD_DIM_EXPERTS, TD_DIM_MODEL, 0),
};

const td_family td_family_gpt_oss = {
    .model_types = {"gpt_oss"},
    .defaults = {.attn = TD_ATTN_GQA,
                 .attention_bias = true,
                 .has_sinks = true,
                 .rms_eps = 1e-5f,
                 .rope_theta = 150000,
                 .yarn = {.factor = 32,
                          .beta_fast = 32,
                          .beta_slow = 1,
                          .original_max_position = 4096,
                          .untruncated = true},
                 .norm_topk = true, // the softmax of the chosen experts' logits
                 .routed_scaling = 1,
                 .n_groups = 1,
                 .topk_groups = 1,
                 .bos_id = -1},
    .keys = keys,
    .n_keys = TD_COUNT(keys),
    .read = read_rest,
    .layer = layer,
    .n_layer = TD_COUNT(layer),
};
