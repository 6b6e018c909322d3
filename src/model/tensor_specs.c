// src/model/tensor_specs.c - dimensions, per-layer conditions, and tensors outside the layers.
#include "model/tensor_specs.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "model/families/family.h"

#define END(field) offsetof(td_model_ends, field)
#define MIXER      "model.hyper_connection_mixer"

const td_tensor_spec td_end_places[] = {
    {"model.embed_tokens.weight", TD_SPEC_PLAIN, END(embed), TD_DIM_VOCAB, TD_DIM_MODEL, 0, NULL},
    {"model.norm.weight", TD_SPEC_VEC, END(final_norm), TD_DIM_MODEL, TD_DIM_ONE, TD_IF_NORM, NULL},
    {"lm_head.weight", TD_SPEC_WEIGHT, END(lm_head), TD_DIM_VOCAB, TD_DIM_MODEL, TD_IF_UNTIED,
     NULL},
    {"hc_head_fn", TD_SPEC_SCORES, END(hyper.fn), TD_DIM_STREAMS, TD_DIM_STREAM_WIDTH,
     TD_IF_STREAMS, NULL},
    {"hc_head_base", TD_SPEC_F32, END(hyper.base), TD_DIM_STREAMS, TD_DIM_ONE, TD_IF_STREAMS, NULL},
    {"hc_head_scale", TD_SPEC_F32, END(hyper.scale), TD_DIM_ONE, TD_DIM_ONE, TD_IF_STREAMS, NULL},
    {MIXER ".hc_norm.weight", TD_SPEC_NORM1, END(hyper.norm), TD_DIM_STREAM_WIDTH, TD_DIM_ONE,
     TD_IF_GATED, NULL},
    {MIXER ".input_mix_weight_down.weight", TD_SPEC_LATENT, END(hyper.down), TD_DIM_HYPER_RANK,
     TD_DIM_STREAM_WIDTH, TD_IF_GATED, NULL},
    {MIXER ".input_mix_weight_up.weight", TD_SPEC_LATENT, END(hyper.up), TD_DIM_STREAM_WIDTH,
     TD_DIM_HYPER_RANK, TD_IF_GATED, NULL},
};
const size_t td_n_end_places = TD_COUNT(td_end_places);

#define MTP(field) offsetof(td_mtp, field)

const td_tensor_spec td_mtp_places[] = {
    {"enorm.weight", TD_SPEC_VEC, MTP(embed_norm), TD_DIM_MODEL, TD_DIM_ONE, 0, NULL},
    {"hnorm.weight", TD_SPEC_VEC, MTP(hidden_norm), TD_DIM_MODEL, TD_DIM_ONE, 0, NULL},
    {"shared_head.norm.weight", TD_SPEC_VEC, MTP(norm), TD_DIM_MODEL, TD_DIM_ONE, 0,
     TD_MTP_OWN_NORM},
    {"eh_proj.weight", TD_SPEC_WEIGHT, MTP(proj), TD_DIM_MODEL, TD_DIM_TWO_MODELS, 0, NULL},
};
const size_t td_n_mtp_places = TD_COUNT(td_mtp_places);

const td_tensor_spec td_mtp_apart_places[] = {
    {"pre_fc_norm_embedding.weight", TD_SPEC_NORM1, MTP(embed_norm), TD_DIM_MODEL, TD_DIM_ONE, 0,
     NULL},
    {"pre_fc_norm_hidden.weight", TD_SPEC_NORM1, MTP(hidden_norm), TD_DIM_MODEL, TD_DIM_ONE, 0,
     NULL},
    {"norm.weight", TD_SPEC_NORM1, MTP(norm), TD_DIM_MODEL, TD_DIM_ONE, 0, NULL},
    {"fc.weight", TD_SPEC_WEIGHT, MTP(proj), TD_DIM_MODEL, TD_DIM_TWO_MODELS, 0, NULL},
};
const size_t td_n_mtp_apart_places = TD_COUNT(td_mtp_apart_places);

const td_tensor_spec td_mtp_stream_places[] = {
    {"enorm.weight", TD_SPEC_VEC, MTP(embed_norm), TD_DIM_MODEL, TD_DIM_ONE, 0, NULL},
    {"hnorm.weight", TD_SPEC_VEC, MTP(hidden_norm), TD_DIM_MODEL, TD_DIM_ONE, 0, NULL},
    {"norm.weight", TD_SPEC_VEC, MTP(norm), TD_DIM_MODEL, TD_DIM_ONE, 0, NULL},
    {"e_proj.weight", TD_SPEC_WEIGHT, MTP(proj), TD_DIM_MODEL, TD_DIM_MODEL, 0, NULL},
    {"h_proj.weight", TD_SPEC_WEIGHT, MTP(hidden_proj), TD_DIM_MODEL, TD_DIM_MODEL, 0, NULL},
    {"hc_head_fn", TD_SPEC_SCORES, MTP(hyper.fn), TD_DIM_STREAMS, TD_DIM_STREAM_WIDTH, 0, NULL},
    {"hc_head_base", TD_SPEC_F32, MTP(hyper.base), TD_DIM_STREAMS, TD_DIM_ONE, 0, NULL},
    {"hc_head_scale", TD_SPEC_F32, MTP(hyper.scale), TD_DIM_ONE, TD_DIM_ONE, 0, NULL},
};
const size_t td_n_mtp_stream_places = TD_COUNT(td_mtp_stream_places);

static const char own_body[] = "model.", newer_body[] = "model.language_model.";

