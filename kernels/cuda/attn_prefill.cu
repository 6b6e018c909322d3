// kernels/cuda/attn_prefill.cu - causal attention for tiles of 128 queries of one head on tensor
// cores, over tiles of keys with an online softmax (FlashAttention-2, arXiv 2307.08691).
// Two kernels share most code. mma.sync, from sm_80 up, keeps queries in registers; of the two
// warps that share tensor cores one multiplies values while the other one's scores become weights.
// wgmma, on sm_90a, multiplies while the next scores become weights. (Both: FlashAttention-3, arXiv
// 2407.08608.) Matrices are in shared memory in panels (swizzle.cuh), with buffers for tiles of
// keys and values of which some are loaded while others are multiplied.
//
// Where it pays, mma.sync adds up 64 dims of a score and a tile's keys of a result in F16, and
// these sums in FP32. A row of queries, a key and a value each have a power of two of their own
// that makes overflow impossible: 64 products below 2^5 times 2^5, and of weights up to 2^5 times
// values below 2^4. Values' powers cost nothing, being added to the exponents of their weights,
// whose running maximum then is of the products. For 64 keys of 192 and 128 dims a warp has 160
// instructions of the tensor cores, 16 clocks each on GeForce instead of 32, and issues some 1,650
// in these 2,560 clocks, 350 of them to convert keys and values, which is done once a block in
// shared memory.
#include "kernels/cuda/attn_tile.cuh"

enum { QUERIES = TD_CU_PREFILL_TOKENS, PREFILL_THREADS = 256 };

template <int KD, int VD, int KEYS> struct key_tile {
  uint16_t k[KD / PANEL][KEYS][PANEL], v[VD / PANEL][KEYS][PANEL];
};

// The queries of a block: n tokens from `token` on, the position of the first one and the end of
// those the last one sees, both counted from the sequence's first slot, and that slot.
struct query_tile {
  uint32_t token, n, position, n_keys, key_begin;
};

// Tiles are taken from the last to the first, because later tokens see more keys. n is 0 if no tile
// or no key is left.
__device__ static query_tile find_tile(const td_cu_attn_prefill_args &a) {
  uint32_t idx = gridDim.x - 1 - blockIdx.x, i = 0;
  while (i + 1 < a.list.n_seqs && a.list.seqs[i + 1].tile_begin <= idx)
    i++;
  const auto &place = a.list.seqs[i];
  uint32_t begin = static_cast<uint32_t>(a.batch.q_begin[place.seq]);
  uint32_t n = static_cast<uint32_t>(a.batch.q_begin[place.seq + 1]) - begin;
  uint32_t at = (idx - place.tile_begin) * QUERIES;
  if (at >= n) return {0, 0, 0, 0, 0};
  query_tile tile = {begin + at, at_most(n - at, QUERIES), 0, 0, place.key_begin};
  tile.position = static_cast<uint32_t>(a.batch.position[tile.token]) - place.first;
  uint32_t end = keys_of(a.batch, tile.token + tile.n - 1);
  tile.n_keys = at_most(end > place.first ? end - place.first : 0, place.n_keys);
  return tile.n_keys > 0 ? tile : query_tile{0, 0, 0, 0, 0};
}

// Zeros after the last dim and the last query. Asynchronous.
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

// A thread's part of a panel of keys or values: one chunk in every ROWS_AT_ONCE rows.
enum { ROWS_AT_ONCE = PREFILL_THREADS / PANEL_CHUNKS };

struct panel_source {
  const uint16_t *row; // the thread's first row; NULL: the panel has no such columns
  uint32_t step;       // elements between positions
};

template <int KD, int VD> struct key_source { panel_source k[KD / PANEL], v[VD / PANEL]; };

__device__ static panel_source source_of(const uint16_t *m, size_t step, uint32_t d, uint32_t dim) {
  return {d < dim ? m + threadIdx.x / PANEL_CHUNKS * step + d : nullptr,
          static_cast<uint32_t>(step)};
}

