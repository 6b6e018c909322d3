// kernels/cuda/mla.cu - projections around absorbed MLA attention: queries times kv_b's key rows,
// attended latents times its value rows.
// Each weight is decoded once for up to TOKENS tokens, eight of a row at a time. A token's result
// does not depend on the other tokens.
#include "kernels/cuda/dequant8.cuh"

enum {
  MLA_THREADS = 256,
  MLA_WARPS = MLA_THREADS / WARP,
  TOKENS = 8,
  FEW_TOKENS = 4, // a token and those drafted behind it
  RUN = 8,
  PARTS = 4, // parts of the key rows, each with its own lanes
  PART_LANES = WARP / PARTS,
  COLUMNS = MLA_WARPS * PART_LANES * RUN, // per block
  VALUE_ROWS = 4                          // per warp
};

// Eight weights of a row as stored, and their scale. Loads are apart from conversions, so that
// those of many rows are in flight at once.
template <int READ> struct stored8 {
  raw8<READ> raw;
  uint32_t scale[1];
};

template <int READ>
__device__ static stored8<READ> fetch_at(const td_weight &w, uint32_t row, uint32_t k) {
  stored8<READ> out = {};
  out.raw = load8<READ>(w, row, k);
  if constexpr (READ != TD_CU_READ_ANY && READ != TD_CU_READ_BF16) {
    const row_scales scales = scales_of_row<READ>(w, row);
    load_scales<READ>(scales, {k >> scales.shift}, out.scale);
  }
  return out;
}

// Eight weights of a row and their scale.
struct scaled8 {
  float v[RUN], scale;
};

template <int READ>
__device__ static scaled8 weights_of(const td_weight &w, uint32_t row, uint32_t k,
                                     const stored8<READ> &stored) {
  scaled8 out;
  out.scale = global_scale(w);
  decode8<READ>(w, row, k, stored.raw, out.v);
  if constexpr (READ == TD_CU_READ_ANY) {
    scale_each(w, row, k, out.v);
  } else if constexpr (READ != TD_CU_READ_BF16) {
    float value[1];
    scale_values<READ>(w.scale_dtype, stored.scale, value);
    out.scale = value[0];
  }
  return out;
}

__device__ static void put_query(const td_cu_mla_args &a, size_t at, float v) {
  if (a.query_bf16) {
    static_cast<uint16_t *>(a.query)[at] = bf16_from_f32(v);
  } else {
    static_cast<float *>(a.query)[at] = v;
  }
}

// Copies the rotated part of the queries, which is not multiplied by kv_b.
__device__ static void copy_rope(const td_cu_mla_args &a, uint32_t t0, uint32_t n) {
  size_t q_dim = a.nope_dim + a.rope_dim, entry_dim = a.lora + a.rope_dim;
  for (uint32_t i = threadIdx.x; i < n * a.rope_dim; i += MLA_THREADS) {
    size_t row = static_cast<size_t>(t0 + i / a.rope_dim) * a.n_heads + blockIdx.y;
    uint32_t d = i % a.rope_dim;
    put_query(a, row * entry_dim + a.lora + d, f32_from_bf16(a.q[row * q_dim + a.nope_dim + d]));
  }
}

// A block computes some columns of one head; a lane computes eight of them over every PARTS-th key
// row. The last blocks of x copy the rotated part.
template <int READ, int T> __global__ static void mla_absorb_kernel(td_cu_mla_args a) {
  enum { AHEAD = T == 1 ? 8 : 4 }; // rows of weights in flight
  uint32_t head = blockIdx.y, t0 = blockIdx.z * T, n = at_most(a.n_tokens - t0, T);
  if (blockIdx.x == gridDim.x - 1) {
    copy_rope(a, t0, n);
    return;
  }
  uint32_t lane = threadIdx.x % WARP, part = lane / PART_LANES;
  uint32_t c = blockIdx.x * COLUMNS + (threadIdx.x / WARP * PART_LANES + lane % PART_LANES) * RUN;
  uint32_t row0 = head * (a.nope_dim + a.v_dim), n_rows = c < a.lora ? a.nope_dim : 0;
  size_t row = static_cast<size_t>(t0) * a.n_heads + head;
  size_t query = row * (a.lora + a.rope_dim) + c;
  size_t query_step = static_cast<size_t>(a.n_heads) * (a.lora + a.rope_dim);
  const uint16_t *q[T]; // after the last token: that one, whose sums are not stored
#pragma unroll
  for (uint32_t t = 0; t < T; t++)
    q[t] = a.q +
           (row + static_cast<size_t>(at_most(t, n - 1)) * a.n_heads) * (a.nope_dim + a.rope_dim);
  float sum[T][RUN] = {};
  for (uint32_t d0 = part; d0 < n_rows; d0 += PARTS * AHEAD) {
    stored8<READ> stored[AHEAD];
    float x[AHEAD][T];
#pragma unroll
    for (uint32_t i = 0; i < AHEAD; i++) {
      uint32_t d = at_most(d0 + i * PARTS, n_rows - 1);
      stored[i] = fetch_at<READ>(a.kv_b, row0 + d, c);
#pragma unroll
      for (uint32_t t = 0; t < T; t++)
        x[i][t] = f32_from_bf16(q[t][d]);
    }
#pragma unroll
    for (uint32_t i = 0; i < AHEAD; i++) {
      bool is_there = d0 + i * PARTS < n_rows; // no branch: the compiler would move loads behind it
      uint32_t d = at_most(d0 + i * PARTS, n_rows - 1);
      const scaled8 w = weights_of<READ>(a.kv_b, row0 + d, c, stored[i]);
#pragma unroll
      for (uint32_t t = 0; t < T; t++) {
        float scaled = is_there ? w.scale * x[i][t] : 0;
#pragma unroll
        for (int e = 0; e < RUN; e++)
          sum[t][e] += w.v[e] * scaled;
      }
    }
  }
#pragma unroll
  for (uint32_t t = 0; t < T; t++) {
#pragma unroll
    for (uint32_t i = 0; i < RUN; i++) {
      float total = sum[t][i] + __shfl_xor_sync(TD_FULL_WARP, sum[t][i], PART_LANES);
      total += __shfl_xor_sync(TD_FULL_WARP, total, 2 * PART_LANES);
      if (part == 0 && t < n && c + i < a.lora) put_query(a, query + t * query_step + i, total);
    }
  }
}

