// kernels/cuda/attn_prefill.cu - causal attention for tiles of 64 queries of one head on tensor
// cores, over cached keys 64 at a time with a running softmax.
// Four warps of 16 queries each. Queries stay in registers; keys lie in shared memory as
// [key][dim], values as [dim][key], both padded so that fragments meet no bank twice. Dims are
// padded to KD and VD with zeros.
#include "kernels/cuda/attn.cuh"
#include "kernels/cuda/mma.cuh"

enum { QUERIES = TD_CU_MMA_QUERIES, PREFILL_KEYS = 64, PREFILL_THREADS = 128 };
enum { V_STRIDE = PREFILL_KEYS + 8 };

template <int KD, int VD> struct prefill_shared {
  uint16_t k[PREFILL_KEYS][KD + 8]; // before the first keys: the queries
  uint16_t v[VD][V_STRIDE];
};

// The queries of a block: n tokens from token on, of one sequence.
struct query_tile {
  uint32_t seq, token, n;
};

// Tile blockIdx.x of the sequences asked for; n is 0 behind the last one.
__device__ static query_tile find_tile(const td_cu_attn_prefill_args &a) {
  uint32_t i = blockIdx.x;
  for (uint32_t s = a.seq_begin; s < a.seq_begin + a.n_seqs; s++) {
    uint32_t begin = static_cast<uint32_t>(a.batch.q_begin[s]);
    uint32_t n = static_cast<uint32_t>(a.batch.q_begin[s + 1]) - begin;
    uint32_t n_tiles = (n + QUERIES - 1) / QUERIES;
    if (i < n_tiles) {
      return {s, begin + i * QUERIES, at_most(n - i * QUERIES, QUERIES)};
    }
    i -= n_tiles;
  }
  return {0, 0, 0};
}

// Where one position's key and value are for the block's head.
struct kv_place {
  const char *page;             // GQA
  size_t k_at, v_at;            // elements in the page
  const uint16_t *k, *rope, *v; // MLA
};

__device__ static kv_place place_of(const td_cu_attn_prefill_args &a, uint32_t seq, uint32_t p) {
  kv_place place = {};
  uint32_t head = blockIdx.y;
  if (a.latent) {
    uint32_t nope = a.k_dim - a.rope_dim, width = nope + a.v_dim;
    place.k = a.expanded + (static_cast<size_t>(p) * a.n_heads + head) * width;
    place.v = place.k + nope;
    place.rope = a.latent + static_cast<size_t>(p) * (a.lora + a.rope_dim) + a.lora;
    return place;
  }
  uint32_t kv_head = head / (a.n_heads / a.n_kv_heads);
  place.page = kv_page(a.batch, a.kv, seq, p);
  place.k_at = kv_row(a.batch, p, kv_head, a.k_dim);
  place.v_at = kv_row(a.batch, p, kv_head, a.v_dim) +
               static_cast<size_t>(a.n_kv_heads) * a.batch.page_tokens * a.k_dim;
  return place;
}

__device__ static uint16_t key_element(const td_cu_attn_prefill_args &a, const kv_place &place,
                                       uint32_t d) {
  if (!a.latent) return kv_bf16(a.kv, place.page, place.k_at + d);
  uint32_t nope = a.k_dim - a.rope_dim;
  return d < nope ? place.k[d] : place.rope[d - nope];
}

__device__ static uint16_t value_element(const td_cu_attn_prefill_args &a, const kv_place &place,
                                         uint32_t d) {
  return a.latent ? place.v[d] : kv_bf16(a.kv, place.page, place.v_at + d);
}

__device__ static uint4 key_run(const td_cu_attn_prefill_args &a, const kv_place &place,
                                uint32_t d) {
  if (!a.latent) return kv_bf16x8(a.kv, place.page, place.k_at + d);
  uint32_t nope = a.k_dim - a.rope_dim;
  return *reinterpret_cast<const uint4 *>(d < nope ? place.k + d : place.rope + (d - nope));
}

__device__ static uint4 value_run(const td_cu_attn_prefill_args &a, const kv_place &place,
                                  uint32_t d) {
  if (!a.latent) return kv_bf16x8(a.kv, place.page, place.v_at + d);
  return *reinterpret_cast<const uint4 *>(place.v + d);
}

// Whether keys and values come in whole runs of eight elements, and each may be read at once.
static bool has_runs(const td_cu_attn_prefill_args *a) {
  uint32_t dims = a->k_dim | a->v_dim | (a->latent ? a->rope_dim | a->lora : 0);
  uintptr_t places = a->latent ? reinterpret_cast<uintptr_t>(a->latent) |
                                     reinterpret_cast<uintptr_t>(a->expanded)
                               : reinterpret_cast<uintptr_t>(a->kv.pages) | a->kv.page_bytes;
  return dims % 8 == 0 && places % 16 == 0;
}

