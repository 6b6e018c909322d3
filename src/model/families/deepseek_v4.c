// src/model/families/deepseek_v4.c - DeepSeek V4: attention over a window and pooled keys, hyper-
// connections in place of a residual, the first layers' experts by token id.
#include <string.h>

#include "model/families/family.h"

static const td_config_key keys[] = {
    TD_BODY_KEYS(129280, 4096, 43, 64, 1048576),
    TD_KEY("num_key_value_heads", NULL, n_kv_heads, 1, 1, 1),
    TD_KEY("q_lora_rank", NULL, q_lora_rank, 1, TD_MAX_DIM, 1024),
    TD_KEY("o_groups", NULL, o_groups, 1, TD_MAX_HEADS, 8),
    TD_KEY("o_lora_rank", NULL, o_lora_rank, 1, TD_MAX_DIM, 1024),
    TD_KEY("sliding_window", NULL, window, 1, 1u << 16, 128),
    TD_KEY("hc_mult", NULL, n_streams, 1, 16, 4),
    TD_KEY("hc_sinkhorn_iters", NULL, hyper_rounds, 1, 1000, 20),
    TD_INDEX_KEYS(64, 128, 512),
    TD_KEY("n_routed_experts", "num_local_experts", n_experts, 1, TD_MAX_EXPERTS, 256),
    TD_KEY("num_experts_per_tok", NULL, top_k, 1, TD_MAX_EXPERTS, 6),
    TD_KEY("moe_intermediate_size", NULL, expert_dim, 1, TD_MAX_DIM, 2048),
    TD_KEY("n_shared_experts", NULL, n_shared_experts, 1, 1, 1),
    TD_MTP_KEY,
};

// ---- which layers pool their keys ---------------------------------------------------------------

static td_status read_group(const td_config_reader *r, const char *type, const char *key,
                            uint32_t *group) {
  const cJSON *rates;
  td_status st = td_config_part(r, "compress_rates", &rates);
  if (st == TD_OK && rates) st = td_config_uint(r, rates, type, 1, 1u << 16, group);
  if (st == TD_OK) st = td_config_uint(r, r->root, key, 1, 1u << 16, group);
  if (st != TD_OK || (*group & (*group - 1)) == 0) return st;
  return td_config_fail(r, TD_EUNSUPPORTED, "%s: a rate of %u; supported are powers of two", type,
                        *group);
}

static const char near_type[] = "sliding_attention", pool_type[] = "heavily_compressed_attention",
                  top_type[] = "compressed_sparse_attention";

// An entry of layer_types, or of compress_ratios.
static td_status read_layer(const td_config_reader *r, const cJSON *entry, uint32_t layer_idx) {
  const char *type = cJSON_IsString(entry) ? entry->valuestring : "";
  const double rate = cJSON_IsNumber(entry) ? entry->valuedouble : -1;
  if (strcmp(type, pool_type) == 0 || rate == 128) {
    r->out->kind[layer_idx] = TD_ATTN_POOL;
  } else if (strcmp(type, top_type) == 0 || rate == 4) {
    r->out->kind[layer_idx] = TD_ATTN_POOL_TOP;
  } else if (strcmp(type, near_type) != 0 && rate != 0) {
    return td_config_bad(r, cJSON_IsString(entry) ? "layer_types must hold \"sliding_attention\", "
                                                    "\"compressed_sparse_attention\" or "
                                                    "\"heavily_compressed_attention\""
                                                  : "compress_ratios must hold 0, 4 or 128");
  }
  return TD_OK;
}

static td_status read_layers(const td_config_reader *r) {
  td_model_config *c = r->out;
  const cJSON *types = td_json_get(r->root, "layer_types");
  if (!types) types = td_json_get(r->root, "compress_ratios");
  for (uint32_t i = 0; !types && i < c->n_layers; i++)
    c->kind[i] = i > 2 && i % 2 ? TD_ATTN_POOL_TOP : TD_ATTN_POOL;
  if (!types) return TD_OK;
  uint32_t i = 0;
  td_status st = TD_OK;
  for (const cJSON *e = types->child; e && i < c->n_layers && st == TD_OK; e = e->next, i++)
    st = read_layer(r, e, i);
  if (st == TD_OK && (!cJSON_IsArray(types) || i < c->n_layers)) {
    st = td_config_bad(r, "layer_types or compress_ratios must be an array with an entry for each "
                          "layer");
  }
  return st;
}

// ---- the rest -----------------------------------------------------------------------------------

