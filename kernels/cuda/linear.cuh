// kernels/cuda/linear.cuh - which part of a linear operator a block computes.
#pragma once

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

// Part i of a matrix; n is 0 after the last part.
__device__ inline linear_part linear_part_of(const td_cu_linear_args &a, uint32_t i,
                                             uint32_t matrix = blockIdx.z) {
  if (!a.range.tiles) {
    uint32_t begin = i * a.tile_tokens;
    uint32_t n = begin < a.n_tokens ? at_most(a.n_tokens - begin, a.tile_tokens) : 0;
    return {a.experts ? a.experts[matrix * a.n_experts] : a.w, begin, n, begin};
  }
  uint32_t first = first_tile(a.range);
  if (i >= n_tiles_from(a.range, first)) return {a.w, 0, 0, 0};
  td_cu_tile tile = a.range.tiles[first + i];
  uint32_t begin = tile.begin - a.range.tiles[first].begin;
  uint32_t e = a.slots ? static_cast<uint32_t>(a.slots[tile.expert])
                       : tile.expert - a.range.first_expert;
  return {a.experts[matrix * a.n_experts + e], begin, tile.n, a.x_rows ? tile.begin : begin};
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

// v may be a product, which is rounded first: then kernels have the same bits however they are
// compiled.
__device__ inline void linear_put(const td_cu_linear_args &a, const linear_out &out,
                                  const float *bias, uint32_t i, uint32_t row, float v) {
  uint32_t r = row - out.row0;
  if (out.bias.data) v = plain_sum(v, vec_at(out.bias, r));
  if (bias) v = plain_sum(v, bias[r]);
  size_t at = out.first + i * out.stride + r;
  if (a.y_f32) {
    float *y = static_cast<float *>(out.y) + at;
    *y = a.add ? plain_sum(*y, v) : v;
  } else {
    uint16_t *y = static_cast<uint16_t *>(out.y) + at;
    *y = bf16_from_f32(a.add ? plain_sum(f32_from_bf16(*y), v) : v);
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

// Which of a linear_vec block's warps have a matrix, and number idx of them. Of gate and up each
// has half of the warps.
struct matrix_warps {
  uint32_t matrix, idx, n;
};

__device__ inline matrix_warps matrix_warps_of(const td_cu_linear_args &a) {
  const uint32_t warp = threadIdx.x / WARP, n = blockDim.x / WARP;
  if (!a.glu.out) return {blockIdx.z, warp, n};
  return {warp / (n / 2), warp % (n / 2), n / 2};
}

// Arguments are not indexed by what is not a constant, which would put them in local memory.
__device__ inline linear_part linear_part_of(const td_cu_linear_args &a, const linear_rows &rows,
                                             uint32_t matrix) {
  linear_part part = linear_part_of(a, blockIdx.x, matrix);
  if (rows.matrix == 1) part.w = a.also[0].w;
  if (rows.matrix == 2) part.w = a.also[1].w;
  return part;
}

__device__ inline linear_out linear_out_of(const td_cu_linear_args &a, const linear_rows &rows) {
  if (rows.matrix == 1) return {a.also[0].y, a.also[0].bias, 0, a.also[0].y_stride, 0};
  if (rows.matrix == 2) return {a.also[1].y, a.also[1].bias, 0, a.also[1].y_stride, 0};
  return linear_out_of(a);
}

// A row's sum is that of its parts, of at most MOST_PARTS, and a part's that of consecutive slices
// of the columns, one of linear_vec's warps each; all of them in order, whatever kernel adds them.
enum { MOST_PARTS = TD_CU_WIDE_PARTS };

static_assert(static_cast<int>(TD_CU_VEC_WARPS) <= 2 * MOST_PARTS, "parts of one slice or two");

TD_ANYWHERE inline uint32_t slices_of_part(uint32_t n_slices) {
  return n_slices > MOST_PARTS ? 2 : 1;
}

template <int TOKENS>
__device__ inline float sum_of_warps(const float (*sums)[TOKENS][VEC_ROWS], uint32_t n, uint32_t t,
                                     uint32_t r) {
  float sum = 0;
  if (slices_of_part(n) == 2) {
#pragma unroll 4
    for (uint32_t j = 0; j < n; j += 2)
      sum += sums[j][t][r] + (j + 1 < n ? sums[j + 1][t][r] : 0);
    return sum;
  }
#pragma unroll 4
  for (uint32_t j = 0; j < n; j++)
    sum += sums[j][t][r];
  return sum;
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
  const uint32_t n_sums = matrix_warps_of(a).n;
  const linear_part part = linear_part_of(a, rows, a.glu.out ? 0 : blockIdx.z);
  const float factor = unit * global_scale(part.w);
  if (a.glu.out) {
    const float up_factor = unit * global_scale(linear_part_of(a, rows, 1).w);
    for (uint32_t i = threadIdx.x; i < part.n * VEC_ROWS; i += blockDim.x) {
      const uint32_t t = i / VEC_ROWS, r = i % VEC_ROWS;
      const float gate = sum_of_warps(sums, n_sums, t, r) * factor;
      const float up = sum_of_warps(sums + n_sums, n_sums, t, r) * up_factor;
      if (rows.row0 + r < rows.end)
        a.glu.out[static_cast<size_t>(part.begin + t) * a.n_rows + rows.row0 - a.row0 + r] =
            bf16_from_f32(swiglu(a.glu, gate, up));
    }
    return;
  }
  const linear_out out = linear_out_of(a, rows);
  const float *bias = linear_bias(a, blockIdx.x);
  for (uint32_t i = threadIdx.x; i < part.n * VEC_ROWS; i += blockDim.x) {
    const uint32_t t = i / VEC_ROWS, r = i % VEC_ROWS;
    const float sum = sum_of_warps(sums, n_sums, t, r);
    if (rows.row0 + r < rows.end)
      linear_put(a, out, bias, part.begin + t, rows.row0 + r, sum * factor);
  }
}

// td_cu_linear_vec for TD_CU_READ_BLOCKS, and for tiles of more than TD_CU_VEC_TOKENS tokens.
int linear_blocks(const td_cu_linear_args *a, td_cu_stream stream);
int linear_wide(const td_cu_linear_args *a, td_cu_stream stream);
