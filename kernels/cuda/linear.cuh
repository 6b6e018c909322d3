// kernels/cuda/linear.cuh - which part of a linear operator a block computes.
#ifndef KERNELS_CUDA_LINEAR_CUH
#define KERNELS_CUDA_LINEAR_CUH

#include "kernels/cuda/codes.cuh"

// w is a copy: of an address in the arguments every thread would make itself a copy in memory.
struct linear_part {
  td_weight w;
  uint32_t begin, n; // rows of y
};

// Part blockIdx.y of matrix blockIdx.z; n is 0 behind the last one.
__device__ inline linear_part linear_part_of(const td_cu_linear_args &a) {
  uint32_t i = blockIdx.y, begin = i * a.tile_tokens;
  td_cu_tile tile = {0, begin, a.tiles ? 0 : at_most(a.n_tokens - begin, a.tile_tokens)};
  if (a.tiles && i < *a.n_tiles) tile = a.tiles[i];
  if (!a.experts || tile.n == 0) return {a.w, tile.begin, tile.n};
  return {a.experts[blockIdx.z * a.n_experts + tile.expert], tile.begin, tile.n};
}

__device__ inline const uint16_t *linear_x(const td_cu_linear_args &a, uint32_t i) {
  size_t row = a.x_rows ? a.x_rows[i] : i;
  return a.x + row * a.x_stride;
}

__device__ inline void linear_put(const td_cu_linear_args &a, uint32_t i, uint32_t row, float v) {
  uint32_t r = row - a.row0;
  if (a.bias.data) v += vec_at(a.bias, r);
  size_t at = blockIdx.z * a.y_step + i * a.y_stride + r;
  if (a.y_f32) {
    static_cast<float *>(a.y)[at] = v;
  } else {
    static_cast<uint16_t *>(a.y)[at] = bf16_from_f32(v);
  }
}

#endif
