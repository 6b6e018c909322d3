// src/base/budget.h - what work on a client's input may cost: steps, memory, and the client's
// patience. It is taken before the work is done; once exhausted, nothing can be taken any more.
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct {
  uint64_t steps;                 // left; about 20 ns each
  size_t bytes;                   // left
  const atomic_bool *is_canceled; // borrowed, set by any thread; NULL: never
  td_status status;               // TD_OK; TD_ELIMIT: exhausted; TD_ECANCELED
} td_budget;

// False: exhausted or canceled.
static inline bool td_budget_step(td_budget *budget, uint64_t steps) {
  const atomic_bool *is_canceled = budget->is_canceled;
  if (is_canceled && atomic_load_explicit(is_canceled, memory_order_relaxed))
    budget->status = TD_ECANCELED;
  else if (budget->steps < steps && budget->status == TD_OK)
    budget->status = TD_ELIMIT;
  if (budget->status != TD_OK) return false;
  budget->steps -= steps;
  return true;
}

// The same for memory, which is not given back.
static inline bool td_budget_take(td_budget *budget, size_t bytes) {
  if (budget->bytes < bytes && budget->status == TD_OK) budget->status = TD_ELIMIT;
  if (budget->status != TD_OK) return false;
  budget->bytes -= bytes;
  return true;
}

// TD_OK, or fills err with what the exhaustion means to the client.
td_status td_budget_fail(const td_budget *budget, td_err *err);
