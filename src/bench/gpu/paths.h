// src/bench/gpu/paths.h - what `tandem bench gpu` measures: operators, copy paths, whole steps.
// Each is a function that prints one line per case. bench/README.md explains the figures.
#pragma once

#include "bench/gpu/cases.h"
#include "bench/gpu/model.h"
#include "runtime/devices.h"

// bus.c. Requires b->dev, a CUDA device, and b->pinned_gbps.
void td_gpu_path_copies(td_gpu_bench *b);
void td_gpu_path_register(td_gpu_bench *b);
void td_gpu_path_signals(td_gpu_bench *b);
// Bandwidth of a large copy from pinned host memory to the device, in 10^9 bytes/s.
double td_gpu_pinned_gbps(td_gpu_bench *b);

// ---- operators ----------------------------------------------------------------------------------

typedef struct {
  const char *name;
  uint32_t dim, n_vocab, n_heads, n_kv_heads, head_dim; // n_kv_heads 0: MLA
  uint32_t n_experts, top_k, hidden, n_groups, topk_groups;
  td_router_kind router;
  const td_format *format; // of the experts
} td_gpu_shape;

enum { TD_GPU_NOPE = 128, TD_GPU_ROPE = 64, TD_GPU_V_DIM = 128, TD_GPU_RANK = 512 }; // of MLA

// Members of the JSON's first line, and b's limits.
void td_gpu_limits(td_gpu_bench *b);
void td_gpu_linear_cases(td_gpu_bench *b);
void td_gpu_small_cases(td_gpu_bench *b, const td_gpu_shape *m);
void td_gpu_attention_cases(td_gpu_bench *b, const td_gpu_shape *m);
void td_gpu_experts_cases(td_gpu_bench *b, const td_gpu_shape *m, const td_format *format);
void td_gpu_delta_cases(td_gpu_bench *b);
void td_gpu_pool_cases(td_gpu_bench *b);   // selected and pooled keys
void td_gpu_stream_cases(td_gpu_bench *b); // hyper-connections, n-grams
void td_gpu_node_cases(td_gpu_bench *b);   // what a graph's node costs

// n_seqs sequences of n_keys positions each, of which the last n_tokens are computed.
td_batch_view td_gpu_batch(td_gpu_bench *b, uint32_t n_seqs, uint32_t n_tokens, uint32_t n_keys);

// ---- whole steps --------------------------------------------------------------------------------

// Of the model in model.h, with experts on the CPU.
typedef struct {
  const char *device; // "cuda", or "cpu" for two CPU devices in the roles of GPU and CPU
  uint32_t n_layers;  // 0: as many as V3
  unsigned n_threads; // in the CPU's pool; 0: one per CPU
} td_gpu_steps_opts;

typedef struct {
  td_gpu_bench *b;
  td_gpu_model model;
  td_devices devices;
  _Atomic uint32_t n_active; // active members of the pool
  uint32_t n_threads;
  double fill_s, pin_s;
  uint64_t random;
} td_gpu_steps;

// Creates the model and opens the devices as a worker does; sets b->dev and b->stream. Exits on
// failure.
void td_gpu_steps_open(td_gpu_steps *s, td_gpu_bench *b, const td_gpu_steps_opts *opts);
void td_gpu_steps_close(td_gpu_steps *s);
void td_gpu_steps_head(const td_gpu_steps *s); // writes members of the JSON's first line
void td_gpu_path_stream(td_gpu_steps *s);
void td_gpu_path_decode(td_gpu_steps *s);
void td_gpu_path_cache(td_gpu_steps *s);
void td_gpu_path_interference(td_gpu_steps *s);
