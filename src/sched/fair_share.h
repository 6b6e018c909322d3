// src/sched/fair_share.h - how much each tenant (an API key) was served, and whose turn it is.
//
// Every tenant has a counter of what was computed for it, divided by its weight; who has waiting
// requests and the least goes next (virtual token counters: Sheng et al., "Fairness in Serving
// Large Language Models", OSDI '24). One that comes, or comes back, begins level with the least
// of those that are there: being away earns no credit. What it had in excess stays noted. So two
// tenants that always have requests waiting are served in proportion to their weights, but for one
// request each.
#ifndef TD_SCHED_FAIR_SHARE_H
#define TD_SCHED_FAIR_SHARE_H

#include <stdint.h>

#include "base/status.h"

typedef struct {
  uint64_t id;
  uint64_t served; // cost over weight, in 1/TD_FAIR_UNIT
  uint64_t came;   // in order: who came first goes before others that were served as much
  uint32_t weight;
  uint32_t n_waiting, n_running; // requests; a tenant without any is away
} td_tenant;

typedef struct {
  td_tenant *tenants; // [n_most], the first n are known
  uint32_t n, n_most;
  uint64_t level; // where one begins that finds nobody
  uint64_t n_came;
} td_fair_share_share;

#define TD_FAIR_UNIT 65536u

// For at most n_present tenants at a time. On error *out is closed. TD_ENOMEM.
td_status td_fair_share_open(td_fair_share_share *out, uint32_t n_present, td_err *err);
void td_fair_share_close(td_fair_share_share *fair); // closing a zeroed one is legal

// Index of the tenant, which comes now if it was away; valid until the next call of this, longer
// for those that are there. weight 0 is 1.
uint32_t td_fair_share_join(td_fair_share_share *fair, uint64_t id, uint32_t weight);
// A request of it has ended or was counted out: it may be away now.
void td_fair_share_leave(td_fair_share_share *fair, uint32_t idx);
void td_fair_share_charge(td_fair_share_share *fair, uint32_t idx, uint64_t cost);
// NULL: it is away.
const td_tenant *td_fair_share_find(const td_fair_share_share *fair, uint64_t id);

#endif
