// kernels/cuda/linear.cuh - which part of a linear operator a block computes.
#ifndef KERNELS_CUDA_LINEAR_CUH
#define KERNELS_CUDA_LINEAR_CUH

#include "kernels/cuda/codes.cuh"

// w is a copy: of an address in the arguments every thread would make itself a copy in memory.
struct linear_part {
  td_weight w;
  uint32_t begin, n; // rows of y
};

// Part blockIdx.y; n is 0 behind the last one.
__device__ inline linear_part linear_part_of(const td_cu_linear_args &a) {
  uint32_t i = blockIdx.y;
  if (a.experts) {
    if (i >= *a.n_tiles) return {a.w, 0, 0};
    td_cu_tile tile = a.tiles[i];
    return {a.experts[tile.expert], tile.begin, tile.n};
  }
  uint32_t begin = i * a.tile_tokens;
  return {a.w, begin, at_most(a.n_tokens - begin, a.tile_tokens)};
}

__device__ inline const uint16_t *linear_x(const td_cu_linear_args &a, uint32_t i) {
  size_t row = a.x_rows ? a.x_rows[i] : i;
  return a.x + row * a.x_stride;
}

__device__ inline void linear_put(const td_cu_linear_args &a, uint32_t i, uint32_t row, float v) {
  uint32_t r = row - a.row0;
  if (a.bias.data) v += vec_at(a.bias, r);
  size_t at = i * a.y_stride + r;
  if (a.y_f32) {
    static_cast<float *>(a.y)[at] = v;
  } else {
    static_cast<uint16_t *>(a.y)[at] = bf16_from_f32(v);
  }
}

#endif
