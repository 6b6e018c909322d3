// src/model/checkpoint/numa_layout.c - assigns pages of row-major matrices to NUMA nodes.
#include "model/checkpoint/numa_layout.h"

#include <string.h>

// AutoAWQ and AutoGPTQ store matrices column by column.
static bool is_transposed(const char *name) {
  static const char *const ends[] = {".qweight", ".qzeros"};
  size_t len = strlen(name);
  for (size_t i = 0; i < TD_COUNT(ends); i++) {
    size_t n = strlen(ends[i]);
    if (len >= n && strcmp(name + len - n, ends[i]) == 0) return true;
  }
  return false;
}

bool td_place_is_cut(const td_tensor *t, unsigned n_nodes, uint64_t page_bytes) {
  return n_nodes > 1 && t->n_dims == 2 && t->shape[0] >= n_nodes &&
         t->n_bytes >= 2 * n_nodes * page_bytes && !is_transposed(t->name);
}

static uint64_t nearest(uint64_t at, uint64_t unit) {
  return (at + unit / 2) / unit * unit;
}

void td_place_rows(td_page_range out[TD_MAX_NODES], unsigned n_nodes, uint64_t at, uint64_t n_bytes,
                   uint64_t n_rows, uint64_t page_bytes) {
  uint64_t row_bytes = n_bytes / n_rows;
  uint64_t first = (at + page_bytes - 1) / page_bytes * page_bytes;
  uint64_t last = (at + n_bytes) / page_bytes * page_bytes, begin = first;
  for (unsigned k = 0; k < n_nodes; k++) {
    uint64_t end = nearest(at + td_node_begin(n_rows, n_nodes, k + 1) * row_bytes, page_bytes);
    if (end > last || k + 1 == n_nodes) end = last;
    if (end < begin) end = begin;
    out[k] = (td_page_range){.begin = begin, .end = end};
    begin = end;
  }
}
