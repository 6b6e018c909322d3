// kernels/cuda/select.cu - attention over selected keys: scores of an indexer on tensor cores, the
// largest of each token, and the entries that those stand for.
// A block of the first kernel takes one token and a run of keys. Each of eight warps multiplies the
// heads, sixteen at a time, by eight keys, and sums what is positive. A block of the second finds
// the least score that is selected digit by digit, and then writes positions in order: each thread
// has consecutive keys, whose places follow from the counts of the threads before it.
#include "kernels/cuda/attn.cuh"
#include "kernels/cuda/mma.cuh"

enum { SCORE_WARPS = 8, SCORE_THREADS = SCORE_WARPS * WARP, TILE_KEYS = 8 * SCORE_WARPS };
enum { RUN_TILES = 8, RUN_KEYS = RUN_TILES * TILE_KEYS }; // keys of a block
enum { HEADS = 64, ROW = TD_CU_INDEX_DIM + 8 };           // padded against bank conflicts
enum { STEPS = TD_CU_INDEX_DIM / 16, RUNS = TD_CU_INDEX_DIM / RUN_OF_8 };

// The number of keys that a token sees.
__device__ static uint32_t seen_by(const td_cu_select_args &a, uint32_t t) {
  uint32_t n = keys_of(a.batch, t);
  return a.group ? n / a.group : n;
}

// ---- scores -----------------------------------------------------------------------------------

// Queries of heads [head0, head0 + HEADS) and their weights; zeros after the last head and dim.
__device__ static void load_heads(const td_cu_select_args &a, uint32_t t, uint32_t head0,
                                  uint16_t (&q)[HEADS][ROW], float (&weights)[HEADS]) {
  size_t first = static_cast<size_t>(t) * a.n_heads;
  for (uint32_t i = threadIdx.x; i < HEADS * RUNS; i += SCORE_THREADS) {
    uint32_t h = i / RUNS, d = i % RUNS * RUN_OF_8, head = head0 + h;
    const uint16_t *from = a.q + (first + head) * a.dim + d;
    uint32_t n = head < a.n_heads && d < a.dim ? at_most(a.dim - d, RUN_OF_8) : 0;
    if (a.in_runs) {
      put_run(&q[h][d], n ? *reinterpret_cast<const uint4 *>(from) : uint4{0, 0, 0, 0});
      continue;
    }
    for (uint32_t e = 0; e < RUN_OF_8; e++)
      q[h][d + e] = e < n ? from[e] : 0;
  }
  for (uint32_t h = threadIdx.x; h < HEADS; h += SCORE_THREADS)
    weights[h] = head0 + h < a.n_heads ? a.weights[first + head0 + h] : 0;
}

// Entries [begin, begin + TILE_KEYS) as keys; zeros from `end` on.
__device__ static void load_entries(const td_cu_select_args &a, uint32_t seq, uint32_t begin,
                                    uint32_t end, uint16_t (&k)[TILE_KEYS][ROW]) {
  for (uint32_t i = threadIdx.x; i < TILE_KEYS * RUNS; i += SCORE_THREADS) {
    uint32_t row = i / RUNS, d = i % RUNS * RUN_OF_8, entry = begin + row;
    bool is_there = entry < end && d < a.dim;
    int32_t id = is_there ? kv_page(a.batch, seq, (entry + 1) * a.group - 1) : -1;
    uint32_t n = id < 0 ? 0 : at_most(a.dim - d, RUN_OF_8);
    const float *from = reinterpret_cast<const float *>(kv_page_at(a.kv, id < 0 ? 0 : id)) +
                        static_cast<size_t>(entry % a.page_entries) * a.dim + d;
    float v[RUN_OF_8] = {};
    if (a.in_runs) {
      if (n) load_run(from, v);
      store_run(&k[row][d], v);
      continue;
    }
    for (uint32_t e = 0; e < RUN_OF_8; e++)
      k[row][d + e] = e < n ? bf16_from_f32(from[e]) : 0;
  }
}

// The same of keys of positions.
__device__ static void load_keys(const td_cu_select_args &a, uint32_t seq, uint32_t begin,
                                 uint32_t end, uint16_t (&k)[TILE_KEYS][ROW]) {
  for (uint32_t i = threadIdx.x; i < TILE_KEYS * RUNS; i += SCORE_THREADS) {
    uint32_t key = i / RUNS, d = i % RUNS * RUN_OF_8, position = begin + key;
    int32_t id = position < end && d < a.dim ? kv_page(a.batch, seq, position) : -1;
    uint32_t n = id < 0 ? 0 : at_most(a.dim - d, RUN_OF_8);
    const char *page = kv_page_at(a.kv, id < 0 ? 0 : id);
    size_t at = kv_row(a.batch, position, 0, a.dim) + d;
    if (a.in_runs) {
      put_run(&k[key][d], n ? kv_bf16x8(a.kv, page, at) : uint4{0, 0, 0, 0});
      continue;
    }
    for (uint32_t e = 0; e < RUN_OF_8; e++)
      k[key][d + e] = e < n ? kv_bf16(a.kv, page, at + e) : 0;
  }
}

