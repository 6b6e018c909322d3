// src/base/units.h - binary units of bytes, as sizes, as quotients and as text for messages.
#pragma once

#include <stdint.h>
#include <stdio.h>

#define TD_MIB ((uint64_t)1 << 20)
#define TD_GIB ((uint64_t)1 << 30)

static inline double td_mib(double n_bytes) {
  return n_bytes / (double)TD_MIB;
}

static inline double td_gib(double n_bytes) {
  return n_bytes / (double)TD_GIB;
}

typedef struct {
  char text[24];
} td_size_text;

// In the largest unit of which it is one at least, up to GiB: 1536 becomes "1.50 KiB".
static inline td_size_text td_size(double n_bytes) {
  static const char *const units[] = {"B", "KiB", "MiB", "GiB"};
  unsigned unit = 0;
  for (; n_bytes >= 1024 && unit < 3; unit++)
    n_bytes /= 1024;
  td_size_text size;
  snprintf(size.text, sizeof size.text, "%.*f %s", unit ? 2 : 0, n_bytes, units[unit]);
  return size;
}
