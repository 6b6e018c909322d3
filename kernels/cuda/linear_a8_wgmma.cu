// kernels/cuda/linear_a8_wgmma.cu - y = W x for many tokens with both factors in E4M3 or INT8, on
// the tensor cores of sm_90a (linear_a8.cu has those of other GPUs, and the rounding of x). A block
// computes 256 rows of W by 64 or 128 tokens in steps of 128 columns, within which scales are
// constant. A warpgroup's unit is 64 tokens by 128 rows: of 128 tokens each warpgroup has a half
// and two units a step, of 64 tokens one unit. A unit's sum over a step times the scales of token
// and row is added to an FP32 total, since tensor cores keep some 14 bits of a sum of E4M3. While
// one warpgroup does that, the other one's unit is multiplied: they take turns. A token's result
// does not depend on the tile's size or on its neighbours.
#include "kernels/cuda/a8.cuh"
#include "kernels/cuda/linear_ring.cuh"

enum {
  STEP = TD_CU_A8_BLOCK, // columns, and bytes of a row
  STEP_MMAS = STEP / 32, // instructions along a step
  STAGES = 4,
  REGISTERS = 224, // of a thread that multiplies
  UNIT_TOKENS = 64,
  UNIT_ROWS = RING_ROWS / 2,
  BLOCKS = UNIT_ROWS / 8 // of eight rows, of a unit's sums
};
static_assert(STEP == 2 * PANEL, "a panel's row is a step");

template <int TOKENS> constexpr int UNITS = TOKENS / UNIT_TOKENS; // of a warpgroup

template <int TOKENS> struct a8_stages {
  uint16_t x[STAGES][TOKENS][PANEL]; // codes, swizzled by chunks of 16
  uint16_t w[STAGES][RING_ROWS][PANEL];
  float x_scale[STAGES][TOKENS];
  float w_scale[STAGES][RING_ROWS]; // where units share a scale, one a unit
  token_rows<TOKENS> rows[STAGES];  // of a warp that copies
  linear_ring<STAGES> ring;
  uint64_t turn[2]; // of a warpgroup
};

// ---- copies -------------------------------------------------------------------------------------

// SHARED: a unit's rows have one scale. Others have one each, as far as they exist.
template <bool SHARED>
__device__ static void copy_row_scales(const td_cu_linear_args &a, const td_weight &w,
                                       uint32_t row0, uint32_t step, float *to) {
  enum { EACH = SHARED ? UNIT_ROWS : 1, N = RING_ROWS / EACH };
  const uint32_t last = a.row0 + a.n_rows - 1, group = step / ((w.scale_cols + STEP - 1) / STEP);
  const float *scale = static_cast<const float *>(w.scale) + group;
#pragma unroll 1
  for (uint32_t i = threadIdx.x % WARP; i < N; i += WARP) {
    const uint32_t row = at_most(row0 + i * EACH, last);
    copy_async_value(to + i, scale + static_cast<size_t>(row / w.scale_rows) * weight_groups(w),
                     true);
  }
}

template <int TOKENS, bool SHARED>
__device__ static void copy_step(const td_cu_linear_args &a, const linear_part &part,
                                 token_rows<TOKENS> &rows, uint32_t row0, uint32_t step,
                                 uint32_t stage, a8_stages<TOKENS> &s) {
  const uint32_t first = step * STEP;
  const td_weight &w = part.w;
  copy_panel(a.x8, first, true, part.n, rows, s.x[stage]);
  copy_codes<PANEL_CHUNKS, uint2>(codes_of<PANEL_CHUNKS>(w, w.cols, row0, a.row0 + a.n_rows), first,
                                  reinterpret_cast<uint4 *>(s.w[stage]));
#pragma unroll 2
  for (uint32_t t = threadIdx.x % WARP; t < TOKENS; t += WARP) {
    const uint32_t first_scale = row_of_token(rows.at, TOKENS, t) / (STEP / COPY);
    copy_async_value(&s.x_scale[stage][t], a.x8_scale + first_scale + step, true);
  }
  copy_row_scales<SHARED>(a, w, row0, step, s.w_scale[stage]);
}

template <int TOKENS, bool SHARED>
__device__ static void copy_tiles(const td_cu_linear_args &a, a8_stages<TOKENS> &s) {
  const linear_span &span = s.ring.span;
  uint32_t n = 0; // steps of tiles before
#pragma unroll 1
  for (uint32_t at = span.first;; at += gridDim.y) {
    const linear_part &part = find_part(a, at, s.ring);
    if (part.n == 0) return;
    const uint32_t n_steps = (part.w.cols + STEP - 1) / STEP;
    token_rows<TOKENS> &rows = s.rows[threadIdx.x / WARP - MULTIPLY_WARPS];
    find_rows(a, part, n_steps * STEP, rows);
#pragma unroll 1
    for (uint32_t tile = span.begin; tile < span.end; tile++, n += n_steps) {
#pragma unroll 1
      for (uint32_t i = ring_next<STAGES>(n); i < n + n_steps; i += STAGES) {
        ring_wait_free(s.ring, i);
        copy_step<TOKENS, SHARED>(a, part, rows, a.row0 + tile * RING_ROWS, i - n, i % STAGES, s);
        ring_fill(s.ring, i);
      }
    }
  }
}

