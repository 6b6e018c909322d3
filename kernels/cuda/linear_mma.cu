// kernels/cuda/linear_mma.cu - y = W x for many tokens on tensor cores.
// A block computes 64 tokens by 64 rows of W: steps of 32 columns go through shared memory, weights
// as BF16. Codes of 8 bits and less are exact in BF16, so they go in without their scale, and the
// step's sums are multiplied by it in FP32; only where a scale changes within a step, or an FP4
// scale of an odd group does, do weights go in scaled and rounded. Four warps, 32 x 32 each.
// While a step is multiplied the next one is on its way to registers. There are two steps' places
// in shared memory, so a barrier a step is enough: who writes to a place has passed the barrier
// behind which nobody reads it any more.
#include "kernels/cuda/codes8.cuh"
#include "kernels/cuda/linear.cuh"
#include "kernels/cuda/mma.cuh"

enum {
  TOKENS = TD_CU_MMA_TOKENS,
  ROWS = 64,
  STEP = 32,
  STRIDE = STEP + 8, // rows 20 words apart: the eight rows of a fragment lie in different banks
  THREADS = 128,
};

struct linear_tiles {
  uint16_t x[TOKENS][STRIDE];
  uint16_t w[ROWS][STRIDE];
  float scale[ROWS];
};

__device__ static void put8(uint16_t *to, const float *v) {
  uint32_t *words = reinterpret_cast<uint32_t *>(to);
  for (int i = 0; i < 4; i++)
    words[i] = bf16x2_from_f32(v[2 * i], v[2 * i + 1]);
}

// A thread's part of a step, on its way to shared memory: eight columns of PIECES rows each of x
// and of W, and the scale of a row.
enum { PIECES = TOKENS * (STEP / 8) / THREADS };
static_assert(TOKENS == ROWS && PIECES * THREADS == TOKENS * (STEP / 8), "");

template <int READ> struct step_part {
  uint4 x[PIECES]; // not for TD_CU_READ_ANY
  raw8<READ> w[PIECES];
  float scale;
};

// Where it comes from.
struct step_source {
  const uint16_t *x[PIECES]; // NULL: no such token
  uint32_t row[PIECES];      // of W
  uint32_t row_end, scale_row;
  bool scale_apart;
};

__device__ static uint32_t piece_row(uint32_t i) {
  return (threadIdx.x + i * THREADS) / (STEP / 8);
}

__device__ static uint32_t piece_col() { // THREADS is a multiple of a row's pieces
  return threadIdx.x % (STEP / 8) * 8;
}

__device__ static step_source source_of(const td_cu_linear_args &a, const linear_part &part,
                                        uint32_t row0, bool scale_apart) {
  step_source from;
#pragma unroll
  for (uint32_t i = 0; i < PIECES; i++) {
    uint32_t r = piece_row(i);
    from.x[i] = r < part.n ? linear_x(a, part.begin + r) : nullptr;
    from.row[i] = row0 + r;
  }
  from.row_end = a.row0 + a.n_rows;
  from.scale_row = row0 + threadIdx.x;
  from.scale_apart = scale_apart;
  return from;
}

template <int READ>
__device__ static step_part<READ> fetch(const step_source &from, const td_weight &w, uint32_t k) {
  step_part<READ> part = {};
  uint32_t at = k + piece_col();
#pragma unroll
  for (uint32_t i = 0; i < PIECES; i++) {
    bool is_there = at < w.cols;
    if (READ != TD_CU_READ_ANY && is_there && from.x[i])
      part.x[i] = *reinterpret_cast<const uint4 *>(from.x[i] + at);
    if (is_there && from.row[i] < from.row_end) part.w[i] = load8<READ>(w, from.row[i], at);
  }
  if (from.scale_apart && threadIdx.x < ROWS && from.scale_row < from.row_end)
    part.scale = scale_at(w, from.scale_row, k / w.scale_cols);
  return part;
}

template <int READ>
__device__ static void put_x(const step_source &from, const step_part<READ> &part, uint32_t i,
                             uint32_t at, uint32_t n_cols, uint16_t *to) {
  if constexpr (READ == TD_CU_READ_ANY) {
    float v[8] = {};
    if (from.x[i]) activations8<READ>(from.x[i], at, n_cols, v);
    put8(to, v);
  } else {
    put_run(to, part.x[i]);
  }
}

template <int READ>
__device__ static void put_w(const step_source &from, const step_part<READ> &part, uint32_t i,
                             const td_weight &w, uint32_t at, uint16_t *to) {
  if constexpr (READ == TD_CU_READ_BF16) {
    put_run(to, part.w[i].v);
  } else {
    float v[8] = {};
    uint32_t row = from.row[i];
    if (row < from.row_end && at < w.cols) {
      decode8<READ>(w, row, at, part.w[i], v);
      bool is_scaled = !from.scale_apart && w.scale;
#pragma unroll
      for (uint32_t j = 0; j < 8; j++) {
        if (is_scaled && at + j < w.cols) v[j] *= scale_at(w, row, (at + j) / w.scale_cols);
      }
    }
    put8(to, v);
  }
}

