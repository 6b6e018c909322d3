// kernels/cuda/linear_vec.cu - y = W x for few tokens, at the speed of reading W.
// Up to 16 tokens are one pass; 17 to 64 are linear_wide's, with the same bits; more, which weights
// in F32 and F16 have, are passes of 16, by consecutive blocks that find W in L2. A block computes
// 16 rows of W by 8 or 16 tokens on tensor cores; its n warps take every n-th chunk of the columns,
// a slice. A warp loads a chunk of 1 or 2 KB, waits, and multiplies; TD_CU_VEC_WARPS warps per SM
// hide the memory latency. Nothing else is prefetched, because loads complete in order and needed
// data would wait for data needed later. A token's result does not depend on the other tokens.
#include "kernels/cuda/linear_chunk.cuh"

// Multiplies unit u of a chunk by the activations, which are in the order of the weights' pairs.
// sum: of the columns that share a scale.
template <int SPAN, int TERMS, int SCALES>
__device__ static void add_unit(uint32_t u, const uint32_t (&w)[2][TERMS][4],
                                const uint32_t (&x)[4], const float (&scale)[2][SCALES],
                                float (&sum)[4], float (&total)[4]) {
  enum { SHARE = SPAN / QUAD }; // units per scale
  if constexpr (SPAN == 0) {
    multiply(w, x, total);
  } else {
    if (u % SHARE == 0) sum[0] = sum[1] = sum[2] = sum[3] = 0;
    multiply(w, x, sum);
    if (u % SHARE == SHARE - 1) add_scaled(scale[0][u / SHARE], scale[1][u / SHARE], sum, total);
  }
}

template <bool WHOLE, bool ZEROS, int READ, int SPAN, int N>
__device__ static void add_chunk(const lane_rows &r, uint32_t k, const chunk_part<READ, SPAN> &part,
                                 const uint16_t *const (&x)[N], float (&total)[N][4]) {
  enum { UNITS = part.UNITS, SCALES = part.SCALES, RUN = part.RUN };
  float sum[N][4], scale[2][SCALES];
  for (int i = 0; SPAN > 0 && i < 2; i++)
    scale_values<READ>(r.scales[i].dtype, part.scale[i], scale[i]);
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    if (RUN > 1 && u % RUN == 0) __syncwarp(); // keeps the compiler from loading activations first
    uint32_t pairs[2][N_TERMS<READ>][4];
    unit_pairs<ZEROS>(r, part, u, pairs);
#pragma unroll
    for (int t = 0; t < N; t++) {
      uint4 v = {};
      if (WHOLE || k + unit_at<RUN>(u) + r.column < r.n_cols)
        v = __ldg(reinterpret_cast<const uint4 *>(x[t] + k) + unit_at<RUN>(u) / 8);
      uint32_t of_x[4] = {v.x, v.y, v.z, v.w};
      if (IN_FOURS<READ>) order_in_fours(of_x);
      add_unit<SPAN>(u, pairs, of_x, scale, sum[t], total[t]);
    }
  }
}

// Bounded so that registers suffice for that many warps per SM, in blocks of that many or a third.
template <int READ, int SPAN, bool ZEROS, int N>
__global__ static void __launch_bounds__(TD_CU_VEC_WARPS *WARP, 1)
    linear_vec_kernel(td_cu_linear_args a) {
  const linear_rows rows = linear_rows_of(a);
  const matrix_warps warps = matrix_warps_of(a);
  linear_part part = linear_part_of(a, rows, warps.matrix);
  if (part.n == 0) return;
  uint32_t n_cols = part.w.cols;
  const lane_rows r = rows_of<READ, SPAN>(part.w, rows.row0, rows.end);
  const uint16_t *x[N]; // past the last token: another token, whose sums are not stored
#pragma unroll
  for (uint32_t t = 0; t < N; t++) {
    uint32_t token = at_most(t * TOKENS + threadIdx.x % WARP / 4, part.n - 1);
    x[t] = linear_x(a, part.x_begin + token) + r.column;
  }
  float total[N][4] = {};
  chunk_part<READ, SPAN> chunk;
  uint32_t columns = chunk.COLUMNS, end = n_cols / columns * columns;
  uint32_t k = warps.idx * columns, step = warps.n * columns;
#pragma unroll 1
  for (; k < end; k += step) {
    fetch<true, ZEROS>(r, k, chunk);
    add_chunk<true, ZEROS>(r, k, chunk, x, total);
  }
  if (k == end && end < n_cols) {
    fetch<false, ZEROS>(r, end, chunk);
    add_chunk<false, ZEROS>(r, end, chunk, x, total);
  }
  put_row_sums(a, total, SUMS_UNIT<READ>);
}

