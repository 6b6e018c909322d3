// src/device/cpu/hyper.c - hyper-connections: a residual of several streams, a token at a time; and
// activations of rows by themselves.
#include <math.h>
#include <string.h>

#include "device/check.h"
#include "device/cpu/cpu.h"

static float sigmoid(float x) {
  return 1 / (1 + expf(-x));
}

// Divides each row (or column) by its sum.
static void balance(float *m, uint32_t n, bool columns, float eps) {
  const uint32_t along = columns ? n : 1, across = columns ? 1 : n;
  for (uint32_t i = 0; i < n; i++) {
    float sum = 0;
    for (uint32_t j = 0; j < n; j++)
      sum += m[i * across + j * along];
    for (uint32_t j = 0; j < n; j++)
      m[i * across + j * along] /= sum + eps;
  }
}

static void softmax_row(float *row, uint32_t n, float offset) {
  float max = row[0], sum = 0;
  for (uint32_t i = 1; i < n; i++)
    max = fmaxf(max, row[i]);
  for (uint32_t i = 0; i < n; i++)
    sum += row[i] = expf(row[i] - max);
  for (uint32_t i = 0; i < n; i++)
    row[i] = row[i] / sum + offset;
}

// The factors of a token from its scores, in their place.
static void find_factors(const td_hyper_read_args *a, const float *x, float *scores) {
  const uint32_t n = a->n_streams, n_scores = a->head ? n : td_hyper_scores(n);
  const size_t width = (size_t)n * a->dim;
  double squares = 0;
  for (size_t i = 0; i < width; i++)
    squares += (double)x[i] * x[i];
  const float gain = 1 / sqrtf((float)(squares / (double)width) + a->norm_eps);
  for (uint32_t i = 0; i < n_scores; i++) {
    const uint32_t part = i / n < 2 ? i / n : 2;
    scores[i] = scores[i] * gain * a->scale[part] + a->base[i];
    if (part == 0) scores[i] = sigmoid(scores[i]) + a->eps;
    if (part == 1) scores[i] = 2 * sigmoid(scores[i]);
  }
  if (a->head) return;
  float *comb = scores + 2 * (size_t)n;
  for (uint32_t i = 0; i < n; i++)
    softmax_row(comb + i * n, n, a->eps);
  balance(comb, n, true, a->eps);
  for (uint32_t i = 1; i < a->n_rounds; i++) {
    balance(comb, n, false, a->eps);
    balance(comb, n, true, a->eps);
  }
}

static void read_token(void *ctx, size_t t, unsigned member) {
  (void)member;
  const td_hyper_read_args *a = ctx;
  const uint32_t n = a->n_streams;
  const float *x = (const float *)a->x + t * n * a->dim;
  float equal[TD_MAX_STREAMS], *scores = equal;
  float *out = (float *)a->out + t * a->dim;
  for (uint32_t i = 0; i < n; i++)
    equal[i] = 1 / (float)n;
  if (a->scores) {
    scores = a->scores + t * (a->head ? n : td_hyper_scores(n));
    find_factors(a, x, scores);
  }
  memset(out, 0, a->dim * sizeof *out);
  td_kernels()->axpy(
      &(td_axpy_args){.y = out, .x = x, .a = scores, .n = a->dim, .ldx = a->dim, .n_rows = n});
  td_kernels()->rmsnorm_row(
      &(td_norm_row_args){.x = out, .w = a->w, .out = out, .eps = a->norm_eps});
}

td_status td_cpu_op_hyper_read(td_cpu_stream *stream, const td_hyper_read_args *a, td_err *err) {
  td_status st = td_dev_check_vec(&a->w, a->dim, "norm", err);
  if (st != TD_OK) return st;
  TD_DEV_REQUIRE(a->n_streams > 0 && a->n_streams <= TD_MAX_STREAMS,
                 "hyper-connections: %u streams; at most %d", a->n_streams, TD_MAX_STREAMS);
  td_cpu_for(stream, a->n_tokens, read_token, (void *)a);
  return TD_OK;
}

enum { COLUMNS = 256 }; // that are mixed together

static void write_token(void *ctx, size_t t, unsigned member) {
  (void)member;
  const td_hyper_write_args *a = ctx;
  const uint32_t n = a->n_streams;
  float *x = (float *)a->x + t * n * a->dim;
  const float *y = (const float *)a->y + t * a->dim;
  if (!a->scores) {
    for (uint32_t k = 0; k < n; k++)
      memcpy(x + (size_t)k * a->dim, y, a->dim * sizeof *x);
    return;
  }
  if (a->adds) {
    for (uint32_t k = 0; k < n; k++)
      td_kernels()->axpy(&(td_axpy_args){.y = x + (size_t)k * a->dim,
                                         .x = y,
                                         .a = a->scores + t * n + k,
                                         .n = a->dim,
                                         .n_rows = 1});
    return;
  }
  const float *post = a->scores + t * td_hyper_scores(n) + n, *comb = post + n;
  float mixed[TD_MAX_STREAMS * COLUMNS];
  for (uint32_t c = 0; c < a->dim; c += COLUMNS) {
    const uint32_t n_columns = a->dim - c < COLUMNS ? a->dim - c : COLUMNS;
    for (uint32_t k = 0; k < n; k++) {
      float *out = mixed + k * COLUMNS;
      for (uint32_t i = 0; i < n_columns; i++)
        out[i] = post[k] * y[c + i];
      for (uint32_t j = 0; j < n; j++) {
        const float *row = x + (size_t)j * a->dim + c;
        const float factor = comb[j * n + k];
        for (uint32_t i = 0; i < n_columns; i++)
          out[i] += factor * row[i];
      }
    }
    for (uint32_t k = 0; k < n; k++)
      memcpy(x + (size_t)k * a->dim + c, mixed + k * COLUMNS, n_columns * sizeof *x);
  }
}

