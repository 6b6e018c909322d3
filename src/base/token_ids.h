// src/base/token_ids.h - a growable array of token ids.
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

typedef struct {
  int32_t *ids; // owned; NULL while empty
  size_t n, cap;
  size_t most;  // limit: beyond it a producer may count instead of adding; 0: none
  size_t n_cut; // counted beyond the limit
  // May be NULL. Once it is true, a producer stops soon and returns TD_ECANCELED.
  const atomic_bool *is_canceled;
} td_token_ids;

// Frees and zeroes; legal for a zeroed array.
void td_token_ids_free(td_token_ids *ids);
// Makes room for n_extra more. On TD_ENOMEM the array is unchanged.
td_status td_token_ids_reserve(td_token_ids *ids, size_t n_extra, td_err *err);
td_status td_token_ids_push(td_token_ids *ids, int32_t id, td_err *err);
td_status td_token_ids_add(td_token_ids *ids, const int32_t *more, size_t n, td_err *err);

static inline bool td_token_ids_is_canceled(const td_token_ids *ids) {
  return ids->is_canceled && atomic_load_explicit(ids->is_canceled, memory_order_relaxed);
}
