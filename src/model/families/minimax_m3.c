// src/model/families/minimax_m3.c - MiniMax-M3: attention to the blocks of keys that an indexer
// selects for each KV head, a clamped activation everywhere, norms stored without their 1.
#include <string.h>

#include "model/families/delta_net.h"

static const td_config_key keys[] = {
    TD_BODY_KEYS(200064, 6144, 60, 64, 524288),
    TD_GQA_KEY(4),
    TD_KEY("dense_intermediate_size", NULL, dense_dim, 1, TD_MAX_DIM, 12288),
    TD_KEY("intermediate_size", NULL, expert_dim, 1, TD_MAX_DIM, 3072),
    TD_KEY("shared_intermediate_size", NULL, shared_dim, 1, TD_MAX_DIM, 3072),
    TD_KEY("num_local_experts", "num_experts", n_experts, 1, TD_MAX_EXPERTS, 128),
    TD_KEY("num_experts_per_tok", NULL, top_k, 1, TD_MAX_EXPERTS, 4),
    TD_KEY("index_n_heads", NULL, index_heads, 1, TD_MAX_HEADS, 4),
    TD_KEY("index_head_dim", NULL, index_dim, 2, TD_MAX_HEAD_DIM, 128),
    TD_KEY("index_block_size", NULL, index_block, 1, 1u << 16, 128),
    TD_KEY("index_topk_blocks", NULL, index_top_blocks, 1, 1u << 16, 16),
    TD_KEY("index_local_blocks", NULL, index_local_blocks, 0, 1u << 16, 1),
    TD_KEY("num_mtp_modules", "num_nextn_predict_layers", n_mtp_layers, 0, 64, 0),
};

// The layers whose entry of a list is `name`, 1 or true. Entries of layers that predict may follow.
static td_status read_layers(const td_config_reader *r, const cJSON *list, const char *key,
                             const char *name, const char *other, uint64_t *layers) {
  if (!cJSON_IsArray(list) || (uint32_t)cJSON_GetArraySize(list) < r->out->n_layers)
    return td_config_fail(r, TD_EFORMAT, "%s must be an array with an entry for each layer", key);
  uint32_t i = 0;
  for (const cJSON *item = list->child; i < r->out->n_layers; item = item->next, i++) {
    const char *text = cJSON_IsString(item) ? item->valuestring : "";
    const double number = cJSON_IsNumber(item) ? item->valuedouble
                          : cJSON_IsBool(item) ? cJSON_IsTrue(item)
                                               : -1;
    if (strcmp(text, name) == 0 || number == 1) {
      td_layers_add(layers, i);
    } else if (strcmp(text, other) != 0 && number != 0) {
      return td_config_fail(r, TD_EFORMAT, "%s must hold \"%s\" or \"%s\", or 1 or 0", key, name,
                            other);
    }
  }
  return TD_OK;
}

static td_status read_moe_layers(const td_config_reader *r) {
  td_model_config *c = r->out;
  const cJSON *types = td_json_get(r->root, "mlp_layer_types");
  const cJSON *freq = td_json_get(r->root, "moe_layer_freq");
  for (uint32_t i = 0; !types && !freq && i < c->n_layers; i++)
    td_layers_add(c->moe_layers, i);
  if (!types && !freq) return TD_OK;
  return read_layers(r, types ? types : freq, types ? "mlp_layer_types" : "moe_layer_freq",
                     "sparse", "dense", c->moe_layers);
}

// Which layers select, and by what, as published in a part of its own.
static td_status read_selection(const td_config_reader *r) {
  static const char part[] = "sparse_attention_config";
  td_model_config *c = r->out;
  const cJSON *sparse, *types = td_json_get(r->root, "layer_types");
  td_status st = td_config_part(r, part, &sparse);
  const cJSON *freq = td_json_get(sparse, "sparse_attention_freq");
  uint32_t n_first = 0; // blocks at the beginning that count in any case
  if (st == TD_OK && sparse) {
    st = td_config_uint(r, sparse, "sparse_num_index_heads", 1, TD_MAX_HEADS, &c->index_heads);
    if (st == TD_OK)
      st = td_config_uint(r, sparse, "sparse_index_dim", 2, TD_MAX_HEAD_DIM, &c->index_dim);
    if (st == TD_OK)
      st = td_config_uint(r, sparse, "sparse_block_size", 1, 1u << 16, &c->index_block);
    if (st == TD_OK)
      st = td_config_uint(r, sparse, "sparse_topk_blocks", 1, 1u << 16, &c->index_top_blocks);
    if (st == TD_OK)
      st = td_config_uint(r, sparse, "sparse_local_block", 0, 1u << 16, &c->index_local_blocks);
    if (st == TD_OK) st = td_config_uint(r, sparse, "sparse_init_block", 0, 0, &n_first);
  }
  uint64_t layers[TD_MAX_LAYERS / 64] = {0};
  if (st == TD_OK && types)
    st = read_layers(r, types, "layer_types", "minimax_m3_sparse", "full_attention", layers);
  else if (st == TD_OK && freq)
    st = read_layers(r, freq, "sparse_attention_freq", "1", "0", layers);
  td_config_set_kind(r, layers, TD_ATTN_BLOCKS);
  return st;
}

