// bench/gpu_paths.h - what bench_gpu measures beside operators: paths of bytes and of steps, each a
// function that prints a line a case. See bench/README.md for what the figures mean.
#ifndef TD_BENCH_GPU_PATHS_H
#define TD_BENCH_GPU_PATHS_H

#include "gpu_bench.h"
#include "gpu_model.h"
#include "runtime/devices.h"

// gpu_bus.c: with b->dev, a CUDA device, and b->pinned_gbps.
void td_gpu_path_copies(td_gpu_bench *b);
void td_gpu_path_register(td_gpu_bench *b);
void td_gpu_path_signals(td_gpu_bench *b);
// A large copy from pinned host memory to the device, 10^9 bytes a second.
double td_gpu_pinned_gbps(td_gpu_bench *b);

// gpu_steps.c: whole steps of the model of gpu_model.h, experts on the CPU.
typedef struct {
  const char *device; // "cuda", or "cpu": two CPU devices take the parts of GPU and CPU
  uint32_t n_layers;  // 0: V3's
  unsigned n_threads; // of the CPU's pool; 0: one for each CPU
} td_gpu_steps_opts;

typedef struct {
  td_gpu_bench *b;
  td_gpu_model model;
  td_devices devices;
  _Atomic uint32_t n_active; // of the pool's members
  uint32_t n_threads;
  double fill_s, pin_s;
  uint64_t random;
} td_gpu_steps;

// Makes the model and opens the devices as a worker does: b->dev and b->stream are theirs. Ends the
// program on failure.
void td_gpu_steps_open(td_gpu_steps *s, td_gpu_bench *b, const td_gpu_steps_opts *opts);
void td_gpu_steps_close(td_gpu_steps *s);
void td_gpu_steps_head(const td_gpu_steps *s); // of the JSON's first line
void td_gpu_path_stream(td_gpu_steps *s);
void td_gpu_path_decode(td_gpu_steps *s);
void td_gpu_path_interference(td_gpu_steps *s);

#endif