template <int KD, int VD>
__device__ static key_source<KD, VD> find_keys(const td_cu_attn_prefill_args &a, size_t key_begin) {
  key_source<KD, VD> from;
  uint32_t kv_head = blockIdx.y / a.heads_per_kv, nope = a.k_dim - a.rope_dim;
  uint32_t chunk = threadIdx.x % PANEL_CHUNKS * CHUNK;
  const uint16_t *k = a.k + kv_head * a.k_head + key_begin * a.k_stride;
  const uint16_t *v = a.v + kv_head * a.v_head + key_begin * a.v_stride;
  const uint16_t *rope = a.rope + key_begin * a.rope_stride;
#pragma unroll
  for (uint32_t panel = 0; panel < KD / PANEL; panel++) {
    uint32_t d = panel * PANEL + chunk;
    from.k[panel] = d < nope ? source_of(k, a.k_stride, d, nope)
                             : source_of(rope, a.rope_stride, d - nope, a.rope_dim);
  }
#pragma unroll
  for (uint32_t panel = 0; panel < VD / PANEL; panel++)
    from.v[panel] = source_of(v, a.v_stride, panel * PANEL + chunk, a.v_dim);
  return from;
}

// Positions from begin on; zeros after the last of n_keys and where there are no columns.
// Asynchronous.
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

// Where the tile of keys begins that has the first one that any query sees.
template <int KEYS>
__device__ static uint32_t first_loaded(const td_cu_attn_prefill_args &a, const query_tile &tile) {
  return first_seen(tile.position + 1, a.window) / KEYS * KEYS;
}

// ---- softmax ----------------------------------------------------------------------------------

// A thread's two rows of the running softmax.
template <int VD> struct query_state {
  float m[2], l[2]; // l: this lane's share
  float acc[VD / 8][4];
};

template <int VD> __device__ static query_state<VD> nothing_seen() {
  query_state<VD> state = {};
  state.m[0] = state.m[1] = -INFINITY;
  return state;
}

// Causal mask for keys from position begin on: the query at position p sees keys up to p, the one
// eight rows below it up to p + 8.
template <int BLOCKS>
__device__ static void hide(float (&score)[BLOCKS][4], uint32_t p, uint32_t begin) {
  uint32_t key = threadIdx.x % 4 * 2, limit[2];
  for (uint32_t r = 0; r < 2; r++)
    limit[r] = p + 8 * r + 1 > begin ? p + 8 * r + 1 - begin : 0;
#pragma unroll
  for (int e = 0; e < 4 * BLOCKS; e++) {
    int j = e / 4, c = e % 4;
    if (8 * j + key + c % 2 >= limit[c / 2]) score[j][c] = -INFINITY;
  }
}

// Hides what is before the window of the query at position p, and of the one eight rows below it.
template <int BLOCKS>
__device__ static void hide_old(float (&score)[BLOCKS][4], uint32_t p, uint32_t begin,
                                uint32_t window) {
  uint32_t key = threadIdx.x % 4 * 2, first[2];
  for (uint32_t r = 0; r < 2; r++) {
    uint32_t seen = first_seen(p + 8 * r + 1, window);
    first[r] = seen > begin ? seen - begin : 0;
  }
#pragma unroll
  for (int e = 0; e < 4 * BLOCKS; e++) {
    int j = e / 4, c = e % 4;
    if (8 * j + key + c % 2 < first[c / 2]) score[j][c] = -INFINITY;
  }
}

