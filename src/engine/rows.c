// src/engine/rows.c - operators on a microbatch's rows of activations.
#include "engine/rows.h"

#include "engine/experts/ranks.h"

void *td_rows_offset(const td_engine *e, void *base, size_t elements) {
  return (char *)base + elements * e->act_bytes;
}

void *td_rows_at(const td_engine *e, const td_microbatch *p, void *base, size_t row) {
  return td_rows_offset(e, base, td_rank_is_active(e) ? p->begin * row : 0);
}

static void run_linear(td_engine *e, const td_microbatch *p, td_linear_op_args a) {
  if (!p->n_tokens) return; // as a rank of several may have none
  a.n_tokens = p->n_tokens;
  a.n_prompt = p->groups[GROUP_PREFILL].view.n_tokens;
  a.weights_on_device = td_engine_is_in_slot(e, a.w);
  td_op_linear(e->stream, &a);
}

void td_rows_linear(td_engine *e, const td_microbatch *p, const td_weight *w, td_vec bias,
                    const void *x, size_t x_stride, void *y) {
  run_linear(e, p,
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
  run_linear(e, p, a);
}

void td_rows_linear_f32(td_engine *e, const td_microbatch *p, const td_weight *w, const void *x,
                        float *y, size_t y_stride) {
  run_linear(
      e, p,
      (td_linear_op_args){
          .w = w, .x = x, .y = y, .x_stride = w->cols, .y_stride = y_stride, .out_f32 = true});
}

void td_rows_linear_exact(td_engine *e, const td_microbatch *p, const td_weight *w, const void *x,
                          float *y) {
  run_linear(e, p,
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

void td_rows_norm_residual(td_engine *e, const td_microbatch *p, td_vec w, bool pending) {
  if (!p->n_tokens) return;
  uint32_t dim = e->config->dim;
  td_op_rmsnorm(e->stream, &(td_rmsnorm_args){.x = pending ? p->delta : p->x,
                                              .residual = pending ? p->x : NULL,
                                              .w = w,
                                              .out = td_rows_at(e, p, e->h, dim),
                                              .x_stride = dim,
                                              .out_stride = dim,
                                              .n_rows = p->n_tokens,
                                              .dim = dim,
                                              .eps = e->config->rms_eps});
}

static float *scores_of(const td_engine *e, const td_microbatch *p) {
  return e->hyper + (size_t)p->begin * td_hyper_scores(e->config->n_streams);
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
                                                      .dim = c->dim});
}

void td_rows_read_streams(td_engine *e, const td_microbatch *p, td_vec w, const td_hyper *hyper,
                          bool is_head) {
  const td_model_config *c = e->config;
  if (!p->n_tokens) return;
  float *scores = scores_of(e, p);
  td_rows_linear_exact(e, p, &hyper->fn, p->x, scores);
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
                   bool pending) {
  if (!e->config->n_streams) {
    td_rows_norm_residual(e, p, w, pending);
    return;
  }
  if (pending) td_rows_leave(e, p);
  td_rows_read_streams(e, p, w, hyper, false);
}

void td_rows_rope(td_engine *e, const td_microbatch *p, td_rope_heads q, td_rope_heads k,
                  uint32_t rot_dim) {
  if (!p->n_tokens) return;
  td_op_rope(e->stream, &(td_rope_args){.x = q.x,
                                        .cos_sin = e->cos_sin,
                                        .position = p->position,
                                        .token_stride = q.token_stride,
                                        .head_stride = q.head_stride,
                                        .n_tokens = p->n_tokens,
                                        .n_heads = q.n_heads,
                                        .rot_dim = rot_dim,
                                        .interleaved = e->config->rope_interleaved,
                                        .also = k});
}

void td_rows_scale_queries(td_engine *e, const td_microbatch *p, uint32_t q_dim) {
  if (!e->query_scale || !p->n_tokens) return;
  td_op_scale_rows(e->stream, &(td_scale_rows_args){.x = td_rows_at(e, p, e->act[TD_ACT_Q], q_dim),
                                                    .factor = e->query_scale,
                                                    .position = p->position,
                                                    .n_tokens = p->n_tokens,
                                                    .dim = q_dim});
}
