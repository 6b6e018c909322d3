// kernels/cuda/tiles.cuh - experts: ranges of tiles, which are pieces of one expert's sorted
// (token, expert) pairs, and the activation of gate and up.
#pragma once

#include "kernels/cuda/common.cuh"

__device__ inline uint32_t first_tile(const td_cu_tile_range &r) {
  return *r.first + r.skip;
}

// Number of tiles in the range; `first` is the first one.
__device__ inline uint32_t n_tiles_from(const td_cu_tile_range &r, uint32_t first) {
  uint32_t end = *r.end;
  return first < end ? at_most(end - first, r.n_tiles) : 0;
}

struct pair_range {
  uint32_t begin, end;
};

// The pairs of the range; without tiles, all of n_pairs.
__device__ inline pair_range pairs_of(const td_cu_tile_range &r, uint32_t n_pairs) {
  if (!r.tiles) return {0, n_pairs};
  uint32_t first = first_tile(r), n = n_tiles_from(r, first);
  if (n == 0) return {0, 0};
  const td_cu_tile &last = r.tiles[first + n - 1];
  return {r.tiles[first].begin, last.begin + last.n};
}

__device__ inline float clamped_swiglu(const td_cu_glu &a, float gate, float up) {
  float g = fminf(gate, a.limit), u = fminf(fmaxf(up, -a.limit), a.limit);
  if (a.plain) return u * (g / (1 + expf(-g)));
  return (u + 1) * (g / (1 + expf(-a.alpha * g)));
}

__device__ inline float swiglu(const td_cu_glu &a, float gate, float up) {
  return a.limit > 0 ? clamped_swiglu(a, gate, up) : gate / (1 + expf(-gate)) * up;
}
