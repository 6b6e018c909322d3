// bench/bench_gpu.c - benchmarks the CUDA device's operators at the shapes of real models. Prints
// JSON lines: first the machine and its limits, then one line per case, flushed when it is known.
// Calls are launched in groups as a graph, as the engine does for a decode step. A case is repeated
// until a run takes about 50 ms; its result is the median of five runs, as wall time per call.
// Calls rotate through enough weights, experts and (for decode) KV caches that data come from
// memory rather than L2.
// usage: bench_gpu [--only TEXT] [--list] [--shrink N] [--path NAME] [--without-cublas]
// [KEY=VALUE]...
//   --only TEXT       cases whose "operator model format" contains TEXT
//   --list            list the cases without measuring; works on any machine
//   --shrink N        divide dimensions by N and run each case once: for the emulator
//   --path NAME       instead of operators: copies, register, signals, stream, decode, cache,
//                     interference
//     --device cpu    for the last four: two CPU devices instead of GPU and CPU
//     --layers N      for the last four: number of layers instead of 61
//     --threads N     for the last four: CPU threads instead of one per CPU
//   --without-cublas  if cuBLAS is not installed, continue with tandem's own kernels
//   KEY=VALUE         extra members of the first line
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/machine.h"
#include "bench/mem_bandwidth.h"
#include "gpu_bench.h"
#include "gpu_paths.h"

enum { ROTATING_BYTES = 512 << 20, MAX_MATRICES = 64, PAGE_TOKENS = 64, HOST_PAGE_BYTES = 4096 };

// A dimension reduced by --shrink, still a multiple of the scale groups.
static uint32_t shrunk(const td_gpu_bench *b, uint32_t n) {
  enum { GROUP = 128 };
  return b->shrink == 1 ? n : (n / b->shrink / GROUP + 1) * GROUP;
}

// A count reduced by --shrink, but not below `least`.
static uint32_t fewer(const td_gpu_bench *b, uint32_t n, uint32_t least) {
  return b->shrink == 1 || n / b->shrink > least ? n / b->shrink : n < least ? n : least;
}

// ---- the machine's limits -----------------------------------------------------------------------

typedef struct {
  const td_weight *w;
  uint32_t n_matrices, n_tokens;
  const void *x;
  void *y;
  bool out_f32;
} linear_args;

static void linear_once(td_gpu_bench *b, const void *args, uint32_t call) {
  const linear_args *a = args;
  const td_weight *w = &a->w[call % a->n_matrices];
  td_op_linear(b->stream, &(td_linear_op_args){.w = w,
                                               .x = a->x,
                                               .y = a->y,
                                               .x_stride = w->cols,
                                               .y_stride = w->rows,
                                               .n_tokens = a->n_tokens,
                                               .out_f32 = a->out_f32});
}

static void bench_copies(td_gpu_bench *b) {
  size_t n = (256 << 20) / b->shrink;
  void *host = aligned_alloc(HOST_PAGE_BYTES, n); // page-aligned: registering affects whole pages
  TD_CHECK(host);
  memset(host, 1, n);
  void *first = td_gpu_alloc(b, n), *second = td_gpu_alloc(b, n);
  td_gpu_copy up = {first, host, n}, down = {host, first, n}, within = {second, first, n};
  double gb = (double)n * 1e-9;
  td_jw_double(b->json, "pageable_host_to_device_gbps",
               gb / td_gpu_measure_copy(b, td_gpu_copy_once, &up));
  td_jw_double(b->json, "pageable_device_to_host_gbps",
               gb / td_gpu_measure_copy(b, td_gpu_copy_once, &down));
  td_dev_pin(b->dev, host, n); // stays pinned until the end
  td_dev_wait_pinned(b->dev, host, n);
  if (td_cuda_pinned_bytes((td_cuda_dev *)b->dev) == n) {
    td_jw_double(b->json, "pinned_host_to_device_gbps",
                 gb / td_gpu_measure_copy(b, td_gpu_copy_once, &up));
  }
  b->copy_gbps = 2 * gb / td_gpu_measure_copy(b, td_gpu_copy_once, &within);
  td_jw_double(b->json, "device_gbps", b->copy_gbps);
  td_gpu_free(b, first);
  td_gpu_free(b, second);
}

static void mma_peak_once(td_gpu_bench *b, const void *args, uint32_t call) {
  (void)call;
  const td_cuda_stream *stream = (td_cuda_stream *)b->stream;
  const int code = td_cuda_dev_of(stream)->abi->mma_peak(args, stream->cu);
  td_err err;
  td_gpu_must(td_cuda_result(td_cuda_dev_of(stream), code, "mma_peak", &err), &err);
}

