// src/engine/rows.c - operators on a microbatch's rows of activations.
#include "engine/rows.h"

#include <string.h>

#include "engine/experts/ranks.h"

void *td_rows_offset(const td_engine *e, void *base, size_t elements) {
  return (char *)base + elements * e->act_bytes;
}

void *td_rows_at(const td_engine *e, const td_microbatch *p, void *base, size_t row) {
  return td_rows_offset(e, base, td_rank_is_active(e) ? p->begin * row : 0);
}

void td_rows_linear_op(td_engine *e, const td_microbatch *p, td_linear_op_args a) {
  if (!p->n_tokens) return; // as a rank of several may have none
  a.n_tokens = p->n_tokens;
  a.n_prompt = p->groups[GROUP_PREFILL].view.n_tokens;
  a.weights_on_device = td_engine_is_in_slot(e, a.w);
  td_linear_op_args together = a;
  memset(together.also, 0, sizeof together.also);
  for (uint32_t i = 0, n = 0; i < TD_LINEAR_ALSO && a.also[i].w; i++) {
    td_linear_op_args alone = td_linear_matrix(&a, 1 + i);
    alone.weights_on_device = td_engine_is_in_slot(e, alone.w);
    if (alone.weights_on_device == a.weights_on_device)
      together.also[n++] = a.also[i];
    else // it streams and the first does not, or the other way round, as formats may differ
      td_op_linear(e->stream, &alone);
  }
  td_op_linear(e->stream, &together);
}

void td_rows_linear(td_engine *e, const td_microbatch *p, const td_weight *w, td_vec bias,
                    const void *x, size_t x_stride, void *y) {
  td_rows_linear_op(
      e, p,
      (td_linear_op_args){
          .w = w, .bias = bias, .x = x, .y = y, .x_stride = x_stride, .y_stride = w->rows});
}

void td_rows_linear_all(td_engine *e, const td_microbatch *p, const td_linear_also *all, uint32_t n,
                        const void *x, size_t x_stride) {
  td_linear_op_args a = {.w = all[0].w,
                         .bias = all[0].bias,
                         .x = x,
                         .y = all[0].y,
                         .x_stride = x_stride,
                         .y_stride = all[0].w->rows};
  for (uint32_t i = 1; i < n; i++) {
    a.also[i - 1] = all[i];
    a.also[i - 1].y_stride = all[i].w->rows;
  }
  td_rows_linear_op(e, p, a);
}

void td_rows_linear_f32(td_engine *e, const td_microbatch *p, const td_weight *w, const void *x,
                        float *y, size_t y_stride) {
  td_rows_linear_op(
      e, p,
      (td_linear_op_args){
          .w = w, .x = x, .y = y, .x_stride = w->cols, .y_stride = y_stride, .out_f32 = true});
}

void td_rows_linear_exact(td_engine *e, const td_microbatch *p, const td_weight *w, const void *x,
                          float *y) {
  td_rows_linear_op(e, p,
                    (td_linear_op_args){.w = w,
                                        .x = x,
                                        .y = y,
                                        .x_stride = w->cols,
                                        .y_stride = w->rows,
                                        .out_f32 = true,
                                        .exact = true});
}

void td_rows_norm(td_engine *e, void *x, td_vec w, size_t stride, uint32_t n_rows, float eps) {
  if (!n_rows) return;
  td_op_rmsnorm(e->stream, &(td_rmsnorm_args){.x = x,
                                              .w = w,
                                              .out = x,
                                              .x_stride = stride,
                                              .out_stride = stride,
                                              .n_rows = n_rows,
                                              .dim = w.n,
                                              .eps = eps});
}

static void norm_residual(td_engine *e, const td_microbatch *p, td_vec w, td_rows_left left) {
  if (!p->n_tokens) return;
  uint32_t dim = e->config->dim;
  td_op_rmsnorm(e->stream, &(td_rmsnorm_args){.x = left.pending ? p->delta : p->x,
                                              .more = left.more,
                                              .residual = left.pending ? p->x : NULL,
                                              .w = w,
                                              .out = td_rows_at(e, p, e->h, dim),
                                              .x_stride = dim,
                                              .out_stride = dim,
                                              .n_rows = p->n_tokens,
                                              .dim = dim,
                                              .eps = e->config->rms_eps});
}

// As the whole step has them, one token behind the other.
static float *scores_of(const td_engine *e, const td_microbatch *p) {
  const td_model_config *c = e->config;
  return e->hyper +
         (size_t)p->begin * (c->hyper_rank ? c->n_streams : td_hyper_scores(c->n_streams));
}

void td_rows_complete(td_engine *e, const td_microbatch *p, const void *more) {
  if (more) td_op_add(e->stream, p->delta, more, (size_t)p->n_tokens * e->config->dim);
}

void td_rows_leave_normed(td_engine *e, const td_microbatch *p, td_vec w, float factor) {
  const uint32_t dim = e->config->dim;
  if (!p->n_tokens) return;
  td_rows_norm(e, p->delta, w, dim, p->n_tokens, e->config->rms_eps);
  td_op_add_scaled(e->stream, p->x, p->delta, (size_t)p->n_tokens * dim, factor);
}

