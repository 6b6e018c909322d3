// src/bench/gpu/pool.c - selected keys at the shape of DeepSeek-V3.2, selected blocks at
// MiniMax-M3's, and pooled keys at DeepSeek-V4's. Pages hold random numbers.
#include "bench/gpu/paths.h"

typedef struct {
  uint32_t seqs, tokens, keys; // of each sequence
} pool_case;

static const pool_case cases[] = {{1, 1, 32768}, {16, 1, 8192}, {1, 512, 32768}};

static void run(td_gpu_bench *b, const char *op, const char *model, const pool_case *c,
                double bytes, double flops, td_gpu_call fn, const void *args) {
  td_gpu_run(b,
             &(td_gpu_case){.op = op,
                            .model = model,
                            .tokens = c->seqs * c->tokens,
                            .seqs = c->seqs,
                            .keys = c->keys,
                            .bytes = bytes,
                            .flops = flops},
             fn, args, 1);
}

// ---- selection ----------------------------------------------------------------------------------

TD_GPU_ONCE(select)
TD_GPU_ONCE(attn_mla)

static td_kv_view noise_pages(td_gpu_bench *b, const td_batch_view *batch, size_t page_bytes) {
  const size_t n_pages = (size_t)batch->n_seqs * batch->max_pages;
  return (td_kv_view){
      .pages = td_gpu_noise(b, n_pages * page_bytes), .page_bytes = page_bytes, .dtype = TD_BF16};
}

static void bench_selection(td_gpu_bench *b, const pool_case *c) {
  enum { INDEX_HEADS = 64, DIM = 128, BLOCK_HEADS = 4, BLOCK = 64 };
  const uint32_t n = c->seqs * c->tokens, top_k = td_gpu_fewer(b, 2048, 8);
  const uint32_t top_blocks = td_gpu_fewer(b, 16, 2);
  const uint32_t n_heads = td_gpu_fewer(b, 128, 2), entry = TD_GPU_RANK + TD_GPU_ROPE;
  const td_batch_view batch = td_gpu_batch(b, c->seqs, c->tokens, c->keys);
  const td_kv_view keys = noise_pages(b, &batch, (size_t)TD_GPU_PAGE_TOKENS * DIM * 2);
  const td_kv_view latents = noise_pages(b, &batch, (size_t)TD_GPU_PAGE_TOKENS * entry * 2);
  const td_weight kv_b = td_gpu_weight(b, &td_gpu_fp8, n_heads * (TD_GPU_NOPE + TD_GPU_V_DIM),
                                       TD_GPU_RANK);
  void *q = td_gpu_noise(b, (size_t)n * n_heads * (TD_GPU_NOPE + TD_GPU_ROPE) * 2 +
                                (size_t)n * INDEX_HEADS * DIM * 2);
  float *weights = td_gpu_noise(b, (size_t)n * INDEX_HEADS * sizeof *weights);
  void *out = td_gpu_alloc(b, (size_t)n * n_heads * TD_GPU_V_DIM * 2);
  int32_t *selected = td_gpu_alloc(b, (size_t)n * top_k * sizeof *selected);
  int32_t *blocks = td_gpu_alloc(b, (size_t)n * BLOCK_HEADS * top_blocks * sizeof *blocks);
  const td_select_args select = {.batch = batch,
                                 .kv = keys,
                                 .q = q,
                                 .weights = weights,
                                 .selected = selected,
                                 .n_heads = INDEX_HEADS,
                                 .dim = DIM,
                                 .top_k = top_k};
  td_select_args select_blocks = select;
  select_blocks.selected = blocks;
  select_blocks.n_heads = BLOCK_HEADS;
  select_blocks.top_k = top_blocks;
  select_blocks.block = BLOCK;
  select_blocks.n_local = 1;
  const td_attn_mla_args attn = {.batch = batch,
                                 .kv = latents,
                                 .q = q,
                                 .kv_b = &kv_b,
                                 .selected = selected,
                                 .out = out,
                                 .n_heads = n_heads,
                                 .nope_dim = TD_GPU_NOPE,
                                 .rope_dim = TD_GPU_ROPE,
                                 .v_dim = TD_GPU_V_DIM,
                                 .kv_lora_rank = TD_GPU_RANK,
                                 .top_k = top_k,
                                 .scale = 0.1f};
  const double of_keys = (double)c->seqs * c->keys * DIM * 2, pairs = (double)n * c->keys;
  run(b, "select_keys", "v3.2", c, of_keys, 2.0 * pairs * INDEX_HEADS * DIM, select_once, &select);
  run(b, "select_blocks", "minimax-m3", c, of_keys, 2.0 * pairs * BLOCK_HEADS * DIM, select_once,
      &select_blocks);
  if (b->dev) td_op_select(b->stream, &select); // what attention reads
  run(b, "mla_selected", "v3.2", c, 2.0 * n * top_k * entry,
      2.0 * n * top_k * n_heads * (2 * TD_GPU_RANK + TD_GPU_ROPE), attn_mla_once, &attn);
  td_gpu_release(b, NULL);
}

