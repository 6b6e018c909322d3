// src/device/cuda/ops.c - operators of a single kernel: checks arguments and launches.
#include "device/cuda/cuda.h"

td_status td_cuda_op_copy(td_cuda_stream *stream, td_copy_args *a, td_err *err) {
  if (a->n_bytes == 0) return TD_OK;
  if (a->is_direct) return TD_CUDA_LAUNCH(stream, copy_direct, a);
  const td_cuda_dev *dev = td_cuda_dev_of(stream);
  int code = td_cuda_copy_from(dev, a->dst, a->src, a->n_bytes, stream->cu);
  return td_cuda_result(dev, code, "copy", err);
}

td_status td_cuda_op_fill_zero(td_cuda_stream *stream, td_fill_zero_args *a, td_err *err) {
  if (a->n_bytes == 0) return TD_OK;
  const td_cuda_dev *dev = td_cuda_dev_of(stream);
  return td_cuda_result(dev, dev->abi->fill_zero(a->dst, a->n_bytes, stream->cu), "zeros", err);
}

td_status td_cuda_op_add(td_cuda_stream *stream, td_add_args *a, td_err *err) {
  return a->n ? TD_CUDA_LAUNCH(stream, add, a) : TD_OK;
}

td_status td_cuda_op_signal(td_cuda_stream *stream, td_signal_args *a, td_err *err) {
  return TD_CUDA_LAUNCH(stream, signal, a);
}

td_status td_cuda_op_post(td_cuda_stream *stream, td_post_args *a, td_err *err) {
  return TD_CUDA_LAUNCH(stream, post, a);
}

td_status td_cuda_op_await(td_cuda_stream *stream, td_await_args *a, td_err *err) {
  a->most_ns = td_cuda_dev_of(stream)->await_ns;
  a->fault = stream->fault;
  return TD_CUDA_LAUNCH(stream, await, a);
}

td_status td_cuda_op_sum_parts(td_cuda_stream *stream, td_sum_parts_args *a, td_err *err) {
  TD_DEV_REQUIRE(a->n_parts > 0 && a->n_parts <= TD_MAX_SUM_PARTS, "sum: of %u parts", a->n_parts);
  return a->n ? TD_CUDA_LAUNCH(stream, sum_parts, a) : TD_OK;
}

td_status td_cuda_op_gather_rows(td_cuda_stream *stream, td_gather_rows_args *a, td_err *err) {
  a->fault = stream->fault;
  return a->n_rows ? TD_CUDA_LAUNCH(stream, gather, a) : TD_OK;
}

td_status td_cuda_op_embed(td_cuda_stream *stream, td_embed_args *a, td_err *err) {
  if (a->n_tokens == 0) return TD_OK;
  const td_weight table = a->table;
  td_status status = td_cuda_weight(td_cuda_dev_of(stream), &table, "embedding", &a->table, err);
  a->fault = stream->fault;
  return status == TD_OK ? TD_CUDA_LAUNCH(stream, embed, a) : status;
}

td_status td_cuda_op_rmsnorm(td_cuda_stream *stream, td_rmsnorm_args *a, td_err *err) {
  td_status status = td_dev_check_rmsnorm(a, err);
  if (status != TD_OK || a->n_rows == 0) return status;
  td_cuda_vec(td_cuda_dev_of(stream), &a->w, &status, err);
  if (a->also.x) td_cuda_vec(td_cuda_dev_of(stream), &a->also.w, &status, err);
  return status == TD_OK ? TD_CUDA_LAUNCH(stream, rmsnorm, a) : status;
}

td_status td_cuda_op_layernorm(td_cuda_stream *stream, td_layernorm_args *a, td_err *err) {
  td_status status = td_dev_check_vec(&a->w, a->dim, "norm", err);
  if (status == TD_OK) status = td_dev_check_vec(&a->b, a->dim, "norm's bias", err);
  if (status != TD_OK || a->n_rows == 0) return status;
  td_cuda_vec(td_cuda_dev_of(stream), &a->w, &status, err);
  td_cuda_vec(td_cuda_dev_of(stream), &a->b, &status, err);
  return status == TD_OK ? TD_CUDA_LAUNCH(stream, layernorm, a) : status;
}

td_status td_cuda_op_rope(td_cuda_stream *stream, td_rope_args *a, td_err *err) {
  TD_DEV_REQUIRE(a->rot_dim % 2 == 0, "rope: %u dimensions do not make pairs", a->rot_dim);
  a->fault = stream->fault;
  return a->n_tokens ? TD_CUDA_LAUNCH(stream, rope, a) : TD_OK;
}

