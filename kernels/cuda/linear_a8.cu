// kernels/cuda/linear_a8.cu - y = W x for many tokens with both factors in 8 bits: in E4M3 on the
// tensor cores of sm_89 and later, in INT8 on those of sm_80 and later.
// round_a8 rounds activations in blocks of 128 columns with a scale each. A block of linear_a8 has
// eight warps, two by tokens and four by rows of W, and computes 64 or 128 tokens by 128 rows.
// Steps are of 128 columns, within which scales are constant: a step's products are summed apart,
// and the sum times the scales of token and row is added to the total in FP32. Tensor cores keep
// fewer bits of a sum of E4M3 than FP32 has, so none is longer than a step; sums of INT8 are exact.
// A token's result does not depend on the tile's size or on its neighbours.
// Warps w and w + 4 share tensor cores. The latter, which have the other half of the tokens, are
// half a step late: they pass a step's barrier in the middle of the one before, and copy later
// behind it. So one warp multiplies while the other one copies, loads fragments or adds sums to
// totals. At a step's barrier nobody reads what is two steps older, where the next step's copies
// go.
#include "kernels/cuda/a8.cuh"
#include "kernels/cuda/attn.cuh"
#include "kernels/cuda/linear.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/swizzle.cuh"

enum {
  THREADS = 256,
  ROWS = 128,
  STEP = TD_CU_A8_BLOCK, // columns, and bytes of a row
  STEP_MMAS = STEP / 32, // instructions along a step
  STAGES = 3,
  WARP_ROWS = 32,
  COPY = 16,                           // bytes
  ROWS_AT_ONCE = THREADS * COPY / STEP // that the threads copy
};
static_assert(STEP == 2 * PANEL, "a panel's row is a step");
static_assert(THREADS == 2 * ROWS, "half of the threads have the scale of a row each");

// ---- rounding -----------------------------------------------------------------------------------

__device__ inline uint32_t larger(uint32_t a, uint32_t b) {
  return a > b ? a : b;
}

// 16 lanes have a block's columns, eight each. RUNS: rows can be loaded in runs.
template <class Codes, bool RUNS> __global__ static void round_a8_kernel(td_cu_round_a8_args a) {
  const pair_range used = pairs_of(a.range, a.n_rows);
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
    // Magnitudes compare as their bits, NaN above all. What is not finite is so in the scale.
    uint32_t most_bits = __float_as_uint(TD_CU_A8_LEAST_MOST);
    for (uint32_t i = 0; i < RUN_OF_8; i++)
      most_bits = larger(most_bits, __float_as_uint(fabsf(v[i])));
    for (int lane = 8; lane > 0; lane /= 2)
      most_bits = larger(most_bits, __shfl_xor_sync(TD_FULL_WARP, most_bits, lane));
    if (!is_there) continue;
    const float most = __uint_as_float(most_bits), factor = Codes::MOST / most;
    uint2 codes = {Codes::codes(v, factor), Codes::codes(v + 4, factor)};
    *reinterpret_cast<uint2 *>(a.codes + row * n_blocks * STEP + column) = codes;
    if (threadIdx.x % 16 == 0) a.scales[at] = most / Codes::MOST;
  }
}

template <class Codes> static int round_to(const td_cu_round_a8_args *a, td_cu_stream stream) {
  const size_t n = static_cast<size_t>(a->n_rows) * ceil_div(a->cols, STEP);
  const uint32_t n_blocks = at_most(ceil_div(n, THREADS / 16), 4096);
  auto kernel = in_runs(a->x, a->x_stride) ? round_a8_kernel<Codes, true>
                                           : round_a8_kernel<Codes, false>;
  return TD_LAUNCH(kernel, n_blocks, THREADS, 0, stream, *a);
}

extern "C" int td_cu_round_a8(const td_cu_round_a8_args *a, td_cu_stream stream) {
  return a->dtype == TD_I8 ? round_to<int8>(a, stream) : round_to<e4m3>(a, stream);
}

// ---- products -----------------------------------------------------------------------------------

template <int TOKENS> struct a8_shared {
  uint16_t x[STAGES][TOKENS][PANEL]; // codes, swizzled by chunks of 16
  uint16_t w[STAGES][ROWS][PANEL];
  float x_scale[STAGES][TOKENS];
  float w_scale[STAGES][ROWS];
};
static_assert(sizeof(a8_shared<TD_CU_A8_TOKENS>) <= SHARED_BYTES, "");

