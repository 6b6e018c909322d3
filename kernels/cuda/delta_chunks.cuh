// kernels/cuda/delta_chunks.cuh - what delta_chunks.cu and delta_channels.cu share: a sequence's
// chunks of N tokens, operands in two BF16 parts, and a block's tile of states in registers.
#pragma once

#include "kernels/cuda/delta.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/swizzle.cuh"

enum { KEYS = TD_CU_DELTA_KEYS, STATE_WARPS = 4 };
static_assert(TILE == 2 * 16 && KEYS == 2 * PANEL, "each state warp has 16 columns of a panel");

struct alignas(8) pair_of_floats {
  float v[2];
};
struct alignas(16) four_floats {
  float v[4];
};

// ---- tokens -------------------------------------------------------------------------------------

// A sequence's tokens of the step.
struct token_range {
  int32_t first, begin; // of the step's tokens; position
  uint32_t n;
};

template <uint32_t N> __device__ inline uint32_t chunks_of(const token_range &r) {
  return (static_cast<uint32_t>(r.begin) % N + r.n + N - 1) / N;
}

// Row `row` of the range's chunk `idx`, counted from the first token; negative before it.
template <uint32_t N>
__device__ inline int32_t token_at(const token_range &r, uint32_t idx, uint32_t row) {
  return static_cast<int32_t>(idx * N + row) - r.begin % static_cast<int32_t>(N);
}

__device__ inline bool is_there(const token_range &r, int32_t token) {
  return static_cast<uint32_t>(token) < r.n;
}

// ---- operands in two parts ----------------------------------------------------------------------

__device__ inline void split(float x, float y, uint32_t &high, uint32_t &low) {
  high = bf16x2_from_f32(x, y);
  low = bf16x2_from_f32(x - f32_from_bf16(static_cast<uint16_t>(high)),
                        y - f32_from_bf16(static_cast<uint16_t>(high >> 16)));
}

// Operand a of mma.cuh.
struct split_a {
  uint32_t high[4], low[4];
};

// Two sums c of mma.cuh, which are side by side, as an operand.
__device__ inline split_a split_sums(const float (&left)[4], const float (&right)[4]) {
  split_a a;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    split(left[2 * i], left[2 * i + 1], a.high[i], a.low[i]);
    split(right[2 * i], right[2 * i + 1], a.high[2 + i], a.low[2 + i]);
  }
  return a;
}

// left, right += a b, where b has both one's columns.
__device__ inline void multiply(float (&left)[4], float (&right)[4], const uint32_t (&a)[4],
                                const uint32_t (&b)[4]) {
  mma_bf16(left, a, {b[0], b[1]});
  mma_bf16(right, a, {b[2], b[3]});
}

__device__ inline void multiply(float (&left)[4], float (&right)[4], const split_a &a,
                                const uint32_t (&b)[4]) {
  multiply(left, right, a.low, b);
  multiply(left, right, a.high, b);
}

// Without the product of both low parts.
__device__ inline void multiply(float (&left)[4], float (&right)[4], const split_a &a,
                                const uint32_t (&high)[4], const uint32_t (&low)[4]) {
  multiply(left, right, a.high, low);
  multiply(left, right, a, high);
}

// chunk_of for chunk first + more, first even and more 0 or 1: what differs between lanes does not
// depend on first, so that few addresses are computed.
template <int N>
__device__ inline const uint16_t *lane_chunk(const uint16_t (*panels)[N][PANEL], uint32_t row,
                                             uint32_t first, uint32_t more) {
  return panels[first / PANEL_CHUNKS][row] + ((row % 8 ^ more) ^ first % PANEL_CHUNKS) * CHUNK;
}

// 16 rows by 16 columns of a matrix, from `row` and chunk or column on: as operand a; as b, whose
// columns are the rows; as b itself.
template <int N>
__device__ inline void load_a(uint32_t (&a)[4], const uint16_t (*panels)[N][PANEL], uint32_t row,
                              uint32_t chunk) {
  const uint32_t lane = threadIdx.x % WARP;
  load_matrices(a, lane_chunk(panels, row + lane % 16, chunk, lane / 16));
}

template <int N>
__device__ inline void load_rows(uint32_t (&b)[4], const uint16_t (*panels)[N][PANEL], uint32_t row,
                                 uint32_t chunk) {
  const uint32_t lane = threadIdx.x % WARP;
  load_matrices(b, lane_chunk(panels, row + lane % 8 + lane / 16 * 8, chunk, lane / 8 % 2));
}

