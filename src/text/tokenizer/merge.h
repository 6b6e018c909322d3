// src/text/tokenizer/merge.h - merges of byte-pair encoding, and applying them. Private to text/.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "base/token_ids.h"

typedef struct {
  int32_t left, right; // left is -1 in a free slot
  uint32_t rank;       // lower ranks are merged first
  int32_t whole;       // the merged token
} td_merge;

typedef struct {
  td_merge *slots; // hash table over (left, right)
  size_t n_slots;
} td_merges;

td_status td_merges_init(td_merges *merges, size_t n_max, td_err *err);
void td_merges_free(td_merges *merges);
// Room for at most n_max distinct pairs. Adding a pair again replaces it.
void td_merges_put(td_merges *merges, td_merge merge);

// Working memory for long words.
typedef struct {
  uint32_t *next, *prev;
  uint64_t *heap;
  size_t cap;
} td_merge_scratch;

void td_merge_scratch_free(td_merge_scratch *scratch);

// Merges adjacent symbols until no pair is in merges: the pair of lowest rank first, the leftmost
// among equals. O(n log n).
td_status td_merges_apply(const td_merges *merges, td_merge_scratch *scratch, td_token_ids *symbols,
                          td_err *err);
