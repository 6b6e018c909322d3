// src/model/tensor_bind.h - binds every tensor of a checkpoint to a field of the model, and every
// field to a tensor.
#pragma once

#include "model/checkpoint/store.h"
#include "model/quant_scheme.h"
#include "model/tensor_specs.h"

typedef struct {
  td_layer *layers; // [config->n_layers], and the one of mtp
  td_mtp mtp;
  bool has_mtp;
  td_model_ends ends;
  td_vision_weights vision; // with config->vision.n_layers
  void **blocks;            // arrays of experts, and tensors that had to be copied
  size_t n_blocks, cap_blocks;
} td_bound_tensors;

// Binds all of store, whose data the result borrows. Corrects tie_embeddings, n_mtp_layers and
// vision.n_layers of config to match the checkpoint. quant describes how quantized matrices are
// stored. Call td_binding_free also after an error.
td_status td_bind(td_bound_tensors *out, td_model_config *config, const td_quant *quant,
                  const td_store *store, td_err *err);
// Binds one matrix, t of store, with its own shape and the format given by quant. Marks its tensors
// in used [td_store_n_tensors]. binding is zeroed, or from an earlier call.
td_status td_bind_matrix(td_bound_tensors *binding, const td_quant *quant, const td_store *store,
                         const td_tensor *t, bool *used, td_weight *w, td_err *err);
// Binds the matrices for the field of spec of all experts of a layer, fused into one tensor of
// store whose name is prefix and gate_up_proj or down_proj: experts[config->n_experts].
td_status td_bind_fused(td_bound_tensors *binding, td_model_config *config, const td_quant *quant,
                        const td_store *store, const td_tensor_spec *spec, const char *prefix,
                        bool *used, td_weight *experts, td_err *err);
void td_binding_free(td_bound_tensors *binding);
