// src/bench/gpu/gpu.c - `tandem bench gpu`: the CUDA device's operators at the shapes of real
// models, or one of the paths of paths.h. Prints JSON lines: first the machine and its limits, then
// one line per case, flushed when it is known. Calls are launched in groups as a graph, as the
// engine does for a decode step. A case is repeated until a run takes about 50 ms; its result is
// the median of five runs, as wall time per call. Calls rotate through enough weights, experts and
// (for decode) KV caches that data come from memory rather than L2.
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "bench/bench.h"
#include "bench/gpu/paths.h"
#include "bench/machine.h"
#include "bench/mem_bandwidth.h"
#include "runtime/command.h"

// ---- models ------------------------------------------------------------------------------------

static const td_gpu_shape models[] = {
    {"v3", 7168, 129280, 128, 0, 0, 256, 8, 2048, 8, 4, TD_ROUTER_SIGMOID, &td_gpu_fp8},
    {"qwen3-30b", 2048, 151936, 32, 4, 128, 128, 8, 768, 0, 0, TD_ROUTER_SOFTMAX, &td_gpu_bf16},
    {"moonlight", 2048, 163840, 16, 0, 0, 64, 6, 1408, 1, 1, TD_ROUTER_SIGMOID, &td_gpu_bf16},
};

static td_gpu_shape model_of(const td_gpu_bench *b, size_t i) {
  td_gpu_shape m = models[i];
  m.dim = td_gpu_shrunk(b, m.dim);
  m.hidden = td_gpu_shrunk(b, m.hidden);
  m.n_vocab = td_gpu_shrunk(b, m.n_vocab);
  m.n_heads = td_gpu_fewer(b, m.n_heads, 8);
  m.n_kv_heads = td_gpu_fewer(b, m.n_kv_heads, 1);
  m.n_experts = td_gpu_fewer(b, m.n_experts, 16);
  return m;
}

// ---- all cases --------------------------------------------------------------------------------

static td_machine measure_machine(void) {
  td_err err;
  td_machine machine = td_machine_get();
  td_read_speed speed;
  td_gpu_must(td_read_speed_open(&speed, 0, &err), &err);
  machine.n_threads = td_thread_pool_size(speed.pool);
  machine.read_gbps = td_read_speed_gbps(&speed);
  td_read_speed_close(&speed);
  return machine;
}

static void write_head(td_gpu_bench *b) {
  td_machine machine = b->shrink == 1 ? measure_machine() : td_machine_get();
  td_jw_add(b->json, "{'device': %s, 'tandem': %s", td_dev_name(b->dev), TD_VERSION);
  b->read_gbps = machine.read_gbps;
  if (b->shrink > 1) td_jw_int(b->json, "shrunk_by", b->shrink);
  td_machine_json(&machine, b->json);
}

static void run_cases(td_gpu_bench *b) {
  td_gpu_linear_cases(b);
  for (size_t i = 0; i < TD_COUNT(models); i++) {
    const td_gpu_shape m = model_of(b, i);
    td_gpu_small_cases(b, &m);
    td_gpu_attention_cases(b, &m);
    td_gpu_experts_cases(b, &m, m.format);
    td_gpu_experts_cases(b, &m, &td_gpu_int8);
    td_gpu_experts_cases(b, &m, &td_gpu_int4_g32);
    if (i == 0) td_gpu_experts_cases(b, &m, &td_gpu_q4_k);
  }
  td_gpu_delta_cases(b);
  td_gpu_pool_cases(b);
  td_gpu_stream_cases(b);
  td_gpu_node_cases(b);
}

// Those that a member of `only`, a list with commas, names: in its order, so that what matters most
// comes first.
static void run_chosen_cases(td_gpu_bench *b, const char *only) {
  for (size_t n; only && *only; only += n + (only[n] == ',')) {
    char text[96];
    const uint32_t before = b->n_cases;
    n = strcspn(only, ",");
    snprintf(text, sizeof text, "%.*s", (int)n, only);
    b->only = text;
    run_cases(b);
    if (b->n_cases == before) fprintf(stderr, "bench_gpu: no case is called %s\n", text);
  }
  if (!only) run_cases(b);
}

