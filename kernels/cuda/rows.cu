// kernels/cuda/rows.cu - operators that touch rows of activations element by element: embedding,
// addition, gathering, RMSNorm, rotary embedding, SwiGLU, the experts' sum.
#include "kernels/cuda/codes.cuh"
#include "kernels/cuda/tiles.cuh"

enum { ELEMENT_THREADS = 256, MAX_BLOCKS = 1 << 16 };

// Enough blocks for n elements; kernels stride over what is left.
static uint32_t element_blocks(size_t n) {
  return at_most(ceil_div(n, ELEMENT_THREADS), MAX_BLOCKS);
}

__device__ static size_t first_element() {
  return static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ static size_t element_stride() {
  return static_cast<size_t>(gridDim.x) * blockDim.x;
}

__global__ static void embed_kernel(td_cu_embed_args a) {
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

extern "C" int td_cu_embed(const td_cu_embed_args *a, td_cu_stream stream) {
  TD_LAUNCH(embed_kernel, a->n_tokens, ELEMENT_THREADS, 0, stream, *a);
  return launched();
}

__device__ static float f32_from(const void *x, size_t i, bool is_f32) {
  return is_f32 ? static_cast<const float *>(x)[i]
                : f32_from_bf16(static_cast<const uint16_t *>(x)[i]);
}

__global__ static void add_kernel(td_cu_add_args a) {
  for (size_t i = first_element(); i < a.n; i += element_stride())
    a.x[i] = bf16_from_f32(f32_from_bf16(a.x[i]) + f32_from(a.y, i, a.y_f32));
}

extern "C" int td_cu_add(const td_cu_add_args *a, td_cu_stream stream) {
  TD_LAUNCH(add_kernel, element_blocks(a->n), ELEMENT_THREADS, 0, stream, *a);
  return launched();
}

__global__ static void gather_kernel(td_cu_gather_args a) {
  uint32_t i = blockIdx.x;
  int32_t row = a.rows[i];
  if (row < 0) {
    if (threadIdx.x == 0) *a.fault = TD_CU_FAULT_ROW;
    return;
  }
  const uint16_t *x = a.x + static_cast<size_t>(row) * a.dim;
  uint16_t *out = a.out + static_cast<size_t>(i) * a.dim;
  for (uint32_t c = threadIdx.x; c < a.dim; c += blockDim.x)
    out[c] = x[c];
}

extern "C" int td_cu_gather(const td_cu_gather_args *a, td_cu_stream stream) {
  TD_LAUNCH(gather_kernel, a->n_rows, ELEMENT_THREADS, 0, stream, *a);
  return launched();
}

// A block a row. The residual's sum is rounded before it is normed, as it is when read again.
__global__ static void rmsnorm_kernel(td_cu_rmsnorm_args a) {
  __shared__ float scratch[WARP];
  size_t row = blockIdx.x;
  const uint16_t *x = a.x + row * a.x_stride;
  float sum = 0;
  if (a.residual) {
    uint16_t *residual = a.residual + row * a.dim;
    for (uint32_t i = threadIdx.x; i < a.dim; i += blockDim.x) {
      residual[i] = bf16_from_f32(f32_from_bf16(residual[i]) + f32_from_bf16(x[i]));
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
    out[i] = bf16_from_f32(f32_from_bf16(x[i]) * scale * vec_at(a.w, i));
}

extern "C" int td_cu_rmsnorm(const td_cu_rmsnorm_args *a, td_cu_stream stream) {
  uint32_t threads = ceil_div(a->dim, 4 * WARP) * WARP;
  if (threads > 512) threads = 512;
  TD_LAUNCH(rmsnorm_kernel, a->n_rows, threads, 0, stream, *a);
  return launched();
}

// A block a token, a thread a pair.
__global__ static void rope_kernel(td_cu_rope_args a) {
  uint32_t t = blockIdx.x, half = a.rot_dim / 2;
  int32_t position = a.position[t];
  if (position < 0) {
    if (threadIdx.x == 0) *a.fault = TD_CU_FAULT_POSITION;
    return;
  }
  const float *cos_sin = a.cos_sin + static_cast<size_t>(position) * a.rot_dim;
  uint16_t *token = a.x + t * a.token_stride;
  for (uint32_t p = threadIdx.x; p < a.n_heads * half; p += blockDim.x) {
    uint32_t i = p % half;
    uint16_t *x = token + p / half * a.head_stride;
    uint16_t *first = a.interleaved ? x + 2 * i : x + i;
    uint16_t *second = a.interleaved ? first + 1 : first + half;
    float c = cos_sin[2 * i], s = cos_sin[2 * i + 1];
    float u = f32_from_bf16(*first), v = f32_from_bf16(*second);
    *first = bf16_from_f32(u * c - v * s);
    *second = bf16_from_f32(v * c + u * s);
  }
}

extern "C" int td_cu_rope(const td_cu_rope_args *a, td_cu_stream stream) {
  TD_LAUNCH(rope_kernel, a->n_tokens, ELEMENT_THREADS, 0, stream, *a);
  return launched();
}

__global__ static void swiglu_kernel(td_cu_swiglu_args a) {
  pair_range used = {0, a.n_rows};
  if (a.range.tiles) used = pairs_of(a.range);
  size_t n = static_cast<size_t>(used.end - used.begin) * a.dim;
  for (size_t i = first_element(); i < n; i += element_stride()) {
    float gate = a.gate[i];
    a.out[i] = bf16_from_f32(gate / (1 + expf(-gate)) * a.up[i]);
  }
}

extern "C" int td_cu_swiglu(const td_cu_swiglu_args *a, td_cu_stream stream) {
  size_t n = static_cast<size_t>(a->n_rows) * a->dim;
  TD_LAUNCH(swiglu_kernel, element_blocks(n), ELEMENT_THREADS, 0, stream, *a);
  return launched();
}

// ---- the experts' sum ---------------------------------------------------------------------------

// What of a token is summed, in this order.
struct sum_terms {
  uint32_t row[TD_CU_MAX_TOP_K]; // of parts
  float weight[TD_CU_MAX_TOP_K];
  uint32_t place[TD_CU_MAX_TOP_K]; // as the sort gave them
};

// How many there are.
__device__ static uint32_t find_terms(const td_cu_moe_sum_args &a, const pair_range &range,
                                      uint32_t t, sum_terms &s) {
  uint32_t j = threadIdx.x;
  size_t pair = static_cast<size_t>(t) * a.top_k + j;
  __syncthreads(); // nobody reads the terms of the token before
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

// A block a token, and then others.
__global__ static void moe_sum_kernel(td_cu_moe_sum_args a) {
  __shared__ sum_terms s;
  pair_range range = {0, a.n_tokens * a.top_k};
  if (a.range.tiles) range = pairs_of(a.range);
  if (a.accumulate && range.begin == range.end) return;
  for (uint32_t t = blockIdx.x; t < a.n_tokens; t += gridDim.x) {
    uint32_t n = find_terms(a, range, t, s);
    if (a.accumulate && n == 0) continue;
    for (uint32_t c = threadIdx.x; c < a.dim; c += blockDim.x) {
      size_t at = static_cast<size_t>(t) * a.dim + c;
      float sum = a.accumulate ? f32_from(a.out, at, a.out_f32) : 0;
      for (uint32_t j = 0; j < n; j++)
        sum += s.weight[j] * a.parts[static_cast<size_t>(s.row[j]) * a.dim + c];
      if (a.out_f32) {
        static_cast<float *>(a.out)[at] = sum;
      } else {
        static_cast<uint16_t *>(a.out)[at] = bf16_from_f32(sum);
      }
    }
  }
}

extern "C" int td_cu_moe_sum(const td_cu_moe_sum_args *a, td_cu_stream stream) {
  enum { SUM_BLOCKS = 4096 };
  TD_LAUNCH(moe_sum_kernel, at_most(a->n_tokens, SUM_BLOCKS), ELEMENT_THREADS, 0, stream, *a);
  return launched();
}