// ---- products -----------------------------------------------------------------------------------

// The warpgroup's unit: first token and row in the tile.
template <int TOKENS> __device__ inline uint32_t unit_token() {
  return UNITS<TOKENS> == 2 ? threadIdx.x / GROUP * UNIT_TOKENS : 0;
}

template <int TOKENS> __device__ inline uint32_t unit_row(uint32_t unit) {
  return (UNITS<TOKENS> == 2 ? unit : threadIdx.x / GROUP) * UNIT_ROWS;
}

// The first of the thread's two tokens in the tile; the other is eight further on.
template <int TOKENS> __device__ inline uint32_t first_token() {
  return unit_token<TOKENS>() + threadIdx.x % GROUP / WARP * 16 + threadIdx.x % WARP / 4;
}

// The n-th unit of each of the two warpgroups: the second one's behind the first one's, and that
// behind the second one's before.
__device__ inline void wait_turn(uint64_t (&turn)[2], uint32_t n) {
  const uint32_t group = threadIdx.x / GROUP;
  mbarrier_wait(&turn[group], group == 0 ? n + 1 : n);
}

__device__ inline void end_turn(uint64_t (&turn)[2]) {
  __syncwarp();
  if (threadIdx.x % WARP == 0) mbarrier_arrive(&turn[1 - threadIdx.x / GROUP]);
}

// total += sum times the scales of tokens and rows.
template <class Codes, bool SHARED>
__device__ static void take(const typename Codes::sum_type (&sum)[BLOCKS][4],
                            const float (&x_scale)[2], const float *w_scale,
                            float (&total)[BLOCKS][4]) {
  const uint32_t p = unknown(threadIdx.x % 4 * 2);
#pragma unroll
  for (uint32_t j = 0; j < BLOCKS; j++) {
#pragma unroll
    for (uint32_t e = 0; e < 4; e++) {
      const float scale = SHARED ? *w_scale : w_scale[8 * j + p + e % 2];
      total[j][e] += x_scale[e / 2] * scale * Codes::value_from_zero(sum[j][e]);
    }
  }
}

// total += step n of the block for the warpgroup's units.
template <class Codes, int TOKENS, bool SHARED>
__device__ static void multiply_step(a8_stages<TOKENS> &s, uint32_t n,
                                     float (&total)[UNITS<TOKENS>][BLOCKS][4]) {
  const uint32_t stage = n % STAGES;
  ring_wait_full(s.ring, n);
  const float *x_scales = &s.x_scale[stage][first_token<TOKENS>()];
  const float x_scale[2] = {x_scales[0], x_scales[8]};
#pragma unroll
  for (uint32_t unit = 0; unit < UNITS<TOKENS>; unit++) {
    typename Codes::sum_type sum[BLOCKS][4];
    const uint16_t *x = s.x[stage][unit_token<TOKENS>()], *w = s.w[stage][unit_row<TOKENS>(unit)];
    wait_turn(s.turn, n * UNITS<TOKENS> + unit);
    wgmma_begin();
#pragma unroll
    for (uint32_t k = 0; k < STEP_MMAS; k++)
      wgmma_rows_8bit<UNIT_ROWS>(sum, wgmma_matrix(x + 16 * k, TOKENS),
                                 wgmma_matrix(w + 16 * k, RING_ROWS), k > 0);
    wgmma_commit();
    end_turn(s.turn);
    const uint32_t at = unit_row<TOKENS>(unit) / (SHARED ? UNIT_ROWS : 1);
    wgmma_wait<0>(sum);
    take<Codes, SHARED>(sum, x_scale, &s.w_scale[stage][at], total[unit]);
  }
  ring_free(s.ring, n);
}

__device__ inline void put_pair(float *to, float v0, float v1) {
  *reinterpret_cast<uint2 *>(to) = {__float_as_uint(v0), __float_as_uint(v1)};
}

__device__ inline void put_pair(uint16_t *to, float v0, float v1) {
  *reinterpret_cast<uint32_t *>(to) = bf16x2_from_f32(v0, v1);
}

// A whole tile without biases, in pairs of rows.
template <int TOKENS, class Out>
__device__ static void put_pairs(Out *y, const linear_out &out, const linear_part &part,
                                 uint32_t row0, const float (&total)[UNITS<TOKENS>][BLOCKS][4]) {
#pragma unroll
  for (uint32_t second = 0; second < 2; second++) {
    const uint32_t t = first_token<TOKENS>() + 8 * second;
    if (t >= part.n) return;
    Out *to = y + out.first + (part.begin + t) * out.stride + row0 - out.row0 +
              unknown(threadIdx.x % 4 * 2);
#pragma unroll
    for (uint32_t e = 0; e < UNITS<TOKENS> * BLOCKS; e++) {
      const uint32_t unit = e / BLOCKS, j = e % BLOCKS;
      put_pair(to + unit_row<TOKENS>(unit) + 8 * j, total[unit][j][2 * second],
               total[unit][j][2 * second + 1]);
    }
  }
}

