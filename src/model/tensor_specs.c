// src/model/tensor_specs.c - dimensions, per-layer conditions, and tensors outside the layers.
#include "model/tensor_specs.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "model/families/family.h"

#define END(field) offsetof(td_model_ends, field)

const td_tensor_spec td_end_places[] = {
    {"model.embed_tokens.weight", TD_SPEC_PLAIN, END(embed), TD_DIM_VOCAB, TD_DIM_MODEL, 0, NULL},
    {"model.norm.weight", TD_SPEC_VEC, END(final_norm), TD_DIM_MODEL, TD_DIM_ONE, 0, NULL},
    {"lm_head.weight", TD_SPEC_WEIGHT, END(lm_head), TD_DIM_VOCAB, TD_DIM_MODEL, TD_IF_UNTIED,
     NULL},
};
const size_t td_n_end_places = TD_COUNT(td_end_places);

static const char own_body[] = "model.";

static const char *body_of(const td_model_config *c) {
  return c->wrapper ? c->wrapper->body : own_body;
}

void td_tensor_name(const td_model_config *c, const char *name, char out[TD_MAX_TENSOR_NAME]) {
  const size_t n = strlen(own_body);
  const char *prefix = body_of(c);
  if (strncmp(name, own_body, n) != 0) {
    prefix = c->wrapper ? c->wrapper->head : "";
  } else {
    name += n;
  }
  snprintf(out, TD_MAX_TENSOR_NAME, "%s%s", prefix, name);
}

bool td_tensor_layer(const td_model_config *c, const char *name, uint32_t *layer_idx,
                     const char **rest) {
  const char *body = body_of(c);
  const size_t n = strlen(body);
  int len = 0;
  if (strncmp(name, body, n) != 0) return false;
  if (sscanf(name + n, "layers.%9u.%n", layer_idx, &len) != 1 || len == 0) return false;
  *rest = name + n + len;
  return true;
}

uint32_t td_dim_value(const td_model_config *c, td_dim dim) {
  const bool mla = c->attn == TD_ATTN_MLA;
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
  case TD_DIM_SHARED: return c->shared_dim ? c->shared_dim : c->n_shared_experts * c->expert_dim;
  case TD_DIM_EXPERTS: return c->n_experts;
  case TD_DIM_EXPERT_PAIRS: return 2 * c->expert_dim;
  case TD_DIM_HEADS: return c->n_heads;
  case TD_DIM_Q_GATED: return 2 * c->n_heads * c->head_dim;
  case TD_DIM_DELTA_QKV:
    return 2 * c->delta_k_heads * c->delta_k_dim + c->delta_v_heads * c->delta_v_dim;
  case TD_DIM_DELTA_QKVZ:
    return 2 * (c->delta_k_heads * c->delta_k_dim + c->delta_v_heads * c->delta_v_dim);
  case TD_DIM_DELTA_V: return c->delta_v_heads * c->delta_v_dim;
  case TD_DIM_DELTA_HEADS: return c->delta_v_heads;
  case TD_DIM_DELTA_PAIRS: return 2 * c->delta_v_heads;
  case TD_DIM_DELTA_HEAD: return c->delta_v_dim;
  case TD_DIM_DELTA_TAPS: return c->delta_taps;
  }
  return 0;
}

unsigned td_layer_conditions(const td_model_config *c, uint32_t layer_idx) {
  unsigned met = c->q_lora_rank ? TD_IF_Q_LORA : TD_IF_Q_WHOLE;
  met |= td_model_is_moe(c, layer_idx) ? TD_IF_MOE : TD_IF_DENSE;
  met |= td_model_is_delta(c, layer_idx) ? TD_IF_DELTA : TD_IF_ATTN;
  if (c->attention_bias) met |= TD_IF_BIAS;
  if (c->n_shared_experts) met |= TD_IF_SHARED;
  if (c->qk_norm) met |= TD_IF_QK_NORM;
  return met;
}

unsigned td_end_conditions(const td_model_config *c) {
  return c->tie_embeddings ? 0 : TD_IF_UNTIED;
}
