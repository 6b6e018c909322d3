// kernels/cuda/elementwise.cu - row-wise and element-wise operators: embedding, addition,
// gathering, RMSNorm, rotary embedding, SwiGLU, the weighted sum of experts.
// Where alignment allows, a thread handles runs of eight elements; there are separate kernels for
// that and for arbitrary rows.
#include "kernels/cuda/dequant.cuh"
#include "kernels/cuda/tiles.cuh"

enum { ELEMENT_THREADS = 256, MAX_BLOCKS = 1 << 16 };

// Blocks for n elements; kernels loop with a grid stride over the rest.
static uint32_t element_blocks(size_t n) {
  return at_most(ceil_div(n, ELEMENT_THREADS), MAX_BLOCKS);
}

__device__ static size_t first_element() {
  return static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ static size_t element_stride() {
  return static_cast<size_t>(gridDim.x) * blockDim.x;
}

__global__ static void embed_kernel(td_embed_args a) {
  uint32_t t = blockIdx.x;
  int32_t id = a.ids[t];
  if (id < 0 || static_cast<uint32_t>(id) >= a.table.rows) {
    if (threadIdx.x == 0) *a.fault = TD_CU_FAULT_TOKEN;
    return;
  }
  uint16_t *out = a.out + static_cast<size_t>(t) * a.table.cols;
  for (uint32_t c = threadIdx.x; c < a.table.cols; c += blockDim.x)
    out[c] = bf16_from_f32(weight_at(a.table, static_cast<uint32_t>(id), c));
}

extern "C" int td_cu_embed(const td_embed_args *a, td_cu_stream stream) {
  return TD_LAUNCH(embed_kernel, a->n_tokens, ELEMENT_THREADS, 0, stream, *a);
}

template <class Y, int N> __global__ static void add_kernel(td_add_args a) {
  for (size_t i = first_element() * N; i < a.n; i += element_stride() * N) {
    float x[N], y[N];
    take_elements(a.x + i, x);
    take_elements(static_cast<const Y *>(a.y) + i, y);
#pragma unroll
    for (int e = 0; e < N; e++)
      x[e] += y[e];
    put_elements(a.x + i, x);
  }
}

extern "C" int td_cu_add(const td_add_args *a, td_cu_stream stream) {
  const bool runs = in_runs(a->x, a->n) && in_runs(a->y, a->n);
  auto kernel = a->y_f32 ? runs ? add_kernel<float, RUN_OF_8> : add_kernel<float, 1>
                : runs ? add_kernel<uint16_t, RUN_OF_8>
                         : add_kernel<uint16_t, 1>;
  const size_t n = runs ? a->n / RUN_OF_8 : a->n;
  return TD_LAUNCH(kernel, element_blocks(n), ELEMENT_THREADS, 0, stream, *a);
}

// Few blocks, since host memory and not the SMs is what such a copy waits for.
enum { COPY_BLOCKS = 64 };

template <class Element> __global__ static void copy_kernel(td_copy_args a) {
  for (size_t i = first_element(); i < a.n_bytes / sizeof(Element); i += element_stride())
    static_cast<Element *>(a.dst)[i] = static_cast<const Element *>(a.src)[i];
}

template <class Element> static int copy_as(const td_copy_args *a, td_cu_stream stream) {
  const uint32_t n_blocks = ceil_div(a->n_bytes / sizeof(Element), ELEMENT_THREADS);
  return TD_LAUNCH(copy_kernel<Element>, at_most(n_blocks, COPY_BLOCKS), ELEMENT_THREADS, 0, stream,
                   *a);
}

extern "C" int td_cu_copy_direct(const td_copy_args *a, td_cu_stream stream) {
  const uintptr_t bits = reinterpret_cast<uintptr_t>(a->dst) | reinterpret_cast<uintptr_t>(a->src) |
                         a->n_bytes;
  return bits % sizeof(uint4) == 0      ? copy_as<uint4>(a, stream)
         : bits % sizeof(uint32_t) == 0 ? copy_as<uint32_t>(a, stream)
                                        : copy_as<uint8_t>(a, stream);
}

// Elements of a part, rounded to BF16.
template <int N>
__device__ static void load_part(const td_sum_parts_args &a, uint32_t p, size_t i, float (&v)[N]) {
  if (!(a.f32_parts >> p & 1)) {
    take_elements(static_cast<const uint16_t *>(a.parts[p]) + i, v);
    return;
  }
  take_elements(static_cast<const float *>(a.parts[p]) + i, v);
#pragma unroll
  for (int e = 0; e < N; e++)
    v[e] = f32_from_bf16(bf16_from_f32(v[e]));
}

// In runs, so that parts in host memory are read, and out is written, 16 bytes a thread.
template <int N> __global__ static void sum_parts_kernel(td_sum_parts_args a) {
  for (size_t i = first_element() * N; i < a.n; i += element_stride() * N) {
    float sum[N];
    load_part(a, 0, i, sum);
    for (uint32_t p = 1; p < a.n_parts; p++) {
      float v[N];
      load_part(a, p, i, v);
#pragma unroll
      for (int e = 0; e < N; e++)
        sum[e] += v[e];
    }
    if (a.out_f32) {
      put_elements(static_cast<float *>(a.out) + i, sum);
    } else {
      put_elements(static_cast<uint16_t *>(a.out) + i, sum);
    }
  }
}

extern "C" int td_cu_sum_parts(const td_sum_parts_args *a, td_cu_stream stream) {
  bool runs = in_runs(a->out, a->n);
  for (uint32_t p = 0; p < a->n_parts; p++)
    runs = runs && in_runs(a->parts[p], a->n);
  auto kernel = runs ? sum_parts_kernel<RUN_OF_8> : sum_parts_kernel<1>;
  const size_t n = runs ? a->n / RUN_OF_8 : a->n;
  return TD_LAUNCH(kernel, element_blocks(n), ELEMENT_THREADS, 0, stream, *a);
}

// Element: the type of one copy of a thread.
template <class Element> __global__ static void gather_kernel(td_gather_rows_args a) {
  uint32_t i = blockIdx.x;
  int32_t row = a.rows[i];
  if (row < 0) {
    if (threadIdx.x == 0) *a.fault = TD_CU_FAULT_ROW;
    return;
  }
  const uint16_t *x = a.x + static_cast<size_t>(row) * a.dim;
  uint16_t *out = a.out + static_cast<size_t>(i) * a.dim;
  for (uint32_t c = threadIdx.x; c < a.dim * sizeof(uint16_t) / sizeof(Element); c += blockDim.x)
    reinterpret_cast<Element *>(out)[c] = reinterpret_cast<const Element *>(x)[c];
}

extern "C" int td_cu_gather(const td_gather_rows_args *a, td_cu_stream stream) {
  bool runs = in_runs(a->x, a->dim) && in_runs(a->out, a->dim);
  auto kernel = runs ? gather_kernel<uint4> : gather_kernel<uint16_t>;
  return TD_LAUNCH(kernel, a->n_rows, ELEMENT_THREADS, 0, stream, *a);
}

// A sum of BF16 values, which later reads see rounded.
__device__ static float rounded_sum(float a, float b) {
  return f32_from_bf16(bf16_from_f32(a + b));
}

// One block per row.
__global__ static void rmsnorm_kernel(td_rmsnorm_args a) {
  __shared__ float scratch[WARP];
  size_t row = blockIdx.x;
  const uint16_t *x = a.x + row * a.x_stride;
  float sum = 0;
  if (a.residual) {
    uint16_t *residual = a.residual + row * a.dim;
    const uint16_t *more = a.more ? a.more + row * a.dim : nullptr;
    for (uint32_t i = threadIdx.x; i < a.dim; i += blockDim.x) {
      float v = f32_from_bf16(x[i]);
      if (more) v = rounded_sum(v, f32_from_bf16(more[i]));
      residual[i] = bf16_from_f32(f32_from_bf16(residual[i]) + v);
    }
    x = residual; // each thread reads back its own elements
  }
  for (uint32_t i = threadIdx.x; i < a.dim; i += blockDim.x) {
    float v = f32_from_bf16(x[i]);
    sum += v * v;
  }
  sum = block_sum(sum, scratch);
  float scale = 1 / sqrtf(sum / static_cast<float>(a.dim) + a.eps);
  uint16_t *out = a.out + row * a.out_stride;
  for (uint32_t i = threadIdx.x; i < a.dim; i += blockDim.x)
    out[i] = bf16_from_f32(f32_from_bf16(x[i]) * scale * (a.w.data ? vec_at(a.w, i) : 1));
}

// A norm's weights from i on.
__device__ static void load_weights(const td_vec &w, uint32_t i, float (&v)[RUN_OF_8]) {
  for (int e = 0; e < RUN_OF_8; e++)
    v[e] = 1;
  if (w.data && w.dtype == TD_BF16) load_run(static_cast<const uint16_t *>(w.data) + i, v);
  if (w.data && w.dtype != TD_BF16) load_run(static_cast<const float *>(w.data) + i, v);
}

// The same in runs; short rows take one warp each, several per block. What is added may be in host
// memory, so a thread loads its next run of it before it stores this one.
enum { SHORT_ROW = 1024, ROWS_OF_BLOCK = 8 };

template <bool SHORT>
__device__ static void norm_runs(const td_rmsnorm_args &a, size_t row, float *scratch) {
  uint32_t first = threadIdx.x * RUN_OF_8, step = blockDim.x * RUN_OF_8;
  if (SHORT) {
    row = row * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= a.n_rows) return;
    first = threadIdx.x % WARP * RUN_OF_8;
    step = WARP * RUN_OF_8;
  }
  const uint16_t *x = a.x + row * a.x_stride;
  uint16_t *residual = a.residual ? a.residual + row * a.dim : nullptr;
  const uint16_t *more = residual && a.more ? a.more + row * a.dim : nullptr;
  float sum = 0, next[RUN_OF_8] = {};
  if (more && first < a.dim) load_run(more + first, next);
  for (uint32_t i = first; i < a.dim; i += step) {
    float v[RUN_OF_8], before[RUN_OF_8];
    load_run(x + i, v);
    if (more) {
#pragma unroll
      for (int e = 0; e < RUN_OF_8; e++)
        v[e] = rounded_sum(v[e], next[e]);
      if (i + step < a.dim) load_run(more + i + step, next);
    }
    if (residual) {
      load_run(residual + i, before);
#pragma unroll
      for (int e = 0; e < RUN_OF_8; e++)
        v[e] = rounded_sum(before[e], v[e]);
      store_run(residual + i, v);
    }
#pragma unroll
    for (int e = 0; e < RUN_OF_8; e++)
      sum += v[e] * v[e];
  }
  sum = SHORT ? warp_sum(sum) : block_sum(sum, scratch);
  float scale = 1 / sqrtf(sum / static_cast<float>(a.dim) + a.eps);
  if (residual) x = residual; // each thread reads back its own elements
  uint16_t *out = a.out + row * a.out_stride;
  for (uint32_t i = first; i < a.dim; i += step) {
    float v[RUN_OF_8], w[RUN_OF_8];
    load_run(x + i, v);
    load_weights(a.w, i, w);
#pragma unroll
    for (int e = 0; e < RUN_OF_8; e++)
      v[e] = v[e] * scale * w[e];
    store_run(out + i, v);
  }
}

