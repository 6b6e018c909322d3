// src/bench/gpu/linear.c - the GPU's limits (copies, the peak of matrix products), and matrices at
// the shapes of real models.
#include <stdlib.h>
#include <string.h>

#include "bench/gpu/paths.h"

enum { MAX_MATRICES = 64, HOST_PAGE_BYTES = 4096 };

// ---- the machine's limits -----------------------------------------------------------------------

typedef struct {
  const td_weight *w;
  uint32_t n_matrices, n_tokens;
  const void *x;
  void *y;
  bool out_f32, is_prompt; // is_prompt: x may be rounded
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
                                               .n_prompt = a->is_prompt ? a->n_tokens : 0,
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
  td_dev_pin(b->dev, host, n, false); // stays pinned until the end
  td_dev_wait_pinned(b->dev, host, n);
  if (td_cuda_pinned_bytes((td_cuda_dev *)b->dev) == n) {
    td_jw_double(b->json, "pinned_host_to_device_gbps",
                 gb / td_gpu_measure_copy(b, td_gpu_copy_once, &up));
  }
  b->copy_gbps = 2 * gb / td_gpu_measure_copy(b, td_gpu_copy_once, &within);
  td_jw_double(b->json, "device_gbps", b->copy_gbps);
  td_gpu_release(b, NULL);
}

static void mma_peak_once(td_gpu_bench *b, const void *args, uint32_t call) {
  (void)call;
  const td_cuda_stream *stream = (td_cuda_stream *)b->stream;
  const int code = td_cuda_dev_of(stream)->abi->mma_peak(args, stream->cu);
  td_err err;
  td_gpu_must(td_cuda_result(td_cuda_dev_of(stream), code, "mma_peak", &err), &err);
}

// In 8 bits; what is measured last counts.
static void bench_a8_peak(td_gpu_bench *b, td_cu_mma_peak_args *args, const char *key,
                          td_dtype dtype, double flops) {
  args->dtype = dtype;
  const double tflops = flops / td_gpu_measure(b, mma_peak_once, args, 1) * 1e-12;
  b->a8_tflops[dtype == TD_I8 ? TD_ACTIVATIONS_INT8 : TD_ACTIVATIONS_FP8] = tflops;
  td_jw_double(b->json, key, tflops);
}

// The peak of a GPU without wgmma, and of code for one; and of wgmma, where there is one.
static void bench_mma_peak(td_gpu_bench *b) {
  enum { BLOCKS_OF_SM = 2, ROUNDS = 20000 };
  const td_cuda_dev *dev = (td_cuda_dev *)b->dev;
  td_cu_mma_peak_args args = {.dtype = TD_BF16, .n_rounds = td_gpu_fewer(b, ROUNDS, 1)};
  args.n_blocks = td_gpu_fewer(b, BLOCKS_OF_SM * (uint32_t)dev->props.n_sms, 1);
  const double n_warps = (double)args.n_blocks * TD_CU_PEAK_WARPS;
  const double flops = n_warps * TD_CU_PEAK_MMAS * TD_CU_PEAK_FLOPS * args.n_rounds;
  args.out = td_gpu_alloc(b, args.n_blocks * (size_t)TD_CU_PEAK_WARPS * 32 * sizeof *args.out);
  b->mma_tflops = flops / td_gpu_measure(b, mma_peak_once, &args, 1) * 1e-12;
  td_jw_double(b->json, "mma_sync_peak_tflops", b->mma_tflops);
  args.dtype = TD_F16;
  td_jw_double(b->json, "mma_sync_f16_peak_tflops",
               flops * 1e-12 / td_gpu_measure(b, mma_peak_once, &args, 1));
  if (dev->props.has_f8) bench_a8_peak(b, &args, "mma_sync_fp8_peak_tflops", TD_F8E4M3, 2 * flops);
  bench_a8_peak(b, &args, "mma_sync_int8_peak_tops", TD_I8, 2 * flops);
  td_jw_bool(b->json, "has_wgmma", dev->props.has_wgmma);
  if (dev->props.has_wgmma) {
    args.dtype = TD_BF16;
    args.is_wgmma = true;
    args.n_rounds = td_gpu_fewer(b, ROUNDS / TD_CU_PEAK_WGMMA, 1);
    const double wgmma_flops = n_warps * TD_CU_PEAK_MMAS * TD_CU_PEAK_FLOPS * TD_CU_PEAK_WGMMA *
                               args.n_rounds;
    td_jw_double(b->json, "wgmma_peak_tflops",
                 wgmma_flops * 1e-12 / td_gpu_measure(b, mma_peak_once, &args, 1));
    bench_a8_peak(b, &args, "wgmma_fp8_peak_tflops", TD_F8E4M3, 2 * wgmma_flops);
    bench_a8_peak(b, &args, "wgmma_int8_peak_tops", TD_I8, 2 * wgmma_flops);
  }
  td_gpu_release(b, NULL);
}