// ---- pooled keys --------------------------------------------------------------------------------

TD_GPU_ONCE(pool)
TD_GPU_ONCE(attn_pool)

// The first of a token's entries, which all are there.
static int32_t *put_selected(td_gpu_bench *b, uint32_t n, uint32_t top_k) {
  const size_t n_ints = (size_t)n * top_k;
  int32_t *host = td_gpu_host(b, n_ints * sizeof *host);
  for (size_t i = 0; i < n_ints; i++)
    host[i] = (int32_t)(i % top_k);
  return td_gpu_ints(b, host, n_ints);
}

// Groups of 4 positions, of whose entries 512 are selected, or of 128.
static void bench_pools(td_gpu_bench *b, const pool_case *c, bool is_selected) {
  enum { DIM = 512, ROT = 64, WINDOW = 128, RING = WINDOW + 4, WIDTH = 2 * DIM };
  const char *model = is_selected ? "v4-c4" : "v4-c128";
  const uint32_t n = c->seqs * c->tokens, group = is_selected ? 4 : 128;
  const uint32_t n_heads = td_gpu_fewer(b, 64, 2);
  const uint32_t top_k = is_selected ? td_gpu_fewer(b, 512, 4) : 0;
  const size_t open_at = (size_t)RING * DIM, entry_at = open_at + 6 * (size_t)DIM;
  const size_t page = entry_at + (size_t)td_pool_entries(TD_GPU_PAGE_TOKENS, group) * DIM;
  const td_batch_view batch = td_gpu_batch(b, c->seqs, c->tokens, c->keys);
  td_kv_view state = noise_pages(b, &batch, page * sizeof(float));
  state.dtype = TD_F32;
  float *x = td_gpu_noise(b, (size_t)n * WIDTH * sizeof *x * 2);
  float *cos_sin = td_gpu_noise(b, (size_t)c->keys * ROT * sizeof *cos_sin);
  const float *norm = td_gpu_weight_floats(b, DIM, 1);
  const float *bias = td_gpu_weight_floats(b, (size_t)group * WIDTH, 0); // and sinks
  void *q = td_gpu_noise(b, (size_t)n * n_heads * DIM * 2),
       *key = td_gpu_noise(b, (size_t)n * DIM * 2);
  int32_t *selected = put_selected(b, n, top_k ? top_k : 1);
  const td_pool_args pool = {.batch = batch,
                             .state = state,
                             .x = x,
                             .gate = x + (size_t)n * WIDTH,
                             .stride = WIDTH,
                             .bias = bias,
                             .norm = {norm, TD_F32, DIM},
                             .cos_sin = cos_sin,
                             .open_at = open_at,
                             .entry_at = entry_at,
                             .dim = DIM,
                             .rot_dim = ROT,
                             .group = group,
                             .overlaps = true,
                             .eps = 1e-6f};
  const td_attn_pool_args attn = {.batch = batch,
                                  .state = state,
                                  .q = q,
                                  .key = key,
                                  .key_stride = DIM,
                                  .sinks = bias,
                                  .selected = is_selected ? selected : NULL,
                                  .entry_at = entry_at,
                                  .n_heads = n_heads,
                                  .dim = DIM,
                                  .window = WINDOW,
                                  .ring = RING,
                                  .group = group,
                                  .top_k = top_k,
                                  .scale = 0.1f};
  const double seen = WINDOW + (is_selected ? top_k : c->keys / group);
  run(b, "pool", model, c, (double)n * WIDTH * 8, 0, pool_once, &pool);
  run(b, "attn_pool", model, c, 4.0 * n * seen * DIM, 4.0 * n * seen * n_heads * DIM,
      attn_pool_once, &attn);
  td_gpu_release(b, NULL);
}

void td_gpu_pool_cases(td_gpu_bench *b) {
  const bool selects = td_gpu_wants_any(b, "select_keys mla_selected", "v3.2") ||
                       td_gpu_wants(b, "select_blocks", "minimax-m3", "");
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    pool_case c = cases[i];
    if (b->shrink > 1) c = (pool_case){c.seqs > 1 ? 2 : 1, c.tokens > 1 ? 3 : 1, 192};
    if (selects) bench_selection(b, &c);
    for (int of_4 = 1; of_4 >= 0; of_4--) {
      const char *model = of_4 ? "v4-c4" : "v4-c128";
      if (td_gpu_wants_any(b, "pool attn_pool", model)) bench_pools(b, &c, of_4);
    }
  }
}
