// kernels/cuda/attn_latents.cu - absorbed MLA attention for few queries on sm_90a: many heads of a
// token against the latents of its sequence, whose first elements are the values, too.
// A block takes up to 64 heads of a token and one split of its keys, or several in a row;
// attn_merge adds the splits up. Queries and two tiles of 64 latents are in shared memory. Of its
// two warpgroups, the first multiplies queries by keys and turns scores into weights, while the
// second loads the next tile; then each multiplies the weights by half of the columns of the
// values, which it adds up in registers. Blocks of the same keys follow one another, and find them
// in L2. Splits depend on the length of a token's own sequence alone, so its result does not depend
// on other tokens. E4M3 pages become BF16, exactly, on their way to a tile, through registers.
#include "kernels/cuda/attn_merge.cuh"
#include "kernels/cuda/attn_tile.cuh"
#include "kernels/cuda/kv_f8.cuh"

enum {
  KD = TD_CU_MMA_ENTRY,
  VD = TD_CU_MMA_LORA,
  HEADS = TD_CU_LATENT_HEADS,
  KEYS = TD_CU_LATENT_KEYS,
  GROUP = 4 * WARP, // threads of a warpgroup
  LATENT_THREADS = 2 * GROUP,
  COLUMNS = VD / 2, // of the values, for each warpgroup
  BLOCKS = COLUMNS / 8
};

struct latent_shared {
  uint16_t q[KD / PANEL][HEADS][PANEL];
  uint16_t tiles[2][KD / PANEL][KEYS][PANEL];
  uint16_t weights[1][HEADS][KEYS];
  float rescale[HEADS];          // of sums made before this tile
  float old[HEADS], more[HEADS]; // factors of the earlier splits' sums and of this split's
};
static_assert(int(KEYS) == int(PANEL) && HEADS == 64,
              "weights are one panel, heads the rows of a wgmma");
static_assert(sizeof(latent_shared) <= 227 << 10, "shared memory of sm_90");

// The work of a block.
struct latent_part {
  uint32_t t, seq, head0, n_heads;
  uint32_t begin, end, split_keys; // keys [begin, end)
};

__device__ static latent_part part_of(const td_cu_attn_decode_args &a) {
  latent_part part;
  part.t = blockIdx.y;
  part.seq = static_cast<uint32_t>(a.batch.seq[part.t]);
  part.head0 = blockIdx.x * HEADS;
  part.n_heads = at_most(a.n_heads - part.head0, HEADS);
  uint32_t n_keys = keys_of(a.batch, part.t), block_keys = block_keys_of(a, n_keys);
  part.split_keys = split_keys_of(a, n_keys);
  part.begin = at_most(blockIdx.z * block_keys, n_keys);
  part.end = at_most(part.begin + block_keys, n_keys);
  return part;
}

// Zeros after the last head and the last column. Asynchronous.
__device__ static void load_queries(const td_cu_attn_decode_args &a, const latent_part &part,
                                    latent_shared &s) {
  size_t first = static_cast<size_t>(part.t) * a.n_heads + part.head0;
  const uint16_t *q = static_cast<const uint16_t *>(a.q) + first * a.k_dim;
  uint32_t column = threadIdx.x % PANEL_CHUNKS;
#pragma unroll
  for (uint32_t i = 0; i < HEADS; i += LATENT_THREADS / PANEL_CHUNKS) {
    uint32_t h = i + threadIdx.x / PANEL_CHUNKS;
#pragma unroll
    for (uint32_t c = column; c < KD / CHUNK; c += PANEL_CHUNKS)
      copy_async(chunk_of(s.q, h, c), q + h * a.k_dim + c * CHUNK,
                 h < part.n_heads && c * CHUNK < a.k_dim);
  }
}

// The page of a tile; negative: it begins after the last key.
__device__ static int32_t page_of(const td_cu_attn_decode_args &a, const latent_part &part,
                                  uint32_t begin) {
  return begin < part.end ? kv_page(a.batch, part.seq, begin) : -1;
}

