// src/engine/experts/hot_experts.h - which experts a cache of whole experts holds, and which move
// in next. Recency decides: the least recently used (layer, expert) makes room for one that was
// used twice since. So an expert that is used once never displaces another, and a cache that can
// take in only a few experts a step is not churned by the many that it misses. A pure state
// machine: time is the number of decode steps; experts move where and when the caller says they
// have. Not thread-safe.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

typedef struct td_hot_experts td_hot_experts;

// Expert `expert` of layer layer_idx moves to a slot, which is empty from now on.
typedef struct {
  uint32_t layer_idx, expert, slot;
} td_hot_move;

// Since open. A hit is an expert that a step used, and that the cache held when the step began; it
// counts once a step, however many tokens used it.
typedef struct {
  uint64_t hits, misses;
  uint64_t moves;    // experts that have moved in
  uint32_t n_cached; // slots that hold an expert
} td_hot_counts;

// On success the caller owns *out. n_slots may be 0.
td_status td_hot_experts_open(td_hot_experts **out, uint32_t n_layers, uint32_t n_experts,
                              uint32_t n_slots, td_err *err);
void td_hot_experts_close(td_hot_experts *hot);

// A decode step: begin, then use for its layers, with ids [n] in [0, n_experts).
void td_hot_experts_begin_step(td_hot_experts *hot);
void td_hot_experts_use(td_hot_experts *hot, uint32_t layer_idx, const int32_t *ids, uint32_t n);

// Chooses at most `most` of the experts that the step missed: the ones with the shortest time since
// the use before come first. The ones they displace leave the table. Returns their number.
uint32_t td_hot_experts_choose(td_hot_experts *hot, td_hot_move *out, uint32_t most);
// Chooses experts for all slots, to be called once and first, of the layers in is_layer from the
// first on. As long as both ranges have free slots, experts take turns: one of the first n_first
// slots, then one of the rest. Returns the number of moves, at most n_slots.
uint32_t td_hot_experts_fill(td_hot_experts *hot, const bool *is_layer, uint32_t n_first,
                             td_hot_move *out);
// The move is complete: the expert is in the table.
void td_hot_experts_publish(td_hot_experts *hot, const td_hot_move *move);
// The move does not take place: its slot is empty.
void td_hot_experts_cancel(td_hot_experts *hot, const td_hot_move *move);

// i32 [n_layers][n_experts]: each expert's slot; -1: no slot holds it.
const int32_t *td_hot_experts_table(const td_hot_experts *hot);
td_hot_counts td_hot_experts_counts(const td_hot_experts *hot);
