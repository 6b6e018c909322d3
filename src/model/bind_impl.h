// src/model/bind_impl.h - what bind.c (the model's places) and bind_weight.c (the ways a matrix is
// stored) share.
#ifndef TD_MODEL_BIND_IMPL_H
#define TD_MODEL_BIND_IMPL_H

#include "model/tensor_bind.h"

#define TD_MAX_TENSOR_NAME 256

typedef struct {
  td_bound_tensors *out;
  td_model_config *config;
  const td_store *store;
  const td_quant *quant;
  td_err *err;
  bool *used; // of each tensor of store
} td_tensor_binder;

// The tensor of that name, which is now used. Missing: TD_EFORMAT.
td_status td_binder_find(td_tensor_binder *b, const char *name, const td_tensor **out);
// NULL where there is none; nothing is noted.
const td_tensor *td_binder_peek(const td_tensor_binder *b, const char *name);

// TD_EFORMAT unless t has this shape; cols 0: a vector of rows.
td_status td_binder_check_shape(const td_tensor_binder *b, const td_tensor *t, uint64_t rows,
                                uint64_t cols);
// t's dtype as one of those allowed, a bit each; TD_EUNSUPPORTED names them.
td_status td_binder_dtype(const td_tensor_binder *b, const td_tensor *t, unsigned allowed,
                          td_dtype *out);

// The tensor's data where the file has them, or an aligned copy where that does not suit.
td_status td_binder_place(td_tensor_binder *b, const td_tensor *t, size_t align, const void **out);
// As td_binder_place, but always F32; from F32, F16, BF16 and F8_E8M0.
td_status td_binder_place_f32(td_tensor_binder *b, const td_tensor *t, const void **out);

// Binds module.weight [rows][cols], however it is stored. plain: not quantized.
td_status td_bind_weight(td_tensor_binder *b, const char *module, bool plain, uint32_t rows,
                         uint32_t cols, td_weight *w);

#endif