// Any format, value by value: one warp per row; a lane takes every 32nd run of eight columns.
enum { ANY_WARPS = 4 };

template <int T> __global__ static void linear_any_kernel(td_cu_linear_args a) {
  linear_part part = linear_part_of(a, blockIdx.y);
  uint32_t row = a.row0 + blockIdx.x * ANY_WARPS + threadIdx.x / WARP;
  if (part.n == 0 || row >= a.row0 + a.n_rows) return;
  const td_weight &w = part.w;
  float sum[T] = {};
  for (uint32_t k = threadIdx.x % WARP * UNIT; k < w.cols; k += WARP * UNIT) {
    float v[UNIT];
    decode8<TD_CU_READ_ANY>(w, row, k, {}, v);
    scale_each(w, row, k, v);
#pragma unroll
    for (uint32_t t = 0; t < T; t++) {
      if (t >= part.n) break;
      float of_x[UNIT], dot = 0;
      activations8(linear_x(a, part.x_begin + t), k, w.cols, of_x);
      for (int e = 0; e < UNIT; e++)
        dot += v[e] * of_x[e];
      sum[t] += dot;
    }
  }
  const float *bias = linear_bias(a, blockIdx.y);
#pragma unroll
  for (uint32_t t = 0; t < T; t++) {
    if (t >= part.n) break;
    float total = warp_sum(sum[t]) * global_scale(w);
    if (threadIdx.x % WARP == 0) linear_put(a, linear_out_of(a), bias, part.begin + t, row, total);
  }
}

struct vec_kernels {
  template <int READ, int SPAN, bool ZEROS>
  static int launch(const td_cu_linear_args *a, td_cu_stream stream) {
    uint32_t n_blocks = ceil_div(a->n_rows, ROWS);
    for (const td_cu_linear_also &more : a->also)
      n_blocks += ceil_div(more.w.rows, ROWS);
    const uint32_t n_together = a->glu.out ? a->n_matrices : 1; // matrices of a block
    dim3 grid(a->n_at_once, n_blocks, a->n_matrices / n_together);
    const uint32_t n_warps = n_together * n_slices_of<READ, SPAN>(*a, a->w.cols);
    uint32_t shared_bytes = n_warps * a->tile_tokens * ROWS * sizeof(float);
    auto kernel = a->tile_tokens == TOKENS ? linear_vec_kernel<READ, SPAN, ZEROS, 1>
                                           : linear_vec_kernel<READ, SPAN, ZEROS, 2>;
    return TD_LAUNCH(kernel, grid, n_warps * WARP, shared_bytes, stream, *a);
  }
};

static int launch_any(const td_cu_linear_args *a, td_cu_stream stream) {
  dim3 grid(ceil_div(a->n_rows, ANY_WARPS), a->n_at_once, a->n_matrices);
  auto kernel = a->tile_tokens == TOKENS ? linear_any_kernel<TOKENS>
                                         : linear_any_kernel<TD_CU_VEC_TOKENS>;
  return TD_LAUNCH(kernel, grid, ANY_WARPS * WARP, 0, stream, *a);
}

extern "C" int td_cu_linear_vec(const td_cu_linear_args *a, td_cu_stream stream) {
  if (a->read == TD_CU_READ_ANY) return launch_any(a, stream);
  if (a->read == TD_CU_READ_BLOCKS) return linear_blocks(a, stream);
  if (a->tile_tokens > TD_CU_VEC_TOKENS) return linear_wide(a, stream);
  return launch_for_format<vec_kernels>(a, stream);
}
