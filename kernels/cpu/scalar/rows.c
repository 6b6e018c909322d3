// kernels/cpu/scalar/rows.c - reference kernels for one row of activations.
#include <math.h>

#include "kernels/cpu/common/dequant.h"
#include "kernels/cpu/rows/sum_row.h"
#include "kernels/decl.h"

static void decode_row4(const td_decode_row_args *a) {
  const td_weight *w = a->w;
  bool is_int = w->dtype == TD_I4;
  const char *codes = (const char *)w->data + a->row * td_weight_row_bytes(w);
  float values[16], global = is_int ? 1 : w->global_scale;
  uint32_t n;
  for (uint32_t k = 0; k < w->cols; k += n) {
    size_t group = k / w->scale_cols;
    n = run_length(w, k, w->cols);
    float scale = scale_at(w, a->row, group);
    int zero = is_int ? zero_at(w, a->row, group) : 0;
    for (int code = 0; code < 16; code++) { // the first product is exact unless scales are F32
      float value = is_int ? (float)(code - zero) : f32_from_e2m1((unsigned)code);
      values[code] = value * scale * global;
    }
    for (uint32_t i = k; i < k + n; i++)
      a->out[i] = values[nibble_at(codes, i)];
  }
}

void decode_row__scalar(const td_decode_row_args *a) {
  const td_weight *w = a->w;
  if (td_dtype_bits(w->dtype) == 4) {
    decode_row4(a);
    return;
  }
  for (uint32_t c = 0; c < w->cols; c++)
    a->out[c] = weight_at(w, a->row, c);
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
  for (uint32_t j = 0; j < a->n_rows; j++) {
    for (size_t i = 0; i < a->n; i++)
      a->y[i] += a->a[j] * a->x[j * a->ldx + i];
  }
}

void axpy_weights__scalar(const td_axpy_weights_args *a) {
  for (uint32_t j = 0; j < a->n_rows; j++) {
    for (uint32_t c = 0; c < a->w->cols; c++)
      a->y[c] += a->a[j] * weight_at(a->w, a->row + j, c);
  }
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

void sum_row__scalar(const td_sum_row_args *a) {
  sum_row(a);
}
