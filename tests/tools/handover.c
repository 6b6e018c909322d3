// tests/tools/handover.c - what a parallel section costs, by base/thread_pool.h and by OpenMP.
// usage: handover [THREADS]
// Prints medians in microseconds for sections without work: one after the other; after the caller
// worked alone for a while; and with a number of members that changes from section to section.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/stats.h"
#include "base/thread_pool.h"

enum { N = 2001 };

static unsigned n_threads;
static _Atomic uint32_t limit;
static td_thread_pool *pool;

static void nothing(void *ctx, unsigned member, unsigned n_members) {
  (void)ctx;
  (void)member;
  (void)n_members;
}

static void run_pool(unsigned n_members) {
  limit = n_members;
  td_thread_pool_run(pool, nothing, NULL);
}

static void run_openmp(unsigned n_members) {
#pragma omp parallel num_threads(n_members)
  nothing(NULL, 0, n_members);
}

// Median of N sections, in microseconds, each after gap_ns of the caller's own work.
static double measure(void (*run)(unsigned n_members), uint64_t gap_ns, int is_changing) {
  static double took_us[N];
  for (int i = 0; i < N; i++) {
    const uint64_t idle_ns = td_clock_ns();
    while (td_clock_ns() - idle_ns < gap_ns) {
    }
    const uint64_t start_ns = td_clock_ns();
    run(is_changing && i % 2 ? n_threads / 2 : n_threads);
    took_us[i] = (double)(td_clock_ns() - start_ns) * 1e-3;
  }
  return td_median(took_us, N);
}

int main(int argc, char **argv) {
  td_err err;
  n_threads = argc > 1 ? (unsigned)atoi(argv[1]) : td_cpu_count();
  if (n_threads < 2 ||
      td_thread_pool_open(&pool, &(td_thread_pool_opts){.n_threads = n_threads}, &err) != TD_OK) {
    fprintf(stderr, "usage: handover [THREADS], at least 2\n");
    return 2;
  }
  td_thread_pool_set_limit(pool, &limit);
  static const uint64_t gaps_us[] = {0, 20, 200, 1000};
  printf("%u threads; us a section       pool   OpenMP\n", n_threads);
  for (size_t i = 0; i < TD_COUNT(gaps_us); i++) {
    const double a = measure(run_pool, gaps_us[i] * 1000, 0);
    const double b = measure(run_openmp, gaps_us[i] * 1000, 0);
    printf("after %4d us of one thread %8.2f %8.2f\n", (int)gaps_us[i], a, b);
  }
  printf("members change             %8.2f %8.2f\n", measure(run_pool, 0, 1),
         measure(run_openmp, 0, 1));
  td_thread_pool_close(pool);
  return 0;
}