// Latents from position begin on, all in one page, by THREADS threads, of which this is number i;
// zeros after the last key and the last column. Asynchronous.
template <uint32_t THREADS>
__device__ static void load_tile(const td_cu_attn_decode_args &a, const latent_part &part,
                                 uint32_t begin, int32_t id, uint32_t i,
                                 uint16_t (*to)[KEYS][PANEL]) {
  uint32_t column = i % PANEL_CHUNKS, row0 = i / PANEL_CHUNKS;
  uint32_t n = id < 0 ? 0 : at_most(part.end - begin, KEYS);
  const uint16_t *from = reinterpret_cast<const uint16_t *>(kv_page_at(a.kv, id));
  from += (begin % a.batch.page_tokens + row0) * a.k_dim + column * CHUNK;
#pragma unroll
  for (uint32_t row = 0; row < KEYS; row += THREADS / PANEL_CHUNKS) {
#pragma unroll
    for (uint32_t c = 0; c < KD / CHUNK; c += PANEL_CHUNKS)
      copy_async(chunk_of(to, row0 + row, c + column), from + row * a.k_dim + c * CHUNK,
                 row0 + row < n && (c + column) * CHUNK < a.k_dim);
  }
}

// The same of E4M3 pages. A thread's loads of two rows are in flight at once.
template <uint32_t THREADS>
__device__ static void load_codes(const td_cu_attn_decode_args &a, const latent_part &part,
                                  uint32_t begin, int32_t id, uint32_t i,
                                  uint16_t (*to)[KEYS][PANEL]) {
  enum { ROWS = 2, STEP = THREADS / PANEL_CHUNKS, CHUNKS = KD / PANEL };
  static_assert(int(TD_KV_F8_BLOCK) == 2 * int(PANEL), "two panels share scales");
  const uint32_t column = i % PANEL_CHUNKS, row0 = i / PANEL_CHUNKS;
  const uint32_t n = id < 0 ? 0 : at_most(part.end - begin, KEYS);
  const char *page = kv_page_at(a.kv, id);
#pragma unroll 1
  for (uint32_t row = row0; row < KEYS; row += ROWS * STEP) {
    uint4 bits[ROWS][CHUNKS];
    float scales[ROWS][(CHUNKS + 1) / 2];
#pragma unroll
    for (uint32_t r = 0; r < ROWS; r++) {
      const size_t at = begin % a.batch.page_tokens + row + r * STEP;
      const char *codes = page + f8_codes_at(a.kv, at, a.k_dim);
      const auto of_row = reinterpret_cast<const float *>(page + f8_scales_at(a.kv, at));
#pragma unroll
      for (uint32_t c = 0; c < CHUNKS; c++) {
        const uint32_t d = c * PANEL + column * CHUNK;
        bits[r][c] = {0, 0, 0, 0};
        if (c % 2 == 0) scales[r][c / 2] = 0;
        if (row + r * STEP >= n || d >= a.k_dim) continue;
        if (d >= a.kv.n_codes) {
          bits[r][c] = *reinterpret_cast<const uint4 *>(codes + 2 * d - a.kv.n_codes);
        } else {
          const uint2 of_chunk = *reinterpret_cast<const uint2 *>(codes + d);
          bits[r][c].x = of_chunk.x, bits[r][c].y = of_chunk.y;
          if (c % 2 == 0) scales[r][c / 2] = of_row[c / 2];
        }
      }
    }
#pragma unroll
    for (uint32_t r = 0; r < ROWS; r++) {
#pragma unroll
      for (uint32_t c = 0; c < CHUNKS; c++) {
        uint4 run = bits[r][c];
        if (c * PANEL + column * CHUNK < a.kv.n_codes)
          run = f8_values({run.x, run.y}, scales[r][c / 2]);
        put_run(chunk_of(to, row + r * STEP, c * PANEL_CHUNKS + column), run);
      }
    }
  }
}

// Hides a tile's keys after the first n.
__device__ static void hide_absent(float (&score)[KEYS / 8][4], uint32_t n) {
  uint32_t p = threadIdx.x % 4 * 2;
#pragma unroll
  for (uint32_t e = 0; e < KEYS / 2; e++)
    if (e / 4 * 8 + p + e % 2 >= n) score[e / 4][e % 4] = -INFINITY;
}

// The first of a thread's two rows, of which the other is eight further on; both warpgroups have
// the same rows.
__device__ static uint32_t first_row() {
  return threadIdx.x % GROUP / WARP * 16 + threadIdx.x % WARP / 4;
}

