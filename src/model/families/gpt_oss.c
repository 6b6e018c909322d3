// src/model/families/gpt_oss.c - gpt-oss-20b and 120b: attention with sinks, a window in every
// second layer, biases everywhere, experts in MXFP4 with a clamped activation.
#include "model/families/family.h"

static const td_config_key keys[] = {
    TD_BODY_KEYS(201088, 2880, 36, 64, 131072),
    TD_GQA_KEY(8),
    TD_KEY("intermediate_size", NULL, expert_dim, 1, TD_MAX_DIM, 2880),
    TD_KEY("num_local_experts", "num_experts", n_experts, 1, TD_MAX_EXPERTS, 128),
    TD_KEY("num_experts_per_tok", NULL, top_k, 1, TD_MAX_EXPERTS, 4),
};

static td_status read_rest(const td_config_reader *r) {
  td_model_config *c = r->out;
  double limit = 7, alpha = 1.702;
  for (uint32_t i = 0; i < c->n_layers; i += 2)
    td_layers_add(c->window_layers, i);
  td_status st = td_config_read_windows(r, 128);
  if (st == TD_OK) st = td_config_double(r, r->root, "swiglu_limit", 1e-6, 1e6, &limit);
  if (st == TD_OK) st = td_config_double(r, r->root, "swiglu_alpha", 1e-6, 1e6, &alpha);
  c->swiglu_limit = (float)limit;
  c->swiglu_alpha = (float)alpha;
  return st;
}

static const td_tensor_spec layer[] = {
    TD_NORM_PLACES,
    TD_GQA_PLACES,
    TD_OUT_BIAS_PLACE,
    TD_MATRIX(F32, "self_attn.sinks", sinks, HEADS, ONE, 0),
    TD_MATRIX(ROUTER, "mlp.router.weight", router, EXPERTS, MODEL, 0),
    TD_VECTOR("mlp.router.bias", logit_bias, EXPERTS, 0),
    TD_MATRIX(EXPERT, "gate_up_proj", gate, EXPERT_PAIRS, MODEL, TD_IF(PAIRS)),
    TD_MATRIX(F32, "mlp.experts.gate_up_proj_bias", gate_bias, EXPERTS, EXPERT_PAIRS, TD_IF(PAIRS)),
    TD_MATRIX(EXPERT, "down_proj", down, MODEL, EXPERT, TD_IF(PAIRS)),
    TD_MATRIX(F32, "mlp.experts.down_proj_bias", down_bias, EXPERTS, MODEL, TD_IF(PAIRS)),
    // One by one, as most tools quantize them.
    TD_MATRIX(EXPERT, "gate_proj.weight", gate, EXPERT, MODEL, TD_IF(SPLIT)),
    TD_MATRIX(EXPERT, "up_proj.weight", up, EXPERT, MODEL, TD_IF(SPLIT)),
    TD_MATRIX(EXPERT, "down_proj.weight", down, MODEL, EXPERT, TD_IF(SPLIT)),
    TD_RENAMED(EXPERT_BIAS, "gate_proj.bias", gate_bias, EXPERT, ONE, TD_IF(SPLIT), "up_proj.bias"),
    TD_MATRIX(EXPERT_BIAS, "down_proj.bias", down_bias, MODEL, ONE, TD_IF(SPLIT)),
};

const td_family td_family_gpt_oss = {
    .model_types = {"gpt_oss"},
    .ignores = {"norm_topk_prob", "hidden_act"},
    .expert_layers = TD_EXPERTS_ALL,
    .defaults = {.attn = TD_ATTN_GQA,
                 .head_dim = 64,
                 .attention_bias = true,
                 .rms_eps = 1e-5f,
                 .rope_theta = 150000,
                 .yarn = {.factor = 32,
                          .beta_fast = 32,
                          .beta_slow = 1,
                          .original_max_position = 4096,
                          .untruncated = true},
                 .norm_topk = true, // the softmax of the chosen experts' logits
                 .bos_id = -1},
    .read = read_rest,
    TD_FAMILY_PARTS,
};