// The last blocks have the further rows, which are short.
template <bool SHORT> __global__ static void rmsnorm_runs_kernel(td_rmsnorm_args a) {
  __shared__ float scratch[WARP];
  const uint32_t n_warps = blockDim.x / WARP;
  const uint32_t n_blocks = SHORT ? (a.n_rows + n_warps - 1) / n_warps : a.n_rows;
  if (blockIdx.x < n_blocks) {
    norm_runs<SHORT>(a, blockIdx.x, scratch);
  } else {
    norm_runs<true>(td_rmsnorm_also(&a), blockIdx.x - n_blocks, scratch);
  }
}

static bool is_in_runs(const td_rmsnorm_args &a) {
  return in_runs(a.x, a.x_stride) && in_runs(a.out, a.out_stride) && in_runs(a.more, a.dim) &&
         in_runs(a.residual, a.dim) && in_runs(a.w.data, a.dim);
}

// The summation order differs from rmsnorm_kernel's but does not depend on the batch, nor on rows
// that are normed also.
static int launch_norm_of_runs(const td_rmsnorm_args *a, td_cu_stream stream) {
  const bool is_short = a->dim <= SHORT_ROW;
  const uint32_t n_threads = is_short ? ROWS_OF_BLOCK * WARP
                                      : at_most(ceil_div(a->dim, RUN_OF_8 * WARP) * WARP, 512);
  const uint32_t of_short = ceil_div(a->n_rows, n_threads / WARP);
  const uint32_t n_blocks = (is_short ? of_short : a->n_rows) + (a->also.x ? of_short : 0);
  auto kernel = is_short ? rmsnorm_runs_kernel<true> : rmsnorm_runs_kernel<false>;
  return TD_LAUNCH(kernel, n_blocks, n_threads, 0, stream, *a);
}

