// src/device/cuda/delta.c - operators of gated delta nets: checks arguments and launches.
#include "device/cuda/cuda.h"

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
  a->batch.fault = stream->fault;
  a->channels = td_delta_channels(&a->shape);
  const size_t of_taps = (size_t)a->shape.n_taps * a->channels * sizeof(float);
  const size_t of_heads = a->shape.n_v_heads * sizeof(float);
  const size_t of_decays = of_heads * td_delta_decays(&a->shape);
  a->conv = td_cuda_on_device(dev, a->conv, of_taps, &st, err);
  a->decay = td_cuda_on_device(dev, a->decay, of_heads, &st, err);
  a->bias = td_cuda_on_device(dev, a->bias, of_decays, &st, err);
  return st == TD_OK ? TD_CUDA_LAUNCH(stream, delta_conv, a) : st;
}

td_status td_cuda_op_delta_rule(td_cuda_stream *stream, td_delta_rule_op_args *a, td_err *err) {
  td_status st = check(&a->batch, &a->state, &a->shape, err);
  if (st != TD_OK || a->batch.n_tokens == 0) return st;
  a->batch.fault = stream->fault;
  a->channels = td_delta_channels(&a->shape);
  a->rule_at = td_delta_conv_floats(&a->shape);
  if (!a->prompt || !td_cuda_dev_of(stream)->uses.chunks || !td_cuda_takes_delta_chunks(a))
    return TD_CUDA_LAUNCH(stream, delta_rule, a);
  if (!a->shape.by_channel) return TD_CUDA_LAUNCH(stream, delta_chunks, a);
  const size_t n_slots = td_cu_channel_slot(a->batch.n_tokens, a->batch.n_seqs);
  const size_t n_products = n_slots * a->shape.n_v_heads * TD_CU_CHANNEL_PRODUCTS;
  a->products = td_cuda_scratch(stream, CUDA_SCRATCH_PARTS, n_products * sizeof(uint16_t), &st,
                                err);
  return st == TD_OK ? TD_CUDA_LAUNCH(stream, delta_channels, a) : st;
}

td_status td_cuda_op_gate_rows(td_cuda_stream *stream, td_gate_rows_args *a, td_err *err) {
  const bool is_any = a->n_tokens && a->n_groups && a->dim;
  return is_any ? TD_CUDA_LAUNCH(stream, gate_rows, a) : TD_OK;
}
