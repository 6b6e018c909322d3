// src/base/units.h - binary units of bytes, as sizes and as quotients for messages.
#pragma once

#include <stdint.h>

#define TD_MIB ((uint64_t)1 << 20)
#define TD_GIB ((uint64_t)1 << 30)

static inline double td_mib(double n_bytes) {
  return n_bytes / (double)TD_MIB;
}

static inline double td_gib(double n_bytes) {
  return n_bytes / (double)TD_GIB;
}
