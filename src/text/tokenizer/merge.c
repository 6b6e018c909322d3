// src/text/tokenizer/merge.c - table of merges; merging by scan for short words, by heap for long
// ones.
#include "text/tokenizer/merge.h"

#include <stdlib.h>
#include <string.h>

#include "text/tokenizer/hash.h"

// Words up to this length are merged by scanning for the lowest rank, which is faster than a heap.
#define MAX_SCAN  48
#define NO_RANK   UINT32_MAX
#define NO_SYMBOL UINT32_MAX

td_status td_merges_init(td_merges *merges, size_t n_max, td_err *err) {
  merges->n_slots = 64;
  while (merges->n_slots < n_max * 2)
    merges->n_slots *= 2;
  merges->slots = malloc(merges->n_slots * sizeof *merges->slots);
  if (!merges->slots) return td_fail(err, TD_ENOMEM, "out of memory for %zu merges", n_max);
  memset(merges->slots, 0xFF, merges->n_slots * sizeof *merges->slots);
  return TD_OK;
}

void td_merges_free(td_merges *merges) {
  free(merges->slots);
  *merges = (td_merges){0};
}

static td_merge *find_slot(const td_merges *merges, int32_t left, int32_t right) {
  size_t mask = merges->n_slots - 1, slot = td_hash_pair(left, right) & mask;
  for (;; slot = (slot + 1) & mask) {
    td_merge *m = &merges->slots[slot];
    if (m->left < 0 || (m->left == left && m->right == right)) return m;
  }
}

void td_merges_put(td_merges *merges, td_merge merge) {
  *find_slot(merges, merge.left, merge.right) = merge;
}

// A free slot has rank NO_RANK.
static uint32_t rank_of(const td_merges *merges, int32_t left, int32_t right) {
  return find_slot(merges, left, right)->rank;
}

static void merge_by_scan(const td_merges *merges, td_token_ids *symbols) {
  uint32_t ranks[MAX_SCAN]; // of the pair (i, i + 1)
  int32_t *ids = symbols->ids;
  size_t n = symbols->n;
  for (size_t i = 0; i + 1 < n; i++)
    ranks[i] = rank_of(merges, ids[i], ids[i + 1]);
  while (n > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < n; i++)
      if (ranks[i] < ranks[best]) best = i;
    if (ranks[best] == NO_RANK) break;
    ids[best] = find_slot(merges, ids[best], ids[best + 1])->whole;
    n--;
    memmove(ids + best + 1, ids + best + 2, (n - best - 1) * sizeof *ids);
    memmove(ranks + best, ranks + best + 1, (n - best - 1) * sizeof *ranks);
    if (best > 0) ranks[best - 1] = rank_of(merges, ids[best - 1], ids[best]);
    if (best + 1 < n) ranks[best] = rank_of(merges, ids[best], ids[best + 1]);
  }
  symbols->n = n;
}

void td_merge_scratch_free(td_merge_scratch *s) {
  free(s->next);
  free(s->prev);
  free(s->heap);
  *s = (td_merge_scratch){0};
}

// Each merge removes one heap entry and adds at most two, and there are at most n - 1 merges, so 2n
// entries suffice.
static td_status reserve(td_merge_scratch *s, size_t n, td_err *err) {
  if (n <= s->cap) return TD_OK;
  if (n > UINT32_MAX / 2) return td_fail(err, TD_ELIMIT, "a word of %zu symbols is too long", n);
  size_t cap = s->cap ? s->cap : 1024;
  while (cap < n)
    cap *= 2;
  uint32_t *next = realloc(s->next, cap * sizeof *next);
  if (next) s->next = next;
  uint32_t *prev = realloc(s->prev, cap * sizeof *prev);
  if (prev) s->prev = prev;
  uint64_t *heap = realloc(s->heap, 2 * cap * sizeof *heap);
  if (heap) s->heap = heap;
  if (!next || !prev || !heap)
    return td_fail(err, TD_ENOMEM, "out of memory for a word of %zu symbols", n);
  s->cap = cap;
  return TD_OK;
}

