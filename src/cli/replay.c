// src/cli/replay.c - what makes room is the least of a heap, in which entries that are out of date
// stay until they come up.
#include "cli/replay.h"

#include <stdbool.h>
#include <stdlib.h>

#include "model/drive/arena.h"

typedef struct {
  double rank; // the least makes room
  uint32_t key;
} entry;

typedef struct {
  entry *at;
  size_t n;
} heap;

static void push(heap *h, entry e) {
  size_t i = h->n++;
  for (; i && h->at[(i - 1) / 2].rank > e.rank; i = (i - 1) / 2)
    h->at[i] = h->at[(i - 1) / 2];
  h->at[i] = e;
}

static void pop(heap *h) {
  const entry last = h->at[--h->n];
  size_t i = 0;
  for (size_t child; (child = 2 * i + 1) < h->n; i = child) {
    if (child + 1 < h->n && h->at[child + 1].rank < h->at[child].rank) child++;
    if (h->at[child].rank >= last.rank) break;
    h->at[i] = h->at[child];
  }
  h->at[i] = last;
}

typedef struct {
  double *rank;  // [n_keys]: since its last use
  bool *is_held; // [n_keys]
  uint64_t *count;
  uint32_t *next; // [n]: the use after this one of the same key, or UINT32_MAX
  heap held;
  uint32_t n_keys, n_slots, n_held;
} memory;

static void make_room(memory *m) {
  while (m->rank[m->held.at[0].key] != m->held.at[0].rank)
    pop(&m->held);
  m->is_held[m->held.at[0].key] = false;
  pop(&m->held);
  m->n_held--;
}

static double rank_of(const memory *m, td_replay how, size_t i, uint32_t key) {
  switch (how) {
  case TD_REPLAY_AGED: return td_expert_score(m->rank[key], i + 1, m->n_keys);
  case TD_REPLAY_LFU: return (double)m->count[key] + 0x1p-32 * (double)i;
  case TD_REPLAY_OPTIMUM: return -(double)m->next[i];
  default: return (double)i;
  }
}

static uint64_t play(memory *m, td_replay how, const uint32_t *uses, size_t n) {
  uint64_t hits = 0;
  for (size_t i = 0; i < n; i++) {
    const uint32_t key = uses[i];
    hits += m->is_held[key];
    if (!m->is_held[key] && m->n_held++ == m->n_slots) make_room(m);
    m->is_held[key] = true;
    m->count[key]++;
    m->rank[key] = rank_of(m, how, i, key);
    push(&m->held, (entry){m->rank[key], key});
  }
  return hits;
}

static void find_next(memory *m, const uint32_t *uses, size_t n) {
  for (size_t i = n; i-- > 0;) { // count serves as the place of the use found last
    m->next[i] = m->count[uses[i]] ? (uint32_t)m->count[uses[i]] - 1 : UINT32_MAX;
    m->count[uses[i]] = i + 1;
  }
  for (size_t i = 0; i < n; i++)
    m->count[uses[i]] = 0;
}

td_status td_replay_hits(uint64_t *out, td_replay how, const uint32_t *uses, size_t n,
                         uint32_t n_keys, uint32_t n_slots, td_err *err) {
  memory m = {.rank = calloc(n_keys, sizeof *m.rank),
              .count = calloc(n_keys, sizeof *m.count),
              .is_held = calloc(n_keys, sizeof *m.is_held),
              .next = calloc(n + 1, sizeof *m.next),
              .held.at = calloc(n + 1, sizeof *m.held.at),
              .n_keys = n_keys,
              .n_slots = n_slots};
  td_status st = TD_OK;
  *out = 0;
  if (m.rank && m.count && m.is_held && m.next && m.held.at) {
    find_next(&m, uses, n);
    if (n_slots) *out = play(&m, how, uses, n);
  } else {
    st = td_fail(err, TD_ENOMEM, "out of memory: uses of experts");
  }
  free(m.rank);
  free(m.count);
  free(m.is_held);
  free(m.next);
  free(m.held.at);
  return st;
}