void td_rows_leave(td_engine *e, const td_microbatch *p) {
  const td_model_config *c = e->config;
  if (!p->n_tokens) return;
  if (!c->n_streams) {
    td_op_add(e->stream, p->x, p->delta, (size_t)p->n_tokens * c->dim);
    return;
  }
  td_op_hyper_write(e->stream, &(td_hyper_write_args){.x = p->x,
                                                      .y = p->delta,
                                                      .scores = scores_of(e, p),
                                                      .n_tokens = p->n_tokens,
                                                      .n_streams = c->n_streams,
                                                      .dim = c->dim,
                                                      .adds = c->hyper_rank > 0});
}

void td_rows_norm_streams(td_engine *e, const td_microbatch *p, td_vec w, const void *x,
                          void *out) {
  const td_model_config *c = e->config;
  const size_t row = td_engine_row(c);
  if (!p->n_tokens) return;
  for (uint32_t k = 0; k < c->n_streams; k++) {
    const size_t at = (size_t)k * c->dim;
    const td_vec part = {
        .data = (const char *)w.data + at * td_dtype_bytes(w.dtype), .dtype = w.dtype, .n = c->dim};
    td_op_rmsnorm(e->stream, &(td_rmsnorm_args){.x = td_rows_offset(e, (void *)x, at),
                                                .w = part,
                                                .out = td_rows_offset(e, out, at),
                                                .x_stride = row,
                                                .out_stride = row,
                                                .n_rows = p->n_tokens,
                                                .dim = c->dim,
                                                .eps = c->rms_eps});
  }
}

static void read_gated(td_engine *e, const td_microbatch *p, const td_hyper *hyper, bool is_head) {
  const td_model_config *c = e->config;
  const size_t row = td_engine_row(c);
  void *streams = td_rows_at(e, p, e->streams, row), *gates = td_rows_at(e, p, e->gates, row);
  void *low = td_rows_at(e, p, e->low, c->hyper_rank);
  const td_vec none = {0};
  td_rows_norm_streams(e, p, hyper->norm, p->x, streams);
  td_rows_linear(e, p, &hyper->down, none, streams, row, low);
  td_op_silu_rows(e->stream, &(td_silu_rows_args){.x = low,
                                                  .n_rows = p->n_tokens,
                                                  .dim = c->hyper_rank,
                                                  .factor = 1 / (float)c->n_streams});
  td_rows_linear(e, p, &hyper->up, none, low, c->hyper_rank, gates);
  if (!is_head) td_rows_linear_exact(e, p, &hyper->inject, streams, scores_of(e, p));
  td_op_hyper_mix(e->stream, &(td_hyper_mix_args){.x = streams,
                                                  .gate = gates,
                                                  .scores = is_head ? NULL : scores_of(e, p),
                                                  .out = td_rows_at(e, p, e->h, c->dim),
                                                  .n_tokens = p->n_tokens,
                                                  .n_streams = c->n_streams,
                                                  .dim = c->dim});
}

void td_rows_read_streams(td_engine *e, const td_microbatch *p, td_vec w, const td_hyper *hyper,
                          bool is_head) {
  const td_model_config *c = e->config;
  if (!p->n_tokens) return;
  if (c->hyper_rank) {
    read_gated(e, p, hyper, is_head);
    return;
  }
  float *scores = is_head && c->streams_mean ? NULL : scores_of(e, p);
  if (scores) td_rows_linear_exact(e, p, &hyper->fn, p->x, scores);
  td_op_hyper_read(e->stream, &(td_hyper_read_args){.x = p->x,
                                                    .scores = scores,
                                                    .base = hyper->base,
                                                    .scale = hyper->scale,
                                                    .w = w,
                                                    .out = td_rows_at(e, p, e->h, c->dim),
                                                    .n_tokens = p->n_tokens,
                                                    .n_streams = c->n_streams,
                                                    .dim = c->dim,
                                                    .n_rounds = c->hyper_rounds,
                                                    .eps = c->hyper_eps,
                                                    .norm_eps = c->rms_eps,
                                                    .head = is_head});
}

void td_rows_enter(td_engine *e, const td_microbatch *p, td_vec w, const td_hyper *hyper,
                   td_rows_left left) {
  if (!e->config->n_streams) {
    norm_residual(e, p, w, left);
    return;
  }
  td_rows_complete(e, p, left.more);
  if (left.pending) td_rows_leave(e, p);
  td_rows_read_streams(e, p, w, hyper, false);
}

void td_rows_rope(td_engine *e, const td_microbatch *p, td_rope_heads q, td_rope_heads k,
                  const float *cos_sin, uint32_t rot_dim) {
  if (!p->n_tokens) return;
  td_op_rope(e->stream,
             &(td_rope_args){.heads = q,
                             .also = k,
                             .cos_sin = e->step.has_axes ? e->step.axes_cos_sin : cos_sin,
                             .position = p->position,
                             .n_tokens = p->n_tokens,
                             .rot_dim = rot_dim,
                             .interleaved = e->config->rope_interleaved});
}

void td_rows_scale_queries(td_engine *e, const td_microbatch *p, uint32_t q_dim) {
  if (!e->query_scale || !p->n_tokens) return;
  td_op_scale_rows(e->stream, &(td_scale_rows_args){.x = td_rows_at(e, p, e->act[TD_ACT_Q], q_dim),
                                                    .factor = e->query_scale,
                                                    .position = p->position,
                                                    .n_tokens = p->n_tokens,
                                                    .dim = q_dim});
}