static int launch_norm(const td_rmsnorm_args *a, td_cu_stream stream) {
  if (is_in_runs(*a)) return launch_norm_of_runs(a, stream);
  uint32_t threads = ceil_div(a->dim, 4 * WARP) * WARP;
  if (threads > 512) threads = 512;
  return TD_LAUNCH(rmsnorm_kernel, a->n_rows, threads, 0, stream, *a);
}

extern "C" int td_cu_rmsnorm(const td_rmsnorm_args *a, td_cu_stream stream) {
  if (!a->also.x) return launch_norm(a, stream);
  const td_rmsnorm_args also = td_rmsnorm_also(a);
  if (is_in_runs(*a) && is_in_runs(also) && also.dim <= SHORT_ROW)
    return launch_norm_of_runs(a, stream);
  td_rmsnorm_args first = *a;
  first.also = {};
  if (int failed = launch_norm(&first, stream)) return failed;
  return launch_norm(&also, stream);
}

// One block per row.
__device__ static float value_of(uint16_t x) {
  return f32_from_bf16(x);
}

__device__ static float value_of(float x) {
  return x;
}

__device__ static void put_value(uint16_t *to, float v) {
  *to = bf16_from_f32(v);
}

__device__ static void put_value(float *to, float v) {
  *to = v;
}

