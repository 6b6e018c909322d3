// kernels/cuda/linear_f8.cu - y = W x for many tokens with both factors in E4M3, on the tensor
// cores of sm_89 and later.
// round_f8 rounds activations in blocks of 128 columns with a scale each. A block of linear_f8 has
// eight warps, two by tokens and four by rows of W, and computes 64 or 128 tokens by 128 rows.
// Steps are of 128 columns, within which scales are constant: a step's products are summed apart,
// and the sum times the scales of token and row is added to the total in FP32. Tensor cores keep
// fewer bits of a sum than FP32 has, so no sum of theirs is longer than a step. A token's result
// does not depend on the tile's size or on its neighbours.
// Copies are two steps ahead. The barrier at the beginning of a step is behind the last reads of
// the buffers that the step's copies go to.
#include "kernels/cuda/attn.cuh"
#include "kernels/cuda/linear.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/swizzle.cuh"

enum {
  THREADS = 256,
  ROWS = 128,
  STEP = TD_CU_F8_BLOCK, // columns, and bytes of a row
  STEP_MMAS = STEP / 32, // instructions along a step
  STAGES = 3,
  WARP_ROWS = 32,
  COPY = 16,                           // bytes
  ROWS_AT_ONCE = THREADS * COPY / STEP // that the threads copy
};
static_assert(STEP == 2 * PANEL, "a panel's row is a step");
static_assert(THREADS == 2 * ROWS, "half of the threads have the scale of a row each");

// ---- rounding -----------------------------------------------------------------------------------

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 890
// As the instruction does it.
__device__ static uint32_t e4m3_from_f32(float v) {
  const uint32_t sign = __float_as_uint(v) >> 24 & 0x80;
  if (isnan(v)) return 0x7f;
  const float m = fminf(fabsf(v), TD_CU_F8_MOST);
  if (m < 0x1p-6f) return sign | static_cast<uint32_t>(rintf(m * 512)); // subnormal
  uint32_t bits = __float_as_uint(m);
  bits += 0x7ffffu + (bits >> 20 & 1);
  return sign | ((bits >> 20) - (120 << 3));
}
#endif

// Nearest even; beyond the largest finite value, that one. NaN stays.
__device__ static uint32_t e4m3x2_from_f32(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return e4m3_from_f32(low) | e4m3_from_f32(high) << 8;
#endif
}

__device__ static uint32_t e4m3x4_from_f32(const float *v, float factor) {
  return e4m3x2_from_f32(v[0] * factor, v[1] * factor) |
         e4m3x2_from_f32(v[2] * factor, v[3] * factor) << 16;
}

// 16 lanes have a block's columns, eight each. RUNS: rows can be loaded in runs.
template <bool RUNS> __global__ static void round_f8_kernel(td_cu_round_f8_args a) {
  pair_range used = {0, a.n_rows};
  if (a.range.tiles) used = pairs_of(a.range);
  const uint32_t n_blocks = (a.cols + STEP - 1) / STEP;
  const size_t n = static_cast<size_t>(used.end - used.begin) * n_blocks;
  const size_t stride = static_cast<size_t>(gridDim.x) * THREADS / 16;
  // both blocks of a warp go around as often, since shuffles involve all lanes
  const size_t first = (static_cast<size_t>(blockIdx.x) * THREADS + threadIdx.x) / 16;
  for (size_t at = first; at - first % 2 < n; at += stride) {
    const bool is_there = at < n;
    const size_t row = at / n_blocks;
    const uint32_t block = static_cast<uint32_t>(at % n_blocks);
    const uint32_t column = block * STEP + threadIdx.x % 16 * RUN_OF_8;
    const uint16_t *x = a.x + row * a.x_stride + column;
    float v[RUN_OF_8] = {};
    if (RUNS && is_there && column + RUN_OF_8 <= a.cols) {
      load_run(x, v);
    } else {
      for (uint32_t i = 0; is_there && i < RUN_OF_8 && column + i < a.cols; i++)
        v[i] = f32_from_bf16(x[i]);
    }
    float most = TD_CU_F8_LEAST_MOST;
    for (uint32_t i = 0; i < RUN_OF_8; i++)
      most = fmaxf(most, fabsf(v[i]));
    for (int lane = 8; lane > 0; lane /= 2)
      most = fmaxf(most, __shfl_xor_sync(TD_FULL_WARP, most, lane));
    if (!is_there) continue;
    const float factor = TD_CU_F8_MOST / most;
    uint2 codes = {e4m3x4_from_f32(v, factor), e4m3x4_from_f32(v + 4, factor)};
    *reinterpret_cast<uint2 *>(a.codes + row * n_blocks * STEP + column) = codes;
    if (threadIdx.x % 16 == 0) a.scales[at] = most / TD_CU_F8_MOST;
  }
}

