// src/bench/report.c - measures, prints and records benchmark cases.
#include "bench/report.h"

#include <math.h>
#include <stdio.h>

#include "base/clock.h"
#include "base/mem_info.h"
#include "base/stats.h"

#define SHORTEST_S 0.02 // per measurement; hides the clock's and the pool's overhead
#define LONGEST_S  2.0  // no further measurements of a case after this time

enum { N_ROUNDS = 3 }; // bandwidth measurements at the start

// ---- time -----------------------------------------------------------------------------------

static double time_calls(void (*run)(void *ctx), void *ctx, uint32_t n_calls) {
  double start = td_clock_s();
  for (uint32_t i = 0; i < n_calls; i++)
    run(ctx);
  return (td_clock_s() - start) / n_calls;
}

static double median_time(void (*run)(void *ctx), void *ctx, uint32_t n) {
  double seconds[1000], warm_up = time_calls(run, ctx, 1), spent = warm_up;
  if (warm_up > LONGEST_S) return warm_up;
  uint32_t n_calls = warm_up < SHORTEST_S ? (uint32_t)(SHORTEST_S / (warm_up + 1e-6)) + 1 : 1;
  uint32_t done = 0;
  while (done < n && done < 1000 && (done == 0 || spent < LONGEST_S)) {
    seconds[done] = time_calls(run, ctx, n_calls);
    spent += seconds[done++] * n_calls;
  }
  return td_median(seconds, done);
}

td_bench_time td_bench_measure(td_bench_report *r, void (*run)(void *ctx), void *ctx) {
  double before = td_read_speed_gbps(&r->reads);
  td_bench_time time = {.seconds = median_time(run, ctx, (uint32_t)r->options->repeat)};
  time.read_gbps = fmax(before, td_read_speed_gbps(&r->reads));
  return time;
}

td_status td_bench_need_memory(double bytes, const char *what, td_err *err) {
  double available = (double)td_memory_available_bytes();
  if (bytes < available * 0.9) return TD_OK;
  return td_fail(err, TD_ENOMEM,
                 "%s: %.1f GB of matrices, and %.1f GB are available; give fewer with --n-weights, "
                 "or a narrower --format",
                 what, bytes * 1e-9, available * 1e-9);
}

// ---- limits ---------------------------------------------------------------------------------

double td_bench_peak(const td_bench_speed *speed) {
  return speed->peaks.dot_gflops > 0 ? speed->peaks.dot_gflops : speed->peaks.fma_gflops;
}

td_status td_bench_report_use(td_bench_report *r, const td_bench_speed *speed, td_err *err) {
  if (r->reads.pool && td_thread_pool_size(r->reads.pool) == speed->n_threads) return TD_OK;
  td_read_speed_close(&r->reads);
  return td_read_speed_open(&r->reads, speed->n_threads, err);
}

static td_status add_speed(td_bench_report *r, unsigned n_threads, td_err *err) {
  if (n_threads == 0) n_threads = td_cpu_count();
  for (uint32_t i = 0; i < r->n_speeds; i++)
    if (r->speeds[i].n_threads == n_threads) return TD_OK;
  if (r->n_speeds == TD_BENCH_MAX_SPEEDS)
    return td_fail(err, TD_EINVAL, "--threads: at most %d numbers", TD_BENCH_MAX_SPEEDS);
  td_bench_speed *speed = &r->speeds[r->n_speeds++];
  *speed = (td_bench_speed){.n_threads = n_threads};
  td_status st = td_bench_report_use(r, speed, err);
  if (st != TD_OK) return st;
  for (int i = 0; i < N_ROUNDS; i++)
    speed->read_gbps = fmax(speed->read_gbps, td_read_speed_gbps(&r->reads));
  td_peaks_measure(&speed->peaks, r->reads.pool);
  return TD_OK;
}

// ---- printing -------------------------------------------------------------------------------

static void machine_json(td_bench_report *r) {
  td_json_writer *w = &r->json;
  td_jw_add(w, "{'machine': {'cpu': %s, 'kernel': %s, 'memory_bytes': %lu, 'limits': [",
            r->machine.cpu, r->machine.kernel, r->machine.memory_bytes);
  for (uint32_t i = 0; i < r->n_speeds; i++) {
    const td_bench_speed *s = &r->speeds[i];
    td_jw_add(w, "{'threads': %u, 'read_gbps': %g, 'fma_gflops': %g, 'dot_gflops': %g}",
              s->n_threads, s->read_gbps, s->peaks.fma_gflops, s->peaks.dot_gflops);
  }
  td_jw_add(w, "]}}");
}

static void print_line(td_bench_report *r) {
  r->is_cut |= !td_jw_print_line(&r->json, stdout);
}

static void print_head(const td_bench_report *r) {
  printf("%s\n", r->machine.cpu);
  for (uint32_t i = 0; i < r->n_speeds; i++) {
    const td_bench_speed *s = &r->speeds[i];
    printf("%u threads: reads %.1f GB/s, FP32 FMA %.0f GFLOP/s, BF16 dot products %.0f GFLOP/s\n",
           s->n_threads, s->read_gbps, s->peaks.fma_gflops, s->peaks.dot_gflops);
  }
  printf("%-15s %-10s %-12s %6s %6s %6s %8s %10s %8s %8s %7s %8s %7s\n", "kernel", "variant",
         "format", "rows", "cols", "batch", "threads", "ms", "GB/s", "of reads", "share", "GFLOP/s",
         "share");
  fflush(stdout);
}

