// src/model/drive/places.h - where in a checkpoint's files the data of every routed expert lie, so
// that they can be read from the drive one by one, and how one expert lies in a slot of memory.
// Scales and zero points that are tensors of their own are no part of it: they stay in memory.
#pragma once

#include <stdbool.h>

#include "model/model.h"

enum {
  TD_EXPERT_PARTS = 3,   // gate, up and down
  TD_DRIVE_ALIGN = 4096, // of offsets, lengths and addresses; sufficient for any O_DIRECT
};

typedef struct {
  uint64_t offset, n_bytes; // in the shard; n_bytes 0: there is no such part
  uint64_t at;    // in the slot, with the offset's distance from a multiple of the alignment
  uint32_t shard; // td_store_shard
  // Codes that are stored by columns (model/convert.h): of the matrix; n_rows 0: they are not.
  uint32_t n_rows, n_cols;
  bool is_awq; // rather than GPTQ's
} td_expert_part;

// Turns the part's codes, as they were read, into rows. False: out of memory.
bool td_expert_part_turn(const td_expert_part *part, void *data);

// The whole units of TD_DRIVE_ALIGN that a part is in: the first one's offset, and their length.
static inline uint64_t td_expert_part_begin(const td_expert_part *p) {
  return p->offset - p->offset % TD_DRIVE_ALIGN;
}
static inline uint64_t td_expert_part_span(const td_expert_part *p) {
  const uint64_t end = p->offset + p->n_bytes + TD_DRIVE_ALIGN - 1;
  return end - end % TD_DRIVE_ALIGN - td_expert_part_begin(p);
}

typedef struct {
  uint32_t n_layers, n_experts;
  uint64_t slot_bytes;   // takes any expert
  uint64_t n_bytes;      // of all experts
  bool has_turned;       // some parts are codes by columns
  td_expert_part *parts; // [n_layers][n_experts][TD_EXPERT_PARTS]
} td_expert_places;

// Parts of an expert.
static inline const td_expert_part *td_expert_parts(const td_expert_places *p, uint32_t layer_idx,
                                                    uint32_t expert) {
  return p->parts + ((size_t)layer_idx * p->n_experts + expert) * TD_EXPERT_PARTS;
}

// Of the layers that td_model_layer has, that of multi-token prediction included. TD_EUNSUPPORTED:
// experts are not in the files as they are computed with; the message says which and why. On error
// *out is zeroed.
td_status td_expert_places_open(td_expert_places *out, const td_model *model, td_err *err);
void td_expert_places_close(td_expert_places *places);
