// src/engine/dense_slots.h - which dense weights of a layer (all but its routed experts) can
// stream, in which parts, and how much memory the ring for them takes. Pure functions.
#pragma once

#include <stdint.h>

#include "engine/experts/expert_slots.h"
#include "model/model.h"

// In the order of use. The ring has one slot for each part: attention's weights of the next layer
// arrive while experts are computed, its MLP's during its attention.
typedef enum {
  TD_DENSE_ATTN, // projections of attention, or of a delta net
  TD_DENSE_MLP,  // the router and the shared expert, or a dense MLP
  TD_N_DENSE_PARTS
} td_dense_part;

enum {
  TD_DENSE_MAX_MATRICES = 24, // of a part
  TD_DENSE_MAX_PARTS = TD_DENSE_MAX_MATRICES * TD_SLOT_MATRIX_PARTS,
};

// The part's matrices that can stream, in *out; returns their number. The others stay on the
// device: vectors, and matrices that a device would have to lay out again.
uint32_t td_dense_matrices(td_layer *layer, td_dense_part part,
                           td_weight *out[TD_DENSE_MAX_MATRICES]);

// Lists the n matrices' parts for td_slot_pack; returns their number.
uint32_t td_dense_list(td_slot_part parts[TD_DENSE_MAX_PARTS], td_weight *const *matrices,
                       uint32_t n);

// Bytes of a layer's matrices that can stream, each of their parts rounded up to TD_SLOT_ALIGN.
typedef struct {
  uint64_t bytes[TD_N_DENSE_PARTS];
} td_dense_size;
td_dense_size td_dense_size_of(const td_layer *layer);

// Where the dense weights of the last n_streamed of n_layers stream: bytes of a part's slot, and of
// the ring, which is both slots.
uint64_t td_dense_slot_bytes(const td_dense_size *sizes, uint32_t n_layers, uint32_t n_streamed,
                             td_dense_part part);
uint64_t td_dense_ring_bytes(const td_dense_size *sizes, uint32_t n_layers, uint32_t n_streamed);
