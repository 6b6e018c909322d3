// src/engine/experts/expert_slots.c - packs streamed experts into ring slots with few copies.
#include "engine/experts/expert_slots.h"

#include <stdbool.h>
#include <stdlib.h>

static size_t align_up(size_t n) {
  return (n + TD_SLOT_ALIGN - 1) / TD_SLOT_ALIGN * TD_SLOT_ALIGN;
}

uint32_t td_slot_experts(uint64_t ring_bytes, uint64_t expert_bytes, uint32_t n_experts) {
  if (!expert_bytes || ring_bytes / 2 < expert_bytes) return 0;
  uint64_t slot_bytes = ring_bytes / TD_SLOT_MIN;
  if (slot_bytes > TD_SLOT_MAX_BYTES) slot_bytes = TD_SLOT_MAX_BYTES;
  const uint64_t n = slot_bytes / expert_bytes;
  return n < 1 ? 1 : n < n_experts ? (uint32_t)n : n_experts;
}

void td_slot_list_matrix(td_slot_part parts[TD_SLOT_MATRIX_PARTS], const td_weight *w) {
  parts[0] = (td_slot_part){.from = w->data, .n_bytes = td_weight_data_bytes(w)};
  parts[1] = (td_slot_part){.from = w->scale, .n_bytes = td_weight_scale_bytes(w)};
  parts[2] = (td_slot_part){.from = w->zero, .n_bytes = td_weight_zero_bytes(w)};
}

void td_slot_list_expert(td_slot_part parts[TD_SLOT_EXPERT_PARTS], const td_layer *layer,
                         uint32_t expert) {
  const td_weight none = {.data = NULL}; // gate and up are one matrix
  td_slot_list_matrix(parts, &layer->gate[expert]);
  td_slot_list_matrix(parts + TD_SLOT_MATRIX_PARTS, layer->up ? &layer->up[expert] : &none);
  td_slot_list_matrix(parts + 2 * TD_SLOT_MATRIX_PARTS, &layer->down[expert]);
}

td_weight td_slot_placed(const td_weight *w, const td_slot_part *parts, const char *base) {
  td_weight out = *w;
  out.data = base + parts[0].to;
  if (parts[1].n_bytes) out.scale = base + parts[1].to;
  if (parts[2].n_bytes) out.zero = (const uint32_t *)(const void *)(base + parts[2].to);
  return out;
}

size_t td_slot_lay_out(td_slot_part *parts, uint32_t n_parts) {
  size_t used = 0;
  for (uint32_t i = 0; i < n_parts; i++) {
    parts[i].to = used;
    used += align_up(parts[i].n_bytes);
  }
  return used;
}

// By address; at the same address the longer part first.
static int by_address(const void *a, const void *b) {
  const td_slot_part *x = *(td_slot_part *const *)a, *y = *(td_slot_part *const *)b;
  const uintptr_t from_x = (uintptr_t)x->from, from_y = (uintptr_t)y->from;
  if (from_x != from_y) return from_x < from_y ? -1 : 1;
  return (x->n_bytes < y->n_bytes) - (x->n_bytes > y->n_bytes);
}

// Whether the part can be appended to copy, gap included. Decreases *gaps_left (bytes) if so.
static bool joins(const td_slot *slot, const td_slot_copy *copy, const td_slot_part *part,
                  size_t *gaps_left) {
  const char *begin = copy->from, *end = begin + copy->n_bytes, *from = part->from;
  if ((size_t)(from - begin) % TD_SLOT_ALIGN != 0) return false;
  if (from <= end) return true;
  const size_t gap = (size_t)(from - end);
  if (gap > TD_SLOT_MAX_GAP || gap > *gaps_left) return false;
  const char *memory = slot->memory;
  if (!memory || begin < memory || from + part->n_bytes > memory + slot->memory_bytes) return false;
  *gaps_left -= gap;
  return true;
}

size_t td_slot_pack(td_slot *slot) {
  uint32_t n = 0;
  size_t n_bytes = 0;
  for (uint32_t i = 0; i < slot->n_parts; i++) {
    if (slot->parts[i].n_bytes) slot->order[n++] = &slot->parts[i];
    n_bytes += slot->parts[i].n_bytes;
  }
  qsort(slot->order, n, sizeof *slot->order, by_address);
  size_t used = 0, gaps_left = n_bytes / TD_SLOT_GAPS;
  td_slot_copy *copy = NULL;
  slot->n_copies = 0;
  for (uint32_t i = 0; i < n; i++) {
    td_slot_part *part = slot->order[i];
    if (!copy || !joins(slot, copy, part, &gaps_left)) {
      copy = &slot->copies[slot->n_copies++];
      *copy = (td_slot_copy){.from = part->from, .to = align_up(used)};
    }
    const size_t at = (size_t)((const char *)part->from - (const char *)copy->from);
    part->to = copy->to + at;
    if (at + part->n_bytes > copy->n_bytes) copy->n_bytes = at + part->n_bytes;
    used = copy->to + copy->n_bytes;
  }
  return align_up(used);
}

size_t td_slot_pack_apart(td_slot *slot) {
  const size_t used = td_slot_lay_out(slot->parts, slot->n_parts);
  for (uint32_t i = 0; i < slot->n_parts; i++) {
    const td_slot_part *part = &slot->parts[i];
    slot->copies[i] = (td_slot_copy){part->from, part->to, part->n_bytes};
  }
  slot->n_copies = slot->n_parts;
  return used;
}