extern "C" int td_cu_round_f8(const td_cu_round_f8_args *a, td_cu_stream stream) {
  const size_t n = static_cast<size_t>(a->n_rows) * ceil_div(a->cols, STEP);
  const uint32_t n_blocks = at_most(ceil_div(n, THREADS / 16), 4096);
  if (in_runs(a->x, a->x_stride)) {
    TD_LAUNCH(round_f8_kernel<true>, n_blocks, THREADS, 0, stream, *a);
  } else {
    TD_LAUNCH(round_f8_kernel<false>, n_blocks, THREADS, 0, stream, *a);
  }
  return launched();
}

// ---- products -----------------------------------------------------------------------------------

template <int TOKENS> struct f8_shared {
  uint16_t x[STAGES][TOKENS][PANEL]; // codes, swizzled by chunks of 16
  uint16_t w[STAGES][ROWS][PANEL];
  float x_scale[STAGES][TOKENS];
  float w_scale[STAGES][ROWS];
};
static_assert(sizeof(f8_shared<TD_CU_F8_TOKENS>) <= SHARED_BYTES, "");

// What a thread copies: a chunk of some rows, and a scale.
template <int TOKENS> struct f8_source {
  const uint8_t *x[TOKENS / ROWS_AT_ONCE]; // NULL: no such token
  const uint8_t *w;                        // of the first row
  size_t w_step;                           // to the next one
  uint32_t n_rows;                         // of W, from the first one on
  bool in_runs;                            // rows of W are aligned to COPY bytes, else to half
  const float *scale;   // of a token or, from thread ROWS on, of a row of W; NULL: none
  uint32_t scale_steps; // that a scale is for
};

__device__ inline uint32_t copied_row(uint32_t i) {
  return threadIdx.x / PANEL_CHUNKS + i * ROWS_AT_ONCE;
}

__device__ inline size_t f8_row(const td_cu_linear_args &a, uint32_t i) {
  return a.x_rows ? a.x_rows[i] : i;
}

template <int TOKENS>
__device__ static f8_source<TOKENS> f8_source_of(const td_cu_linear_args &a,
                                                 const linear_part &part, uint32_t row0) {
  const uint32_t column = threadIdx.x % PANEL_CHUNKS * COPY, last = a.row0 + a.n_rows - 1;
  const uint32_t n_blocks = (part.w.cols + STEP - 1) / STEP;
  f8_source<TOKENS> from = {};
#pragma unroll
  for (uint32_t i = 0; i < TOKENS / ROWS_AT_ONCE; i++) {
    if (copied_row(i) < part.n)
      from.x[i] = a.x8 + f8_row(a, part.x_begin + copied_row(i)) * n_blocks * STEP + column;
  }
  from.scale_steps = 1;
  if (threadIdx.x < part.n && threadIdx.x < TOKENS)
    from.scale = a.x8_scale + f8_row(a, part.x_begin + threadIdx.x) * n_blocks;
  if (threadIdx.x >= ROWS) {
    const uint32_t row = at_most(row0 + threadIdx.x % ROWS, last);
    from.scale = static_cast<const float *>(part.w.scale) +
                 static_cast<size_t>(row / part.w.scale_rows) * weight_groups(part.w);
    from.scale_steps = (part.w.scale_cols + STEP - 1) / STEP;
  }
  from.w_step = static_cast<size_t>(ROWS_AT_ONCE) * part.w.cols;
  from.w = static_cast<const uint8_t *>(part.w.data) +
           static_cast<size_t>(row0 + copied_row(0)) * part.w.cols + column;
  from.n_rows = last + 1 - row0;
  from.in_runs = (reinterpret_cast<uintptr_t>(part.w.data) | part.w.cols) % COPY == 0;
  return from;
}

