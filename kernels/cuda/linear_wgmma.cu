// kernels/cuda/linear_wgmma.cu - y = W x for many tokens on the tensor cores of sm_90a.
// A block of two warpgroups computes 128 rows of W by 64 or 128 tokens, in steps of 64 columns.
// While the tensor cores multiply a step, the threads convert the next step's weights to BF16.
// Codes are copied to shared memory three steps ahead and activations two, always after the fence
// that publishes what was converted, so that it has none of them to wait for. Codes of up to 8 bits
// are exact in BF16, and so are those of FP4 times their groups' scales. Other scales multiply sums
// over their columns in FP32.
#include "kernels/cuda/attn.cuh"
#include "kernels/cuda/dequant8.cuh"
#include "kernels/cuda/linear.cuh"
#include "kernels/cuda/wgmma.cuh"

enum {
  THREADS = 256,
  ROWS = 128,
  STEP = PANEL,
  HALF = STEP / 2,                       // fewest columns of a scale
  ROWS_AT_ONCE = THREADS / PANEL_CHUNKS, // that the threads load a chunk each of
  W_CHUNKS = ROWS / ROWS_AT_ONCE,        // of a step, per thread
  W_BUFFERS = 2,
  X_BUFFERS = 3,
  CODE_BUFFERS = 3,
};

template <int READ, int TOKENS> struct linear_shared {
  uint16_t w[W_BUFFERS][ROWS][PANEL];
  uint16_t x[X_BUFFERS][TOKENS][PANEL];
  raw8<READ> codes[CODE_BUFFERS][W_CHUNKS][THREADS]; // each thread's own
};

// SPAN: 0 where no scales are left for the sums, else the fewest columns of a scale: HALF or STEP.
template <int READ, int SPAN> struct weight_source {
  const char *codes[W_CHUNKS];
  const uint32_t *zero[W_CHUNKS]; // words of eight zero points; NULL: all are 8
  row_scales chunk_scales[IS_FP4<READ> ? W_CHUNKS : 1];
  row_scales sum_scales[2]; // of the thread's two rows of sums
  uint32_t zero_shift[W_CHUNKS], group_shift, cols;
};

// What belongs to the thread's chunks of a step.
template <int READ> struct chunk_scales { uint32_t zero[W_CHUNKS], scale[W_CHUNKS]; };

__device__ inline uint32_t chunk_row(uint32_t i) {
  return threadIdx.x / PANEL_CHUNKS + i * ROWS_AT_ONCE;
}

__device__ inline uint32_t chunk_column() {
  return threadIdx.x % PANEL_CHUNKS * CHUNK;
}

// The first of the thread's two rows of sums in the block; the other is eight below.
__device__ inline uint32_t sum_row() {
  return threadIdx.x / WARP * 16 + threadIdx.x % WARP / 4;
}

// Rows past the last one repeat the last one; their sums are not stored.
template <int READ, int SPAN>
__device__ static weight_source<READ, SPAN> weights_from(const td_weight &w, uint32_t row0,
                                                         uint32_t last) {
  weight_source<READ, SPAN> from = {};
  from.cols = w.cols;
  from.group_shift = SPAN > 0 || READ == TD_CU_READ_I4 ? group_shift(w) : 0;
#pragma unroll
  for (uint32_t i = 0; i < W_CHUNKS; i++) {
    uint32_t row = at_most(row0 + chunk_row(i), last);
    from.codes[i] = static_cast<const char *>(w.data) +
                    bytes_of<READ>(static_cast<size_t>(row) * w.cols + chunk_column());
    settle(from.codes[i]);
    if constexpr (IS_FP4<READ>) from.chunk_scales[i] = scales_of_row<READ>(w, row);
    if (READ == TD_CU_READ_I4 && w.zero) {
      from.zero[i] = w.zero + static_cast<size_t>(row / 8) * weight_groups(w);
      from.zero_shift[i] = row % 8 * 4;
    }
  }
  if constexpr (SPAN > 0) {
    for (uint32_t i = 0; i < 2; i++)
      from.sum_scales[i] = scales_of_row<READ>(w, at_most(row0 + sum_row() + 8 * i, last));
  }
  return from;
}

