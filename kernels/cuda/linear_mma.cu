// kernels/cuda/linear_mma.cu - y = W x for many tokens on tensor cores.
// A block computes 64 tokens by 128 rows of W with four warps, 32 x 64 each. It goes through the
// columns in steps of 32, with weights as BF16 in shared memory. Codes of up to 8 bits are exact in
// BF16, so they are stored unscaled, and a step's sums are multiplied by the scales in FP32.
// Only weights loaded value by value whose scales change within a step are stored scaled and
// rounded. While a step is multiplied, the next one is loaded to registers. Shared memory has two
// buffers, so one barrier per step suffices: a thread that writes to a buffer has passed a barrier
// after which nobody reads it. Two blocks share an SM: while the warps of one are at a barrier,
// those of the other multiply.
//
// E4M3 may also be multiplied in F16, where it is exact, with sums of a step in F16. A token's step
// has a power of two that makes overflow impossible: weights are below 2, being divided by 2^8, and
// x below 2^10, in which BF16 is exact down to 2^-26 of the step's largest magnitude. A warp has 32
// instructions of the tensor cores a step, 16 clocks each on GeForce instead of 32, and issues some
// 490 in these 512 clocks (sm_86, which converts E4M3 by shifts: 550), a quarter of them for
// powers.
#include "kernels/cuda/dequant8.cuh"
#include "kernels/cuda/linear.cuh"
#include "kernels/cuda/mma.cuh"

enum {
  TOKENS = TD_CU_MMA_TOKENS,
  ROWS = 128,
  STEP = 32,
  HALF = STEP / 2, // columns of one instruction
  // rows are 20 words apart, so the eight rows of a fragment are in different banks
  STRIDE = STEP + 8,
  THREADS = 128,
};

struct linear_tiles {
  uint16_t x[TOKENS][STRIDE];
  uint16_t w[ROWS][STRIDE];
  float scale[STEP / HALF][ROWS];
  float undo[TOKENS]; // with sums in F16: what they must be multiplied by
};

// A thread's part of a step, in registers: eight columns of some rows of x and of W, and the scales
// of a row.
enum {
  X_PIECES = TOKENS * (STEP / 8) / THREADS,
  W_PIECES = ROWS * (STEP / 8) / THREADS,
};
static_assert(THREADS == ROWS, "a row's scales a thread");

template <int READ> struct step_part {
  uint4 x[X_PIECES]; // unused with TD_CU_READ_ANY
  raw8<READ> w[W_PIECES];
  uint32_t zero[W_PIECES];     // words of eight zero points
  uint32_t scale[STEP / HALF]; // in stored form
};

// Addresses of a thread's part. Rows past the last one repeat the last one; their sums are not
// stored.
struct step_source {
  const uint16_t *x[X_PIECES]; // NULL: no such token
  const char *w[W_PIECES];
  const uint32_t *zero[W_PIECES]; // NULL: 8
  uint32_t row[W_PIECES];         // row of W
  uint32_t scale_row;
  row_scales scales;
};

__device__ static uint32_t piece_row(uint32_t i) {
  return (threadIdx.x + i * THREADS) / (STEP / 8);
}

__device__ static uint32_t piece_col() { // THREADS is a multiple of the pieces per row
  return threadIdx.x % (STEP / 8) * 8;
}

template <int READ, int SPAN>
__device__ static step_source source_of(const td_cu_linear_args &a, const linear_part &part,
                                        uint32_t row0) {
  const td_weight &w = part.w;
  const uint32_t last = a.row0 + a.n_rows - 1;
  step_source from = {};
#pragma unroll
  for (uint32_t i = 0; i < X_PIECES; i++) {
    if (piece_row(i) < part.n) from.x[i] = linear_x(a, part.x_begin + piece_row(i)) + piece_col();
  }
#pragma unroll
  for (uint32_t i = 0; i < W_PIECES; i++) {
    uint32_t row = at_most(row0 + piece_row(i), last);
    from.row[i] = row;
    from.w[i] = static_cast<const char *>(w.data) +
                bytes_of<READ>(static_cast<size_t>(row) * w.cols + piece_col());
    settle(from.w[i]);
    if (w.zero) from.zero[i] = w.zero + static_cast<size_t>(row / 8) * weight_groups(w);
  }
  from.scale_row = at_most(row0 + threadIdx.x % ROWS, last);
  if (SPAN > 0 && READ != TD_CU_READ_ANY) from.scales = scales_of_row<READ>(w, from.scale_row);
  return from;
}