// Two threads a key, every second run each: a warp's stores meet no bank twice, those of values,
// which turn them round, included. Zeros where there is no key.
template <int KD, int VD>
__device__ static void load_runs(const td_cu_attn_prefill_args &a, uint32_t seq, uint32_t begin,
                                 uint32_t n_keys, prefill_shared<KD, VD> &s) {
  enum { APART = PREFILL_THREADS / PREFILL_KEYS * 8 };
  uint32_t j = threadIdx.x % PREFILL_KEYS, first = threadIdx.x / PREFILL_KEYS * 8;
  bool there = begin + j < n_keys;
  kv_place place = there ? place_of(a, seq, begin + j) : kv_place{};
#pragma unroll 4
  for (uint32_t d = first; d < KD; d += APART) {
    uint4 run = {};
    if (there && d < a.k_dim) run = key_run(a, place, d);
    put_run(&s.k[j][d], run);
  }
#pragma unroll 4
  for (uint32_t d = first; d < VD; d += APART) {
    uint4 run = {};
    if (there && d < a.v_dim) run = value_run(a, place, d);
    const uint32_t words[4] = {run.x, run.y, run.z, run.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      s.v[d + 2 * i][j] = static_cast<uint16_t>(words[i]);
      s.v[d + 2 * i + 1][j] = static_cast<uint16_t>(words[i] >> 16);
    }
  }
}

// Any dims: a warp a key.
template <int KD, int VD>
__device__ static void load_block(const td_cu_attn_prefill_args &a, uint32_t seq, uint32_t begin,
                                  uint32_t n_keys, prefill_shared<KD, VD> &s) {
  for (uint32_t j = threadIdx.x / WARP; j < PREFILL_KEYS; j += PREFILL_THREADS / WARP) {
    bool there = begin + j < n_keys;
    kv_place place = there ? place_of(a, seq, begin + j) : kv_place{};
    for (uint32_t d = threadIdx.x % WARP; d < KD; d += WARP)
      s.k[j][d] = there && d < a.k_dim ? key_element(a, place, d) : 0;
    for (uint32_t d = threadIdx.x % WARP; d < VD; d += WARP)
      s.v[d][j] = there && d < a.v_dim ? value_element(a, place, d) : 0;
  }
}

template <int KD, int VD>
__device__ static void load_queries(const td_cu_attn_prefill_args &a, const query_tile &tile,
                                    prefill_shared<KD, VD> &s, uint32_t (&q)[KD / 16][4]) {
  for (uint32_t i = threadIdx.x; i < QUERIES * KD; i += PREFILL_THREADS) {
    uint32_t row = i / KD, d = i % KD;
    const uint16_t *from = a.q + (tile.token + row) * a.q_stride + blockIdx.y * a.k_dim;
    s.k[row][d] = row < tile.n && d < a.k_dim ? from[d] : 0;
  }
  __syncthreads();
#pragma unroll
  for (uint32_t k = 0; k < KD / 16; k++)
    load_a(q[k], s.k[threadIdx.x / WARP * 16], KD + 8, 16 * k);
  __syncthreads();
}

// A warp's running softmax: rows g and g + 8 of its 16 queries, a lane as in mma.cuh.
template <int VD> struct query_state {
  float m[2], l[2]; // l: this lane's share
  float acc[VD / 8][4];
};

__device__ static float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(TD_FULL_WARP, v, 1));
  return fmaxf(v, __shfl_xor_sync(TD_FULL_WARP, v, 2));
}

__device__ static float quad_sum(float v) {
  v += __shfl_xor_sync(TD_FULL_WARP, v, 1);
  return v + __shfl_xor_sync(TD_FULL_WARP, v, 2);
}

// Scores become weights. limit[r]: keys of this block that row r sees.
template <int VD>
__device__ static void soften(float (&score)[PREFILL_KEYS / 8][4], const uint32_t (&limit)[2],
                              float scale, query_state<VD> &state) {
  uint32_t p = threadIdx.x % 4 * 2;
  float m[2] = {state.m[0], state.m[1]};
#pragma unroll
  for (int e = 0; e < PREFILL_KEYS / 2; e++) {
    int j = e / 4, c = e % 4;
    bool seen = 8 * j + p + c % 2 < limit[c / 2];
    score[j][c] = seen ? score[j][c] * scale : -INFINITY;
    m[c / 2] = fmaxf(m[c / 2], score[j][c]);
  }
  float rescale[2], base[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    m[r] = quad_max(m[r]);
    base[r] = m[r] == -INFINITY ? 0 : m[r]; // nothing seen yet: every weight is 0
    rescale[r] = expf(state.m[r] - base[r]);
    state.m[r] = m[r];
    state.l[r] *= rescale[r];
  }
#pragma unroll
  for (int e = 0; e < PREFILL_KEYS / 2; e++) {
    int j = e / 4, c = e % 4;
    score[j][c] = expf(score[j][c] - base[c / 2]);
    state.l[c / 2] += score[j][c];
  }
#pragma unroll
  for (int e = 0; e < VD / 2; e++)
    state.acc[e / 4][e % 4] *= rescale[e % 4 / 2];
}

