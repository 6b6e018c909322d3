// src/device/cuda/select.c - which keys, or blocks of keys, a token's attention is confined to.
#include "device/cuda/cuda.h"

static td_status check(const td_select_args *a, td_err *err) {
  td_status st = td_dev_check_select(a, err);
  if (st != TD_OK) return st;
  TD_CUDA_MOST(a->dim, TD_CU_INDEX_DIM, "selection: an indexer's heads of %u elements");
  if (!a->group)
    return td_dev_check_batch(&a->batch, &a->kv, TD_BF16, (td_kv_rows){1, a->dim, 0}, err);
  st = td_dev_check_batch(&a->batch, &a->kv, TD_F32, (td_kv_rows){0}, err);
  return st == TD_OK ? td_dev_check_pool(&a->kv, &a->batch, a->group, 0, a->dim, err) : st;
}

// As many tokens at a time as scratch has room for scores of.
td_status td_cuda_op_select(td_cuda_stream *stream, td_select_args *a, td_err *err) {
  td_status st = check(a, err);
  if (st != TD_OK) return st;
  const uint32_t n_tokens = a->batch.n_tokens, n_rows = a->block ? a->n_heads : 1;
  const size_t max_keys = td_cuda_max_keys(&a->batch);
  a->stride = a->block ? (max_keys + a->block - 1) / a->block
                       : max_keys / (a->group ? a->group : 1);
  a->page_entries = a->group ? td_pool_entries(a->batch.page_tokens, a->group) : 0;
  if (n_tokens == 0 || a->stride <= a->top_k) return TD_OK; // no token selects
  const size_t token_bytes = n_rows * a->stride * sizeof(float);
  const uint32_t n = td_cuda_at_once(stream, n_tokens, token_bytes);
  void *scores = td_cuda_scratch(stream, CUDA_SCRATCH_KEYS, n * token_bytes, &st, err);
  for (uint32_t token = 0; token < n_tokens && st == TD_OK; token += n) {
    td_select_args some = *a;
    some.batch.n_tokens = n_tokens - token < n ? n_tokens - token : n;
    some.batch.seq += token;
    some.batch.position += token;
    some.q = (const uint16_t *)a->q + (size_t)token * a->n_heads * a->dim;
    if (a->weights) some.weights += (size_t)token * a->n_heads;
    some.scores = scores;
    some.selected += (size_t)token * n_rows * a->top_k;
    st = TD_CUDA_LAUNCH(stream, select, &some);
  }
  return st;
}
