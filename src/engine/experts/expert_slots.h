// src/engine/experts/expert_slots.h - packs streamed experts into the slots of a ring: how many
// share a slot, where each matrix lies in it, and which copies fill it; and how one expert lies in
// a slot of the cache. Pure functions.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "model/model.h"

enum {
  TD_SLOT_ALIGN = 256, // alignment of each part in a slot, see td_dev_supports_device_weights
  TD_SLOT_MAX_GAP = 256 << 10, // bytes; copying a gap up to this is cheaper than another copy
  TD_SLOT_GAPS = 16,           // the gaps of a slot are at most 1/16 of its content
  TD_SLOT_MIN = 4,             // desired slots per ring: one computing, one filling, some ahead
};
#define TD_SLOT_MAX_BYTES ((uint64_t)512 << 20) // about 10 ms of copying

// Experts per slot for a ring of ring_bytes; 0: the ring cannot hold two slots of one expert.
uint32_t td_slot_experts(uint64_t ring_bytes, uint64_t expert_bytes, uint32_t n_experts);

// Data, scales or zero points of a matrix; n_bytes is 0 for absent ones.
typedef struct {
  const void *from;
  size_t n_bytes;
  size_t to; // offset in the slot
} td_slot_part;

enum { TD_SLOT_MATRIX_PARTS = 3, TD_SLOT_EXPERT_PARTS = 3 * TD_SLOT_MATRIX_PARTS };
// The parts of a matrix; `to` is 0.
void td_slot_list_matrix(td_slot_part parts[TD_SLOT_MATRIX_PARTS], const td_weight *w);
// The parts of gate, up and down, likewise.
void td_slot_list_expert(td_slot_part parts[TD_SLOT_EXPERT_PARTS], const td_layer *layer,
                         uint32_t expert);
// The matrix with its three parts in the slot that begins at base.
td_weight td_slot_placed(const td_weight *w, const td_slot_part *parts, const char *base);
// Offsets that depend on the parts' sizes alone, and the slot's size in bytes: slots so filled can
// take any expert of these sizes.
size_t td_slot_lay_out(td_slot_part *parts, uint32_t n_parts);

typedef struct {
  const void *from;
  size_t to, n_bytes;
} td_slot_copy;

typedef struct {
  td_slot_part *parts;  // [n_parts]
  td_slot_part **order; // [n_parts], scratch
  td_slot_copy *copies; // [n_copies] when packed; room for n_parts
  uint32_t n_parts, n_copies;
  const void *memory; // [memory_bytes] readable in full, gaps included
  size_t memory_bytes;
} td_slot;

// Chooses the parts' offsets and the copies, and returns the slot's size in bytes. Parts that are
// neighbours in host memory share a copy and keep their distance where it is a multiple of
// TD_SLOT_ALIGN. Gaps between them are copied too, but only inside memory.
size_t td_slot_pack(td_slot *slot);
// The same with a copy for each part, in order: part i is copied by copies[i], from elsewhere if
// the caller so chooses.
size_t td_slot_pack_apart(td_slot *slot);