td_status td_cpu_op_hyper_write(td_cpu_stream *stream, const td_hyper_write_args *a, td_err *err) {
  TD_DEV_REQUIRE(a->n_streams > 0 && a->n_streams <= TD_MAX_STREAMS,
                 "hyper-connections: %u streams; at most %d", a->n_streams, TD_MAX_STREAMS);
  td_cpu_for(stream, a->n_tokens, write_token, (void *)a);
  return TD_OK;
}

static void mix_token(void *ctx, size_t t, unsigned member) {
  (void)member;
  const td_hyper_mix_args *a = ctx;
  const uint32_t n = a->n_streams;
  const float *x = (const float *)a->x + t * n * a->dim, part = 1 / (float)n;
  const float *gate = (const float *)a->gate + t * n * a->dim;
  float *out = (float *)a->out + t * a->dim, gated[COLUMNS];
  for (uint32_t k = 0; a->scores && k < n; k++)
    a->scores[t * n + k] = 2 * sigmoid(a->scores[t * n + k] / (float)n);
  memset(out, 0, a->dim * sizeof *out);
  for (uint32_t c = 0; c < a->dim; c += COLUMNS) {
    const uint32_t n_columns = a->dim - c < COLUMNS ? a->dim - c : COLUMNS;
    for (uint32_t k = 0; k < n; k++) {
      const size_t at = (size_t)k * a->dim + c;
      td_kernels()->sigmoid_row(
          &(td_sigmoid_row_args){.gate = gate + at, .x = x + at, .out = gated, .n = n_columns});
      td_kernels()->axpy(
          &(td_axpy_args){.y = out + c, .x = gated, .a = &part, .n = n_columns, .n_rows = 1});
    }
  }
}

td_status td_cpu_op_hyper_mix(td_cpu_stream *stream, const td_hyper_mix_args *a, td_err *err) {
  TD_DEV_REQUIRE(a->n_streams > 0 && a->n_streams <= TD_MAX_STREAMS,
                 "hyper-connections: %u streams; at most %d", a->n_streams, TD_MAX_STREAMS);
  td_cpu_for(stream, a->n_tokens, mix_token, (void *)a);
  return TD_OK;
}

static void silu_row(void *ctx, size_t i, unsigned member) {
  (void)member;
  const td_silu_rows_args *a = ctx;
  float *x = (float *)a->x + i * a->dim;
  for (uint32_t c = 0; c < a->dim; c++)
    x[c] *= a->factor;
  td_kernels()->sigmoid_row(&(td_sigmoid_row_args){.gate = x, .x = x, .out = x, .n = a->dim});
}

td_status td_cpu_op_silu_rows(td_cpu_stream *stream, const td_silu_rows_args *a, td_err *err) {
  (void)err;
  td_cpu_for(stream, a->n_rows, silu_row, (void *)a);
  return TD_OK;
}

static void gelu_by_tanh(float *x, uint32_t n) {
  enum { PIECE = 256 };
  float gate[PIECE];
  for (uint32_t from = 0, some; from < n; from += some, x += some) {
    some = n - from < PIECE ? n - from : PIECE;
    for (uint32_t c = 0; c < some; c++) // 2 sqrt(2/pi) (x + 0.044715 x^3)
      gate[c] = 1.5957691216057308f * (x[c] + 0.044715f * x[c] * x[c] * x[c]);
    td_kernels()->sigmoid_row(&(td_sigmoid_row_args){.gate = gate, .x = x, .out = x, .n = some});
  }
}

static void activate_row(void *ctx, size_t i, unsigned member) {
  (void)member;
  const td_activate_rows_args *a = ctx;
  float *x = a->x + i * a->dim, *up = a->up ? a->up + i * a->dim : NULL;
  switch (a->kind) {
  case TD_ACTIVATE_GELU:
    for (uint32_t c = 0; c < a->dim; c++)
      x[c] *= 0.5f * (1 + erff(x[c] * 0.70710678118654752f));
    return;
  case TD_ACTIVATE_GELU_TANH: gelu_by_tanh(x, a->dim); return;
  case TD_ACTIVATE_SWIGLU: break;
  }
  for (uint32_t c = 0; c < a->dim && a->limit > 0; c++) {
    x[c] = fminf(x[c], a->limit);
    up[c] = fmaxf(-a->limit, fminf(up[c], a->limit));
  }
  td_kernels()->swiglu_row(&(td_swiglu_row_args){.gate = x, .up = up, .out = x, .n = a->dim});
}

td_status td_cpu_op_activate_rows(td_cpu_stream *stream, const td_activate_rows_args *a,
                                  td_err *err) {
  TD_DEV_REQUIRE(a->kind != TD_ACTIVATE_SWIGLU || a->up, "activation: nothing to gate");
  td_cpu_for(stream, a->n_rows, activate_row, (void *)a);
  return TD_OK;
}
