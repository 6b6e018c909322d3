// src/bench/gpu/small.c - the small operators around matrices: norms, positions, routers, ranking.
#include "bench/gpu/paths.h"

TD_GPU_ONCE(embed)
TD_GPU_ONCE(rmsnorm)
TD_GPU_ONCE(rope)
TD_GPU_ONCE(kv_store)
TD_GPU_ONCE(router)
TD_GPU_ONCE(top_logits)

typedef struct {
  void *out;
  const void *x;
  const int32_t *rows;
  uint32_t n, dim;
} gather_args;

static void gather_once(td_gpu_bench *b, const void *args, uint32_t call) {
  const gather_args *a = args;
  (void)call;
  td_op_gather_rows(b->stream, a->out, a->x, a->rows, a->n, a->dim);
}

// Device memory shared by the small operators: rows of activations, and zeros for all other inputs.
typedef struct {
  void *x, *y, *zeros;
  uint32_t n;
} rows_memory;

static void run_small(td_gpu_bench *b, const td_gpu_shape *m, const char *op, td_gpu_call fn,
                      const void *args, uint32_t n, double bytes) {
  td_gpu_run(b, &(td_gpu_case){.op = op, .model = m->name, .tokens = n, .bytes = bytes}, fn, args,
             1);
}

static void bench_rows(td_gpu_bench *b, const td_gpu_shape *m, const rows_memory *r,
                       const td_weight *table) {
  uint32_t n = r->n, dim = m->dim;
  double row_bytes = 2.0 * dim * n;
  const float *w = td_gpu_weight_floats(b, dim, 1);
  td_embed_args embed = {.table = *table, .ids = r->zeros, .out = r->x, .n_tokens = n};
  run_small(b, m, "embed", embed_once, &embed, n, 2 * row_bytes);
  td_rmsnorm_args norm = {.x = r->x,
                          .residual = r->y,
                          .w = {w, TD_F32, dim},
                          .out = r->x,
                          .x_stride = dim,
                          .out_stride = dim,
                          .n_rows = n,
                          .dim = dim,
                          .eps = 1e-6f};
  run_small(b, m, "rmsnorm", rmsnorm_once, &norm, n, 4 * row_bytes);
  td_gpu_copy add = {r->x, r->y, (size_t)n * dim * 2};
  run_small(b, m, "add", td_gpu_add_once, &add, n, 3 * row_bytes);
  gather_args gather = {r->x, r->y, r->zeros, n, dim};
  run_small(b, m, "gather", gather_once, &gather, n, 2 * row_bytes);
  td_router_args router = {.logits = r->zeros,
                           .ids = r->x,
                           .weights = r->y,
                           .kind = m->router,
                           .n_tokens = n,
                           .n_experts = m->n_experts,
                           .top_k = m->top_k,
                           .n_groups = m->n_groups,
                           .topk_groups = m->topk_groups,
                           .norm_topk = true,
                           .scaling = 1};
  run_small(b, m, "router", router_once, &router, n, 4.0 * n * m->n_experts);
}

static void bench_positions(td_gpu_bench *b, const td_gpu_shape *m, const rows_memory *r) {
  uint32_t n = r->n, rot = m->n_kv_heads ? m->head_dim : TD_GPU_ROPE;
  uint32_t head = m->n_kv_heads ? m->head_dim : TD_GPU_NOPE + TD_GPU_ROPE;
  td_rope_args rope = {.heads = {.x = r->x,
                                 .token_stride = (size_t)m->n_heads * head,
                                 .head_stride = head,
                                 .n_heads = m->n_heads},
                       .cos_sin = r->zeros,
                       .position = r->zeros,
                       .n_tokens = n,
                       .rot_dim = rot,
                       .interleaved = !m->n_kv_heads};
  run_small(b, m, "rope", rope_once, &rope, n, 4.0 * n * m->n_heads * rot);
  td_batch_view batch = td_gpu_batch(b, 1, n, n);
  uint32_t width = m->n_kv_heads ? 2 * m->n_kv_heads * m->head_dim : TD_GPU_RANK + TD_GPU_ROPE;
  size_t page_bytes = (size_t)TD_GPU_PAGE_TOKENS * width * 2;
  td_kv_view kv = {.pages = td_gpu_alloc(b, batch.max_pages * page_bytes),
                   .page_bytes = page_bytes,
                   .dtype = TD_BF16};
  td_kv_store_args store = {.batch = batch,
                            .kv = kv,
                            .k = r->x,
                            .v = m->n_kv_heads ? r->y : NULL,
                            .k_stride = m->n_kv_heads ? width / 2 : width,
                            .v_stride = width / 2,
                            .n_heads = m->n_kv_heads ? m->n_kv_heads : 1,
                            .head_dim = m->n_kv_heads ? m->head_dim : width};
  run_small(b, m, "kv_store", kv_store_once, &store, n, 4.0 * n * width);
}

static void bench_ranking(td_gpu_bench *b, const td_gpu_shape *m, const rows_memory *r) {
  static const uint32_t rows[] = {1, 16};
  for (size_t i = 0; i < TD_COUNT(rows); i++) {
    td_top_logits_args args = {.logits = r->zeros,
                               .temperature = r->zeros,
                               .out = r->x,
                               .n_rows = rows[i],
                               .n_vocab = m->n_vocab};
    run_small(b, m, "top_logits", top_logits_once, &args, rows[i], 4.0 * rows[i] * m->n_vocab);
  }
}

void td_gpu_small_cases(td_gpu_bench *b, const td_gpu_shape *m) {
  static const uint32_t tokens[] = {1, 512};
  enum { MOST = 512, MAX_WIDTH = 24576, ZEROS = 16 << 20 }; // zeros: enough for 16 rows of logits
  td_weight table = td_gpu_weight(b, &td_gpu_bf16, 4096,
                                  m->dim); // one row of the vocabulary is read
  rows_memory r = {.x = td_gpu_alloc(b, (size_t)MOST * MAX_WIDTH * 2),
                   .y = td_gpu_alloc(b, (size_t)MOST * MAX_WIDTH * 2),
                   .zeros = td_gpu_alloc(b, ZEROS)};
  for (size_t i = 0; i < TD_COUNT(tokens); i++) {
    r.n = td_gpu_fewer(b, tokens[i], 8);
    bench_rows(b, m, &r, &table);
    bench_positions(b, m, &r);
  }
  bench_ranking(b, m, &r);
  td_gpu_release(b, NULL);
}
