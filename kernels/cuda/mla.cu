// kernels/cuda/mla.cu - what multi-head latent attention needs around attention itself: queries
// taken through kv_b's key rows, sums taken through its value rows.
#include "kernels/cuda/codes.cuh"

enum { MLA_THREADS = 128, MLA_WARPS = MLA_THREADS / WARP, MLA_TOKENS = 8 };

// A block: some columns of one head, for up to MLA_TOKENS tokens, a thread a column. Each weight is
// decoded once for all of them. The last blocks of x copy the part under RoPE.
__global__ static void mla_absorb_kernel(td_cu_mla_args a) {
  uint32_t head = blockIdx.y, t0 = blockIdx.z * MLA_TOKENS;
  uint32_t n = at_most(a.n_tokens - t0, MLA_TOKENS);
  uint32_t c = blockIdx.x * MLA_THREADS + threadIdx.x, entry_dim = a.lora + a.rope_dim;
  if (c >= entry_dim) return;
  uint32_t q_dim = a.nope_dim + a.rope_dim;
  const uint16_t *q = a.q + (static_cast<size_t>(t0) * a.n_heads + head) * q_dim;
  float *query = a.query + (static_cast<size_t>(t0) * a.n_heads + head) * entry_dim + c;
  size_t q_step = static_cast<size_t>(a.n_heads) * q_dim;
  size_t query_step = static_cast<size_t>(a.n_heads) * entry_dim;
  if (c >= a.lora) {
    for (uint32_t t = 0; t < n; t++)
      query[t * query_step] = f32_from_bf16(q[t * q_step + a.nope_dim + c - a.lora]);
    return;
  }
  uint32_t row0 = head * (a.nope_dim + a.v_dim);
  float sum[MLA_TOKENS] = {};
  for (uint32_t d = 0; d < a.nope_dim; d++) {
    float w = weight_at(a.kv_b, row0 + d, c);
#pragma unroll
    for (uint32_t t = 0; t < MLA_TOKENS; t++) {
      if (t < n) sum[t] += w * f32_from_bf16(q[t * q_step + d]);
    }
  }
#pragma unroll
  for (uint32_t t = 0; t < MLA_TOKENS; t++) {
    if (t < n) query[t * query_step] = sum[t];
  }
}

extern "C" int td_cu_mla_absorb(const td_cu_mla_args *a, td_cu_stream stream) {
  dim3 grid(ceil_div(a->lora + a->rope_dim, MLA_THREADS), a->n_heads,
            ceil_div(a->n_tokens, MLA_TOKENS));
  TD_LAUNCH(mla_absorb_kernel, grid, MLA_THREADS, 0, stream, *a);
  return launched();
}

// A warp a value row of one head, for up to MLA_TOKENS tokens.
__global__ static void mla_values_kernel(td_cu_mla_args a) {
  uint32_t head = blockIdx.y, t0 = blockIdx.z * MLA_TOKENS;
  uint32_t n = at_most(a.n_tokens - t0, MLA_TOKENS);
  uint32_t r = blockIdx.x * MLA_WARPS + threadIdx.x / WARP;
  if (r >= a.v_dim) return;
  uint32_t row = head * (a.nope_dim + a.v_dim) + a.nope_dim + r;
  const float *latent = a.latent + (static_cast<size_t>(t0) * a.n_heads + head) * a.lora;
  size_t step = static_cast<size_t>(a.n_heads) * a.lora;
  float sum[MLA_TOKENS] = {};
  for (uint32_t c = threadIdx.x % WARP; c < a.lora; c += WARP) {
    float w = weight_at(a.kv_b, row, c);
#pragma unroll
    for (uint32_t t = 0; t < MLA_TOKENS; t++) {
      if (t < n) sum[t] += w * latent[t * step + c];
    }
  }
#pragma unroll
  for (uint32_t t = 0; t < MLA_TOKENS; t++) {
    if (t >= n) break;
    float total = warp_sum(sum[t]);
    size_t at = (static_cast<size_t>(t0 + t) * a.n_heads + head) * a.v_dim + r;
    if (threadIdx.x % WARP == 0) a.out[at] = bf16_from_f32(total);
  }
}

extern "C" int td_cu_mla_values(const td_cu_mla_args *a, td_cu_stream stream) {
  dim3 grid(ceil_div(a->v_dim, MLA_WARPS), a->n_heads, ceil_div(a->n_tokens, MLA_TOKENS));
  TD_LAUNCH(mla_values_kernel, grid, MLA_THREADS, 0, stream, *a);
  return launched();
}