// The peak of a GPU without wgmma, and of code for one.
static void bench_mma_peak(td_gpu_bench *b) {
  enum { BLOCKS_OF_SM = 2, ROUNDS = 20000 };
  const td_cuda_dev *dev = (td_cuda_dev *)b->dev;
  td_cu_mma_peak_args args = {.n_rounds = fewer(b, ROUNDS, 1)};
  args.n_blocks = fewer(b, BLOCKS_OF_SM * (uint32_t)dev->props.n_sms, 1);
  const double n_warps = (double)args.n_blocks * TD_CU_PEAK_WARPS;
  const double flops = n_warps * TD_CU_PEAK_MMAS * TD_CU_PEAK_FLOPS * args.n_rounds;
  args.out = td_gpu_alloc(b, args.n_blocks * (size_t)TD_CU_PEAK_WARPS * 32 * sizeof *args.out);
  b->mma_tflops = flops / td_gpu_measure(b, mma_peak_once, &args, 1) * 1e-12;
  td_jw_double(b->json, "mma_sync_peak_tflops", b->mma_tflops);
  td_jw_bool(b->json, "has_wgmma", dev->props.has_wgmma);
  td_gpu_free(b, args.out);
}

// Peak: an 8192 x 8192 matrix times 8192 tokens.
static void bench_peak(td_gpu_bench *b) {
  const uint32_t n = shrunk(b, 8192);
  td_weight w = td_gpu_weight(b, &td_gpu_bf16, n, n);
  void *x = td_gpu_noise(b, (size_t)n * n * 2), *y = td_gpu_alloc(b, (size_t)n * n * 2);
  linear_args args = {.w = &w, .n_matrices = 1, .n_tokens = n, .x = x, .y = y};
  b->peak_tflops = 2.0 * n * n * n / td_gpu_measure(b, linear_once, &args, 1) * 1e-12;
  bool has_blas = ((td_cuda_stream *)b->stream)->blas != NULL;
  td_jw_double(b->json, "bf16_peak_tflops", b->peak_tflops);
  td_jw_str(b->json, "bf16_peak_by", has_blas ? "cuBLAS" : "tandem: cuBLAS is not installed");
  td_gpu_free(b, x);
  td_gpu_free(b, y);
  td_gpu_forget_weights(b);
  bench_mma_peak(b);
}

// ---- matrices ---------------------------------------------------------------------------------

typedef struct {
  const char *model;
  const td_gpu_format *format;
  uint32_t rows, cols;
  bool out_f32;
} linear_case;

static const linear_case linear_cases[] = {
    {"v3", &td_gpu_fp8, 1536, 7168, false},              // q_a
    {"v3", &td_gpu_fp8, 24576, 1536, false},             // q_b
    {"v3", &td_gpu_fp8, 576, 7168, false},               // kv_a
    {"v3", &td_gpu_fp8, 7168, 16384, false},             // o
    {"v3", &td_gpu_fp8, 2048, 7168, false},              // shared expert: gate, up
    {"v3", &td_gpu_bf16, 2048, 7168, false},             //
    {"v3", &td_gpu_int4_g32, 2048, 7168, false},         //
    {"v3", &td_gpu_mxfp4, 2048, 7168, false},            //
    {"v3", &td_gpu_fp8, 7168, 2048, false},              // shared expert: down
    {"v3", &td_gpu_bf16, 256, 7168, true},               // router
    {"v3", &td_gpu_bf16, 129280, 7168, true},            // head
    {"qwen3-30b", &td_gpu_bf16, 4096, 2048, false},      // q
    {"qwen3-30b", &td_gpu_fp8, 4096, 2048, false},       //
    {"qwen3-30b", &td_gpu_int4_g128, 4096, 2048, false}, //
    {"qwen3-30b", &td_gpu_bf16, 512, 2048, false},       // k, v
    {"qwen3-30b", &td_gpu_bf16, 2048, 4096, false},      // o
    {"qwen3-30b", &td_gpu_bf16, 151936, 2048, true},
    {"moonlight", &td_gpu_bf16, 3072, 2048, false},       // q
    {"moonlight", &td_gpu_bf16, 576, 2048, false},        // kv_a
    {"moonlight", &td_gpu_bf16, 2048, 2048, false},       // o
    {"moonlight", &td_gpu_bf16, 11264, 2048, false},      // dense MLP: gate, up
    {"moonlight", &td_gpu_fp8, 11264, 2048, false},       //
    {"moonlight", &td_gpu_int4_g32, 11264, 2048, false},  //
    {"moonlight", &td_gpu_int4_g128, 11264, 2048, false}, //
    {"moonlight", &td_gpu_bf16, 163840, 2048, true},
};

