// src/bench/gpu/cases.c - memory, weights, timing and output; see cases.h.
#include "bench/gpu/cases.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/stats.h"
#include "bench/report.h"
#include "model/a8.h"

enum { RUNS = 5, GRAPH_CALLS = 32 };
#define RUN_S  0.05
#define LONG_S 5e-4

struct td_gpu_kept {
  td_gpu_kept *next;
  void *device;    // NULL: host memory, which is bytes
  bool is_weights; // of which the device has copies
  _Alignas(max_align_t) uint8_t bytes[];
};

void td_gpu_must(td_status status, const td_err *err) {
  if (status == TD_OK) return;
  fprintf(stderr, "tandem bench gpu: %s\n", err->msg);
  exit(1);
}

uint32_t td_gpu_shrunk(const td_gpu_bench *b, uint32_t n) {
  enum { GROUP = 128 };
  return b->shrink == 1 ? n : (n / b->shrink / GROUP + 1) * GROUP;
}

uint32_t td_gpu_whole_blocks(const td_format *f, uint32_t n_cols) {
  const uint32_t block = td_dtype_block(f->dtype).cols;
  return block ? (n_cols + block - 1) / block * block : n_cols;
}

uint32_t td_gpu_fewer(const td_gpu_bench *b, uint32_t n, uint32_t least) {
  return b->shrink == 1 || n / b->shrink > least ? n / b->shrink : n < least ? n : least;
}

void td_gpu_sync(td_gpu_bench *b) {
  td_err err;
  td_gpu_must(td_stream_sync(b->stream, &err), &err);
}

static td_gpu_kept *keep(td_gpu_bench *b, size_t n_bytes) {
  td_gpu_kept *k = malloc(sizeof *k + n_bytes);
  TD_CHECK(k);
  *k = (td_gpu_kept){.next = b->kept};
  return b->kept = k;
}

void *td_gpu_alloc(td_gpu_bench *b, size_t n_bytes) {
  td_err err;
  void *out = NULL;
  if (!b->dev) return out;
  td_gpu_must(td_dev_alloc(b->dev, &out, n_bytes, &err), &err);
  td_op_fill_zero(b->stream, out, n_bytes);
  keep(b, 0)->device = out;
  return out;
}

int32_t *td_gpu_ints(td_gpu_bench *b, const int32_t *host, size_t n) {
  int32_t *out = td_gpu_alloc(b, n * sizeof *out);
  if (!b->dev) return out;
  td_op_copy(b->stream, out, host, n * sizeof *out);
  td_gpu_sync(b);
  return out;
}

void *td_gpu_host(td_gpu_bench *b, size_t n_bytes) {
  return keep(b, n_bytes)->bytes;
}

// Host memory of weights is freed after the device's copies, which their addresses name.
void td_gpu_release(td_gpu_bench *b, td_gpu_kept *until) {
  bool has_weights = false;
  if (b->dev) td_gpu_sync(b);
  for (const td_gpu_kept *k = b->kept; k != until; k = k->next)
    has_weights |= k->is_weights;
  if (b->dev && has_weights) {
    td_cuda_graphs_drop((td_cuda_stream *)b->stream);
    td_cuda_weights_close((td_cuda_dev *)b->dev);
  }
  while (b->kept != until) {
    td_gpu_kept *k = b->kept;
    b->kept = k->next;
    if (k->device) td_dev_free(b->dev, k->device);
    free(k);
  }
}

static uint32_t next_noise(uint32_t *state) {
  *state = *state * 1664525 + 1013904223;
  return *state >> 16;
}

void *td_gpu_noise(td_gpu_bench *b, size_t n_bytes) {
  enum { N = 1 << 19 };
  static uint16_t noise[N];
  uint32_t state = 1;
  for (size_t i = 0; i < N && b->dev; i++)
    noise[i] = (uint16_t)(0x3d00 | (next_noise(&state) & 0x80b7));
  char *out = td_gpu_alloc(b, n_bytes);
  for (size_t at = 0; b->dev && at < n_bytes; at += sizeof noise) {
    size_t left = n_bytes - at;
    td_op_copy(b->stream, out + at, noise, left < sizeof noise ? left : sizeof noise);
  }
  return out;
}

// ---- timing -----------------------------------------------------------------------------------