// Layers without pooled keys rotate by a base of their own and without YaRN.
static td_status read_bases(const td_config_reader *r) {
  td_model_config *c = r->out;
  double theta = 10000, pooled = 160000;
  const cJSON *both = td_json_get(r->root, "rope_parameters");
  const cJSON *near = both ? td_json_get(both, "main") : NULL;
  const cJSON *pool = both ? td_json_get(both, "compress") : NULL;
  const char *type = "default";
  td_status st = td_config_double(r, r->root, "rope_theta", 1.0001, 1e15, &theta);
  if (st == TD_OK) st = td_config_double(r, r->root, "compress_rope_theta", 1.0001, 1e15, &pooled);
  if (st == TD_OK && near) st = td_config_double(r, near, "rope_theta", 1.0001, 1e15, &theta);
  if (st == TD_OK && near) st = td_config_str(r, near, "rope_type", &type);
  if (st == TD_OK && pool) st = td_config_double(r, pool, "rope_theta", 1.0001, 1e15, &pooled);
  if (st == TD_OK && strcmp(type, "default") != 0)
    st = td_config_bad(r, "rope_parameters: main must be of rope_type \"default\"");
  c->rope_theta = theta;
  c->pool_theta = pooled;
  // The reference scales neither cosines nor scores.
  if (c->yarn.attention_factor <= 0 && !pool) c->yarn.attention_factor = 1;
  return st;
}

static td_status read_rotary(const td_config_reader *r) {
  td_model_config *c = r->out;
  uint32_t rope_dim = c->head_dim / 8;
  td_status st = td_config_uint(r, r->root, "qk_rope_head_dim", 2, TD_MAX_HEAD_DIM, &rope_dim);
  if (c->partial_rotary > 0) rope_dim = (uint32_t)(c->head_dim * c->partial_rotary);
  c->rope_dim = rope_dim;
  if (st == TD_OK && (rope_dim % 2 || rope_dim < 2 || rope_dim > c->head_dim))
    st = td_config_bad(r, "qk_rope_head_dim must be even and a part of head_dim");
  if (st == TD_OK && rope_dim > c->index_dim)
    st = td_config_bad(r, "index_head_dim must not be less than qk_rope_head_dim");
  return st;
}

// The first layers' experts follow from token ids.
static td_status read_tables(const td_config_reader *r) {
  td_model_config *c = r->out;
  static const td_layer_name names[] = {{"hash_moe", true}, {"moe", false}};
  const bool has_types = td_json_get(r->root, "mlp_layer_types");
  uint32_t n = 3;
  td_status st = TD_OK;
  if (has_types) st = td_config_read_layer_names(r, "mlp_layer_types", names, 2, c->table_layers);
  if (st == TD_OK) st = td_config_uint(r, r->root, "num_hash_layers", 0, TD_MAX_LAYERS, &n);
  for (uint32_t i = 0; i < c->n_layers; i++) {
    td_layers_add(c->moe_layers, i);
    if (!has_types && i < n) td_layers_add(c->table_layers, i);
  }
  return st;
}

static td_status read_rest(const td_config_reader *r) {
  td_model_config *c = r->out;
  double limit = 10, eps = 1e-6;
  bool has_bias = false;
  c->pool_group = 128;
  c->pool_top_group = 4;
  td_status st = read_group(r, pool_type, "compress_rate_hca", &c->pool_group);
  if (st == TD_OK) st = read_group(r, top_type, "compress_rate_csa", &c->pool_top_group);
  if (st == TD_OK) st = read_layers(r);
  if (st == TD_OK) st = read_bases(r);
  if (st == TD_OK) st = read_rotary(r);
  if (st == TD_OK) st = read_tables(r);
  if (st == TD_OK) st = td_config_double(r, r->root, "swiglu_limit", 1e-6, 1e6, &limit);
  if (st == TD_OK) st = td_config_double(r, r->root, "hc_eps", 0, 1, &eps);
  if (st == TD_OK) st = td_config_expect_str(r, "scoring_func", "sqrtsoftplus");
  if (st == TD_OK) st = td_config_bool(r, r->root, "mlp_bias", &has_bias);
  if (st == TD_OK && has_bias) st = td_config_bad(r, "mlp_bias must be false");
  if (st == TD_OK && c->n_heads % c->o_groups)
    st = td_config_bad(r, "o_groups must divide num_attention_heads");
  if (st == TD_OK && (uint64_t)c->o_groups * c->o_lora_rank > TD_MAX_DIM)
    st = td_config_bad(r, "o_groups times o_lora_rank is too wide");
  c->swiglu_limit = (float)limit;
  c->hyper_eps = (float)eps;
  return st;
}

#define POOL_PLACES(name, field, width, group, key, conditions, alias)                             \
  TD_RENAMED(LATENT, name ".wkv.weight", field.x, width, MODEL, conditions,                        \
             alias ".kv_proj.weight"),                                                             \
      TD_RENAMED(LATENT, name ".wgate.weight", field.gate, width, MODEL, conditions,               \
                 alias ".gate_proj.weight"),                                                       \
      TD_RENAMED(F32, name ".ape", field.bias, group, width, conditions, alias ".position_bias"),  \
      TD_RENAMED(VEC, name ".norm.weight", field.norm, key, ONE, conditions,                       \
                 alias ".kv_norm.weight")