static void bench_linear(td_gpu_bench *b, const linear_case *c) {
  static const uint32_t tokens[] = {1, 8, 16, 64, 512, 4096};
  if (!td_gpu_wants(b, "linear", c->model, c->format->name)) return;
  const uint32_t rows = shrunk(b, c->rows), cols = shrunk(b, c->cols);
  td_weight w[MAX_MATRICES];
  w[0] = td_gpu_weight(b, c->format, rows, cols);
  size_t n = b->shrink > 1 ? 2 : ROTATING_BYTES / td_weight_bytes(&w[0]);
  n = n < 1 ? 1 : n > MAX_MATRICES ? MAX_MATRICES : n;
  for (size_t i = 1; i < n; i++)
    w[i] = td_gpu_weight(b, c->format, rows, cols);
  bool is_head = c->rows > 100000; // only a few rows of a step need logits
  uint32_t most = fewer(b, is_head ? 64 : 4096, 1), out_bytes = c->out_f32 ? 4 : 2;
  linear_args args = {.w = w, .n_matrices = (uint32_t)n, .out_f32 = c->out_f32};
  void *x = td_gpu_noise(b, (size_t)most * cols * 2);
  args.x = x;
  args.y = td_gpu_alloc(b, (size_t)most * rows * out_bytes);
  for (size_t i = 0; i < TD_COUNT(tokens) && tokens[i] <= most; i++) {
    args.n_tokens = tokens[i];
    double seconds = td_gpu_measure(b, linear_once, &args, (uint32_t)n);
    double activations = tokens[i] * ((double)out_bytes * rows + 2.0 * cols);
    td_gpu_record(b,
                  &(td_gpu_case){.op = "linear",
                                 .model = c->model,
                                 .format = c->format->name,
                                 .rows = rows,
                                 .cols = cols,
                                 .tokens = tokens[i],
                                 .bytes = (double)td_weight_bytes(&w[0]) + activations,
                                 .flops = 2.0 * rows * cols * tokens[i]},
                  seconds);
  }
  td_gpu_free(b, x);
  td_gpu_free(b, args.y);
  td_gpu_forget_weights(b);
}

// ---- one case per operator ----------------------------------------------------------------------

#define ONCE(name)                                                                                 \
  static void name##_once(td_gpu_bench *b, const void *args, uint32_t call) {                      \
    (void)call;                                                                                    \
    td_op_##name(b->stream, args);                                                                 \
  }
ONCE(embed)
ONCE(rmsnorm)
ONCE(rope)
ONCE(kv_store_gqa)
ONCE(kv_store_mla)
ONCE(router)
ONCE(top_logits)

static void add_once(td_gpu_bench *b, const void *args, uint32_t call) {
  const td_gpu_copy *a = args;
  (void)call;
  td_op_add(b->stream, a->dst, a->src, a->n_bytes / sizeof(uint16_t));
}

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

// ---- models ------------------------------------------------------------------------------------

typedef struct {
  const char *name;
  uint32_t dim, n_vocab, n_heads, n_kv_heads, head_dim; // n_kv_heads 0: MLA
  uint32_t n_experts, top_k, hidden, n_groups, topk_groups;
  td_router_kind router;
  const td_gpu_format *format; // format of the experts
} model_shape;

static const model_shape models[] = {
    {"v3", 7168, 129280, 128, 0, 0, 256, 8, 2048, 8, 4, TD_ROUTER_SIGMOID, &td_gpu_fp8},
    {"qwen3-30b", 2048, 151936, 32, 4, 128, 128, 8, 768, 0, 0, TD_ROUTER_SOFTMAX, &td_gpu_bf16},
    {"moonlight", 2048, 163840, 16, 0, 0, 64, 6, 1408, 1, 1, TD_ROUTER_SIGMOID, &td_gpu_bf16},
};

enum { NOPE = 128, ROPE = 64, V_DIM = 128, RANK = 512 }; // MLA dimensions

static model_shape model_of(const td_gpu_bench *b, size_t i) {
  model_shape m = models[i];
  m.dim = shrunk(b, m.dim);
  m.hidden = shrunk(b, m.hidden);
  m.n_vocab = shrunk(b, m.n_vocab);
  m.n_heads = fewer(b, m.n_heads, 8);
  m.n_kv_heads = fewer(b, m.n_kv_heads, 1);
  m.n_experts = fewer(b, m.n_experts, 16);
  return m;
}

// Calls rotate through the experts.
static void moe_once(td_gpu_bench *b, const void *args, uint32_t call) {
  td_moe_args a = *(const td_moe_args *)args;
  a.ids += (size_t)call * a.n_tokens * a.top_k % a.n_experts;
  td_op_moe(b->stream, &a);
}