template <class Element> __global__ static void layernorm_kernel(td_layernorm_args a) {
  __shared__ float scratch[2][WARP];
  Element *x = static_cast<Element *>(a.x) + blockIdx.x * a.stride;
  float sum = 0, squares = 0, n = static_cast<float>(a.dim);
  for (uint32_t i = threadIdx.x; i < a.dim; i += blockDim.x)
    sum += value_of(x[i]);
  float mean = block_sum(sum, scratch[0]) / n;
  for (uint32_t i = threadIdx.x; i < a.dim; i += blockDim.x) {
    float d = value_of(x[i]) - mean;
    squares += d * d;
  }
  float gain = 1 / sqrtf(block_sum(squares, scratch[1]) / n + a.eps);
  for (uint32_t i = threadIdx.x; i < a.dim; i += blockDim.x)
    put_value(&x[i], (value_of(x[i]) - mean) * gain * vec_at(a.w, i) + vec_at(a.b, i));
}

extern "C" int td_cu_layernorm(const td_layernorm_args *a, td_cu_stream stream) {
  uint32_t threads = at_most(ceil_div(a->dim, WARP) * WARP, 256);
  auto kernel = a->is_f32 ? layernorm_kernel<float> : layernorm_kernel<uint16_t>;
  return TD_LAUNCH(kernel, a->n_rows, threads, 0, stream, *a);
}

// The angles of token t, or NULL with the fault set.
__device__ static const float *angles_of(const td_rope_args &a, uint32_t t) {
  int32_t position = a.position[t];
  if (position >= 0) return a.cos_sin + static_cast<size_t>(position) * a.rot_dim;
  if (threadIdx.x == 0) *a.fault = TD_CU_FAULT_POSITION;
  return nullptr;
}

// Rotates the pair (x, y) by a position's angle, or back.
__device__ static void turn(const float *cos_sin, bool backwards, float &x, float &y) {
  float c = cos_sin[0], s = backwards ? -cos_sin[1] : cos_sin[1], u = x, v = y;
  x = u * c - v * s;
  y = v * c + u * s;
}

// Blocks (t, 0) have the heads of a token, blocks (t, 1) those that are turned also.
__device__ static td_rope_heads heads_of(const td_rope_args &a) {
  td_rope_heads heads = blockIdx.y == 0 ? a.heads : a.also;
  heads.x += blockIdx.x * heads.token_stride;
  return heads;
}

// One thread per pair.
__global__ static void rope_kernel(td_rope_args a) {
  uint32_t half = a.rot_dim / 2;
  const float *cos_sin = angles_of(a, blockIdx.x);
  if (!cos_sin) return;
  const td_rope_heads heads = heads_of(a);
  for (uint32_t p = threadIdx.x; p < heads.n_heads * half; p += blockDim.x) {
    uint32_t i = p % half;
    uint16_t *x = heads.x + p / half * heads.head_stride;
    uint16_t *first = a.interleaved ? x + 2 * i : x + i;
    uint16_t *second = a.interleaved ? first + 1 : first + half;
    float u = f32_from_bf16(*first), v = f32_from_bf16(*second);
    turn(cos_sin + 2 * i, a.backwards, u, v);
    *first = bf16_from_f32(u);
    *second = bf16_from_f32(v);
  }
}