template <int KD, int VD>
__device__ static void attend(const prefill_shared<KD, VD> &s, const uint32_t (&q)[KD / 16][4],
                              const uint32_t (&limit)[2], float scale, query_state<VD> &state) {
  float score[PREFILL_KEYS / 8][4] = {};
#pragma unroll
  for (int j = 0; j < PREFILL_KEYS / 8; j++) {
#pragma unroll
    for (int k = 0; k < KD / 16; k++) {
      uint32_t b[2];
      load_b(b, s.k[8 * j], KD + 8, 16 * k);
      mma_bf16(score[j], q[k], b);
    }
  }
  soften<VD>(score, limit, scale, state);
#pragma unroll
  for (int k = 0; k < PREFILL_KEYS / 16; k++) {
    // The scores' registers are those of a's fragments, two columns of blocks at a time.
    uint32_t p[4] = {bf16x2_from_f32(score[2 * k][0], score[2 * k][1]),
                     bf16x2_from_f32(score[2 * k][2], score[2 * k][3]),
                     bf16x2_from_f32(score[2 * k + 1][0], score[2 * k + 1][1]),
                     bf16x2_from_f32(score[2 * k + 1][2], score[2 * k + 1][3])};
#pragma unroll
    for (int j = 0; j < VD / 8; j++) {
      uint32_t b[2];
      load_b(b, s.v[8 * j], V_STRIDE, 16 * k);
      mma_bf16(state.acc[j], p, b);
    }
  }
}

template <int VD>
__device__ static void put_result(const td_cu_attn_prefill_args &a, const query_tile &tile,
                                  const query_state<VD> &state) {
  uint32_t g = threadIdx.x % WARP / 4, p = threadIdx.x % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float l = quad_sum(state.l[r]);
    uint32_t row = threadIdx.x / WARP * 16 + g + 8 * r;
    if (row >= tile.n) continue;
    uint16_t *out = a.out + (tile.token + row) * a.out_stride + blockIdx.y * a.v_dim;
#pragma unroll
    for (int e = 0; e < VD / 4; e++) {
      uint32_t d = e / 2 * 8 + p + e % 2;
      if (d < a.v_dim) out[d] = bf16_from_f32(state.acc[e / 2][2 * r + e % 2] / l);
    }
  }
}

template <int KD, int VD>
__global__ static void __launch_bounds__(PREFILL_THREADS)
    attn_prefill_kernel(td_cu_attn_prefill_args a) {
  TD_DYNAMIC_SHARED(memory);
  prefill_shared<KD, VD> &s = *reinterpret_cast<prefill_shared<KD, VD> *>(memory);
  query_tile tile = find_tile(a);
  if (tile.n == 0) return;
  uint32_t q[KD / 16][4];
  load_queries(a, tile, s, q);
  uint32_t first = static_cast<uint32_t>(a.batch.position[tile.token]);
  uint32_t n_keys = keys_of(a.batch, tile.token + tile.n - 1);
  uint32_t row = threadIdx.x / WARP * 16 + threadIdx.x % WARP / 4;
  query_state<VD> state = {};
  state.m[0] = state.m[1] = -INFINITY;
  for (uint32_t begin = 0; begin < n_keys; begin += PREFILL_KEYS) {
    if (a.in_runs) {
      load_runs(a, tile.seq, begin, n_keys, s);
    } else {
      load_block(a, tile.seq, begin, n_keys, s);
    }
    __syncthreads();
    uint32_t limit[2];
    for (uint32_t r = 0; r < 2; r++) {
      uint32_t end = first + row + 8 * r + 1; // positions this query sees
      limit[r] = end > begin ? end - begin : 0;
    }
    attend(s, q, limit, a.scale, state);
    __syncthreads();
  }
  put_result(a, tile, state);
}

template <int KD, int VD> static int launch(const td_cu_attn_prefill_args *a, td_cu_stream stream) {
  auto kernel = attn_prefill_kernel<KD, VD>;
  size_t n_bytes = sizeof(prefill_shared<KD, VD>);
  cudaError_t code = allow_shared(kernel);
  if (code != cudaSuccess) return code;
  dim3 grid(ceil_div(a->batch.n_tokens, QUERIES) + a->n_seqs, a->n_heads);
  td_cu_attn_prefill_args args = *a;
  args.in_runs = has_runs(a);
  TD_LAUNCH(kernel, grid, PREFILL_THREADS, n_bytes, stream, args);
  return launched();
}

extern "C" int td_cu_attn_prefill(const td_cu_attn_prefill_args *a, td_cu_stream stream) {
  if (a->k_dim <= 64 && a->v_dim <= 64) return launch<64, 64>(a, stream);
  if (a->k_dim <= 128 && a->v_dim <= 128) return launch<128, 128>(a, stream);
  if (a->k_dim <= 192 && a->v_dim <= 128) return launch<192, 128>(a, stream);
  return launch<256, 256>(a, stream);
}
