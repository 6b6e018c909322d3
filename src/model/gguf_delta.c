// src/model/gguf_delta.c - what GGUF stores of gated delta nets in another way than publishers: the
// 1 is added to norms, decays are -exp(A_log), filters have no middle dimension, and the strengths
// and decays of each group of heads share a matrix.
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "gguf/files.h"
#include "model/bind_impl.h"

td_status td_bind_gguf_decay(td_tensor_binder *b, const td_tensor *t, const float **field) {
  const void *stored = NULL;
  td_status st = td_binder_place_f32(b, t, &stored);
  if (st != TD_OK) return st;
  const uint64_t n = td_tensor_elements(t);
  float *values = td_binder_block(b, n * sizeof *values);
  if (!values) return td_tensor_fail(b->err, TD_ENOMEM, t, "out of memory");
  for (uint64_t i = 0; i < n; i++)
    values[i] = logf(-((const float *)stored)[i]);
  *field = values;
  return TD_OK;
}

td_status td_bind_gguf_gates(td_tensor_binder *b, const td_tensor_spec *p, const char *name,
                             td_weight *w, bool *found) {
  static const char *const halves[] = {"in_proj_b.weight", "in_proj_a.weight"};
  const size_t half = p->offset == offsetof(td_layer, delta_a);
  char both[TD_MAX_TENSOR_NAME];
  *found = false;
  if (p->offset != offsetof(td_layer, delta_b) && !half) return TD_OK;
  const size_t n = strlen(name), n_end = strlen(halves[half]);
  if (n < n_end || strcmp(name + n - n_end, halves[half]) != 0 || td_binder_peek(b, name))
    return TD_OK;
  snprintf(both, sizeof both, "%.*sin_proj_ba.weight", (int)(n - n_end), name);
  const td_tensor *t = td_binder_peek(b, both);
  if (!t || !td_gguf_is(t->file)) return TD_OK;
  *found = true;
  const uint32_t rows = b->config->delta_v_heads, cols = b->config->dim;
  const uint32_t in_group = rows / b->config->delta_k_heads;
  *w = (td_weight){.rows = rows, .cols = cols};
  td_status st = td_binder_find(b, both, &t);
  if (st == TD_OK) {
    const unsigned plain = 1u << TD_F32 | 1u << TD_F16 | 1u << TD_BF16;
    st = td_binder_dtype(b, t, plain | TD_BLOCK_BITS, &w->dtype);
  }
  if (st == TD_OK) st = td_binder_check_shape(b, t, 2 * (uint64_t)rows, cols);
  if (st != TD_OK) return st;
  const size_t bytes = in_group * td_weight_row_bytes(w); // of a group's rows of one kind
  uint8_t *data = td_binder_block(b, td_weight_data_bytes(w));
  if (!data) return td_tensor_fail(b->err, TD_ENOMEM, t, "out of memory");
  for (uint32_t g = 0; g < b->config->delta_k_heads; g++)
    memcpy(data + g * bytes, t->data + (2 * g + half) * bytes, bytes);
  w->data = data;
  return TD_OK;
}
