// src/device/cuda/pool.c - attention over a window and pooled keys. What each token sees is
// gathered into a page of its own, over which the decode kernel runs.
#include "device/cuda/cuda.h"

static uint32_t page_entries(const td_batch_view *b, uint32_t group) {
  return group ? td_pool_entries(b->page_tokens, group) : 0;
}

static td_status check(const td_batch_view *b, const td_kv_view *state, uint32_t group, size_t at,
                       uint32_t dim, td_err *err) {
  td_status st = td_dev_check_batch(b, state, TD_F32, (td_kv_rows){0}, err);
  return st == TD_OK ? td_dev_check_pool(state, b, group, at, dim, err) : st;
}

td_status td_cuda_op_pool(td_cuda_stream *stream, td_pool_args *a, td_err *err) {
  td_cuda_dev *dev = td_cuda_dev_of(stream);
  td_status st = check(&a->batch, &a->state, a->group, a->entry_at, a->dim, err);
  if (st == TD_OK && a->norm.n) st = td_dev_check_vec(&a->norm, a->dim, "pooled keys' norm", err);
  if (st != TD_OK || a->batch.n_tokens == 0) return st;
  TD_DEV_REQUIRE(a->group > 0 && a->rot_dim % 2 == 0 && a->rot_dim <= (a->norm.n ? a->dim : 0),
                 "pooled keys: %u of %u elements rotate", a->rot_dim, a->dim);
  TD_DEV_REQUIRE(a->gate ? a->bias != NULL : !a->overlaps,
                 "pooled keys: gates without a bias, or halves without gates");
  enum { RUNNING = 3 };
  const uint32_t n_halves = a->overlaps ? 2 : 1;
  const size_t of_open = (size_t)n_halves * RUNNING * a->dim * sizeof(float);
  const size_t of_bias = (size_t)a->group * n_halves * a->dim * sizeof(float);
  a->batch.fault = stream->fault;
  a->page_entries = page_entries(&a->batch, a->group);
  a->bias = td_cuda_on_device(dev, a->bias, of_bias, &st, err);
  td_cuda_vec(dev, &a->norm, &st, err);
  a->open = td_cuda_scratch(stream, CUDA_SCRATCH_LATENT, a->batch.n_seqs * of_open, &st, err);
  return st == TD_OK ? TD_CUDA_LAUNCH(stream, pool, a) : st;
}

// Keys that any token sees, at most.
static uint32_t most_seen(const td_attn_pool_args *a) {
  const uint32_t max_keys = td_cuda_max_keys(&a->batch);
  uint32_t n_entries = a->group ? max_keys / a->group : 0;
  if (a->selected && n_entries > a->top_k) n_entries = a->top_k;
  return n_entries + (max_keys < a->window ? max_keys : a->window);
}

// Attention of the tokens [token, token + n), whose keys go to `pages` and tables.
static td_status run_tokens(td_cuda_stream *stream, const td_attn_pool_args *a, uint32_t token,
                            uint32_t n, void *pages, td_err *err) {
  const uint32_t most_keys = most_seen(a), page_tokens = td_cuda_page_of(most_keys);
  const size_t page_bytes = (size_t)page_tokens * a->dim * sizeof(uint16_t);
  int32_t *tables = (int32_t *)((char *)pages + n * page_bytes);
  const td_cu_pool_gather_args gather = {.batch = a->batch,
                                         .state = a->state,
                                         .key = a->key,
                                         .key_stride = a->key_stride,
                                         .selected = a->selected,
                                         .out = pages,
                                         .seq = tables,
                                         .position = tables + n,
                                         .page_table = tables + 2 * (size_t)n,
                                         .entry_at = a->entry_at,
                                         .token0 = token,
                                         .n = n,
                                         .dim = a->dim,
                                         .window = a->window,
                                         .ring = a->ring,
                                         .group = a->group,
                                         .top_k = a->top_k,
                                         .page_entries = page_entries(&a->batch, a->group),
                                         .page_tokens = page_tokens,
                                         .most_keys = most_keys};
  td_status st = TD_CUDA_LAUNCH(stream, pool_gather, &gather);
  if (st != TD_OK) return st;
  uint16_t *q = (uint16_t *)a->q + (size_t)token * a->n_heads * a->dim;
  td_cu_attn_decode_args args = {.batch = {.seq = gather.seq,
                                           .position = gather.position,
                                           .page_table = gather.page_table,
                                           .n_tokens = n,
                                           .n_seqs = n,
                                           .max_pages = 1,
                                           .page_tokens = page_tokens},
                                 .kv = {.pages = pages, .page_bytes = page_bytes, .dtype = TD_BF16},
                                 .q = q,
                                 .out = q,
                                 .sinks = a->sinks,
                                 .n_heads = a->n_heads,
                                 .n_kv_heads = 1,
                                 .k_dim = a->dim,
                                 .v_dim = a->dim,
                                 .scale = a->scale,
                                 .v_in_k = true};
  return td_cuda_run_decode(stream, &args, most_keys, err);
}

static td_status run_attention(td_cuda_stream *stream, const td_attn_pool_args *a, td_err *err) {
  const size_t page_bytes = (size_t)td_cuda_page_of(most_seen(a)) * a->dim * sizeof(uint16_t);
  const size_t token_bytes = page_bytes + 3 * sizeof(int32_t);
  const uint32_t n_tokens = a->batch.n_tokens, n = td_cuda_at_once(stream, n_tokens, token_bytes);
  td_status st = TD_OK;
  void *pages = td_cuda_scratch(stream, CUDA_SCRATCH_KEYS, n * token_bytes, &st, err);
  for (uint32_t token = 0; token < n_tokens && st == TD_OK; token += n) {
    const uint32_t left = n_tokens - token;
    st = run_tokens(stream, a, token, left < n ? left : n, pages, err);
  }
  return st;
}

td_status td_cuda_op_attn_pool(td_cuda_stream *stream, td_attn_pool_args *a, td_err *err) {
  td_status st = check(&a->batch, &a->state, a->group, a->entry_at, a->dim, err);
  if (st != TD_OK || a->batch.n_tokens == 0) return st;
  TD_DEV_REQUIRE(a->window > 0 && a->ring >= a->window && a->n_heads > 0 && a->sinks,
                 "pooled attention: %u heads over a window of %u in a ring of %u", a->n_heads,
                 a->window, a->ring);
  TD_CUDA_MOST(a->dim, TD_CU_MMA_LORA, "attention: heads of %u elements");
  a->batch.fault = stream->fault;
  a->sinks = td_cuda_on_device(td_cuda_dev_of(stream), a->sinks, a->n_heads * sizeof *a->sinks, &st,
                               err);
  if (st == TD_OK) st = run_attention(stream, a, err);
  if (st != TD_OK) return st;
  const td_cu_pool_ring_args ring = {.batch = a->batch,
                                     .state = a->state,
                                     .key = a->key,
                                     .key_stride = a->key_stride,
                                     .dim = a->dim,
                                     .ring = a->ring};
  return TD_CUDA_LAUNCH(stream, pool_ring, &ring);
}
