// src/bench/mem_bandwidth.h - how fast this machine reads memory just now. Where neighbours share
// it that can change by half within minutes: a share of it means something beside a measurement of
// it alone.
#ifndef TD_BENCH_MEM_BANDWIDTH_H
#define TD_BENCH_MEM_BANDWIDTH_H

#include <stdint.h>

#include "base/thread_pool.h"

typedef struct {
  td_pool *pool; // pinned; for the measurements beside, too
  uint64_t *words;
} td_read_speed;

// Takes a buffer far larger than the caches, and n_threads threads (0: one for each CPU), until
// close, which may be called in every case. TD_ENOMEM.
td_status td_read_speed_open(td_read_speed *out, unsigned n_threads, td_err *err);
void td_read_speed_close(td_read_speed *speed);
// All threads reading, 10^9 bytes a second, the best of a few passes; in a tenth of a second where
// that is time for two.
double td_read_speed_gbps(td_read_speed *speed);

#endif