// Calls that are launched as one group.
typedef struct {
  td_gpu_bench *b;
  td_gpu_call fn;
  const void *args;
  uint32_t n_calls;
  bool is_graph;
} launch;

static void enqueue_calls(void *ctx) {
  const launch *l = ctx;
  for (uint32_t i = 0; i < l->n_calls; i++)
    l->fn(l->b, l->args, i);
}

static double run_launches(const launch *l, uint32_t n) {
  double begin = td_clock_s();
  for (uint32_t i = 0; i < n; i++) {
    if (l->is_graph) {
      const td_work_key key = {.memory = l->b->graph};
      td_stream_run(l->b->stream, &key, enqueue_calls, (void *)l);
    } else {
      enqueue_calls((void *)l);
    }
  }
  td_gpu_sync(l->b);
  return td_clock_s() - begin;
}

// Seconds per call.
static double measure_launches(const launch *l) {
  uint32_t n = 1;
  if (l->b->shrink > 1) return run_launches(l, 1) / l->n_calls;
  while (n < 1u << 20 && run_launches(l, n) < RUN_S)
    n *= 2;
  double seconds[RUNS];
  for (int i = 0; i < RUNS; i++)
    seconds[i] = run_launches(l, n) / n / l->n_calls;
  return td_median(seconds, RUNS);
}

double td_gpu_measure_copy(td_gpu_bench *b, td_gpu_call fn, const void *args) {
  if (!b->dev) return 1;
  return measure_launches(&(launch){b, fn, args, 1, false});
}

// The first launch with a graph key runs eagerly, the second captures a graph.
double td_gpu_measure(td_gpu_bench *b, td_gpu_call fn, const void *args, uint32_t n_matrices) {
  if (!b->dev) return 1;
  launch l = {b, fn, args, n_matrices, false};
  run_launches(&l, 1); // warm up: copies, allocations, code loading
  bool is_long = b->shrink == 1 && run_launches(&l, 1) / n_matrices > LONG_S;
  uint32_t rounds = is_long || b->shrink > 1 ? 1 : (GRAPH_CALLS + n_matrices - 1) / n_matrices;
  l.n_calls = rounds * n_matrices;
  l.is_graph = true;
  b->graph++;
  run_launches(&l, 3);
  return measure_launches(&l);
}

bool td_gpu_wants(const td_gpu_bench *b, const char *op, const char *model, const char *format) {
  char name[96];
  snprintf(name, sizeof name, "%s %s %s", op, model, format);
  return !b->only || strstr(name, b->only);
}

bool td_gpu_wants_any(const td_gpu_bench *b, const char *ops, const char *model) {
  for (const char *at = ops; *at; at += strspn(at, " ")) {
    char op[32];
    const size_t n = strcspn(at, " ");
    snprintf(op, sizeof op, "%.*s", (int)n, at);
    if (td_gpu_wants(b, op, model, "")) return true;
    at += n;
  }
  return false;
}

void td_gpu_write(td_gpu_bench *b) {
  if (td_jw_print_line(b->json, stdout)) return;
  fprintf(stderr, "bench_gpu: a result cannot be written\n");
  exit(1);
}

void td_gpu_record(td_gpu_bench *b, const td_gpu_case *c, double seconds) {
  td_json_writer *w = b->json;
  double gbps = c->bytes / seconds * 1e-9, tflops = c->flops / seconds * 1e-12;
  b->n_cases++;
  fprintf(stderr, "%-12s %-10s %-5s %6u x %-6u %5u tokens %6u keys", c->op, c->model,
          c->format ? c->format : "", c->rows, c->cols, c->tokens, c->keys);
  if (!b->dev) {
    fputc('\n', stderr);
    return;
  }
  fprintf(stderr, " %10.1f us %8.1f GB/s %8.2f TFLOP/s\n", seconds * 1e6, gbps, tflops);
  td_jw_add(w, "{'op': %s, 'model': %s", c->op, c->model);
  if (c->format) td_jw_str(w, "format", c->format);
  if (c->rows) td_jw_int(w, "rows", c->rows);
  if (c->cols) td_jw_int(w, "cols", c->cols);
  td_jw_int(w, "tokens", c->tokens);
  if (c->seqs) td_jw_int(w, "sequences", c->seqs);
  if (c->keys) td_jw_int(w, "keys", c->keys);
  if (c->experts) td_jw_int(w, "experts", c->experts);
  td_jw_add(w, "'us': %g, 'gbps': %g, 'share_of_device_bandwidth': %g", seconds * 1e6, gbps,
            gbps / b->copy_gbps);
  if (c->flops > 0) td_jw_double(w, "tflops", tflops);
  if (c->flops > 0) td_jw_double(w, "share_of_bf16_peak", tflops / b->peak_tflops);
  if (c->flops > 0) td_jw_double(w, "share_of_mma_sync_peak", tflops / b->mma_tflops);
  if (b->a8_tflops[c->a8] > 0) {
    const char *key = c->a8 == TD_ACTIVATIONS_FP8 ? "share_of_fp8_peak" : "share_of_int8_peak";
    td_jw_double(w, key, tflops / b->a8_tflops[c->a8]);
  }
  td_jw_end_object(w);
  td_gpu_write(b);
}