// A chunk of COPY codes, as far as they are in the row.
__device__ inline void copy_codes(uint16_t *to, const uint8_t *from, bool in_runs, uint32_t column,
                                  uint32_t cols, bool is_there) {
  if (in_runs) {
    copy_async(to, reinterpret_cast<const uint16_t *>(from), is_there && column < cols);
    return;
  }
  for (uint32_t i = 0; i < 2; i++)
    copy_async_value(reinterpret_cast<uint2 *>(to) + i, reinterpret_cast<const uint2 *>(from) + i,
                     is_there && column + i * COPY / 2 < cols);
}

// Begins to copy a step's codes and scales. Rows and columns that do not exist are zeros.
template <int TOKENS>
__device__ static void copy_step(const f8_source<TOKENS> &from, uint32_t step, uint32_t cols,
                                 f8_shared<TOKENS> &s) {
  const uint32_t stage = step % STAGES, k = step * STEP;
  const uint32_t chunk = threadIdx.x % PANEL_CHUNKS, column = k + chunk * COPY;
  if (k < cols) {
#pragma unroll
    for (uint32_t i = 0; i < TOKENS / ROWS_AT_ONCE; i++)
      copy_async(chunk_of(&s.x[stage], copied_row(i), chunk),
                 reinterpret_cast<const uint16_t *>(from.x[i] + k), from.x[i]);
#pragma unroll
    for (uint32_t i = 0; i < ROWS / ROWS_AT_ONCE; i++)
      copy_codes(chunk_of(&s.w[stage], copied_row(i), chunk), from.w + i * from.w_step + k,
                 from.in_runs, column, cols, copied_row(i) < from.n_rows);
    if (threadIdx.x < TOKENS || threadIdx.x >= ROWS) {
      float *scale = threadIdx.x < ROWS ? s.x_scale[stage] : s.w_scale[stage];
      copy_async_value(scale + threadIdx.x % ROWS, from.scale + step / from.scale_steps,
                       from.scale);
    }
  }
  copy_async_commit();
}

template <int TOKENS> constexpr int TOKEN_TILES = TOKENS / 2 / 16; // of a warp
enum { ROW_TILES = WARP_ROWS / 8 };

// total += a step's products times their scales, for the warp's tokens from t0 on by its rows from
// r0 on: total[i][j] is tokens i*16.. by rows j*8...
template <int TOKENS>
__device__ static void multiply_step(f8_shared<TOKENS> &s, uint32_t stage, uint32_t t0, uint32_t r0,
                                     float (&total)[TOKEN_TILES<TOKENS>][ROW_TILES][4]) {
  const uint32_t lane = threadIdx.x % WARP, g = lane / 4, p = lane % 4 * 2;
  uint32_t w[STEP_MMAS][2][4]; // two tiles of rows each
  float w_scale[ROW_TILES][2];
#pragma unroll
  for (uint32_t k = 0; k < STEP_MMAS; k++) {
    for (uint32_t j = 0; j < 2; j++)
      load_matrices(w[k][j], chunk_of(&s.w[stage], r0 + 16 * j + lane / 16 * 8 + lane % 8,
                                      2 * k + lane / 8 % 2));
  }
#pragma unroll
  for (uint32_t j = 0; j < 2 * ROW_TILES; j++)
    w_scale[j / 2][j % 2] = s.w_scale[stage][r0 + j / 2 * 8 + p + j % 2];
#pragma unroll
  for (uint32_t i = 0; i < TOKEN_TILES<TOKENS>; i++) {
    uint32_t x[STEP_MMAS][4];
    float sum[ROW_TILES][4] = {};
#pragma unroll
    for (uint32_t k = 0; k < STEP_MMAS; k++) {
      load_matrices(x[k], chunk_of(&s.x[stage], t0 + 16 * i + lane % 16, 2 * k + lane / 16));
      for (uint32_t j = 0; j < ROW_TILES; j++)
        mma_e4m3(sum[j], x[k], {w[k][j / 2][j % 2 * 2], w[k][j / 2][j % 2 * 2 + 1]});
    }
#pragma unroll
    for (uint32_t e = 0; e < 4 * ROW_TILES; e++) {
      const float x_scale = s.x_scale[stage][t0 + 16 * i + g + e % 4 / 2 * 8];
      total[i][e / 4][e % 4] += x_scale * w_scale[e / 4][e % 2] * sum[e / 4][e % 4];
    }
  }
}