// Leaves the weights and the factors of earlier sums to the second warpgroup.
__device__ static void put_weights(latent_shared &s, const uint32_t (&p)[KEYS / 16][4],
                                   const float (&rescale)[2]) {
  uint32_t lane = threadIdx.x % WARP;
#pragma unroll
  for (uint32_t i = 0; i < KEYS / 4; i++) { // register i % 4 of k = i / 4, as in mma.cuh
    uint16_t *chunk = chunk_of(s.weights, first_row() + i % 2 * 8, i / 4 * 2 + i % 4 / 2);
    *reinterpret_cast<uint32_t *>(chunk + lane % 4 * 2) = p[i / 4][i % 4];
  }
  if (lane % 4 != 0) return;
  s.rescale[first_row()] = rescale[0];
  s.rescale[first_row() + 8] = rescale[1];
}

__device__ static void take_weights(latent_shared &s, uint32_t (&p)[KEYS / 16][4],
                                    float (&rescale)[2]) {
  uint32_t lane = threadIdx.x % WARP, row = threadIdx.x % GROUP / WARP * 16 + lane % 16;
#pragma unroll
  for (uint32_t k = 0; k < KEYS / 16; k++)
    load_matrices(p[k], chunk_of(s.weights, row, 2 * k + lane / 16));
  rescale[0] = s.rescale[first_row()];
  rescale[1] = s.rescale[first_row() + 8];
}

// Of the block's splits so far, for a thread's two rows, in the first warpgroup.
struct folded_sums {
  float m[2], l[2];
};

// A thread's rows of a split.
struct split_sums {
  float m[2], l[2];
  float acc[BLOCKS][4];
};

__device__ static void begin_split(split_sums &sums) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    sums.m[r] = -INFINITY;
    sums.l[r] = 0;
  }
#pragma unroll
  for (int e = 0; e < 4 * BLOCKS; e++)
    sums.acc[e / 4][e % 4] = 0;
}

// Adds a split's maxima and sums of weights to those of earlier splits, and leaves the factors of
// the other sums to all.
__device__ static void fold_weights(latent_shared &s, float scale, const split_sums &sums,
                                    folded_sums &folded, bool added) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float m = product(sums.m[r], scale), l = quad_sum(sums.l[r]);
    fold_factors f = {m, 0, 1};
    if (added) {
      f = factors_of(folded.m[r], m);
      l = fold(folded.l[r], f.old, l, f.more);
    }
    folded.m[r] = f.m;
    folded.l[r] = l;
    if (threadIdx.x % 4 != 0) continue;
    s.old[first_row() + 8 * r] = f.old;
    s.more[first_row() + 8 * r] = f.more;
  }
}

// Stores a split's sums or, if added, adds them to those of the block's earlier splits, which the
// same thread stored. The loads of a batch are in flight at once, since no store is between them.
__device__ static void put_sums(const td_cu_attn_decode_args &a, const latent_part &part,
                                const latent_shared &s, const split_sums &sums, bool added) {
  enum { BATCH = 8 }; // blocks of eight columns
  uint32_t column = threadIdx.x / GROUP * COLUMNS + threadIdx.x % 4 * 2;
#pragma unroll
  for (uint32_t r = 0; r < 2; r++) {
    uint32_t h = first_row() + 8 * r;
    size_t row = (static_cast<size_t>(part.t) * a.n_heads + part.head0 + h) * a.n_rows + blockIdx.z;
    float *to = a.part + row * a.v_dim + column, old = added ? s.old[h] : 0;
    float more = added ? s.more[h] : 0;
#pragma unroll
    for (uint32_t j = 0; j < BLOCKS; j += BATCH) {
      uint2 before[BATCH] = {};
#pragma unroll
      for (uint32_t i = 0; i < BATCH; i++)
        if (added && h < part.n_heads && column + 8 * (j + i) < a.v_dim)
          before[i] = *reinterpret_cast<const uint2 *>(to + 8 * (j + i));
#pragma unroll
      for (uint32_t i = 0; i < BATCH; i++) {
        float low = sums.acc[j + i][2 * r], high = sums.acc[j + i][2 * r + 1];
        if (added) {
          low = fold(__uint_as_float(before[i].x), old, low, more);
          high = fold(__uint_as_float(before[i].y), old, high, more);
        }
        if (h < part.n_heads && column + 8 * (j + i) < a.v_dim)
          *reinterpret_cast<uint2 *>(to + 8 * (j + i)) = {__float_as_uint(low),
                                                          __float_as_uint(high)};
      }
    }
  }
}