// What a thread copies: a chunk of some rows, and a scale.
template <int TOKENS> struct a8_source {
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

__device__ inline size_t a8_row(const td_cu_linear_args &a, uint32_t i) {
  return a.x_rows ? a.x_rows[i] : i;
}

template <int TOKENS>
__device__ static a8_source<TOKENS> a8_source_of(const td_cu_linear_args &a,
                                                 const linear_part &part, uint32_t row0) {
  const uint32_t column = threadIdx.x % PANEL_CHUNKS * COPY, last = a.row0 + a.n_rows - 1;
  const uint32_t n_blocks = (part.w.cols + STEP - 1) / STEP;
  a8_source<TOKENS> from = {};
#pragma unroll
  for (uint32_t i = 0; i < TOKENS / ROWS_AT_ONCE; i++) {
    if (copied_row(i) < part.n)
      from.x[i] = a.x8 + a8_row(a, part.x_begin + copied_row(i)) * n_blocks * STEP + column;
  }
  from.scale_steps = 1;
  if (threadIdx.x < part.n && threadIdx.x < TOKENS)
    from.scale = a.x8_scale + a8_row(a, part.x_begin + threadIdx.x) * n_blocks;
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

// The thread's chunks of codes of W from column k on, zeros past the last column and row.
template <int TOKENS>
__device__ static void copy_rows(const a8_source<TOKENS> &from, uint32_t k, uint32_t cols,
                                 uint16_t (&w)[ROWS][PANEL]) {
  const uint32_t chunk = threadIdx.x % PANEL_CHUNKS, column = k + chunk * COPY;
#pragma unroll
  for (uint32_t i = 0; from.in_runs && i < ROWS / ROWS_AT_ONCE; i++)
    copy_async(chunk_of(&w, copied_row(i), chunk),
               reinterpret_cast<const uint16_t *>(from.w + i * from.w_step + k),
               column < cols && copied_row(i) < from.n_rows);
  if (from.in_runs) return;
#pragma unroll 1
  for (uint32_t e = 0; e < 2 * ROWS / ROWS_AT_ONCE; e++) {
    const uint32_t i = e / 2, half = e % 2;
    copy_async_value(reinterpret_cast<uint2 *>(chunk_of(&w, copied_row(i), chunk)) + half,
                     reinterpret_cast<const uint2 *>(from.w + i * from.w_step + k) + half,
                     column + half * COPY / 2 < cols && copied_row(i) < from.n_rows);
  }
}

// Begins to copy a step's codes and scales. Rows and columns that do not exist are zeros.
template <int TOKENS>
__device__ static void copy_step(const a8_source<TOKENS> &from, uint32_t step, uint32_t cols,
                                 a8_shared<TOKENS> &s) {
  const uint32_t stage = step % STAGES, k = step * STEP;
  const uint32_t chunk = threadIdx.x % PANEL_CHUNKS;
  if (k < cols) {
#pragma unroll
    for (uint32_t i = 0; i < TOKENS / ROWS_AT_ONCE; i++)
      copy_async(chunk_of(&s.x[stage], copied_row(i), chunk),
                 reinterpret_cast<const uint16_t *>(from.x[i] + k), from.x[i]);
    copy_rows<TOKENS>(from, k, cols, s.w[stage]);
    if (threadIdx.x < TOKENS || threadIdx.x >= ROWS) {
      float *scale = threadIdx.x < ROWS ? s.x_scale[stage] : s.w_scale[stage];
      const uint32_t at = from.scale_steps == 1 ? step : step / from.scale_steps;
      copy_async_value(scale + threadIdx.x % ROWS, from.scale + at, from.scale);
    }
  }
}

template <int TOKENS> constexpr int TOKEN_TILES = TOKENS / 2 / 16; // of a warp
enum { ROW_TILES = WARP_ROWS / 8 };

// total += a step's products times their scales, for the warp's tokens from t0 on by its rows from
// r0 on: total[i][j] is tokens i*16.. by rows j*8... before(i) is called before each tile i of
// tokens, and behind the last.
template <class Codes, int TOKENS, class Before>
__device__ static void multiply_step(a8_shared<TOKENS> &s, uint32_t stage, uint32_t t0, uint32_t r0,
                                     float (&total)[TOKEN_TILES<TOKENS>][ROW_TILES][4],
                                     Before before) {
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
    before(i);
    uint32_t x[STEP_MMAS][4];
    typename Codes::sum_type sum[ROW_TILES][4];
#pragma unroll
    for (uint32_t e = 0; e < 4 * ROW_TILES; e++)
      sum[e / 4][e % 4] = Codes::FIRST;
#pragma unroll
    for (uint32_t k = 0; k < STEP_MMAS; k++) {
      load_matrices(x[k], chunk_of(&s.x[stage], t0 + 16 * i + lane % 16, 2 * k + lane / 16));
      for (uint32_t j = 0; j < ROW_TILES; j++)
        mma_8bit(sum[j], x[k], {w[k][j / 2][j % 2 * 2], w[k][j / 2][j % 2 * 2 + 1]});
    }
#pragma unroll
    for (uint32_t e = 0; e < 4 * ROW_TILES; e++) {
      const float x_scale = s.x_scale[stage][t0 + 16 * i + g + e % 4 / 2 * 8];
      total[i][e / 4][e % 4] += x_scale * w_scale[e / 4][e % 2] * Codes::value(sum[e / 4][e % 4]);
    }
  }
  before(TOKEN_TILES<TOKENS>);
}

template <class Codes, int TOKENS>
__device__ static void linear_a8_part(const td_cu_linear_args &a, const linear_part &part,
                                      uint32_t at, uint32_t row_tile, a8_shared<TOKENS> &s) {
  const uint32_t row0 = a.row0 + row_tile * ROWS, cols = part.w.cols;
  const uint32_t warp = threadIdx.x / WARP, t0 = warp / 4 * (TOKENS / 2), r0 = warp % 4 * WARP_ROWS;
  const a8_source<TOKENS> from = a8_source_of<TOKENS>(a, part, row0);
  float total[TOKEN_TILES<TOKENS>][ROW_TILES][4] = {};
  const bool is_late = warp >= THREADS / WARP / 2;
  const auto meet = [] { // after it the copies of the step before are there
    copy_async_wait();
    barrier_anywhere();
  };
  copy_step<TOKENS>(from, 0, cols, s);
  meet();
  copy_step<TOKENS>(from, 1, cols, s);
#pragma unroll 1
  for (uint32_t step = 0; step * STEP < cols; step++) {
    if (step > 0 && !is_late) {
      meet();
      copy_step<TOKENS>(from, step + 1, cols, s);
    }
    multiply_step<Codes, TOKENS>(s, step % STAGES, t0, r0, total, [&](uint32_t tile) {
      if (tile == TOKEN_TILES<TOKENS> / 2 && is_late) meet();
      if (tile == TOKEN_TILES<TOKENS> / 2 + 1 && is_late)
        copy_step<TOKENS>(from, step + 2, cols, s);
    });
  }
  if (!is_late) meet();
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

template <class Codes, int TOKENS>
__global__ static void __launch_bounds__(THREADS, 1) linear_a8_kernel(td_cu_linear_args a) {
  if constexpr (Codes::HAS_MMA) {
    TD_DYNAMIC_SHARED(memory);
    auto &s = *reinterpret_cast<a8_shared<TOKENS> *>(memory);
    // Blocks that run at a time share rows of W and tokens: eight tiles of tokens go through the
    // rows together.
    enum { TOGETHER = 8 };
    const uint32_t flat = blockIdx.y * gridDim.x + blockIdx.x, of_group = TOGETHER * gridDim.x;
    const uint32_t group = flat / of_group * TOGETHER, in_group = flat % of_group;
    const uint32_t n = at_most(gridDim.y - group, TOGETHER);
#pragma unroll 1
    for (uint32_t i = group + in_group % n;; i += gridDim.y) {
      const linear_part part = linear_part_of(a, i);
      if (part.n == 0) return;
      linear_a8_part<Codes, TOKENS>(a, part, i, in_group / n, s);
      __syncthreads(); // before the next part's first step
    }
  } else {
#if defined(__CUDA_ARCH__)
    __trap(); // unreachable: td_cu_props.has_f8 is false
#endif
  }
}

template <class Codes, int TOKENS>
static int launch(const td_cu_linear_args *a, td_cu_stream stream) {
  auto kernel = linear_a8_kernel<Codes, TOKENS>;
  const size_t n_bytes = sizeof(a8_shared<TOKENS>);
  if (int failed = allow_shared(kernel, n_bytes)) return failed;
  dim3 grid(ceil_div(a->n_rows, ROWS), a->n_at_once, a->n_matrices);
  return TD_LAUNCH(kernel, grid, THREADS, n_bytes, stream, *a);
}

template <class Codes> static int launch_tiles(const td_cu_linear_args *a, td_cu_stream stream) {
  if (a->tile_tokens <= TD_CU_MMA_TOKENS) return launch<Codes, TD_CU_MMA_TOKENS>(a, stream);
  return launch<Codes, TD_CU_A8_TOKENS>(a, stream);
}

extern "C" int td_cu_linear_a8(const td_cu_linear_args *a, td_cu_stream stream) {
  return a->w.dtype == TD_I8 ? launch_tiles<int8>(a, stream) : launch_tiles<e4m3>(a, stream);
}
