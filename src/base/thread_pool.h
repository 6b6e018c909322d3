// src/base/thread_pool.h - a team of threads that run one function together.
// The caller of td_team_run is member 0, so a team of one starts no thread. Several threads may
// call: runs are serialized. Members spin for the next run, then sleep. A team may be told
// to work with fewer members for a while; the others sleep.
#ifndef TD_BASE_THREAD_POOL_H
#define TD_BASE_THREAD_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/cpus.h"
#include "base/status.h"

typedef struct td_team td_team;

typedef struct {
  unsigned n_threads; // 0: td_cpu_count()
  // Keep each member on a CPU of its own, where td_cpus_place has one for it.
  bool pin;
  bool from_end;         // in its reverse order: another team with as many members has the first
  const td_nodes *nodes; // members are spread over them (td_team_node); NULL: anywhere
} td_team_opts;

// On success the caller owns *out; on error *out is NULL.
td_status td_team_open(td_team **out, const td_team_opts *opts, td_err *err);
void td_team_close(td_team *team);
unsigned td_team_size(const td_team *team);
// Which node a member is on. However few are active, they are spread evenly.
unsigned td_team_node(const td_team *team, unsigned member);
// How many members before it are on its node.
unsigned td_team_rank(const td_team *team, unsigned member);
// Keeps the calling thread where member 0 belongs, until td_team_stand, for which *before
// remembers where it could run. A thread started in between is kept there, too.
void td_team_sit(const td_team *team, cpu_set_t *before);
void td_team_stand(const cpu_set_t *before);
// From the next run on, only the first *n_active members take part (at most all; 0: all), as it
// says when a run begins. Borrowed; any thread may write to it, and any process that shares it.
void td_team_follow(td_team *team, const _Atomic uint32_t *n_active);

// Calls fn(ctx, member, n_members) once on every active member and returns when all have returned.
void td_team_run(td_team *team, void (*fn)(void *ctx, unsigned member, unsigned n_members),
                 void *ctx);

// Calls fn(ctx, begin, end) over [0, n_items) in pieces of at most grain items, handed out to
// whichever member is free; returns when all are done. Runs inline when one piece is all.
void td_team_for(td_team *team, size_t n_items, size_t grain,
                 void (*fn)(void *ctx, size_t begin, size_t end), void *ctx);

#endif
