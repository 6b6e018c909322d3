// src/device/cuda/attn.c - KV page stores and attention over KV pages.
// Decode: keys in splits, one query at a time. Prefill: tiles of queries on tensor cores; where
// tokens select blocks of keys, one query at a time, too, its keys in one split. The caller passes
// in which one it is; it is not guessed from counts, because a token's result depends on it. Decode
// launches are sized for batch.max_keys, or for all pages if that is 0. Prefill
// launches have the exact tiles if the batch has host copies; otherwise each sequence is a launch
// of its own.
#include "device/cuda/cuda.h"

enum { RUN = 8 }; // elements per load in kernels

td_status td_cuda_op_kv_store(td_cuda_stream *stream, td_kv_store_args *a, td_err *err) {
  const td_kv_rows rows = td_kv_store_rows(a);
  td_status status = td_dev_check_batch(&a->batch, &a->kv, TD_BF16, rows, err);
  if (status != TD_OK || a->batch.n_tokens == 0) return status;
  a->batch.fault = stream->fault;
  a->kv = td_cuda_kv_of(&a->kv, rows, a->batch.page_tokens);
  return TD_CUDA_LAUNCH(stream, kv_store, a);
}

uint32_t td_cuda_at_once(const td_cuda_stream *stream, uint32_t n, size_t each_bytes) {
  size_t most = td_cuda_dev_of(stream)->keys_bytes / each_bytes;
  return most < 1 ? 1 : most < n ? (uint32_t)most : n;
}

// The arguments for n tokens beginning with `token`.
static td_cu_attn_decode_args tokens_of(const td_cu_attn_decode_args *all, uint32_t token,
                                        uint32_t n) {
  const size_t at = (size_t)token * all->n_heads, q_bytes = all->q_f32 ? 4 : 2;
  const size_t out_bytes = all->q_f32 || all->by_length ? 4 : 2;
  td_cu_attn_decode_args some = *all;
  some.batch.n_tokens = n;
  some.batch.seq += token;
  some.batch.position += token;
  const uint32_t n_rows = all->of_groups ? 1 : all->n_kv_heads;
  if (all->blocks) some.blocks += (size_t)token * n_rows * all->top_blocks;
  some.q = (const char *)all->q + at * all->k_dim * q_bytes;
  some.out = (char *)all->out + at * all->v_dim * out_bytes;
  return some;
}

td_status td_cuda_run_decode(td_cuda_stream *stream, td_cu_attn_decode_args *args,
                             uint32_t max_keys, td_err *err) {
  const uint32_t shared_by = args->n_heads / args->n_kv_heads;
  const uint32_t most = args->by_length ? TD_CU_LATENT_HEADS
                                        : td_cu_decode_heads(args->k_dim, args->v_in_k);
  const uint32_t n_blocks = args->n_kv_heads * ((shared_by + most - 1) / most);
  if (args->by_length)
    args->n_splits = td_cuda_latent_splits(max_keys, args->split_keys);
  else if (args->window)
    td_cuda_window_splits(args->window, max_keys, n_blocks, &args->split_keys, &args->n_splits);
  else if (!args->n_splits) // else the caller's
    td_cuda_splits(max_keys, n_blocks, &args->split_keys, &args->n_splits);
  args->by_block = args->v_in_k &&
                   td_cuda_folds_by_block(args->batch.n_tokens, n_blocks, args->n_splits,
                                          (uint32_t)td_cuda_dev_of(stream)->props.n_sms);
  args->n_rows = args->by_block ? (args->n_splits - 1) / TD_CU_FOLDED + 1 : args->n_splits;
  const size_t rows = (size_t)args->n_heads * args->n_rows; // per token
  const size_t row_bytes = args->v_dim * sizeof(float);
  const uint32_t n_tokens = args->batch.n_tokens,
                 n = td_cuda_at_once(stream, n_tokens, rows * row_bytes);
  td_status status = TD_OK;
  args->part = td_cuda_scratch(stream, CUDA_SCRATCH_PARTS, n * rows * row_bytes, &status, err);
  args->part_ml = td_cuda_scratch(stream, CUDA_SCRATCH_ML, n * rows * 2 * sizeof(float), &status,
                                  err);
  for (uint32_t token = 0; token < n_tokens && status == TD_OK; token += n) {
    const uint32_t left = n_tokens - token;
    const td_cu_attn_decode_args some = tokens_of(args, token, left < n ? left : n);
    status = args->by_length ? TD_CUDA_LAUNCH(stream, attn_latents, &some)
                             : TD_CUDA_LAUNCH(stream, attn_decode, &some);
  }
  return status;
}

