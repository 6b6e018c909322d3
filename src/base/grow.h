// src/base/grow.h - arrays that grow by doubling.
#pragma once

#include <stdbool.h>
#include <stddef.h>

// Gives *items (a T **), an array of room for *cap items of each_bytes, room for at least n: first,
// or first doubled until it suffices. False: out of memory; the array is unchanged then.
bool td_grow(void *items, size_t *cap, size_t n, size_t first, size_t each_bytes);

// Whether `items` has room for one more than n, now or after growing. cap is a size_t.
#define TD_GROW(items, n, cap, first)                                                              \
  ((n) < (cap) || td_grow(&(items), &(cap), (size_t)(n) + 1, first, sizeof *(items)))