// Without cuBLAS the peak and prefill results would be misleading, so it is required by default.
static void need_blas(td_gpu_bench *b) {
  td_weight w = td_gpu_weight(b, &td_gpu_bf16, 4096, 128);
  const td_cuda_matmul m = {.w = &w, .n_tokens = 4096, .x_stride = 128, .y_stride = 4096};
  if (!td_cuda_takes_blas((td_cuda_stream *)b->stream, &m)) {
    td_err err;
    td_gpu_must(td_fail(&err, TD_EUNSUPPORTED,
                        "cuBLAS cannot be used: install it (package libcublas, or PyTorch's "
                        "nvidia-cublas) and name its folder in LD_LIBRARY_PATH, or say "
                        "--without-cublas"),
                &err);
  }
  td_gpu_release(b, NULL);
}

// ---- the command --------------------------------------------------------------------------------

typedef struct {
  void (*run)(td_gpu_bench *b);
  void (*run_steps)(td_gpu_steps *s); // for paths that run a model
} path;

static const path paths[] = {
    [TD_GPU_OPERATORS] = {NULL, NULL},
    [TD_GPU_COPIES] = {.run = td_gpu_path_copies},
    [TD_GPU_REGISTER] = {.run = td_gpu_path_register},
    [TD_GPU_SIGNALS] = {.run = td_gpu_path_signals},
    [TD_GPU_STREAM] = {.run_steps = td_gpu_path_stream},
    [TD_GPU_DECODE] = {.run_steps = td_gpu_path_decode},
    [TD_GPU_CACHE] = {.run_steps = td_gpu_path_cache},
    [TD_GPU_INTERFERENCE] = {.run_steps = td_gpu_path_interference},
};

static void run_path(td_gpu_bench *b, const td_options *o, td_gpu_steps *s) {
  write_head(b);
  if (s) td_gpu_steps_head(s);
  b->pinned_gbps = td_gpu_pinned_gbps(b);
  td_jw_add(b->json, "'pinned_gbps': %g}", b->pinned_gbps);
  td_gpu_write(b);
  if (s)
    paths[o->gpu_path].run_steps(s);
  else
    paths[o->gpu_path].run(b);
}

static void run_on_device(td_gpu_bench *b, const td_options *o) {
  td_err err;
  td_gpu_must(td_dev_open(&b->dev, &(td_dev_opts){.kind = "cuda"}, &err), &err);
  td_gpu_must(td_stream_open(&b->stream, b->dev, &err), &err);
  if (!o->without_cublas) need_blas(b);
  if (o->gpu_path != TD_GPU_OPERATORS) {
    run_path(b, o, NULL);
  } else {
    write_head(b);
    td_gpu_limits(b);
    td_jw_end_object(b->json);
    td_gpu_write(b);
    run_chosen_cases(b, o->only);
  }
  td_stream_close(b->stream);
  td_dev_close(b->dev);
}

static void run_model(td_gpu_bench *b, const td_options *o) {
  const bool is_cpu = strcmp(o->device, "cpu") == 0;
  const td_gpu_steps_opts opts = {.device = is_cpu ? "cpu" : "cuda",
                                  .n_layers = (uint32_t)o->bench_layers,
                                  .n_threads = (unsigned)o->threads};
  td_gpu_steps s;
  td_gpu_steps_open(&s, b, &opts);
  if (!o->without_cublas && !is_cpu) need_blas(b);
  run_path(b, o, &s);
  td_gpu_steps_close(&s);
}

int td_cmd_bench_gpu(const td_options *o) {
  td_buf text = TD_BUF_INIT;
  td_json_writer json = TD_JSON_WRITER(&text);
  td_gpu_bench b = {.json = &json, .shrink = (uint32_t)o->shrink};
  const bool runs_steps = paths[o->gpu_path].run_steps != NULL;
  if (strcmp(o->device, "cpu") == 0 && !runs_steps) {
    td_err err;
    td_fail(&err, TD_EINVAL,
            "--device cpu: only the paths stream, decode, cache and interference run on "
            "CPU devices; choose one of them with --path");
    return td_cmd_fail(&err);
  }
  if (o->list) {
    run_chosen_cases(&b, o->only);
    fprintf(stderr, "%u cases\n", b.n_cases);
  } else if (runs_steps) {
    run_model(&b, o);
  } else {
    run_on_device(&b, o);
  }
  td_buf_free(&text);
  return 0;
}