// Codes of the step from column k on; zeros past the last column. Asynchronous.
template <int READ, int SPAN>
__device__ static void copy_codes(const weight_source<READ, SPAN> &from, uint32_t k,
                                  raw8<READ> (&codes)[W_CHUNKS][THREADS]) {
  using run = decltype(raw8<READ>::v);
  bool is_there = k + chunk_column() < from.cols;
#pragma unroll
  for (uint32_t i = 0; i < W_CHUNKS; i++)
    copy_async_value(&codes[i][threadIdx.x].v,
                     reinterpret_cast<const run *>(from.codes[i] + bytes_of<READ>(k)), is_there);
}

template <int READ, int SPAN>
__device__ static chunk_scales<READ> fetch_scales(const weight_source<READ, SPAN> &from,
                                                  uint32_t k) {
  chunk_scales<READ> out = {};
  if (k + chunk_column() >= from.cols) return out;
#pragma unroll
  for (uint32_t i = 0; i < W_CHUNKS; i++) {
    if constexpr (READ == TD_CU_READ_I4) {
      uint32_t group = (k + chunk_column()) >> from.group_shift;
      out.zero[i] = from.zero[i] ? __ldg(from.zero[i] + group) >> from.zero_shift[i] & 15 : 8;
    }
    if constexpr (IS_FP4<READ>) {
      uint32_t bits[1];
      const row_scales &s = from.chunk_scales[i];
      load_scales<READ>(s, {(k + chunk_column()) >> s.shift}, bits);
      out.scale[i] = bits[0];
    }
  }
  return out;
}

// Converts the thread's codes to BF16.
template <int READ>
__device__ static void put(const raw8<READ> (&codes)[W_CHUNKS][THREADS],
                           const chunk_scales<READ> &scales, uint16_t (&w)[ROWS][PANEL]) {
#pragma unroll
  for (uint32_t i = 0; i < W_CHUNKS; i++) {
    uint32_t pairs[1][4];
    pairs8<READ>(codes[i][threadIdx.x], less_zero_point(scales.zero[i]), pairs);
    if (IN_FOURS<READ>) order_from_fours(pairs[0]);
    if constexpr (IS_FP4<READ>) {
      float scale[1];
      scale_values<READ>(TD_F32, {scales.scale[i]}, scale);
      uint32_t both = bf16x2_cut(scale[0], scale[0]);
      for (int j = 0; j < 4; j++)
        pairs[0][j] = bf16x2_fma(pairs[0][j], both, 0x80008000u);
    }
    put_run(chunk_of(&w, chunk_row(i), threadIdx.x % PANEL_CHUNKS),
            {pairs[0][0], pairs[0][1], pairs[0][2], pairs[0][3]});
  }
}

template <int TOKENS> struct token_source {
  const uint16_t *row[TOKENS / ROWS_AT_ONCE]; // NULL: no such token
};

template <int TOKENS>
__device__ static token_source<TOKENS> tokens_from(const td_cu_linear_args &a,
                                                   const linear_part &part) {
  token_source<TOKENS> from = {};
#pragma unroll
  for (uint32_t i = 0; i < TOKENS / ROWS_AT_ONCE; i++) {
    uint32_t t = chunk_row(i);
    if (t < part.n) from.row[i] = linear_x(a, part.x_begin + t) + chunk_column();
  }
  return from;
}

// Activations from column k on; zeros past the last column and token. Asynchronous.
template <int TOKENS>
__device__ static void copy_tokens(const token_source<TOKENS> &from, uint32_t k, uint32_t cols,
                                   uint16_t (&x)[TOKENS][PANEL]) {
  bool is_there = k + chunk_column() < cols;
#pragma unroll
  for (uint32_t i = 0; i < TOKENS / ROWS_AT_ONCE; i++)
    copy_async(chunk_of(&x, chunk_row(i), threadIdx.x % PANEL_CHUNKS), from.row[i] + k,
               is_there && from.row[i]);
}

// sum (+)= columns [16 first, 16 last) of a step for the warpgroup's 64 rows. Asynchronous.
template <int TOKENS>
__device__ static void begin_products(const uint16_t (&w)[ROWS][PANEL],
                                      const uint16_t (&x)[TOKENS][PANEL], uint32_t first,
                                      uint32_t last, bool add, float (&sum)[TOKENS / 8][4]) {
  uint32_t row = threadIdx.x / (4 * WARP) * 64;
  wgmma_begin();
#pragma unroll
  for (uint32_t k = first; k < last; k++)
    wgmma_rows<TOKENS, 0>(sum, wgmma_matrix(w[row] + 16 * k, ROWS),
                          wgmma_matrix(x[0] + 16 * k, TOKENS), add || k > first);
  wgmma_commit();
}

