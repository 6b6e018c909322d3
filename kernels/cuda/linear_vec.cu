// kernels/cuda/linear_vec.cu - y = W x for few tokens: a warp takes a row of W for up to T tokens,
// each lane every 32nd run of eight columns, decoded once in registers. A lane asks for several
// runs before it uses the first: that many bytes under way are what hides the memory's latency. A
// token's result is the same whatever T and its neighbours: its sum has an order of its own.
#include "kernels/cuda/linear.cuh"

enum { VEC_WARPS = 4, RUN = WARP * 8 }; // RUN: columns that the lanes' next eights are apart

// N runs of eight columns from k on, RUN columns apart, for all tokens.
template <int READ, int T, int N>
__device__ static void add_runs(const td_weight &w, uint32_t row, const row_scales &scales,
                                uint32_t k, uint32_t n, const uint16_t *const (&x)[T],
                                float (&sum)[T]) {
  enum { HAS_SCALES = READ == TD_CU_READ_F8 || READ == TD_CU_READ_I4 };
  raw8<READ> raw[N];
  float scale[N];
#pragma unroll
  for (uint32_t i = 0; i < N; i++) {
    raw[i] = load8<READ>(w, row, k + i * RUN);
    scale[i] = HAS_SCALES ? scale_in(scales, k + i * RUN) : 1;
  }
#pragma unroll
  for (uint32_t i = 0; i < N; i++) {
    float v[8];
    decode8<READ>(w, row, k + i * RUN, raw[i], v);
    if (READ == TD_CU_READ_ANY) scale_each(w, row, k + i * RUN, v);
#pragma unroll
    for (uint32_t t = 0; t < T; t++) {
      if (T > 1 && t >= n) break;
      float of_x[8], dot = 0;
      activations8<READ>(x[t], k + i * RUN, w.cols, of_x);
#pragma unroll
      for (int e = 0; e < 8; e++)
        dot += v[e] * of_x[e];
      sum[t] += scale[i] * dot;
    }
  }
}

template <int READ, int T> __global__ static void linear_vec_kernel(td_cu_linear_args a) {
  enum { AHEAD = T > 4 ? 2 : 4 };
  linear_part part = linear_part_of(a);
  uint32_t row = a.row0 + blockIdx.x * VEC_WARPS + threadIdx.x / WARP;
  if (part.n == 0 || row >= a.row0 + a.n_rows) return;
  const td_weight &w = part.w;
  row_scales scales = {};
  if (READ == TD_CU_READ_F8 || READ == TD_CU_READ_I4) scales = scales_of_row(w, row);
  const uint16_t *x[T];
#pragma unroll
  for (uint32_t t = 0; t < T; t++)
    x[t] = linear_x(a, part.begin + (t < part.n ? t : 0));
  float sum[T] = {};
  uint32_t begin = 0, at = threadIdx.x % WARP * 8;
  for (; begin + AHEAD * RUN <= w.cols; begin += AHEAD * RUN)
    add_runs<READ, T, AHEAD>(w, row, scales, begin + at, part.n, x, sum);
  for (uint32_t k = begin + at; k < w.cols; k += RUN)
    add_runs<READ, T, 1>(w, row, scales, k, part.n, x, sum);
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