template <int TOKENS>
__device__ static void linear_f8_part(const td_cu_linear_args &a, const linear_part &part,
                                      uint32_t at, uint32_t row_tile, f8_shared<TOKENS> &s) {
  const uint32_t row0 = a.row0 + row_tile * ROWS, cols = part.w.cols;
  const uint32_t warp = threadIdx.x / WARP, t0 = warp / 4 * (TOKENS / 2), r0 = warp % 4 * WARP_ROWS;
  const f8_source<TOKENS> from = f8_source_of<TOKENS>(a, part, row0);
  float total[TOKEN_TILES<TOKENS>][ROW_TILES][4] = {};
#pragma unroll 1
  for (uint32_t step = 0; step < STAGES - 1; step++)
    copy_step<TOKENS>(from, step, cols, s);
#pragma unroll 1
  for (uint32_t step = 0; step * STEP < cols; step++) {
    copy_async_wait_for<STAGES - 2>();
    __syncthreads();
    copy_step<TOKENS>(from, step + STAGES - 1, cols, s);
    multiply_step<TOKENS>(s, step % STAGES, t0, r0, total);
  }
  const float *bias = linear_bias(a, at);
  const linear_out out = linear_out_of(a);
  const uint32_t g = threadIdx.x % WARP / 4, p = threadIdx.x % 4 * 2;
#pragma unroll
  for (uint32_t e = 0; e < TOKEN_TILES<TOKENS> * ROW_TILES * 4; e++) {
    const uint32_t i = e / (ROW_TILES * 4), j = e / 4 % ROW_TILES, c = e % 4;
    const uint32_t t = t0 + 16 * i + g + c / 2 * 8, row = row0 + r0 + 8 * j + p + c % 2;
    if (t < part.n && row < a.row0 + a.n_rows)
      linear_put(a, out, bias, part.begin + t, row, total[i][j][c]);
  }
}

template <int TOKENS>
__global__ static void __launch_bounds__(THREADS, 1) linear_f8_kernel(td_cu_linear_args a) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
  TD_DYNAMIC_SHARED(memory);
  auto &s = *reinterpret_cast<f8_shared<TOKENS> *>(memory);
  // Blocks that run at a time share rows of W and tokens: eight tiles of tokens go through the rows
  // together.
  enum { TOGETHER = 8 };
  const uint32_t flat = blockIdx.y * gridDim.x + blockIdx.x, of_group = TOGETHER * gridDim.x;
  const uint32_t group = flat / of_group * TOGETHER, in_group = flat % of_group;
  const uint32_t n = at_most(gridDim.y - group, TOGETHER);
#pragma unroll 1
  for (uint32_t i = group + in_group % n;; i += gridDim.y) {
    const linear_part part = linear_part_of(a, i);
    if (part.n == 0) return;
    linear_f8_part<TOKENS>(a, part, i, in_group / n, s);
    copy_async_wait(); // steps behind the last one: nothing, but groups are counted
    __syncthreads();
  }
#elif defined(__CUDA_ARCH__)
  __trap(); // unreachable: td_cu_props.has_f8 is false
#endif
}

template <int TOKENS> static int launch(const td_cu_linear_args *a, td_cu_stream stream) {
  auto kernel = linear_f8_kernel<TOKENS>;
  const size_t n_bytes = sizeof(f8_shared<TOKENS>);
  cudaError_t code = allow_shared(kernel, n_bytes);
  if (code != cudaSuccess) return code;
  dim3 grid(ceil_div(a->n_rows, ROWS), a->n_at_once, a->n_matrices);
  TD_LAUNCH(kernel, grid, THREADS, n_bytes, stream, *a);
  return launched();
}

extern "C" int td_cu_linear_f8(const td_cu_linear_args *a, td_cu_stream stream) {
  if (a->tile_tokens <= TD_CU_MMA_TOKENS) return launch<TD_CU_MMA_TOKENS>(a, stream);
  return launch<TD_CU_F8_TOKENS>(a, stream);
}