// A thread handles eight pairs or, interleaved, four.
template <bool INTERLEAVED> __global__ static void rope_runs_kernel(td_rope_args a) {
  uint32_t half = a.rot_dim / 2;
  const float *cos_sin = angles_of(a, blockIdx.x);
  if (!cos_sin) return;
  const td_rope_heads heads = heads_of(a);
  uint32_t n_runs = (INTERLEAVED ? a.rot_dim : half) / RUN_OF_8;
  for (uint32_t p = threadIdx.x; p < heads.n_heads * n_runs; p += blockDim.x) {
    uint32_t i = p % n_runs * RUN_OF_8;
    uint16_t *x = heads.x + p / n_runs * heads.head_stride + i;
    float first[RUN_OF_8], second[RUN_OF_8], angles[2][RUN_OF_8];
    load_run(cos_sin + (INTERLEAVED ? i : 2 * i), angles[0]);
    load_run(x, first);
    if (INTERLEAVED) {
#pragma unroll
      for (int e = 0; e < RUN_OF_8; e += 2)
        turn(&angles[0][e], a.backwards, first[e], first[e + 1]);
    } else {
      load_run(cos_sin + 2 * i + RUN_OF_8, angles[1]);
      load_run(x + half, second);
#pragma unroll
      for (int e = 0; e < RUN_OF_8; e++)
        turn(&angles[e / 4][e % 4 * 2], a.backwards, first[e], second[e]);
      store_run(x + half, second);
    }
    store_run(x, first);
  }
}

static bool are_in_runs(const td_rope_heads &heads) {
  return in_runs(heads.x, heads.token_stride | heads.head_stride);
}

extern "C" int td_cu_rope(const td_rope_args *a, td_cu_stream stream) {
  uint32_t run_dim = a->interleaved ? a->rot_dim : a->rot_dim / 2;
  dim3 grid(a->n_tokens, a->also.x ? 2 : 1);
  if (are_in_runs(a->heads) && are_in_runs(a->also) && in_runs(a->cos_sin, run_dim)) {
    auto kernel = a->interleaved ? rope_runs_kernel<true> : rope_runs_kernel<false>;
    return TD_LAUNCH(kernel, grid, ELEMENT_THREADS, 0, stream, *a);
  }
  return TD_LAUNCH(rope_kernel, grid, ELEMENT_THREADS, 0, stream, *a);
}

// One block per token.
__global__ static void scale_rows_kernel(td_scale_rows_args a) {
  int32_t position = a.position[blockIdx.x];
  if (position < 0) {
    if (threadIdx.x == 0) *a.fault = TD_CU_FAULT_POSITION;
    return;
  }
  float factor = a.factor[position];
  uint16_t *x = a.x + static_cast<size_t>(blockIdx.x) * a.dim;
  for (uint32_t i = threadIdx.x; i < a.dim; i += blockDim.x)
    x[i] = bf16_from_f32(f32_from_bf16(x[i]) * factor);
}

extern "C" int td_cu_scale_rows(const td_scale_rows_args *a, td_cu_stream stream) {
  return TD_LAUNCH(scale_rows_kernel, a->n_tokens, ELEMENT_THREADS, 0, stream, *a);
}

template <int N> __global__ static void swiglu_kernel(td_cu_swiglu_args a) {
  const pair_range used = pairs_of(a.range, a.n_rows);
  size_t n = static_cast<size_t>(used.end - used.begin) * a.dim;
  for (size_t i = first_element() * N; i < n; i += element_stride() * N) {
    float gate[N], up[N];
    take_elements(a.gate + i, gate);
    take_elements(a.up + i, up);
#pragma unroll
    for (int e = 0; e < N; e++)
      gate[e] = swiglu(a.glu, gate[e], up[e]);
    put_elements(a.glu.out + i, gate);
  }
}

