// src/model/tensor_specs.c - dimensions, per-layer conditions, and tensors outside the layers.
#include "model/tensor_specs.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "model/families/family.h"

#define END(kind, name, field, rows, cols, conditions)                                             \
  TD_PLACE(td_model_ends, kind, name, field, rows, cols, conditions, NULL)
#define RENAMED_END(kind, name, field, rows, cols, alias)                                          \
  TD_PLACE(td_model_ends, kind, name, field, rows, cols, TD_IF(STREAMS), alias)
#define MIXER "model.hyper_connection_mixer"

const td_tensor_spec td_end_places[] = {
    TD_PLACE(td_model_ends, PLAIN, "model.embed_tokens.weight", embed, VOCAB, MODEL, 0,
             "model.word_embeddings.weight"),
    END(VEC, "model.norm.weight", final_norm, MODEL, ONE, TD_IF(NORM)),
    END(WEIGHT, "lm_head.weight", lm_head, VOCAB, MODEL, TD_IF(UNTIED)),
    RENAMED_END(SCORES, "hc_head_fn", hyper.fn, STREAMS, STREAM_WIDTH, "model.hc_head.hc_fn"),
    RENAMED_END(F32, "hc_head_base", hyper.base, STREAMS, ONE, "model.hc_head.hc_base"),
    RENAMED_END(F32, "hc_head_scale", hyper.scale, ONE, ONE, "model.hc_head.hc_scale"),
    END(NORM1, MIXER ".hc_norm.weight", hyper.norm, STREAM_WIDTH, ONE, TD_IF(GATED)),
    END(LATENT, MIXER ".input_mix_weight_down.weight", hyper.down, HYPER_RANK, STREAM_WIDTH,
        TD_IF(GATED)),
    END(LATENT, MIXER ".input_mix_weight_up.weight", hyper.up, STREAM_WIDTH, HYPER_RANK,
        TD_IF(GATED)),
};
const size_t td_n_end_places = TD_COUNT(td_end_places);

#define MTP(kind, name, field, rows, cols, conditions)                                             \
  TD_PLACE(td_mtp, kind, name, field, rows, cols, conditions, NULL)

const td_tensor_spec td_mtp_places[] = {
    MTP(VEC, "enorm.weight", embed_norm, MODEL, ONE, 0),
    MTP(VEC, "hnorm.weight", hidden_norm, MODEL, ONE, 0),
    TD_PLACE(td_mtp, VEC, "shared_head.norm.weight", norm, MODEL, ONE, 0, TD_MTP_OWN_NORM),
    MTP(WEIGHT, "eh_proj.weight", proj, MODEL, TWO_MODELS, 0),
};
const size_t td_n_mtp_places = TD_COUNT(td_mtp_places);

const td_tensor_spec td_mtp_apart_places[] = {
    MTP(NORM1, "pre_fc_norm_embedding.weight", embed_norm, MODEL, ONE, 0),
    MTP(NORM1, "pre_fc_norm_hidden.weight", hidden_norm, MODEL, ONE, 0),
    MTP(NORM1, "norm.weight", norm, MODEL, ONE, 0),
    MTP(WEIGHT, "fc.weight", proj, MODEL, TWO_MODELS, 0),
};
const size_t td_n_mtp_apart_places = TD_COUNT(td_mtp_apart_places);

const td_tensor_spec td_mtp_stream_places[] = {
    MTP(VEC, "enorm.weight", embed_norm, MODEL, ONE, 0),
    MTP(VEC, "hnorm.weight", hidden_norm, MODEL, ONE, 0),
    MTP(VEC, "norm.weight", norm, MODEL, ONE, 0),
    MTP(WEIGHT, "e_proj.weight", proj, MODEL, MODEL, 0),
    MTP(WEIGHT, "h_proj.weight", hidden_proj, MODEL, MODEL, 0),
    MTP(SCORES, "hc_head_fn", hyper.fn, STREAMS, STREAM_WIDTH, 0),
    MTP(F32, "hc_head_base", hyper.base, STREAMS, ONE, 0),
    MTP(F32, "hc_head_scale", hyper.scale, ONE, ONE, 0),
};
const size_t td_n_mtp_stream_places = TD_COUNT(td_mtp_stream_places);

static const char own_body[] = "model.", newer_body[] = "model.language_model.";

static const char *body_of(const td_model_config *c) {
  if (c->family->is_bare) return c->has_newer_names ? own_body : "";
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
  if (c->family->is_bare) {
    c->has_newer_names = td_store_find(store, embed) >= 0;
    c->has_newer_head = td_store_find(store, "lm_head.weight") >= 0;
  }
  c->has_bailing_names = td_store_find(store, "model.word_embeddings.weight") >= 0;
  if (!c->wrapper) return;
  for (int i = 0; i < 2; i++) {
    c->has_newer_names = i == 1;
    td_tensor_name(c, embed, name);
    if (td_store_find(store, name) >= 0) return;
  }
  c->has_newer_names = false;
}

// Names outside the layers of families whose names have no body.
static const char *bare_name(const td_model_config *c, const char *name) {
  if (!c->has_newer_names && strcmp(name, "model.embed_tokens.weight") == 0)
    return "model.embed.weight";
  return !c->has_newer_head && strcmp(name, "lm_head.weight") == 0 ? "head.weight" : name;
}

void td_tensor_name(const td_model_config *c, const char *name, char out[TD_MAX_TENSOR_NAME]) {
  const size_t n = strlen(own_body);
  if (c->family->is_bare) name = bare_name(c, name);
  const char *prefix = body_of(c);
  if (strncmp(name, own_body, n) != 0)
    prefix = c->wrapper && !c->has_newer_names ? c->wrapper->head : "";
  else
    name += n;
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
#define X(NAME, value)                                                                             \
  case TD_DIM_##NAME: return value;
    TD_DIMS(X)
#undef X
  }
  return 0;
}

uint64_t td_layer_conditions(const td_model_config *c, uint32_t layer_idx) {
  uint64_t met = c->q_lora_rank ? TD_IF(Q_LORA) : TD_IF(Q_WHOLE);
  met |= td_model_is_moe(c, layer_idx) ? TD_IF(MOE) : TD_IF(DENSE);
  met |= TD_IF(GQA) << td_model_attn(c, layer_idx);
  met |= c->has_split_experts ? TD_IF(SPLIT) : TD_IF(PAIRS);
  met |= td_layers_have(c->table_layers, layer_idx) ? TD_IF(TABLE) : TD_IF(ROUTED);
  const uint64_t index = TD_IF(DSA) | TD_IF(DSA_POOL);
  const uint64_t latent = TD_IF(MLA) | TD_IF(DSA_SHARED) | index;
  if (met & latent) met |= TD_IF(LATENT);
  if (met & index) met |= TD_IF(INDEX);
  if (td_layers_have(c->ngram_layers, layer_idx)) met |= TD_IF(NGRAMS);
  if (c->attention_bias) met |= TD_IF(BIAS);
  if (c->n_shared_experts) met |= TD_IF(SHARED);
  if (c->qk_norm) met |= TD_IF(QK_NORM);
  if (!c->wide_shares || td_model_attn(c, layer_idx) != TD_ATTN_GQA_WIDE) met |= TD_IF(OWN_V);
  return met;
}

uint64_t td_end_conditions(const td_model_config *c) {
  const bool has_head = c->n_streams && !c->streams_mean && !c->hyper_rank;
  return (c->tie_embeddings ? 0 : TD_IF(UNTIED)) | (has_head ? TD_IF(STREAMS) : 0) |
         (c->hyper_rank ? TD_IF(GATED) : TD_IF(NORM));
}