td_status td_cuda_op_scale_rows(td_cuda_stream *stream, td_scale_rows_args *a, td_err *err) {
  a->fault = stream->fault;
  return a->n_tokens ? TD_CUDA_LAUNCH(stream, scale_rows, a) : TD_OK;
}

td_status td_cuda_op_router(td_cuda_stream *stream, td_router_args *a, td_err *err) {
  td_status status = td_dev_check_router(a, err);
  if (status != TD_OK || a->n_tokens == 0) return status;
  TD_CUDA_MOST(a->n_experts, TD_CU_MAX_EXPERTS, "router: %u experts");
  td_cuda_dev *dev = td_cuda_dev_of(stream);
  const size_t bias_bytes = a->n_experts * sizeof *a->bias;
  const size_t table_bytes = (size_t)a->n_vocab * a->top_k * sizeof *a->table;
  a->bias = td_cuda_on_device(dev, a->bias, bias_bytes, &status, err);
  a->table = td_cuda_on_device(dev, a->table, table_bytes, &status, err);
  a->fault = stream->fault;
  return status == TD_OK ? TD_CUDA_LAUNCH(stream, router, a) : status;
}

td_status td_cuda_op_top_logits(td_cuda_stream *stream, td_top_logits_args *a, td_err *err) {
  TD_DEV_REQUIRE(a->n_vocab > 0, "ranking: rows of no logits");
  if (a->n_rows == 0) return TD_OK;
  TD_CUDA_MOST(a->n_vocab, TD_CU_TOP_SLICE * TD_CU_TOP_MAX_SLICES, "ranking: %u tokens");
  a->n_slices = (a->n_vocab - 1) / TD_CU_TOP_SLICE + 1;
  const size_t n = (size_t)a->n_rows * a->n_slices;
  td_status status = TD_OK;
  a->part = td_cuda_scratch(stream, CUDA_SCRATCH_PARTS, n * TD_TOP_LOGITS * sizeof *a->part,
                            &status, err);
  a->part_sums = td_cuda_scratch(stream, CUDA_SCRATCH_ML, n * 2 * sizeof(float), &status, err);
  return status == TD_OK ? TD_CUDA_LAUNCH(stream, top_logits, a) : status;
}

static td_status check_streams(uint32_t n_streams, uint32_t dim, td_err *err) {
  TD_DEV_REQUIRE(n_streams > 0 && n_streams <= TD_MAX_STREAMS,
                 "hyper-connections: %u streams; at most %d", n_streams, TD_MAX_STREAMS);
  TD_CUDA_MOST(dim, TD_CU_STREAM_DIM, "hyper-connections: rows of %u elements");
  return TD_OK;
}

td_status td_cuda_op_hyper_read(td_cuda_stream *stream, td_hyper_read_args *a, td_err *err) {
  td_cuda_dev *dev = td_cuda_dev_of(stream);
  td_status status = check_streams(a->n_streams, a->dim, err);
  if (status == TD_OK) status = td_dev_check_vec(&a->w, a->dim, "norm", err);
  if (status != TD_OK || a->n_tokens == 0) return status;
  const size_t n_scales = a->head ? 1 : 3;
  a->n_scores = a->head ? a->n_streams : td_hyper_scores(a->n_streams);
  if (a->scores) {
    a->base = td_cuda_on_device(dev, a->base, a->n_scores * sizeof *a->base, &status, err);
    a->scale = td_cuda_on_device(dev, a->scale, n_scales * sizeof *a->scale, &status, err);
  }
  td_cuda_vec(dev, &a->w, &status, err);
  return status == TD_OK ? TD_CUDA_LAUNCH(stream, hyper_read, a) : status;
}

td_status td_cuda_op_hyper_write(td_cuda_stream *stream, td_hyper_write_args *a, td_err *err) {
  td_status status = check_streams(a->n_streams, a->dim, err);
  return status == TD_OK && a->n_tokens ? TD_CUDA_LAUNCH(stream, hyper_write, a) : status;
}

td_status td_cuda_op_hyper_mix(td_cuda_stream *stream, td_hyper_mix_args *a, td_err *err) {
  td_status status = check_streams(a->n_streams, a->dim, err);
  return status == TD_OK && a->n_tokens ? TD_CUDA_LAUNCH(stream, hyper_mix, a) : status;
}

