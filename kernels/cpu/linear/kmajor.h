// kernels/cpu/linear/kmajor.h - layout of RUN_COLS decoded columns of column-major weights: vectors
// of rows, with those that are multiplied together adjacent, column after column.
#pragma once

#include "kernels/cpu/linear/q4.h"

enum { TILE_VECTORS = 4 };

static inline float *decoded_at(float *w, uint32_t c, uint32_t v) {
  return w + ((v / TILE_VECTORS * RUN_COLS + c) * TILE_VECTORS + v % TILE_VECTORS) * VL;
}
