// kernels/cuda/linear_vec.cu - y = W x for few tokens: a warp takes a row of W for up to T tokens,
// each lane every 32nd run of eight columns, decoded once in registers. A lane asks for several
// runs before it uses the first: that many bytes under way are what hides the memory's latency. A
// token's result is the same whatever T and its neighbours: its sum has an order of its own.
#include "kernels/cuda/linear.cuh"

enum { VEC_WARPS = 4 };

template <int READ>
__device__ static float scale8(const td_weight &w, uint32_t row, uint32_t k, float *v) {
  if constexpr (READ == TD_CU_READ_BF16) return 1;
  if constexpr (READ == TD_CU_READ_ANY) {
    for (uint32_t i = 0; w.scale && i < 8 && k + i < w.cols; i++)
      v[i] *= scale_at(w, row, (k + i) / w.scale_cols);
    return 1;
  }
  return scale_at(w, row, k / w.scale_cols);
}

// One run of eight columns from k on, for all tokens.
template <int READ, int T>
__device__ static void add_run(const td_cu_linear_args &a, const linear_part &part, uint32_t row,
                               uint32_t k, const raw8<READ> &raw, float (&sum)[T]) {
  const td_weight &w = part.w;
  float v[8];
  decode8<READ>(w, row, k, raw, v);
  float scale = scale8<READ>(w, row, k, v);
#pragma unroll
  for (uint32_t t = 0; t < T; t++) {
    if (t >= part.n) break;
    float x[8], dot = 0;
    activations8<READ>(linear_x(a, part.begin + t), k, w.cols, x);
#pragma unroll
    for (int i = 0; i < 8; i++)
      dot += v[i] * x[i];
    sum[t] += scale * dot;
  }
}

template <int READ, int T> __global__ static void linear_vec_kernel(td_cu_linear_args a) {
  enum { AHEAD = T > 4 ? 2 : 4, RUN = WARP * 8 };
  linear_part part = linear_part_of(a);
  uint32_t row = a.row0 + blockIdx.x * VEC_WARPS + threadIdx.x / WARP;
  if (part.n == 0 || row >= a.row0 + a.n_rows) return;
  const td_weight &w = part.w;
  float sum[T] = {};
  for (uint32_t first = threadIdx.x % WARP * 8; first < w.cols; first += AHEAD * RUN) {
    raw8<READ> raw[AHEAD] = {};
#pragma unroll
    for (uint32_t i = 0; i < AHEAD; i++) {
      if (first + i * RUN < w.cols) raw[i] = load8<READ>(w, row, first + i * RUN);
    }
#pragma unroll
    for (uint32_t i = 0; i < AHEAD; i++) {
      if (first + i * RUN < w.cols) add_run<READ, T>(a, part, row, first + i * RUN, raw[i], sum);
    }
  }
#pragma unroll
  for (uint32_t t = 0; t < T; t++) {
    if (t >= part.n) break;
    float total = warp_sum(sum[t]) * global_scale(w);
    if (threadIdx.x % WARP == 0) linear_put(a, part.begin + t, row, total);
  }
}

template <int READ> static int launch(const td_cu_linear_args *a, td_cu_stream stream) {
  dim3 grid(ceil_div(a->n_rows, VEC_WARPS), ceil_div(a->n_tokens, a->tile_tokens));
  if (a->tile_tokens == 1) {
    auto kernel = linear_vec_kernel<READ, 1>;
    TD_LAUNCH(kernel, grid, VEC_WARPS * WARP, 0, stream, *a);
  } else if (a->tile_tokens <= 4) {
    auto kernel = linear_vec_kernel<READ, 4>;
    TD_LAUNCH(kernel, grid, VEC_WARPS * WARP, 0, stream, *a);
  } else {
    auto kernel = linear_vec_kernel<READ, TD_CU_VEC_TOKENS>;
    TD_LAUNCH(kernel, grid, VEC_WARPS * WARP, 0, stream, *a);
  }
  return launched();
}

extern "C" int td_cu_linear_vec(const td_cu_linear_args *a, td_cu_stream stream) {
  switch (a->read) {
  case TD_CU_READ_BF16: return launch<TD_CU_READ_BF16>(a, stream);
  case TD_CU_READ_F8: return launch<TD_CU_READ_F8>(a, stream);
  case TD_CU_READ_I4: return launch<TD_CU_READ_I4>(a, stream);
  default: return launch<TD_CU_READ_ANY>(a, stream);
  }
}
