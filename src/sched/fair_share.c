// src/sched/fair_share.c - the table of tenants and their counters.
#include "sched/fair_share.h"

#include <stdbool.h>
#include <stdlib.h>

td_status td_fair_share_open(td_fair_share_share *out, uint32_t n_present, td_err *err) {
  size_t n = 2 * (size_t)n_present; // room to remember as many idle tenants
  *out = (td_fair_share_share){.tenants = calloc(n, sizeof(td_tenant)), .n_most = (uint32_t)n};
  return out->tenants ? TD_OK : td_fail(err, TD_ENOMEM, "out of memory for %zu tenants", n);
}

void td_fair_share_close(td_fair_share_share *fair) {
  free(fair->tenants);
  *fair = (td_fair_share_share){0};
}

static bool is_there(const td_tenant *t) {
  return t->n_waiting + t->n_running > 0;
}

const td_tenant *td_fair_share_find(const td_fair_share_share *fair, uint64_t id) {
  for (uint32_t i = 0; i < fair->n; i++) {
    if (fair->tenants[i].id == id && is_there(&fair->tenants[i])) return &fair->tenants[i];
  }
  return NULL;
}

// The tenant's slot: its own, a new one, or that of the idle tenant with the lowest counter.
static uint32_t place_of(td_fair_share_share *fair, uint64_t id) {
  uint32_t least = UINT32_MAX;
  for (uint32_t i = 0; i < fair->n; i++) {
    const td_tenant *t = &fair->tenants[i];
    if (t->id == id) return i;
    if (is_there(t)) continue;
    if (least == UINT32_MAX || t->served < fair->tenants[least].served) least = i;
  }
  uint32_t i = fair->n < fair->n_most ? fair->n++ : least;
  TD_CHECK(i != UINT32_MAX);
  fair->tenants[i] = (td_tenant){.id = id};
  return i;
}

static uint64_t level_now(const td_fair_share_share *fair) {
  uint64_t level = UINT64_MAX;
  for (uint32_t i = 0; i < fair->n; i++) {
    const td_tenant *t = &fair->tenants[i];
    if (is_there(t) && t->served < level) level = t->served;
  }
  return level == UINT64_MAX ? fair->level : level;
}

uint32_t td_fair_share_join(td_fair_share_share *fair, uint64_t id, uint32_t weight) {
  uint32_t i = place_of(fair, id);
  td_tenant *t = &fair->tenants[i];
  t->weight = weight ? weight : 1;
  if (is_there(t)) return i;
  uint64_t level = level_now(fair);
  if (t->served < level) t->served = level;
  t->came = ++fair->n_came;
  return i;
}

void td_fair_share_leave(td_fair_share_share *fair, uint32_t idx) {
  const td_tenant *t = &fair->tenants[idx];
  if (!is_there(t) && t->served > fair->level) fair->level = t->served;
}

void td_fair_share_charge(td_fair_share_share *fair, uint32_t idx, uint64_t cost) {
  fair->tenants[idx].served += cost * TD_FAIR_UNIT / fair->tenants[idx].weight;
}
