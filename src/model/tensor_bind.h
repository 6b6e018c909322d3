// src/model/tensor_bind.h - gives every tensor of a checkpoint its place in the model, and every
// place of the model its tensor.
#ifndef TD_MODEL_TENSOR_BIND_H
#define TD_MODEL_TENSOR_BIND_H

#include "model/checkpoint/store.h"
#include "model/quant_scheme.h"
#include "model/tensor_specs.h"

typedef struct {
  td_layer *layers; // config->n_layers
  td_model_ends ends;
  void **blocks; // arrays of experts, and the few tensors that had to be copied
  size_t n_blocks, cap_blocks;
} td_bound_tensors;

// Binds all of store, whose data the result borrows, and corrects config where the checkpoint knows
// better: tie_embeddings, n_mtp_layers. quant says how what is quantized is stored. td_binding_free
// must be called also after an error.
td_status td_bind(td_bound_tensors *out, td_model_config *config, const td_quant *quant,
                  const td_store *store, td_err *err);
// Reads one matrix, t of store, as its own shape and quant have it; marks the tensors it takes in
// used [td_store_n_tensors]. binding is zeroed, or from an earlier call.
td_status td_bind_matrix(td_bound_tensors *binding, const td_quant *quant, const td_store *store,
                         const td_tensor *t, bool *used, td_weight *w, td_err *err);
void td_binding_free(td_bound_tensors *binding);

#endif