// Tokens also rotate through the experts, so that n tokens use min(n * top_k, experts) of them. If
// a model has too many experts, 64 represent them.
static void bench_moe(td_gpu_bench *b, const model_shape *m, const td_gpu_format *format) {
  enum { MAX_EXPERTS = 128, MAX_K = 8, TOKENS = 4096 };
  static const uint32_t tokens[] = {1, 8, 64, 512, TOKENS};
  static td_weight w[3][MAX_EXPERTS];
  static int32_t ids[TOKENS * MAX_K + MAX_EXPERTS];
  static float weights[TOKENS * MAX_K];
  if (!td_gpu_wants(b, "experts", m->name, format->name)) return;
  uint32_t n_experts = m->n_experts <= MAX_EXPERTS ? m->n_experts : 64;
  for (uint32_t e = 0; e < n_experts; e++) {
    w[0][e] = td_gpu_weight(b, format, m->hidden, m->dim);
    w[1][e] = td_gpu_weight(b, format, m->hidden, m->dim);
    w[2][e] = td_gpu_weight(b, format, m->dim, m->hidden);
  }
  for (uint32_t i = 0; i < TD_COUNT(ids); i++)
    ids[i] = (int32_t)(i % n_experts);
  for (uint32_t i = 0; i < TD_COUNT(weights); i++)
    weights[i] = 0.125f;
  void *x = td_gpu_noise(b, (size_t)TOKENS * m->dim * 2),
       *out = td_gpu_alloc(b, (size_t)TOKENS * m->dim * 2);
  void *dev_ids = td_gpu_alloc(b, sizeof ids), *dev_weights = td_gpu_alloc(b, sizeof weights);
  if (b->dev) td_op_copy(b->stream, dev_ids, ids, sizeof ids);
  if (b->dev) td_op_copy(b->stream, dev_weights, weights, sizeof weights);
  td_moe_args args = {.gate = w[0],
                      .up = w[1],
                      .down = w[2],
                      .x = x,
                      .ids = dev_ids,
                      .weights = dev_weights,
                      .out = out,
                      .n_experts = n_experts,
                      .top_k = m->top_k};
  for (size_t i = 0; i < TD_COUNT(tokens) && tokens[i] <= fewer(b, TOKENS, 1); i++) {
    args.n_tokens = tokens[i];
    uint32_t pairs = tokens[i] * m->top_k, used = pairs < n_experts ? pairs : n_experts;
    double seconds = td_gpu_measure(b, moe_once, &args, n_experts / used);
    td_gpu_record(b,
                  &(td_gpu_case){.op = "experts",
                                 .model = m->name,
                                 .format = format->name,
                                 .rows = m->hidden,
                                 .cols = m->dim,
                                 .tokens = tokens[i],
                                 .bytes = used * 3.0 * (double)td_weight_bytes(&w[0][0]),
                                 .flops = 6.0 * m->dim * m->hidden * pairs},
                  seconds);
  }
  void *const memory[] = {x, out, dev_ids, dev_weights};
  for (size_t i = 0; i < TD_COUNT(memory); i++)
    td_gpu_free(b, memory[i]);
  td_gpu_forget_weights(b);
}

// ---- attention --------------------------------------------------------------------------------

static int32_t *put_ints(td_gpu_bench *b, const int32_t *host, size_t n) {
  int32_t *out = td_gpu_alloc(b, n * sizeof *out);
  if (!b->dev) return out;
  td_op_copy(b->stream, out, host, n * sizeof *out);
  td_gpu_sync(b);
  return out;
}

static int32_t *kept(const int32_t *host, size_t n) {
  int32_t *copy = malloc(n * sizeof *copy);
  TD_CHECK(copy);
  return memcpy(copy, host, n * sizeof *copy);
}

// n_seqs sequences with n_keys positions each, of which the last n_tokens are computed.
static td_batch_view make_batch(td_gpu_bench *b, uint32_t n_seqs, uint32_t n_tokens,
                                uint32_t n_keys) {
  uint32_t n_pages = (n_keys + PAGE_TOKENS - 1) / PAGE_TOKENS, n = n_seqs * n_tokens;
  td_batch_view batch = {.n_tokens = n,
                         .n_seqs = n_seqs,
                         .max_pages = n_pages,
                         .page_tokens = PAGE_TOKENS,
                         .max_keys = n_keys};
  int32_t *host = malloc((n + n_seqs * n_pages + 1) * sizeof *host);
  TD_CHECK(host);
  for (uint32_t i = 0; i <= n_seqs; i++)
    host[i] = (int32_t)(i * n_tokens);
  batch.q_begin = put_ints(b, host, n_seqs + 1);
  batch.host_q_begin = kept(host, n_seqs + 1);
  for (uint32_t i = 0; i < n; i++)
    host[i] = (int32_t)(i / n_tokens);
  batch.seq = put_ints(b, host, n);
  for (uint32_t i = 0; i < n; i++)
    host[i] = (int32_t)(n_keys - n_tokens + i % n_tokens);
  batch.position = put_ints(b, host, n);
  batch.host_position = kept(host, n);
  for (uint32_t i = 0; i < n_seqs * n_pages; i++)
    host[i] = (int32_t)i;
  batch.page_table = put_ints(b, host, (size_t)n_seqs * n_pages);
  free(host);
  return batch;
}

static void free_batch(td_gpu_bench *b, const td_batch_view *batch) {
  const int32_t *const memory[] = {batch->q_begin, batch->seq, batch->position, batch->page_table};
  for (size_t i = 0; i < TD_COUNT(memory); i++)
    td_gpu_free(b, (void *)memory[i]);
  free((void *)batch->host_q_begin);
  free((void *)batch->host_position);
}