// The second names are those of transformers; a third one it writes where it means to restore those
// of the publisher.
static const td_tensor_spec layer[] = {
    TD_RENAMED(VEC, "attn_norm.weight", attn_norm, MODEL, ONE, 0, "input_layernorm.weight"),
    TD_RENAMED(VEC, "ffn_norm.weight", mlp_norm, MODEL, ONE, 0, "post_attention_layernorm.weight"),
    TD_RENAMED(WEIGHT, "attn.wq_a.weight", q_a, Q_LORA, MODEL, 0, "self_attn.q_a_proj.weight"),
    TD_RENAMED(VEC, "attn.q_norm.weight", q_a_norm, Q_LORA, ONE, 0, "self_attn.q_a_norm.weight"),
    TD_RENAMED(WEIGHT, "attn.wq_b.weight", q_b, Q, Q_LORA, 0, "self_attn.q_b_proj.weight"),
    TD_RENAMED(LATENT, "attn.wkv.weight", k, HEAD, MODEL, 0, "self_attn.kv_proj.weight"),
    TD_RENAMED(VEC, "attn.kv_norm.weight", k_norm, HEAD, ONE, 0, "self_attn.kv_norm.weight",
               "attn.norm.weight"),
    TD_RENAMED(WEIGHT, "attn.wo_a.weight", o_a, O_A, O_GROUP, 0, "self_attn.o_a_proj.weight"),
    TD_RENAMED(WEIGHT, "attn.wo_b.weight", o, MODEL, O_A, 0, "self_attn.o_b_proj.weight"),
    TD_RENAMED(F32, "attn.attn_sink", sinks, HEADS, ONE, 0, "self_attn.sinks"),
    POOL_PLACES("attn.compressor", pool, HEAD, POOL_GROUP, HEAD, TD_IF(POOL),
                "self_attn.compressor"),
    POOL_PLACES("attn.compressor", pool, TWO_HEADS, POOL_TOP_GROUP, HEAD, TD_IF(POOL_TOP),
                "self_attn.compressor"),
    POOL_PLACES("attn.indexer.compressor", index_pool, INDEX_POOL, POOL_TOP_GROUP, INDEX_K,
                TD_IF(POOL_TOP), "self_attn.compressor.indexer"),
    TD_RENAMED(LATENT, "attn.indexer.wq_b.weight", index_q, INDEX_Q, Q_LORA, TD_IF(POOL_TOP),
               "self_attn.compressor.indexer.q_b_proj.weight"),
    TD_RENAMED(ROUTER, "attn.indexer.weights_proj.weight", index_weights, INDEX_HEADS, MODEL,
               TD_IF(POOL_TOP), "self_attn.compressor.indexer.scorer.weights_proj.weight"),
    TD_HYPER_PLACES("hc_attn", attn_hyper, "attn_hc"),
    TD_HYPER_PLACES("hc_ffn", mlp_hyper, "ffn_hc"),
    TD_RENAMED(ROUTER, "ffn.gate.weight", router, EXPERTS, MODEL, 0, "mlp.gate.weight"),
    TD_RENAMED(F32, "ffn.gate.bias", router_bias, EXPERTS, ONE, TD_IF(ROUTED),
               "mlp.gate.e_score_correction_bias"),
    TD_RENAMED(TABLE, "ffn.gate.tid2eid", expert_table, VOCAB, TOP_K, TD_IF(TABLE),
               "mlp.gate.tid2eid"),
    TD_MATRIX(EXPERT, "w1.weight", gate, EXPERT, MODEL, 0),
    TD_MATRIX(EXPERT, "w3.weight", up, EXPERT, MODEL, 0),
    TD_MATRIX(EXPERT, "w2.weight", down, MODEL, EXPERT, 0),
    TD_RENAMED(WEIGHT, "ffn.shared_experts.w1.weight", mlp_gate, SHARED, MODEL, 0,
               "mlp.shared_experts.gate_proj.weight"),
    TD_RENAMED(WEIGHT, "ffn.shared_experts.w3.weight", mlp_up, SHARED, MODEL, 0,
               "mlp.shared_experts.up_proj.weight"),
    TD_RENAMED(WEIGHT, "ffn.shared_experts.w2.weight", mlp_down, MODEL, SHARED, 0,
               "mlp.shared_experts.down_proj.weight"),
};

const td_family td_family_deepseek_v4 = {
    .model_types = {"deepseek_v4"},
    .experts = "ffn.experts",
    .ignores = {"norm_topk_prob", "attention_bias"},
    .is_bare = true,
    .has_partial_rotary = true,
    .mtp = "mtp.",
    .expert_layers = TD_EXPERTS_OWN,
    .scaling = "routed_scaling_factor",
    .defaults = {.attn = TD_ATTN_NEAR,
                 .head_dim = 512,
                 .routed_scaling = 1.5f,
                 .router_softplus = true,
                 .norm_topk = true,
                 .rope_interleaved = true,
                 .swiglu_plain = true,
                 .swiglu_alpha = 1,
                 .pool_theta = 160000,
                 TD_TOKEN_IDS(0, 1)},
    .read = read_rest,
    TD_FAMILY_PARTS,
};