// Peak: an 8192 x 8192 matrix times 8192 tokens.
static void bench_peak(td_gpu_bench *b) {
  const uint32_t n = td_gpu_shrunk(b, 8192);
  td_weight w = td_gpu_weight(b, &td_gpu_bf16, n, n);
  void *x = td_gpu_noise(b, (size_t)n * n * 2), *y = td_gpu_alloc(b, (size_t)n * n * 2);
  linear_args args = {.w = &w, .n_matrices = 1, .n_tokens = n, .x = x, .y = y};
  b->peak_tflops = 2.0 * n * n * n / td_gpu_measure(b, linear_once, &args, 1) * 1e-12;
  bool has_blas = ((td_cuda_stream *)b->stream)->blas != NULL;
  td_jw_double(b->json, "bf16_peak_tflops", b->peak_tflops);
  td_jw_str(b->json, "bf16_peak_by", has_blas ? "cuBLAS" : "tandem: cuBLAS is not installed");
  td_gpu_release(b, NULL);
  bench_mma_peak(b);
}

// ---- matrices ---------------------------------------------------------------------------------

typedef struct {
  const char *model;
  const td_format *format;
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
    {"v3", &td_gpu_int8, 2048, 7168, false},             //
    {"v3", &td_gpu_int4_g32, 2048, 7168, false},         //
    {"v3", &td_gpu_mxfp4, 2048, 7168, false},            //
    {"v3", &td_gpu_q4_k, 2048, 7168, false},             //
    {"v3", &td_gpu_q6_k, 2048, 7168, false},             //
    {"v3", &td_gpu_q8_0, 2048, 7168, false},             //
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

// With these tokens, once each. Kernels change between 8 and 256, which FP8 shows; others take a
// few.
static void bench_tokens(td_gpu_bench *b, const linear_case *c, linear_args *args, uint32_t most) {
  enum { ALL = 13 };
  static const uint32_t few[ALL] = {1, 8, 16, 17, 64, 128, 512, 4096, UINT32_MAX};
  static const uint32_t all[ALL] = {1, 8, 16, 17, 32, 64, 65, 96, 128, 192, 256, 512, 4096};
  const uint32_t *tokens = c->format == &td_gpu_fp8 ? all : few;
  const td_weight *w = &args->w[0];
  const double out_bytes = args->out_f32 ? 4 : 2;
  for (size_t i = 0; i < ALL && tokens[i] <= most; i++) {
    if (args->is_prompt && tokens[i] <= 16) continue; // as without
    args->n_tokens = tokens[i];
    const double seconds = td_gpu_measure(b, linear_once, args, args->n_matrices);
    const double activations = tokens[i] * (out_bytes * w->rows + 2.0 * w->cols);
    td_gpu_record(
        b,
        &(td_gpu_case){.op = args->is_prompt ? "linear_a8" : "linear",
                       .model = c->model,
                       .format = c->format->name,
                       .rows = w->rows,
                       .cols = w->cols,
                       .tokens = tokens[i],
                       .bytes = (double)td_weight_bytes(w) + activations,
                       .flops = 2.0 * w->rows * w->cols * tokens[i],
                       .a8 = args->is_prompt ? td_gpu_a8(b, c->format) : TD_ACTIVATIONS_AUTO},
        seconds);
  }
}

static void bench_linear(td_gpu_bench *b, const linear_case *c) {
  const td_activations a8 = td_gpu_a8(b, c->format);
  const bool is_a8 = a8 != TD_ACTIVATIONS_AUTO &&
                     td_gpu_wants(b, "linear_a8", c->model, c->format->name);
  const bool is_plain = td_gpu_wants(b, "linear", c->model, c->format->name);
  if (!is_plain && !is_a8) return;
  const uint32_t rows = td_gpu_shrunk(b, c->rows),
                 cols = td_gpu_whole_blocks(c->format, td_gpu_shrunk(b, c->cols));
  td_weight w[MAX_MATRICES];
  w[0] = td_gpu_weight(b, c->format, rows, cols);
  size_t n = b->shrink > 1 ? 2 : TD_GPU_ROTATING_BYTES / td_weight_bytes(&w[0]);
  n = n < 1 ? 1 : n > MAX_MATRICES ? MAX_MATRICES : n;
  for (size_t i = 1; i < n; i++)
    w[i] = td_gpu_weight(b, c->format, rows, cols);
  bool is_head = c->rows > 100000; // only a few rows of a step need logits
  const uint32_t most = td_gpu_fewer(b, is_head ? 64 : 4096, 1);
  linear_args args = {.w = w, .n_matrices = (uint32_t)n, .out_f32 = c->out_f32};
  args.x = td_gpu_noise(b, (size_t)most * cols * 2);
  args.y = td_gpu_alloc(b, (size_t)most * rows * (c->out_f32 ? 4 : 2));
  if (is_plain) bench_tokens(b, c, &args, most);
  args.is_prompt = true;
  td_gpu_round(b, a8);
  if (is_a8) bench_tokens(b, c, &args, most);
  td_gpu_round(b, TD_ACTIVATIONS_AUTO);
  td_gpu_release(b, NULL);
}

void td_gpu_limits(td_gpu_bench *b) {
  bench_copies(b);
  bench_peak(b);
}

void td_gpu_linear_cases(td_gpu_bench *b) {
  for (size_t i = 0; i < TD_COUNT(linear_cases); i++)
    bench_linear(b, &linear_cases[i]);
}
