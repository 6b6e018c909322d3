// src/model/checkpoint/numa_layout.h - which pages of a checkpoint in memory belong to which NUMA
// node.
#ifndef TD_MODEL_CHECKPOINT_NUMA_LAYOUT_H
#define TD_MODEL_CHECKPOINT_NUMA_LAYOUT_H

#include "base/numa.h"
#include "model/checkpoint/store.h"

typedef struct {
  uint64_t begin, end; // bytes, multiples of the page's; may be empty
} td_page_range;

// Of a matrix of n_bytes in n_rows that begins at `at`: the pages of each of n_nodes, in order and
// without gaps. A page that two share belongs to the node that has more of it. The first and the
// last page of the matrix are in it only where the matrix fills them.
void td_place_rows(td_page_range out[TD_MAX_NODES], unsigned n_nodes, uint64_t at, uint64_t n_bytes,
                   uint64_t n_rows, uint64_t page_bytes);

// Of the tensor's rows, where they lie one after another, as whole: what td_place_rows is for.
// False: it is no such matrix, or too small to cut.
bool td_place_is_cut(const td_tensor *tensor, unsigned n_nodes, uint64_t page_bytes);

#endif
