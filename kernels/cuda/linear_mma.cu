// kernels/cuda/linear_mma.cu - y = W x for many tokens on tensor cores.
// A block computes 64 tokens by 64 rows of W: steps of 32 columns go through shared memory, weights
// as BF16. Codes of 8 bits and less are exact in BF16, so they go in without their scale, and the
// step's sums are multiplied by it in FP32; only where a scale changes within a step, or an FP4
// scale of an odd group does, do weights go in scaled and rounded. Four warps, 32 x 32 each.
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

template <int READ>
__device__ static void load_x(const td_cu_linear_args &a, const linear_part &part, uint32_t k,
                              linear_tiles &s) {
  uint32_t cols = part.w.cols;
  for (uint32_t i = threadIdx.x; i < TOKENS * (STEP / 8); i += THREADS) {
    uint32_t t = i / (STEP / 8), c = i % (STEP / 8) * 8;
    float v[8] = {};
    if (t < part.n && k + c < cols) activations8<READ>(linear_x(a, part.begin + t), k + c, cols, v);
    put8(&s.x[t][c], v);
  }
}

template <int READ>
__device__ static void load_w(const td_cu_linear_args &a, const td_weight &w, uint32_t row0,
                              uint32_t k, bool scale_apart, linear_tiles &s) {
  for (uint32_t i = threadIdx.x; i < ROWS * (STEP / 8); i += THREADS) {
    uint32_t r = i / (STEP / 8), c = i % (STEP / 8) * 8, row = row0 + r;
    float v[8] = {};
    if (row < a.row0 + a.n_rows && k + c < w.cols) {
      codes8<READ>(w, row, k + c, v);
      for (uint32_t j = 0; !scale_apart && w.scale && j < 8 && k + c + j < w.cols; j++)
        v[j] *= scale_at(w, row, (k + c + j) / w.scale_cols);
    }
    put8(&s.w[r][c], v);
  }
  if (!scale_apart) return;
  for (uint32_t r = threadIdx.x; r < ROWS; r += THREADS) {
    uint32_t row = row0 + r;
    s.scale[r] = row < a.row0 + a.n_rows ? scale_at(w, row, k / w.scale_cols) : 0;
  }
}

// The warp's 32 x 32 of one step: sum[i][j] is rows i*16.. of x by columns j*8.. of y.
__device__ static void multiply(const linear_tiles &s, uint32_t t0, uint32_t r0,
                                float (&sum)[2][4][4]) {
#pragma unroll
  for (uint32_t k = 0; k < STEP; k += 16) {
    uint32_t x[2][4], w[4][2];
    for (int i = 0; i < 2; i++)
      load_a(x[i], s.x[t0 + 16 * i], STRIDE, k);
    for (int j = 0; j < 4; j++)
      load_b(w[j], s.w[r0 + 8 * j], STRIDE, k);
    for (int i = 0; i < 2; i++) {
      for (int j = 0; j < 4; j++)
        mma_bf16(sum[i][j], x[i], w[j]);
    }
  }
}

template <int READ> __global__ static void linear_mma_kernel(td_cu_linear_args a) {
  __shared__ __align__(16) linear_tiles s;
  linear_part part = linear_part_of(a);
  if (part.n == 0) return;
  const td_weight &w = part.w;
  const bool scale_apart = READ != TD_CU_READ_BF16 && w.scale && w.scale_cols % STEP == 0;
  uint32_t warp = threadIdx.x / WARP, t0 = warp / 2 * 32, r0 = warp % 2 * 32;
  uint32_t g = threadIdx.x % WARP / 4, p = threadIdx.x % 4 * 2;
  uint32_t row0 = a.row0 + blockIdx.x * ROWS;
  float total[2][4][4] = {};
  for (uint32_t k = 0; k < w.cols; k += STEP) {
    load_x<READ>(a, part, k, s);
    load_w<READ>(a, w, row0, k, scale_apart, s);
    __syncthreads();
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
    __syncthreads();
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
  case TD_CU_READ_I4: return launch<TD_CU_READ_I4>(a, stream);
  default: return launch<TD_CU_READ_ANY>(a, stream);
  }
}
