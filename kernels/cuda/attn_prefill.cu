// kernels/cuda/attn_prefill.cu - causal attention for tiles of 128 queries of one head on tensor
// cores, over keys some at a time with a running softmax (FlashAttention-2, arXiv 2307.08691).
// Two kernels share all but the multiplications: mma.sync from sm_80 up, queries in registers, and
// wgmma on sm_90a. Matrices lie in shared memory in panels (panels.cuh). There are places for two
// tiles of keys and values: while one is multiplied, the next is on its way.
#include "kernels/cuda/attn.cuh"
#include "kernels/cuda/copy.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/panels.cuh"
#include "kernels/cuda/wgmma.cuh"

enum { QUERIES = 128, PREFILL_THREADS = 256 };

template <int KD, int VD, int KEYS> struct key_tile {
  uint16_t k[KD / PANEL][KEYS][PANEL], v[VD / PANEL][KEYS][PANEL];
};

// The queries of a block: n tokens from token on.
struct query_tile {
  uint32_t token, n;
};

// The last tokens, which see most keys, come first; n is 0 where there are none left.
__device__ static query_tile find_tile(const td_cu_attn_prefill_args &a) {
  uint32_t begin = static_cast<uint32_t>(a.batch.q_begin[a.seq]);
  uint32_t n = static_cast<uint32_t>(a.batch.q_begin[a.seq + 1]) - begin;
  uint32_t at = (gridDim.x - 1 - blockIdx.x) * QUERIES;
  return at < n ? query_tile{begin + at, at_most(n - at, QUERIES)} : query_tile{0, 0};
}

// Zeros behind the last dim and the last query; to be waited for.
template <int KD>
__device__ static void load_queries(const td_cu_attn_prefill_args &a, const query_tile &tile,
                                    uint16_t (*q)[QUERIES][PANEL]) {
  for (uint32_t i = threadIdx.x; i < QUERIES * KD / CHUNK; i += PREFILL_THREADS) {
    uint32_t row = i / (KD / CHUNK), chunk = i % (KD / CHUNK), d = chunk * CHUNK;
    const uint16_t *from = a.q + (tile.token + row) * a.q_stride + blockIdx.y * a.k_dim + d;
    uint16_t *to = chunk_of(q, row, chunk);
    if (a.q_in_runs) {
      copy_async(to, from, row < tile.n && d < a.k_dim);
      continue;
    }
    for (uint32_t e = 0; e < CHUNK; e++)
      to[e] = row < tile.n && d + e < a.k_dim ? from[e] : 0;
  }
}

// A thread's part of a panel of keys or values: a chunk of every ROWS_AT_ONCE rows.
enum { ROWS_AT_ONCE = PREFILL_THREADS / PANEL_CHUNKS };

struct panel_source {
  const uint16_t *row; // of the thread's first one; NULL: the panel has no such columns
  uint32_t step;       // elements from position to position
};

template <int KD, int VD> struct key_source { panel_source k[KD / PANEL], v[VD / PANEL]; };

__device__ static panel_source source_of(const uint16_t *m, size_t step, uint32_t d, uint32_t dim) {
  return {d < dim ? m + threadIdx.x / PANEL_CHUNKS * step + d : nullptr,
          static_cast<uint32_t>(step)};
}

template <int KD, int VD>
__device__ static key_source<KD, VD> find_keys(const td_cu_attn_prefill_args &a) {
  key_source<KD, VD> from;
  uint32_t kv_head = blockIdx.y / a.heads_per_kv, nope = a.k_dim - a.rope_dim;
  uint32_t chunk = threadIdx.x % PANEL_CHUNKS * CHUNK;
  const uint16_t *k = a.k + kv_head * a.k_head, *v = a.v + kv_head * a.v_head;
#pragma unroll
  for (uint32_t panel = 0; panel < KD / PANEL; panel++) {
    uint32_t d = panel * PANEL + chunk;
    from.k[panel] = d < nope ? source_of(k, a.k_stride, d, nope)
                             : source_of(a.rope, a.rope_stride, d - nope, a.rope_dim);
  }
#pragma unroll
  for (uint32_t panel = 0; panel < VD / PANEL; panel++)
    from.v[panel] = source_of(v, a.v_stride, panel * PANEL + chunk, a.v_dim);
  return from;
}

// Positions from begin on; zeros behind the last of n_keys and where there are no columns.
template <int PANELS, int KEYS>
__device__ static void load_panels(const panel_source (&from)[PANELS], uint32_t begin,
                                   uint32_t n_keys, uint16_t (*to)[KEYS][PANEL]) {
  uint32_t chunk = threadIdx.x % PANEL_CHUNKS, row0 = threadIdx.x / PANEL_CHUNKS;
#pragma unroll
  for (int panel = 0; panel < PANELS; panel++) {
    const uint16_t *row = from[panel].row + static_cast<size_t>(begin) * from[panel].step;
#pragma unroll
    for (uint32_t i = 0; i < KEYS; i += ROWS_AT_ONCE, row += ROWS_AT_ONCE * from[panel].step)
      copy_async(chunk_of(&to[panel], row0 + i, chunk), row,
                 from[panel].row && begin + row0 + i < n_keys);
  }
}

