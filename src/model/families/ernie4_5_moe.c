// src/model/families/ernie4_5_moe.c - ERNIE-4.5-21B-A3B, 300B-A47B: softmax scores with a bias.
#include "model/families/family.h"

static const td_config_key keys[] = {
    TD_BODY_KEYS(103424, 2560, 28, 20, 131072),
    TD_GQA_KEY(4),
    TD_DENSE_KEY(12288),
    TD_KEY("moe_intermediate_size", NULL, expert_dim, 1, TD_MAX_DIM, 1536),
    TD_KEY("moe_num_experts", "num_experts", n_experts, 1, TD_MAX_EXPERTS, 64),
    TD_KEY("moe_k", "num_experts_per_tok", top_k, 1, TD_MAX_EXPERTS, 6),
    TD_KEY("moe_num_shared_experts", NULL, n_shared_experts, 0, 256, 2),
};

static td_status read_moe_layers(const td_config_reader *r) {
  uint32_t first = 1, step = 1, last = INT32_MAX;
  const cJSON *end = td_json_get(r->root, "moe_layer_end_index");
  td_status st = td_config_uint(r, r->root, "moe_layer_start_index", 0, INT32_MAX, &first);
  if (st == TD_OK) st = td_config_uint(r, r->root, "moe_layer_interval", 1, INT32_MAX, &step);
  if (st == TD_OK && !(cJSON_IsNumber(end) && end->valuedouble == -1)) // the last layer
    st = td_config_uint(r, r->root, "moe_layer_end_index", 0, INT32_MAX, &last);
  for (uint32_t i = first; i < r->out->n_layers && i <= last; i++)
    if ((i + 1) % step == 0) td_layers_add(r->out->moe_layers, i);
  return st;
}

static td_status read_rest(const td_config_reader *r) {
  double min_sum = 1e-12;
  bool has_biases = false;
  td_status st = td_config_bool(r, r->root, "use_bias", &has_biases);
  if (st == TD_OK && has_biases)
    st = td_config_fail(r, TD_EUNSUPPORTED, "use_bias is not supported");
  if (st == TD_OK) st = td_config_double(r, r->root, "moe_norm_min", 0, 1, &min_sum);
  r->out->router_min_sum = (float)min_sum;
  return st == TD_OK ? read_moe_layers(r) : st;
}

static const td_tensor_spec layer[] = {
    TD_NORM_PLACES,
    TD_GQA_PLACES,
    TD_DENSE_PLACES,
    TD_EXPERT_PLACES,
    TD_RENAMED(F32, "mlp.moe_statics.e_score_correction_bias", router_bias, EXPERTS, ONE,
               TD_IF(MOE), "mlp.gate.moe_statics.e_score_correction_bias"),
    TD_SHARED_PLACES,
};

const td_family td_family_ernie4_5_moe = {
    .model_types = {"ernie4_5_moe"},
    .ignores = {"norm_topk_prob", "attention_bias"},
    .mtp = "model.mtp_",
    .expert_layers = TD_EXPERTS_OWN,
    .defaults = {.attn = TD_ATTN_GQA,
                 .tie_embeddings = true,
                 .rms_eps = 1e-5f,
                 .rope_theta = 5e5,
                 .rope_interleaved = true,
                 .norm_topk = true,
                 TD_TOKEN_IDS(1, 2)},
    .read = read_rest,
    TD_FAMILY_PARTS,
};
