// src/model/tensor_specs.h - how a family describes its tensors: name, shape, destination field,
// and the conditions under which a layer has it.
#pragma once

#include "model/checkpoint/store.h"
#include "model/model.h"

// Tensors outside the layers.
typedef struct {
  td_weight embed, lm_head; // lm_head is zeroed if tied to embed
  td_vec final_norm;
  td_hyper hyper;
} td_model_ends;

// A tensor's dimensions: name, and the value that follows from the configuration c.
#define TD_DIMS(X)                                                                                 \
  X(ONE, 1) /* second dimension of a vector */                                                     \
  X(MODEL, c->dim)                                                                                 \
  X(TWO_MODELS, 2 * c->dim) /* twice that */                                                       \
  X(VOCAB, c->n_vocab)                                                                             \
  /* GQA */                                                                                        \
  X(Q, c->n_heads * c->head_dim)     /* queries of all heads, and their output */                  \
  X(KV, c->n_kv_heads * c->head_dim) /* keys of all heads */                                       \
  X(HEAD, c->head_dim)               /* one head */                                                \
  X(WIDE_Q, c->n_heads * c->wide_head_dim)                                                         \
  X(WIDE_KV, c->wide_kv_heads * c->wide_head_dim)                                                  \
  X(WIDE_HEAD, c->wide_head_dim)                                                                   \
  /* MLA */                                                                                        \
  X(MLA_Q, (c->nope_dim + c->rope_dim) * c->n_heads) /* queries of all heads */                    \
  X(MLA_OUT, c->n_heads * c->v_dim)                  /* attention output of all heads */           \
  X(Q_LORA, c->q_lora_rank)                                                                        \
  X(KV_LORA, c->kv_lora_rank)                                                                      \
  X(KV_A, c->kv_lora_rank + c->rope_dim)         /* compressed KV and the shared rotary key */     \
  X(KV_B, (c->nope_dim + c->v_dim) * c->n_heads) /* non-rotary keys, and values, of all heads */   \
  /* indexer */                                                                                    \
  X(INDEX_Q, c->index_heads * c->index_dim)        /* queries of all heads */                      \
  X(INDEX_K, c->index_dim)                         /* one key */                                   \
  X(INDEX_QK, (c->index_heads + 1) * c->index_dim) /* both */                                      \
  X(INDEX_HEADS, c->index_heads)                                                                   \
  X(INDEX_POOL, 2 * c->index_dim) /* two halves of a key */                                        \
  X(INDEX_GROUP, c->index_group)                                                                   \
  /* pooled attention */                                                                           \
  X(TWO_HEADS, 2 * c->head_dim) /* two halves of a key */                                          \
  X(POOL_GROUP, c->pool_group)                                                                     \
  X(POOL_TOP_GROUP, c->pool_top_group)                                                             \
  X(O_A, c->o_groups * c->o_lora_rank) /* output of low rank, of all groups of heads */            \
  X(O_GROUP, c->o_groups ? c->n_heads * c->head_dim / c->o_groups : 0) /* heads of a group */      \
  /* hyper-connections */                                                                          \
  X(STREAMS, c->n_streams)                                                                         \
  X(STREAM_SCORES, (2 + c->n_streams) * c->n_streams)                                              \
  X(STREAM_WIDTH, c->n_streams * c->dim) /* of a residual */                                       \
  X(THREE, 3)                                                                                      \
  X(HYPER_RANK, c->hyper_rank)                                                                     \
  X(NGRAM, c->ngram_dim) /* the embeddings of all n-grams of a token */                            \
  X(NGRAM_TAPS, c->ngram_taps)                                                                     \
  X(TOP_K, c->top_k)                                                                               \
  X(DENSE, c->dense_dim)                                                                           \
  X(EXPERT, c->expert_dim)                                                                         \
  X(SHARED, c->shared_dim ? c->shared_dim : c->n_shared_experts * c->expert_dim)                   \
  X(EXPERTS, c->n_experts)                 /* number of experts */                                 \
  X(EXPERT_PAIRS, 2 * c->expert_dim)       /* rows of gate and up */                               \
  X(HEADS, c->n_heads)                     /* number of query heads */                             \
  X(Q_GATED, 2 * c->n_heads * c->head_dim) /* queries and their gates */                           \
  /* gated delta nets */                                                                           \
  X(DELTA_QKV, 2 * c->delta_k_heads * c->delta_k_dim +                                             \
                   c->delta_v_heads * c->delta_v_dim) /* queries, keys and values */               \
  X(DELTA_QKVZ, 2 * (c->delta_k_heads * c->delta_k_dim +                                           \
                     c->delta_v_heads * c->delta_v_dim)) /* and the output's gate */               \
  X(DELTA_V, c->delta_v_heads * c->delta_v_dim)          /* values of all heads */                 \
  X(DELTA_HEADS, c->delta_v_heads)                                                                 \
  X(DELTA_PAIRS, 2 * c->delta_v_heads) /* twice the heads */                                       \
  X(DELTA_HEAD, c->delta_v_dim)        /* one head's value */                                      \
  X(DELTA_TAPS, c->delta_taps)                                                                     \
  /* a tower */                                                                                    \
  X(VISION, c->vision.dim)                                                                         \
  X(VISION_QKV, 3 * c->vision.dim)                                                                 \
  X(VISION_MLP, c->vision.mlp_dim)                                                                 \
  X(VISION_PATCH, 3 * c->vision.temporal * c->vision.patch * c->vision.patch)                      \
  X(VISION_MERGED, c->vision.merge * c->vision.merge * c->vision.dim)                              \
  X(VISION_HEAD, c->vision.dim / c->vision.n_heads)                                                \
  X(VISION_CONTEXT, c->vision.context_dim)                                                         \
  X(VISION_OUT, c->vision.out_dim)                                                                 \
  X(VISION_POSITIONS, c->vision.n_positions)

