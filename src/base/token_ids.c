// src/base/token_ids.c - a growable array of token ids.
#include "base/token_ids.h"

#include <stdlib.h>
#include <string.h>

#include "base/grow.h"

void td_token_ids_free(td_token_ids *ids) {
  free(ids->ids);
  *ids = (td_token_ids){0};
}

td_status td_token_ids_reserve(td_token_ids *ids, size_t n_extra, td_err *err) {
  if (n_extra <= ids->cap - ids->n) return TD_OK;
  if (n_extra > SIZE_MAX - ids->n ||
      !td_grow(&ids->ids, &ids->cap, ids->n + n_extra, 64, sizeof *ids->ids))
    return td_fail(err, TD_ENOMEM, "out of memory for %zu more token ids", n_extra);
  return TD_OK;
}

td_status td_token_ids_push(td_token_ids *ids, int32_t id, td_err *err) {
  return td_token_ids_add(ids, &id, 1, err);
}

td_status td_token_ids_add(td_token_ids *ids, const int32_t *more, size_t n, td_err *err) {
  if (!n) return TD_OK;
  td_status st = td_token_ids_reserve(ids, n, err);
  if (st != TD_OK) return st;
  memcpy(ids->ids + ids->n, more, n * sizeof *more);
  ids->n += n;
  return TD_OK;
}
