// src/device/cuda/select.c - which keys, or blocks of keys, a token's attention is confined to.
#include "device/cuda/cuda.h"

// As many tokens at a time as scratch has room for scores of. n_rows: selections of a token; all
// has no scores.
static td_status run_select(td_cuda_stream *stream, const td_cu_select_args *all, uint32_t n_rows,
                            td_err *err) {
  const uint32_t n_tokens = all->batch.n_tokens;
  if (n_tokens == 0 || all->stride <= all->top_k) return TD_OK; // no token selects
  if (all->dim > TD_CU_INDEX_DIM) {
    return td_fail(err, TD_EUNSUPPORTED,
                   "selection: an indexer's heads of %u elements; on a GPU at most %d", all->dim,
                   TD_CU_INDEX_DIM);
  }
  const size_t token_bytes = n_rows * all->stride * sizeof(float);
  const uint32_t n = td_cuda_at_once(stream, n_tokens, token_bytes);
  void *scores;
  td_status status = td_cuda_scratch(stream, CUDA_SCRATCH_KEYS, n * token_bytes, &scores, err);
  for (uint32_t token = 0; token < n_tokens && status == TD_OK; token += n) {
    td_cu_select_args some = *all;
    some.batch.n_tokens = n_tokens - token < n ? n_tokens - token : n;
    some.batch.seq += token;
    some.batch.position += token;
    some.q += (size_t)token * all->n_heads * all->dim;
    if (all->weights) some.weights += (size_t)token * all->n_heads;
    some.scores = scores;
    some.selected += (size_t)token * n_rows * all->top_k;
    status = TD_CUDA_LAUNCH(stream, select, &some);
  }
  return status;
}

static td_status check_keys(const td_select_keys_args *a, td_err *err) {
  td_status status = td_dev_check_select_keys(a, err);
  if (status != TD_OK) return status;
  if (!a->group)
    return td_dev_check_batch(&a->batch, &a->kv, TD_BF16, (td_kv_rows){1, a->dim, 0}, err);
  status = td_dev_check_batch(&a->batch, &a->kv, TD_F32, (td_kv_rows){0}, err);
  return status == TD_OK ? td_dev_check_pool(&a->kv, &a->batch, a->group, 0, a->dim, err) : status;
}

td_status td_cuda_op_select_keys(td_cuda_stream *stream, td_select_keys_args *a, td_err *err) {
  const td_status status = check_keys(a, err);
  if (status != TD_OK) return status;
  const td_cu_select_args args = {
      .batch = a->batch,
      .kv = a->kv,
      .q = a->q,
      .weights = a->weights,
      .selected = a->selected,
      .stride = td_cuda_max_keys(&a->batch) / (a->group ? a->group : 1),
      .n_heads = a->n_heads,
      .dim = a->dim,
      .top_k = a->top_k,
      .group = a->group,
      .page_entries = a->group ? td_pool_entries(a->batch.page_tokens, a->group) : 0,
  };
  return run_select(stream, &args, 1, err);
}

td_status td_cuda_op_select_blocks(td_cuda_stream *stream, td_select_blocks_args *a, td_err *err) {
  td_status status = td_dev_check_select_blocks(a, err);
  if (status == TD_OK)
    status = td_dev_check_batch(&a->batch, &a->kv, TD_BF16, (td_kv_rows){1, a->dim, 0}, err);
  if (status != TD_OK) return status;
  const td_cu_select_args args = {
      .batch = a->batch,
      .kv = a->kv,
      .q = a->q,
      .selected = a->selected,
      .stride = (td_cuda_max_keys(&a->batch) + (size_t)a->block - 1) / a->block,
      .n_heads = a->n_heads,
      .dim = a->dim,
      .top_k = a->top_blocks,
      .block = a->block,
      .n_local = a->n_local,
  };
  return run_select(stream, &args, a->n_heads, err);
}
