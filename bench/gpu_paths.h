// bench/gpu_paths.h - what bench_gpu measures beside operators: paths of bytes and of steps, each a
// function that prints a line a case. See bench/README.md for what the figures mean.
#ifndef TD_BENCH_GPU_PATHS_H
#define TD_BENCH_GPU_PATHS_H

#include "gpu_bench.h"

// gpu_bus.c: with b->dev, a CUDA device, and b->pinned_gbps.
void td_gpu_path_copies(td_gpu_bench *b);
void td_gpu_path_register(td_gpu_bench *b);
void td_gpu_path_signals(td_gpu_bench *b);
// A large copy from pinned host memory to the device, 10^9 bytes a second.
double td_gpu_pinned_gbps(td_gpu_bench *b);

// gpu_steps.c: whole steps of a model of V3's shape whose layers are all one, in memory.
typedef struct {
  const char *device; // "cuda", or "cpu": two CPU devices take the parts of GPU and CPU
  uint32_t n_layers;  // 0: 61
  unsigned n_threads; // of the CPU; 0: one for each CPU
} td_gpu_steps_opts;

#endif