static td_kv_rows gqa_rows(const td_attn_gqa_args *a) {
  return td_gqa_rows(&a->kv, a->n_kv_heads, a->head_dim);
}

static td_kv_view gqa_kv(const td_attn_gqa_args *a) {
  return td_cuda_kv_of(&a->kv, gqa_rows(a), a->batch.page_tokens);
}

static td_kv_view mla_kv(const td_attn_mla_args *a) {
  return td_cuda_kv_of(&a->kv, td_mla_rows(&a->kv, a->kv_lora_rank + a->rope_dim),
                       a->batch.page_tokens);
}

static size_t whole_runs(size_t n) {
  return (n + RUN - 1) / RUN * RUN;
}

// Gathers keys and values of KV heads [head0, head0 + n) for the listed sequences, then runs
// attention of the query heads that share them.
static td_status run_kv_heads(td_cuda_stream *stream, const td_attn_gqa_args *a,
                              const td_cu_prefill_list *list, uint32_t head0, uint32_t n,
                              uint16_t *keys, td_err *err) {
  const float *sinks = a->sinks; // on the device
  const uint32_t heads_per_kv = a->n_heads / a->n_kv_heads;
  const size_t row = whole_runs(a->head_dim), head = list->n_keys * row;
  const size_t stride = (size_t)a->n_heads * a->head_dim;
  const size_t first = (size_t)head0 * heads_per_kv * a->head_dim;
  td_cu_kv_gather_args gather = {.batch = a->batch,
                                 .kv = gqa_kv(a),
                                 .list = *list,
                                 .out = keys,
                                 .n_planes = 2,
                                 .n_kv_heads = a->n_kv_heads,
                                 .head0 = head0,
                                 .n_heads = n,
                                 .dim = a->head_dim};
  td_status status = TD_CUDA_LAUNCH(stream, kv_gather, &gather);
  if (status != TD_OK) return status;
  td_cu_attn_prefill_args args = {.batch = gather.batch,
                                  .list = *list,
                                  .q = (const uint16_t *)a->q + first,
                                  .out = (uint16_t *)a->out + first,
                                  .k = keys,
                                  .v = keys + n * head,
                                  .q_stride = stride,
                                  .out_stride = stride,
                                  .k_head = head,
                                  .v_head = head,
                                  .k_stride = row,
                                  .v_stride = row,
                                  .n_heads = n * heads_per_kv,
                                  .heads_per_kv = heads_per_kv,
                                  .k_dim = a->head_dim,
                                  .v_dim = a->head_dim,
                                  .window = a->window,
                                  .sinks = sinks ? sinks + (size_t)head0 * heads_per_kv : NULL,
                                  .scale = a->scale,
                                  .by_wgmma = td_cuda_dev_of(stream)->uses.prefill,
                                  .in_f16 = td_cuda_dev_of(stream)->uses.f16};
  return TD_CUDA_LAUNCH(stream, attn_prefill, &args);
}

// The listed sequences, as many KV heads at a time as fit scratch memory.
static td_status run_listed(td_cuda_stream *stream, const td_attn_gqa_args *a,
                            const td_cu_prefill_list *list, size_t key_bytes, td_err *err) {
  if (list->n_keys == 0 || list->n_tiles == 0) return TD_OK;
  const uint32_t group = td_cuda_at_once(stream, a->n_kv_heads, list->n_keys * key_bytes);
  td_status status = TD_OK;
  void *keys = td_cuda_scratch(stream, CUDA_SCRATCH_KEYS, group * list->n_keys * key_bytes, &status,
                               err);
  for (uint32_t head = 0; status == TD_OK && head < a->n_kv_heads; head += group) {
    const uint32_t left = a->n_kv_heads - head;
    status = run_kv_heads(stream, a, list, head, left < group ? left : group, keys, err);
  }
  return status;
}

