// src/device/cuda/delta.c - operators of gated delta nets: checks arguments and launches.
#include <assert.h>

#include "device/cuda/cuda.h"

static_assert((int)TD_DELTA_TILE == (int)TD_CU_DELTA_TILE, "columns of a tile");
static_assert((int)TD_DELTA_MAX_TAPS == (int)TD_CU_DELTA_TAPS, "taps of a filter");

static td_cu_delta_shape shape_of(const td_delta_shape *s) {
  return (td_cu_delta_shape){.n_k_heads = s->n_k_heads,
                             .n_v_heads = s->n_v_heads,
                             .k_dim = s->k_dim,
                             .v_dim = s->v_dim,
                             .n_taps = s->n_taps,
                             .channels = td_delta_channels(s),
                             .is_tiled = s->is_tiled,
                             .by_channel = s->by_channel};
}

static td_status check(const td_batch_view *b, const td_kv_view *state, const td_delta_shape *s,
                       td_err *err) {
  td_status st = td_dev_check_delta(state, s, err);
  if (st == TD_OK) st = td_dev_check_batch(b, state, TD_F32, (td_kv_rows){0}, err);
  if (st != TD_OK) return st;
  if (s->k_dim > TD_CU_DELTA_KEYS) {
    return td_fail(err, TD_EUNSUPPORTED, "delta net: keys of %u elements; on a GPU at most %d",
                   s->k_dim, TD_CU_DELTA_KEYS);
  }
  return TD_OK;
}

td_status td_cuda_op_delta_conv(td_cuda_stream *stream, td_delta_conv_args *a, td_err *err) {
  td_cuda_dev *dev = td_cuda_dev_of(stream);
  td_status st = check(&a->batch, &a->state, &a->shape, err);
  if (st != TD_OK || a->batch.n_tokens == 0) return st;
  const size_t of_taps = (size_t)a->shape.n_taps * td_delta_channels(&a->shape) * sizeof(float);
  const size_t of_heads = a->shape.n_v_heads * sizeof(float);
  const void *conv = td_cuda_on_device(dev, a->conv, of_taps, &st, err);
  const void *decay = td_cuda_on_device(dev, a->decay, of_heads, &st, err);
  const void *bias = td_cuda_on_device(dev, a->bias, of_heads * td_delta_decays(&a->shape), &st,
                                       err);
  if (st != TD_OK) return st;
  const td_cu_delta_conv_args args = {.batch = td_cuda_batch_of(&a->batch),
                                      .states = td_cuda_states_of(&a->state),
                                      .trail = a->trail,
                                      .shape = shape_of(&a->shape),
                                      .x = a->x,
                                      .x_stride = a->x_stride,
                                      .q = a->q,
                                      .k = a->k,
                                      .v = a->v,
                                      .a = a->a,
                                      .b = a->b,
                                      .conv = conv,
                                      .decay = decay,
                                      .bias = bias,
                                      .out = a->out,
                                      .gates = a->gates,
                                      .fault = stream->fault,
                                      .bound = a->bound};
  return TD_CUDA_LAUNCH(stream, delta_conv, &args);
}

td_status td_cuda_op_delta_rule(td_cuda_stream *stream, td_delta_rule_op_args *a, td_err *err) {
  td_status st = check(&a->batch, &a->state, &a->shape, err);
  if (st != TD_OK || a->batch.n_tokens == 0) return st;
  td_cu_delta_rule_args args = {.batch = td_cuda_batch_of(&a->batch),
                                .states = td_cuda_states_of(&a->state),
                                .trail = a->trail,
                                .rule_at = td_delta_conv_floats(&a->shape),
                                .shape = shape_of(&a->shape),
                                .qkv = a->qkv,
                                .gates = a->gates,
                                .out = a->out,
                                .fault = stream->fault};
  if (!a->prompt || !td_cuda_dev_of(stream)->uses.chunks || !td_cuda_takes_delta_chunks(&args))
    return TD_CUDA_LAUNCH(stream, delta_rule, &args);
  if (!a->shape.by_channel) return TD_CUDA_LAUNCH(stream, delta_chunks, &args);
  const size_t n_slots = td_cu_channel_slot(a->batch.n_tokens, a->batch.n_seqs);
  void *products;
  st = td_cuda_scratch(stream, CUDA_SCRATCH_PARTS,
                       n_slots * a->shape.n_v_heads * TD_CU_CHANNEL_PRODUCTS * sizeof(uint16_t),
                       &products, err);
  if (st != TD_OK) return st;
  args.products = products;
  return TD_CUDA_LAUNCH(stream, delta_channels, &args);
}

td_status td_cuda_op_gate_rows(td_cuda_stream *stream, td_gate_rows_args *a, td_err *err) {
  (void)err;
  if (a->n_tokens == 0 || a->n_groups == 0 || a->dim == 0) return TD_OK;
  const td_cu_gate_rows_args args = {.x = a->x,
                                     .gate = a->gate,
                                     .gate_stride = a->gate_stride,
                                     .part = a->part,
                                     .n_tokens = a->n_tokens,
                                     .n_groups = a->n_groups,
                                     .dim = a->dim,
                                     .silu = a->silu,
                                     .scalar = a->scalar};
  return TD_CUDA_LAUNCH(stream, gate_rows, &args);
}