typedef enum {
#define X(NAME, value) TD_DIM_##NAME,
  TD_DIMS(X)
#undef X
} td_dim;

// Conditions under which a layer has a tensor: TD_IF(NAME) is a bit.
enum {
  TD_BIT_Q_LORA,
  TD_BIT_Q_WHOLE, // without q_lora
  TD_BIT_BIAS,
  TD_BIT_DENSE,
  TD_BIT_MOE,
  TD_BIT_SHARED,
  TD_BIT_UNTIED,
  TD_BIT_QK_NORM,
  TD_BIT_PAIRS,   // rows of gate and up alternate
  TD_BIT_SPLIT,   // they do not
  TD_BIT_TABLE,   // token ids say which experts
  TD_BIT_ROUTED,  // they do not
  TD_BIT_STREAMS, // which the head reads by scores
  TD_BIT_LATENT,  // of a kind of latent attention
  TD_BIT_INDEX,   // of one with an indexer of its own
  TD_BIT_NGRAMS,
  TD_BIT_GATED, // streams that the head reads by gates
  TD_BIT_NORM,  // which it does not, so that a norm is the last
  TD_BIT_OWN_V, // values are not the keys
// TD_BIT_GQA, TD_BIT_MLA and so on: the layer is of this kind of attention.
#define TD_ATTN_BIT(KIND, name) TD_BIT_##KIND,
  TD_ATTN_KINDS(TD_ATTN_BIT)
#undef TD_ATTN_BIT
};
#define TD_IF(NAME) ((uint64_t)1 << TD_BIT_##NAME)

typedef enum {
  TD_SPEC_VEC,         // td_vec
  TD_SPEC_NORM1,       // td_vec of a norm, stored without the 1 that is added to each weight
  TD_SPEC_NORM_BY_DIM, // td_vec of a norm whose result is divided by sqrt(rows)
  TD_SPEC_CONV,   // const float *: a filter stored as [rows][1][cols], bound as F32 [cols][rows];
                  // "q_conv1d": the first of three of rows / 3 each, and then k and v
  TD_SPEC_WEIGHT, // td_weight
  TD_SPEC_ROUTER, // td_weight that td_quantize keeps
  TD_SPEC_LATENT, // td_weight of MLA's latent keys and values: td_quantize encodes it with at least
                  // 8 bits
  TD_SPEC_PLAIN,  // td_weight, not quantized
  TD_SPEC_PATCH,  // the same, stored with more dimensions than two
  TD_SPEC_F32,    // const float *, a vector or matrix converted to F32 if needed
  TD_SPEC_SCORES, // td_weight converted to F32 if needed, whose name is not that of a module
  TD_SPEC_TABLE,  // const int32_t *, ids of experts
  TD_SPEC_NGRAMS, // td_ngram_table, in one tensor or in shards: name is theirs up to the number
  TD_SPEC_EXPERT, // td_weight *, one per expert
  TD_SPEC_EXPERT_BIAS, // const float *, F32 [n_experts][rows], and then as many called by the alias
} td_place_kind;

typedef struct {
  // For a layer's tensors the part after "model.layers.N."; for an expert's, the part after its
  // number.
  const char *name;
  td_place_kind kind;
  size_t offset; // of the destination field
  td_dim rows, cols;
  uint64_t conditions;
  // What other checkpoints of the family call it; NULL: no other name. "gate_up_proj.weight": of
  // an MLP's gate and up, gate rows first.
  const char *alias[2];
} td_tensor_spec;

extern const td_tensor_spec td_end_places[]; // offsets into td_model_ends
extern const size_t td_n_end_places;
extern const td_tensor_spec td_mtp_places[]; // offsets into td_mtp; names as of a layer's
// The last norm of a prediction layer that has it itself, not its head: what continues from there
// is normed.
#define TD_MTP_OWN_NORM "final_layernorm.weight"
extern const size_t td_n_mtp_places;
extern const td_tensor_spec td_mtp_apart_places[]; // names behind td_family.mtp, if has_mtp_apart
extern const size_t td_n_mtp_apart_places;
extern const td_tensor_spec td_mtp_stream_places[]; // with n_streams; names as of a layer's
extern const size_t td_n_mtp_stream_places;

#define TD_MAX_TENSOR_NAME 256

// The name in config's checkpoint of the tensor that a language model alone calls `name`.
void td_tensor_name(const td_model_config *config, const char *name, char out[TD_MAX_TENSOR_NAME]);
// Finds out which names the store uses for a wrapper's language model: the publisher's, or those of
// transformers 5 ("model.language_model.", "lm_head.weight"); and whether experts with a clamped
// activation are stored one by one.
void td_settle_names(td_model_config *config, const td_store *store);
// Whether name is "model.layers.N." and more in the checkpoint's spelling; if so *rest is what
// follows and *layer_idx is N.
bool td_tensor_layer(const td_model_config *config, const char *name, uint32_t *layer_idx,
                     const char **rest);

uint32_t td_dim_value(const td_model_config *config, td_dim dim);
// Bit mask of conditions a layer meets. It has the tensors all of whose conditions are in the mask.
uint64_t td_layer_conditions(const td_model_config *config, uint32_t layer_idx);
uint64_t td_end_conditions(const td_model_config *config);
static inline uint64_t td_vision_conditions(const td_model_config *config) {
  return config->vision.has_bias ? TD_IF(BIAS) : 0;
}
