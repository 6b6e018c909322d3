// src/model/families/kimi_linear.c - Kimi-Linear-48B-A3B: most layers are Kimi delta attention, the
// others MLA without rotary positions.

#include "model/families/delta_net.h"

static const td_config_key keys[] = {
    TD_KEY("vocab_size", NULL, n_vocab, 1, 1u << 24, 163840),
    TD_KEY("hidden_size", NULL, dim, 1, TD_MAX_DIM, 2304),
    TD_KEY("num_hidden_layers", NULL, n_layers, 1, TD_MAX_LAYERS, 27),
    TD_KEY("num_attention_heads", NULL, n_heads, 1, TD_MAX_HEADS, 32),
    TD_KEY("model_max_length", "max_position_embeddings", max_position, 1, 1u << 30, 1048576),
    TD_MLA_KEYS(512, 128, 64, 128),
    TD_DENSE_KEY(9216),
    TD_KEY("num_experts", "num_local_experts", n_experts, 1, TD_MAX_EXPERTS, 256),
    TD_KEY("num_experts_per_token", "num_experts_per_tok", top_k, 1, TD_MAX_EXPERTS, 8),
    TD_KEY("moe_intermediate_size", NULL, expert_dim, 1, TD_MAX_DIM, 1024),
    TD_KEY("num_shared_experts", "n_shared_experts", n_shared_experts, 0, 256, 1),
    TD_KEY("num_expert_group", "n_group", n_groups, 1, TD_MAX_EXPERTS, 1),
    TD_KEY("topk_group", NULL, topk_groups, 1, TD_MAX_EXPERTS, 1),
    TD_KDA_KEYS(32),
};

// The numbers of layers, from 1 on, that a list of linear_attn_config holds.
static td_status read_numbers(const td_config_reader *r, const cJSON *list, uint64_t *layers) {
  for (const cJSON *item = list->child; item; item = item->next) {
    int64_t n;
    if (!td_json_whole(item, 1, r->out->n_layers, &n))
      return td_config_bad(r, "linear_attn_config must hold numbers of layers, from 1 on");
    td_layers_add(layers, (uint32_t)n - 1);
  }
  return TD_OK;
}

static td_status read_lists(const td_config_reader *r, const cJSON *kda, const cJSON *full) {
  uint64_t layers[TD_MAX_LAYERS / 64] = {0}, attention[TD_MAX_LAYERS / 64] = {0};
  td_status st = read_numbers(r, kda, layers);
  if (st == TD_OK) st = read_numbers(r, full, attention);
  for (uint32_t i = 0; i < r->out->n_layers && st == TD_OK; i++)
    if (td_layers_have(layers, i) == td_layers_have(attention, i))
      st = td_config_bad(r, "each layer must be in kda_layers or in full_attn_layers");
  return st == TD_OK ? td_config_set_delta(r, layers) : st;
}

// As published, in a part of its own, or as transformers writes it.
static td_status read_layers(const td_config_reader *r) {
  const cJSON *part = td_json_get(r->root, "linear_attn_config");
  const cJSON *kda = td_json_get(part, "kda_layers"), *full = td_json_get(part, "full_attn_layers");
  td_status st = td_config_read_kda_heads(r);
  if (st != TD_OK) return st;
  const bool has_lists = cJSON_IsArray(kda) && cJSON_IsArray(full);
  if ((kda || full) && !has_lists)
    return td_config_bad(r, "kda_layers and full_attn_layers must be arrays of layers");
  if (td_json_get(r->root, "layer_types")) return td_config_read_delta(r);
  if (has_lists) return read_lists(r, kda, full);
  uint64_t layers[TD_MAX_LAYERS / 64] = {0};
  for (uint32_t i = 0; i < r->out->n_layers; i++)
    if (i == 0 || i % 4) td_layers_add(layers, i);
  return td_config_set_delta(r, layers);
}

static td_status read_rest(const td_config_reader *r) {
  td_model_config *c = r->out;
  bool has_nope = true;
  td_status st = td_config_bool(r, r->root, "mla_use_nope", &has_nope);
  if (st == TD_OK && !has_nope)
    st = td_config_fail(r, TD_EUNSUPPORTED, "mla_use_nope false is not supported");
  if (st == TD_OK) st = td_config_bool(r, r->root, "moe_renormalize", &c->norm_topk);
  if (st == TD_OK) st = td_config_expect_str(r, "moe_router_activation_func", "sigmoid");
  return st == TD_OK ? read_layers(r) : st;
}

#define BLOCK "block_sparse_moe"

static const td_tensor_spec layer[] = {
    TD_NORM_PLACES,
    TD_MLA_PLACES,
    TD_KDA_PLACES,
    // transformers writes the second names where it means to restore those of the publisher.
    TD_MLP_RENAMED("mlp", DENSE, TD_IF(DENSE), BLOCK),
    TD_RENAMED(ROUTER, BLOCK ".gate.weight", router, EXPERTS, MODEL, TD_IF(MOE), "mlp.gate.weight"),
    TD_RENAMED(F32, BLOCK ".gate.e_score_correction_bias", router_bias, EXPERTS, ONE, TD_IF(MOE),
               "mlp.gate.e_score_correction_bias"),
    TD_W_EXPERT_PLACES(TD_IF(MOE)),
    TD_MLP_RENAMED(BLOCK ".shared_experts", SHARED, TD_IF(MOE) | TD_IF(SHARED),
                   "mlp.shared_experts"),
};

const td_family td_family_kimi_linear = {
    .model_types = {"kimi_linear"},
    .experts = BLOCK ".experts",
    .n_dense = 1,
    .scaling = "routed_scaling_factor",
    .defaults = {.attn = TD_ATTN_MLA,
                 .has_no_rope = true,
                 .routed_scaling = 2.446f,
                 .delta_by_channel = true,
                 .rms_eps = 1e-5f,
                 .router_sigmoid = true,
                 .norm_topk = true,
                 TD_TOKEN_IDS(163584, 163586)},
    .read = read_rest,
    TD_FAMILY_PARTS,
};