template <int N>
__device__ inline void load_b(uint32_t (&b)[4], const uint16_t (*panels)[N][PANEL], uint32_t row,
                              uint32_t chunk) {
  const uint32_t lane = threadIdx.x % WARP;
  load_matrices_turned(b, lane_chunk(panels, row + lane % 16, chunk, lane / 16));
}

template <int N, int ROW>
__device__ inline void load_rows(uint32_t (&b)[4], const uint16_t (&m)[N][ROW], uint32_t row,
                                 uint32_t column) {
  const uint32_t lane = threadIdx.x % WARP;
  load_matrices(b, &m[row + lane % 8 + lane / 16 * 8][column + lane / 8 % 2 * CHUNK]);
}

template <int N, int ROW>
__device__ inline void load_b(uint32_t (&b)[4], const uint16_t (&m)[N][ROW], uint32_t row,
                              uint32_t column) {
  const uint32_t lane = threadIdx.x % WARP;
  load_matrices_turned(b, &m[row + lane % 16][column + lane / 16 * CHUNK]);
}

__device__ inline pair_of_floats pair_at(const float *v, uint32_t at) {
  return *reinterpret_cast<const pair_of_floats *>(v + at);
}

__device__ inline uint32_t lane_row() { // of sums c
  return threadIdx.x % WARP / 4;
}

__device__ inline uint32_t lane_column() { // the first of two
  return threadIdx.x % 4 * 2;
}

// ---- states -------------------------------------------------------------------------------------

// What a warp has of the tile: 16 columns of half of the rows, transposed. Register c of tile n is
// at row_of(n, c), column_of(c).
enum { STATE_TILES = KEYS / 2 / 8 };
struct warp_state {
  float s[STATE_TILES][4];
};

__device__ inline uint32_t my_half() {
  return threadIdx.x / WARP % 2;
}

__device__ inline uint32_t row_of(int n, int c) {
  return my_half() * PANEL + 8 * n + lane_column() + c % 2;
}

__device__ inline uint32_t column_of(int c) {
  return threadIdx.x / (2 * WARP) * 16 + lane_row() + c / 2 * 8;
}

// tile [k_dim][TILE]; NULL, and rows past the last: zeros.
__device__ inline void load_state(const float *tile, uint32_t k_dim, warp_state &state) {
#pragma unroll
  for (int n = 0; n < STATE_TILES; n++) {
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const uint32_t row = row_of(n, c);
      state.s[n][c] = tile && row < k_dim ? tile[row * TILE + column_of(c)] : 0;
    }
  }
}

__device__ inline void store_state(float *tile, uint32_t k_dim, const warp_state &state) {
#pragma unroll
  for (int n = 0; n < STATE_TILES; n++) {
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const uint32_t row = row_of(n, c);
      if (row < k_dim) tile[row * TILE + column_of(c)] = state.s[n][c];
    }
  }
}

// The state after chunk idx, if it is that after the step or a page.
template <uint32_t N>
__device__ inline void keep_state(const td_delta_rule_op_args &a, const token_range &r,
                                  uint32_t idx, size_t at, const warp_state &state) {
  const uint32_t n = at_most(static_cast<uint32_t>(token_at<N>(r, idx + 1, 0)), r.n);
  const uint32_t position = static_cast<uint32_t>(r.begin) + n;
  if (n < r.n && position % a.batch.page_tokens) return;
  float *page = state_of(a.batch, a.state, blockIdx.z, static_cast<int32_t>(position) - 1);
  if (page) store_state(page + at, a.shape.k_dim, state);
}

// Results of 8 TILES tokens of chunk idx, from row `row` of it on, in sums whose columns they are.
template <uint32_t N, int TILES>
__device__ inline void put_results(const td_delta_rule_op_args &a, const rule_part &part,
                                   const token_range &r, uint32_t idx, uint32_t row,
                                   const float (&result)[TILES][4]) {
  const int32_t token = token_at<N>(r, idx, row + lane_column());
  const ptrdiff_t of_token = static_cast<ptrdiff_t>(a.shape.n_v_heads) * a.shape.v_dim;
  const uint32_t column = part.column + column_of(0);
  uint16_t *to = a.out + (r.first + token) * of_token +
                 static_cast<ptrdiff_t>(part.head) * a.shape.v_dim + column;
#pragma unroll
  for (int n = 0; n < TILES; n++) {
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const int more = 8 * n + c % 2;
      if (is_there(r, token + more) && column + c / 2 * 8 < a.shape.v_dim)
        to[more * of_token + c / 2 * 8] = bf16_from_f32(result[n][c]);
    }
  }
}