td_status td_bench_report_open(td_bench_report *r, const td_options *options, td_err *err) {
  *r = (td_bench_report){.options = options, .machine = td_machine_get(), .text = TD_BUF_INIT};
  r->json = TD_JSON_WRITER(&r->text);
  const td_int_list *threads = &options->bench_threads;
  td_status st = TD_OK;
  for (uint32_t i = 0; i < threads->n && st == TD_OK; i++)
    st = add_speed(r, (unsigned)threads->values[i], err);
  if (st != TD_OK) return st;
  if (!options->json) {
    print_head(r);
    return TD_OK;
  }
  machine_json(r);
  print_line(r);
  return TD_OK;
}

static void nodes_json(td_json_writer *w, const td_bench_nodes *nodes) {
  td_jw_begin_array(w, "nodes");
  for (unsigned k = 0; k < nodes->n; k++) {
    td_jw_add(w, "{'local_bytes': %g, 'remote_bytes': %g}", nodes->local_bytes[k],
              nodes->remote_bytes[k]);
  }
  td_jw_end_array(w);
  if (nodes->speedup > 0) td_jw_double(w, "over_one_node", nodes->speedup);
}

static void record_json(td_json_writer *w, const td_bench_record *x, double gbps, double gflops) {
  td_jw_add(w,
            "{'kernel': %s, 'variant': %s, 'format': %s, 'rows': %u, 'cols': %u, 'batch': %u, "
            "'threads': %u, 'ms': %g",
            x->kernel, x->variant, x->format->name, x->rows, x->cols, x->batch, x->speed->n_threads,
            x->time.seconds * 1e3);
  td_jw_add(w, "'gbps': %g, 'gflops': %g, 'read_gbps': %g, 'share_of_read_bandwidth': %g", gbps,
            gflops, x->time.read_gbps, gbps / x->time.read_gbps);
  double peak = td_bench_peak(x->speed);
  td_jw_double(w, "share_of_peak", peak > 0 ? gflops / peak : NAN);
  if (x->nodes) nodes_json(w, x->nodes);
  td_jw_end_object(w);
}

static void print_nodes(const td_bench_nodes *nodes) {
  for (unsigned k = 0; k < nodes->n; k++) {
    printf("  node %u reads %.2f MB of its own memory, %.2f MB of others'%s", k,
           nodes->local_bytes[k] * 1e-6, nodes->remote_bytes[k] * 1e-6,
           k + 1 < nodes->n ? "\n" : "");
  }
  if (nodes->speedup > 0) printf("; %.2f times as fast as one node alone", nodes->speedup);
  printf("\n");
}

void td_bench_report_add(td_bench_report *r, const td_bench_record *x) {
  double gbps = x->bytes / x->time.seconds * 1e-9, gflops = x->flops / x->time.seconds * 1e-9;
  if (r->options->json) {
    record_json(&r->json, x, gbps, gflops);
    print_line(r);
    return;
  }
  double peak = td_bench_peak(x->speed);
  printf("%-15s %-10s %-12s %6u %6u %6u %8u %10.3f %8.2f %8.2f %7.2f %8.1f %7.2f\n", x->kernel,
         x->variant, x->format->name, x->rows, x->cols, x->batch, x->speed->n_threads,
         x->time.seconds * 1e3, gbps, x->time.read_gbps, gbps / x->time.read_gbps, gflops,
         peak > 0 ? gflops / peak : 0);
  if (x->nodes) print_nodes(x->nodes);
  fflush(stdout);
}

td_status td_bench_each_case(td_bench_report *r, td_bench_case run, void *ctx, td_err *err) {
  size_t n;
  const td_kernel_variant *variants = td_kernel_variants(&n);
  const td_int_list *batches = &r->options->bench_batches;
  for (uint32_t s = 0; s < r->n_speeds; s++) {
    td_status st = td_bench_report_use(r, &r->speeds[s], err);
    if (st != TD_OK) return st;
    for (size_t i = 0; i < n; i++) {
      if (!td_kernel_variant_runs(&variants[i])) continue;
      for (uint32_t j = 0; j < batches->n; j++)
        run(ctx, &r->speeds[s], &variants[i], (uint32_t)batches->values[j]);
    }
  }
  return TD_OK;
}

uint32_t td_bench_largest_batch(const td_options *o) {
  uint32_t largest = 1;
  for (uint32_t i = 0; i < o->bench_batches.n; i++)
    if ((uint32_t)o->bench_batches.values[i] > largest)
      largest = (uint32_t)o->bench_batches.values[i];
  return largest;
}

td_status td_bench_report_close(td_bench_report *r, td_status st, td_err *err) {
  td_buf_free(&r->text);
  td_read_speed_close(&r->reads);
  if (st != TD_OK || !r->is_cut) return st;
  return td_fail(err, TD_EINTERNAL, "results cannot be written to stdout");
}