// Number of (query, visible key) pairs in one sequence.
static double n_pairs(uint32_t n_tokens, uint32_t n_keys) {
  return n_tokens * ((double)n_keys - (n_tokens - 1) / 2.0);
}

enum { MAX_CACHES = 128, MAX_KV_B = 16 };

typedef struct {
  uint32_t seqs, tokens, keys;
} attn_shape;

static const attn_shape attn_shapes[] = {{1, 1, 1024},    {1, 1, 8192},    {1, 1, 32768},
                                         {16, 1, 8192},   {1, 512, 512},   {1, 512, 8192},
                                         {1, 8192, 8192}, {1, 2048, 32768}};

// KV caches that calls rotate through. In a real decode step the weights evict the KV cache from
// L2, so it must not be found there. For prefill one cache suffices, since reading it is a small
// part of the work.
typedef struct {
  size_t n_bytes; // size of one
  uint32_t n;
} caches;

static caches caches_of(const attn_shape *s, size_t n_bytes) {
  size_t n = s->tokens == 1 ? ROTATING_BYTES / 2 / n_bytes : 1;
  return (caches){n_bytes, n < 1 ? 1 : n > MAX_CACHES ? MAX_CACHES : (uint32_t)n};
}

static void *cache_of(const caches *c, const td_kv_view *first, uint32_t call) {
  return (char *)first->pages + call % c->n * c->n_bytes;
}

typedef struct {
  td_attn_gqa_args args;
  caches caches;
} gqa_calls;

static void attn_gqa_once(td_gpu_bench *b, const void *args, uint32_t call) {
  const gqa_calls *c = args;
  td_attn_gqa_args a = c->args;
  a.kv.pages = cache_of(&c->caches, &a.kv, call);
  td_op_attn_gqa(b->stream, &a);
}

static void bench_gqa(td_gpu_bench *b, const model_shape *m, const attn_shape *s) {
  const char *op = s->tokens == 1 ? "decode" : "prefill";
  if (!td_gpu_wants(b, op, m->name, "")) return;
  uint32_t n = s->seqs * s->tokens;
  size_t page_bytes = (size_t)PAGE_TOKENS * m->n_kv_heads * m->head_dim * 2 * 2;
  td_batch_view batch = make_batch(b, s->seqs, s->tokens, s->keys);
  gqa_calls calls = {.caches = caches_of(s, s->seqs * batch.max_pages * page_bytes)};
  void *pages = td_gpu_noise(b, calls.caches.n * calls.caches.n_bytes);
  void *q = td_gpu_noise(b, (size_t)n * m->n_heads * m->head_dim * 2);
  void *out = td_gpu_alloc(b, (size_t)n * m->n_heads * m->head_dim * 2);
  calls.args = (td_attn_gqa_args){.batch = batch,
                                  .kv = {pages, page_bytes, TD_BF16},
                                  .q = q,
                                  .out = out,
                                  .n_heads = m->n_heads,
                                  .n_kv_heads = m->n_kv_heads,
                                  .head_dim = m->head_dim,
                                  .scale = 0.1f,
                                  .prompt = s->tokens > 1};
  double seconds = td_gpu_measure(b, attn_gqa_once, &calls, calls.caches.n);
  double pairs = s->seqs * n_pairs(s->tokens, s->keys);
  td_gpu_record(b,
                &(td_gpu_case){.op = op,
                               .model = m->name,
                               .tokens = n,
                               .seqs = s->seqs,
                               .keys = s->keys,
                               .bytes = 4.0 * m->n_kv_heads * m->head_dim * s->keys * s->seqs,
                               .flops = 4.0 * m->n_heads * m->head_dim * pairs},
                seconds);
  td_gpu_free(b, pages);
  td_gpu_free(b, q);
  td_gpu_free(b, out);
  free_batch(b, &batch);
}

typedef struct {
  td_attn_mla_args args;
  const td_weight *kv_b; // MAX_KV_B of them
  caches caches;
} mla_calls;

static void attn_mla_once(td_gpu_bench *b, const void *args, uint32_t call) {
  const mla_calls *c = args;
  td_attn_mla_args a = c->args;
  a.kv.pages = cache_of(&c->caches, &a.kv, call);
  a.kv_b = &c->kv_b[call % MAX_KV_B];
  td_op_attn_mla(b->stream, &a);
}

