#include "model/places.h"

#include <stddef.h>

#define LAYER(field) offsetof(td_layer, field)
#define END(field)   offsetof(td_model_ends, field)

const td_place td_layer_places[] = {
    {"input_layernorm.weight", TD_PLACE_VEC, LAYER(attn_norm), TD_DIM_MODEL, TD_DIM_ONE, 0},
    {"post_attention_layernorm.weight", TD_PLACE_VEC, LAYER(mlp_norm), TD_DIM_MODEL, TD_DIM_ONE, 0},

    {"self_attn.q_proj.weight", TD_PLACE_WEIGHT, LAYER(q), TD_DIM_Q, TD_DIM_MODEL, TD_IF_Q_WHOLE},
    {"self_attn.k_proj.weight", TD_PLACE_WEIGHT, LAYER(k), TD_DIM_KV, TD_DIM_MODEL, TD_IF_GQA},
    {"self_attn.v_proj.weight", TD_PLACE_WEIGHT, LAYER(v), TD_DIM_KV, TD_DIM_MODEL, TD_IF_GQA},
    {"self_attn.o_proj.weight", TD_PLACE_WEIGHT, LAYER(o), TD_DIM_MODEL, TD_DIM_OUT, 0},
    {"self_attn.q_proj.bias", TD_PLACE_VEC, LAYER(q_bias), TD_DIM_Q, TD_DIM_ONE,
     TD_IF_GQA | TD_IF_BIAS},
    {"self_attn.k_proj.bias", TD_PLACE_VEC, LAYER(k_bias), TD_DIM_KV, TD_DIM_ONE,
     TD_IF_GQA | TD_IF_BIAS},
    {"self_attn.v_proj.bias", TD_PLACE_VEC, LAYER(v_bias), TD_DIM_KV, TD_DIM_ONE,
     TD_IF_GQA | TD_IF_BIAS},
    {"self_attn.o_proj.bias", TD_PLACE_VEC, LAYER(o_bias), TD_DIM_MODEL, TD_DIM_ONE, TD_IF_BIAS},
    {"self_attn.q_norm.weight", TD_PLACE_VEC, LAYER(q_norm), TD_DIM_HEAD, TD_DIM_ONE, TD_IF_GQA},
    {"self_attn.k_norm.weight", TD_PLACE_VEC, LAYER(k_norm), TD_DIM_HEAD, TD_DIM_ONE, TD_IF_GQA},

    {"self_attn.q_a_proj.weight", TD_PLACE_WEIGHT, LAYER(q_a), TD_DIM_Q_LORA, TD_DIM_MODEL,
     TD_IF_Q_LORA},
    {"self_attn.q_a_proj.bias", TD_PLACE_VEC, LAYER(q_a_bias), TD_DIM_Q_LORA, TD_DIM_ONE,
     TD_IF_Q_LORA | TD_IF_BIAS},
    {"self_attn.q_a_layernorm.weight", TD_PLACE_VEC, LAYER(q_a_norm), TD_DIM_Q_LORA, TD_DIM_ONE,
     TD_IF_Q_LORA},
    {"self_attn.q_b_proj.weight", TD_PLACE_WEIGHT, LAYER(q_b), TD_DIM_Q, TD_DIM_Q_LORA,
     TD_IF_Q_LORA},
    {"self_attn.kv_a_proj_with_mqa.weight", TD_PLACE_WEIGHT, LAYER(kv_a), TD_DIM_KV_A, TD_DIM_MODEL,
     TD_IF_MLA},
    {"self_attn.kv_a_proj_with_mqa.bias", TD_PLACE_VEC, LAYER(kv_a_bias), TD_DIM_KV_A, TD_DIM_ONE,
     TD_IF_MLA | TD_IF_BIAS},
    {"self_attn.kv_a_layernorm.weight", TD_PLACE_VEC, LAYER(kv_a_norm), TD_DIM_KV_LORA, TD_DIM_ONE,
     TD_IF_MLA},
    {"self_attn.kv_b_proj.weight", TD_PLACE_WEIGHT, LAYER(kv_b), TD_DIM_KV_B, TD_DIM_KV_LORA,
     TD_IF_MLA},

    {"mlp.gate_proj.weight", TD_PLACE_WEIGHT, LAYER(mlp_gate), TD_DIM_DENSE, TD_DIM_MODEL,
     TD_IF_DENSE},
    {"mlp.up_proj.weight", TD_PLACE_WEIGHT, LAYER(mlp_up), TD_DIM_DENSE, TD_DIM_MODEL, TD_IF_DENSE},
    {"mlp.down_proj.weight", TD_PLACE_WEIGHT, LAYER(mlp_down), TD_DIM_MODEL, TD_DIM_DENSE,
     TD_IF_DENSE},

    {"mlp.gate.weight", TD_PLACE_WEIGHT, LAYER(router), TD_DIM_EXPERTS, TD_DIM_MODEL, TD_IF_MOE},
    {"mlp.gate.e_score_correction_bias", TD_PLACE_F32, LAYER(router_bias), TD_DIM_EXPERTS,
     TD_DIM_ONE, TD_IF_MOE | TD_IF_SIGMOID},
    {"mlp.shared_experts.gate_proj.weight", TD_PLACE_WEIGHT, LAYER(mlp_gate), TD_DIM_SHARED,
     TD_DIM_MODEL, TD_IF_MOE | TD_IF_SHARED},
    {"mlp.shared_experts.up_proj.weight", TD_PLACE_WEIGHT, LAYER(mlp_up), TD_DIM_SHARED,
     TD_DIM_MODEL, TD_IF_MOE | TD_IF_SHARED},
    {"mlp.shared_experts.down_proj.weight", TD_PLACE_WEIGHT, LAYER(mlp_down), TD_DIM_MODEL,
     TD_DIM_SHARED, TD_IF_MOE | TD_IF_SHARED},
    {"gate_proj.weight", TD_PLACE_EXPERT, LAYER(gate), TD_DIM_EXPERT, TD_DIM_MODEL, TD_IF_MOE},
    {"up_proj.weight", TD_PLACE_EXPERT, LAYER(up), TD_DIM_EXPERT, TD_DIM_MODEL, TD_IF_MOE},
    {"down_proj.weight", TD_PLACE_EXPERT, LAYER(down), TD_DIM_MODEL, TD_DIM_EXPERT, TD_IF_MOE},
};

