// src/model/families/bailing_hybrid.c - Ling-3.0-Flash: most layers are Kimi delta attention, the
// last of each group of six MLA with a gate for each head.
#include "model/families/delta_net.h"

static const td_config_key keys[] = {
    TD_KEY("vocab_size", NULL, n_vocab, 1, 1u << 24, 157184),
    TD_KEY("hidden_size", NULL, dim, 1, TD_MAX_DIM, 2560),
    TD_KEY("num_hidden_layers", NULL, n_layers, 1, TD_MAX_LAYERS, 42),
    TD_KEY("num_attention_heads", NULL, n_heads, 1, TD_MAX_HEADS, 32),
    TD_KEY("max_position_embeddings", "model_max_length", max_position, 1, 1u << 30, 262144),
    TD_MLA_KEYS(512, 128, 64, 128),
    TD_DENSE_KEY(6144),
    TD_KEY("num_experts", "num_local_experts", n_experts, 1, TD_MAX_EXPERTS, 512),
    TD_KEY("num_experts_per_tok", "num_experts_per_token", top_k, 1, TD_MAX_EXPERTS, 8),
    TD_KEY("moe_intermediate_size", NULL, expert_dim, 1, TD_MAX_DIM, 768),
    TD_KEY("num_shared_experts", "n_shared_experts", n_shared_experts, 0, 256, 1),
    TD_KEY("n_group", "num_expert_group", n_groups, 1, TD_MAX_EXPERTS, 8),
    TD_KEY("topk_group", NULL, topk_groups, 1, TD_MAX_EXPERTS, 4),
    TD_KEY("short_conv_kernel_size", "linear_conv_kernel_dim", delta_taps, 2, TD_MAX_TAPS, 4),
    TD_MTP_KEY,
};

// Heads of delta nets are as many as MLA's. transformers saves another head_dim beside theirs.
static td_status read_delta(const td_config_reader *r) {
  td_model_config *c = r->out;
  uint32_t group = 6, width = 128;
  double bound = -5;
  bool is_safe = true;
  td_status st = td_config_uint(r, r->root, "layer_group_size", 1, INT32_MAX, &group);
  if (st == TD_OK) st = td_config_bool(r, r->root, "kda_safe_gate", &is_safe);
  if (st == TD_OK) st = td_config_double(r, r->root, "kda_lower_bound", -1e6, -1e-6, &bound);
  const char *const key = td_json_get(r->root, "linear_head_dim") ? "linear_head_dim" : "head_dim";
  if (st == TD_OK) st = td_config_uint(r, r->root, key, 1, TD_MAX_HEAD_DIM, &width);
  c->delta_k_heads = c->delta_v_heads = c->n_heads;
  c->delta_k_dim = c->delta_v_dim = width;
  c->delta_bound = is_safe ? (float)bound : 0;
  if (st != TD_OK || td_json_get(r->root, "layer_types"))
    return st == TD_OK ? td_config_read_delta(r) : st;
  uint64_t layers[TD_MAX_LAYERS / 64] = {0};
  for (uint32_t i = 0; i < c->n_layers; i++)
    if ((i + 1) % group) td_layers_add(layers, i);
  return td_config_set_delta(r, layers);
}

static td_status read_rest(const td_config_reader *r) {
  td_model_config *c = r->out;
  c->rope_interleaved = true; // the reference does not read rope_interleave
  const td_status st = td_config_bool(r, r->root, "moe_renormalize", &c->norm_topk);
  return st == TD_OK ? read_delta(r) : st;
}

static const td_tensor_spec layer[] = {
    TD_NORM_PLACES,
    TD_MLA_PLACES,
    TD_MATRIX(ROUTER, "self_attn.g_proj.weight", head_gate, HEADS, MODEL, TD_IF(MLA)),
    TD_KDA_COMMON_PLACES,
    TD_RENAMED(ROUTER, "self_attn.f_proj.weight", delta_a, DELTA_V, MODEL, TD_IF(KDA),
               "self_attn.forget_gate.f_proj.weight"),
    TD_MATRIX(WEIGHT, "self_attn.g_proj.weight", delta_z, DELTA_V, MODEL, TD_IF(KDA)),
    TD_DENSE_PLACES,
    TD_EXPERT_PLACES,
    TD_RENAMED(F32, "mlp.gate.expert_bias", router_bias, EXPERTS, ONE, TD_IF(MOE),
               "mlp.gate.e_score_correction_bias"),
    TD_SHARED_PLACES,
};

const td_family td_family_bailing_hybrid = {
    .model_types = {"bailing_hybrid"},
    .n_dense = 2,
    .scaling = "routed_scaling_factor",
    .defaults = {.attn = TD_ATTN_MLA,
                 .has_head_gates = true,
                 .routed_scaling = 2.5f,
                 .delta_by_channel = true,
                 .rope_theta = 6e6,
                 .router_sigmoid = true,
                 .norm_topk = true,
                 TD_TOKEN_IDS(-1, 156895)},
    .read = read_rest,
    TD_FAMILY_PARTS,
};
