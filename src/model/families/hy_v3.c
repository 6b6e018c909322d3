// src/model/families/hy_v3.c - Hy3 (Tencent Hunyuan).
#include "model/families/family.h"

static const td_config_key keys[] = {
    {"vocab_size", NULL, TD_CONFIG_FIELD(n_vocab), 1, 1u << 24, 120832},
    {"hidden_size", NULL, TD_CONFIG_FIELD(dim), 1, TD_MAX_DIM, 4096},
    {"num_hidden_layers", NULL, TD_CONFIG_FIELD(n_layers), 1, TD_MAX_LAYERS, 80},
    {"num_attention_heads", NULL, TD_CONFIG_FIELD(n_heads), 1, TD_MAX_HEADS, 64},
    {"num_key_value_heads", NULL, TD_CONFIG_FIELD(n_kv_heads), 1, TD_MAX_HEADS, 8},
    {"max_position_embeddings", NULL, TD_CONFIG_FIELD(max_position), 1, 1u << 30, 131072},
    {"intermediate_size", NULL, TD_CONFIG_FIELD(dense_dim), 1, TD_MAX_DIM, 13312},
    {"moe_intermediate_size", "expert_hidden_dim", TD_CONFIG_FIELD(expert_dim), 1, TD_MAX_DIM,
     1536},
    {"num_experts", "num_local_experts", TD_CONFIG_FIELD(n_experts), 1, TD_MAX_EXPERTS, 192},
    {"num_experts_per_tok", NULL, TD_CONFIG_FIELD(top_k), 1, TD_MAX_EXPERTS, 8},
    {"num_shared_experts", NULL, TD_CONFIG_FIELD(n_shared_experts), 0, 256, 1},
    {"num_nextn_predict_layers", NULL, TD_CONFIG_FIELD(n_mtp_layers), 0, 64, 1},
};

static td_status read_rest(const td_config_reader *r) {
  bool norms = true, sigmoid = true;
  td_status st = td_config_read_head_dim(r, 128);
  if (st == TD_OK) st = td_config_bool(r, r->root, "qk_norm", &norms);
  if (st == TD_OK) st = td_config_bool(r, r->root, "moe_router_use_sigmoid", &sigmoid);
  if (st == TD_OK) st = td_config_bool(r, r->root, "route_norm", &r->out->norm_topk);
  if (st != TD_OK) return st;
  if (!norms) return td_config_bad(r, "qk_norm must be true");
  if (!sigmoid) return td_config_bad(r, "moe_router_use_sigmoid must be true");
  st = td_config_read_moe_layers(r, 1);
  return st == TD_OK ? td_config_read_scaling(r, "router_scaling_factor", 2.826) : st;
}

// A matrix as transformers calls it, and as Tencent does.
#define RENAMED(kind, name, field, rows, cols, conditions, alias)                                  \
  { name, TD_SPEC_##kind, offsetof(td_layer, field), rows, cols, conditions, alias }

static const td_tensor_spec layer[] = {
    TD_NORM_PLACES,
    TD_GQA_PLACES,
    TD_OUT_BIAS_PLACE,
    TD_QK_NORM_PLACES,
    TD_DENSE_PLACES,
    RENAMED(ROUTER, "mlp.gate.weight", router, TD_DIM_EXPERTS, TD_DIM_MODEL, TD_IF_MOE,
            "mlp.router.gate.weight"),
    RENAMED(F32, "mlp.e_score_correction_bias", router_bias, TD_DIM_EXPERTS, TD_DIM_ONE, TD_IF_MOE,
            "mlp.expert_bias"),
    TD_EACH_EXPERT_PLACES,
    RENAMED(WEIGHT, "mlp.shared_experts.gate_proj.weight", mlp_gate, TD_DIM_SHARED, TD_DIM_MODEL,
            TD_IF_MOE | TD_IF_SHARED, "mlp.shared_mlp.gate_proj.weight"),
    RENAMED(WEIGHT, "mlp.shared_experts.up_proj.weight", mlp_up, TD_DIM_SHARED, TD_DIM_MODEL,
            TD_IF_MOE | TD_IF_SHARED, "mlp.shared_mlp.up_proj.weight"),
    RENAMED(WEIGHT, "mlp.shared_experts.down_proj.weight", mlp_down, TD_DIM_MODEL, TD_DIM_SHARED,
            TD_IF_MOE | TD_IF_SHARED, "mlp.shared_mlp.down_proj.weight"),
};

const td_family td_family_hy_v3 = {
    .model_types = {"hy_v3"},
    .defaults = {.attn = TD_ATTN_GQA,
                 .qk_norm = TD_QK_NORM_HEAD,
                 .rms_eps = 1e-5f,
                 .rope_theta = 11158840,
                 .router_sigmoid = true,
                 .norm_topk = true,
                 .n_groups = 1,
                 .topk_groups = 1,
                 .bos_id = -1},
    .keys = keys,
    .n_keys = TD_COUNT(keys),
    .read = read_rest,
    .layer = layer,
    .n_layer = TD_COUNT(layer),
};
