// kernels/cpu/avx512amx/tiles.h - what kernels on AMX's tiles share.
#pragma once

#include "kernels/cpu/common/numeric.h"
#include "kernels/heuristics.h"

enum { MOST_TILE_TOKENS = 16 };

// The first n_codes tiles are codes of `cols` columns and VL rows, the next n_x are x of as many
// columns and n_tokens tokens, and four more are sums of tokens.
static inline void shape_tiles(int n_codes, int n_x, uint32_t cols, uint32_t n_tokens) {
  enum { N_SUMS = 4 };
  struct {
    uint8_t palette, start, none[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } shape = {.palette = 1};
  for (int i = 0; i < n_codes + n_x + N_SUMS; i++) {
    shape.row_bytes[i] = (uint16_t)(i >= n_codes && i < n_codes + n_x ? cols : 64);
    shape.rows[i] = (uint8_t)(i < n_codes ? cols / 4 : n_tokens);
  }
  // The compiler does not know that it reads all of this.
  __asm__ volatile("" : : "r"(&shape) : "memory");
  _tile_loadconfig(&shape);
}

static inline void end_tokens(void) {
  _tile_release();
}
