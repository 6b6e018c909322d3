// src/base/team.h - a team of threads that run one function together.
// The caller of td_team_run is member 0, so a team of one starts no thread. Several threads may
// call: runs are serialized. Members spin briefly for the next run, then sleep. A team may be told
// to work with fewer members for a while; the others sleep.
#ifndef TD_BASE_TEAM_H
#define TD_BASE_TEAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/nodes.h"
#include "base/status.h"

typedef struct td_team td_team;

typedef struct {
  unsigned n_threads;    // 0: one for each CPU this process may use
  bool pin;              // bind member i to the i-th of those CPUs
  const td_nodes *nodes; // keep members on them, in turn (td_team_node); NULL: anywhere
} td_team_opts;

// On success the caller owns *out; on error *out is NULL.
td_status td_team_open(td_team **out, const td_team_opts *opts, td_err *err);
void td_team_close(td_team *team);
unsigned td_team_size(const td_team *team);
// Which of n_nodes a member is on. However few are active, they are spread evenly.
static inline unsigned td_team_node(unsigned member, unsigned n_nodes) {
  return member % n_nodes;
}
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

// CPUs this process may use (its affinity mask).
unsigned td_cpu_count(void);

#endif
