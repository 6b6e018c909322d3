// bench/bench_gpu.c - the CUDA device's operators at the shapes of real models, as JSON.
// A case is enqueued again and again until a run takes some 50 ms, and the median of five runs
// counts: wall time over the number of calls, launches included. Weights rotate through enough
// matrices to come from memory rather than from the L2.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/json_write.h"
#include "device/device.h"

enum { RUNS = 5, ROTATING_BYTES = 512 << 20, MAX_MATRICES = 64, PAGE_TOKENS = 64 };
#define RUN_S 0.05

typedef struct {
  td_dev *dev;
  td_stream *stream;
  td_json_writer *json;
  double copy_gbps; // within the device, reads and writes
} bench;

static void need(td_status status, const td_err *err) {
  if (status == TD_OK) return;
  fprintf(stderr, "bench_gpu: %s\n", err->msg);
  exit(1);
}

static void sync_all(bench *b) {
  td_err err;
  need(td_stream_sync(b->stream, &err), &err);
}

static void *device_memory(bench *b, size_t n_bytes) {
  td_err err;
  void *out;
  need(td_dev_alloc(b->dev, &out, n_bytes, &err), &err);
  td_op_fill_zero(b->stream, out, n_bytes);
  return out;
}

static void *host_memory(size_t n_bytes) {
  void *out = malloc(n_bytes);
  TD_CHECK(out);
  return out;
}

// ---- timing -----------------------------------------------------------------------------------

typedef void (*bench_fn)(bench *b, const void *args, uint32_t call);

static double run_calls(bench *b, bench_fn fn, const void *args, uint32_t n_calls) {
  double begin = td_clock_s();
  for (uint32_t i = 0; i < n_calls; i++)
    fn(b, args, i);
  sync_all(b);
  return td_clock_s() - begin;
}