void td_gpu_run(td_gpu_bench *b, const td_gpu_case *c, td_gpu_call fn, const void *args,
                uint32_t n_matrices) {
  if (!td_gpu_wants(b, c->op, c->model, c->format ? c->format : "")) return;
  td_gpu_record(b, c, td_gpu_measure(b, fn, args, n_matrices));
}

// ---- weights ------------------------------------------------------------------------------------

const td_format td_gpu_bf16 = {.name = "bf16", .dtype = TD_BF16};
const td_format td_gpu_fp8 = {"fp8", TD_F8E4M3, TD_F32, 128, 128, false, NULL};
const td_format td_gpu_int8 = {"int8", TD_I8, TD_F32, 1, TD_FORMAT_WHOLE_ROW, false, NULL};
const td_format td_gpu_int4_g32 = {"int4-g32", TD_I4, TD_BF16, 1, 32, false, NULL};
const td_format td_gpu_int4_g128 = {"int4-g128", TD_I4, TD_F16, 1, 128, false, NULL};
const td_format td_gpu_q4_k = {.name = "q4_k", .dtype = TD_Q4_K};
const td_format td_gpu_q6_k = {.name = "q6_k", .dtype = TD_Q6_K};
const td_format td_gpu_q8_0 = {.name = "q8_0", .dtype = TD_Q8_0};
const td_format td_gpu_mxfp4 = {"mxfp4", TD_F4E2M1, TD_F8E8M0, 1, 32, false, NULL};

static void *weight_memory(td_gpu_bench *b, size_t n_bytes) {
  td_gpu_kept *k = keep(b, n_bytes);
  k->is_weights = true;
  return k->bytes;
}

float *td_gpu_weight_floats(td_gpu_bench *b, size_t n, float value) {
  float *out = weight_memory(b, n * sizeof *out);
  for (size_t i = 0; i < n; i++)
    out[i] = value;
  return out;
}

td_activations td_gpu_a8(const td_gpu_bench *b, const td_format *f) {
  const bool has_f8 = !b->dev || ((const td_cuda_dev *)b->dev)->props.has_f8;
  const td_weight w = {
      .dtype = f->dtype, .scale_dtype = f->scale_dtype, .scale_cols = f->scale_cols};
  const td_activations a8 = td_weight_a8(&w);
  return a8 == TD_ACTIVATIONS_FP8 && !has_f8 ? TD_ACTIVATIONS_AUTO : a8;
}

void td_gpu_round(td_gpu_bench *b, td_activations activations) {
  if (b->dev) ((td_cuda_dev *)b->dev)->activations = activations;
}

td_weight td_gpu_weight(td_gpu_bench *b, const td_format *f, uint32_t rows, uint32_t cols) {
  td_weight w;
  const size_t n = td_bench_weight(&w, f, rows, cols, NULL);
  void *memory = weight_memory(b, b->dev ? n : 1);
  td_bench_weight(&w, f, rows, cols, memory);
  if (b->dev) td_bench_fill(&w, memory, 2);
  return w;
}

void td_gpu_add_once(td_gpu_bench *b, const void *args, uint32_t call) {
  const td_gpu_copy *a = args;
  (void)call;
  td_op_add(b->stream, a->dst, a->src, a->n_bytes / sizeof(uint16_t));
}

void td_gpu_copy_once(td_gpu_bench *b, const void *args, uint32_t call) {
  const td_gpu_copy *a = args;
  (void)call;
  td_op_copy(b->stream, a->dst, a->src, a->n_bytes);
}
