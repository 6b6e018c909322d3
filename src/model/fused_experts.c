// src/model/fused_experts.c - binds experts that are stored as one tensor for a whole layer:
// gate_up_proj [n_experts][2 * expert_dim][dim], each expert's gate rows before its up rows, and
// down_proj [n_experts][dim][expert_dim], in BF16, F16 or F32. Each expert's matrix is a part of
// the tensor; nothing is copied.
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "model/bind_impl.h"

// Where a matrix is in each expert's part of the tensor.
typedef struct {
  const char *name;           // of the tensor
  uint32_t n_rows, first_row; // of an expert in the tensor; the matrix's first of them
} fused_part;

static fused_part part_of(const td_tensor_binder *b, const td_tensor_spec *spec) {
  const uint32_t rows = td_dim_value(b->config, spec->rows);
  if (spec->offset == offsetof(td_layer, down)) return (fused_part){"down_proj", rows, 0};
  const bool is_up = spec->offset == offsetof(td_layer, up);
  return (fused_part){"gate_up_proj", 2 * rows, is_up ? rows : 0};
}

static td_status check_shape(const td_tensor_binder *b, const td_tensor *t, uint32_t rows,
                             uint32_t cols) {
  const uint32_t n = b->config->n_experts;
  if (t->n_dims == 3 && t->shape[0] == n && t->shape[1] == rows && t->shape[2] == cols)
    return TD_OK;
  return td_fail(b->err, TD_EFORMAT,
                 "%s: tensor %s: its shape is not the [%u, %u, %u] that config.json asks for",
                 t->file, t->name, n, rows, cols);
}

td_status td_bind_fused_experts(td_tensor_binder *b, const td_tensor_spec *spec, const char *prefix,
                                td_weight *experts, bool *found) {
  const fused_part part = part_of(b, spec);
  const uint32_t rows = td_dim_value(b->config, spec->rows);
  const uint32_t cols = td_dim_value(b->config, spec->cols);
  char name[TD_MAX_TENSOR_NAME];
  const int len = snprintf(name, sizeof name, "%s%s", prefix, part.name);
  TD_CHECK(len < (int)sizeof name);
  const td_tensor *t = td_binder_peek(b, name);
  *found = t && t->n_dims == 3;
  if (!*found) return TD_OK;
  td_dtype dtype;
  td_status st = td_binder_find(b, name, &t);
  if (st == TD_OK) st = td_binder_dtype(b, t, 1u << TD_F32 | 1u << TD_F16 | 1u << TD_BF16, &dtype);
  if (st == TD_OK) st = check_shape(b, t, part.n_rows, cols);
  const void *data = NULL;
  if (st == TD_OK) st = td_binder_place(b, t, td_dtype_bytes(dtype), &data);
  for (uint32_t e = 0; e < b->config->n_experts && st == TD_OK; e++) {
    experts[e] = (td_weight){.dtype = dtype, .rows = rows, .cols = cols};
    const size_t row = (size_t)e * part.n_rows + part.first_row;
    experts[e].data = (const char *)data + row * td_weight_row_bytes(&experts[e]);
  }
  return st;
}