// scale, lift: as weigh had them last.
template <int VD>
__device__ static void put_result(const td_cu_attn_prefill_args &a, const query_tile &tile,
                                  const query_state<VD> &state, float scale, float lift = 0) {
  uint32_t g = threadIdx.x % WARP / 4, p = threadIdx.x % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float l = quad_sum(state.l[r]), inverse = 1 / l;
    if (a.sinks) {
      float sink = a.sinks[blockIdx.y] * LOG2_E, m = state.m[r] * scale - lift,
            top = fmaxf(m, sink);
      float keep = exp2_approx(m - top);
      inverse = keep / (l * keep + exp2_approx(sink - top));
    }
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

// ---- mma.sync: warp w has queries from 16 w on, registers as in mma.cuh -------------------------
// Warps w and w + 4 share tensor cores. The latter are half a tile late: they pass the barrier that
// ends a tile before its values are multiplied, where the others are done with them. Were all at
// the same place, the tensor cores would be idle whenever scores become weights. The price is a
// third buffer for values.

template <int KD, int VD, int KEYS> struct mma_tiles {
  uint16_t k[2][KD / PANEL][KEYS][PANEL], v[3][VD / PANEL][KEYS][PANEL];
};

template <int KD, int VD, int KEYS> union mma_shared {
  uint16_t q[KD / PANEL][QUERIES][PANEL]; // used before the first keys are loaded
  mma_tiles<KD, VD, KEYS> tiles;
};

template <int KD>
__device__ static void take_queries(uint16_t (*from)[QUERIES][PANEL], uint32_t (&q)[KD / 16][4]) {
  uint32_t lane = threadIdx.x % WARP, row = threadIdx.x / WARP * 16 + lane % 16;
#pragma unroll
  for (uint32_t k = 0; k < KD / 16; k++)
    load_matrices(q[k], chunk_of(from, row, 2 * k + lane / 16));
  __syncthreads();
}

// score = q k^T.
template <int KD, int KEYS>
__device__ static void score_keys(const uint32_t (&q)[KD / 16][4], uint16_t (*keys)[KEYS][PANEL],
                                  float (&score)[KEYS / 8][4]) {
  uint32_t lane = threadIdx.x % WARP, row = lane % 8 + lane / 16 * 8, chunk = lane / 8 % 2;
#pragma unroll
  for (int j = 0; j < KEYS / 8; j++)
    score[j][0] = score[j][1] = score[j][2] = score[j][3] = 0;
#pragma unroll
  for (uint32_t k = 0; k < KD / 16; k++) {
#pragma unroll
    for (uint32_t j = 0; j < KEYS / 16; j++) {
      uint32_t b[4];
      load_matrices(b, chunk_of(keys, 16 * j + row, 2 * k + chunk));
      mma_bf16(score[2 * j], q[k], {b[0], b[1]});
      mma_bf16(score[2 * j + 1], q[k], {b[2], b[3]});
    }
  }
}

// acc += p v.
template <int VD, int KEYS>
__device__ static void add_values(uint16_t (*values)[KEYS][PANEL],
                                  const uint32_t (&p)[KEYS / 16][4], float (&acc)[VD / 8][4]) {
  uint32_t lane = threadIdx.x % WARP, row = lane % 16, chunk = lane / 16;
#pragma unroll
  for (uint32_t k = 0; k < KEYS / 16; k++) {
#pragma unroll
    for (uint32_t j = 0; j < VD / 16; j++) {
      uint32_t b[4];
      load_matrices_turned(b, chunk_of(values, 16 * k + row, 2 * j + chunk));
      mma_bf16(acc[2 * j], p[k], {b[0], b[1]});
      mma_bf16(acc[2 * j + 1], p[k], {b[2], b[3]});
    }
  }
}

// What is multiplied in F16 has powers of two: scores must be multiplied by k of their key, and
// exponents of weights are added v. Sums of weights are of weights times v_factor, which is 2^-v.
template <int KEYS> struct key_powers { float k[KEYS], v[KEYS], v_factor[KEYS]; };

// Weights are at most 2 to this, but for the rounding of large exponents.
enum { WEIGHT_LOG = 5 };

// Queries as F16; undo: what scores of the two rows must be multiplied by.
template <int KD>
__device__ static void queries_in_f16(uint32_t (&q)[KD / 16][4], float (&undo)[2]) {
  float most[2] = {}, factor[2];
#pragma unroll
  for (int i = 0; i < KD / 4; i++)
    most[i % 2] = most_of(most[i % 2], q[i / 4][i % 4]);
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const power p = power_below<5>(quad_max(most[r]));
    factor[r] = p.factor;
    undo[r] = p.undo;
  }
#pragma unroll
  for (int i = 0; i < KD / 4; i++)
    q[i / 4][i % 4] = f16x2_from_bf16x2(q[i / 4][i % 4], factor[i % 2]);
}

// A thread's chunks of a row, one in every panel, become F16. The eight threads of a row have it
// all.
template <int LOG, int MOST, int PANELS, int KEYS>
__device__ static power row_in_f16(uint16_t (*panels)[KEYS][PANEL], uint32_t row) {
  uint4 *at[PANELS], v[PANELS];
  float most = 0;
#pragma unroll
  for (int i = 0; i < PANELS; i++) {
    at[i] = reinterpret_cast<uint4 *>(chunk_of(&panels[i], row, threadIdx.x % PANEL_CHUNKS));
    v[i] = *at[i];
    most = most_of(most, v[i]);
  }
  most = quad_max(most);
  const power p = power_below<LOG, MOST>(fmaxf(most, __shfl_xor_sync(TD_FULL_WARP, most, 4)));
#pragma unroll
  for (int i = 0; i < PANELS; i++)
    *at[i] = f16x8_from_bf16x8(v[i], p.factor);
  return p;
}

