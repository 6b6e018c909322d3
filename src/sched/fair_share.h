// src/sched/fair_share.h - service counters per tenant (an API key), for weighted fair scheduling.
// Thread: the scheduler's.
//
// Each tenant has a counter of the tokens computed for it, divided by its weight. Of the tenants
// with waiting requests, the one with the lowest counter goes next (virtual token counters: Sheng
// et al., "Fairness in Serving Large Language Models", OSDI '24). A tenant that becomes active is
// raised to the lowest counter among the active tenants, so that being idle earns no credit; a
// higher counter is kept. Tenants that always have requests waiting are therefore served in
// proportion to their weights, up to one request each.
#pragma once

#include <stdint.h>

#include "base/status.h"

typedef struct {
  uint64_t id;
  uint64_t served; // cost / weight, in 1/TD_FAIR_UNIT
  uint64_t came;   // order of becoming active; breaks ties, lower first
  uint32_t weight;
  uint32_t n_waiting, n_running; // requests; a tenant with neither is idle
} td_tenant;

typedef struct {
  td_tenant *tenants; // [n_most], the first n are in use
  uint32_t n, n_most;
  uint64_t level; // counter of a tenant that becomes active while all are idle
  uint64_t n_came;
} td_fair_share_share;

#define TD_FAIR_UNIT 65536u

// For at most n_present active tenants. On error *out is closed. TD_ENOMEM.
td_status td_fair_share_open(td_fair_share_share *out, uint32_t n_present, td_err *err);
void td_fair_share_close(td_fair_share_share *fair); // closing a zeroed one is legal

// Index of the tenant; makes it active if it was idle. Valid until the next join, and for an active
// tenant until it is idle. weight 0 means 1.
uint32_t td_fair_share_join(td_fair_share_share *fair, uint64_t id, uint32_t weight);
// Call after a request of the tenant was removed: the tenant may now be idle.
void td_fair_share_leave(td_fair_share_share *fair, uint32_t idx);
void td_fair_share_charge(td_fair_share_share *fair, uint32_t idx, uint64_t cost);
// NULL: not active.
const td_tenant *td_fair_share_find(const td_fair_share_share *fair, uint64_t id);
