// src/sched/fair_share.h - service counters per tenant (an API key), for weighted fair scheduling.
// Thread: the scheduler's.
//
// Each tenant has a counter of the tokens computed for it, divided by its weight. Of the tenants
// with prompts to compute, waiting or in prefill, the one with the lowest counter goes next
// (virtual token counters: Sheng et al., "Fairness in Serving Large Language Models", OSDI '24).
//
// A tenant that begins to have some is raised to the lowest counter of the others, so that being
// without earns no credit; a higher counter is kept. Tenants that have not been served since they
// began do not count there: else a stream of new ones, each at the same level, would hold up all
// others. If nobody else has prompts, it is raised to the highest counter of all, so that what was
// computed while nobody else wanted anything is not a debt. Tenants that always have prompts are
// therefore served in proportion to their weights, up to a prefill chunk each.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

typedef struct {
  uint64_t id;
  uint64_t served; // cost / weight, in 1/TD_FAIR_UNIT
  uint64_t came;   // order of becoming active; breaks ties, lower first
  uint32_t weight;
  uint32_t n_waiting, n_running; // requests; a tenant with neither is idle
  uint32_t n_prefills;           // of those that run
  bool is_new;                   // none of its prompts' tokens were computed since it had none
} td_tenant;

typedef struct {
  td_tenant *tenants; // [n_max], the first n are in use
  uint32_t n, n_max;
  uint64_t top;          // the highest counter ever
  const td_tenant *last; // whose prompt was computed last; NULL: nobody's
  uint64_t n_came;
} td_fair_share_share;

#define TD_FAIR_UNIT 65536u

// For at most n_present active tenants. On error *out is closed. TD_ENOMEM.
td_status td_fair_share_open(td_fair_share_share *out, uint32_t n_present, td_err *err);
void td_fair_share_close(td_fair_share_share *fair); // closing a zeroed one is legal

// Index of the tenant; makes it active if it was idle. Valid until the next join, and for an active
// tenant until it is idle. weight 0 means 1.
uint32_t td_fair_share_join(td_fair_share_share *fair, uint64_t id, uint32_t weight);
// Call before a request of the tenant begins to wait.
void td_fair_share_raise(td_fair_share_share *fair, td_tenant *tenant);
// is_prompt: the cost is of its prompts' tokens.
void td_fair_share_charge(td_fair_share_share *fair, td_tenant *tenant, uint64_t cost,
                          bool is_prompt);
// Whether prompts of x go before those of y.
bool td_fair_share_is_before(const td_fair_share_share *fair, const td_tenant *x,
                             const td_tenant *y);
// NULL: not active.
const td_tenant *td_fair_share_find(const td_fair_share_share *fair, uint64_t id);