// ---- the two ways to multiply -----------------------------------------------------------------
// Warp w has queries 16 w and on, each thread as in mma.cuh. What they share:
//   ROWS         queries of the warps that work as one
//   SKIPS        whether those leave out tiles that none of their queries sees
//   shared       of the block, with its queries and two tiles of keys
//   take         for what is made of the queries, which have arrived
//   begin_scores, end_scores   score = q k^T; what lies between them is done meanwhile
//   add_values   acc += p v, p in fragments of 16 keys

template <int KD_, int VD_, int KEYS_> struct by_mma {
  enum { KD = KD_, VD = VD_, KEYS = KEYS_, ROWS = 16, SKIPS = 1 };
  typedef key_tile<KD, VD, KEYS> tile;
  union shared {
    uint16_t q[KD / PANEL][QUERIES][PANEL]; // before the first keys
    tile tiles[2];
  };
  uint32_t q[KD / 16][4];

  __device__ void take(shared &s) {
    uint32_t lane = threadIdx.x % WARP, row = threadIdx.x / WARP * ROWS + lane % 16;
#pragma unroll
    for (uint32_t k = 0; k < KD / 16; k++)
      load_matrices(q[k], chunk_of(s.q, row, 2 * k + lane / 16));
    __syncthreads();
  }

  __device__ void begin_scores(shared &, tile &, float (&)[KEYS / 8][4]) {}

  __device__ void end_scores(tile &t, float (&score)[KEYS / 8][4]) {
    uint32_t lane = threadIdx.x % WARP, row = lane % 8 + lane / 16 * 8, chunk = lane / 8 % 2;
#pragma unroll
    for (int j = 0; j < KEYS / 8; j++)
      score[j][0] = score[j][1] = score[j][2] = score[j][3] = 0;
#pragma unroll
    for (uint32_t k = 0; k < KD / 16; k++) {
#pragma unroll
      for (uint32_t j = 0; j < KEYS / 16; j++) {
        uint32_t b[4];
        load_matrices(b, chunk_of(t.k, 16 * j + row, 2 * k + chunk));
        mma_bf16(score[2 * j], q[k], {b[0], b[1]});
        mma_bf16(score[2 * j + 1], q[k], {b[2], b[3]});
      }
    }
  }

  __device__ void add_values(tile &t, const uint32_t (&p)[KEYS / 16][4], float (&acc)[VD / 8][4]) {
    uint32_t lane = threadIdx.x % WARP, row = lane % 16, chunk = lane / 16;
#pragma unroll
    for (uint32_t k = 0; k < KEYS / 16; k++) {
#pragma unroll
      for (uint32_t j = 0; j < VD / 16; j++) {
        uint32_t b[4];
        load_matrices_turned(b, chunk_of(t.v, 16 * k + row, 2 * j + chunk));
        mma_bf16(acc[2 * j], p[k], {b[0], b[1]});
        mma_bf16(acc[2 * j + 1], p[k], {b[2], b[3]});
      }
    }
  }
};

template <int KD_, int VD_, int KEYS_> struct by_wgmma {
  enum { KD = KD_, VD = VD_, KEYS = KEYS_, ROWS = 64, SKIPS = 0, COLUMNS = VD < 128 ? VD : 128 };
  typedef key_tile<KD, VD, KEYS> tile;
  struct shared {
    uint16_t q[KD / PANEL][QUERIES][PANEL];
    tile tiles[2];
  };

  __device__ void take(shared &) {}

  __device__ void begin_scores(shared &s, tile &t, float (&score)[KEYS / 8][4]) {
    uint32_t row = threadIdx.x / (4 * WARP) * ROWS;
    wgmma_begin();
#pragma unroll
    for (uint32_t k = 0; k < KD / 16; k++) {
      uint32_t panel = k / 4, column = k % 4 * 16;
      wgmma_rows<KEYS, 0>(score, wgmma_matrix(s.q[panel][row] + column, QUERIES),
                          wgmma_matrix(t.k[panel][0] + column, KEYS), k > 0);
    }
    wgmma_commit();
  }

  __device__ void end_scores(tile &, float (&score)[KEYS / 8][4]) {
    wgmma_wait(score);
  }

  __device__ void add_values(tile &t, const uint32_t (&p)[KEYS / 16][4], float (&acc)[VD / 8][4]) {
    wgmma_begin();
#pragma unroll
    for (uint32_t k = 0; k < KEYS / 16; k++) {
      wgmma_columns<COLUMNS, 0>(acc, p[k], wgmma_matrix(t.v[0][16 * k], KEYS));
      if constexpr (VD > COLUMNS)
        wgmma_columns<COLUMNS, COLUMNS / 8>(acc, p[k],
                                            wgmma_matrix(t.v[COLUMNS / PANEL][16 * k], KEYS));
    }
    wgmma_commit();
    wgmma_wait(acc);
  }
};

