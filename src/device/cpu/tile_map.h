// src/device/cpu/tile_map.h - which tiles of matrices the members on each NUMA node take first:
// those whose rows lie in the node's memory. Pure.
#pragma once

#include "base/numa.h"

enum { TD_CPU_MAX_PARTS = 3 }; // of td_cpu_parallel_tiles

// Items that are tiles of matrices: n_tiles tiles for each of n_matrices, in order of rows. The
// index of tile t of matrix m is the number of items in earlier parts plus m * n_tiles + t.
typedef struct {
  size_t n_matrices, n_tiles;
} td_cpu_part;

// The memory that a matrix's tiles read, one after the other. base NULL: not known, or not in the
// order of tiles.
typedef struct {
  const char *base;
  size_t tile_bytes, n_bytes; // of each tile but the last, of all
} td_cpu_rows;

typedef struct {
  const td_cpu_part *parts;
  size_t n_parts;
  td_cpu_rows (*rows)(const void *ctx, size_t part, size_t matrix); // NULL: never known
  const void *ctx;
  const td_stripes *stripes;
  unsigned n_nodes;
} td_tile_map_opts;

typedef struct {
  size_t first, n; // items [first, first + n)
  size_t before;   // of the same part and node, in earlier runs
} td_tile_run;

typedef struct {
  td_tile_run *runs;
  struct {
    size_t first_run, n_runs, n_items;
  } of[TD_CPU_MAX_PARTS][TD_MAX_NODES];
} td_tile_map;

// How many runs a map has at most.
size_t td_tile_map_max_runs(const td_tile_map_opts *opts);
// runs: room for as many. A tile is on the node of its middle; tiles of which that is not known are
// divided evenly, by rows, over the nodes.
void td_tile_map_make(td_tile_map *out, td_tile_run *runs, const td_tile_map_opts *opts);
// The i-th of the node's items of a part, i < n_items.
size_t td_tile_map_item(const td_tile_map *map, size_t part, unsigned node, size_t i);
