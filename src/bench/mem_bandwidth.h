// src/bench/mem_bandwidth.h - the machine's current memory read bandwidth. On shared hosts it
// varies within minutes, so a share of it is meaningful only relative to a measurement taken at the
// same time.
#pragma once

#include <stdint.h>

#include "base/thread_pool.h"

typedef struct {
  td_thread_pool *pool; // pinned; also for the benchmark itself
  uint64_t *words;
} td_read_speed;

// Allocates a buffer far larger than the caches and n_threads threads (0: one per CPU), released by
// close, which may be called in every case. TD_ENOMEM.
td_status td_read_speed_open(td_read_speed *out, unsigned n_threads, td_err *err);
void td_read_speed_close(td_read_speed *speed);
// Best of a few passes with all threads, in 10^9 bytes/s. Takes about 0.1 s, or longer if that is
// too short for two passes.
double td_read_speed_gbps(td_read_speed *speed);
// The same where every thread reads what lies on another NUMA node than its own. 0: all threads are
// on one.
double td_read_speed_remote_gbps(td_read_speed *speed);