// ---- softmax ----------------------------------------------------------------------------------

// A thread's two rows of the running softmax.
template <int VD> struct query_state {
  float m[2], l[2]; // l: this lane's share
  float acc[VD / 8][4];
};

// Only keys below limit[r] are seen by row r.
template <int BLOCKS>
__device__ static void hide(float (&score)[BLOCKS][4], const uint32_t (&limit)[2]) {
  uint32_t p = threadIdx.x % 4 * 2;
#pragma unroll
  for (int e = 0; e < 4 * BLOCKS; e++) {
    int j = e / 4, c = e % 4;
    if (8 * j + p + c % 2 >= limit[c / 2]) score[j][c] = -INFINITY;
  }
}

// Scores become weights 2^(scale (score - m)), in BF16 as fragments of mma.cuh.
template <int BLOCKS, int VD>
__device__ static void soften(float (&score)[BLOCKS][4], float scale, query_state<VD> &state,
                              uint32_t (&weights)[BLOCKS / 2][4]) {
  float m[2] = {state.m[0], state.m[1]}, rescale[2], base[2];
#pragma unroll
  for (int e = 0; e < 4 * BLOCKS; e++)
    m[e % 4 / 2] = fmaxf(m[e % 4 / 2], score[e / 4][e % 4]);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    m[r] = quad_max(m[r]);
    float seen = m[r] == -INFINITY ? 0 : m[r]; // nothing seen yet: every weight is 0
    base[r] = seen * scale;
    rescale[r] = exp2_approx((state.m[r] - seen) * scale); // 1, and no less, where m stays
    state.m[r] = m[r];
    state.l[r] *= rescale[r];
  }
#pragma unroll
  for (int e = 0; e < 4 * BLOCKS; e++) {
    float &s = score[e / 4][e % 4];
    s = exp2_approx(s * scale - base[e % 4 / 2]);
    state.l[e % 4 / 2] += s;
  }
#pragma unroll
  for (int i = 0; i < 2 * BLOCKS; i++) // registers 0 and 1, then 2 and 3 of every second block
    weights[i / 4][i % 4] = bf16x2_from_f32(score[i / 2][i % 2 * 2], score[i / 2][i % 2 * 2 + 1]);
#pragma unroll
  for (int e = 0; e < VD / 2; e++)
    state.acc[e / 4][e % 4] *= rescale[e % 4 / 2];
}

template <int VD>
__device__ static void put_result(const td_cu_attn_prefill_args &a, const query_tile &tile,
                                  const query_state<VD> &state) {
  uint32_t g = threadIdx.x % WARP / 4, p = threadIdx.x % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float inverse = 1 / quad_sum(state.l[r]);
    uint32_t row = threadIdx.x / WARP * 16 + g + 8 * r;
    if (row >= tile.n) continue;
    uint16_t *out = a.out + (tile.token + row) * a.out_stride + blockIdx.y * a.v_dim;
#pragma unroll
    for (int j = 0; j < VD / 8; j++) {
      uint32_t d = 8 * j + p;
      uint32_t pair = bf16x2_from_f32(state.acc[j][2 * r] * inverse,
                                      state.acc[j][2 * r + 1] * inverse);
      if (d < a.v_dim) out[d] = static_cast<uint16_t>(pair);
      if (d + 1 < a.v_dim) out[d + 1] = static_cast<uint16_t>(pair >> 16);
    }
  }
}

// ---- all --------------------------------------------------------------------------------------

