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

// A tensor's dimension, derived from config.json.
typedef enum {
  TD_DIM_ONE, // second dimension of a vector
  TD_DIM_MODEL,
  TD_DIM_TWO_MODELS, // twice that
  TD_DIM_VOCAB,
  // GQA
  TD_DIM_Q,    // queries of all heads, and their output
  TD_DIM_KV,   // keys of all heads
  TD_DIM_HEAD, // one head
  // MLA
  TD_DIM_MLA_Q,   // queries of all heads
  TD_DIM_MLA_OUT, // attention output of all heads
  TD_DIM_Q_LORA,
  TD_DIM_KV_LORA,
  TD_DIM_KV_A, // compressed KV and the shared rotary key
  TD_DIM_KV_B, // non-rotary keys, and values, of all heads
  // indexer
  TD_DIM_INDEX_Q,  // queries of all heads
  TD_DIM_INDEX_K,  // one key
  TD_DIM_INDEX_QK, // both
  TD_DIM_INDEX_HEADS,
  TD_DIM_INDEX_POOL, // two halves of a key
  TD_DIM_INDEX_GROUP,
  // pooled attention
  TD_DIM_TWO_HEADS, // two halves of a key
  TD_DIM_POOL_GROUP,
  TD_DIM_POOL_TOP_GROUP,
  TD_DIM_O_A,     // output of low rank, of all groups of heads
  TD_DIM_O_GROUP, // heads of a group
  // hyper-connections
  TD_DIM_STREAMS,
  TD_DIM_STREAM_SCORES,
  TD_DIM_STREAM_WIDTH, // of a residual
  TD_DIM_THREE,
  TD_DIM_HYPER_RANK,
  TD_DIM_NGRAM, // the embeddings of all n-grams of a token
  TD_DIM_NGRAM_TAPS,
  TD_DIM_TOP_K,
  TD_DIM_DENSE,
  TD_DIM_EXPERT,
  TD_DIM_SHARED,
  TD_DIM_EXPERTS,      // number of experts
  TD_DIM_EXPERT_PAIRS, // rows of gate and up
  TD_DIM_HEADS,        // number of query heads
  TD_DIM_Q_GATED,      // queries and their gates
  // gated delta nets
  TD_DIM_DELTA_QKV,  // queries, keys and values
  TD_DIM_DELTA_QKVZ, // and the output's gate
  TD_DIM_DELTA_V,    // values of all heads
  TD_DIM_DELTA_HEADS,
  TD_DIM_DELTA_PAIRS, // twice the heads
  TD_DIM_DELTA_HEAD,  // one head's value
  TD_DIM_DELTA_TAPS,
} td_dim;

// Conditions under which a layer has a tensor.
#define TD_IF_FIRST_KIND 18
enum {
  TD_IF_Q_LORA = 1 << 0,
  TD_IF_Q_WHOLE = 1 << 1, // without q_lora
  TD_IF_BIAS = 1 << 2,
  TD_IF_DENSE = 1 << 3,
  TD_IF_MOE = 1 << 4,
  TD_IF_SHARED = 1 << 5,
  TD_IF_UNTIED = 1 << 6,
  TD_IF_QK_NORM = 1 << 7,
  TD_IF_PAIRS = 1 << 8,    // rows of gate and up alternate
  TD_IF_SPLIT = 1 << 9,    // they do not
  TD_IF_TABLE = 1 << 10,   // token ids say which experts
  TD_IF_ROUTED = 1 << 11,  // they do not
  TD_IF_STREAMS = 1 << 12, // which the head reads by scores
  TD_IF_LATENT = 1 << 13,  // of a kind of latent attention
  TD_IF_INDEX = 1 << 14,   // of one with an indexer of its own
  TD_IF_NGRAMS = 1 << 15,
  TD_IF_GATED = 1 << 16, // streams that the head reads by gates
  TD_IF_NORM = 1 << 17,  // which it does not, so that a norm is the last
// TD_IF_GQA, TD_IF_MLA and so on: the layer is of this kind of attention.
#define TD_ATTN_CONDITION(KIND, name) TD_IF_##KIND = 1 << (TD_IF_FIRST_KIND + TD_ATTN_##KIND),
  TD_ATTN_KINDS(TD_ATTN_CONDITION)
#undef TD_ATTN_CONDITION
};

typedef enum {
  TD_SPEC_VEC,    // td_vec
  TD_SPEC_NORM1,  // td_vec of a norm, stored without the 1 that is added to each weight
  TD_SPEC_CONV,   // const float *: a filter stored as [rows][1][cols], bound as F32 [cols][rows]
  TD_SPEC_CONV3,  // the same of three filters of rows / 3 each, of which the name is the first's
                  // ("q_conv1d", and then k and v)
  TD_SPEC_WEIGHT, // td_weight
  TD_SPEC_ROUTER, // td_weight that td_quantize keeps
  TD_SPEC_LATENT, // td_weight of MLA's latent keys and values: td_quantize encodes it with at least
                  // 8 bits
  TD_SPEC_PLAIN,  // td_weight, not quantized
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
  unsigned conditions;
  const char *alias; // what other checkpoints of the family call it; NULL: no other name
} td_tensor_spec;

extern const td_tensor_spec td_end_places[]; // offsets into td_model_ends
extern const size_t td_n_end_places;
extern const td_tensor_spec td_mtp_places[]; // offsets into td_mtp; names as of a layer's
// The last norm of a prediction layer that has it itself, not its head: what goes on from there is
// normed.
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
unsigned td_layer_conditions(const td_model_config *config, uint32_t layer_idx);
unsigned td_end_conditions(const td_model_config *config);