// total += sum times the scales of the thread's two rows.
template <int N>
__device__ static void take(const float (&scale)[2], const float (&sum)[N][4],
                            float (&total)[N][4]) {
#pragma unroll
  for (int e = 0; e < 4 * N; e++)
    total[e / 4][e % 4] += scale[e % 4 / 2] * sum[e / 4][e % 4];
}

template <int READ, int SPAN>
__device__ static void load_sum_scales(const weight_source<READ, SPAN> &from, uint32_t k,
                                       uint32_t (&bits)[2]) {
  for (uint32_t i = 0; i < 2; i++) {
    uint32_t one[1];
    load_scales<READ>(from.sum_scales[i], {at_most(k, from.cols - 1) >> from.group_shift}, one);
    bits[i] = one[0];
  }
}

// total = the part's 64 rows of the warpgroup by TOKENS. Every buffer that is written was last read
// before the barrier that ends the previous step.
template <int READ, int SPAN, int TOKENS>
__device__ static void multiply_part(const td_cu_linear_args &a, const linear_part &part,
                                     linear_shared<READ, TOKENS> &s,
                                     float (&total)[TOKENS / 8][4]) {
  const uint32_t row0 = a.row0 + blockIdx.x * ROWS, cols = part.w.cols;
  const auto w = weights_from<READ, SPAN>(part.w, row0, a.row0 + a.n_rows - 1);
  const auto x = tokens_from<TOKENS>(a, part);
  copy_codes(w, 0, s.codes[0]);
  copy_tokens<TOKENS>(x, 0, cols, s.x[0]);
  copy_async_commit();
  copy_codes(w, STEP, s.codes[1]);
  copy_async_commit();
  copy_codes(w, 2 * STEP, s.codes[2]);
  copy_tokens<TOKENS>(x, STEP, cols, s.x[1]);
  copy_async_commit();
  copy_async_wait_for<2>();
  put<READ>(s.codes[0], fetch_scales(w, 0), s.w[0]);
  chunk_scales<READ> next_scales = fetch_scales(w, STEP);
  wgmma_publish();
  __syncthreads();
  float sum[SPAN > 0 ? TOKENS / 8 : 1][4];
  uint32_t scale_bits[SPAN == HALF ? 2 : 1][2] = {};
  bool is_first = true; // of the columns of a scale
  for (uint32_t k = 0, i = 0; k < cols; k += STEP, i++) {
    const auto &w_now = s.w[i % W_BUFFERS];
    const auto &x_now = s.x[i % X_BUFFERS];
    if constexpr (SPAN == 0) {
      begin_products<TOKENS>(w_now, x_now, 0, STEP / 16, k > 0, total);
    } else if constexpr (SPAN == HALF) {
      begin_products<TOKENS>(w_now, x_now, 0, HALF / 16, false, sum);
      load_sum_scales(w, k, scale_bits[0]);
      load_sum_scales(w, k + HALF, scale_bits[1]);
    } else {
      begin_products<TOKENS>(w_now, x_now, 0, STEP / 16, !is_first, sum);
      if (is_first) load_sum_scales(w, k, scale_bits[0]);
    }
    copy_async_wait_for<1>();
    put<READ>(s.codes[(i + 1) % CODE_BUFFERS], next_scales, s.w[(i + 1) % W_BUFFERS]);
    next_scales = fetch_scales(w, k + 2 * STEP);
    copy_async_wait_for<0>();
    wgmma_publish();
    copy_codes(w, k + 3 * STEP, s.codes[i % CODE_BUFFERS]);
    copy_tokens<TOKENS>(x, k + 2 * STEP, cols, s.x[(i + 2) % X_BUFFERS]);
    copy_async_commit();
    if constexpr (SPAN == 0) {
      wgmma_wait<0>(total);
    } else {
      float scale[2];
      wgmma_wait<0>(sum);
      is_first = SPAN == HALF || k + STEP >= cols ||
                 (k + STEP) >> w.group_shift != k >> w.group_shift;
      if (is_first) {
        scale_values<READ>(w.sum_scales[0].dtype, scale_bits[0], scale);
        take(scale, sum, total);
      }
      if constexpr (SPAN == HALF) {
        begin_products<TOKENS>(w_now, x_now, HALF / 16, STEP / 16, false, sum);
        wgmma_wait<0>(sum);
        scale_values<READ>(w.sum_scales[0].dtype, scale_bits[1], scale);
        take(scale, sum, total);
      }
    }
    __syncthreads();
  }
}

