// src/model/convert_kv_b.c - joins the halves of kv_b_proj.
#include "model/convert_kv_b.h"

#include <stdlib.h>

#include "model/convert_matrix.h"
#include "tandem/kernels.h"

td_dtype td_kv_b_dtype(td_dtype k, td_dtype v) {
  return k == v && (k == TD_F16 || k == TD_BF16) ? k : TD_F32;
}

// Writes values to elements at, at + step and so on of out.
static void put(const td_kv_b_parts *p, const float *values, uint32_t n, void *out, size_t at,
                size_t step) {
  for (uint32_t i = 0; i < n; i++, at += step)
    td_put_value(p->dtype, out, at, values[i]);
}

static void decode(const void *data, td_dtype dtype, uint32_t rows, uint32_t cols, uint32_t row,
                   float *out) {
  const td_weight w = {.data = data, .dtype = dtype, .rows = rows, .cols = cols};
  td_kernels()->decode_row(&(td_decode_row_args){.w = &w, .out = out, .row = row});
}

bool td_kv_b_join(const td_kv_b_parts *p, void *out) {
  const uint32_t widest = p->nope > p->latent ? p->nope : p->latent;
  float *row = malloc(widest * sizeof *row);
  if (!row) return false;
  for (uint32_t h = 0; h < p->heads; h++) {
    const size_t at = (size_t)h * (p->nope + p->v_dim) * p->latent;
    for (uint32_t l = 0; l < p->latent; l++) {
      decode(p->k, p->k_dtype, p->heads * p->latent, p->nope, h * p->latent + l, row);
      put(p, row, p->nope, out, at + l, p->latent);
    }
    for (uint32_t d = 0; d < p->v_dim; d++) {
      decode(p->v, p->v_dtype, p->heads * p->v_dim, p->latent, h * p->v_dim + d, row);
      put(p, row, p->latent, out, at + (size_t)(p->nope + d) * p->latent, 1);
    }
  }
  free(row);
  return true;
}
