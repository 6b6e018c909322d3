// src/bench/gpu/streams.c - residuals of several streams (hyper-connections, at DeepSeek-V4's
// shape), embeddings of n-grams in front of them, and what a node of a graph costs.
#include "bench/gpu/paths.h"

enum { STREAMS = 4, DIM = 7168, NGRAM = 3, NGRAM_HEADS = 8, NGRAM_COLS = 128, TAPS = 4 };

typedef struct {
  td_hyper_read_args read;
  td_hyper_write_args write;
  td_hyper_mix_args mix;
  td_ngram_rows_args rows;
  td_ngram_gate_args gate;
  td_ngram_conv_args conv;
} stream_calls;

TD_GPU_ONCE(hyper_read)
TD_GPU_ONCE(hyper_write)
TD_GPU_ONCE(hyper_mix)
TD_GPU_ONCE(ngram_rows)
TD_GPU_ONCE(ngram_gate)
TD_GPU_ONCE(ngram_conv)

static void run_all(td_gpu_bench *b, const stream_calls *c, uint32_t n, uint32_t dim) {
  const double row = 2.0 * n * dim;
  const struct {
    const char *op;
    td_gpu_call fn;
    const void *args;
    double bytes;
  } ops[] = {
      {"hyper_read", hyper_read_once, &c->read, row * (STREAMS + 1)},
      {"hyper_write", hyper_write_once, &c->write, row * (2 * STREAMS + 1)},
      {"hyper_mix", hyper_mix_once, &c->mix, row * (2 * STREAMS + 1)},
      {"ngram_rows", ngram_rows_once, &c->rows, 2.0 * n * (NGRAM - 1) * NGRAM_HEADS * NGRAM_COLS},
      {"ngram_gate", ngram_gate_once, &c->gate, row * (3 * STREAMS + 1)},
      {"ngram_conv", ngram_conv_once, &c->conv, row * STREAMS * 4}};
  for (size_t i = 0; i < TD_COUNT(ops); i++) {
    const td_gpu_case result = {.op = ops[i].op, .model = "v4", .tokens = n, .bytes = ops[i].bytes};
    td_gpu_run(b, &result, ops[i].fn, ops[i].args, 1);
  }
}

static void bench_streams(td_gpu_bench *b, uint32_t n) {
  const uint32_t dim = td_gpu_shrunk(b, DIM), channels = STREAMS * dim;
  const uint32_t n_scores = td_hyper_scores(STREAMS), past = td_ngram_past(TAPS, NGRAM);
  const td_batch_view batch = td_gpu_batch(b, 1, n, n);
  const td_weight shard = {.dtype = TD_BF16, .rows = 1, .cols = NGRAM_COLS, .global_scale = 1};
  const td_ngram_table table = {
      .shards = &shard, .n_shards = 1, .hash = {.size = NGRAM, .n_heads = NGRAM_HEADS}};
  const size_t rows_at = NGRAM, page = rows_at + (size_t)past * channels;
  const size_t n_rows = (size_t)n * td_ngram_rows(&table.hash) * NGRAM_COLS;
  void *gathered = NULL, *x[3], *state;
  td_err err;
  if (b->dev) td_gpu_must(td_dev_alloc_host(b->dev, &gathered, n_rows * 2, &err), &err);
  for (size_t i = 0; i < TD_COUNT(x); i++)
    x[i] = td_gpu_noise(b, (size_t)n * channels * 2);
  state = td_gpu_alloc(b, batch.max_pages * page * sizeof(float));
  float *scores = td_gpu_noise(b, (size_t)n * n_scores * sizeof *scores);
  void *ints = td_gpu_alloc(b, n * sizeof(int32_t)),
       *out = td_gpu_alloc(b, n_rows * 2 + 2ul * n * dim);
  const td_kv_view kv = {.pages = state, .page_bytes = page * sizeof(float), .dtype = TD_F32};
  const stream_calls c = {
      .read = {.x = x[0],
               .scores = scores,
               .base = td_gpu_weight_floats(b, n_scores, 0),
               .scale = td_gpu_weight_floats(b, 3, 0),
               .w = {td_gpu_weight_floats(b, dim, 0), TD_F32, dim},
               .out = out,
               .n_tokens = n,
               .n_streams = STREAMS,
               .dim = dim,
               .n_rounds = 20,
               .eps = 1e-6f,
               .norm_eps = 1e-6f},
      .write =
          {.x = x[0], .y = x[1], .scores = scores, .n_tokens = n, .n_streams = STREAMS, .dim = dim},
      .mix = {.x = x[0], .gate = x[1], .out = out, .n_tokens = n, .n_streams = STREAMS, .dim = dim},
      .rows = {.batch = batch,
               .state = kv,
               .tokens = ints,
               .table = &table,
               .gathered = gathered,
               .out = out},
      .gate = {.x = x[0],
               .query = x[1],
               .value = x[2],
               .n_tokens = n,
               .n_streams = STREAMS,
               .dim = dim},
      .conv = {.batch = batch,
               .state = kv,
               .rows_at = rows_at,
               .conv = td_gpu_weight_floats(b, (size_t)TAPS * channels, 0),
               .in = x[1],
               .y = x[2],
               .x = x[0],
               .channels = channels,
               .n_taps = TAPS,
               .step = NGRAM}};
  run_all(b, &c, n, dim);
  td_gpu_release(b, NULL);
  if (b->dev) td_dev_free_host(b->dev, gathered);
}

void td_gpu_stream_cases(td_gpu_bench *b) {
  static const uint32_t tokens[] = {1, 16, 512};
  const bool is_wanted = td_gpu_wants_any(
      b, "hyper_read hyper_write hyper_mix ngram_rows ngram_gate ngram_conv", "v4");
  for (size_t i = 0; i < TD_COUNT(tokens) && is_wanted; i++)
    bench_streams(b, td_gpu_fewer(b, tokens[i], i ? 2 : 1));
}

// A thousand kernels that do nothing to speak of, each after the other.
void td_gpu_node_cases(td_gpu_bench *b) {
  enum { NODES = 1000, BYTES = 16 };
  if (!td_gpu_wants(b, "node", "graph", "")) return;
  void *x = td_gpu_alloc(b, 2 * BYTES);
  const td_gpu_copy add = {x, (char *)x + BYTES, BYTES};
  td_gpu_run(b, &(td_gpu_case){.op = "node", .model = "graph", .tokens = 1, .bytes = 3 * BYTES},
             td_gpu_add_once, &add, td_gpu_fewer(b, NODES, 1));
  td_gpu_release(b, NULL);
}