static int compare(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

// Seconds a call.
static double measure(bench *b, bench_fn fn, const void *args) {
  uint32_t n = 1;
  run_calls(b, fn, args, MAX_MATRICES); // every weight on the GPU, every buffer there
  while (n < 1u << 20 && run_calls(b, fn, args, n) < RUN_S)
    n *= 2;
  double seconds[RUNS];
  for (int i = 0; i < RUNS; i++)
    seconds[i] = run_calls(b, fn, args, n) / n;
  qsort(seconds, RUNS, sizeof *seconds, compare);
  return seconds[RUNS / 2];
}

typedef struct {
  const char *op, *model, *format;
  uint32_t tokens, keys;
  double bytes, flops; // of a call
} bench_case;

static void record(bench *b, const bench_case *c, double seconds) {
  td_json_writer *w = b->json;
  td_jw_begin_object(w, NULL);
  td_jw_str(w, "op", c->op);
  td_jw_str(w, "model", c->model);
  if (c->format) td_jw_str(w, "format", c->format);
  td_jw_int(w, "tokens", c->tokens);
  if (c->keys) td_jw_int(w, "keys", c->keys);
  td_jw_double(w, "us", seconds * 1e6);
  td_jw_double(w, "gbps", c->bytes / seconds * 1e-9);
  td_jw_double(w, "tflops", c->flops / seconds * 1e-12);
  td_jw_double(w, "share_of_device_bandwidth", c->bytes / seconds * 1e-9 / b->copy_gbps);
  td_jw_end_object(w);
  fprintf(stderr, "%-12s %-10s %-6s %5u tokens %6u keys %10.1f us %8.1f GB/s %8.2f TFLOP/s\n",
          c->op, c->model, c->format ? c->format : "", c->tokens, c->keys, seconds * 1e6,
          c->bytes / seconds * 1e-9, c->flops / seconds * 1e-12);
}

// ---- memory -----------------------------------------------------------------------------------

typedef struct {
  void *dst;
  const void *src;
  size_t n_bytes;
} copy_args;

static void copy_once(bench *b, const void *args, uint32_t call) {
  const copy_args *a = args;
  (void)call;
  td_op_copy(b->stream, a->dst, a->src, a->n_bytes);
}

static void bench_copies(bench *b) {
  size_t n = 256 << 20;
  void *host = host_memory(n), *first = device_memory(b, n), *second = device_memory(b, n);
  memset(host, 1, n);
  double up = measure(b, copy_once, &(copy_args){first, host, n});
  double within = measure(b, copy_once, &(copy_args){second, first, n});
  b->copy_gbps = 2 * (double)n / within * 1e-9;
  td_jw_double(b->json, "pageable_host_to_device_gbps", (double)n / up * 1e-9);
  td_jw_double(b->json, "device_gbps", b->copy_gbps);
  td_dev_free(b->dev, first);
  td_dev_free(b->dev, second);
  free(host);
}

// ---- matrices ---------------------------------------------------------------------------------

typedef struct {
  const char *name;
  td_dtype dtype, scale_dtype;
  uint32_t scale_rows, scale_cols;
} weight_format;

static const weight_format formats[] = {
    {"bf16", TD_BF16, TD_F32, 0, 0},
    {"fp8", TD_F8E4M3, TD_F32, 128, 128},
    {"int4", TD_I4, TD_BF16, 1, 32},
};

// Any bits but NaN's; scales of 2^-7. The memory is kept until the end: the device knows weights
// by their address.
static td_weight make_weight(const weight_format *f, uint32_t rows, uint32_t cols) {
  td_weight w = {.dtype = f->dtype, .rows = rows, .cols = cols};
  size_t n = td_weight_data_bytes(&w);
  uint8_t *data = host_memory(n);
  for (size_t i = 0; i < n; i++)
    data[i] = f->dtype == TD_BF16 ? (i % 2 ? 0x3c : (uint8_t)(i * 37)) : (uint8_t)(i * 37 & 0x77);
  w.data = data;
  if (!f->scale_cols) return w;
  w.scale_rows = f->scale_rows;
  w.scale_cols = f->scale_cols;
  w.scale_dtype = f->scale_dtype;
  w.scale = data; // for the size
  size_t n_scales = td_weight_scale_bytes(&w) / td_dtype_bytes(f->scale_dtype);
  uint16_t *scale = host_memory(n_scales * td_dtype_bytes(f->scale_dtype));
  for (size_t i = 0; i < n_scales; i++) { // 0x3c00 is the upper half of 2^-7 in FP32
    if (f->scale_dtype == TD_F32) scale[2 * i] = 0;
    scale[f->scale_dtype == TD_F32 ? 2 * i + 1 : i] = 0x3c00;
  }
  w.scale = scale;
  return w;
}

typedef struct {
  td_weight *w;
  uint32_t n_matrices, n_tokens;
  void *x, *y;
} linear_args;

static void linear_once(bench *b, const void *args, uint32_t call) {
  const linear_args *a = args;
  const td_weight *w = &a->w[call % a->n_matrices];
  td_op_linear(b->stream, &(td_linear_op_args){.w = w,
                                               .x = a->x,
                                               .y = a->y,
                                               .x_stride = w->cols,
                                               .y_stride = w->rows,
                                               .n_tokens = a->n_tokens});
}

static void bench_linear(bench *b, const char *model, const weight_format *f, uint32_t rows,
                         uint32_t cols) {
  static const uint32_t tokens[] = {1, 4, 16, 64, 512, 4096};
  td_weight w[MAX_MATRICES];
  w[0] = make_weight(f, rows, cols);
  size_t n = ROTATING_BYTES / td_weight_bytes(&w[0]);
  n = n < 1 ? 1 : n > MAX_MATRICES ? MAX_MATRICES : n;
  for (size_t i = 1; i < n; i++)
    w[i] = make_weight(f, rows, cols);
  linear_args args = {.w = w, .n_matrices = (uint32_t)n};
  args.x = device_memory(b, (size_t)4096 * cols * 2);
  args.y = device_memory(b, (size_t)4096 * rows * 2);
  for (size_t i = 0; i < TD_COUNT(tokens); i++) {
    args.n_tokens = tokens[i];
    double seconds = measure(b, linear_once, &args);
    double activations = 2.0 * tokens[i] * ((double)rows + cols);
    record(b,
           &(bench_case){.op = "linear",
                         .model = model,
                         .format = f->name,
                         .tokens = tokens[i],
                         .bytes = (double)td_weight_bytes(&w[0]) + activations,
                         .flops = 2.0 * rows * cols * tokens[i]},
           seconds);
  }
  td_dev_free(b->dev, args.x);
  td_dev_free(b->dev, args.y);
}

typedef struct {
  td_moe_args moe;
} moe_bench;

static void moe_once(bench *b, const void *args, uint32_t call) {
  (void)call;
  td_op_moe(b->stream, &((const moe_bench *)args)->moe);
}

// Tokens take experts in turn, so that n tokens read min(n * top_k, n_experts) of them.
static void bench_moe(bench *b, const char *model, uint32_t dim, uint32_t hidden) {
  enum { EXPERTS = 64, TOP_K = 8, TOKENS = 2048 };
  static const uint32_t tokens[] = {1, 8, 64, 512, TOKENS};
  const weight_format *f = &formats[1];
  td_weight w[3][EXPERTS];
  for (int e = 0; e < EXPERTS; e++) {
    w[0][e] = make_weight(f, hidden, dim);
    w[1][e] = make_weight(f, hidden, dim);
    w[2][e] = make_weight(f, dim, hidden);
  }
  static int32_t ids[TOKENS * TOP_K];
  static float weights[TOKENS * TOP_K];
  for (int i = 0; i < TOKENS * TOP_K; i++) {
    ids[i] = i % EXPERTS;
    weights[i] = 0.125f;
  }
  moe_bench args = {{.gate = w[0],
                     .up = w[1],
                     .down = w[2],
                     .x = device_memory(b, (size_t)TOKENS * dim * 2),
                     .ids = device_memory(b, sizeof ids),
                     .weights = device_memory(b, sizeof weights),
                     .out = device_memory(b, (size_t)TOKENS * dim * 2),
                     .n_experts = EXPERTS,
                     .top_k = TOP_K}};
  td_op_copy(b->stream, (void *)args.moe.ids, ids, sizeof ids);
  td_op_copy(b->stream, (void *)args.moe.weights, weights, sizeof weights);
  double expert_bytes = 3.0 * (double)td_weight_bytes(&w[0][0]);
  for (size_t i = 0; i < TD_COUNT(tokens); i++) {
    args.moe.n_tokens = tokens[i];
    double seconds = measure(b, moe_once, &args);
    uint32_t used = tokens[i] * TOP_K < EXPERTS ? tokens[i] * TOP_K : EXPERTS;
    record(b,
           &(bench_case){.op = "experts",
                         .model = model,
                         .format = f->name,
                         .tokens = tokens[i],
                         .bytes = used * expert_bytes,
                         .flops = 6.0 * dim * hidden * TOP_K * tokens[i]},
           seconds);
  }
}

// ---- attention --------------------------------------------------------------------------------

typedef struct {
  bool mla;
  td_attn_gqa_args gqa;
  td_attn_mla_args latent;
} attn_bench;

static void attn_once(bench *b, const void *args, uint32_t call) {
  const attn_bench *a = args;
  (void)call;
  if (a->mla) {
    td_op_attn_mla(b->stream, &a->latent);
  } else {
    td_op_attn_gqa(b->stream, &a->gqa);
  }
}

static int32_t *put_ints(bench *b, const int32_t *host, size_t n) {
  int32_t *out = device_memory(b, n * sizeof *out);
  td_op_copy(b->stream, out, host, n * sizeof *out);
  sync_all(b);
  return out;
}

// One sequence whose last n_tokens of n_keys positions are computed.
static td_batch_view make_batch(bench *b, uint32_t n_tokens, uint32_t n_keys) {
  uint32_t n_pages = (n_keys + PAGE_TOKENS - 1) / PAGE_TOKENS;
  int32_t *host = host_memory((n_tokens + n_pages) * sizeof *host),
          begin[] = {0, (int32_t)n_tokens};
  td_batch_view batch = {.n_tokens = n_tokens,
                         .n_seqs = 1,
                         .max_pages = n_pages,
                         .page_tokens = PAGE_TOKENS,
                         .max_keys = n_keys};
  batch.q_begin = put_ints(b, begin, 2);
  memset(host, 0, n_tokens * sizeof *host);
  batch.seq = put_ints(b, host, n_tokens);
  for (uint32_t i = 0; i < n_tokens; i++)
    host[i] = (int32_t)(n_keys - n_tokens + i);
  batch.position = put_ints(b, host, n_tokens);
  for (uint32_t i = 0; i < n_pages; i++)
    host[i] = (int32_t)i;
  batch.page_table = put_ints(b, host, n_pages);
  free(host);
  return batch;
}

// Pairs of a query and a key it sees.
static double n_pairs(uint32_t n_tokens, uint32_t n_keys) {
  return n_tokens * ((double)n_keys - (n_tokens - 1) / 2.0);
}

static const uint32_t attn_shapes[][2] = {
    {1, 1024}, {1, 8192}, {1, 32768}, {512, 8192}, {8192, 8192}};

static void bench_gqa(bench *b, const char *model, uint32_t n_heads, uint32_t n_kv_heads,
                      uint32_t head_dim) {
  for (size_t i = 0; i < TD_COUNT(attn_shapes); i++) {
    uint32_t n = attn_shapes[i][0], keys = attn_shapes[i][1];
    size_t page_bytes = (size_t)PAGE_TOKENS * n_kv_heads * head_dim * 2 * 2;
    td_batch_view batch = make_batch(b, n, keys);
    void *pages = device_memory(b, batch.max_pages * page_bytes);
    void *q = device_memory(b, (size_t)n * n_heads * head_dim * 4);
    attn_bench args = {.gqa = {.batch = batch,
                               .kv = {pages, page_bytes, TD_F16},
                               .q = q,
                               .out = (char *)q + (size_t)n * n_heads * head_dim * 2,
                               .n_heads = n_heads,
                               .n_kv_heads = n_kv_heads,
                               .head_dim = head_dim,
                               .scale = 0.1f}};
    double seconds = measure(b, attn_once, &args);
    record(b,
           &(bench_case){.op = n == 1 ? "decode" : "prefill",
                         .model = model,
                         .tokens = n,
                         .keys = keys,
                         .bytes = 4.0 * n_kv_heads * head_dim * keys,
                         .flops = 4.0 * n_heads * head_dim * n_pairs(n, keys)},
           seconds);
    td_dev_free(b->dev, pages);
    td_dev_free(b->dev, q);
  }
}

static void bench_mla(bench *b, const char *model, uint32_t n_heads) {
  enum { NOPE = 128, ROPE = 64, V = 128, RANK = 512 };
  td_weight kv_b = make_weight(&formats[1], n_heads * (NOPE + V), RANK);
  for (size_t i = 0; i < TD_COUNT(attn_shapes); i++) {
    uint32_t n = attn_shapes[i][0], keys = attn_shapes[i][1];
    size_t page_bytes = (size_t)PAGE_TOKENS * (RANK + ROPE) * 2;
    td_batch_view batch = make_batch(b, n, keys);
    void *pages = device_memory(b, batch.max_pages * page_bytes);
    void *q = device_memory(b, (size_t)n * n_heads * (NOPE + ROPE) * 2);
    void *out = device_memory(b, (size_t)n * n_heads * V * 2);
    attn_bench args = {.mla = true,
                       .latent = {.batch = batch,
                                  .kv = {pages, page_bytes, TD_F16},
                                  .q = q,
                                  .kv_b = &kv_b,
                                  .out = out,
                                  .n_heads = n_heads,
                                  .nope_dim = NOPE,
                                  .rope_dim = ROPE,
                                  .v_dim = V,
                                  .kv_lora_rank = RANK,
                                  .scale = 0.1f,
                                  .absorbed = n == 1}};
    double seconds = measure(b, attn_once, &args);
    double width = n == 1 ? 2 * RANK + ROPE : NOPE + ROPE + V;
    record(b,
           &(bench_case){.op = n == 1 ? "mla_decode" : "mla_prefill",
                         .model = model,
                         .tokens = n,
                         .keys = keys,
                         .bytes = 2.0 * (RANK + ROPE) * keys + (double)td_weight_bytes(&kv_b),
                         .flops = 2.0 * n_heads * width * n_pairs(n, keys)},
           seconds);
    td_dev_free(b->dev, pages);
    td_dev_free(b->dev, q);
    td_dev_free(b->dev, out);
  }
}

// ---- all of it --------------------------------------------------------------------------------

static void run(bench *b) {
  td_jw_begin_array(b->json, NULL);
  td_jw_begin_object(b->json, NULL);
  td_jw_str(b->json, "device", td_dev_name(b->dev));
  td_jw_str(b->json, "tandem", TD_VERSION);
  bench_copies(b);
  td_jw_end_object(b->json);
  for (size_t f = 0; f < TD_COUNT(formats); f++) {
    bench_linear(b, "v3", &formats[f], 2048, 7168);
    bench_linear(b, "qwen3-30b", &formats[f], 4096, 2048);
    bench_linear(b, "moonlight", &formats[f], 11264, 2048);
  }
  bench_moe(b, "v3", 7168, 2048);
  bench_moe(b, "qwen3-30b", 2048, 768);
  bench_gqa(b, "qwen3-30b", 32, 4, 128);
  bench_mla(b, "v3", 128);
  bench_mla(b, "moonlight", 16);
  td_jw_end_array(b->json);
}

int main(void) {
  td_err err;
  td_buf text = TD_BUF_INIT;
  td_json_writer json = TD_JSON_WRITER(&text);
  bench b = {.json = &json};
  need(td_dev_open(&b.dev, &(td_dev_opts){.kind = "cuda"}, &err), &err);
  need(td_stream_open(&b.stream, b.dev, &err), &err);
  run(&b);
  need(td_buf_status(&text, &err), &err);
  puts(td_buf_text(&text));
  td_buf_free(&text);
  td_stream_close(b.stream);
  td_dev_close(b.dev);
  return 0;
}