template <class Engine> __device__ static void attend(const td_cu_attn_prefill_args &a) {
  enum { KEYS = Engine::KEYS, VD = Engine::VD };
  TD_DYNAMIC_SHARED(memory);
  auto &s = *reinterpret_cast<typename Engine::shared *>(memory);
  query_tile tile = find_tile(a);
  if (tile.n == 0) return;
  load_queries<Engine::KD>(a, tile, s.q);
  copy_async_wait();
  __syncthreads();
  Engine engine;
  engine.take(s);

  uint32_t first = static_cast<uint32_t>(a.batch.position[tile.token]);
  uint32_t n_keys = at_most(keys_of(a.batch, tile.token + tile.n - 1), a.n_keys);
  uint32_t row = threadIdx.x / WARP * 16 + threadIdx.x % WARP / 4;
  uint32_t row0 = threadIdx.x / WARP * 16 / Engine::ROWS * Engine::ROWS;
  uint32_t all_see = first + row0 + 1; // positions, of those that work as one
  uint32_t some_see = row0 < tile.n ? first + at_most(row0 + Engine::ROWS, tile.n) : 0;
  query_state<VD> state = {};
  state.m[0] = state.m[1] = -INFINITY;
  const auto keys = find_keys<Engine::KD, VD>(a);
  if (n_keys > 0) {
    load_panels(keys.k, 0, n_keys, s.tiles[0].k);
    load_panels(keys.v, 0, n_keys, s.tiles[0].v);
  }
  for (uint32_t begin = 0; begin < n_keys; begin += KEYS) {
    auto &now = s.tiles[begin / KEYS % 2], &next = s.tiles[(begin / KEYS + 1) % 2];
    copy_async_wait();
    wgmma_publish();
    __syncthreads(); // behind it nobody reads what is in next
    float score[KEYS / 8][4];
    bool works = !Engine::SKIPS || begin < some_see;
    if (works) engine.begin_scores(s, now, score);
    if (begin + KEYS < n_keys) {
      load_panels(keys.k, begin + KEYS, n_keys, next.k);
      load_panels(keys.v, begin + KEYS, n_keys, next.v);
    }
    if (!works) continue;
    engine.end_scores(now, score);
    if (begin + KEYS > all_see) {
      uint32_t limit[2];
      for (uint32_t r = 0; r < 2; r++) {
        uint32_t end = first + row + 8 * r + 1; // positions this query sees
        limit[r] = end > begin ? end - begin : 0;
      }
      hide(score, limit);
    }
    uint32_t weights[KEYS / 16][4];
    soften(score, a.scale, state, weights);
    engine.add_values(now, weights, state.acc);
  }
  put_result(a, tile, state);
}

template <int KD, int VD, int KEYS>
__global__ static void __launch_bounds__(PREFILL_THREADS)
    prefill_by_mma(td_cu_attn_prefill_args a) {
  attend<by_mma<KD, VD, KEYS>>(a);
}

template <int KD, int VD, int KEYS>
__global__ static void __launch_bounds__(PREFILL_THREADS)
    prefill_by_wgmma(td_cu_attn_prefill_args a) {
#if TD_HAS_WGMMA
  attend<by_wgmma<KD, VD, KEYS>>(a);
#elif defined(__CUDA_ARCH__)
  __trap(); // has_wgmma says no
#endif
}

template <class Kernel>
static int launch(Kernel kernel, size_t n_bytes, const td_cu_attn_prefill_args *a,
                  td_cu_stream stream) {
  cudaError_t code = allow_shared(kernel, n_bytes);
  if (code != cudaSuccess) return code;
  dim3 grid(ceil_div(a->batch.n_tokens, QUERIES), a->n_heads);
  td_cu_attn_prefill_args args = *a;
  args.scale *= LOG2_E;
  args.q_in_runs = (a->k_dim | a->q_stride) % CHUNK == 0 &&
                   reinterpret_cast<uintptr_t>(a->q) % sizeof(uint4) == 0;
  TD_LAUNCH(kernel, grid, PREFILL_THREADS, n_bytes, stream, args);
  return launched();
}

// Whether the library has code for sm_90a and the device is one.
static bool has_wgmma() {
#if TD_CUDA_SM90A
  int device = 0, major = 0, minor = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  return 10 * major + minor == 90;
#else
  return false;
#endif
}

// Keys at a time: what 99 KB of shared memory, or the 227 of sm_90, hold twice.
template <int KD, int VD, int MMA_KEYS, int WGMMA_KEYS>
static int launch(const td_cu_attn_prefill_args *a, td_cu_stream stream) {
  if (has_wgmma()) {
    return launch(prefill_by_wgmma<KD, VD, WGMMA_KEYS>,
                  sizeof(typename by_wgmma<KD, VD, WGMMA_KEYS>::shared), a, stream);
  }
  const size_t n_bytes = sizeof(typename by_mma<KD, VD, MMA_KEYS>::shared);
  static_assert(n_bytes <= SHARED_BYTES, "");
  return launch(prefill_by_mma<KD, VD, MMA_KEYS>, n_bytes, a, stream);
}

extern "C" int td_cu_attn_prefill(const td_cu_attn_prefill_args *a, td_cu_stream stream) {
  if (a->k_dim <= 64 && a->v_dim <= 64) return launch<64, 64, 64, 128>(a, stream);
  if (a->k_dim <= 128 && a->v_dim <= 128) return launch<128, 128, 64, 128>(a, stream);
  if (a->k_dim <= 192 && a->v_dim <= 128) return launch<192, 128, 64, 128>(a, stream);
  return launch<256, 256, 32, 64>(a, stream);
}