__device__ static void put_folded(const td_cu_attn_decode_args &a, const latent_part &part,
                                  const folded_sums &folded) {
  for (uint32_t r = 0; r < 2; r++) {
    uint32_t h = first_row() + 8 * r;
    if (threadIdx.x % 4 != 0 || h >= part.n_heads) continue;
    size_t row = (static_cast<size_t>(part.t) * a.n_heads + part.head0 + h) * a.n_rows + blockIdx.z;
    a.part_ml[2 * row] = folded.m[r];
    a.part_ml[2 * row + 1] = folded.l[r];
  }
}

// Whether a factor of any of the warp's rows is not 1.
__device__ static bool changes(const float (&rescale)[2]) {
  return __any_sync(TD_FULL_WARP, rescale[0] != 1 || rescale[1] != 1);
}

template <bool IS_F8> __device__ static void attend(const td_cu_attn_decode_args &a) {
  constexpr auto load_first = IS_F8 ? load_codes<LATENT_THREADS> : load_tile<LATENT_THREADS>;
  constexpr auto load_next = IS_F8 ? load_codes<GROUP> : load_tile<GROUP>;
  TD_DYNAMIC_SHARED(memory);
  auto &s = *reinterpret_cast<latent_shared *>(memory);
  const latent_part part = part_of(a);
  if (part.begin >= part.end) return; // attn_merge_kernel skips such splits
  load_queries(a, part, s);
  load_first(a, part, part.begin, page_of(a, part, part.begin), threadIdx.x, s.tiles[0]);
  int32_t page = page_of(a, part, part.begin + KEYS);
  const bool is_first = threadIdx.x < GROUP; // of the warpgroups
  split_sums sums;
  folded_sums folded = {};
  begin_split(sums);
  bool added = false;
  uint32_t at = 0;
  for (uint32_t begin = part.begin; begin < part.end; begin += KEYS, at ^= 1) {
    copy_async_wait();
    wgmma_publish();
    __syncthreads(); // after it the other tile and the weights are free
    uint32_t p[KEYS / 16][4];
    float rescale[2];
    if (is_first) {
      float score[KEYS / 8][4];
      begin_scores<KD>(s.q, 0, s.tiles[at], score);
      wgmma_wait<0>(score);
      if (part.end - begin < KEYS) hide_absent(score, part.end - begin);
      weigh(score, a.scale, sums.m, sums.l, rescale);
      pack(score, p);
      put_weights(s, p, rescale);
    } else if (begin + KEYS < part.end) {
      load_next(a, part, begin + KEYS, page, threadIdx.x - GROUP, s.tiles[at ^ 1]);
      page = page_of(a, part, begin + 2 * KEYS);
    }
    __syncthreads();
    if (!is_first) take_weights(s, p, rescale);
    if (changes(rescale)) multiply(sums.acc, rescale);
    begin_values<COLUMNS>(&s.tiles[at][is_first ? 0 : COLUMNS / PANEL], p, sums.acc);
    wgmma_wait<0>(sums.acc);
    const bool ends = (begin + KEYS) % part.split_keys == 0 || begin + KEYS >= part.end;
    if (!ends) continue;
    if (is_first) fold_weights(s, a.scale, sums, folded, added);
    __syncthreads();
    put_sums(a, part, s, sums, added);
    begin_split(sums);
    added = true;
  }
  if (is_first) put_folded(a, part, folded);
}

template <bool IS_F8>
__global__ static void __launch_bounds__(LATENT_THREADS)
    attn_latents_kernel(td_cu_attn_decode_args a) {
#if TD_HAS_WGMMA
  attend<IS_F8>(a);
#elif defined(__CUDA_ARCH__)
  __trap(); // unreachable: the caller asks for has_wgmma
#endif
}

extern "C" int td_cu_attn_latents(const td_cu_attn_decode_args *a, td_cu_stream stream) {
  auto kernel = a->kv.dtype == TD_F8E4M3 ? attn_latents_kernel<true> : attn_latents_kernel<false>;
  if (int failed = allow_shared(kernel, sizeof(latent_shared))) return failed;
  td_cu_attn_decode_args args = *a;
  args.scale *= LOG2_E;
  args.out_f32 = true;
  dim3 grid(ceil_div(a->n_heads, HEADS), a->batch.n_tokens, a->n_rows);
  if (int failed = TD_LAUNCH(kernel, grid, LATENT_THREADS, sizeof(latent_shared), stream, args))
    return failed;
  return launch_merge(args, true, stream);
}
