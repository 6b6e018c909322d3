// kernels/cuda/mla.cu - projections around absorbed MLA attention: queries times kv_b's key rows,
// attended latents times its value rows.
// Each weight is decoded once for up to TOKENS tokens, eight of a row at a time. A token's result
// does not depend on the other tokens.
#include "kernels/cuda/dequant8.cuh"

enum {
  MLA_THREADS = 256,
  MLA_WARPS = MLA_THREADS / WARP,
  TOKENS = 8,
  RUN = 8,
  PARTS = 4, // parts of the key rows, each with its own lanes
  PART_LANES = WARP / PARTS,
  COLUMNS = MLA_WARPS * PART_LANES * RUN // per block
};

// Eight weights of a row and their scale.
struct scaled8 {
  float v[RUN], scale;
};

template <int READ>
__device__ static scaled8 weights_at(const td_weight &w, uint32_t row, uint32_t k) {
  scaled8 out;
  out.scale = global_scale(w);
  decode8<READ>(w, row, k, load8<READ>(w, row, k), out.v);
  if constexpr (READ == TD_CU_READ_ANY) {
    scale_each(w, row, k, out.v);
  } else if constexpr (READ != TD_CU_READ_BF16) {
    out.scale = scale_in<READ>(scales_of_row<READ>(w, row), k);
  }
  return out;
}

// Copies the rotated part of the queries, which is not multiplied by kv_b.
__device__ static void copy_rope(const td_cu_mla_args &a, uint32_t t0, uint32_t n) {
  size_t q_dim = a.nope_dim + a.rope_dim, entry_dim = a.lora + a.rope_dim;
  for (uint32_t i = threadIdx.x; i < n * a.rope_dim; i += MLA_THREADS) {
    size_t row = static_cast<size_t>(t0 + i / a.rope_dim) * a.n_heads + blockIdx.y;
    uint32_t d = i % a.rope_dim;
    a.query[row * entry_dim + a.lora + d] = f32_from_bf16(a.q[row * q_dim + a.nope_dim + d]);
  }
}

// A block computes some columns of one head; a lane computes eight of them over every PARTS-th key
// row. The last blocks of x copy the rotated part.
template <int READ, int T> __global__ static void mla_absorb_kernel(td_cu_mla_args a) {
  uint32_t head = blockIdx.y, t0 = blockIdx.z * T, n = at_most(a.n_tokens - t0, T);
  if (blockIdx.x == gridDim.x - 1) {
    copy_rope(a, t0, n);
    return;
  }
  uint32_t lane = threadIdx.x % WARP, part = lane / PART_LANES;
  uint32_t c = blockIdx.x * COLUMNS + (threadIdx.x / WARP * PART_LANES + lane % PART_LANES) * RUN;
  size_t row = static_cast<size_t>(t0) * a.n_heads + head;
  const uint16_t *q = a.q + row * (a.nope_dim + a.rope_dim);
  float *query = a.query + row * (a.lora + a.rope_dim) + c;
  size_t q_step = static_cast<size_t>(a.n_heads) * (a.nope_dim + a.rope_dim);
  size_t query_step = static_cast<size_t>(a.n_heads) * (a.lora + a.rope_dim);
  float sum[T][RUN] = {};
#pragma unroll 4
  for (uint32_t d = part; d < a.nope_dim && c < a.lora; d += PARTS) {
    const scaled8 w = weights_at<READ>(a.kv_b, head * (a.nope_dim + a.v_dim) + d, c);
#pragma unroll
    for (uint32_t t = 0; t < T; t++) {
      if (T > 1 && t >= n) break;
      float x = w.scale * f32_from_bf16(q[t * q_step + d]);
#pragma unroll
      for (int i = 0; i < RUN; i++)
        sum[t][i] += w.v[i] * x;
    }
  }
#pragma unroll
  for (uint32_t t = 0; t < T; t++) {
#pragma unroll
    for (uint32_t i = 0; i < RUN; i++) {
      float total = sum[t][i] + __shfl_xor_sync(TD_FULL_WARP, sum[t][i], PART_LANES);
      total += __shfl_xor_sync(TD_FULL_WARP, total, 2 * PART_LANES);
      if (part == 0 && t < n && c + i < a.lora) query[t * query_step + i] = total;
    }
  }
}

// One warp per value row of one head.
template <int READ, int T> __global__ static void mla_values_kernel(td_cu_mla_args a) {
  uint32_t head = blockIdx.y, t0 = blockIdx.z * T, n = at_most(a.n_tokens - t0, T);
  uint32_t r = blockIdx.x * MLA_WARPS + threadIdx.x / WARP;
  if (r >= a.v_dim) return;
  uint32_t row = head * (a.nope_dim + a.v_dim) + a.nope_dim + r;
  const float *latent = a.latent + (static_cast<size_t>(t0) * a.n_heads + head) * a.lora;
  size_t step = static_cast<size_t>(a.n_heads) * a.lora;
  float sum[T] = {};
  for (uint32_t c = threadIdx.x % WARP * RUN; c < a.lora; c += WARP * RUN) {
    const scaled8 w = weights_at<READ>(a.kv_b, row, c);
#pragma unroll
    for (uint32_t t = 0; t < T; t++) {
      if (T > 1 && t >= n) break;
      float dot = 0;
#pragma unroll
      for (uint32_t i = 0; i < RUN; i++) {
        if (READ != TD_CU_READ_ANY || c + i < a.lora) dot += w.v[i] * latent[t * step + c + i];
      }
      sum[t] += w.scale * dot;
    }
  }
#pragma unroll
  for (uint32_t t = 0; t < T; t++) {
    if (t >= n) break;
    float total = warp_sum(sum[t]);
    size_t at = (static_cast<size_t>(t0 + t) * a.n_heads + head) * a.v_dim + r;
    if (threadIdx.x % WARP == 0) a.out[at] = bf16_from_f32(total);
  }
}

template <int READ, int T>
static int launch(const td_cu_mla_args *a, bool is_absorb, td_cu_stream stream) {
  uint32_t n_x = is_absorb ? ceil_div(a->lora, COLUMNS) + 1 : ceil_div(a->v_dim, MLA_WARPS);
  dim3 grid(n_x, a->n_heads, ceil_div(a->n_tokens, T));
  auto kernel = is_absorb ? mla_absorb_kernel<READ, T> : mla_values_kernel<READ, T>;
  TD_LAUNCH(kernel, grid, MLA_THREADS, 0, stream, *a);
  return launched();
}

template <int READ>
static int launch(const td_cu_mla_args *a, bool is_absorb, td_cu_stream stream) {
  return a->n_tokens == 1 ? launch<READ, 1>(a, is_absorb, stream)
                          : launch<READ, TOKENS>(a, is_absorb, stream);
}

static int launch_read(const td_cu_mla_args *a, bool is_absorb, td_cu_stream stream) {
  switch (a->read) {
  case TD_CU_READ_BF16: return launch<TD_CU_READ_BF16>(a, is_absorb, stream);
  case TD_CU_READ_F8: return launch<TD_CU_READ_F8>(a, is_absorb, stream);
  case TD_CU_READ_I4: return launch<TD_CU_READ_I4>(a, is_absorb, stream);
  default: return launch<TD_CU_READ_ANY>(a, is_absorb, stream);
  }
}

extern "C" int td_cu_mla_absorb(const td_cu_mla_args *a, td_cu_stream stream) {
  return launch_read(a, true, stream);
}

extern "C" int td_cu_mla_values(const td_cu_mla_args *a, td_cu_stream stream) {
  return launch_read(a, false, stream);
}