const size_t td_n_layer_places = TD_COUNT(td_layer_places);

const td_place td_end_places[] = {
    {"model.embed_tokens.weight", TD_PLACE_PLAIN, END(embed), TD_DIM_VOCAB, TD_DIM_MODEL, 0},
    {"model.norm.weight", TD_PLACE_VEC, END(final_norm), TD_DIM_MODEL, TD_DIM_ONE, 0},
    {"lm_head.weight", TD_PLACE_WEIGHT, END(lm_head), TD_DIM_VOCAB, TD_DIM_MODEL, TD_IF_UNTIED},
};
const size_t td_n_end_places = TD_COUNT(td_end_places);

uint32_t td_dim_value(const td_model_config *c, td_dim dim) {
  bool mla = c->arch == TD_ARCH_DEEPSEEK_V3;
  switch (dim) {
  case TD_DIM_ONE: return 1;
  case TD_DIM_MODEL: return c->dim;
  case TD_DIM_VOCAB: return c->n_vocab;
  case TD_DIM_Q: return c->n_heads * (mla ? c->nope_dim + c->rope_dim : c->head_dim);
  case TD_DIM_KV: return c->n_kv_heads * c->head_dim;
  case TD_DIM_OUT: return c->n_heads * (mla ? c->v_dim : c->head_dim);
  case TD_DIM_HEAD: return c->head_dim;
  case TD_DIM_Q_LORA: return c->q_lora_rank;
  case TD_DIM_KV_LORA: return c->kv_lora_rank;
  case TD_DIM_KV_A: return c->kv_lora_rank + c->rope_dim;
  case TD_DIM_KV_B: return c->n_heads * (c->nope_dim + c->v_dim);
  case TD_DIM_DENSE: return c->dense_dim;
  case TD_DIM_EXPERT: return c->expert_dim;
  case TD_DIM_SHARED: return c->n_shared_experts * c->expert_dim;
  case TD_DIM_EXPERTS: return c->n_experts;
  }
  return 0;
}

unsigned td_layer_conditions(const td_model_config *c, uint32_t layer_idx) {
  bool mla = c->arch == TD_ARCH_DEEPSEEK_V3;
  unsigned met = mla ? TD_IF_MLA : TD_IF_GQA;
  met |= mla && c->q_lora_rank ? TD_IF_Q_LORA : TD_IF_Q_WHOLE;
  met |= td_model_is_moe(c, layer_idx) ? TD_IF_MOE : TD_IF_DENSE;
  if (c->attention_bias) met |= TD_IF_BIAS;
  if (c->n_shared_experts) met |= TD_IF_SHARED;
  if (c->router_sigmoid) met |= TD_IF_SIGMOID;
  return met;
}

unsigned td_end_conditions(const td_model_config *c) {
  return c->tie_embeddings ? 0 : TD_IF_UNTIED;
}