static td_status run_tiles(td_cuda_stream *stream, const td_attn_gqa_args *a, td_err *err) {
  const size_t key_bytes = 2 * whole_runs(a->head_dim) * sizeof(uint16_t); // per head
  const size_t most = td_cuda_dev_of(stream)->keys_bytes / (key_bytes * a->n_kv_heads);
  td_status status = TD_OK;
  for (uint32_t s = 0; status == TD_OK && s < a->batch.n_seqs;) {
    td_cu_prefill_list list;
    s = td_cuda_list_prompts(&a->batch, s, a->window, most, &list);
    status = run_listed(stream, a, &list, key_bytes, err);
  }
  return status;
}

// Whether some token may see more keys than are selected.
static bool selects(const td_batch_view *b, uint64_t n_keys) {
  return td_cuda_max_keys(b) > n_keys;
}

td_status td_cuda_op_attn_gqa(td_cuda_stream *stream, td_attn_gqa_args *a, td_err *err) {
  td_status status = td_dev_check_batch(&a->batch, &a->kv, TD_BF16, gqa_rows(a), err);
  if (status != TD_OK || a->batch.n_tokens == 0) return status;
  TD_DEV_REQUIRE(a->n_kv_heads > 0 && a->n_heads % a->n_kv_heads == 0,
                 "attention: %u heads do not share %u KV heads", a->n_heads, a->n_kv_heads);
  TD_DEV_REQUIRE(!a->whole, "attention to later tokens, on a GPU");
  TD_DEV_REQUIRE(!a->blocks || (a->block > 0 && a->top_blocks > 0 && !a->window),
                 "attention: a selection of %u blocks of %u keys, a window of %u", a->top_blocks,
                 a->block, a->window);
  TD_DEV_REQUIRE(!a->selected || (a->top_k > 0 && a->group > 0 && !a->window && !a->blocks),
                 "attention: a selection of %u groups of %u keys, a window of %u", a->top_k,
                 a->group, a->window);
  TD_DEV_REQUIRE(!(a->blocks || a->selected) || a->kv.dtype != TD_F8E4M3,
                 "attention: a selection of blocks in E4M3 pages");
  TD_CUDA_MOST(a->head_dim, TD_CU_MMA_HEAD, "attention: heads of %u elements");
  a->sinks = td_cuda_on_device(td_cuda_dev_of(stream), a->sinks, a->n_heads * sizeof *a->sinks,
                               &status, err);
  if (status != TD_OK) return status;
  // a window of all that pages hold hides nothing
  if (a->window >= a->batch.max_pages * a->batch.page_tokens) a->window = 0;
  const bool of_groups = a->selected != NULL;
  const uint64_t top_keys = of_groups ? td_most_selected(a->top_k, a->group)
                                      : (uint64_t)a->top_blocks * a->block;
  const bool has_blocks = (a->blocks || of_groups) && selects(&a->batch, top_keys);
  if (a->prompt && !has_blocks) return run_tiles(stream, a, err);
  td_cu_attn_decode_args decode = {.batch = a->batch,
                                   .kv = gqa_kv(a),
                                   .q = a->q,
                                   .out = a->out,
                                   .n_heads = a->n_heads,
                                   .n_kv_heads = a->n_kv_heads,
                                   .k_dim = a->head_dim,
                                   .v_dim = a->head_dim,
                                   .window = a->window,
                                   .sinks = a->sinks,
                                   .blocks = !has_blocks ? NULL
                                             : of_groups ? a->selected
                                                         : a->blocks,
                                   .block = of_groups ? a->group : a->block,
                                   .top_blocks = of_groups ? a->top_k : a->top_blocks,
                                   .of_groups = of_groups,
                                   .scale = a->scale};
  const uint32_t max_keys = has_blocks ? (uint32_t)top_keys : td_cuda_max_keys(&a->batch);
  if (a->prompt) { // enough tokens to fill a GPU
    decode.n_splits = 1;
    decode.split_keys = td_cuda_page_of(max_keys);
  }
  return td_cuda_run_decode(stream, &decode, max_keys, err);
}