// SPAN: minimum columns per scale, STEP or HALF; 0 without scales, which is one for a step.
template <int SPAN> constexpr uint32_t SPAN_COLS = SPAN > 0 ? SPAN : STEP;

template <int READ, int SPAN>
__device__ static step_part<READ> fetch(const step_source &from, const td_weight &w, uint32_t k) {
  step_part<READ> part = {};
  bool is_there = k + piece_col() < w.cols;
#pragma unroll
  for (uint32_t i = 0; READ != TD_CU_READ_ANY && i < X_PIECES; i++) {
    if (is_there && from.x[i]) part.x[i] = __ldg(reinterpret_cast<const uint4 *>(from.x[i] + k));
  }
#pragma unroll
  for (uint32_t i = 0; READ != TD_CU_READ_ANY && i < W_PIECES; i++) {
    if (is_there) part.w[i] = load8<READ>(from.w[i] + bytes_of<READ>(k));
    if (READ == TD_CU_READ_I4)
      part.zero[i] = from.zero[i] ? __ldg(from.zero[i] + (k >> from.scales.shift)) : 0x88888888u;
  }
  for (uint32_t h = 0; SPAN > 0 && READ != TD_CU_READ_ANY && h < STEP / SPAN_COLS<SPAN>; h++) {
    uint32_t bits[1];
    load_scales<READ>(from.scales,
                      {at_most(k + h * SPAN_COLS<SPAN>, w.cols - 1) >> from.scales.shift}, bits);
    part.scale[h] = bits[0];
  }
  return part;
}

// Whether each row has a single scale in a step.
__device__ static bool has_step_scales(const td_weight &w) {
  return w.scale && w.scale_cols % STEP == 0;
}

// Loads activations and weights value by value.
__device__ static void put_any(const step_source &from, const td_weight &w, uint32_t k,
                               linear_tiles &s) {
  const uint32_t at = k + piece_col();
  float v[8];
#pragma unroll
  for (uint32_t i = 0; i < X_PIECES; i++) {
    for (uint32_t e = 0; e < 8; e++)
      v[e] = 0;
    if (from.x[i]) activations8(from.x[i] - piece_col(), at, w.cols, v);
    put8(&s.x[piece_row(i)][piece_col()], v);
  }
#pragma unroll
  for (uint32_t i = 0; i < W_PIECES; i++) {
    decode8<TD_CU_READ_ANY>(w, from.row[i], at, {}, v);
    if (!has_step_scales(w)) scale_each(w, from.row[i], at, v);
    put8(&s.w[piece_row(i)][piece_col()], v);
  }
  s.scale[0][threadIdx.x] = has_step_scales(w) ? scale_at(w, from.scale_row, k / w.scale_cols) : 1;
}

// x in F16, and its powers. The four threads of a token's step have it all.
__device__ static void put_x_f16(const uint4 (&x)[X_PIECES], linear_tiles &s) {
  static_assert(STEP / 8 == 4, "");
#pragma unroll
  for (uint32_t i = 0; i < X_PIECES; i++) {
    const power p = power_below<10>(quad_max(most_of(0, x[i])));
    put_run(&s.x[piece_row(i)][piece_col()], f16x8_from_bf16x8(x[i], p.factor));
    if (piece_col() == 0) s.undo[piece_row(i)] = p.undo * (1 << E4M3_AS_F16_LOG);
  }
}

