// src/worker/prefill_budget.c - learning the prefill budget from step times.
#include "worker/prefill_budget.h"

#include <stdbool.h>

static uint32_t least(const td_prefill_budget *budget) {
  return budget->max_tokens < TD_PREFILL_BUDGET_MIN_TOKENS ? budget->max_tokens
                                                           : TD_PREFILL_BUDGET_MIN_TOKENS;
}

void td_prefill_budget_init(td_prefill_budget *out, uint32_t max_tokens) {
  *out = (td_prefill_budget){.max_tokens = max_tokens};
  out->budget_tokens = least(out);
}

static bool is_measured(const td_prefill_budget *budget, uint32_t n_decode) {
  return budget->decode_ns && budget->n_steps < TD_PREFILL_BUDGET_STEPS &&
         n_decode < 2 * budget->n_decode && budget->n_decode < 2 * n_decode;
}

uint32_t td_prefill_budget_tokens(const td_prefill_budget *budget, uint32_t n_decode) {
  if (!n_decode) return budget->max_tokens;
  return is_measured(budget, n_decode) ? budget->budget_tokens : 0;
}

void td_prefill_budget_note(td_prefill_budget *budget, uint32_t n_decode, uint32_t n_prefilled,
                            uint64_t ns) {
  // A shorter time replaces the old one at once; a longer one is averaged in, so that a single
  // delayed step has little effect.
  if (n_decode && !n_prefilled) {
    bool is_like_last = budget->decode_ns && n_decode == budget->n_decode;
    bool is_more = is_like_last && ns > budget->decode_ns;
    budget->decode_ns = is_more ? budget->decode_ns + (ns - budget->decode_ns) / 4 : ns + !ns;
    budget->n_decode = n_decode;
    budget->n_steps = 0;
  }
  if (!n_decode || !n_prefilled || !budget->decode_ns) return;
  budget->n_steps++;
  double room_ns = (TD_PREFILL_BUDGET_STRETCH - 1) * (double)budget->decode_ns;
  double took_ns = ns > budget->decode_ns ? (double)(ns - budget->decode_ns) : 1;
  double budget_tokens = n_prefilled * room_ns / took_ns;
  if (n_prefilled < budget->budget_tokens && budget_tokens > n_prefilled)
    return; // too few prompt tokens to learn from
  if (budget_tokens > 2.0 * budget->budget_tokens) budget_tokens = 2.0 * budget->budget_tokens;
  if (budget_tokens > budget->max_tokens) budget_tokens = budget->max_tokens;
  budget->budget_tokens = budget_tokens > least(budget) ? (uint32_t)budget_tokens : least(budget);
}
