// kernels/cpu/scalar/delta.c - reference kernels of gated delta nets.
#include <math.h>

#include "kernels/decl.h"

void sigmoid_row__scalar(const td_sigmoid_row_args *a) {
  for (size_t i = 0; i < a->n; i++)
    a->out[i] = a->x[i] / (1.0f + expf(-a->gate[i]));
}

void conv_silu__scalar(const td_conv_silu_args *a) {
  for (size_t i = 0; i < a->n; i++) {
    float sum = 0;
    for (uint32_t j = 0; j < a->n_taps; j++)
      sum += a->w[j * a->ldw + i] * a->x[j][i];
    a->out[i] = sum / (1.0f + expf(-sum));
  }
}

static void delta_step(const td_delta_rule_args *a, uint32_t t, uint32_t c) {
  const float *q = a->q + t * a->ldk, *k = a->k + t * a->ldk, *g = a->gates + t * a->ldg;
  const uint32_t step = a->n_decays > 1; // from a row's decay to the next one's
  float *state = a->state + c;
  float known = 0, sum = 0;
  for (uint32_t i = 0; i < a->k_dim; i++)
    known += k[i] * g[i * step] * state[(size_t)i * TD_DELTA_COLUMNS];
  const float value = c < a->n_cols ? a->v[t * a->ldv + c] : 0;
  const float d = g[a->n_decays] * (value - known);
  for (uint32_t i = 0; i < a->k_dim; i++) {
    float *s = state + (size_t)i * TD_DELTA_COLUMNS;
    *s = g[i * step] * *s + k[i] * d;
    sum += q[i] * *s;
  }
  if (c < a->n_cols) a->out[t * a->ldo + c] = sum;
}

void decay_row__scalar(const td_decay_row_args *a) {
  for (size_t i = 0; i < a->n; i++) {
    const float x = a->x[i] + a->bias[i];
    const float softplus = (x > 0 ? x : 0) + log1pf(expf(-fabsf(x)));
    const float sigmoid = 1 / (1 + expf(-a->rate * x));
    a->out[i] = expf(a->bound < 0 ? a->bound * sigmoid : -a->rate * softplus);
  }
}

void delta_rule__scalar(const td_delta_rule_args *a) {
  for (uint32_t t = 0; t < a->n_tokens; t++) {
    for (uint32_t c = 0; c < TD_DELTA_COLUMNS; c++)
      delta_step(a, t, c);
  }
}