// Rows of gate and up alternate. RUNS: four results at a time.
template <bool RUNS> __global__ static void swiglu_pairs_kernel(td_cu_swiglu_args a) {
  enum { AT_ONCE = RUNS ? RUN_OF_8 / 2 : 1 };
  const pair_range used = pairs_of(a.range, a.n_rows);
  size_t n = static_cast<size_t>(used.end - used.begin) * a.dim;
  for (size_t i = first_element() * AT_ONCE; i < n; i += element_stride() * AT_ONCE) {
    float v[RUN_OF_8];
    if (!RUNS) {
      a.glu.out[i] = bf16_from_f32(clamped_swiglu(a.glu, a.gate[2 * i], a.gate[2 * i + 1]));
      continue;
    }
    load_run(a.gate + 2 * i, v);
#pragma unroll
    for (int e = 0; e < AT_ONCE; e++)
      v[e] = clamped_swiglu(a.glu, v[2 * e], v[2 * e + 1]);
    *reinterpret_cast<uint2 *>(a.glu.out + i) = {bf16x2_from_f32(v[0], v[1]),
                                                 bf16x2_from_f32(v[2], v[3])};
  }
}

extern "C" int td_cu_swiglu(const td_cu_swiglu_args *a, td_cu_stream stream) {
  const uint32_t row = a->dim * (a->pairs ? 2 : 1);
  const bool runs = in_runs(a->gate, row) && in_runs(a->glu.out, row) &&
                    (a->pairs || in_runs(a->up, row));
  const size_t n = static_cast<size_t>(a->n_rows) * row / (runs ? RUN_OF_8 : a->pairs ? 2 : 1);
  auto kernel = a->pairs ? runs ? swiglu_pairs_kernel<true> : swiglu_pairs_kernel<false>
                : runs ? swiglu_kernel<RUN_OF_8>
                         : swiglu_kernel<1>;
  return TD_LAUNCH(kernel, element_blocks(n), ELEMENT_THREADS, 0, stream, *a);
}

// ---- the weighted sum of experts ----------------------------------------------------------------

// The terms of a token's sum, in order of addition.
struct sum_terms {
  uint32_t row[TD_CU_MAX_TOP_K]; // row of parts
  float weight[TD_CU_MAX_TOP_K];
  uint32_t place[TD_CU_MAX_TOP_K]; // index in sorted order, from moe_sort
};

// Fills s and returns the number of terms.
__device__ static uint32_t find_terms(const td_cu_moe_sum_args &a, const pair_range &range,
                                      uint32_t t, sum_terms &s) {
  uint32_t j = threadIdx.x;
  size_t pair = static_cast<size_t>(t) * a.top_k + j;
  __syncthreads(); // the previous token's terms are no longer read
  if (j < a.top_k) s.place[j] = a.place ? a.place[pair] : static_cast<uint32_t>(pair);
  __syncthreads();
  uint32_t n = 0, before = 0;
  for (uint32_t i = 0; i < a.top_k; i++) {
    bool is_there = s.place[i] - range.begin < range.end - range.begin;
    n += is_there;
    before += is_there && j < a.top_k && (a.by_expert ? s.place[i] < s.place[j] : i < j);
  }
  if (j < a.top_k && s.place[j] - range.begin < range.end - range.begin) {
    s.row[before] = s.place[j] - range.begin;
    s.weight[before] = a.weights ? a.weights[pair] : 1;
  }
  __syncthreads();
  return n;
}

// One block per token, with a stride over tokens; a thread handles N elements at a time.
template <class Out, int N> __global__ static void moe_sum_kernel(td_cu_moe_sum_args a) {
  __shared__ sum_terms s;
  const pair_range range = pairs_of(a.range, a.n_tokens * a.top_k);
  if (a.accumulate && range.begin == range.end) return;
  for (uint32_t t = blockIdx.x; t < a.n_tokens; t += gridDim.x) {
    uint32_t n = find_terms(a, range, t, s);
    if (a.accumulate && n == 0) continue;
    for (uint32_t c = threadIdx.x * N; c < a.dim; c += blockDim.x * N) {
      Out *out = static_cast<Out *>(a.out) + static_cast<size_t>(t) * a.dim + c;
      float sum[N] = {}, part[N];
      if (a.accumulate) take_elements(out, sum);
      for (uint32_t j = 0; j < n; j++) {
        take_elements(a.parts + static_cast<size_t>(s.row[j]) * a.dim + c, part);
#pragma unroll
        for (int e = 0; e < N; e++)
          sum[e] += s.weight[j] * part[e];
      }
      put_elements(out, sum);
    }
  }
}