// Absorbed queries and results on the latents, for as many tokens as fit.
typedef struct {
  const td_attn_mla_args *a;
  const td_weight *kv_b;
  void *query;
  float *latent;
  char *pages;          // of gathered entries, one for each token, and what describes them
  uint32_t page_tokens; // 0: entries are not gathered
  size_t page_bytes;
} mla_latents;

static uint32_t most_selected(const td_attn_mla_args *a) {
  return (uint32_t)td_most_selected(a->top_k, a->group);
}

// Gathers what the tokens [token, token + n) see; args are then of those pages.
static td_status gather_selected(td_cuda_stream *stream, const mla_latents *l, uint32_t token,
                                 uint32_t n, td_cu_attn_decode_args *args, td_err *err) {
  const td_attn_mla_args *a = l->a;
  int32_t *tables = (int32_t *)(l->pages + n * l->page_bytes);
  td_cu_select_gather_args gather = {.batch = args->batch,
                                     .kv = args->kv,
                                     .selected = a->selected + (size_t)token * a->top_k,
                                     .out = (uint16_t *)l->pages,
                                     .seq = tables,
                                     .position = tables + n,
                                     .page_table = tables + 2 * (size_t)n,
                                     .dim = a->kv_lora_rank + a->rope_dim,
                                     .top_k = a->top_k,
                                     .group = a->group,
                                     .page_tokens = l->page_tokens,
                                     .most = most_selected(a)};
  args->kv.pages = l->pages;
  args->kv.page_bytes = l->page_bytes;
  args->batch = (td_batch_view){.seq = gather.seq,
                                .position = gather.position,
                                .page_table = gather.page_table,
                                .n_tokens = n,
                                .n_seqs = n,
                                .max_pages = 1,
                                .page_tokens = l->page_tokens};
  return TD_CUDA_LAUNCH(stream, select_gather, &gather);
}

// The tokens [token, token + n), from the pages of their sequences.
static td_cu_attn_decode_args latents_of(const mla_latents *l, uint32_t token, uint32_t n) {
  const td_attn_mla_args *a = l->a;
  td_cu_attn_decode_args args = {.batch = a->batch,
                                 .kv = mla_kv(a),
                                 .q = l->query,
                                 .out = l->latent,
                                 .n_heads = a->n_heads,
                                 .n_kv_heads = 1,
                                 .k_dim = a->kv_lora_rank + a->rope_dim,
                                 .v_dim = a->kv_lora_rank,
                                 .scale = a->scale,
                                 .v_in_k = true};
  args.batch.n_tokens = n;
  args.batch.seq += token;
  args.batch.position += token;
  return args;
}

// Attention of the tokens [token, token + n).
static td_status run_latents(td_cuda_stream *stream, const mla_latents *l, uint32_t token,
                             uint32_t n, td_err *err) {
  const td_attn_mla_args *a = l->a;
  const size_t at = (size_t)token * a->n_heads;
  td_cu_attn_decode_args args = latents_of(l, token, n);
  td_status status = TD_OK;
  if (l->page_tokens) status = gather_selected(stream, l, token, n, &args, err);
  if (status != TD_OK) return status;
  args.by_length = td_cuda_takes_latents(&args, td_cuda_dev_of(stream)->uses.latents);
  args.q_f32 = !args.by_length;
  args.split_keys = td_cuda_latent_keys(a->batch.n_tokens); // with by_length
  const td_cu_mla_args mla = {
      .kv_b = *l->kv_b,
      .q = (const uint16_t *)a->q + at * (a->nope_dim + a->rope_dim),
      .query = l->query,
      .latent = l->latent,
      .out = (uint16_t *)a->out + at * a->v_dim,
      .n_tokens = n,
      .n_heads = a->n_heads,
      .nope_dim = a->nope_dim,
      .rope_dim = a->rope_dim,
      .v_dim = a->v_dim,
      .lora = a->kv_lora_rank,
      .query_bf16 = args.by_length,
      .read = td_cuda_read_of(l->kv_b, true),
  };
  status = TD_CUDA_LAUNCH(stream, mla_absorb, &mla);
  if (status == TD_OK) {
    const uint32_t max_keys = l->page_tokens ? most_selected(a) : td_cuda_max_keys(&a->batch);
    status = td_cuda_run_decode(stream, &args, max_keys, err);
  }
  return status == TD_OK ? TD_CUDA_LAUNCH(stream, mla_values, &mla) : status;
}