template <int TOKENS>
__device__ static void put_tile(const td_cu_linear_args &a, const linear_part &part, uint32_t at,
                                uint32_t row0, const float (&total)[UNITS<TOKENS>][BLOCKS][4]) {
  const float *bias = linear_bias(a, at);
  const linear_out out = linear_out_of(a);
  const uint32_t end = a.row0 + a.n_rows, p = unknown(threadIdx.x % 4 * 2);
  const bool is_even = (out.first | out.stride | (row0 - out.row0)) % 2 == 0 &&
                       reinterpret_cast<uintptr_t>(out.y) % sizeof(uint2) == 0;
  if (is_even && !bias && !out.bias.data && row0 + RING_ROWS <= end) {
    if (a.y_f32) put_pairs<TOKENS>(static_cast<float *>(out.y), out, part, row0, total);
    if (!a.y_f32) put_pairs<TOKENS>(static_cast<uint16_t *>(out.y), out, part, row0, total);
    return;
  }
#pragma unroll
  for (uint32_t e = 0; e < UNITS<TOKENS> * BLOCKS * 4; e++) {
    const uint32_t unit = e / (4 * BLOCKS), j = e / 4 % BLOCKS, c = e % 4;
    const uint32_t t = first_token<TOKENS>() + c / 2 * 8;
    const uint32_t row = row0 + unit_row<TOKENS>(unit) + 8 * j + p + c % 2;
    if (t < part.n && row < end) linear_put(a, out, bias, part.begin + t, row, total[unit][j][c]);
  }
}

template <class Codes, int TOKENS, bool SHARED>
__device__ static void multiply_tiles(const td_cu_linear_args &a, a8_stages<TOKENS> &s) {
  const linear_span &span = s.ring.span;
  uint32_t n = 0; // steps
#pragma unroll 1
  for (uint32_t at = span.first;; at += gridDim.y) {
    const linear_part &part = find_part(a, at, s.ring);
    if (part.n == 0) return;
#pragma unroll 1
    for (uint32_t tile = span.begin; tile < span.end; tile++) {
      float total[UNITS<TOKENS>][BLOCKS][4] = {};
#pragma unroll 1
      for (uint32_t k = 0; k < part.w.cols; k += STEP)
        multiply_step<Codes, TOKENS, SHARED>(s, n++, total);
      put_tile<TOKENS>(a, part, at, a.row0 + tile * RING_ROWS, total);
    }
  }
}

template <class Codes, int TOKENS, bool SHARED>
__global__ static void __launch_bounds__(RING_THREADS, 1)
    linear_a8_wgmma_kernel(td_cu_linear_args a) {
#if TD_HAS_WGMMA
  TD_DYNAMIC_SHARED(memory);
  auto &s = *reinterpret_cast<a8_stages<TOKENS> *>(memory);
  if (threadIdx.x == 0) {
    mbarrier_open(&s.turn[0], GROUP / WARP);
    mbarrier_open(&s.turn[1], GROUP / WARP);
  }
  ring_open(a, s.ring);
  if (begin_copying<REGISTERS>()) {
    copy_tiles<TOKENS, SHARED>(a, s);
  } else {
    multiply_tiles<Codes, TOKENS, SHARED>(a, s);
  }
#elif defined(__CUDA_ARCH__)
  __trap(); // unreachable: td_cu_props.has_wgmma is false
#endif
}

template <class Codes, int TOKENS, bool SHARED>
static int launch(const td_cu_linear_args *a, td_cu_stream stream) {
  return launch_ring<a8_stages<TOKENS>>(linear_a8_wgmma_kernel<Codes, TOKENS, SHARED>, a, stream);
}

template <class Codes, int TOKENS>
static int launch_tiles(const td_cu_linear_args *a, td_cu_stream stream) {
  const uint32_t each = a->w.scale_rows;
  const bool is_shared = (each % UNIT_ROWS == 0 && a->row0 % UNIT_ROWS == 0) || each >= a->w.rows;
  return is_shared ? launch<Codes, TOKENS, true>(a, stream)
                   : launch<Codes, TOKENS, false>(a, stream);
}

template <class Codes> static int launch_codes(const td_cu_linear_args *a, td_cu_stream stream) {
  if (a->tile_tokens <= TD_CU_MMA_TOKENS) return launch_tiles<Codes, TD_CU_MMA_TOKENS>(a, stream);
  return launch_tiles<Codes, TD_CU_A8_TOKENS>(a, stream);
}

extern "C" int td_cu_linear_a8_wgmma(const td_cu_linear_args *a, td_cu_stream stream) {
  return a->w.dtype == TD_I8 ? launch_codes<int8>(a, stream) : launch_codes<e4m3>(a, stream);
}
