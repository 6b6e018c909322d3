// src/kv/plan.c - sizing the KV pool.
#include "kv/plan.h"

#include "base/units.h"

static uint32_t pages_of(const td_kv_need *need, uint64_t n_tokens) {
  const uint32_t page_tokens = td_kv_need_page_tokens(need);
  uint64_t n = (n_tokens + page_tokens - 1) / page_tokens;
  return n < INT32_MAX ? (uint32_t)n : INT32_MAX;
}

static uint64_t budget_bytes(const td_kv_need *need) {
  uint64_t available = need->available_bytes;
  uint64_t left = need->weight_bytes < available ? available - need->weight_bytes : 0;
  if (need->is_device) {
    uint64_t spare = left / 4 > TD_KV_DEVICE_SPARE ? left / 4 : TD_KV_DEVICE_SPARE;
    left = left > spare ? left - spare : 0;
    return need->host_bytes && need->host_bytes / 2 < left ? need->host_bytes / 2 : left;
  }
  return left > available / 2 ? left / 2 : available / 4;
}

// A pool of the requested size.
static td_status plan_given(td_kv_plan *out, const td_kv_need *need, uint32_t n_ctx, td_err *err) {
  if (!need->ctx_size && n_ctx > need->kv_tokens) n_ctx = need->kv_tokens;
  if (need->kv_tokens < n_ctx) {
    return td_fail(err, TD_EINVAL, "a KV pool of %u tokens does not hold one context of %u",
                   need->kv_tokens, n_ctx);
  }
  uint32_t n_pages = pages_of(need, need->kv_tokens);
  double n_bytes = (double)n_pages * (double)td_kv_need_page_bytes(need);
  uint64_t available = need->available_bytes;
  if (need->host_bytes && need->host_bytes < available) available = need->host_bytes;
  if (n_bytes > (double)available) {
    return td_fail(err, TD_ENOMEM,
                   "a KV pool of %u tokens takes %s, and %s of memory are available; "
                   "give a smaller --kv-cache-tokens",
                   need->kv_tokens, td_size(n_bytes).text, td_size(available).text);
  }
  *out = (td_kv_plan){.n_ctx = n_ctx, .n_pages = n_pages};
  return TD_OK;
}

td_status td_kv_plan_make(td_kv_plan *out, const td_kv_need *need, td_err *err) {
  if (need->ctx_size > need->max_position) {
    return td_fail(err, TD_EINVAL, "a context of %u tokens (--ctx-size); the model's longest is %u",
                   need->ctx_size, need->max_position);
  }
  uint32_t n_ctx = need->ctx_size ? need->ctx_size : need->max_position;
  if (!need->ctx_size && n_ctx > TD_KV_DEFAULT_CTX) n_ctx = TD_KV_DEFAULT_CTX;
  if (need->kv_tokens) return plan_given(out, need, n_ctx, err);
  const uint32_t page_tokens = td_kv_need_page_tokens(need);
  const uint64_t page_bytes = td_kv_need_page_bytes(need);
  uint64_t affordable = page_bytes ? budget_bytes(need) / page_bytes : UINT64_MAX;
  if (affordable < pages_of(need, n_ctx) && !need->ctx_size &&
      affordable * page_tokens >= TD_KV_SHORTEST_CTX)
    n_ctx = (uint32_t)affordable * page_tokens;
  if (affordable < pages_of(need, n_ctx)) {
    return td_fail(err, TD_ENOMEM,
                   "the KV cache of one context of %u tokens takes %s, and %s of memory "
                   "are to spare beside the weights; give a smaller --ctx-size",
                   n_ctx, td_size((double)pages_of(need, n_ctx) * (double)page_bytes).text,
                   td_size(budget_bytes(need)).text);
  }
  uint32_t n_pages = pages_of(need,
                              (uint64_t)pages_of(need, n_ctx) * page_tokens * need->max_batch);
  if (n_pages > affordable) n_pages = (uint32_t)affordable;
  *out = (td_kv_plan){.n_ctx = n_ctx, .n_pages = n_pages};
  return TD_OK;
}