static const char *body_of(const td_model_config *c) {
  if (c->family->is_bare) return "";
  if (c->has_newer_names) return newer_body;
  return c->wrapper ? c->wrapper->body : own_body;
}

void td_settle_names(td_model_config *c, const td_store *store) {
  static const char embed[] = "model.embed_tokens.weight";
  char name[TD_MAX_TENSOR_NAME];
  static const char *const parts[] = {"weight", "weight_packed", "qweight"};
  for (size_t i = 0; c->swiglu_limit > 0 && i < TD_COUNT(parts); i++) {
    snprintf(name, sizeof name, "model.layers.0.mlp.experts.0.gate_proj.%s", parts[i]);
    c->has_split_experts |= td_store_find(store, name) >= 0;
  }
  if (!c->wrapper) return;
  for (int i = 0; i < 2; i++) {
    c->has_newer_names = i == 1;
    td_tensor_name(c, embed, name);
    if (td_store_find(store, name) >= 0) return;
  }
  c->has_newer_names = false;
}

// Names outside the layers of families whose names have no body.
static const char *bare_name(const char *name) {
  static const char *const names[][2] = {{"model.embed_tokens.weight", "model.embed.weight"},
                                         {"lm_head.weight", "head.weight"}};
  for (size_t i = 0; i < TD_COUNT(names); i++)
    if (strcmp(name, names[i][0]) == 0) return names[i][1];
  return name;
}

void td_tensor_name(const td_model_config *c, const char *name, char out[TD_MAX_TENSOR_NAME]) {
  const size_t n = strlen(own_body);
  if (c->family->is_bare) name = bare_name(name);
  const char *prefix = body_of(c);
  if (strncmp(name, own_body, n) != 0) {
    prefix = c->wrapper && !c->has_newer_names ? c->wrapper->head : "";
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
  switch (dim) {
  case TD_DIM_ONE: return 1;
  case TD_DIM_MODEL: return c->dim;
  case TD_DIM_TWO_MODELS: return 2 * c->dim;
  case TD_DIM_VOCAB: return c->n_vocab;
  case TD_DIM_Q: return c->n_heads * c->head_dim;
  case TD_DIM_KV: return c->n_kv_heads * c->head_dim;
  case TD_DIM_HEAD: return c->head_dim;
  case TD_DIM_MLA_Q: return c->n_heads * (c->nope_dim + c->rope_dim);
  case TD_DIM_MLA_OUT: return c->n_heads * c->v_dim;
  case TD_DIM_Q_LORA: return c->q_lora_rank;
  case TD_DIM_KV_LORA: return c->kv_lora_rank;
  case TD_DIM_KV_A: return c->kv_lora_rank + c->rope_dim;
  case TD_DIM_KV_B: return c->n_heads * (c->nope_dim + c->v_dim);
  case TD_DIM_INDEX_Q: return c->index_heads * c->index_dim;
  case TD_DIM_INDEX_K: return c->index_dim;
  case TD_DIM_INDEX_QK: return (c->index_heads + 1) * c->index_dim;
  case TD_DIM_INDEX_HEADS: return c->index_heads;
  case TD_DIM_INDEX_POOL: return 2 * c->index_dim;
  case TD_DIM_INDEX_GROUP: return c->index_group;
  case TD_DIM_TWO_HEADS: return 2 * c->head_dim;
  case TD_DIM_POOL_GROUP: return c->pool_group;
  case TD_DIM_POOL_TOP_GROUP: return c->pool_top_group;
  case TD_DIM_O_A: return c->o_groups * c->o_lora_rank;
  case TD_DIM_O_GROUP: return c->o_groups ? c->n_heads * c->head_dim / c->o_groups : 0;
  case TD_DIM_STREAMS: return c->n_streams;
  case TD_DIM_STREAM_SCORES: return (2 + c->n_streams) * c->n_streams;
  case TD_DIM_STREAM_WIDTH: return c->n_streams * c->dim;
  case TD_DIM_THREE: return 3;
  case TD_DIM_HYPER_RANK: return c->hyper_rank;
  case TD_DIM_NGRAM: return c->ngram_dim;
  case TD_DIM_NGRAM_TAPS: return c->ngram_taps;
  case TD_DIM_TOP_K: return c->top_k;
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
  met |= 1u << (TD_IF_FIRST_KIND + td_model_attn(c, layer_idx));
  met |= c->has_split_experts ? TD_IF_SPLIT : TD_IF_PAIRS;
  met |= td_layers_have(c->table_layers, layer_idx) ? TD_IF_TABLE : TD_IF_ROUTED;
  const unsigned index = TD_IF_DSA | TD_IF_DSA_POOL;
  const unsigned latent = TD_IF_MLA | TD_IF_DSA_SHARED | index;
  if (met & latent) met |= TD_IF_LATENT;
  if (met & index) met |= TD_IF_INDEX;
  if (td_layers_have(c->ngram_layers, layer_idx)) met |= TD_IF_NGRAMS;
  if (c->attention_bias) met |= TD_IF_BIAS;
  if (c->n_shared_experts) met |= TD_IF_SHARED;
  if (c->qk_norm) met |= TD_IF_QK_NORM;
  return met;
}

unsigned td_end_conditions(const td_model_config *c) {
  const bool has_head = c->n_streams && !c->streams_mean && !c->hyper_rank;
  return (c->tie_embeddings ? 0 : TD_IF_UNTIED) | (has_head ? TD_IF_STREAMS : 0) |
         (c->hyper_rank ? TD_IF_GATED : TD_IF_NORM);
}
