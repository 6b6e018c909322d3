// src/base/budget.c - what the exhaustion of a budget means.
#include "base/budget.h"

td_status td_budget_fail(const td_budget *budget, td_err *err) {
  switch (budget->status) {
  case TD_OK: return TD_OK;
  case TD_ENOMEM: return td_fail(err, TD_ENOMEM, "out of memory");
  case TD_ECANCELED: return td_fail(err, TD_ECANCELED, "the client has left");
  default:
    return td_fail(err, TD_ELIMIT,
                   "too large or nested too deep: use fewer parts, or smaller lengths, counts and "
                   "repetitions");
  }
}