// Adds the weighted positive products of the heads in shared memory to this lane's two keys: row g
// and row g + 8 of each sixteen heads.
__device__ static void add_heads(const uint16_t (&q)[HEADS][ROW], const float (&weights)[HEADS],
                                 const uint16_t (&k)[TILE_KEYS][ROW], float (&sum)[2]) {
  uint32_t lane = threadIdx.x % WARP, g = lane / 4, row = lane % 8, matrix = lane / 8;
  const uint16_t *keys = k[threadIdx.x / WARP * 8 + row] + matrix * 8;
  uint32_t b[STEPS / 2][4]; // of two steps each
#pragma unroll
  for (int s = 0; s < STEPS / 2; s++)
    load_matrices(b[s], keys + 32 * s);
  for (uint32_t h = 0; h < HEADS; h += 16) {
    float c[4] = {};
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      uint32_t heads[4], some[2] = {b[s / 2][s % 2 * 2], b[s / 2][s % 2 * 2 + 1]};
      load_matrices(heads, q[h + matrix % 2 * 8 + row] + 16 * s + matrix / 2 * 8);
      mma_bf16(c, heads, some);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      sum[i] = fold(sum[i], 1, fmaxf(c[i], 0), weights[h + g]);
      sum[i] = fold(sum[i], 1, fmaxf(c[i + 2], 0), weights[h + g + 8]);
    }
  }
}

struct score_shared {
  alignas(16) uint16_t q[HEADS][ROW], k[TILE_KEYS][ROW];
  float weights[HEADS];
};

__global__ static void scores_kernel(td_cu_select_args a) {
  __shared__ score_shared s;
  uint32_t t = blockIdx.y, n_keys = seen_by(a, t), first = blockIdx.x * RUN_KEYS;
  if (n_keys <= a.top_k || first >= n_keys) return;
  uint32_t end = at_most(first + RUN_KEYS, n_keys), seq = static_cast<uint32_t>(a.batch.seq[t]);
  uint32_t lane = threadIdx.x % WARP, mine = threadIdx.x / WARP * 8 + lane % 4 * 2;
  float *scores = a.scores + static_cast<size_t>(t) * a.stride;
  for (uint32_t begin = first; begin < end; begin += TILE_KEYS) {
    float sum[2] = {};
    for (uint32_t head = 0; head < a.n_heads; head += HEADS) {
      __syncthreads();
      if (begin == first || a.n_heads > HEADS) load_heads(a, t, head, s.q, s.weights);
      if (head == 0 && a.group) load_entries(a, seq, begin, end, s.k);
      if (head == 0 && !a.group) load_keys(a, seq, begin, end, s.k);
      __syncthreads();
      add_heads(s.q, s.weights, s.k, sum);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) { // over the eight lanes that share keys
      for (int offset = 4; offset < WARP; offset *= 2)
        sum[i] += __shfl_xor_sync(TD_FULL_WARP, sum[i], offset);
      if (lane < 4 && begin + mine + i < end) scores[begin + mine + i] = sum[i];
    }
  }
}

// ---- the largest scores -----------------------------------------------------------------------

enum { SELECT_THREADS = 256, DIGIT_BITS = 8, DIGITS = 1 << DIGIT_BITS };

// A number that rises with f; -0 counts as +0.
__device__ static uint32_t rank_of(float f) {
  uint32_t bits = __float_as_uint(f == 0 ? 0.0f : f);
  return bits >> 31 ? ~bits : bits | 1u << 31;
}

// What is known of the least selected score: its first digits, and how many of the scores that
// have them are selected.
struct least {
  uint32_t rank, mask, n;
};

__device__ static void add_digit(const uint32_t (&count)[DIGITS], int shift, least *out) {
  uint32_t digit = DIGITS - 1;
  for (; digit > 0 && count[digit] < out->n; digit--)
    out->n -= count[digit];
  out->rank |= digit << shift;
  out->mask |= static_cast<uint32_t>(DIGITS - 1) << shift;
}

// The least selected rank, and how many of that rank are.
__device__ static void find_least(const float *scores, uint32_t n_keys, uint32_t (&count)[DIGITS],
                                  least *out) {
  for (int shift = 32 - DIGIT_BITS; shift >= 0; shift -= DIGIT_BITS) {
    for (uint32_t i = threadIdx.x; i < DIGITS; i += SELECT_THREADS)
      count[i] = 0;
    __syncthreads();
    uint32_t rank = out->rank, mask = out->mask;
    for (uint32_t i = threadIdx.x; i < n_keys; i += SELECT_THREADS) {
      uint32_t r = rank_of(scores[i]);
      if ((r & mask) == rank) atomicAdd(&count[r >> shift & (DIGITS - 1)], 1u);
    }
    __syncthreads();
    if (threadIdx.x == 0) add_digit(count, shift, out);
    __syncthreads();
  }
}

