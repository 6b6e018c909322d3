// src/sched/fair_share.c - the table of tenants and their counters.
#include "sched/fair_share.h"

#include <stdlib.h>

td_status td_fair_share_open(td_fair_share_share *out, uint32_t n_present, td_err *err) {
  size_t n = 2 * (size_t)n_present; // room to remember as many idle tenants
  *out = (td_fair_share_share){.tenants = calloc(n, sizeof(td_tenant)), .n_max = (uint32_t)n};
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
  for (uint32_t i = 0; i < fair->n; i++)
    if (fair->tenants[i].id == id && is_there(&fair->tenants[i])) return &fair->tenants[i];
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
  uint32_t i = fair->n < fair->n_max ? fair->n++ : least;
  TD_CHECK(i != UINT32_MAX);
  if (fair->last == &fair->tenants[i]) fair->last = NULL;
  fair->tenants[i] = (td_tenant){.id = id};
  return i;
}

static bool has_prompts(const td_tenant *t) {
  return t->n_waiting + t->n_prefills > 0;
}

uint32_t td_fair_share_join(td_fair_share_share *fair, uint64_t id, uint32_t weight) {
  uint32_t i = place_of(fair, id);
  td_tenant *t = &fair->tenants[i];
  t->weight = weight ? weight : 1;
  if (!is_there(t)) t->came = ++fair->n_came;
  return i;
}

void td_fair_share_raise(td_fair_share_share *fair, td_tenant *tenant) {
  const td_tenant *least = NULL;
  if (has_prompts(tenant)) return;
  for (uint32_t i = 0; i < fair->n; i++) {
    const td_tenant *t = &fair->tenants[i];
    if (!has_prompts(t)) continue;
    const bool is_better = !least ||
                           (t->is_new == least->is_new ? t->served < least->served : least->is_new);
    if (is_better) least = t;
  }
  const uint64_t level = least ? least->served : fair->top;
  if (tenant->served < level) tenant->served = level;
  tenant->is_new = true;
}

void td_fair_share_charge(td_fair_share_share *fair, td_tenant *tenant, uint64_t cost,
                          bool is_prompt) {
  tenant->served += cost * TD_FAIR_UNIT / tenant->weight;
  if (fair->top < tenant->served) fair->top = tenant->served;
  if (!is_prompt) return;
  tenant->is_new = false;
  fair->last = tenant;
}

bool td_fair_share_is_before(const td_fair_share_share *fair, const td_tenant *x,
                             const td_tenant *y) {
  if (x->served != y->served) return x->served < y->served;
  if (x == fair->last || y == fair->last) return x != fair->last;
  return x->n_running != y->n_running ? x->n_running < y->n_running : x->came < y->came;
}
