// src/device/cuda/ngrams.c - operators of embeddings of n-grams: checks arguments and launches.
#include "device/cuda/cuda.h"

// That states of pages have n elements.
static td_status check(const td_batch_view *b, const td_kv_view *state, size_t n, td_err *err) {
  TD_DEV_REQUIRE(state->dtype == TD_F32 && state->page_bytes >= n * sizeof(float),
                 "n-grams: a state of %zu elements in pages of %zu bytes", n, state->page_bytes);
  return td_dev_check_batch(b, state, TD_F32, (td_kv_rows){0}, err);
}

// Rows of a decode step, which the copy engine would have wait behind experts, are copied by
// processors.
enum { DIRECT_BYTES = 256 << 10 };

td_status td_cuda_op_ngram_rows(td_cuda_stream *stream, td_ngram_rows_args *a, td_err *err) {
  const td_ngram_hash *h = &a->table->hash;
  td_status status = check(&a->batch, &a->state, a->ids_at + h->size - 1, err);
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
  td_status status = check(&a->batch, &a->state, a->rows_at + n_past * a->channels, err);
  if (status != TD_OK || a->batch.n_tokens == 0) return status;
  TD_DEV_REQUIRE(a->n_taps >= 2, "n-grams: a filter of %u taps", a->n_taps);
  const size_t conv_bytes = (size_t)a->n_taps * a->channels * sizeof *a->conv;
  a->conv = td_cuda_on_device(td_cuda_dev_of(stream), a->conv, conv_bytes, &status, err);
  a->batch.fault = stream->fault;
  return status == TD_OK ? TD_CUDA_LAUNCH(stream, ngram_conv, a) : status;
}
