// kernels/cuda/linear.cuh - which part of a linear operator a block computes.
#ifndef KERNELS_CUDA_LINEAR_CUH
#define KERNELS_CUDA_LINEAR_CUH

#include "kernels/cuda/dequant.cuh"
#include "kernels/cuda/tiles.cuh"

// The part of linear_vec and linear_blocks that a block of threads computes: rows, and tokens of a
// fragment.
enum { VEC_ROWS = 16, VEC_TILE_TOKENS = 8 };

// w is a copy, since taking an address inside the arguments would make every thread copy them to
// local memory.
struct linear_part {
  td_weight w;
  uint32_t begin, n; // rows of y
  uint32_t x_begin;  // first row of x, or of x_rows
};

// Part i of matrix blockIdx.z; n is 0 after the last part.
__device__ inline linear_part linear_part_of(const td_cu_linear_args &a, uint32_t i) {
  if (!a.range.tiles) {
    uint32_t begin = i * a.tile_tokens;
    uint32_t n = begin < a.n_tokens ? at_most(a.n_tokens - begin, a.tile_tokens) : 0;
    return {a.experts ? a.experts[blockIdx.z * a.n_experts] : a.w, begin, n, begin};
  }
  uint32_t first = first_tile(a.range);
  if (i >= n_tiles_from(a.range, first)) return {a.w, 0, 0, 0};
  td_cu_tile tile = a.range.tiles[first + i];
  uint32_t begin = tile.begin - a.range.tiles[first].begin;
  uint32_t e = a.slots ? static_cast<uint32_t>(a.slots[tile.expert])
                       : tile.expert - a.range.first_expert;
  return {a.experts[blockIdx.z * a.n_experts + e], begin, tile.n, a.x_rows ? tile.begin : begin};
}

__device__ inline const uint16_t *linear_x(const td_cu_linear_args &a, uint32_t i) {
  size_t row = a.x_rows ? a.x_rows[i] : i;
  return a.x + row * a.x_stride;
}

// The biases of part i's expert; NULL: none. Found again where sums are stored, to save registers.
__device__ inline const float *linear_bias(const td_cu_linear_args &a, uint32_t i) {
  if (!a.expert_bias) return nullptr;
  const td_cu_tile &tile = a.range.tiles[first_tile(a.range) + i];
  return a.expert_bias + blockIdx.z * a.bias_step + static_cast<size_t>(tile.expert) * a.n_rows;
}

// Where results of a matrix go; its rows count from row0.
struct linear_out {
  void *y;
  td_vec bias;
  size_t first, stride; // elements
  uint32_t row0;
};

__device__ inline linear_out linear_out_of(const td_cu_linear_args &a) {
  return {a.y, a.bias, blockIdx.z * a.y_step, a.y_stride, a.row0};
}

__device__ inline void linear_put(const td_cu_linear_args &a, const linear_out &out,
                                  const float *bias, uint32_t i, uint32_t row, float v) {
  uint32_t r = row - out.row0;
  if (out.bias.data) v += vec_at(out.bias, r);
  if (bias) v += bias[r];
  size_t at = out.first + i * out.stride + r;
  if (a.y_f32) {
    static_cast<float *>(out.y)[at] = v;
  } else {
    static_cast<uint16_t *>(out.y)[at] = bf16_from_f32(v);
  }
}

// The rows of a block of linear_vec, of matrix 0, which is w, or i + 1, which is also[i].
struct linear_rows {
  uint32_t matrix, row0, end;
};

__device__ inline linear_rows linear_rows_of(const td_cu_linear_args &a) {
  uint32_t i = blockIdx.y, n = (a.n_rows + VEC_ROWS - 1) / VEC_ROWS;
  if (i < n) return {0, a.row0 + i * VEC_ROWS, a.row0 + a.n_rows};
  i -= n;
  n = (a.also[0].w.rows + VEC_ROWS - 1) / VEC_ROWS;
  if (i < n) return {1, i * VEC_ROWS, a.also[0].w.rows};
  return {2, (i - n) * VEC_ROWS, a.also[1].w.rows};
}

// Arguments are not indexed by what is not a constant, which would put them in local memory.
__device__ inline linear_part linear_part_of(const td_cu_linear_args &a, const linear_rows &rows) {
  linear_part part = linear_part_of(a, blockIdx.x);
  if (rows.matrix == 1) part.w = a.also[0].w;
  if (rows.matrix == 2) part.w = a.also[1].w;
  return part;
}

__device__ inline linear_out linear_out_of(const td_cu_linear_args &a, const linear_rows &rows) {
  if (rows.matrix == 1) return {a.also[0].y, a.also[0].bias, 0, a.also[0].y_stride, 0};
  if (rows.matrix == 2) return {a.also[1].y, a.also[1].bias, 0, a.also[1].y_stride, 0};
  return linear_out_of(a);
}

// Adds the warps' sums in order and stores them, times unit. total: of a lane's fragments, for the
// block's rows.
template <int N>
__device__ inline void put_row_sums(const td_cu_linear_args &a, const float (&total)[N][4],
                                    float unit) {
  TD_DYNAMIC_SHARED(shared);
  float(*sums)[N * VEC_TILE_TOKENS][VEC_ROWS] =
      reinterpret_cast<float(*)[N * VEC_TILE_TOKENS][VEC_ROWS]>(shared);
  uint32_t warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4, p = threadIdx.x % 4 * 2;
#pragma unroll
  for (uint32_t t = 0; t < N; t++) {
    for (uint32_t c = 0; c < 4; c++)
      sums[warp][t * VEC_TILE_TOKENS + p + c % 2][g + c / 2 * 8] = total[t][c];
  }
  __syncthreads();
  const linear_rows rows = linear_rows_of(a); // recomputed to save registers, as what follows
  const linear_part part = linear_part_of(a, rows);
  const linear_out out = linear_out_of(a, rows);
  const float *bias = linear_bias(a, blockIdx.x);
  for (uint32_t i = threadIdx.x; i < part.n * VEC_ROWS; i += blockDim.x) {
    uint32_t t = i / VEC_ROWS, r = i % VEC_ROWS;
    float sum = 0;
    for (uint32_t j = 0; j < blockDim.x / WARP; j++)
      sum += sums[j][t][r];
    if (rows.row0 + r < rows.end)
      linear_put(a, out, bias, part.begin + t, rows.row0 + r, sum * (unit * global_scale(part.w)));
  }
}

// td_cu_linear_vec for TD_CU_READ_BLOCKS.
int linear_blocks(const td_cu_linear_args *a, td_cu_stream stream);

#endif
