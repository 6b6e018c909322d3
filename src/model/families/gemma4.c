// src/model/families/gemma4.c - Gemma-4-26B-A4B: layers with a window beside some with wider heads,
// norms in front of blocks and behind them, a dense MLP beside the experts, GELU.
#include <string.h>

#include "model/families/family.h"

static const td_config_key keys[] = {
    TD_BODY_KEYS(262144, 2304, 30, 8, 131072),
    TD_GQA_KEY(4),
    TD_DENSE_KEY(9216),
    TD_KEY("num_experts", NULL, n_experts, 1, TD_MAX_EXPERTS, 0),
    TD_KEY("top_k_experts", "num_experts_per_tok", top_k, 1, TD_MAX_EXPERTS, 0),
    TD_KEY("moe_intermediate_size", NULL, expert_dim, 1, TD_MAX_DIM, 0),
    TD_KEY("global_head_dim", NULL, wide_head_dim, 2, TD_MAX_HEAD_DIM, 512),
};

// What the reference has and this program has not.
static td_status check_parts(const td_config_reader *r) {
  const td_model_config *c = r->out;
  bool has_experts = false, is_double = false;
  uint32_t per_layer = 256, n_shared = 0;
  const char *sees = "vision";
  td_status st = td_config_bool(r, r->root, "enable_moe_block", &has_experts);
  if (st == TD_OK) st = td_config_bool(r, r->root, "use_double_wide_mlp", &is_double);
  if (st == TD_OK)
    st = td_config_uint(r, r->root, "hidden_size_per_layer_input", 0, TD_MAX_DIM, &per_layer);
  if (st == TD_OK)
    st = td_config_uint(r, r->root, "num_kv_shared_layers", 0, TD_MAX_LAYERS, &n_shared);
  if (st == TD_OK && td_json_get(r->root, "use_bidirectional_attention"))
    st = td_config_str(r, r->root, "use_bidirectional_attention", &sees);
  if (st == TD_OK) st = td_config_expect_str(r, "hidden_activation", "gelu_pytorch_tanh");
  if (st != TD_OK) return st;
  const char *const lacks = !has_experts                  ? "enable_moe_block false"
                            : per_layer                   ? "hidden_size_per_layer_input above 0"
                            : n_shared                    ? "num_kv_shared_layers above 0"
                            : is_double                   ? "use_double_wide_mlp true"
                            : strcmp(sees, "vision") != 0 ? "use_bidirectional_attention of text"
                                                          : NULL;
  if (lacks) return td_config_fail(r, TD_EUNSUPPORTED, "%s is not supported", lacks);
  if (!c->n_experts || !c->top_k || !c->expert_dim)
    return td_config_bad(r, "num_experts, top_k_experts and moe_intermediate_size must be stated");
  return TD_OK;
}

// The last layer has no window, whatever is stated.
static td_status read_windows(const td_config_reader *r) {
  td_model_config *c = r->out;
  uint64_t wide[TD_MAX_LAYERS / 64];
  if (td_config_has_no_window(r)) return td_config_bad(r, "sliding_window must be a number");
  for (uint32_t i = 0; i < c->n_layers; i++)
    if ((i + 1) % 6) td_layers_add(c->window_layers, i);
  td_status st = td_config_read_windows(r, 512);
  const uint32_t last = c->n_layers - 1;
  c->window_layers[last / 64] &= ~((uint64_t)1 << last % 64);
  for (size_t i = 0; i < TD_COUNT(wide); i++)
    wide[i] = ~c->window_layers[i];
  td_config_set_kind(r, wide, TD_ATTN_GQA_WIDE);
  return st;
}

// As transformers saves them: an entry for each layer without a window, all alike here.
static td_status read_layer_heads(const td_config_reader *r, const cJSON *layers) {
  td_model_config *c = r->out;
  uint32_t n = 0;
  for (const cJSON *item = layers->child; item; item = item->next, n++) {
    uint32_t heads = c->n_kv_heads, dim = c->head_dim;
    td_status st = td_config_uint(r, item, "num_key_value_heads", 1, TD_MAX_HEADS, &heads);
    if (st == TD_OK) st = td_config_uint(r, item, "head_dim", 2, TD_MAX_HEAD_DIM, &dim);
    if (st != TD_OK) return st;
    const bool is_other = n && (heads != c->wide_kv_heads || dim != c->wide_head_dim);
    if (is_other || n == td_model_n_attn(c, TD_ATTN_GQA_WIDE)) {
      return td_config_fail(r, TD_EUNSUPPORTED,
                            "per_layer_config with other than one kind of heads, in the layers "
                            "without a window, is not supported");
    }
    c->wide_kv_heads = heads;
    c->wide_head_dim = dim;
  }
  return TD_OK;
}

static td_status read_wide_heads(const td_config_reader *r) {
  td_model_config *c = r->out;
  const cJSON *layers;
  c->wide_kv_heads = c->n_kv_heads;
  td_status st = td_config_bool(r, r->root, "attention_k_eq_v", &c->wide_shares);
  if (st == TD_OK && c->wide_shares && td_json_get(r->root, "num_global_key_value_heads")) {
    st = td_config_uint(r, r->root, "num_global_key_value_heads", 1, TD_MAX_HEADS,
                        &c->wide_kv_heads);
  }
  if (st == TD_OK) st = td_config_part(r, "per_layer_config", &layers);
  if (st == TD_OK && layers) st = read_layer_heads(r, layers);
  if (st == TD_OK && (c->wide_head_dim % 2 || c->n_heads % c->wide_kv_heads)) {
    st = td_config_bad(r, "global_head_dim must be even, and num_global_key_value_heads divide "
                          "num_attention_heads");
  }
  return st;
}

