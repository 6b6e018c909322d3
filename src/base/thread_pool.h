// src/base/thread_pool.h - a pool of threads that run one function together.
// The caller of td_thread_pool_run is member 0, so a pool of one starts no thread. Several threads
// may call it; runs are serialized. Members spin while waiting for the next run, then sleep. The
// number of active members can be limited at any time; the others sleep.
//
// Steps use this rather than OpenMP, which serves loops over data outside of steps:
// * A section costs less. Medians of tests/tools/handover with 2 threads on 2 CPUs (Xeon, gcc 12,
//   2026-11-26): 0.5 to 0.8 us here, 1.0 to 1.3 us with libgomp, back to back or after 0.2 ms of
//   work by one thread; a step has hundreds. After 1 ms members sleep here and libgomp's still
//   spin: 9 to 10 us against 1.5. With other processes on the same CPUs: after 1 ms 1.3 ms here, 19
//   ms with libgomp; after 0.2 ms 1.4 to 1.7 ms here, 1.3 us with libgomp.
// * Another process changes the number of active members while a step runs.
// * ThreadSanitizer sees how members synchronize, libgomp's it does not.
// * A thread that cannot be started is an error here; libgomp ends the process.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/cpus.h"
#include "base/status.h"

typedef struct td_thread_pool td_thread_pool;

typedef struct {
  unsigned n_threads; // 0: td_cpu_count()
  // Pin each member to a CPU of its own if td_cpus_place assigns one.
  bool pin;
  bool from_end;         // in reverse order, beside another pool of the same size
  const td_nodes *nodes; // spread members over these (td_thread_pool_node); NULL: no preference
} td_thread_pool_opts;

// On success the caller owns *out; on error *out is NULL.
td_status td_thread_pool_open(td_thread_pool **out, const td_thread_pool_opts *opts, td_err *err);
void td_thread_pool_close(td_thread_pool *pool);
unsigned td_thread_pool_size(const td_thread_pool *pool);
// Index of the node that a member is on. Any number of active members is spread evenly.
unsigned td_thread_pool_node(const td_thread_pool *pool, unsigned member);
// Number of lower-numbered members on the member's node.
unsigned td_thread_pool_rank(const td_thread_pool *pool, unsigned member);
// Pins the calling thread to member 0's CPU until td_thread_pool_unpin_caller. *before receives the
// previous affinity. Threads started in between inherit the pinning.
void td_thread_pool_pin_caller(const td_thread_pool *pool, cpu_set_t *before);
void td_thread_pool_unpin_caller(const cpu_set_t *before);
// From the next run on, only the first *n_active members take part (at most all; 0: all). The value
// is read when a run begins. Borrowed; any thread, and any process that shares the memory, may
// write it.
void td_thread_pool_set_limit(td_thread_pool *pool, const _Atomic uint32_t *n_active);

// Calls fn(ctx, member, n_members) once on every active member; returns when all calls have
// returned.
void td_thread_pool_run(td_thread_pool *pool,
                        void (*fn)(void *ctx, unsigned member, unsigned n_members), void *ctx);
