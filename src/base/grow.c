// src/base/grow.c - arrays that grow by doubling.
#include "base/grow.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

bool td_grow(void *items, size_t *cap, size_t n, size_t first, size_t each_bytes) {
  size_t more = *cap ? *cap : first;
  while (more < n && more <= SIZE_MAX / 2 / each_bytes)
    more *= 2;
  void *old;
  memcpy(&old, items, sizeof old); // *items is a pointer of another type
  void *grown = more < n ? NULL : realloc(old, more * each_bytes);
  if (!grown) return false;
  memcpy(items, &grown, sizeof grown);
  *cap = more;
  return true;
}