template <int READ, int SPAN, bool F16>
__device__ static void put(const step_source &from, const step_part<READ> &part, linear_tiles &s) {
  if constexpr (F16) put_x_f16(part.x, s);
#pragma unroll
  for (uint32_t i = 0; !F16 && i < X_PIECES; i++)
    put_run(&s.x[piece_row(i)][piece_col()], part.x[i]);
#pragma unroll
  for (uint32_t i = 0; i < W_PIECES; i++) {
    uint32_t pairs[1][4], zero = part.zero[i] >> from.row[i] % 8 * 4 & 15;
    if constexpr (F16) {
      f16_pairs_from_e4m3(part.w[i].v, pairs[0]);
    } else {
      pairs8<READ>(part.w[i], less_zero_point(zero), pairs);
    }
    if (IN_FOURS<READ>) order_from_fours(pairs[0]);
    put_run(&s.w[piece_row(i)][piece_col()], {pairs[0][0], pairs[0][1], pairs[0][2], pairs[0][3]});
  }
  for (uint32_t h = 0; SPAN > 0 && h < STEP / SPAN_COLS<SPAN>; h++) {
    float value[1];
    scale_values<READ>(from.scales.dtype, {part.scale[h]}, value);
    s.scale[h][threadIdx.x] = value[0];
  }
}

enum {
  WARP_TOKENS = 32,
  WARP_ROWS = 64,
  TOKEN_TILES = WARP_TOKENS / 16,
  ROW_TILES = WARP_ROWS / 8
};

// total += sum times the rows' scales; sum = 0.
__device__ static void take(const float *scale, float (&sum)[ROW_TILES][4],
                            float (&total)[ROW_TILES][4]) {
  uint32_t p = threadIdx.x % 4 * 2;
#pragma unroll
  for (int e = 0; e < 4 * ROW_TILES; e++) {
    int j = e / 4, c = e % 4;
    total[j][c] += scale[8 * j + p + c % 2] * sum[j][c];
    sum[j][c] = 0;
  }
}

// The same of sums in F16, for tokens from t on; sums are new in every step.
__device__ static void take(const linear_tiles &s, uint32_t t, uint32_t r0,
                            const uint32_t (&sum)[ROW_TILES][2], float (&total)[ROW_TILES][4]) {
  uint32_t g = threadIdx.x % WARP / 4, p = threadIdx.x % 4 * 2;
  const float undo[2] = {s.undo[t + g], s.undo[t + g + 8]};
#pragma unroll
  for (int e = 0; e < 4 * ROW_TILES; e++) {
    int j = e / 4, c = e % 4;
    total[j][c] += s.scale[0][r0 + 8 * j + p + c % 2] * undo[c / 2] * f16_sum(sum[j], c);
  }
}

// total += a step's products, for the warp's tokens from t0 on by its rows from r0 on: total[i][j]
// is tokens i*16.. by rows j*8...
template <int SPAN, bool F16>
__device__ static void multiply(const linear_tiles &s, uint32_t t0, uint32_t r0,
                                float (&total)[TOKEN_TILES][ROW_TILES][4]) {
  const uint32_t lane = threadIdx.x % WARP;
  uint32_t w[STEP / HALF][ROW_TILES / 2][4]; // two blocks of columns each
#pragma unroll
  for (uint32_t i = 0; i < TOKEN_TILES; i++) {
    float sum[ROW_TILES][4] = {};
    uint32_t f16_sums[ROW_TILES][2] = {};
#pragma unroll
    for (uint32_t h = 0; h < STEP / HALF; h++) {
      const uint32_t k = h * HALF;
      uint32_t x[4];
      for (uint32_t j = 0; i == 0 && j < ROW_TILES / 2; j++)
        load_matrices(w[h][j], &s.w[r0 + 16 * j + lane / 16 * 8 + lane % 8][k + lane / 8 % 2 * 8]);
      load_matrices(x, &s.x[t0 + 16 * i + lane % 16][k + lane / 16 * 8]);
      for (uint32_t j = 0; j < ROW_TILES; j++) {
        const uint32_t rows[2] = {w[h][j / 2][j % 2 * 2], w[h][j / 2][j % 2 * 2 + 1]};
        if constexpr (F16) {
          mma_f16(f16_sums[j], x, rows);
        } else {
          mma_bf16(SPAN > 0 ? sum[j] : total[i][j], x, rows);
        }
      }
      if (!F16 && SPAN > 0 && (k + HALF) % SPAN_COLS<SPAN> == 0)
        take(&s.scale[k / SPAN_COLS<SPAN>][r0], sum, total[i]);
    }
    if constexpr (F16) take(s, t0 + 16 * i, r0, f16_sums, total[i]);
  }
}