static void bench_mla(td_gpu_bench *b, const model_shape *m, const td_weight *kv_b,
                      const attn_shape *s) {
  const char *op = s->tokens == 1 ? "mla_decode" : "mla_prefill";
  if (!td_gpu_wants(b, op, m->name, "")) return;
  uint32_t n = s->seqs * s->tokens;
  size_t page_bytes = (size_t)PAGE_TOKENS * (RANK + ROPE) * 2;
  td_batch_view batch = make_batch(b, s->seqs, s->tokens, s->keys);
  mla_calls calls = {.kv_b = kv_b, .caches = caches_of(s, s->seqs * batch.max_pages * page_bytes)};
  void *pages = td_gpu_noise(b, calls.caches.n * calls.caches.n_bytes);
  void *q = td_gpu_noise(b, (size_t)n * m->n_heads * (NOPE + ROPE) * 2);
  void *out = td_gpu_alloc(b, (size_t)n * m->n_heads * V_DIM * 2);
  calls.args = (td_attn_mla_args){.batch = batch,
                                  .kv = {pages, page_bytes, TD_BF16},
                                  .q = q,
                                  .out = out,
                                  .n_heads = m->n_heads,
                                  .nope_dim = NOPE,
                                  .rope_dim = ROPE,
                                  .v_dim = V_DIM,
                                  .kv_lora_rank = RANK,
                                  .scale = 0.1f,
                                  .absorbed = s->tokens == 1};
  uint32_t n_turns = calls.caches.n > MAX_KV_B ? calls.caches.n : MAX_KV_B;
  double seconds = td_gpu_measure(b, attn_mla_once, &calls, s->tokens == 1 ? n_turns : 1);
  double width = s->tokens == 1 ? 2 * RANK + ROPE : NOPE + ROPE + V_DIM;
  td_gpu_record(
      b,
      &(td_gpu_case){.op = op,
                     .model = m->name,
                     .tokens = n,
                     .seqs = s->seqs,
                     .keys = s->keys,
                     .bytes = 2.0 * (RANK + ROPE) * s->keys * s->seqs +
                              (double)td_weight_bytes(kv_b),
                     .flops = 2.0 * m->n_heads * width * s->seqs * n_pairs(s->tokens, s->keys)},
      seconds);
  td_gpu_free(b, pages);
  td_gpu_free(b, q);
  td_gpu_free(b, out);
  free_batch(b, &batch);
}

// A prefill case keeps at least two tokens, which distinguishes it from decode.
static attn_shape attn_shape_of(const td_gpu_bench *b, size_t i) {
  attn_shape s = attn_shapes[i];
  s.seqs = fewer(b, s.seqs, 2);
  s.tokens = fewer(b, s.tokens, 2);
  s.keys = fewer(b, s.keys, 2);
  return s;
}

static void bench_attention(td_gpu_bench *b, const model_shape *m) {
  td_weight kv_b[MAX_KV_B];
  for (size_t i = 0; i < MAX_KV_B && !m->n_kv_heads; i++)
    kv_b[i] = td_gpu_weight(b, m->format, m->n_heads * (NOPE + V_DIM), RANK);
  for (size_t i = 0; i < TD_COUNT(attn_shapes); i++) {
    const attn_shape s = attn_shape_of(b, i);
    if (m->n_kv_heads) {
      bench_gqa(b, m, &s);
    } else {
      bench_mla(b, m, kv_b, &s);
    }
  }
  td_gpu_forget_weights(b);
}

// ---- small operators ----------------------------------------------------------------------------

// Device memory shared by the small operators: rows of activations, and zeros for all other inputs.
typedef struct {
  void *x, *y, *zeros;
  uint32_t n;
} rows_memory;

static void run_small(td_gpu_bench *b, const model_shape *m, const char *op, td_gpu_call fn,
                      const void *args, uint32_t n, double bytes) {
  if (!td_gpu_wants(b, op, m->name, "")) return;
  double seconds = td_gpu_measure(b, fn, args, 1);
  td_gpu_record(b, &(td_gpu_case){.op = op, .model = m->name, .tokens = n, .bytes = bytes},
                seconds);
}