// What this thread has loaded of a tile becomes F16. A value of zeros has weight, so that its power
// is limited.
template <int KD, int VD, int KEYS>
__device__ static void tile_in_f16(uint16_t (*k)[KEYS][PANEL], uint16_t (*v)[KEYS][PANEL],
                                   key_powers<KEYS> &powers) {
  const bool is_first = threadIdx.x % PANEL_CHUNKS == 0;
#pragma unroll
  for (uint32_t i = 0; i < KEYS; i += ROWS_AT_ONCE) {
    const uint32_t row = i + threadIdx.x / PANEL_CHUNKS;
    const power of_k = row_in_f16<5, 126, KD / PANEL>(k, row);
    const power of_v = row_in_f16<4, 64, VD / PANEL>(v, row);
    if (!is_first) continue;
    powers.k[row] = of_k.undo;
    powers.v_factor[row] = of_v.factor;
    powers.v[row] = 127 - static_cast<float>(__float_as_uint(of_v.factor) >> 23);
  }
}

// score = q k^T times scale, plus the exponents that values leave.
template <int KD, int KEYS>
__device__ static void score_keys_f16(const uint32_t (&q)[KD / 16][4],
                                      uint16_t (*keys)[KEYS][PANEL], const key_powers<KEYS> &powers,
                                      const float (&scale)[2], float (&score)[KEYS / 8][4]) {
  uint32_t lane = threadIdx.x % WARP, row = lane % 8 + lane / 16 * 8, chunk = lane / 8 % 2;
#pragma unroll
  for (uint32_t panel = 0; panel < KD / PANEL; panel++) {
    uint32_t sum[KEYS / 8][2] = {};
#pragma unroll
    for (uint32_t k = panel * PANEL / 16; k < (panel + 1) * PANEL / 16; k++) {
#pragma unroll
      for (uint32_t j = 0; j < KEYS / 16; j++) {
        uint32_t b[4];
        load_matrices(b, chunk_of(keys, 16 * j + row, 2 * k + chunk));
        mma_f16(sum[2 * j], q[k], {b[0], b[1]});
        mma_f16(sum[2 * j + 1], q[k], {b[2], b[3]});
      }
    }
#pragma unroll
    for (int e = 0; e < KEYS / 2; e++)
      score[e / 4][e % 4] = (panel ? score[e / 4][e % 4] : 0) + f16_sum(sum[e / 4], e % 4);
  }
#pragma unroll
  for (int e = 0; e < KEYS / 2; e++) {
    const uint32_t key = e / 4 * 8 + lane % 4 * 2 + e % 2;
    float &s = score[e / 4][e % 4];
    s = s * (powers.k[key] * scale[e % 4 / 2]) + powers.v[key];
  }
}

// acc = acc rescale + p v.
template <int VD, int KEYS>
__device__ static void add_values_f16(uint16_t (*values)[KEYS][PANEL],
                                      const uint32_t (&p)[KEYS / 16][4], const float (&rescale)[2],
                                      float (&acc)[VD / 8][4]) {
  uint32_t lane = threadIdx.x % WARP, row = lane % 16, chunk = lane / 16;
#pragma unroll
  for (uint32_t panel = 0; panel < VD / PANEL; panel++) {
    uint32_t sum[PANEL / 8][2] = {};
#pragma unroll
    for (uint32_t k = 0; k < KEYS / 16; k++) {
#pragma unroll
      for (uint32_t j = 0; j < PANEL / 16; j++) {
        uint32_t b[4];
        load_matrices_turned(b, chunk_of(&values[panel], 16 * k + row, 2 * j + chunk));
        mma_f16(sum[2 * j], p[k], {b[0], b[1]});
        mma_f16(sum[2 * j + 1], p[k], {b[2], b[3]});
      }
    }
#pragma unroll
    for (int e = 0; e < PANEL / 2; e++) {
      float &v = acc[panel * PANEL / 8 + e / 4][e % 4];
      v = v * rescale[e % 4 / 2] + f16_sum(sum[e / 4], e % 4);
    }
  }
}