// Eight elements of a latent; zeros past its end.
template <int READ>
__device__ static void latents_at(const float *latent, uint32_t c, uint32_t lora, float (&v)[RUN]) {
  if constexpr (READ != TD_CU_READ_ANY) {
    load_run(latent + c, v);
  } else {
#pragma unroll
    for (uint32_t i = 0; i < RUN; i++)
      v[i] = c + i < lora ? latent[c + i] : 0;
  }
}

// A warp computes VALUE_ROWS rows of one head, whose latents it loads once for all of them.
template <int READ, int T> __global__ static void mla_values_kernel(td_cu_mla_args a) {
  enum { STEPS = T == 1 ? 2 : 1 }; // runs of columns in flight
  uint32_t head = blockIdx.y, t0 = blockIdx.z * T, n = at_most(a.n_tokens - t0, T);
  uint32_t r0 = (blockIdx.x * MLA_WARPS + threadIdx.x / WARP) * VALUE_ROWS;
  if (r0 >= a.v_dim) return;
  uint32_t row0 = head * (a.nope_dim + a.v_dim) + a.nope_dim;
  const float *latent = a.latent + (static_cast<size_t>(t0) * a.n_heads + head) * a.lora;
  size_t step_of_token = static_cast<size_t>(a.n_heads) * a.lora;
  uint32_t rows[VALUE_ROWS];
#pragma unroll
  for (uint32_t r = 0; r < VALUE_ROWS; r++)
    rows[r] = row0 + at_most(r0 + r, a.v_dim - 1);
  float sum[VALUE_ROWS][T] = {};
  for (uint32_t c0 = threadIdx.x % WARP * RUN; c0 < a.lora; c0 += STEPS * WARP * RUN) {
    stored8<READ> stored[STEPS][VALUE_ROWS];
#pragma unroll
    for (uint32_t i = 0; i < STEPS * VALUE_ROWS; i++) {
      uint32_t c = c0 + i / VALUE_ROWS * WARP * RUN;
      stored[i / VALUE_ROWS][i % VALUE_ROWS] = fetch_at<READ>(a.kv_b, rows[i % VALUE_ROWS],
                                                              c < a.lora ? c : c0);
    }
#pragma unroll
    for (uint32_t step = 0; step < STEPS; step++) {
      uint32_t c = c0 + step * WARP * RUN;
      bool is_there = c < a.lora; // no branch, as above
      if (!is_there) c = c0;
      scaled8 w[VALUE_ROWS];
#pragma unroll
      for (uint32_t r = 0; r < VALUE_ROWS; r++)
        w[r] = weights_of<READ>(a.kv_b, rows[r], c, stored[step][r]);
#pragma unroll
      for (uint32_t t = 0; t < T; t++) { // after the last token: that one, which is not stored
        float x[RUN];
        latents_at<READ>(latent + at_most(t, n - 1) * step_of_token, c, a.lora, x);
#pragma unroll
        for (uint32_t r = 0; r < VALUE_ROWS; r++) {
          float dot = 0;
#pragma unroll
          for (uint32_t i = 0; i < RUN; i++)
            dot += w[r].v[i] * x[i];
          sum[r][t] += (is_there ? w[r].scale : 0) * dot;
        }
      }
    }
  }
#pragma unroll
  for (uint32_t t = 0; t < T; t++) {
    if (t >= n) break;
#pragma unroll
    for (uint32_t r = 0; r < VALUE_ROWS; r++) {
      float total = warp_sum(sum[r][t]);
      size_t at = (static_cast<size_t>(t0 + t) * a.n_heads + head) * a.v_dim + r0 + r;
      if (threadIdx.x % WARP == 0 && r0 + r < a.v_dim) a.out[at] = bf16_from_f32(total);
    }
  }
}

template <int READ, int T>
static int launch(const td_cu_mla_args *a, bool is_absorb, td_cu_stream stream) {
  uint32_t n_x = is_absorb ? ceil_div(a->lora, COLUMNS) + 1
                           : ceil_div(a->v_dim, MLA_WARPS * VALUE_ROWS);
  dim3 grid(n_x, a->n_heads, ceil_div(a->n_tokens, T));
  auto kernel = is_absorb ? mla_absorb_kernel<READ, T> : mla_values_kernel<READ, T>;
  return TD_LAUNCH(kernel, grid, MLA_THREADS, 0, stream, *a);
}

template <int READ>
static int launch(const td_cu_mla_args *a, bool is_absorb, td_cu_stream stream) {
  if (a->n_tokens == 1) return launch<READ, 1>(a, is_absorb, stream);
  if (a->n_tokens <= FEW_TOKENS) return launch<READ, FEW_TOKENS>(a, is_absorb, stream);
  return launch<READ, TOKENS>(a, is_absorb, stream);
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
