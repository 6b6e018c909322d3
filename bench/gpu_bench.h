// bench/gpu_bench.h - what bench_gpu.c makes its cases of and measures them with: memory, weights,
// times, records. What fails ends the program with its message. One thread.
#ifndef TD_BENCH_GPU_BENCH_H
#define TD_BENCH_GPU_BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/json_write.h"
#include "device/cuda/cuda.h"

typedef struct td_gpu_kept td_gpu_kept;

typedef struct {
  td_dev *dev; // NULL: cases are listed, and memory on the device is NULL
  td_stream *stream;
  td_json_writer *json;
  double copy_gbps;     // within the device, reads and writes
  double peak_tflops;   // of a large dense product in BF16
  double pinned_gbps;   // from the host, for paths
  double read_gbps;     // of the host's threads; 0: not measured
  const char *only;     // NULL: every case
  uint32_t shrink;      // 1, or what dimensions are divided by, and a case runs once
  uint32_t graph;       // the last one's key
  td_gpu_kept *weights; // the newest first
  uint32_t n_cases;
} td_gpu_bench;

void td_gpu_must(td_status status, const td_err *err);
void td_gpu_sync(td_gpu_bench *b);

// ---- memory -----------------------------------------------------------------------------------

// On the device, zeros.
void *td_gpu_alloc(td_gpu_bench *b, size_t n_bytes);
// The same with 16-bit numbers of either sign, a few hundredths large: a multiplication of zeros
// takes less power, and so less time.
void *td_gpu_noise(td_gpu_bench *b, size_t n_bytes);
void td_gpu_free(td_gpu_bench *b, void *memory);

// ---- weights ----------------------------------------------------------------------------------

typedef struct {
  const char *name;
  td_dtype dtype, scale_dtype;
  uint32_t scale_rows, scale_cols;
} td_gpu_format;

extern const td_gpu_format td_gpu_bf16, td_gpu_fp8, td_gpu_int4_g32, td_gpu_int4_g128, td_gpu_mxfp4;

// Any bits but NaN's; scales of 2^-7.
td_weight td_gpu_weight(td_gpu_bench *b, const td_gpu_format *f, uint32_t rows, uint32_t cols);
// Host memory for such, until td_gpu_forget_weights: the device knows weights by their address.
void *td_gpu_weight_memory(td_gpu_bench *b, size_t n_bytes);
// All of a case's, and the device's copies of them.
void td_gpu_forget_weights(td_gpu_bench *b);

// ---- cases ------------------------------------------------------------------------------------

typedef struct {
  const char *op, *model, *format;
  uint32_t rows, cols, tokens, seqs, keys; // 0: does not apply
  double bytes, flops;                     // of a call; 0: not what it is about
} td_gpu_case;

// Enqueues call number i.
typedef void (*td_gpu_call)(td_gpu_bench *b, const void *args, uint32_t i);

// Whether --only means such cases.
bool td_gpu_wants(const td_gpu_bench *b, const char *op, const char *model, const char *format);
// Seconds a call. Calls take turns at n_matrices, which the first round copies to the GPU.
double td_gpu_measure(td_gpu_bench *b, td_gpu_call fn, const void *args, uint32_t n_matrices);
// Seconds a copy from or to the host, which no graph can hold.
double td_gpu_measure_copy(td_gpu_bench *b, td_gpu_call fn, const void *args);
void td_gpu_record(td_gpu_bench *b, const td_gpu_case *c, double seconds);
// Prints the object that is written, as a line, so that a run that is cut short leaves its figures.
void td_gpu_write(td_gpu_bench *b);

#endif
