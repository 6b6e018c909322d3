// src/bench/report.h - what `bench kernels` and `bench layer` share: the machine's limits, the
// measurement of one case, and its record as a line of a table or as JSON.
#ifndef TD_BENCH_REPORT_H
#define TD_BENCH_REPORT_H

#include "bench/flops.h"
#include "bench/formats.h"
#include "bench/machine.h"
#include "bench/mem_bandwidth.h"
#include "options/options.h"

enum { TD_BENCH_MAX_SPEEDS = 16 };

// Limits of the machine with one number of threads, at the start.
typedef struct {
  unsigned n_threads;
  double read_gbps;
  td_peaks peaks;
} td_bench_speed;

typedef struct {
  const td_options *options;
  td_machine machine;
  td_read_speed reads; // with the threads of the speed in use
  td_bench_speed speeds[TD_BENCH_MAX_SPEEDS];
  uint32_t n_speeds;
  td_buf text;
  td_json_writer json;
  bool is_cut; // a line could not be written
} td_bench_report;

typedef struct {
  double seconds;   // of one run, median
  double read_gbps; // the better of before and behind
} td_bench_time;

typedef struct {
  const char *kernel, *variant;
  const td_bench_format *format;
  uint32_t rows, cols, batch;
  const td_bench_speed *speed; // its number of threads, and their peaks
  double bytes, flops;         // of one run
  td_bench_time time;
} td_bench_record;

// Measures the limits for every number of --threads (0: one for each CPU; equal ones count once)
// and prints the head; JSON is printed line by line, as results come. Call close in every case;
// it returns st, or TD_EINTERNAL where that is TD_OK and a line could not be written.
td_status td_bench_report_open(td_bench_report *report, const td_options *options, td_err *err);
td_status td_bench_report_close(td_bench_report *report, td_status st, td_err *err);
// From here on there are the speed's threads: report->reads.pool.
td_status td_bench_report_use(td_bench_report *report, const td_bench_speed *speed, td_err *err);
void td_bench_report_add(td_bench_report *report, const td_bench_record *record);

// The peak that share_of_peak refers to: dot products where the machine has them, else FMA.
double td_bench_peak(const td_bench_speed *speed);

// The median of --repeat measurements of one call of run(ctx), after a warm-up, and how fast memory
// is read beside. A measurement repeats short calls until they can be timed; slow cases get fewer
// of them. report->reads must be open.
td_bench_time td_bench_measure(td_bench_report *report, void (*run)(void *ctx), void *ctx);
double td_bench_median(double *values, size_t n); // sorts them

// TD_ENOMEM, with the numbers, unless bytes of memory are to be had.
td_status td_bench_need_memory(double bytes, const char *what, td_err *err);

#endif
