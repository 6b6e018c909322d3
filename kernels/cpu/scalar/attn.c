// kernels/cpu/scalar/attn.c - the reference attention block.
#include <math.h>

#include "kernels/cpu/common/numeric.h"
#include "kernels/decl.h"

static float dot(const float *q, const void *k, td_dtype dtype, size_t at, uint32_t dim) {
  float sum[4] = {0};
  for (uint32_t d = 0; d < dim; d++)
    sum[d % 4] += q[d] * f32_from_any(k, dtype, at + d);
  return sum[0] + sum[1] + (sum[2] + sum[3]);
}

// Where key j is, or its value.
static const char *row_of(const td_attn_block_args *a, const void *base, size_t ld, uint32_t j,
                          td_dtype dtype) {
  if (!a->rows) return (const char *)base + j * ld * td_dtype_bytes(dtype);
  return a->rows[j] + ((const char *)base - (const char *)a->k);
}

// One query; p holds its scores, then its probabilities relative to the new maximum.
static void attend(const td_attn_block_args *a, uint32_t i, td_dtype dtype) {
  float p[TD_ATTN_KEYS];
  float *acc = a->acc + i * a->ldacc;
  uint32_t n = a->n_visible[i], first = a->n_hidden ? a->n_hidden[i] : 0;
  float m = a->m[i];
  for (uint32_t j = first; j < n; j++) {
    p[j] = dot(a->q + i * a->ldq, row_of(a, a->k, a->ldk, j, dtype), dtype, 0, a->k_dim);
    m = fmaxf(m, p[j]);
  }
  float decay = expf(a->m[i] - m);
  float l = a->l[i] * decay;
  for (uint32_t d = 0; d < a->v_dim; d++)
    acc[d] *= decay;
  for (uint32_t j = first; j < n; j++) {
    p[j] = expf(p[j] - m);
    l += p[j];
    const char *v = row_of(a, a->v, a->ldv, j, dtype);
    for (uint32_t d = 0; d < a->v_dim; d++)
      acc[d] += p[j] * f32_from_any(v, dtype, d);
  }
  a->m[i] = m;
  a->l[i] = l;
}

static void attend_all(const td_attn_block_args *a, td_dtype dtype) {
  for (uint32_t i = 0; i < a->n_q; i++) {
    if (a->n_visible[i] > 0) attend(a, i, dtype);
  }
}

void attn_f16__scalar(const td_attn_block_args *a) {
  attend_all(a, TD_F16);
}

void attn_f32__scalar(const td_attn_block_args *a) {
  attend_all(a, TD_F32);
}
