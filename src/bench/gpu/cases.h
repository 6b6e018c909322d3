// src/bench/gpu/cases.h - helpers with which `tandem bench gpu` makes and measures its cases:
// memory, weights, timing, output. Errors print a message and exit. Single thread.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/json_write.h"
#include "bench/formats.h"
#include "device/cuda/cuda.h"

typedef struct td_gpu_kept td_gpu_kept;

typedef struct {
  td_dev *dev; // NULL: only list cases; device memory is NULL then
  td_stream *stream;
  td_json_writer *json;
  double copy_gbps;   // device-to-device copy, counting reads and writes
  double peak_tflops; // of a large dense BF16 matrix product
  double mma_tflops;  // of mma.sync alone, in BF16
  // Of it in 8 bits or, on a GPU that has it, of wgmma alone; by td_weight_a8. 0: neither.
  double a8_tflops[TD_N_ACTIVATIONS];
  double pinned_gbps; // host to device; for paths
  double read_gbps;   // bandwidth of the host's threads; 0: not measured
  const char *only;   // one of --only; NULL: all cases
  uint32_t shrink;    // divisor of dimensions; if not 1, each case runs once
  uint32_t graph;     // most recent graph key
  td_gpu_kept *kept;  // newest first
  uint32_t n_cases;
} td_gpu_bench;

void td_gpu_must(td_status status, const td_err *err);
void td_gpu_sync(td_gpu_bench *b);

// A dimension reduced by --shrink, still a multiple of the scale groups.
uint32_t td_gpu_shrunk(const td_gpu_bench *b, uint32_t n);
// A count reduced by --shrink, but not below `least`.
uint32_t td_gpu_fewer(const td_gpu_bench *b, uint32_t n, uint32_t least);

// Bytes that calls rotate through, more than any L2 holds; tokens of a page of the KV cache.
enum { TD_GPU_ROTATING_BYTES = 512 << 20, TD_GPU_PAGE_TOKENS = 64 };

// ---- memory -----------------------------------------------------------------------------------

// Whatever cases allocate is kept until td_gpu_release. Zeroed device memory.
void *td_gpu_alloc(td_gpu_bench *b, size_t n_bytes);
// Device memory with 16-bit numbers of either sign and a magnitude of a few hundredths, which are
// numbers in E4M3 and F32, too. Multiplying zeros would take less power and run faster.
void *td_gpu_noise(td_gpu_bench *b, size_t n_bytes);
// n numbers in device memory, copied.
int32_t *td_gpu_ints(td_gpu_bench *b, const int32_t *host, size_t n);
// Host memory, uninitialized.
void *td_gpu_host(td_gpu_bench *b, size_t n_bytes);
// Frees what was kept since b->kept was `until`; NULL: everything. If weights are among it, the
// device's copies of weights go, too.
void td_gpu_release(td_gpu_bench *b, td_gpu_kept *until);

// ---- weights ----------------------------------------------------------------------------------

extern const td_format td_gpu_bf16, td_gpu_fp8, td_gpu_int8, td_gpu_int4_g32, td_gpu_int4_g128,
    td_gpu_mxfp4, td_gpu_q4_k, td_gpu_q6_k, td_gpu_q8_0;

// n_cols, or the next whole number of the format's blocks.
uint32_t td_gpu_whole_blocks(const td_format *f, uint32_t n_cols);

// A matrix as td_bench_fill makes it.
td_weight td_gpu_weight(td_gpu_bench *b, const td_format *f, uint32_t rows, uint32_t cols);
// Host memory for weights, each number `value`. The device identifies weights by their address.
float *td_gpu_weight_floats(td_gpu_bench *b, size_t n, float value);

// The value of --activations under which the device multiplies such weights in 8 bits;
// TD_ACTIVATIONS_AUTO: none.
td_activations td_gpu_a8(const td_gpu_bench *b, const td_format *f);
// As --activations; TD_ACTIVATIONS_AUTO at first.
void td_gpu_round(td_gpu_bench *b, td_activations activations);

// ---- cases ------------------------------------------------------------------------------------

typedef struct {
  const char *op, *model, *format;
  uint32_t rows, cols, tokens, seqs, keys, experts; // 0: not applicable
  double bytes, flops;                              // per call; 0: not applicable
  td_activations a8;                                // by which activations are rounded to 8 bits
} td_gpu_case;

// Enqueues the i-th call.
typedef void (*td_gpu_call)(td_gpu_bench *b, const void *args, uint32_t i);
// Defines a td_gpu_call of td_op_NAME, whose arguments are the same each time.
#define TD_GPU_ONCE(name)                                                                          \
  static void name##_once(td_gpu_bench *b, const void *args, uint32_t call) {                      \
    (void)call;                                                                                    \
    td_op_##name(b->stream, args);                                                                 \
  }

// Whether --only selects the case.
bool td_gpu_wants(const td_gpu_bench *b, const char *op, const char *model, const char *format);
// Whether it selects one of a model's cases without a format; ops: words that blanks separate.
bool td_gpu_wants_any(const td_gpu_bench *b, const char *ops, const char *model);
// Seconds per call. Calls rotate through n_matrices, which the first round copies to the GPU.
double td_gpu_measure(td_gpu_bench *b, td_gpu_call fn, const void *args, uint32_t n_matrices);
// Seconds per copy from or to the host, which cannot be captured in a graph.
double td_gpu_measure_copy(td_gpu_bench *b, td_gpu_call fn, const void *args);
void td_gpu_record(td_gpu_bench *b, const td_gpu_case *c, double seconds);
// Measures and records a case that --only selects.
void td_gpu_run(td_gpu_bench *b, const td_gpu_case *c, td_gpu_call fn, const void *args,
                uint32_t n_matrices);
// Prints the finished JSON object as a line, so that an aborted run keeps its results.
void td_gpu_write(td_gpu_bench *b);

// A case of one copy on the bench's stream; args is a td_gpu_copy.
typedef struct {
  void *dst;
  const void *src;
  size_t n_bytes;
} td_gpu_copy;
void td_gpu_copy_once(td_gpu_bench *b, const void *args, uint32_t call);
// Adds numbers of 16 bits instead.
void td_gpu_add_once(td_gpu_bench *b, const void *args, uint32_t call);