template <int READ, int SPAN, bool F16>
__device__ static void multiply_part(const td_cu_linear_args &a, uint32_t at,
                                     const linear_part &part, linear_tiles (&places)[2]) {
  const td_weight &w = part.w;
  uint32_t warp = threadIdx.x / WARP, t0 = warp / 2 * WARP_TOKENS, r0 = warp % 2 * WARP_ROWS;
  uint32_t g = threadIdx.x % WARP / 4, p = threadIdx.x % 4 * 2;
  uint32_t row0 = a.row0 + blockIdx.x * ROWS;
  const bool is_used = t0 < part.n && row0 + r0 < a.row0 + a.n_rows; // the warp's results
  float total[TOKEN_TILES][ROW_TILES][4] = {};
  step_source from = source_of<READ, SPAN>(a, part, row0);
  step_part<READ> next = fetch<READ, SPAN>(from, w, 0);
#pragma unroll 1
  for (uint32_t k = 0; k < w.cols; k += STEP) {
    linear_tiles &s = places[k / STEP % 2];
    if constexpr (READ == TD_CU_READ_ANY) {
      put_any(from, w, k, s);
    } else {
      put<READ, SPAN, F16>(from, next, s);
    }
    __syncthreads();
    if (k + STEP < w.cols) next = fetch<READ, SPAN>(from, w, k + STEP);
    if (is_used) multiply<SPAN, F16>(s, t0, r0, total);
  }
  const float *bias = linear_bias(a, at);
#pragma unroll
  for (int e = 0; e < TOKEN_TILES * ROW_TILES * 4; e++) {
    int i = e / (4 * ROW_TILES), j = e / 4 % ROW_TILES, c = e % 4;
    uint32_t t = t0 + 16 * i + g + c / 2 * 8, row = row0 + r0 + 8 * j + p + c % 2;
    if (t < part.n && row < a.row0 + a.n_rows)
      linear_put(a, linear_out_of(a), bias, part.begin + t, row, total[i][j][c] * global_scale(w));
  }
}

template <int READ, int SPAN, bool F16>
__global__ static void __launch_bounds__(THREADS, 2) linear_mma_kernel(td_cu_linear_args a) {
  __shared__ __align__(16) linear_tiles places[2];
#pragma unroll 1
  for (uint32_t i = blockIdx.y; !F16 || TD_HAS_F16_SUMS; i += gridDim.y) {
    linear_part part = linear_part_of(a, i);
    if (part.n == 0) return;
    multiply_part<READ, SPAN, F16>(a, i, part, places);
    __syncthreads(); // before the next part's first step overwrites a buffer of this one
  }
}

template <int READ, int SPAN, bool F16 = false>
static int launch(const td_cu_linear_args *a, td_cu_stream stream) {
  dim3 grid(ceil_div(a->n_rows, ROWS), a->n_at_once, a->n_matrices);
  auto kernel = linear_mma_kernel<READ, SPAN, F16>;
  return TD_LAUNCH(kernel, grid, THREADS, 0, stream, *a);
}

extern "C" int td_cu_linear_mma(const td_cu_linear_args *a, td_cu_stream stream) {
  switch (a->read) {
  case TD_CU_READ_BF16: return launch<TD_CU_READ_BF16, 0>(a, stream);
  case TD_CU_READ_F8:
    return a->in_f16 ? launch<TD_CU_READ_F8, STEP, true>(a, stream)
                     : launch<TD_CU_READ_F8, STEP>(a, stream);
  case TD_CU_READ_I8: return launch<TD_CU_READ_I8, STEP>(a, stream);
  case TD_CU_READ_I4: return launch<TD_CU_READ_I4, STEP>(a, stream);
  case TD_CU_READ_MXFP4: return launch<TD_CU_READ_MXFP4, STEP>(a, stream);
  case TD_CU_READ_NVFP4: return launch<TD_CU_READ_NVFP4, HALF>(a, stream);
  default: return launch<TD_CU_READ_ANY, STEP>(a, stream);
  }
}
