// src/options/closest.h - what a mistyped word may have meant.
#pragma once

#include <stddef.h>

// The best candidate so far. To start, set word and len and zero the rest.
typedef struct {
  const char *word;
  size_t len;
  const char *best; // NULL: no candidate is close
  size_t n_edits;   // between word and best
} td_closest;

// Keeps the candidate if it is closer than all before it: at most a third of the longer word's
// characters are inserted, left out, replaced or swapped with their neighbours.
void td_closest_try(td_closest *closest, const char *candidate);