td_status td_cuda_op_activate_rows(td_cuda_stream *stream, td_activate_rows_args *a, td_err *err) {
  (void)stream;
  return td_fail(err, TD_EUNSUPPORTED, "activations of %u rows by themselves, on a GPU", a->n_rows);
}

td_status td_cuda_op_silu_rows(td_cuda_stream *stream, td_silu_rows_args *a, td_err *err) {
  return a->n_rows && a->dim ? TD_CUDA_LAUNCH(stream, silu_rows, a) : TD_OK;
}

// ---- gated delta nets ---------------------------------------------------------------------------

static td_status check_delta(const td_batch_view *b, const td_kv_view *state,
                             const td_delta_shape *s, td_err *err) {
  td_status st = td_dev_check_delta(state, s, err);
  if (st == TD_OK) st = td_dev_check_batch(b, state, TD_F32, (td_kv_rows){0}, err);
  if (st != TD_OK) return st;
  TD_CUDA_MOST(s->k_dim, TD_CU_DELTA_KEYS, "delta net: keys of %u elements");
  return TD_OK;
}

td_status td_cuda_op_delta_conv(td_cuda_stream *stream, td_delta_conv_args *a, td_err *err) {
  td_cuda_dev *dev = td_cuda_dev_of(stream);
  td_status st = check_delta(&a->batch, &a->state, &a->shape, err);
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
  td_status st = check_delta(&a->batch, &a->state, &a->shape, err);
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

// ---- embeddings of n-grams ----------------------------------------------------------------------

// That states of pages have n elements.
static td_status check_ngram(const td_batch_view *b, const td_kv_view *state, size_t n,
                             td_err *err) {
  TD_DEV_REQUIRE(state->dtype == TD_F32 && state->page_bytes >= n * sizeof(float),
                 "n-grams: a state of %zu elements in pages of %zu bytes", n, state->page_bytes);
  return td_dev_check_batch(b, state, TD_F32, (td_kv_rows){0}, err);
}

// Rows of a decode step, which the copy engine would have wait behind experts, are copied by
// processors.
enum { DIRECT_BYTES = 256 << 10 };

td_status td_cuda_op_ngram_rows(td_cuda_stream *stream, td_ngram_rows_args *a, td_err *err) {
  const td_ngram_hash *h = &a->table->hash;
  td_status status = check_ngram(&a->batch, &a->state, a->ids_at + h->size - 1, err);
  if (status != TD_OK || a->batch.n_tokens == 0) return status;
  TD_DEV_REQUIRE(h->size >= 2 && a->gathered, "n-grams of %u tokens: rows are not gathered",
                 h->size);
  const size_t row = (size_t)td_ngram_rows(h) * a->table->shards[0].cols;
  const size_t n_bytes = a->batch.n_tokens * row * sizeof(uint16_t);
  td_copy_args copy = {
      .dst = a->out, .src = a->gathered, .n_bytes = n_bytes, .is_direct = n_bytes <= DIRECT_BYTES};
  status = td_cuda_op_copy(stream, &copy, err);
  if (status != TD_OK) return status;
  a->batch.fault = stream->fault;
  const td_cu_ngram_ids_args args = {.batch = a->batch,
                                     .state = a->state,
                                     .trail = a->trail,
                                     .ids_at = a->ids_at,
                                     .tokens = a->tokens,
                                     .n_ids = h->size - 1,
                                     .end = h->end};
  return TD_CUDA_LAUNCH(stream, ngram_ids, &args);
}

td_status td_cuda_op_ngram_gate(td_cuda_stream *stream, td_ngram_gate_args *a, td_err *err) {
  return a->n_tokens ? TD_CUDA_LAUNCH(stream, ngram_gate, a) : TD_OK;
}

td_status td_cuda_op_ngram_conv(td_cuda_stream *stream, td_ngram_conv_args *a, td_err *err) {
  const size_t n_past = td_ngram_past(a->n_taps, a->step);
  td_status status = check_ngram(&a->batch, &a->state, a->rows_at + n_past * a->channels, err);
  if (status != TD_OK || a->batch.n_tokens == 0) return status;
  TD_DEV_REQUIRE(a->n_taps >= 2, "n-grams: a filter of %u taps", a->n_taps);
  const size_t conv_bytes = (size_t)a->n_taps * a->channels * sizeof *a->conv;
  a->conv = td_cuda_on_device(td_cuda_dev_of(stream), a->conv, conv_bytes, &status, err);
  a->batch.fault = stream->fault;
  return status == TD_OK ? TD_CUDA_LAUNCH(stream, ngram_conv, a) : status;
}
