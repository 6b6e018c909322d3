// src/base/thread_pool.h - a pool of threads that run one function together.
// The caller of td_pool_run is member 0, so a pool of one starts no thread. Several threads may
// call: runs are serialized. Members spin for the next run, then sleep. A pool may be told
// to work with fewer members for a while; the others sleep.
#ifndef TD_BASE_THREAD_POOL_H
#define TD_BASE_THREAD_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/cpus.h"
#include "base/status.h"

typedef struct td_pool td_pool;

typedef struct {
  unsigned n_threads; // 0: td_cpu_count()
  // Keep each member on a CPU of its own, where td_cpus_place has one for it.
  bool pin;
  bool from_end;         // in its reverse order: another pool with as many members has the first
  const td_nodes *nodes; // members are spread over them (td_pool_node); NULL: anywhere
} td_pool_opts;

// On success the caller owns *out; on error *out is NULL.
td_status td_pool_open(td_pool **out, const td_pool_opts *opts, td_err *err);
void td_pool_close(td_pool *pool);
unsigned td_pool_size(const td_pool *pool);
// Which node a member is on. However few are active, they are spread evenly.
unsigned td_pool_node(const td_pool *pool, unsigned member);
// How many members before it are on its node.
unsigned td_pool_rank(const td_pool *pool, unsigned member);
// Keeps the calling thread where member 0 belongs, until td_pool_unpin_caller, for which *before
// remembers where it could run. A thread started in between is kept there, too.
void td_pool_pin_caller(const td_pool *pool, cpu_set_t *before);
void td_pool_unpin_caller(const cpu_set_t *before);
// From the next run on, only the first *n_active members take part (at most all; 0: all), as it
// says when a run begins. Borrowed; any thread may write to it, and any process that shares it.
void td_pool_set_limit(td_pool *pool, const _Atomic uint32_t *n_active);

// Calls fn(ctx, member, n_members) once on every active member and returns when all have returned.
void td_pool_run(td_pool *pool, void (*fn)(void *ctx, unsigned member, unsigned n_members),
                 void *ctx);

// Calls fn(ctx, begin, end) over [0, n_items) in pieces of at most grain items, handed out to
// whichever member is free; returns when all are done. Runs inline when one piece is all.
void td_pool_for(td_pool *pool, size_t n_items, size_t grain,
                 void (*fn)(void *ctx, size_t begin, size_t end), void *ctx);

#endif
