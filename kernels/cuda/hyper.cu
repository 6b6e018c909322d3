// kernels/cuda/hyper.cu - hyper-connections (device/device.h): what a block reads of a residual of
// several streams, and how its output joins them.
//
// td_cu_hyper_read: x bf16 [n_streams][dim] a token, read twice, the second time from L1 or L2, and
// out bf16 [dim]. DeepSeek V4-Flash, 4 x 4096: 40 KiB and 0.1 MFLOP a token, so memory is the
// limit: 12 ns at 3.35 TB/s. For a single token the rounds of one warp are: some 100 cycles each.
// td_cu_hyper_write: x read and written, y read: 72 KiB a token, 22 ns.
// td_cu_hyper_mix: x and gate bf16 [n_streams][dim] read, out written: of 4 x 2048, 36 KiB, 11 ns.
#include "kernels/cuda/attn.cuh"

enum { READ_THREADS = 512, WRITE_THREADS = 128 };
enum { MOST_SCORES = (2 + TD_MAX_STREAMS) * TD_MAX_STREAMS };

// ---- the factors of a token ---------------------------------------------------------------------

__device__ static float sigmoid(float x) {
  return 1 / (1 + expf(-x));
}

// The first n lanes divide a row (or column) each by its sum.
__device__ static void balance(float *m, uint32_t n, bool columns, float eps) {
  const uint32_t lane = threadIdx.x, along = columns ? n : 1, first = columns ? lane : lane * n;
  if (lane < n) {
    float sum = eps;
    for (uint32_t i = 0; i < n; i++)
      sum += m[first + i * along];
    const float gain = 1 / sum;
    for (uint32_t i = 0; i < n; i++)
      m[first + i * along] *= gain;
  }
  __syncwarp();
}

__device__ static void softmax_rows(float *m, uint32_t n, float offset) {
  float *row = m + threadIdx.x * n, max = -INFINITY, sum = 0;
  if (threadIdx.x < n) {
    for (uint32_t i = 0; i < n; i++)
      max = fmaxf(max, row[i]);
    for (uint32_t i = 0; i < n; i++)
      sum += row[i] = expf(row[i] - max);
    for (uint32_t i = 0; i < n; i++)
      row[i] = row[i] / sum + offset;
  }
  __syncwarp();
}

// Turns scores into factors, in shared memory; gain: of all scores.
__device__ static void find_factors(const td_hyper_read_args &a, const float *scores, float gain,
                                    float *factor) {
  const uint32_t n = a.n_streams;
  for (uint32_t i = threadIdx.x; i < a.n_scores; i += blockDim.x) {
    const uint32_t part = at_most(i / n, 2);
    const float v = scores[i] * gain * a.scale[part] + a.base[i];
    factor[i] = part == 0 ? sigmoid(v) + a.eps : part == 1 ? 2 * sigmoid(v) : v;
  }
  __syncthreads();
  if (a.n_scores > n && threadIdx.x < WARP) {
    float *comb = factor + 2 * n;
    softmax_rows(comb, n, a.eps);
    balance(comb, n, true, a.eps);
    for (uint32_t i = 1; i < a.n_rounds; i++) {
      balance(comb, n, false, a.eps);
      balance(comb, n, true, a.eps);
    }
  }
  __syncthreads();
}

// ---- reading ------------------------------------------------------------------------------------

