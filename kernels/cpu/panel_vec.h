// kernels/cpu/panel_vec.h - how a panel, some rows times up to PANEL_TOKENS tokens, is cut into
// tiles: the part that linear_vec.h and avx512fp16/linear_bytes.h share. To be included behind
//   panel       with a (the call) and n_rows
//   dot_rows    a few rows of it times a tile of tokens; both numbers are constants
#ifndef KERNELS_CPU_PANEL_VEC_H
#define KERNELS_CPU_PANEL_VEC_H

#define DOT_TOKENS(T, R)                                                                           \
  case T:                                                                                          \
    for (; row + (R) <= end; row += (R))                                                           \
      dot_rows(R, T, p, row, token);                                                               \
    for (; row < end; row++)                                                                       \
      dot_rows(1, T, p, row, token);                                                               \
    return;

// Rows [row, end) times a tile of tokens.
static void dot_tile(panel *p, uint32_t row, uint32_t end, uint32_t token, uint32_t n_tokens) {
  switch (n_tokens) {
    DOT_TOKENS(1, GEMV_ROWS)
    DOT_TOKENS(2, BATCH_ROWS)
    DOT_TOKENS(3, BATCH_ROWS)
    DOT_TOKENS(4, BATCH_ROWS)
    DOT_TOKENS(5, BATCH_ROWS_8)
    DOT_TOKENS(6, BATCH_ROWS_8)
    DOT_TOKENS(7, BATCH_ROWS_8)
    DOT_TOKENS(8, BATCH_ROWS_8)
  default: return;
  }
}
_Static_assert(TILE_TOKENS == 8, "a case for every size of tile");

static uint32_t panel_tiles(const panel *p) {
  return (p->a->n_tokens + TILE_TOKENS - 1) / TILE_TOKENS;
}

static uint32_t panel_tile_begin(const panel *p, uint32_t tile) {
  return tile * p->a->n_tokens / panel_tiles(p);
}

// Tiles of tokens take turns with some rows, whose weights the first of them brings into L1.
static void dot_panel(panel *p) {
  uint32_t n_tiles = panel_tiles(p), step = n_tiles == 1 ? p->n_rows : BATCH_ROWS;
  for (uint32_t row = 0; row < p->n_rows; row += step) {
    uint32_t end = p->n_rows - row < step ? p->n_rows : row + step;
    for (uint32_t i = 0; i < n_tiles; i++) {
      uint32_t begin = panel_tile_begin(p, i);
      dot_tile(p, row, end, begin, panel_tile_begin(p, i + 1) - begin);
    }
  }
}

#endif
