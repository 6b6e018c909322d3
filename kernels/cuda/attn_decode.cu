// kernels/cuda/attn_decode.cu - attention for few queries: a block takes one token, one split of
// its keys and up to eight heads that share them; a second kernel merges the splits. GQA, and MLA
// over its latents (one key for all heads, values within it).
#include "kernels/cuda/attn.cuh"

enum { DECODE_THREADS = 128, DECODE_WARPS = DECODE_THREADS / WARP, HEADS = 8, KEYS = 32 };

// A row of keys has an odd number of words, so that lanes at different keys meet different banks.
__host__ __device__ static uint32_t padded(uint32_t dim) {
  return (dim + 1) / 2 * 2 + ((dim + 1) / 2 % 2 ? 0 : 2);
}

struct decode_shared {
  float *q;     // [HEADS][k_dim]
  float *acc;   // [HEADS][v_dim]
  float *p;     // [HEADS][KEYS] scores, then weights
  float *m, *l; // [HEADS]
  float *rescale;
  uint16_t *k, *v; // [KEYS][padded]; v may be k
};

static size_t shared_bytes(const td_cu_attn_decode_args *a) {
  size_t floats = HEADS * (static_cast<size_t>(a->k_dim) + a->v_dim + KEYS + 3);
  size_t halves = KEYS * padded(a->k_dim) + (a->v_in_k ? 0 : KEYS * padded(a->v_dim));
  return floats * sizeof(float) + halves * sizeof(uint16_t);
}

__device__ static decode_shared carve(const td_cu_attn_decode_args &a, unsigned char *memory) {
  decode_shared s;
  s.q = reinterpret_cast<float *>(memory);
  s.acc = s.q + HEADS * a.k_dim;
  s.p = s.acc + HEADS * a.v_dim;
  s.m = s.p + HEADS * KEYS;
  s.l = s.m + HEADS;
  s.rescale = s.l + HEADS;
  s.k = reinterpret_cast<uint16_t *>(s.rescale + HEADS);
  s.v = a.v_in_k ? s.k : s.k + KEYS * padded(a.k_dim);
  return s;
}

// What a block works on.
struct decode_part {
  uint32_t t, seq, kv_head, head0, n_heads;
  uint32_t begin, end; // keys
};

__device__ static decode_part part_of(const td_cu_attn_decode_args &a) {
  decode_part part;
  uint32_t group = a.n_heads / a.n_kv_heads, chunks = (group + HEADS - 1) / HEADS;
  part.t = blockIdx.z;
  part.seq = static_cast<uint32_t>(a.batch.seq[part.t]);
  part.kv_head = blockIdx.x / chunks;
  uint32_t first = blockIdx.x % chunks * HEADS;
  part.head0 = part.kv_head * group + first;
  part.n_heads = at_most(group - first, HEADS);
  part.begin = blockIdx.y * a.split_keys;
  part.end = at_most(part.begin + a.split_keys, keys_of(a.batch, part.t));
  return part;
}

__device__ static void load_queries(const td_cu_attn_decode_args &a, const decode_part &part,
                                    const decode_shared &s) {
  size_t at = (static_cast<size_t>(part.t) * a.n_heads + part.head0) * a.k_dim;
  for (uint32_t i = threadIdx.x; i < part.n_heads * a.k_dim; i += DECODE_THREADS) {
    float q = a.q_f32 ? static_cast<const float *>(a.q)[at + i]
                      : f32_from_bf16(static_cast<const uint16_t *>(a.q)[at + i]);
    s.q[i] = q * a.scale;
  }
  for (uint32_t i = threadIdx.x; i < HEADS * a.v_dim; i += DECODE_THREADS)
    s.acc[i] = 0;
  if (threadIdx.x < HEADS) {
    s.m[threadIdx.x] = -INFINITY;
    s.l[threadIdx.x] = 0;
  }
}

// A warp a key.
__device__ static void load_keys(const td_cu_attn_decode_args &a, const decode_part &part,
                                 uint32_t begin, uint32_t n, const decode_shared &s) {
  size_t v_plane = static_cast<size_t>(a.n_kv_heads) * a.batch.page_tokens * a.k_dim;
  for (uint32_t j = threadIdx.x / WARP; j < n; j += DECODE_WARPS) {
    const char *page = kv_page(a.batch, a.kv, part.seq, begin + j);
    size_t k_at = kv_row(a.batch, begin + j, part.kv_head, a.k_dim);
    for (uint32_t d = threadIdx.x % WARP; d < a.k_dim; d += WARP)
      s.k[j * padded(a.k_dim) + d] = kv_bf16(a.kv, page, k_at + d);
    if (a.v_in_k) continue;
    size_t v_at = v_plane + kv_row(a.batch, begin + j, part.kv_head, a.v_dim);
    for (uint32_t d = threadIdx.x % WARP; d < a.v_dim; d += WARP)
      s.v[j * padded(a.v_dim) + d] = kv_bf16(a.kv, page, v_at + d);
  }
}