// One block per token; a thread takes N elements at a time. Shared memory has the sum of the
// streams until it is normed.
template <int N>
__global__ static void __launch_bounds__(READ_THREADS) hyper_read_kernel(td_hyper_read_args a) {
  TD_DYNAMIC_SHARED(memory);
  __shared__ float scratch[2][WARP], factor[MOST_SCORES];
  float *mixed = reinterpret_cast<float *>(memory);
  const size_t t = blockIdx.x, width = static_cast<size_t>(a.n_streams) * a.dim;
  const uint16_t *x = a.x + t * width;
  float squares = 0, v[N];
  for (size_t i = threadIdx.x * N; i < width; i += blockDim.x * N) {
    take_elements(x + i, v);
#pragma unroll
    for (int e = 0; e < N; e++)
      squares = fmaf(v[e], v[e], squares);
  }
  squares = block_sum(squares, scratch[0]);
  if (a.scores) {
    float *scores = a.scores + t * a.n_scores;
    find_factors(a, scores, 1 / sqrtf(squares / static_cast<float>(width) + a.norm_eps), factor);
    for (uint32_t i = threadIdx.x; i < a.n_scores; i += blockDim.x)
      scores[i] = factor[i];
  } else { // the mean
    if (threadIdx.x < a.n_streams) factor[threadIdx.x] = 1 / static_cast<float>(a.n_streams);
    __syncthreads();
  }
  squares = 0;
  for (uint32_t c = threadIdx.x * N; c < a.dim; c += blockDim.x * N) {
    float sum[N] = {};
    for (uint32_t k = 0; k < a.n_streams; k++) {
      take_elements(x + static_cast<size_t>(k) * a.dim + c, v);
#pragma unroll
      for (int e = 0; e < N; e++)
        sum[e] = fmaf(factor[k], v[e], sum[e]);
    }
#pragma unroll
    for (int e = 0; e < N; e++)
      squares = fmaf(sum[e], sum[e], squares);
    put_elements(mixed + c, sum);
  }
  squares = block_sum(squares, scratch[1]);
  const float gain = 1 / sqrtf(squares / static_cast<float>(a.dim) + a.norm_eps);
  for (uint32_t c = threadIdx.x * N; c < a.dim; c += blockDim.x * N) {
    take_elements(mixed + c, v); // each thread reads back its own elements
#pragma unroll
    for (int e = 0; e < N; e++)
      v[e] *= gain * vec_at(a.w, c + e);
    put_elements(a.out + t * a.dim + c, v);
  }
}

extern "C" int td_cu_hyper_read(const td_hyper_read_args *a, td_cu_stream stream) {
  const bool runs = in_runs(a->x, a->dim) && in_runs(a->out, a->dim);
  auto kernel = runs ? hyper_read_kernel<RUN_OF_8> : hyper_read_kernel<1>;
  if (int failed = allow_shared(kernel, TD_CU_STREAM_DIM * sizeof(float))) return failed;
  const uint32_t threads = at_most(ceil_div(a->dim, WARP * (runs ? RUN_OF_8 : 1)) * WARP,
                                   READ_THREADS);
  return TD_LAUNCH(kernel, a->n_tokens, threads, a->dim * sizeof(float), stream, *a);
}

// ---- writing ------------------------------------------------------------------------------------

// A thread takes N elements of all streams of token blockIdx.y, of which there are at most MOST.
template <int MOST, int N>
__global__ static void __launch_bounds__(WRITE_THREADS) hyper_write_kernel(td_hyper_write_args a) {
  const uint32_t n = a.n_streams, c = (blockIdx.x * blockDim.x + threadIdx.x) * N;
  if (c >= a.dim) return;
  const size_t t = blockIdx.y;
  uint16_t *x = a.x + t * n * a.dim + c;
  float y[N], in[MOST][N];
  take_elements(a.y + t * a.dim + c, y);
  if (!a.scores) {
    for (uint32_t k = 0; k < n; k++)
      put_elements(x + static_cast<size_t>(k) * a.dim, y);
    return;
  }
  if (a.adds) {
    for (uint32_t k = 0; k < n; k++) {
      uint16_t *to = x + static_cast<size_t>(k) * a.dim;
      take_elements(to, in[0]);
#pragma unroll
      for (int e = 0; e < N; e++)
        in[0][e] = fmaf(a.scores[t * n + k], y[e], in[0][e]);
      put_elements(to, in[0]);
    }
    return;
  }
  const float *post = a.scores + t * ((2 + n) * n) + n, *comb = post + n;
#pragma unroll
  for (uint32_t j = 0; j < MOST; j++)
    if (j < n) take_elements(x + static_cast<size_t>(j) * a.dim, in[j]);
#pragma unroll 1
  for (uint32_t k = 0; k < n; k++) {
    float out[N];
#pragma unroll
    for (int e = 0; e < N; e++)
      out[e] = post[k] * y[e];
#pragma unroll
    for (uint32_t j = 0; j < MOST; j++) {
      if (j >= n) continue;
#pragma unroll
      for (int e = 0; e < N; e++)
        out[e] = fmaf(comb[j * n + k], in[j][e], out[e]);
    }
    put_elements(x + static_cast<size_t>(k) * a.dim, out);
  }
}