template <int KD, int VD, int KEYS, bool WINDOW, bool F16>
__device__ static void attend_by_mma(const td_cu_attn_prefill_args &a) {
  TD_DYNAMIC_SHARED(memory);
  auto &s = *reinterpret_cast<mma_shared<KD, VD, KEYS> *>(memory);
  query_tile tile = find_tile(a);
  if (tile.n == 0) return;
  load_queries<KD>(a, tile, s.q);
  copy_async_wait();
  __syncthreads();
  uint32_t q[KD / 16][4];
  take_queries<KD>(s.q, q);
  auto *powers = reinterpret_cast<key_powers<KEYS> *>(memory + sizeof s); // [2], with F16
  float scale[2] = {a.scale, a.scale};
  if constexpr (F16) {
    float undo[2];
    queries_in_f16<KD>(q, undo);
    scale[0] *= undo[0];
    scale[1] *= undo[1];
  }

  uint32_t row0 = threadIdx.x / WARP * 16, p = tile.position + row0 + threadIdx.x % WARP / 4;
  // positions below this are visible to all of the warp's queries
  uint32_t all_see = tile.position + row0 + 1;
  uint32_t some_see = row0 < tile.n ? tile.position + at_most(row0 + 16, tile.n) : 0;
  // positions below these are hidden from all of the warp's queries, from some of them
  uint32_t none_see = WINDOW ? first_seen(all_see, a.window) : 0;
  uint32_t some_miss = WINDOW ? first_seen(all_see + 15, a.window) : 0;
  const uint32_t first = WINDOW ? first_loaded<KEYS>(a, tile) : 0;
  query_state<VD> state = nothing_seen<VD>();
  const auto keys = find_keys<KD, VD>(a, tile.key_begin);
  const auto load = [&](uint32_t i) {
    uint32_t begin = first + i * KEYS;
    if (begin >= tile.n_keys) return;
    load_panels(keys.k, begin, tile.n_keys, s.tiles.k[i % 2]);
    load_panels(keys.v, begin, tile.n_keys, s.tiles.v[i % 3]);
  };
  // After it tile i is there, and nobody reads the keys of the one before and the values of the one
  // before that.
  const auto meet = [&](uint32_t i) {
    copy_async_wait();
    if (F16 && first + i * KEYS < tile.n_keys)
      tile_in_f16<KD, VD>(s.tiles.k[i % 2], s.tiles.v[i % 3], powers[i % 2]);
    barrier_anywhere();
    load(i + 1);
  };
  const bool is_late = threadIdx.x >= PREFILL_THREADS / 2;
  uint32_t i = 0;
  load(0);
  meet(0);
  for (uint32_t begin = first; begin < tile.n_keys; begin += KEYS, i++) {
    if (i > 0 && !is_late) meet(i);
    const bool is_seen = begin < some_see && !(WINDOW && begin + KEYS <= none_see);
    uint32_t weights[KEYS / 16][4];
    float rescale[2];
    if (is_seen) {
      float score[KEYS / 8][4];
      if constexpr (F16) {
        score_keys_f16<KD, KEYS>(q, s.tiles.k[i % 2], powers[i % 2], scale, score);
      } else {
        score_keys<KD, KEYS>(q, s.tiles.k[i % 2], score);
      }
      if (begin + KEYS > all_see) hide(score, p, begin);
      if (WINDOW && begin < some_miss) hide_old(score, p, begin, a.window);
      if constexpr (F16) {
        const float *factor = powers[i % 2].v_factor + threadIdx.x % 4 * 2;
        weigh(score, 1.0f, WEIGHT_LOG, state.m, state.l, rescale,
              [factor](int e) { return factor[e / 4 * 8 + e % 2]; });
        pack<true>(score, weights);
      } else {
        weigh(score, a.scale, state.m, state.l, rescale);
        pack(score, weights);
        multiply(state.acc, rescale);
      }
    }
    if (is_late) meet(i + 1);
    if (!is_seen) continue;
    if constexpr (F16) {
      add_values_f16<VD, KEYS>(s.tiles.v[i % 3], weights, rescale, state.acc);
    } else {
      add_values<VD, KEYS>(s.tiles.v[i % 3], weights, state.acc);
    }
  }
  if (!is_late) meet(i);
  put_result(a, tile, state, F16 ? 1 : a.scale, F16 ? WEIGHT_LOG : 0);
}