// One block per pair, with a stride over pairs.
template <int N> __global__ static void moe_pairs_kernel(td_cu_moe_sum_args a) {
  const pair_range range = pairs_of(a.range, a.n_tokens * a.top_k);
  for (uint32_t pair = blockIdx.x; pair < a.n_tokens * a.top_k; pair += gridDim.x) {
    uint32_t row = (a.place ? a.place[pair] : pair) - range.begin;
    if (row >= range.end - range.begin) continue;
    for (uint32_t c = threadIdx.x * N; c < a.dim; c += blockDim.x * N) {
      float part[N];
      take_elements(a.parts + static_cast<size_t>(row) * a.dim + c, part);
      put_elements(static_cast<float *>(a.out) + static_cast<size_t>(pair) * a.dim + c, part);
    }
  }
}

// One block per token and a part of its elements.
template <int N> __global__ static void moe_join_kernel(td_moe_join_args a) {
  __shared__ const float *part_of[TD_CU_MAX_TOP_K];
  __shared__ float weight[TD_CU_MAX_TOP_K];
  uint32_t t = blockIdx.x;
  for (uint32_t j = threadIdx.x; j < a.top_k; j += blockDim.x) {
    size_t pair = static_cast<size_t>(t) * a.top_k + j;
    uint32_t e = static_cast<uint32_t>(a.ids[pair]);
    bool is_here = e < a.n_experts && a.slots[e] >= 0;
    if (e >= a.n_experts) *a.fault = TD_CU_FAULT_EXPERT;
    bool is_peers = a.peer && e < a.n_experts && a.peer_slots[e] >= 0;
    part_of[j] = (is_here ? a.here : is_peers ? a.peer : a.there) + pair * a.dim;
    weight[j] = a.weights[pair];
  }
  __syncthreads();
  uint32_t step = gridDim.y * blockDim.x * N;
  for (uint32_t c = (blockIdx.y * blockDim.x + threadIdx.x) * N; c < a.dim; c += step) {
    float sum[N] = {}, part[N];
    for (uint32_t j = 0; j < a.top_k; j++) {
      take_elements(part_of[j] + c, part);
#pragma unroll
      for (int e = 0; e < N; e++)
        sum[e] += weight[j] * part[e];
    }
    put_elements(a.out + static_cast<size_t>(t) * a.dim + c, sum);
  }
}

extern "C" int td_cu_moe_join(const td_moe_join_args *a, td_cu_stream stream) {
  enum { MOST_PARTS = 16 };
  bool runs = in_runs(a->here, a->dim) && in_runs(a->there, a->dim) && in_runs(a->out, a->dim) &&
              (!a->peer || in_runs(a->peer, a->dim));
  uint32_t n = ceil_div(a->dim, ELEMENT_THREADS * (runs ? RUN_OF_8 : 1));
  dim3 grid(a->n_tokens, at_most(n, MOST_PARTS));
  auto kernel = runs ? moe_join_kernel<RUN_OF_8> : moe_join_kernel<1>;
  return TD_LAUNCH(kernel, grid, ELEMENT_THREADS, 0, stream, *a);
}

static int launch_pairs(const td_cu_moe_sum_args *a, td_cu_stream stream) {
  enum { PAIR_BLOCKS = 4096 };
  bool runs = in_runs(a->parts, a->dim) && in_runs(a->out, a->dim);
  auto kernel = runs ? moe_pairs_kernel<RUN_OF_8> : moe_pairs_kernel<1>;
  return TD_LAUNCH(kernel, at_most(a->n_tokens * a->top_k, PAIR_BLOCKS), ELEMENT_THREADS, 0, stream,
                   *a);
}

extern "C" int td_cu_moe_sum(const td_cu_moe_sum_args *a, td_cu_stream stream) {
  enum { SUM_BLOCKS = 4096 };
  if (a->by_pair) return launch_pairs(a, stream);
  bool runs = in_runs(a->parts, a->dim) && in_runs(a->out, a->dim);
  auto kernel = runs         ? a->out_f32 ? moe_sum_kernel<float, RUN_OF_8>
                                          : moe_sum_kernel<uint16_t, RUN_OF_8>
                        : a->out_f32 ? moe_sum_kernel<float, 1>
                             : moe_sum_kernel<uint16_t, 1>;
  return TD_LAUNCH(kernel, at_most(a->n_tokens, SUM_BLOCKS), ELEMENT_THREADS, 0, stream, *a);
}