extern "C" int td_cu_hyper_write(const td_hyper_write_args *a, td_cu_stream stream) {
  enum { FEW = 4 };
  const bool runs = a->n_streams <= FEW && in_runs(a->x, a->dim) && in_runs(a->y, a->dim);
  auto kernel = runs ? hyper_write_kernel<FEW, RUN_OF_8> : hyper_write_kernel<TD_MAX_STREAMS, 1>;
  dim3 grid(ceil_div(a->dim, WRITE_THREADS * (runs ? RUN_OF_8 : 1)), a->n_tokens);
  return TD_LAUNCH(kernel, grid, WRITE_THREADS, 0, stream, *a);
}

// ---- gates of low rank --------------------------------------------------------------------------

// A thread takes N elements of all streams of token blockIdx.y; the first ones also a score each.
template <int N>
__global__ static void __launch_bounds__(WRITE_THREADS) hyper_mix_kernel(td_hyper_mix_args a) {
  const uint32_t n = a.n_streams, c = (blockIdx.x * blockDim.x + threadIdx.x) * N;
  const size_t t = blockIdx.y;
  const float part = 1 / static_cast<float>(n);
  if (a.scores && blockIdx.x == 0 && threadIdx.x < n) {
    float *score = a.scores + t * n + threadIdx.x;
    *score = 2 * sigmoid(*score * part);
  }
  if (c >= a.dim) return;
  float sum[N] = {}, x[N], gate[N];
  for (uint32_t k = 0; k < n; k++) {
    const size_t at = (t * n + k) * a.dim + c;
    take_elements(a.x + at, x);
    take_elements(a.gate + at, gate);
#pragma unroll
    for (int e = 0; e < N; e++)
      sum[e] = fmaf(sigmoid(gate[e]) * part, x[e], sum[e]);
  }
  put_elements(a.out + t * a.dim + c, sum);
}

extern "C" int td_cu_hyper_mix(const td_hyper_mix_args *a, td_cu_stream stream) {
  const bool runs = in_runs(a->x, a->dim) && in_runs(a->gate, a->dim) && in_runs(a->out, a->dim);
  auto kernel = runs ? hyper_mix_kernel<RUN_OF_8> : hyper_mix_kernel<1>;
  dim3 grid(ceil_div(a->dim, WRITE_THREADS * (runs ? RUN_OF_8 : 1)), a->n_tokens);
  return TD_LAUNCH(kernel, grid, WRITE_THREADS, 0, stream, *a);
}

__global__ static void silu_rows_kernel(td_silu_rows_args a) {
  const size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= static_cast<size_t>(a.n_rows) * a.dim) return;
  const float x = a.factor * f32_from_bf16(a.x[i]);
  a.x[i] = bf16_from_f32(x * sigmoid(x));
}

extern "C" int td_cu_silu_rows(const td_silu_rows_args *a, td_cu_stream stream) {
  const size_t n = static_cast<size_t>(a->n_rows) * a->dim;
  return TD_LAUNCH(silu_rows_kernel, ceil_div(n, READ_THREADS), READ_THREADS, 0, stream, *a);
}