// A replay may have thousands of tokens, each of which needs half a megabyte of scratch for
// DeepSeek-V3, so it runs as many tokens at a time as fit keys_bytes.
static td_status run_absorbed(td_cuda_stream *stream, const td_attn_mla_args *a,
                              const td_weight *kv_b, td_err *err) {
  const uint32_t entry_dim = a->kv_lora_rank + a->rope_dim, n_tokens = a->batch.n_tokens;
  TD_CUDA_MOST(entry_dim, TD_CU_MMA_ENTRY, "attention: latents of %u elements");
  TD_CUDA_MOST(a->kv_lora_rank, TD_CU_MMA_LORA, "attention: latents with values of %u elements");
  const size_t query_bytes = (size_t)a->n_heads * entry_dim * sizeof(float);
  const size_t latent_bytes = (size_t)a->n_heads * a->kv_lora_rank * sizeof(float);
  mla_latents l = {.a = a, .kv_b = kv_b};
  if (a->selected && selects(&a->batch, most_selected(a))) {
    l.page_tokens = (most_selected(a) + TD_CU_LATENT_KEYS - 1) / TD_CU_LATENT_KEYS *
                    TD_CU_LATENT_KEYS;
    l.page_bytes = (size_t)l.page_tokens * entry_dim * sizeof(uint16_t);
  }
  const size_t table_bytes = l.page_tokens ? 3 * sizeof(int32_t) : 0;
  const uint32_t n = td_cuda_at_once(stream, n_tokens, query_bytes + latent_bytes + l.page_bytes);
  td_status status = TD_OK;
  l.query = td_cuda_scratch(stream, CUDA_SCRATCH_QUERY, n * query_bytes, &status, err);
  l.latent = td_cuda_scratch(stream, CUDA_SCRATCH_LATENT, n * latent_bytes, &status, err);
  if (l.page_tokens)
    l.pages = td_cuda_scratch(stream, CUDA_SCRATCH_KEYS, n * (l.page_bytes + table_bytes), &status,
                              err);
  for (uint32_t token = 0; token < n_tokens && status == TD_OK; token += n) {
    const uint32_t left = n_tokens - token;
    status = run_latents(stream, &l, token, left < n ? left : n, err);
  }
  return status;
}

// Some sequences: their latents, and scratch for expanded keys and values of some heads.
typedef struct {
  const td_attn_mla_args *a;
  const td_weight *kv_b;
  uint16_t *latent;   // [list.n_keys][kv_lora_rank + rope_dim]
  uint16_t *expanded; // [list.n_keys][heads][nope_dim + v_dim]
  td_cu_prefill_list list;
} mla_sequences;

// Attention of heads [head0, head0 + n).
static td_status run_heads(td_cuda_stream *stream, const mla_sequences *s, uint32_t head0,
                           uint32_t n, td_err *err) {
  const td_attn_mla_args *a = s->a;
  const uint32_t width = a->nope_dim + a->v_dim, k_dim = a->nope_dim + a->rope_dim;
  const size_t entry_dim = a->kv_lora_rank + a->rope_dim, row = (size_t)n * width;
  td_cuda_matmul m = {.w = s->kv_b,
                      .x = s->latent,
                      .y = s->expanded,
                      .x_stride = entry_dim,
                      .y_stride = row,
                      .n_tokens = s->list.n_keys,
                      .row0 = head0 * width,
                      .n_rows = n * width,
                      .is_prompt = a->batch.n_tokens > TD_CU_VEC_TOKENS};
  td_status status = td_cuda_run_matmul(stream, &m, err);
  if (status != TD_OK) return status;
  td_cu_attn_prefill_args args = {.batch = a->batch,
                                  .list = s->list,
                                  .q = (const uint16_t *)a->q + (size_t)head0 * k_dim,
                                  .out = (uint16_t *)a->out + (size_t)head0 * a->v_dim,
                                  .k = s->expanded,
                                  .rope = s->latent + a->kv_lora_rank,
                                  .v = s->expanded + a->nope_dim,
                                  .q_stride = (size_t)a->n_heads * k_dim,
                                  .out_stride = (size_t)a->n_heads * a->v_dim,
                                  .k_head = width,
                                  .v_head = width,
                                  .k_stride = row,
                                  .rope_stride = entry_dim,
                                  .v_stride = row,
                                  .n_heads = n,
                                  .heads_per_kv = 1,
                                  .k_dim = k_dim,
                                  .v_dim = a->v_dim,
                                  .rope_dim = a->rope_dim,
                                  .scale = a->scale,
                                  .by_wgmma = td_cuda_dev_of(stream)->uses.prefill,
                                  .in_f16 = td_cuda_dev_of(stream)->uses.f16};
  return TD_CUDA_LAUNCH(stream, attn_prefill, &args);
}

