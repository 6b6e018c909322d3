// kernels/cpu/scalar/rows.c - the reference versions of what works on one row of activations.
#include <math.h>

#include "kernels/cpu/codes.h"
#include "kernels/decl.h"

void decode_row__scalar(const td_decode_row_args *a) {
  const td_weight *w = a->w;
  float global = w->dtype == TD_F4E2M1 ? w->global_scale : 1;
  for (uint32_t c = 0; c < w->cols; c++) {
    float scale = w->scale ? scale_at(w, a->row, c / w->scale_cols) : 1;
    a->out[c] = code_at(w, a->row, c) * scale * global; // the first product is exact for 4 bits
  }
}

void rmsnorm_row__scalar(const td_norm_row_args *a) {
  double sum = 0;
  for (uint32_t i = 0; i < a->w.n; i++)
    sum += (double)a->x[i] * a->x[i];
  float inverse = 1.0f / sqrtf((float)(sum / a->w.n) + a->eps);
  for (uint32_t i = 0; i < a->w.n; i++) {
    a->out[i] = a->x[i] * inverse * f32_from_any(a->w.data, a->w.dtype, i);
  }
}

void swiglu_row__scalar(const td_swiglu_row_args *a) {
  for (size_t i = 0; i < a->n; i++) {
    a->out[i] = a->gate[i] / (1.0f + expf(-a->gate[i])) * a->up[i];
  }
}

void axpy__scalar(const td_axpy_args *a) {
  for (size_t i = 0; i < a->n; i++)
    a->y[i] += a->a * a->x[i];
}

void f32_from_f16__scalar(const td_convert_args *a) {
  const uint16_t *in = a->in;
  float *out = a->out;
  for (size_t i = 0; i < a->n; i++)
    out[i] = f32_from_half(in[i]);
}

void f16_from_f32__scalar(const td_convert_args *a) {
  const float *in = a->in;
  uint16_t *out = a->out;
  for (size_t i = 0; i < a->n; i++)
    out[i] = half_from_f32(in[i]);
}