static void sift_down(uint64_t *heap, size_t n, size_t i) {
  uint64_t item = heap[i];
  for (size_t child; (child = 2 * i + 1) < n; i = child) {
    if (child + 1 < n && heap[child + 1] < heap[child]) child++;
    if (item <= heap[child]) break;
    heap[i] = heap[child];
  }
  heap[i] = item;
}

static void sift_up(uint64_t *heap, size_t i) {
  uint64_t item = heap[i];
  for (; i > 0 && heap[(i - 1) / 2] > item; i = (i - 1) / 2)
    heap[i] = heap[(i - 1) / 2];
  heap[i] = item;
}

// A long word while it is merged: symbols as a linked list in an array, and a heap of candidate
// pairs, each rank << 32 | position of the left symbol.
typedef struct {
  const td_merges *merges;
  int32_t *ids; // -1: merged into another symbol
  uint32_t *next, *prev;
  uint64_t *heap;
  size_t n_heap;
} long_word;

static void push_pair(long_word *w, uint32_t at) {
  uint32_t rank = rank_of(w->merges, w->ids[at], w->ids[w->next[at]]);
  if (rank == NO_RANK) return;
  w->heap[w->n_heap] = (uint64_t)rank << 32 | at;
  sift_up(w->heap, w->n_heap++);
}

static uint64_t pop_pair(long_word *w) {
  uint64_t top = w->heap[0];
  w->heap[0] = w->heap[--w->n_heap];
  if (w->n_heap) sift_down(w->heap, w->n_heap, 0);
  return top;
}

// Merges the pair of a heap entry, unless it has changed: the rank identifies the pair.
static void merge_pair(long_word *w, uint64_t entry) {
  uint32_t at = (uint32_t)entry, right = w->next[at];
  if (w->ids[at] < 0 || right == NO_SYMBOL) return;
  const td_merge *found = find_slot(w->merges, w->ids[at], w->ids[right]);
  if (found->rank != (uint32_t)(entry >> 32)) return;
  w->ids[at] = found->whole;
  w->ids[right] = -1;
  w->next[at] = w->next[right];
  if (w->next[at] != NO_SYMBOL) w->prev[w->next[at]] = at;
  if (w->prev[at] != NO_SYMBOL) push_pair(w, w->prev[at]);
  if (w->next[at] != NO_SYMBOL) push_pair(w, at);
}

static void merge_by_heap(long_word *w, size_t n) {
  for (size_t i = 0; i < n; i++) {
    w->next[i] = i + 1 < n ? (uint32_t)i + 1 : NO_SYMBOL;
    w->prev[i] = i ? (uint32_t)i - 1 : NO_SYMBOL;
  }
  for (size_t i = 0; i + 1 < n; i++) {
    uint32_t rank = rank_of(w->merges, w->ids[i], w->ids[i + 1]);
    if (rank != NO_RANK) w->heap[w->n_heap++] = (uint64_t)rank << 32 | i;
  }
  for (size_t i = w->n_heap / 2; i-- > 0;)
    sift_down(w->heap, w->n_heap, i);
  while (w->n_heap)
    merge_pair(w, pop_pair(w));
}

td_status td_merges_apply(const td_merges *merges, td_merge_scratch *s, td_token_ids *symbols,
                          td_err *err) {
  if (symbols->n <= MAX_SCAN) {
    merge_by_scan(merges, symbols);
    return TD_OK;
  }
  td_status st = reserve(s, symbols->n, err);
  if (st != TD_OK) return st;
  long_word w = {
      .merges = merges, .ids = symbols->ids, .next = s->next, .prev = s->prev, .heap = s->heap};
  merge_by_heap(&w, symbols->n);
  size_t kept = 0;
  for (size_t i = 0; i < symbols->n; i++)
    if (w.ids[i] >= 0) w.ids[kept++] = w.ids[i];
  symbols->n = kept;
  return TD_OK;
}