// A warp a head, a lane a key: scores, the running maximum and sum, and the keys' weights.
__device__ static void weigh_keys(const td_cu_attn_decode_args &a, const decode_part &part,
                                  uint32_t n, const decode_shared &s) {
  uint32_t lane = threadIdx.x % WARP;
  for (uint32_t h = threadIdx.x / WARP; h < part.n_heads; h += DECODE_WARPS) {
    const float *q = s.q + h * a.k_dim;
    const uint16_t *k = s.k + lane * padded(a.k_dim);
    float score = -INFINITY;
    if (lane < n) {
      score = 0;
      for (uint32_t d = 0; d < a.k_dim; d++)
        score += q[d] * f32_from_bf16(k[d]);
    }
    float before = s.m[h], m = fmaxf(before, warp_max(score));
    float p = lane < n ? expf(score - m) : 0;
    float sum = warp_sum(p);
    s.p[h * KEYS + lane] = p;
    __syncwarp(); // every lane has read s.m
    if (lane == 0) {
      float rescale = expf(before - m);
      s.rescale[h] = rescale;
      s.l[h] = s.l[h] * rescale + sum;
      s.m[h] = m;
    }
  }
}

__device__ static void add_values(const td_cu_attn_decode_args &a, const decode_part &part,
                                  uint32_t n, const decode_shared &s) {
  uint32_t stride = padded(a.v_in_k ? a.k_dim : a.v_dim);
  for (uint32_t i = threadIdx.x; i < part.n_heads * a.v_dim; i += DECODE_THREADS) {
    uint32_t h = i / a.v_dim, d = i % a.v_dim;
    float acc = s.acc[i] * s.rescale[h];
    for (uint32_t j = 0; j < n; j++)
      acc += s.p[h * KEYS + j] * f32_from_bf16(s.v[j * stride + d]);
    s.acc[i] = acc;
  }
}

__global__ static void attn_decode_kernel(td_cu_attn_decode_args a) {
  TD_DYNAMIC_SHARED(memory);
  decode_shared s = carve(a, memory);
  decode_part part = part_of(a);
  load_queries(a, part, s);
  for (uint32_t begin = part.begin; begin < part.end; begin += KEYS) {
    uint32_t n = at_most(part.end - begin, KEYS);
    __syncthreads();
    load_keys(a, part, begin, n, s);
    __syncthreads();
    weigh_keys(a, part, n, s);
    __syncthreads();
    add_values(a, part, n, s);
  }
  __syncthreads();
  for (uint32_t h = 0; h < part.n_heads; h++) {
    size_t row = (static_cast<size_t>(part.t) * a.n_heads + part.head0 + h) * a.n_splits;
    row += blockIdx.y;
    for (uint32_t d = threadIdx.x; d < a.v_dim; d += DECODE_THREADS)
      a.part[row * a.v_dim + d] = s.acc[h * a.v_dim + d];
    if (threadIdx.x == 0) {
      a.part_ml[2 * row] = s.m[h];
      a.part_ml[2 * row + 1] = s.l[h];
    }
  }
}

// A block a token and head. Splits beyond the token's keys have a sum of 0.
__global__ static void attn_merge_kernel(td_cu_attn_decode_args a) {
  size_t row = static_cast<size_t>(blockIdx.y) * a.n_heads + blockIdx.x;
  const float *ml = a.part_ml + row * a.n_splits * 2;
  const float *part = a.part + row * a.n_splits * a.v_dim;
  float m = -INFINITY, l = 0;
  for (uint32_t i = 0; i < a.n_splits; i++)
    m = fmaxf(m, ml[2 * i]);
  for (uint32_t i = 0; i < a.n_splits; i++)
    l += expf(ml[2 * i] - m) * ml[2 * i + 1];
  for (uint32_t d = threadIdx.x; d < a.v_dim; d += blockDim.x) {
    float sum = 0;
    for (uint32_t i = 0; i < a.n_splits; i++)
      sum += expf(ml[2 * i] - m) * part[static_cast<size_t>(i) * a.v_dim + d];
    float v = sum / l;
    if (a.q_f32) {
      static_cast<float *>(a.out)[row * a.v_dim + d] = v;
    } else {
      static_cast<uint16_t *>(a.out)[row * a.v_dim + d] = bf16_from_f32(v);
    }
  }
}

extern "C" int td_cu_attn_decode(const td_cu_attn_decode_args *a, td_cu_stream stream) {
  uint32_t chunks = ceil_div(a->n_heads / a->n_kv_heads, HEADS);
  size_t n_bytes = shared_bytes(a);
  cudaError_t code = allow_shared(attn_decode_kernel, SHARED_BYTES);
  if (code != cudaSuccess) return code;
  dim3 grid(a->n_kv_heads * chunks, a->n_splits, a->batch.n_tokens);
  TD_LAUNCH(attn_decode_kernel, grid, DECODE_THREADS, n_bytes, stream, *a);
  if (int failed = launched()) return failed;
  TD_LAUNCH(attn_merge_kernel, dim3(a->n_heads, a->batch.n_tokens), DECODE_THREADS, 0, stream, *a);
  return launched();
}
