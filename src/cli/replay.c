// src/cli/replay.c - what makes room is the least of a heap, in which entries that are out of date
// stay until they come up.
#include "cli/replay.h"

#include <stdbool.h>
#include <stdlib.h>

#include "model/drive/arena.h"

typedef struct {
  uint64_t rank; // the least makes room
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
  uint64_t *rank; // [n_keys]; 0: not in memory
  uint64_t *count;
  bool *is_protected; // [n_keys]
  uint32_t *next;     // [n]: the use after this one of the same key, or UINT32_MAX
  heap once, twice;   // twice: SEGMENTED's protected part
  uint32_t n_slots, n_held, n_protected;
} memory;

// The least that is up to date.
static const entry *least(const memory *m, heap *h, bool is_protected) {
  while (h->n &&
         (m->rank[h->at[0].key] != h->at[0].rank || m->is_protected[h->at[0].key] != is_protected))
    pop(h);
  return h->n ? &h->at[0] : NULL;
}

static void make_room(memory *m) {
  const entry *once = least(m, &m->once, false), *twice = least(m, &m->twice, true);
  const bool is_full = m->n_protected > (uint64_t)m->n_slots * TD_ARENA_PROTECTED_PERCENT / 100;
  const bool is_twice = !once || (twice && is_full && twice->rank < once->rank);
  const uint32_t key = is_twice ? twice->key : once->key;
  pop(is_twice ? &m->twice : &m->once);
  m->n_protected -= m->is_protected[key];
  m->is_protected[key] = false;
  m->rank[key] = 0;
  m->n_held--;
}

static uint64_t rank_of(const memory *m, td_replay how, size_t i, uint32_t key) {
  switch (how) {
  case TD_REPLAY_LFU: return (m->count[key] << 32) + i + 1;
  case TD_REPLAY_OPTIMUM: return (uint64_t)UINT32_MAX - m->next[i] + 1;
  default: return i + 1;
  }
}

static uint64_t play(memory *m, td_replay how, const uint32_t *uses, size_t n) {
  uint64_t hits = 0;
  for (size_t i = 0; i < n; i++) {
    const uint32_t key = uses[i];
    const bool is_held = m->rank[key] != 0;
    hits += is_held;
    if (!is_held && m->n_held++ == m->n_slots) make_room(m);
    m->count[key]++;
    if (is_held && how == TD_REPLAY_SEGMENTED && !m->is_protected[key]) {
      m->is_protected[key] = true;
      m->n_protected++;
    }
    m->rank[key] = rank_of(m, how, i, key);
    push(m->is_protected[key] ? &m->twice : &m->once, (entry){m->rank[key], key});
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
              .is_protected = calloc(n_keys, sizeof *m.is_protected),
              .next = calloc(n + 1, sizeof *m.next),
              .once.at = calloc(n + 1, sizeof *m.once.at),
              .twice.at = calloc(n + 1, sizeof *m.twice.at),
              .n_slots = n_slots};
  td_status st = TD_OK;
  *out = 0;
  if (m.rank && m.count && m.is_protected && m.next && m.once.at && m.twice.at) {
    find_next(&m, uses, n);
    if (n_slots) *out = play(&m, how, uses, n);
  } else {
    st = td_fail(err, TD_ENOMEM, "out of memory: uses of experts");
  }
  free(m.rank);
  free(m.count);
  free(m.is_protected);
  free(m.next);
  free(m.once.at);
  free(m.twice.at);
  return st;
}
