// src/model/bind_impl.h - declarations shared by tensor_bind.c (assigns tensors to the model's
// fields) and weight_formats.c (the ways a matrix is stored).
#pragma once

#include "model/tensor_bind.h"
#include "model/tensor_specs.h"

typedef struct {
  td_bound_tensors *out;
  td_model_config *config;
  const td_store *store;
  const td_quant *quant;
  td_err *err;
  bool *used; // [n_tensors of store]: tensor is in use
} td_tensor_binder;

// Bit mask of GGUF's dtypes, whose values need no other tensor.
#define X(id, cols, bytes) | 1u << TD_##id
enum { TD_BLOCK_BITS = 0 TD_BLOCK_DTYPES(X) };
#undef X

// Finds a tensor by name and marks it used. TD_EFORMAT if it is missing.
td_status td_binder_find(td_tensor_binder *b, const char *name, const td_tensor **out);
// Finds a tensor without marking it used. NULL if it is missing.
const td_tensor *td_binder_peek(const td_tensor_binder *b, const char *name);

// TD_EFORMAT unless t has this shape. cols 0: a vector with `rows` elements.
td_status td_binder_check_shape(const td_tensor_binder *b, const td_tensor *t, uint64_t rows,
                                uint64_t cols);
// Converts t's dtype name. allowed: bit mask of td_dtype; TD_EUNSUPPORTED lists them.
td_status td_binder_dtype(const td_tensor_binder *b, const td_tensor *t, unsigned allowed,
                          td_dtype *out);

// Points *out to the tensor's data in the file, or to an aligned copy if they are misaligned.
td_status td_binder_place(td_tensor_binder *b, const td_tensor *t, size_t align, const void **out);
// Like td_binder_place, but the result is always F32. Accepts F32, F16, BF16 and F8_E8M0.
td_status td_binder_place_f32(td_tensor_binder *b, const td_tensor *t, const void **out);

// Allocates n_bytes that live as long as the binding; NULL: out of memory.
void *td_binder_block(td_tensor_binder *b, size_t n_bytes);

// A_log of a gated delta net from the decays that GGUF has.
td_status td_bind_gguf_decay(td_tensor_binder *b, const td_tensor *t, const float **field);
// Binds the strengths or decays of a gated delta net, of which p is one, from the matrix that GGUF
// has of both: *found says whether it is so.
td_status td_bind_gguf_gates(td_tensor_binder *b, const td_tensor_spec *p, const char *name,
                             td_weight *w, bool *found);

// Binds the experts of a layer to the field of spec, if they are fused: *found says so. experts is
// [n_experts]; prefix is what the names of their tensors begin with.
td_status td_bind_fused_experts(td_tensor_binder *b, const td_tensor_spec *spec, const char *prefix,
                                td_weight *experts, bool *found);

// Binds module.weight [rows][cols] in whichever format it is stored. plain: reject quantized ones.
td_status td_bind_weight(td_tensor_binder *b, const char *module, bool plain, uint32_t rows,
                         uint32_t cols, td_weight *w);