template <int READ>
__device__ static void put(const step_source &from, const step_part<READ> &part, const td_weight &w,
                           uint32_t k, linear_tiles &s) {
  uint32_t c = piece_col();
#pragma unroll
  for (uint32_t i = 0; i < PIECES; i++) {
    uint32_t r = piece_row(i);
    put_x<READ>(from, part, i, k + c, w.cols, &s.x[r][c]);
    put_w<READ>(from, part, i, w, k + c, &s.w[r][c]);
  }
  if (from.scale_apart && threadIdx.x < ROWS) s.scale[threadIdx.x] = part.scale;
}

// The warp's 32 x 32 of one step: sum[i][j] is rows i*16.. of x by columns j*8.. of y.
__device__ static void multiply(const linear_tiles &s, uint32_t t0, uint32_t r0,
                                float (&sum)[2][4][4]) {
  uint32_t lane = threadIdx.x % WARP;
#pragma unroll
  for (uint32_t k = 0; k < STEP; k += 16) {
    uint32_t x[2][4], w[2][4]; // w: two columns of blocks each
    for (uint32_t i = 0; i < 2; i++) {
      load_matrices(x[i], &s.x[t0 + 16 * i + lane % 16][k + lane / 16 * 8]);
      load_matrices(w[i], &s.w[r0 + 16 * i + lane / 16 * 8 + lane % 8][k + lane / 8 % 2 * 8]);
    }
    for (int i = 0; i < 2; i++) {
      for (int j = 0; j < 4; j++)
        mma_bf16(sum[i][j], x[i], {w[j / 2][j % 2 * 2], w[j / 2][j % 2 * 2 + 1]});
    }
  }
}

template <int READ>
__global__ static void __launch_bounds__(THREADS) linear_mma_kernel(td_cu_linear_args a) {
  __shared__ __align__(16) linear_tiles places[2];
  linear_part part = linear_part_of(a);
  if (part.n == 0) return;
  const td_weight &w = part.w;
  const bool scale_apart = READ != TD_CU_READ_BF16 && w.scale && w.scale_cols % STEP == 0;
  uint32_t warp = threadIdx.x / WARP, t0 = warp / 2 * 32, r0 = warp % 2 * 32;
  uint32_t g = threadIdx.x % WARP / 4, p = threadIdx.x % 4 * 2;
  uint32_t row0 = a.row0 + blockIdx.x * ROWS;
  float total[2][4][4] = {};
  step_source from = source_of(a, part, row0, scale_apart);
  step_part<READ> next = fetch<READ>(from, w, 0);
  for (uint32_t k = 0; k < w.cols; k += STEP) {
    linear_tiles &s = places[k / STEP % 2];
    put<READ>(from, next, w, k, s);
    __syncthreads();
    if (k + STEP < w.cols) next = fetch<READ>(from, w, k + STEP);
    if (scale_apart) {
      float sum[2][4][4] = {};
      multiply(s, t0, r0, sum);
#pragma unroll
      for (int e = 0; e < 32; e++) {
        int i = e / 16, j = e / 4 % 4, c = e % 4;
        total[i][j][c] += s.scale[r0 + 8 * j + p + c % 2] * sum[i][j][c];
      }
    } else {
      multiply(s, t0, r0, total);
    }
  }
#pragma unroll
  for (int e = 0; e < 32; e++) {
    int i = e / 16, j = e / 4 % 4, c = e % 4;
    uint32_t t = t0 + 16 * i + g + c / 2 * 8, row = row0 + r0 + 8 * j + p + c % 2;
    if (t < part.n && row < a.row0 + a.n_rows)
      linear_put(a, part.begin + t, row, total[i][j][c] * global_scale(w));
  }
}

template <int READ> static int launch(const td_cu_linear_args *a, td_cu_stream stream) {
  dim3 grid(ceil_div(a->n_rows, ROWS), ceil_div(a->n_tokens, TOKENS));
  auto kernel = linear_mma_kernel<READ>;
  TD_LAUNCH(kernel, grid, THREADS, 0, stream, *a);
  return launched();
}

extern "C" int td_cu_linear_mma(const td_cu_linear_args *a, td_cu_stream stream) {
  switch (a->read) {
  case TD_CU_READ_BF16: return launch<TD_CU_READ_BF16>(a, stream);
  case TD_CU_READ_F8: return launch<TD_CU_READ_F8>(a, stream);
  case TD_CU_READ_I8: return launch<TD_CU_READ_I8>(a, stream);
  case TD_CU_READ_I4: return launch<TD_CU_READ_I4>(a, stream);
  case TD_CU_READ_F4: return launch<TD_CU_READ_F4>(a, stream);
  default: return launch<TD_CU_READ_ANY>(a, stream);
  }
}