// Of layers without a window. A part of the pairs rotates ("proportional"), or all.
static td_status read_wide_rope(const td_config_reader *r) {
  td_model_config *c = r->out;
  const cJSON *all = td_json_get(r->root, "rope_parameters");
  const cJSON *rope = td_json_get(all, "full_attention");
  const char *type = "default";
  double factor = 1, part = all ? 1 : 0.25;
  td_status st = TD_OK;
  if (rope) {
    st = td_config_str(r, rope, "rope_type", &type);
    if (st == TD_OK) st = td_config_double(r, rope, "rope_theta", 1.0001, 1e15, &c->wide_theta);
    if (st == TD_OK) st = td_config_double(r, rope, "factor", 1e-6, 1e6, &factor);
    if (st == TD_OK) st = td_config_double(r, rope, "partial_rotary_factor", 0, 1, &part);
    if (st == TD_OK && strcmp(type, "default") == 0) part = 1;
  }
  if (st == TD_OK && (factor != 1 || (rope && strcmp(type, "default") != 0 &&
                                      strcmp(type, "proportional") != 0))) {
    st = td_config_fail(r, TD_EUNSUPPORTED,
                        "RoPE of full_attention of type \"%.40s\" with a factor of %g is not "
                        "supported; supported are default and proportional, without a factor",
                        type, factor);
  }
  c->wide_pairs = (uint32_t)(part * c->wide_head_dim / 2);
  return st;
}

static td_status read_rest(const td_config_reader *r) {
  td_model_config *c = r->out;
  double cap = 0;
  td_status st = check_parts(r);
  if (st == TD_OK) st = read_windows(r);
  if (st == TD_OK) st = read_wide_heads(r);
  if (st == TD_OK) st = read_wide_rope(r);
  if (st == TD_OK && td_json_get(r->root, "final_logit_softcapping"))
    st = td_config_double(r, r->root, "final_logit_softcapping", 1e-6, 1e6, &cap);
  c->logit_cap = (float)cap;
  return st;
}

#define ATTN_PLACES(kind, queries, keys, head)                                                     \
  TD_MATRIX(WEIGHT, "self_attn.q_proj.weight", q, queries, MODEL, TD_IF(kind)),                    \
      TD_MATRIX(WEIGHT, "self_attn.k_proj.weight", k, keys, MODEL, TD_IF(kind)),                   \
      TD_MATRIX(WEIGHT, "self_attn.v_proj.weight", v, keys, MODEL, TD_IF(kind) | TD_IF(OWN_V)),    \
      TD_MATRIX(WEIGHT, "self_attn.o_proj.weight", o, MODEL, queries, TD_IF(kind)),                \
      TD_VECTOR("self_attn.q_proj.bias", q_bias, queries, TD_IF(kind) | TD_IF(BIAS)),              \
      TD_VECTOR("self_attn.k_proj.bias", k_bias, keys, TD_IF(kind) | TD_IF(BIAS)),                 \
      TD_VECTOR("self_attn.v_proj.bias", v_bias, keys, TD_IF(kind) | TD_IF(OWN_V) | TD_IF(BIAS)),  \
      TD_VECTOR("self_attn.q_norm.weight", q_norm, head, TD_IF(kind)),                             \
      TD_VECTOR("self_attn.k_norm.weight", k_norm, head, TD_IF(kind))

static const td_tensor_spec layer[] = {
    TD_VECTOR("input_layernorm.weight", attn_norm, MODEL, 0),
    TD_VECTOR("post_attention_layernorm.weight", attn_out_norm, MODEL, 0),
    TD_VECTOR("pre_feedforward_layernorm.weight", mlp_norm, MODEL, 0),
    TD_VECTOR("post_feedforward_layernorm.weight", mlp_out_norm, MODEL, 0),
    TD_VECTOR("post_feedforward_layernorm_1.weight", dense_out_norm, MODEL, 0),
    TD_VECTOR("pre_feedforward_layernorm_2.weight", experts_norm, MODEL, 0),
    TD_VECTOR("post_feedforward_layernorm_2.weight", experts_out_norm, MODEL, 0),
    TD_MATRIX(F32, "layer_scalar", factor, ONE, ONE, 0),
    ATTN_PLACES(GQA, Q, KV, HEAD),
    ATTN_PLACES(GQA_WIDE, WIDE_Q, WIDE_KV, WIDE_HEAD),
    TD_OUT_BIAS_PLACE,
    TD_MLP_PLACES("mlp", DENSE, 0),
    TD_MATRIX(NORM_BY_DIM, "router.scale", router_norm, MODEL, ONE, 0),
    TD_MATRIX(ROUTER, "router.proj.weight", router, EXPERTS, MODEL, 0),
    TD_MATRIX(F32, "router.per_expert_scale", expert_scale, EXPERTS, ONE, 0),
    TD_EACH_EXPERT_PLACES,
};

const td_family td_family_gemma4 = {
    .model_types = {"gemma4_text"},
    .experts = "experts",
    .ignores = {"norm_topk_prob", "hidden_act"},
    .expert_layers = TD_EXPERTS_ALL,
    .defaults = {.attn = TD_ATTN_GQA,
                 .head_dim = 256,
                 .qk_norm = TD_QK_NORM_HEAD,
                 .tie_embeddings = true,
                 .rms_eps = 1e-6f,
                 .wide_theta = 1e6,
                 .norms_values = true,
                 .unit_scores = true,
                 .is_gelu = true,
                 .norm_topk = true,
                 .has_out_norms = true,
                 .scales_embeddings = true,
                 TD_TOKEN_IDS(2, 1)},
    .read = read_rest,
    TD_FAMILY_PARTS,
};