template <int READ, int SPAN, int TOKENS>
__device__ static void linear_by_wgmma(const td_cu_linear_args &a) {
  TD_DYNAMIC_SHARED(memory);
  auto &s = *reinterpret_cast<linear_shared<READ, TOKENS> *>(memory);
#pragma unroll 1
  for (uint32_t i = blockIdx.y;; i += gridDim.y) {
    linear_part part = linear_part_of(a, i);
    if (part.n == 0) return;
    float total[TOKENS / 8][4] = {};
    multiply_part<READ, SPAN, TOKENS>(a, part, s, total);
    float global = global_scale(part.w);
    const float *bias = linear_bias(a, i);
    uint32_t row0 = a.row0 + blockIdx.x * ROWS + sum_row(), p = threadIdx.x % 4 * 2;
#pragma unroll
    for (int e = 0; e < TOKENS / 2; e++) {
      uint32_t t = e / 4 * 8 + p + e % 2, row = row0 + e % 4 / 2 * 8;
      if (t < part.n && row < a.row0 + a.n_rows)
        linear_put(a, linear_out_of(a), bias, part.begin + t, row, total[e / 4][e % 4] * global);
    }
    copy_async_wait(); // the last steps' copies, before the next part's go to the same buffers
  }
}

template <int READ, int SPAN, int TOKENS>
__global__ static void __launch_bounds__(THREADS, TOKENS <= 64 ? 2 : 1)
    linear_wgmma_kernel(td_cu_linear_args a) {
#if TD_HAS_WGMMA
  linear_by_wgmma<READ, SPAN, TOKENS>(a);
#elif defined(__CUDA_ARCH__)
  __trap(); // unreachable: td_cu_props.has_wgmma is false
#endif
}

template <int READ, int SPAN, int TOKENS>
static int launch(const td_cu_linear_args *a, td_cu_stream stream) {
  auto kernel = linear_wgmma_kernel<READ, SPAN, TOKENS>;
  const size_t n_bytes = sizeof(linear_shared<READ, TOKENS>);
  cudaError_t code = allow_shared(kernel, n_bytes);
  if (code != cudaSuccess) return code;
  dim3 grid(ceil_div(a->n_rows, ROWS), a->n_at_once, a->n_matrices);
  TD_LAUNCH(kernel, grid, THREADS, n_bytes, stream, *a);
  return launched();
}

template <int READ, int SPAN> static int launch(const td_cu_linear_args *a, td_cu_stream stream) {
  if (a->tile_tokens <= 64) return launch<READ, SPAN, 64>(a, stream);
  return launch<READ, SPAN, TD_CU_WGMMA_TOKENS>(a, stream);
}

template <int READ> static int launch_scaled(const td_cu_linear_args *a, td_cu_stream stream) {
  if (a->w.scale_cols < STEP && a->w.scale_cols < a->w.cols) return launch<READ, HALF>(a, stream);
  return launch<READ, STEP>(a, stream);
}

extern "C" int td_cu_linear_wgmma(const td_cu_linear_args *a, td_cu_stream stream) {
  switch (a->read) {
  case TD_CU_READ_BF16: return launch<TD_CU_READ_BF16, 0>(a, stream);
  case TD_CU_READ_F8: return launch_scaled<TD_CU_READ_F8>(a, stream);
  case TD_CU_READ_I8: return launch_scaled<TD_CU_READ_I8>(a, stream);
  case TD_CU_READ_I4: return launch_scaled<TD_CU_READ_I4>(a, stream);
  case TD_CU_READ_MXFP4: return launch<TD_CU_READ_MXFP4, 0>(a, stream);
  case TD_CU_READ_NVFP4: return launch<TD_CU_READ_NVFP4, 0>(a, stream);
  default: return cudaErrorInvalidValue;
  }
}
