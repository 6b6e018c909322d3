// bench/gpu_paths.h - benchmarks of bench_gpu that have files of their own: copy paths, whole
// steps, gated delta nets. Each is a function that prints one line per case. bench/README.md
// explains the figures.
#ifndef TD_BENCH_GPU_PATHS_H
#define TD_BENCH_GPU_PATHS_H

#include "gpu_bench.h"
#include "gpu_model.h"
#include "runtime/devices.h"

// gpu_bus.c. Requires b->dev, a CUDA device, and b->pinned_gbps.
void td_gpu_path_copies(td_gpu_bench *b);
void td_gpu_path_register(td_gpu_bench *b);
void td_gpu_path_signals(td_gpu_bench *b);
// Bandwidth of a large copy from pinned host memory to the device, in 10^9 bytes/s.
double td_gpu_pinned_gbps(td_gpu_bench *b);

// gpu_delta.c: operators of gated delta nets.
void td_gpu_delta_cases(td_gpu_bench *b);

// gpu_steps.c: whole steps of the model in gpu_model.h, with experts on the CPU.
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

#endif