static td_status run_sequences(td_cuda_stream *stream, const mla_sequences *s, uint32_t group,
                               td_err *err) {
  const td_attn_mla_args *a = s->a;
  td_cu_kv_gather_args gather = {.batch = a->batch,
                                 .kv = mla_kv(a),
                                 .list = s->list,
                                 .out = s->latent,
                                 .n_planes = 1,
                                 .n_kv_heads = 1,
                                 .n_heads = 1,
                                 .dim = a->kv_lora_rank + a->rope_dim};
  td_status status = TD_CUDA_LAUNCH(stream, kv_gather, &gather);
  for (uint32_t head = 0; status == TD_OK && head < a->n_heads; head += group) {
    const uint32_t left = a->n_heads - head;
    status = run_heads(stream, s, head, left < group ? left : group, err);
  }
  return status;
}

static td_status run_expanded(td_cuda_stream *stream, const td_attn_mla_args *a,
                              const td_weight *kv_b, td_err *err) {
  mla_sequences s = {.a = a, .kv_b = kv_b};
  const size_t latent_bytes = (a->kv_lora_rank + a->rope_dim) * sizeof(uint16_t);
  const size_t key_bytes = (a->nope_dim + a->v_dim) * sizeof(uint16_t); // per head
  const size_t most = td_cuda_dev_of(stream)->keys_bytes / (key_bytes * a->n_heads);
  td_status status = TD_OK;
  for (uint32_t seq = 0; status == TD_OK && seq < a->batch.n_seqs;) {
    seq = td_cuda_list_prompts(&a->batch, seq, 0, most, &s.list);
    const size_t n_keys = s.list.n_keys;
    if (n_keys == 0 || s.list.n_tiles == 0) continue;
    const uint32_t group = td_cuda_at_once(stream, a->n_heads, n_keys * key_bytes);
    s.latent = td_cuda_scratch(stream, CUDA_SCRATCH_LATENT, n_keys * latent_bytes, &status, err);
    s.expanded = td_cuda_scratch(stream, CUDA_SCRATCH_KEYS, group * n_keys * key_bytes, &status,
                                 err);
    if (status == TD_OK) status = run_sequences(stream, &s, group, err);
  }
  return status;
}

td_status td_cuda_op_attn_mla(td_cuda_stream *stream, td_attn_mla_args *a, td_err *err) {
  uint32_t entry_dim = a->kv_lora_rank + a->rope_dim;
  const td_kv_rows rows = td_mla_rows(&a->kv, entry_dim);
  td_status status = td_dev_check_batch(&a->batch, &a->kv, TD_BF16, rows, err);
  td_weight kv_b;
  if (status == TD_OK) {
    status = td_cuda_weight_at(td_cuda_dev_of(stream), a->kv_b, a->weights_on_device, "kv_b", &kv_b,
                               err);
  }
  if (status == TD_OK) status = td_dev_check_attn_mla(a, err);
  if (status != TD_OK || a->batch.n_tokens == 0) return status;
  bool fits = a->nope_dim + a->rope_dim <= TD_CU_MMA_HEAD && a->v_dim <= TD_CU_MMA_HEAD &&
              (a->nope_dim | a->rope_dim | a->v_dim | a->kv_lora_rank) % RUN == 0;
  const bool is_gathered = a->selected && selects(&a->batch, most_selected(a));
  if (a->absorbed || !fits || is_gathered) return run_absorbed(stream, a, &kv_b, err);
  return run_expanded(stream, a, &kv_b, err);
}
