// src/engine/expert_slots.h - how experts that stream are packed into the slots of a ring: how many
// share one, where each matrix lies in it, and with how few copies it is filled. Pure functions.
#ifndef TD_ENGINE_EXPERT_SLOTS_H
#define TD_ENGINE_EXPERT_SLOTS_H

#include <stddef.h>
#include <stdint.h>

enum {
  TD_SLOT_ALIGN = 256,         // of each part in a slot, see td_dev_supports_device_weights
  TD_SLOT_MAX_GAP = 256 << 10, // bytes between two parts that cost less than another copy
  TD_SLOT_GAPS = 16,           // all gaps of a slot are at most this part of its content
  TD_SLOT_LEAST = 4,           // slots a ring should have: computed, filled, and some ahead
};
#define TD_SLOT_MOST_BYTES ((uint64_t)512 << 20) // some 10 ms of copying

// Experts that share a slot of a ring of ring_bytes; 0: the ring does not hold two slots of one.
uint32_t td_slot_experts(uint64_t ring_bytes, uint64_t expert_bytes, uint32_t n_experts);

// Data, scales or zero points of a matrix. Absent ones have no bytes.
typedef struct {
  const void *from;
  size_t n_bytes;
  size_t to; // in the slot
} td_slot_part;

typedef struct {
  const void *from;
  size_t to, n_bytes;
} td_slot_copy;

typedef struct {
  td_slot_part *parts;  // [n_parts]
  td_slot_part **order; // [n_parts], scratch
  td_slot_copy *copies; // [n_copies] when packed; room for n_parts
  uint32_t n_parts, n_copies;
  const void *memory; // [memory_bytes] that may be read from end to end
  size_t memory_bytes;
} td_slot;

// Chooses where the parts lie and what is copied, and returns the bytes of the slot. Neighbours in
// host memory share a copy and stay as far from one another as they are, where that suits
// TD_SLOT_ALIGN. Gaps between them are copied along, but only inside memory.
size_t td_slot_pack(td_slot *slot);

#endif