template <int KD, int VD, int KEYS, bool WINDOW, bool F16>
__global__ static void __launch_bounds__(PREFILL_THREADS)
    prefill_by_mma(td_cu_attn_prefill_args a) {
  if constexpr (!F16 || TD_HAS_F16_SUMS) attend_by_mma<KD, VD, KEYS, WINDOW, F16>(a);
}

// ---- wgmma: warpgroup w has queries from 64 w on ------------------------------------------------

template <int KD, int VD, int KEYS> struct wgmma_shared {
  uint16_t q[KD / PANEL][QUERIES][PANEL];
  key_tile<KD, VD, KEYS> tiles[2];
};

// ptxas moves a wait for tensor cores up before all arithmetic that precedes it, which destroys the
// overlap. It does not move a wait across a branch: this one is never taken but depends on that
// arithmetic. (CUDA 13.0; in the SASS, MUFU.EX2 must be between the waits.)
template <int VD> __device__ static void settle_weights(const query_state<VD> &state) {
#if defined(__CUDA_ARCH__)
  if (__any_sync(TD_FULL_WARP, state.l[0] + state.l[1] < 0))
    asm volatile("nanosleep.u32 20;" ::: "memory");
#else
  (void)state;
#endif
}

// Keys are one tile ahead of values: while a tile's values are multiplied, the next tile's scores
// become weights.
template <int KD, int VD, int KEYS, bool WINDOW>
__device__ static void attend_by_wgmma(const td_cu_attn_prefill_args &a) {
  TD_DYNAMIC_SHARED(memory);
  auto &s = *reinterpret_cast<wgmma_shared<KD, VD, KEYS> *>(memory);
  query_tile tile = find_tile(a);
  if (tile.n == 0) return;
  const uint32_t row = threadIdx.x / (4 * WARP) * 64; // the warpgroup's first query
  // same, for the warpgroup's queries
  uint32_t all_see = tile.position + row + 1;
  uint32_t some_miss = WINDOW ? first_seen(all_see + 63, a.window) : 0;
  const uint32_t first = WINDOW ? first_loaded<KEYS>(a, tile) : 0;
  uint32_t p = tile.position + threadIdx.x / WARP * 16 + threadIdx.x % WARP / 4;
  const auto keys = find_keys<KD, VD>(a, tile.key_begin);
  load_queries<KD>(a, tile, s.q);
  load_panels(keys.k, first, tile.n_keys, s.tiles[first / KEYS % 2].k);
  copy_async_wait();
  wgmma_publish();
  __syncthreads();
  query_state<VD> state = nothing_seen<VD>();
  float score[KEYS / 8][4], rescale[2];
  uint32_t weights[KEYS / 16][4], begin = first;
  begin_scores<KD>(s.q, row, s.tiles[first / KEYS % 2].k, score);
  load_panels(keys.v, first, tile.n_keys, s.tiles[first / KEYS % 2].v);
  load_panels(keys.k, first + KEYS, tile.n_keys, s.tiles[(first / KEYS + 1) % 2].k);
  wgmma_wait<0>(score);
  if (first + KEYS > all_see) hide(score, p, first);
  if (WINDOW && first < some_miss) hide_old(score, p, first, a.window);
  weigh(score, a.scale, state.m, state.l, rescale);
  pack(score, weights);
  for (; begin + KEYS < tile.n_keys; begin += KEYS) {
    auto &now = s.tiles[begin / KEYS % 2], &next = s.tiles[(begin / KEYS + 1) % 2];
    copy_async_wait();
    wgmma_publish();
    __syncthreads(); // after it nobody reads the keys in `now` and the values in `next`
    begin_scores<KD>(s.q, row, next.k, score);
    begin_values<VD, KEYS>(now.v, weights, state.acc);
    load_panels(keys.v, begin + KEYS, tile.n_keys, next.v);
    load_panels(keys.k, begin + 2 * KEYS, tile.n_keys, now.k);
    wgmma_wait<1>(score);
    if (begin + 2 * KEYS > all_see) hide(score, p, begin + KEYS);
    if (WINDOW && begin + KEYS < some_miss) hide_old(score, p, begin + KEYS, a.window);
    weigh(score, a.scale, state.m, state.l, rescale);
    settle_weights(state);
    wgmma_wait<0>(state.acc);
    pack(score, weights);
    multiply(state.acc, rescale);
  }
  copy_async_wait();
  wgmma_publish();
  __syncthreads();
  begin_values<VD, KEYS>(s.tiles[begin / KEYS % 2].v, weights, state.acc);
  wgmma_wait<0>(state.acc);
  put_result(a, tile, state, a.scale);
}

