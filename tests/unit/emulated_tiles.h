// tests/unit/emulated_tiles.h - AMX's tiles as arrays: included before kernels of avx512amx, it
// makes them run on CPUs with AVX-512 alone. What would fault on a CPU aborts.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { N_TILES = 8, MOST_TILE_ROWS = 16, MOST_ROW_BYTES = 64 };

static struct {
  uint8_t palette, start, none[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} state;
static int8_t tiles[N_TILES][MOST_TILE_ROWS][MOST_ROW_BYTES];

static void require(int holds) {
  if (!holds) abort();
}

static void emulate_config(const void *config) {
  memcpy(&state, config, sizeof state);
  require(state.palette == 1 && state.start == 0);
  for (int i = 0; i < 16; i++)
    require(i < N_TILES ? state.rows[i] <= MOST_TILE_ROWS && state.row_bytes[i] <= MOST_ROW_BYTES
                        : !state.rows[i] && !state.row_bytes[i]);
  memset(tiles, 0, sizeof tiles);
}

static void emulate_load(int t, const void *from, size_t stride) {
  require(state.palette && state.rows[t] && state.row_bytes[t]);
  memset(tiles[t], 0, sizeof tiles[t]);
  for (int i = 0; i < state.rows[t]; i++)
    memcpy(tiles[t][i], (const char *)from + i * stride, state.row_bytes[t]);
}

static void emulate_store(int t, void *to, size_t stride) {
  require(state.palette && state.rows[t] && state.row_bytes[t]);
  for (int i = 0; i < state.rows[t]; i++)
    memcpy((char *)to + i * stride, tiles[t][i], state.row_bytes[t]);
}

static void emulate_zero(int t) {
  require(state.palette);
  memset(tiles[t], 0, sizeof tiles[t]);
}

// sums += a times b, whose rows have four of a's columns.
static inline void emulate_products(int sums, int a, int b) {
  require(sums != a && sums != b && a != b && state.rows[a] == state.rows[sums]);
  require(state.row_bytes[a] == 4 * state.rows[b] && state.row_bytes[b] == state.row_bytes[sums]);
  for (int m = 0; m < state.rows[sums]; m++) {
    for (int n = 0; n < state.row_bytes[sums] / 4; n++) {
      int32_t sum;
      memcpy(&sum, &tiles[sums][m][4 * n], sizeof sum);
      for (int k = 0; k < state.row_bytes[a]; k++)
        sum += tiles[a][m][k] * tiles[b][k / 4][4 * n + k % 4];
      memcpy(&tiles[sums][m][4 * n], &sum, sizeof sum);
    }
  }
}

// The same of pairs of BF16 numbers: even products and odd ones are summed apart.
static inline void emulate_bf16_products(int sums, int a, int b) {
  require(sums != a && sums != b && a != b && state.rows[a] == state.rows[sums]);
  require(state.row_bytes[a] == 4 * state.rows[b] && state.row_bytes[b] == state.row_bytes[sums]);
  for (int m = 0; m < state.rows[sums]; m++) {
    for (int n = 0; n < state.row_bytes[sums] / 4; n++) {
      float sum, of[2] = {0};
      for (int k = 0; k < state.row_bytes[a] / 2; k++) {
        uint32_t x = 0, y = 0;
        memcpy((char *)&x + 2, &tiles[a][m][2 * k], 2);
        memcpy((char *)&y + 2, &tiles[b][k / 2][4 * n + k % 2 * 2], 2);
        float by[2];
        memcpy(&by[0], &x, sizeof x);
        memcpy(&by[1], &y, sizeof y);
        of[k % 2] = __builtin_fmaf(by[0], by[1], of[k % 2]);
      }
      memcpy(&sum, &tiles[sums][m][4 * n], sizeof sum);
      sum += of[0] + of[1];
      memcpy(&tiles[sums][m][4 * n], &sum, sizeof sum);
    }
  }
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#undef _tile_dpbf16ps
#define _tile_loadconfig(config)     emulate_config(config)
#define _tile_release()              memset(&state, 0, sizeof state)
#define _tile_zero(t)                emulate_zero(t)
#define _tile_loadd(t, from, stride) emulate_load(t, from, stride)
#define _tile_stored(t, to, stride)  emulate_store(t, to, stride)
#define _tile_dpbssd(sums, a, b)     emulate_products(sums, a, b)
#define _tile_dpbf16ps(sums, a, b)   emulate_bf16_products(sums, a, b)
