// src/model/checkpoint/numa_layout.h - which pages of a checkpoint in memory belong to which NUMA
// node.
#ifndef TD_MODEL_CHECKPOINT_NUMA_LAYOUT_H
#define TD_MODEL_CHECKPOINT_NUMA_LAYOUT_H

#include "base/numa.h"
#include "model/checkpoint/store.h"

typedef struct {
  uint64_t begin, end; // bytes, multiples of the page size; may be empty
} td_page_range;

// Splits the pages of a matrix of n_bytes in n_rows, which begins at byte `at`, over n_nodes:
// consecutive ranges without gaps. A page shared by two nodes goes to the one with more of it. The
// first and last page are included only if the matrix fills them.
void td_place_rows(td_page_range out[TD_MAX_NODES], unsigned n_nodes, uint64_t at, uint64_t n_bytes,
                   uint64_t n_rows, uint64_t page_bytes);

// Whether the tensor should be split by td_place_rows. False if it is not a row-major matrix or too
// small.
bool td_place_is_cut(const td_tensor *tensor, unsigned n_nodes, uint64_t page_bytes);

#endif
