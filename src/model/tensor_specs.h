// src/model/tensor_specs.h - how a family describes its tensors: name, shape, the field of the
// model each goes to, and what must hold for a layer to have it.
#ifndef TD_MODEL_TENSOR_SPECS_H
#define TD_MODEL_TENSOR_SPECS_H

#include "model/model.h"

// The places outside the layers.
typedef struct {
  td_weight embed, lm_head; // lm_head stays zeroed when tied to embed
  td_vec final_norm;
} td_model_ends;

// A tensor's dimension, as an expression of config.json.
typedef enum {
  TD_DIM_ONE, // a vector's second dimension
  TD_DIM_MODEL,
  TD_DIM_VOCAB,
  TD_DIM_Q,    // queries of all heads
  TD_DIM_KV,   // keys of all heads (GQA)
  TD_DIM_OUT,  // attention output of all heads
  TD_DIM_HEAD, // one head (GQA)
  TD_DIM_Q_LORA,
  TD_DIM_KV_LORA,
  TD_DIM_KV_A, // compressed keys and values, and the shared rotary key
  TD_DIM_KV_B, // keys without rotary part, and values, of all heads
  TD_DIM_DENSE,
  TD_DIM_EXPERT,
  TD_DIM_SHARED,
  TD_DIM_EXPERTS, // how many there are
} td_dim;

// What must hold of a layer for it to have a tensor.
enum {
  TD_IF_Q_LORA = 1 << 0,
  TD_IF_Q_WHOLE = 1 << 1, // no q_lora
  TD_IF_BIAS = 1 << 2,
  TD_IF_DENSE = 1 << 3,
  TD_IF_MOE = 1 << 4,
  TD_IF_SHARED = 1 << 5,
  TD_IF_UNTIED = 1 << 6,
};

typedef enum {
  TD_SPEC_VEC,    // td_vec
  TD_SPEC_WEIGHT, // td_weight
  TD_SPEC_ROUTER, // td_weight that td_quantize leaves alone
  TD_SPEC_LATENT, // td_weight, small and in the way of every key and value: td_quantize does not
                  // make it smaller than 8 bits
  TD_SPEC_PLAIN,  // td_weight, not quantized
  TD_SPEC_F32,    // const float *, converted where needed
  TD_SPEC_EXPERT, // td_weight *, one of each expert
} td_place_kind;

typedef struct {
  // Of a layer's places, what follows "model.layers.N."; of an expert's, what follows
  // "model.layers.N.mlp.experts.M.".
  const char *name;
  td_place_kind kind;
  size_t offset; // of the field
  td_dim rows, cols;
  unsigned conditions;
} td_tensor_spec;

extern const td_tensor_spec td_end_places[]; // offsets into td_model_ends
extern const size_t td_n_end_places;

uint32_t td_dim_value(const td_model_config *config, td_dim dim);
// The conditions a layer meets; it has the places whose conditions are all among them.
unsigned td_layer_conditions(const td_model_config *config, uint32_t layer_idx);
unsigned td_end_conditions(const td_model_config *config);

#endif