__global__ static void select_kernel(td_cu_select_args a) {
  __shared__ uint32_t count[DIGITS], n_above[SELECT_THREADS], n_level[SELECT_THREADS];
  __shared__ least last;
  uint32_t t = blockIdx.x, n_keys = seen_by(a, t);
  if (n_keys <= a.top_k) return;
  const float *scores = a.scores + static_cast<size_t>(t) * a.stride;
  if (threadIdx.x == 0) last = {0, 0, a.top_k};
  __syncthreads();
  find_least(scores, n_keys, count, &last);
  uint32_t each = (n_keys + SELECT_THREADS - 1) / SELECT_THREADS;
  uint32_t begin = at_most(threadIdx.x * each, n_keys), end = at_most(begin + each, n_keys);
  uint32_t above = 0, level = 0;
  for (uint32_t i = begin; i < end; i++) {
    uint32_t rank = rank_of(scores[i]);
    above += rank > last.rank;
    level += rank == last.rank;
  }
  n_above[threadIdx.x] = above;
  n_level[threadIdx.x] = level;
  __syncthreads();
  if (threadIdx.x == 0) { // counts become sums of those before
    above = level = 0;
    for (uint32_t i = 0; i < SELECT_THREADS; i++) {
      uint32_t more_above = n_above[i], more_level = n_level[i];
      n_above[i] = above;
      n_level[i] = level;
      above += more_above;
      level += more_level;
    }
  }
  __syncthreads();
  level = n_level[threadIdx.x];
  int32_t *out = a.selected + static_cast<size_t>(t) * a.top_k;
  uint32_t at = n_above[threadIdx.x] + at_most(level, last.n);
  for (uint32_t i = begin; i < end; i++) {
    uint32_t rank = rank_of(scores[i]);
    bool is_in = rank > last.rank || (rank == last.rank && level < last.n);
    level += rank == last.rank;
    if (is_in && at < a.top_k) out[at++] = static_cast<int32_t>(i);
  }
}

extern "C" int td_cu_select(const td_cu_select_args *a, td_cu_stream stream) {
  td_cu_select_args args = *a;
  uintptr_t places = reinterpret_cast<uintptr_t>(a->kv.pages) | a->kv.page_bytes;
  args.in_runs = in_runs(a->q, a->dim) && places % sizeof(uint4) == 0;
  dim3 grid(ceil_div(a->stride, RUN_KEYS), a->batch.n_tokens);
  TD_LAUNCH(scores_kernel, grid, SCORE_THREADS, 0, stream, args);
  int code = launched();
  if (code != 0) return code;
  TD_LAUNCH(select_kernel, dim3(a->batch.n_tokens), SELECT_THREADS, 0, stream, args);
  return launched();
}

// ---- entries ----------------------------------------------------------------------------------

enum { GATHER_ROWS = 8 };

// One warp per row of token blockIdx.y; the first block also describes the token's page.
__global__ static void select_gather_kernel(td_cu_select_gather_args a) {
  uint32_t t = blockIdx.y, n_keys = keys_of(a.batch, t), n = at_most(n_keys, a.top_k);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    a.seq[t] = a.page_table[t] = static_cast<int32_t>(t);
    a.position[t] = static_cast<int32_t>(n) - 1;
  }
  uint32_t row = blockIdx.x * GATHER_ROWS + threadIdx.x / WARP;
  if (row >= n) return;
  const int32_t *selected = a.selected + static_cast<size_t>(t) * a.top_k;
  uint32_t position = n_keys > a.top_k ? static_cast<uint32_t>(selected[row]) : row;
  if (position >= n_keys) return;
  int32_t page = kv_page(a.batch, static_cast<uint32_t>(a.batch.seq[t]), position);
  uint16_t *to = a.out + (static_cast<size_t>(t) * a.page_tokens + row) * a.dim;
  const uint16_t *from = nullptr;
  if (page >= 0)
    from = reinterpret_cast<const uint16_t *>(kv_page_at(a.kv, page)) +
           kv_row(a.batch, position, 0, a.dim);
  uint32_t lane = threadIdx.x % WARP;
  if (from && a.in_runs) {
    for (uint32_t d = lane * RUN_OF_8; d < a.dim; d += WARP * RUN_OF_8)
      put_run(to + d, *reinterpret_cast<const uint4 *>(from + d));
    return;
  }
  for (uint32_t d = lane; d < a.dim; d += WARP)
    to[d] = from ? from[d] : 0;
}

extern "C" int td_cu_select_gather(const td_cu_select_gather_args *a, td_cu_stream stream) {
  td_cu_select_gather_args args = *a;
  uintptr_t places = reinterpret_cast<uintptr_t>(a->kv.pages) | a->kv.page_bytes;
  args.in_runs = in_runs(a->out, a->dim) && places % sizeof(uint4) == 0;
  dim3 grid(ceil_div(a->top_k, GATHER_ROWS), a->batch.n_tokens);
  TD_LAUNCH(select_gather_kernel, grid, GATHER_ROWS * WARP, 0, stream, args);
  return launched();
}
