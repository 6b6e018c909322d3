// src/engine/rows.h - operators on a microbatch's rows of activations, which attention and the
// layers around it share. A microbatch without tokens, as one of several ranks may be, queues
// nothing. Internal to engine/.
#pragma once

#include "engine/engine_impl.h"

void *td_rows_offset(const td_engine *engine, void *base, size_t elements); // of activations
// The microbatch's rows in a buffer of activations, `row` elements each. Only the halves of a step
// of several ranks are in it together; other microbatches take turns.
void *td_rows_at(const td_engine *engine, const td_microbatch *part, void *base, size_t row);

// td_op_linear for every token; sets n_tokens, n_prompt and weights_on_device, the last for each
// matrix by itself.
void td_rows_linear_op(td_engine *engine, const td_microbatch *part, td_linear_op_args args);
// y = W x + bias for every token; rows of y are w->rows elements.
void td_rows_linear(td_engine *engine, const td_microbatch *part, const td_weight *w, td_vec bias,
                    const void *x, size_t x_stride, void *y);
// The same for n matrices of one layer, at most 1 + TD_LINEAR_ALSO; rows of each y are w->rows
// elements, whatever y_stride says.
void td_rows_linear_all(td_engine *engine, const td_microbatch *part, const td_linear_also *all,
                        uint32_t n, const void *x, size_t x_stride);
// y = W x in f32, whatever activations are, into rows y_stride elements apart; rows of x have no
// gaps.
void td_rows_linear_f32(td_engine *engine, const td_microbatch *part, const td_weight *w,
                        const void *x, float *y, size_t y_stride);
// The same with x exact (td_linear_op_args); rows of y have no gaps, either.
void td_rows_linear_exact(td_engine *engine, const td_microbatch *part, const td_weight *w,
                          const void *x, float *y);
// Norms n_rows rows of w.n elements in place, stride apart.
void td_rows_norm(td_engine *engine, void *x, td_vec w, size_t stride, uint32_t n_rows, float eps);
// Additions that a block leaves to the norm that follows, whose operator can add. pending: x +=
// delta. more: [n_tokens][dim], still to be added to delta; NULL: none.
typedef struct {
  bool pending;
  const void *more;
} td_rows_left;

// h = norm(x), after what is left. If the residual has streams, `hyper` computes their factors;
// those for adding the block's output are kept until td_rows_leave.
void td_rows_enter(td_engine *engine, const td_microbatch *part, td_vec w, const td_hyper *hyper,
                   td_rows_left left);
// delta += more, where nothing else adds it.
void td_rows_complete(td_engine *engine, const td_microbatch *part, const void *more);
// x = (x + norm(delta)) * factor, with has_out_norms; nothing is left for what follows.
void td_rows_leave_normed(td_engine *engine, const td_microbatch *part, td_vec w, float factor);
// x += delta, or likewise with streams.
void td_rows_leave(td_engine *engine, const td_microbatch *part);
// h = norm of the streams' sum; is_head: behind the last layer.
void td_rows_read_streams(td_engine *engine, const td_microbatch *part, td_vec w,
                          const td_hyper *hyper, bool is_head);
// out = norm of each stream of x by itself, with a part of w each.
void td_rows_norm_streams(td_engine *engine, const td_microbatch *part, td_vec w, const void *x,
                          void *out);
// cos_sin: of td_rope_args.
void td_rows_rope(td_engine *engine, const td_microbatch *part, td_rope_heads q, td_rope_heads k,
                  const float *cos_sin, uint32_t rot_dim);
// Multiplies the queries, q_dim elements of a token, by the factors of their positions, in a model
// that scales queries.
void td_rows_scale_queries(td_engine *engine, const td_microbatch *part, uint32_t q_dim);