static void bench_rows(td_gpu_bench *b, const model_shape *m, const rows_memory *r,
                       const td_weight *table) {
  uint32_t n = r->n, dim = m->dim;
  double row_bytes = 2.0 * dim * n;
  float *w = td_gpu_weight_memory(b, dim * sizeof *w);
  for (uint32_t i = 0; i < dim; i++)
    w[i] = 1;
  td_embed_args embed = {.table = table, .ids = r->zeros, .out = r->x, .n_tokens = n};
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
  run_small(b, m, "add", add_once, &add, n, 3 * row_bytes);
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

static void bench_positions(td_gpu_bench *b, const model_shape *m, const rows_memory *r) {
  uint32_t n = r->n, rot = m->n_kv_heads ? m->head_dim : ROPE;
  uint32_t head = m->n_kv_heads ? m->head_dim : NOPE + ROPE;
  td_rope_args rope = {.x = r->x,
                       .cos_sin = r->zeros,
                       .position = r->zeros,
                       .token_stride = (size_t)m->n_heads * head,
                       .head_stride = head,
                       .n_tokens = n,
                       .n_heads = m->n_heads,
                       .rot_dim = rot,
                       .interleaved = !m->n_kv_heads};
  run_small(b, m, "rope", rope_once, &rope, n, 4.0 * n * m->n_heads * rot);
  td_batch_view batch = make_batch(b, 1, n, n);
  uint32_t width = m->n_kv_heads ? 2 * m->n_kv_heads * m->head_dim : RANK + ROPE;
  size_t page_bytes = (size_t)PAGE_TOKENS * width * 2;
  td_kv_view kv = {td_gpu_alloc(b, batch.max_pages * page_bytes), page_bytes, TD_BF16};
  if (m->n_kv_heads) {
    td_kv_store_gqa_args store = {.batch = batch,
                                  .kv = kv,
                                  .k = r->x,
                                  .v = r->y,
                                  .k_stride = width / 2,
                                  .v_stride = width / 2,
                                  .n_kv_heads = m->n_kv_heads,
                                  .head_dim = m->head_dim};
    run_small(b, m, "kv_store", kv_store_gqa_once, &store, n, 4.0 * n * width);
  } else {
    td_kv_store_mla_args store = {.batch = batch, .kv = kv, .entry = r->x, .entry_dim = width};
    run_small(b, m, "kv_store", kv_store_mla_once, &store, n, 4.0 * n * width);
  }
  td_gpu_free(b, kv.pages);
  free_batch(b, &batch);
}

static void bench_ranking(td_gpu_bench *b, const model_shape *m, const rows_memory *r) {
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

static void bench_small(td_gpu_bench *b, const model_shape *m) {
  static const uint32_t tokens[] = {1, 512};
  enum { MOST = 512, MOST_WIDTH = 24576, ZEROS = 16 << 20 }; // zeros: enough for 16 rows of logits
  td_weight table = td_gpu_weight(b, &td_gpu_bf16, 4096,
                                  m->dim); // one row of the vocabulary is read
  rows_memory r = {.x = td_gpu_alloc(b, (size_t)MOST * MOST_WIDTH * 2),
                   .y = td_gpu_alloc(b, (size_t)MOST * MOST_WIDTH * 2),
                   .zeros = td_gpu_alloc(b, ZEROS)};
  for (size_t i = 0; i < TD_COUNT(tokens); i++) {
    r.n = fewer(b, tokens[i], 8);
    bench_rows(b, m, &r, &table);
    bench_positions(b, m, &r);
  }
  bench_ranking(b, m, &r);
  td_gpu_free(b, r.x);
  td_gpu_free(b, r.y);
  td_gpu_free(b, r.zeros);
  td_gpu_forget_weights(b);
}

// ---- all cases --------------------------------------------------------------------------------

static td_machine measure_machine(void) {
  td_err err;
  td_machine machine = td_machine_get();
  td_read_speed speed;
  td_gpu_must(td_read_speed_open(&speed, 0, &err), &err);
  machine.n_threads = td_pool_size(speed.pool);
  machine.read_gbps = td_read_speed_gbps(&speed);
  td_read_speed_close(&speed);
  return machine;
}

static void write_head(td_gpu_bench *b, char **pairs) {
  td_machine machine = b->shrink == 1 ? measure_machine() : td_machine_get();
  td_jw_begin_object(b->json, NULL);
  td_jw_str(b->json, "device", td_dev_name(b->dev));
  td_jw_str(b->json, "tandem", TD_VERSION);
  b->read_gbps = machine.read_gbps;
  if (b->shrink > 1) td_jw_int(b->json, "shrunk_by", b->shrink);
  td_machine_json(&machine, b->json, "machine");
  for (; *pairs; pairs++) {
    char *equals = strchr(*pairs, '=');
    *equals = '\0';
    td_jw_str(b->json, *pairs, equals + 1);
  }
}

static void write_limits(td_gpu_bench *b) {
  bench_copies(b);
  bench_peak(b);
  td_jw_end_object(b->json);
  td_gpu_write(b);
}

static void run_cases(td_gpu_bench *b) {
  for (size_t i = 0; i < TD_COUNT(linear_cases); i++)
    bench_linear(b, &linear_cases[i]);
  for (size_t i = 0; i < TD_COUNT(models); i++) {
    const model_shape m = model_of(b, i);
    bench_small(b, &m);
    bench_attention(b, &m);
    bench_moe(b, &m, m.format);
    bench_moe(b, &m, &td_gpu_int4_g32);
  }
  td_gpu_delta_cases(b);
}

// Without cuBLAS the peak and prefill results would be misleading, so it is required by default.
static void need_blas(td_gpu_bench *b) {
  td_weight w = td_gpu_weight(b, &td_gpu_bf16, 4096, 128);
  const td_cuda_matmul m = {.w = &w, .n_tokens = 4096, .x_stride = 128, .y_stride = 4096};
  if (!td_cuda_takes_blas((td_cuda_stream *)b->stream, &m)) {
    fprintf(stderr, "bench_gpu: cuBLAS cannot be used: install it (package libcublas, or PyTorch's "
                    "nvidia-cublas) and name its folder in LD_LIBRARY_PATH, or say "
                    "--without-cublas\n");
    exit(1);
  }
  td_gpu_forget_weights(b);
}

// ---- the command line ---------------------------------------------------------------------------

typedef struct {
  const char *name;
  void (*run)(td_gpu_bench *b);
  void (*run_steps)(td_gpu_steps *s); // for paths that run a model
} path;

static const path paths[] = {
    {.name = "copies", .run = td_gpu_path_copies},
    {.name = "register", .run = td_gpu_path_register},
    {.name = "signals", .run = td_gpu_path_signals},
    {.name = "stream", .run_steps = td_gpu_path_stream},
    {.name = "decode", .run_steps = td_gpu_path_decode},
    {.name = "cache", .run_steps = td_gpu_path_cache},
    {.name = "interference", .run_steps = td_gpu_path_interference},
};

static const path *path_named(const char *name) {
  for (size_t i = 0; i < TD_COUNT(paths); i++) {
    if (strcmp(paths[i].name, name) == 0) return &paths[i];
  }
  return NULL;
}

typedef struct {
  const char *only;
  const path *path; // NULL: benchmark operators
  uint32_t shrink;
  td_gpu_steps_opts steps;
  bool is_list, can_lack_blas;
  char **pairs; // the KEY=VALUE arguments, NULL-terminated
} options;

static const char usage[] = "usage: bench_gpu [--only TEXT] [--list] [--shrink N] [--path NAME"
                            " [--device cpu] [--layers N] [--threads N]]"
                            " [--without-cublas] [KEY=VALUE]...\n";

static bool parse(options *o, char **argv) {
  *o = (options){.shrink = 1, .steps = {.device = "cuda"}};
  for (argv++; *argv && strncmp(*argv, "--", 2) == 0; argv++) {
    if (strcmp(*argv, "--list") == 0) {
      o->is_list = true;
    } else if (strcmp(*argv, "--without-cublas") == 0) {
      o->can_lack_blas = true;
    } else if (strcmp(*argv, "--only") == 0 && argv[1]) {
      o->only = *++argv;
    } else if (strcmp(*argv, "--path") == 0 && argv[1]) {
      o->path = path_named(*++argv);
      if (!o->path) return false;
    } else if (strcmp(*argv, "--device") == 0 && argv[1]) {
      o->steps.device = *++argv;
    } else if (strcmp(*argv, "--layers") == 0 && argv[1]) {
      o->steps.n_layers = (uint32_t)strtoul(*++argv, NULL, 10);
    } else if (strcmp(*argv, "--threads") == 0 && argv[1]) {
      o->steps.n_threads = (unsigned)strtoul(*++argv, NULL, 10);
    } else if (strcmp(*argv, "--shrink") == 0 && argv[1]) {
      o->shrink = (uint32_t)strtoul(*++argv, NULL, 10);
    } else {
      return false;
    }
  }
  o->pairs = argv;
  for (; *argv; argv++) {
    if (!strchr(*argv, '=')) return false;
  }
  const bool is_cuda = strcmp(o->steps.device, "cuda") == 0;
  return o->shrink > 0 && (is_cuda || (o->path && o->path->run_steps));
}

static void run_path(td_gpu_bench *b, const options *o, td_gpu_steps *s) {
  write_head(b, o->pairs);
  if (s) td_gpu_steps_head(s);
  b->pinned_gbps = td_gpu_pinned_gbps(b);
  td_jw_double(b->json, "pinned_gbps", b->pinned_gbps);
  td_jw_end_object(b->json);
  td_gpu_write(b);
  if (s) {
    o->path->run_steps(s);
  } else {
    o->path->run(b);
  }
}

static void run_on_device(td_gpu_bench *b, const options *o) {
  td_err err;
  td_gpu_must(td_dev_open(&b->dev, &(td_dev_opts){.kind = "cuda"}, &err), &err);
  td_gpu_must(td_stream_open(&b->stream, b->dev, &err), &err);
  if (!o->can_lack_blas) need_blas(b);
  if (o->path) {
    run_path(b, o, NULL);
  } else {
    write_head(b, o->pairs);
    write_limits(b);
    run_cases(b);
  }
  td_stream_close(b->stream);
  td_dev_close(b->dev);
}

static void run_model(td_gpu_bench *b, const options *o) {
  td_gpu_steps s;
  td_gpu_steps_open(&s, b, &o->steps);
  if (!o->can_lack_blas && strcmp(o->steps.device, "cuda") == 0) need_blas(b);
  run_path(b, o, &s);
  td_gpu_steps_close(&s);
}

int main(int argc, char **argv) {
  (void)argc;
  options o;
  if (!parse(&o, argv)) {
    fputs(usage, stderr);
    return 2;
  }
  td_buf text = TD_BUF_INIT;
  td_json_writer json = TD_JSON_WRITER(&text);
  td_gpu_bench b = {.json = &json, .only = o.only, .shrink = o.shrink};
  if (o.is_list) {
    run_cases(&b);
    fprintf(stderr, "%u cases\n", b.n_cases);
  } else if (o.path && o.path->run_steps) {
    run_model(&b, &o);
  } else {
    run_on_device(&b, &o);
  }
  td_buf_free(&text);
  return 0;
}
