// src/bench/report.h - shared by `bench kernels` and `bench layer`: the machine's limits, the
// measurement of one case, and its output as a table row or as JSON.
#pragma once

#include "bench/formats.h"
#include "bench/machine.h"
#include "bench/mem_bandwidth.h"
#include "options/options.h"
#include "tandem/kernels.h"

enum { TD_BENCH_MAX_SPEEDS = 16 };

// The machine's limits with one number of threads, measured at the start.
typedef struct {
  unsigned n_threads;
  double read_gbps;
  td_peaks peaks;
} td_bench_speed;

typedef struct {
  const td_options *options;
  td_machine machine;
  td_read_speed reads; // with the threads of the current speed
  td_bench_speed speeds[TD_BENCH_MAX_SPEEDS];
  uint32_t n_speeds;
  td_buf text;
  td_json_writer json;
  bool is_cut; // writing a line failed
} td_bench_report;

typedef struct {
  double seconds;   // per run, median
  double read_gbps; // the better of the measurements before and after
} td_bench_time;

// Where the weights of a run were read from, on several NUMA nodes.
typedef struct {
  unsigned n;
  // Per run, by threads on each node: of its own memory and of others'.
  double local_bytes[TD_MAX_NODES], remote_bytes[TD_MAX_NODES];
  double speedup; // over the first node alone; 0: this is the first alone
} td_bench_nodes;

typedef struct {
  const char *kernel, *variant;
  const td_format *format;
  uint32_t rows, cols, batch;
  const td_bench_speed *speed; // its number of threads and their peaks
  double bytes, flops;         // per run
  td_bench_time time;
  const td_bench_nodes *nodes; // NULL: not counted
} td_bench_record;

// Measures the limits for every number of threads in --threads (0: one per CPU; duplicates are
// merged) and prints the header. JSON is printed line by line as results arrive. Call close in
// every case: it returns st, or TD_EINTERNAL if st is TD_OK but a line could not be written.
td_status td_bench_report_open(td_bench_report *report, const td_options *options, td_err *err);
td_status td_bench_report_close(td_bench_report *report, td_status st, td_err *err);
// Switches to the speed's number of threads: report->reads.pool.
td_status td_bench_report_use(td_bench_report *report, const td_bench_speed *speed, td_err *err);
void td_bench_report_add(td_bench_report *report, const td_bench_record *record);
// Calls run with each number of threads, switched to, for every kernel that this machine supports
// and every batch.
typedef void (*td_bench_case)(void *ctx, const td_bench_speed *speed, const td_kernel_variant *v,
                              uint32_t batch);
td_status td_bench_each_case(td_bench_report *report, td_bench_case run, void *ctx, td_err *err);
uint32_t td_bench_largest_batch(const td_options *options);

// The peak that share_of_peak refers to: BF16 dot products if supported, else FMA.
double td_bench_peak(const td_bench_speed *speed);

// Measures run(ctx) --repeat times after a warm-up and returns the median, together with the memory
// bandwidth measured around it. Short calls are repeated within a measurement; slow cases get fewer
// measurements. report->reads must be open.
td_bench_time td_bench_measure(td_bench_report *report, void (*run)(void *ctx), void *ctx);

// TD_ENOMEM, with the amounts, if less than `bytes` of memory is available.
td_status td_bench_need_memory(double bytes, const char *what, td_err *err);

// delta.c: the recurrence of a gated delta net, at the shape of Qwen3-Next (32 heads of 128 x 128):
// batches are tokens of one sequence. Calls rotate through the states of 36 layers.
td_status td_bench_delta(td_bench_report *report, const td_format *format, td_err *err);