static td_status check_selection(const td_config_reader *r) {
  td_model_config *c = r->out;
  const uint32_t rope_dim = (uint32_t)(c->head_dim *
                                       (c->partial_rotary > 0 ? c->partial_rotary : 1));
  if (c->index_heads != c->n_kv_heads)
    return td_config_bad(r, "index_n_heads must be num_key_value_heads");
  if (c->index_dim < rope_dim)
    return td_config_bad(r, "index_head_dim must not be less than the rotary part of a head");
  if (c->index_local_blocks > c->index_top_blocks)
    return td_config_bad(r, "index_local_blocks must not exceed index_topk_blocks");
  return TD_OK;
}

static td_status read_rest(const td_config_reader *r) {
  td_model_config *c = r->out;
  double limit = 7, alpha = 1.702;
  uint32_t rotary = 0;
  td_status st = td_config_uint(r, r->root, "rotary_dim", 2, c->head_dim, &rotary);
  // transformers states rotary_dim beside rope_parameters, and obeys these alone
  if (rotary && c->partial_rotary <= 0 && !td_json_get(r->root, "rope_parameters"))
    c->partial_rotary = (double)rotary / c->head_dim;
  if (st == TD_OK) st = td_config_double(r, r->root, "swiglu_limit", 1e-6, 1e6, &limit);
  if (st == TD_OK) st = td_config_double(r, r->root, "swiglu_alpha", 1e-6, 1e6, &alpha);
  c->swiglu_limit = (float)limit;
  c->swiglu_alpha = (float)alpha;
  if (st == TD_OK) st = read_moe_layers(r);
  if (st == TD_OK) st = read_selection(r);
  return st == TD_OK ? check_selection(r) : st;
}

#define BLOCK "block_sparse_moe"

static const td_tensor_spec layer[] = {
    TD_NORM1("input_layernorm.weight", attn_norm, MODEL, 0),
    TD_NORM1("post_attention_layernorm.weight", mlp_norm, MODEL, 0),
    TD_GQA_PLACES,
    TD_NORM1("self_attn.q_norm.weight", q_norm, HEAD, 0),
    TD_NORM1("self_attn.k_norm.weight", k_norm, HEAD, 0),
    TD_RENAMED(LATENT, "self_attn.index_q_proj.weight", index_q, INDEX_Q, MODEL, TD_IF(BLOCKS),
               "self_attn.indexer.q_proj.weight"),
    TD_RENAMED(LATENT, "self_attn.index_k_proj.weight", index_k, INDEX_K, MODEL, TD_IF(BLOCKS),
               "self_attn.indexer.k_proj.weight"),
    TD_RENAMED(NORM1, "self_attn.index_q_norm.weight", index_q_norm, INDEX_K, ONE, TD_IF(BLOCKS),
               "self_attn.indexer.q_norm.weight"),
    TD_RENAMED(NORM1, "self_attn.index_k_norm.weight", index_norm, INDEX_K, ONE, TD_IF(BLOCKS),
               "self_attn.indexer.k_norm.weight"),
    TD_MLP_RENAMED("mlp", DENSE, TD_IF(DENSE), "mlp"),
    TD_RENAMED(ROUTER, BLOCK ".gate.weight", router, EXPERTS, MODEL, TD_IF(MOE), "mlp.gate.weight"),
    TD_RENAMED(F32, BLOCK ".e_score_correction_bias", router_bias, EXPERTS, ONE, TD_IF(MOE),
               "mlp.gate.e_score_correction_bias"),
    TD_W_EXPERT_PLACES(TD_IF(MOE)),
    TD_MLP_RENAMED(BLOCK ".shared_experts", SHARED, TD_IF(MOE), "mlp.shared_experts"),
};

const td_family td_family_minimax_m3 = {
    .model_types = {"minimax_m3_vl_text", "minimax_m3_text", "minimax_m3"},
    .ignores = {"norm_topk_prob", "attention_bias", "hidden_act"},
    .experts = BLOCK ".experts",
    .has_partial_rotary = true,
    .has_norm1 = true,
    .mtp = "mtp.",
    .expert_layers = TD_EXPERTS_OWN,
    .scaling = "routed_scaling_factor",
    .defaults = {.attn = TD_ATTN_GQA,
                 .head_dim = 128,
                 .routed_scaling = 2,
                 .qk_norm = TD_QK_NORM_HEAD,
                 .rope_theta = 5e6,
                 .has_split_experts = true,
                 .router_sigmoid = true,
                 .norm_topk = true,
                 .n_shared_experts = 1,
                 TD_TOKEN_IDS(200034, 200020)},
    .read = read_rest,
    TD_FAMILY_PARTS,
};