template <int KD, int VD, int KEYS, bool WINDOW>
__global__ static void __launch_bounds__(PREFILL_THREADS)
    prefill_by_wgmma(td_cu_attn_prefill_args a) {
#if TD_HAS_WGMMA
  attend_by_wgmma<KD, VD, KEYS, WINDOW>(a);
#elif defined(__CUDA_ARCH__)
  __trap(); // unreachable: td_cu_props.has_wgmma is false
#endif
}

// ---- launching ----------------------------------------------------------------------------------

template <class Kernel>
static int launch(Kernel kernel, size_t n_bytes, const td_cu_attn_prefill_args *a,
                  td_cu_stream stream) {
  if (int failed = allow_shared(kernel, n_bytes)) return failed;
  dim3 grid(a->list.n_tiles, a->n_heads);
  td_cu_attn_prefill_args args = *a;
  args.scale *= LOG2_E;
  args.q_in_runs = (a->k_dim | a->q_stride) % CHUNK == 0 &&
                   reinterpret_cast<uintptr_t>(a->q) % sizeof(uint4) == 0;
  return TD_LAUNCH(kernel, grid, PREFILL_THREADS, n_bytes, stream, args);
}

// Keys per tile: what 99 KB of shared memory, or the 227 KB of sm_90, can hold twice.
template <int KD, int VD, int MMA_KEYS, int WGMMA_KEYS, bool WINDOW>
static int launch_kernel(const td_cu_attn_prefill_args *a, td_cu_stream stream) {
  // tiles begin at the same positions whichever slot is a sequence's first
  static_assert(TD_CU_PREFILL_TOKENS % MMA_KEYS == 0 && TD_CU_PREFILL_TOKENS % WGMMA_KEYS == 0, "");
  if (a->by_wgmma) {
    return launch(prefill_by_wgmma<KD, VD, WGMMA_KEYS, WINDOW>,
                  sizeof(wgmma_shared<KD, VD, WGMMA_KEYS>), a, stream);
  }
  const size_t n_bytes = sizeof(mma_shared<KD, VD, MMA_KEYS>);
  const size_t f16_bytes = n_bytes + 2 * sizeof(key_powers<MMA_KEYS>);
  static_assert(f16_bytes <= SHARED_BYTES, "");
  if (a->in_f16)
    return launch(prefill_by_mma<KD, VD, MMA_KEYS, WINDOW, true>, f16_bytes, a, stream);
  return launch(prefill_by_mma<KD, VD, MMA_KEYS, WINDOW, false>, n_bytes, a, stream);
}

template <int KD, int VD, int MMA_KEYS, int WGMMA_KEYS>
static int launch(const td_cu_attn_prefill_args *a, td_cu_stream stream) {
  if (a->window) return launch_kernel<KD, VD, MMA_KEYS, WGMMA_KEYS, true>(a, stream);
  return launch_kernel<KD, VD, MMA_KEYS, WGMMA_KEYS, false>(a, stream);
}

extern "C" int td_cu_attn_prefill(const td_cu_attn_prefill_args *a, td_cu_stream stream) {
  if (a->k_dim <= 64 && a->v_dim <= 64) return launch<64, 64, 64, 128>(a, stream);
  if (a->k_dim <= 128 && a->v_dim <= 128) return launch<128, 128, 64, 128>(a, stream);
  if (a->k_dim <= 192 && a->v_dim <= 128 && !a->window) // MLA, which has no windows
    return launch_kernel<192, 128, 64, 128, false>(a, stream);
  return launch<256, 256, 32, 64>(a, stream);
}
