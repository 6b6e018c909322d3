// tests/unit/test_tile_map.c - which node's members take a tile first: each is somebody's, and
// where its rows lie, whatever the sizes of matrices, tiles and stripes.
// CTest: no-tsan
#include <stdlib.h>
#include <string.h>

#include "device/cpu/tile_map.h"
#include "unit/ref.h"

enum { MAX_MATRICES = 64, MAX_ITEMS = 1 << 16 };

// Matrices of a part, all alike and each `apart` bytes behind the one before.
typedef struct {
  td_stripes stripes;
  size_t apart[TD_CPU_MAX_PARTS];
  td_cpu_rows first[TD_CPU_MAX_PARTS]; // base NULL: not known
} layout;

static td_cpu_rows rows_of(const void *ctx, size_t part, size_t matrix) {
  const layout *l = ctx;
  td_cpu_rows rows = l->first[part];
  if (rows.base) rows.base += matrix * l->apart[part];
  return rows;
}

// Bytes of tile t that are on the node.
static size_t bytes_on(const td_stripes *s, const td_cpu_rows *rows, size_t t, unsigned node) {
  size_t at = t * rows->tile_bytes, n = 0;
  const size_t end = at + rows->tile_bytes < rows->n_bytes ? at + rows->tile_bytes : rows->n_bytes;
  for (; at < end; at++)
    n += td_stripes_node(s, rows->base + at) == node;
  return n;
}

static uint8_t node_of[MAX_ITEMS];

// Makes the map, checks that every item is in it once, and notes its node.
static size_t map_all(const layout *l, const td_cpu_part *parts, size_t n_parts, unsigned n_nodes) {
  const td_tile_map_opts opts = {.parts = parts,
                                 .n_parts = n_parts,
                                 .rows = rows_of,
                                 .ctx = l,
                                 .stripes = &l->stripes,
                                 .n_nodes = n_nodes};
  td_tile_map map;
  const size_t most = td_tile_map_max_runs(&opts);
  td_tile_run *runs = malloc(most * sizeof *runs + 1);
  size_t first = 0, n_runs = 0;
  td_tile_map_make(&map, runs, &opts);
  memset(node_of, 0xff, sizeof node_of);
  for (size_t p = 0; p < n_parts; p++) {
    const size_t n_items = parts[p].n_matrices * parts[p].n_tiles;
    size_t n = 0;
    for (unsigned k = 0; k < n_nodes; k++) {
      size_t before = 0;
      n += map.of[p][k].n_items;
      n_runs += map.of[p][k].n_runs;
      for (size_t i = 0; i < map.of[p][k].n_items; i++) {
        const size_t item = td_tile_map_item(&map, p, k, i);
        assert_in_range(item, first, first + n_items - 1);
        assert_true(i == 0 || item > before); // in order of rows
        assert_int_equal(node_of[item], 0xff);
        node_of[item] = (uint8_t)k;
        before = item;
      }
    }
    assert_int_equal(n, n_items);
    first += n_items;
  }
  assert_true(n_runs <= most);
  free(runs);
  return first;
}

TEST(every_tile_where_its_rows_are) {
  uint64_t rng = 1;
  for (int round = 0; round < 300; round++) {
    const unsigned n_nodes = 2 + (unsigned)(ref_next(&rng) % 3);
    layout l = {.stripes = {.base = (const char *)0x10000,
                            .n_bytes = 1 << 20,
                            .stripe_bytes = 64 + ref_next(&rng) % 400,
                            .n_nodes = n_nodes}};
    td_cpu_part parts[TD_CPU_MAX_PARTS];
    for (size_t p = 0; p < TD_CPU_MAX_PARTS; p++) {
      const size_t row = 1 + ref_next(&rng) % 9, tile = row * (1 + ref_next(&rng) % 7);
      const size_t n_bytes = row * (1 + ref_next(&rng) % 300);
      parts[p] = (td_cpu_part){ref_next(&rng) % 20, (n_bytes + tile - 1) / tile};
      l.apart[p] = n_bytes + ref_next(&rng) % 50;
      l.first[p] = (td_cpu_rows){.tile_bytes = tile, .n_bytes = n_bytes};
      if (ref_next(&rng) % 4) l.first[p].base = l.stripes.base + ref_next(&rng) % 5000;
    }
    map_all(&l, parts, TD_CPU_MAX_PARTS, n_nodes);
    size_t item = 0;
    for (size_t p = 0; p < TD_CPU_MAX_PARTS; p++) {
      for (size_t i = 0; i < parts[p].n_matrices * parts[p].n_tiles; i++, item++) {
        const td_cpu_rows rows = rows_of(&l, p, i / parts[p].n_tiles);
        const size_t t = i % parts[p].n_tiles;
        if (!rows.base) { // by rows, evenly
          const size_t begin = td_node_begin(parts[p].n_tiles, n_nodes, node_of[item]);
          assert_in_range(t, begin,
                          td_node_begin(parts[p].n_tiles, n_nodes, node_of[item] + 1u) - 1);
        } else if ((t + 1) * rows.tile_bytes <= rows.n_bytes) {
          const size_t here = bytes_on(&l.stripes, &rows, t, node_of[item]);
          assert_true(2 * here >= rows.tile_bytes || rows.tile_bytes > l.stripes.stripe_bytes);
        }
      }
    }
  }
}

// Experts of 1.5 MB a matrix in pages of 2 MB: of eight of them, those that a token chooses, both
// nodes have much the same, and read nearly all of it in their own memory. Divided by rows, each
// would read half of its bytes in the other's.
TEST(matrices_smaller_than_a_page) {
  enum { N_NODES = 2, STEP = 1024 };
  const size_t matrix = 3 << 19, stripe = 2 << 20, tile = 48 << 10;
  for (int is_known = 0; is_known < 2; is_known++) {
    const layout l = {
        .stripes = {(const char *)0x10000, (size_t)1 << 30, stripe, N_NODES},
        .apart = {5 * 3 * matrix},
        .first = {{is_known ? (const char *)0x10000 + 12345 * STEP : NULL, tile, matrix}}};
    const td_cpu_part part = {8, matrix / tile};
    const size_t n = map_all(&l, &part, 1, N_NODES);
    size_t local = 0, of_first = 0;
    for (size_t i = 0; i < n; i++) {
      td_cpu_rows rows = rows_of(&l, 0, i / part.n_tiles);
      if (!is_known)
        rows.base = (const char *)0x10000 + 12345 * STEP + i / part.n_tiles * 5 * 3 * matrix;
      local += bytes_on(&l.stripes, &rows, i % part.n_tiles, node_of[i]);
      of_first += node_of[i] == 0;
    }
    const double share = (double)local / (double)(8 * matrix), first = (double)of_first / (double)n;
    if (is_known) {
      assert_true(share > 0.98);
      assert_true(first > 0.35 && first < 0.65);
    } else {
      assert_true(share > 0.4 && share < 0.6);
    }
  }
}
