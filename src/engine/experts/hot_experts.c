// src/engine/experts/hot_experts.c - the least recently used experts make room for those used
// again.
#include "engine/experts/hot_experts.h"

#include <stdlib.h>

#define NO_EXPERT UINT32_MAX // a slot without an expert

// Experts are numbered through all layers. Steps count from 1; 0: never.
struct td_hot_experts {
  uint32_t n_layers, n_experts, n_slots;
  uint32_t step;
  uint32_t *last_used, *used_before; // [n_layers * n_experts]; the two latest steps
  int32_t *table;                    // [n_layers * n_experts]
  bool *is_moving;                   // [n_layers * n_experts]
  uint32_t *held;                    // [n_slots]: expert in the table, or NO_EXPERT
  bool *is_filling;                  // [n_slots]: a move to it is not complete
  uint32_t *missed;                  // [n_missed] by the step
  uint32_t n_missed;
  td_hot_counts counts;
};

td_status td_hot_experts_open(td_hot_experts **out, uint32_t n_layers, uint32_t n_experts,
                              uint32_t n_slots, td_err *err) {
  *out = NULL;
  td_hot_experts *hot = calloc(1, sizeof *hot);
  if (!hot) return td_fail(err, TD_ENOMEM, "out of memory: the cache of experts");
  const size_t n = (size_t)n_layers * n_experts, n_of_slots = n_slots ? n_slots : 1;
  *hot = (td_hot_experts){.n_layers = n_layers, .n_experts = n_experts, .n_slots = n_slots};
  hot->last_used = calloc(n, sizeof *hot->last_used);
  hot->used_before = calloc(n, sizeof *hot->used_before);
  hot->table = malloc(n * sizeof *hot->table);
  hot->is_moving = calloc(n, sizeof *hot->is_moving);
  hot->missed = malloc(n * sizeof *hot->missed);
  hot->held = malloc(n_of_slots * sizeof *hot->held);
  hot->is_filling = calloc(n_of_slots, sizeof *hot->is_filling);
  if (!hot->last_used || !hot->used_before || !hot->table || !hot->is_moving || !hot->missed ||
      !hot->held || !hot->is_filling) {
    td_hot_experts_close(hot);
    return td_fail(err, TD_ENOMEM, "out of memory: the cache of experts");
  }
  for (size_t i = 0; i < n; i++)
    hot->table[i] = -1;
  for (uint32_t i = 0; i < n_slots; i++)
    hot->held[i] = NO_EXPERT;
  *out = hot;
  return TD_OK;
}

void td_hot_experts_close(td_hot_experts *hot) {
  if (!hot) return;
  free(hot->last_used);
  free(hot->used_before);
  free(hot->table);
  free(hot->is_moving);
  free(hot->missed);
  free(hot->held);
  free(hot->is_filling);
  free(hot);
}

void td_hot_experts_begin_step(td_hot_experts *hot) {
  hot->step++;
  hot->n_missed = 0;
}

void td_hot_experts_use(td_hot_experts *hot, uint32_t layer_idx, const int32_t *ids, uint32_t n) {
  TD_CHECK(layer_idx < hot->n_layers);
  for (uint32_t i = 0; i < n; i++) {
    if (ids[i] < 0 || (uint32_t)ids[i] >= hot->n_experts) continue;
    const uint32_t e = layer_idx * hot->n_experts + (uint32_t)ids[i];
    if (hot->last_used[e] == hot->step) continue;
    hot->used_before[e] = hot->last_used[e];
    hot->last_used[e] = hot->step;
    if (hot->table[e] >= 0) {
      hot->counts.hits++;
      continue;
    }
    hot->counts.misses++;
    hot->missed[hot->n_missed++] = e;
  }
}

// Index in missed of the expert to move next; NO_EXPERT: none is left.
static uint32_t best_missed(const td_hot_experts *hot) {
  uint32_t best = NO_EXPERT;
  for (uint32_t i = 0; i < hot->n_missed; i++) {
    const uint32_t e = hot->missed[i];
    if (hot->is_moving[e]) continue;
    if (best == NO_EXPERT || hot->used_before[e] > hot->used_before[hot->missed[best]]) best = i;
  }
  return best;
}

// The slot to fill: an empty one, or that of the least recently used expert; NO_EXPERT: all are
// being filled.
static uint32_t worst_slot(const td_hot_experts *hot) {
  uint32_t worst = NO_EXPERT;
  for (uint32_t i = 0; i < hot->n_slots; i++) {
    if (hot->is_filling[i]) continue;
    if (hot->held[i] == NO_EXPERT) return i;
    if (worst == NO_EXPERT || hot->last_used[hot->held[i]] < hot->last_used[hot->held[worst]])
      worst = i;
  }
  return worst;
}

static void begin_move(td_hot_experts *hot, const td_hot_move *move) {
  const uint32_t e = move->layer_idx * hot->n_experts + move->expert;
  hot->is_filling[move->slot] = hot->is_moving[e] = true;
}

uint32_t td_hot_experts_choose(td_hot_experts *hot, td_hot_move *out, uint32_t most) {
  uint32_t n = 0;
  while (n < most) {
    const uint32_t at = best_missed(hot), slot = worst_slot(hot);
    if (at == NO_EXPERT || slot == NO_EXPERT) break;
    const uint32_t e = hot->missed[at], old = hot->held[slot];
    if (old != NO_EXPERT) {
      if (hot->used_before[e] <= hot->last_used[old]) break; // nor do less used ones
      hot->table[old] = -1;
      hot->held[slot] = NO_EXPERT;
      hot->counts.n_cached--;
    }
    hot->missed[at] = hot->missed[--hot->n_missed];
    out[n] = (td_hot_move){
        .layer_idx = e / hot->n_experts, .expert = e % hot->n_experts, .slot = slot};
    begin_move(hot, &out[n++]);
  }
  return n;
}

uint32_t td_hot_experts_fill(td_hot_experts *hot, const bool *is_layer, uint32_t n_first,
                             td_hot_move *out) {
  uint32_t first = 0, other = n_first, n = 0;
  for (uint32_t i = 0; i < hot->n_layers; i++) {
    for (uint32_t k = 0; is_layer[i] && k < hot->n_experts; k++) {
      const bool has_first = first < n_first, has_other = other < hot->n_slots;
      if (!has_first && !has_other) return n;
      const bool is_first = has_first && (k % 2 == 0 || !has_other);
      out[n] = (td_hot_move){.layer_idx = i, .expert = k, .slot = is_first ? first++ : other++};
      begin_move(hot, &out[n++]);
    }
  }
  return n;
}

static uint32_t end_move(td_hot_experts *hot, const td_hot_move *move) {
  const uint32_t e = move->layer_idx * hot->n_experts + move->expert;
  TD_CHECK(hot->is_filling[move->slot] && hot->is_moving[e]);
  hot->is_filling[move->slot] = hot->is_moving[e] = false;
  return e;
}

void td_hot_experts_publish(td_hot_experts *hot, const td_hot_move *move) {
  const uint32_t e = end_move(hot, move);
  hot->held[move->slot] = e;
  hot->table[e] = (int32_t)move->slot;
  hot->counts.moves++;
  hot->counts.n_cached++;
}

void td_hot_experts_cancel(td_hot_experts *hot, const td_hot_move *move) {
  end_move(hot, move);
}

const int32_t *td_hot_experts_table(const td_hot_experts *hot) {
  return hot->table;
}

td_hot_counts td_hot_experts_counts(const td_hot_experts *hot) {
  return hot->counts;
}
