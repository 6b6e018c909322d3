// kernels/cuda/select.cu - attention over selected keys: scores of an indexer on tensor cores, the
// largest of each token, and the entries that those stand for.
// A thread block of the first kernel takes one token and a run of keys. Each of eight warps
// multiplies the heads, sixteen at a time, by eight keys, and sums what is positive. One of the
// second, for blocks of keys, takes rows of which each is a token's head, so that tokens of a
// prompt share the keys' loads, and leaves the best score of each block. One of the third finds
// the least score that is selected digit by digit, and then writes positions in order: each thread
// has consecutive keys, whose places follow from the counts of the threads before it.
#include "kernels/cuda/attn.cuh"
#include "kernels/cuda/mma.cuh"

enum { SCORE_WARPS = 8, SCORE_THREADS = SCORE_WARPS * WARP, TILE_KEYS = 8 * SCORE_WARPS };
enum { RUN_TILES = 8, RUN_KEYS = RUN_TILES * TILE_KEYS }; // keys of a block
enum { HEADS = 64, ROW = TD_CU_INDEX_DIM + 8 };           // padded against bank conflicts
enum { STEPS = TD_CU_INDEX_DIM / 16, RUNS = TD_CU_INDEX_DIM / RUN_OF_8 };

// The number of keys, or of blocks of keys, that a token sees.
__device__ static uint32_t seen_by(const td_select_args &a, uint32_t t) {
  uint32_t n = keys_of(a.batch, t);
  if (a.block) return n > 0 ? (n - 1) / a.block + 1 : 0;
  return a.group ? n / a.group : n;
}

// ---- scores -----------------------------------------------------------------------------------

// Queries of n heads, counted over all tokens, from `first` on; zeros after the last and its dim.
template <int N>
__device__ static void load_queries(const td_select_args &a, size_t first, uint32_t n_heads,
                                    uint16_t (&q)[N][ROW]) {
  for (uint32_t i = threadIdx.x; i < N * RUNS; i += SCORE_THREADS) {
    uint32_t h = i / RUNS, d = i % RUNS * RUN_OF_8;
    const uint16_t *from = a.q + (first + h) * a.dim + d;
    uint32_t n = h < n_heads && d < a.dim ? at_most(a.dim - d, RUN_OF_8) : 0;
    if (a.in_runs) {
      put_run(&q[h][d], n ? *reinterpret_cast<const uint4 *>(from) : uint4{0, 0, 0, 0});
      continue;
    }
    for (uint32_t e = 0; e < RUN_OF_8; e++)
      q[h][d + e] = e < n ? from[e] : 0;
  }
}

// Queries of heads [head0, head0 + HEADS) and their weights; zeros after the last head.
__device__ static void load_heads(const td_select_args &a, uint32_t t, uint32_t head0,
                                  uint16_t (&q)[HEADS][ROW], float (&weights)[HEADS]) {
  size_t first = static_cast<size_t>(t) * a.n_heads + head0;
  uint32_t n = at_most(a.n_heads - head0, HEADS);
  load_queries(a, first, n, q);
  for (uint32_t h = threadIdx.x; h < HEADS; h += SCORE_THREADS)
    weights[h] = h >= n ? 0 : a.weights ? a.weights[first + h] : 1;
}

// Entries [begin, begin + TILE_KEYS) as keys; zeros from `end` on.
__device__ static void load_entries(const td_select_args &a, uint32_t seq, uint32_t begin,
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
__device__ static void load_keys(const td_select_args &a, uint32_t seq, uint32_t begin,
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

// The warp's eight keys, of two steps in each row.
__device__ static void take_keys(const uint16_t (&k)[TILE_KEYS][ROW], uint32_t (&b)[STEPS / 2][4]) {
  uint32_t lane = threadIdx.x % WARP;
  const uint16_t *keys = k[threadIdx.x / WARP * 8 + lane % 8] + lane / 8 * 8;
#pragma unroll
  for (int s = 0; s < STEPS / 2; s++)
    load_matrices(b[s], keys + 32 * s);
}

// Products of sixteen heads with those, as in mma.cuh.
__device__ static void multiply(const uint16_t (*q)[ROW], const uint32_t (&b)[STEPS / 2][4],
                                float (&c)[4]) {
  uint32_t lane = threadIdx.x % WARP, row = lane % 8, matrix = lane / 8;
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
    uint32_t heads[4], some[2] = {b[s / 2][s % 2 * 2], b[s / 2][s % 2 * 2 + 1]};
    load_matrices(heads, q[matrix % 2 * 8 + row] + 16 * s + matrix / 2 * 8);
    mma_bf16(c, heads, some);
  }
}

// Adds the weighted positive products of the heads in shared memory to this lane's two keys: row g
// and row g + 8 of each sixteen heads.
__device__ static void add_heads(const uint16_t (&q)[HEADS][ROW], const float (&weights)[HEADS],
                                 const uint16_t (&k)[TILE_KEYS][ROW], float (&sum)[2]) {
  uint32_t g = threadIdx.x % WARP / 4, b[STEPS / 2][4];
  take_keys(k, b);
  for (uint32_t h = 0; h < HEADS; h += 16) {
    float c[4] = {};
    multiply(&q[h], b, c);
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

__global__ static void scores_kernel(td_select_args a) {
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

// ---- scores of blocks -------------------------------------------------------------------------

// ROWS heads of tokens; KEYS keys of a warp share a score: eight, where no block ends between them,
// or one.
template <int ROWS_, int KEYS_> struct rows_shape {
  enum { ROWS = ROWS_, KEYS = KEYS_ };
  struct shared {
    alignas(16) uint16_t q[ROWS][ROW], k[TILE_KEYS][ROW];
    float best[ROWS][TILE_KEYS / KEYS + 1]; // padded against bank conflicts
    uint32_t seen[ROWS]; // keys that the row's token sees; 0: its scores are not wanted
  };
};

// Tokens [token, end) of one sequence, and the most keys that any of them sees that selects.
struct row_tokens {
  uint32_t token, end, seq, n_keys;
};

__device__ static row_tokens tokens_from(const td_select_args &a, uint32_t token, uint32_t end) {
  row_tokens out = {token, token, static_cast<uint32_t>(a.batch.seq[token]), 0};
  for (; out.end < end && static_cast<uint32_t>(a.batch.seq[out.end]) == out.seq; out.end++) {
    uint32_t n_keys = keys_of(a.batch, out.end);
    if (seen_by(a, out.end) > a.top_k && n_keys > out.n_keys) out.n_keys = n_keys;
  }
  return out;
}

// Scores of the tile of keys from position begin on.
template <class S>
__device__ static void score_rows(typename S::shared &s, uint32_t n_rows, uint32_t begin) {
  uint32_t lane = threadIdx.x % WARP, g = lane / 4, warp = threadIdx.x / WARP;
  uint32_t key = warp * 8 + lane % 4 * 2, b[STEPS / 2][4];
  const uint16_t(&q)[S::ROWS][ROW] = s.q;
  take_keys(s.k, b);
  for (uint32_t row0 = 0; row0 < n_rows; row0 += 16) {
    float c[4] = {};
    multiply(&q[row0], b, c);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      uint32_t row = row0 + g + 8 * r, seen = s.seen[row];
      float low = begin + key < seen ? c[2 * r] : -INFINITY;
      float high = begin + key + 1 < seen ? c[2 * r + 1] : -INFINITY;
      if constexpr (S::KEYS == 1) {
        s.best[row][key] = low;
        s.best[row][key + 1] = high;
      } else {
        float most = quad_max(fmaxf(low, high));
        if (lane % 4 == 0) s.best[row][warp] = most;
      }
    }
  }
}

// A thread for each row goes through the tile's scores in order. best: the largest so far of the
// block that they are in.
template <class S>
__device__ static void put_scores(const td_select_args &a, const typename S::shared &s,
                                  size_t first_row, uint32_t begin, float *best) {
  uint32_t row = threadIdx.x, seen = row < S::ROWS ? s.seen[row] : 0;
  for (uint32_t i = 0; i < TILE_KEYS && begin + i < seen; i += S::KEYS) {
    *best = fmaxf(*best, s.best[row][i / S::KEYS]);
    uint32_t at = begin + i, next = at + S::KEYS, block = at / a.block;
    if (next % a.block != 0 && next < seen) continue;
    bool is_near = (seen - 1) / a.block - block < a.n_local;
    a.scores[(first_row + row) * a.stride + block] = is_near ? INFINITY : *best;
    *best = -INFINITY;
  }
}

// The block's run of keys for tokens of one sequence.
template <class S>
__device__ static void score_tokens(const td_select_args &a, typename S::shared &s,
                                    size_t first_row, uint32_t n_rows, const row_tokens &tokens) {
  uint32_t first = blockIdx.x * a.run_keys, end = at_most(first + a.run_keys, tokens.n_keys);
  if (first >= end) return;
  __syncthreads(); // nobody reads `seen` of the sequence before
  for (uint32_t row = threadIdx.x; row < S::ROWS; row += SCORE_THREADS) {
    uint32_t t = static_cast<uint32_t>((first_row + row) / a.n_heads);
    bool is_of = row < n_rows && t >= tokens.token && t < tokens.end;
    s.seen[row] = is_of && seen_by(a, t) > a.top_k ? keys_of(a.batch, t) : 0;
  }
  float best = -INFINITY;
  for (uint32_t begin = first; begin < end; begin += TILE_KEYS) {
    __syncthreads(); // the tile before is multiplied
    if (begin > first) put_scores<S>(a, s, first_row, begin - TILE_KEYS, &best);
    load_keys(a, tokens.seq, begin, end, s.k);
    __syncthreads();
    score_rows<S>(s, n_rows, begin);
  }
  __syncthreads();
  put_scores<S>(a, s, first_row, first + (end - first - 1) / TILE_KEYS * TILE_KEYS, &best);
}

template <class S> __global__ static void block_scores_kernel(td_select_args a) {
  __shared__ typename S::shared s;
  size_t first_row = static_cast<size_t>(blockIdx.y) * a.tile_rows;
  size_t left = static_cast<size_t>(a.batch.n_tokens) * a.n_heads - first_row;
  uint32_t n_rows = left < a.tile_rows ? static_cast<uint32_t>(left) : a.tile_rows;
  load_queries(a, first_row, n_rows, s.q);
  uint32_t token = static_cast<uint32_t>(first_row / a.n_heads);
  uint32_t end = static_cast<uint32_t>((first_row + n_rows - 1) / a.n_heads) + 1;
  while (token < end) {
    row_tokens tokens = tokens_from(a, token, end);
    score_tokens<S>(a, s, first_row, n_rows, tokens);
    token = tokens.end;
  }
}

static uint32_t common_divisor(uint32_t a, uint32_t b) {
  while (b) {
    uint32_t rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

// Tokens of decode have thread blocks of their own, those of prompts share them; a score has the
// same bits in either.
template <class S> static int launch_block_scores(const td_select_args *a, td_cu_stream stream) {
  enum { MANY_TOKENS = 4 }; // a sequence
  td_select_args args = *a;
  bool is_shared = a->batch.n_tokens > MANY_TOKENS * a->batch.n_seqs;
  args.tile_rows = at_most(is_shared ? UINT32_MAX : a->n_heads, S::ROWS);
  uint32_t step = a->block / common_divisor(a->block, TILE_KEYS) * TILE_KEYS; // whole blocks, tiles
  args.run_keys = step < RUN_KEYS ? RUN_KEYS / step * step : step;
  dim3 grid(ceil_div(a->stride * a->block, args.run_keys),
            ceil_div(static_cast<size_t>(a->batch.n_tokens) * a->n_heads, args.tile_rows));
  return TD_LAUNCH(block_scores_kernel<S>, grid, SCORE_THREADS, 0, stream, args);
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

__global__ static void select_kernel(td_select_args a) {
  __shared__ uint32_t count[DIGITS], n_above[SELECT_THREADS], n_level[SELECT_THREADS];
  __shared__ least last;
  uint32_t row = blockIdx.x, n_keys = seen_by(a, a.block ? row / a.n_heads : row);
  if (n_keys <= a.top_k) return;
  const float *scores = a.scores + static_cast<size_t>(row) * a.stride;
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
  int32_t *out = a.selected + static_cast<size_t>(row) * a.top_k;
  uint32_t at = n_above[threadIdx.x] + at_most(level, last.n);
  for (uint32_t i = begin; i < end; i++) {
    uint32_t rank = rank_of(scores[i]);
    bool is_in = rank > last.rank || (rank == last.rank && level < last.n);
    level += rank == last.rank;
    if (is_in && at < a.top_k) out[at++] = static_cast<int32_t>(i);
  }
}

static int launch_scores(const td_select_args *a, td_cu_stream stream) {
  if (a->block)
    return a->block % 8 ? launch_block_scores<rows_shape<16, 1>>(a, stream)
                        : launch_block_scores<rows_shape<64, 8>>(a, stream);
  dim3 grid(ceil_div(a->stride, RUN_KEYS), a->batch.n_tokens);
  return TD_LAUNCH(scores_kernel, grid, SCORE_THREADS, 0, stream, *a);
}

extern "C" int td_cu_select(const td_select_args *a, td_cu_stream stream) {
  td_select_args args = *a;
  uintptr_t places = reinterpret_cast<uintptr_t>(a->kv.pages) | a->kv.page_bytes;
  args.in_runs = in_runs(a->q, a->dim) && places % sizeof(uint4) == 0;
  int code = launch_scores(&args, stream);
  if (code != 0) return code;
  uint32_t n_rows = a->batch.n_tokens * (a->block ? a->n_heads : 1);
  return TD_LAUNCH(select_kernel, dim3(n_rows), SELECT_THREADS, 0, stream, args);
}

// ---- entries ----------------------------------------------------------------------------------

enum { GATHER_ROWS = 8 };

// One warp per row of token blockIdx.y; the first block also describes the token's page.
// The position of the row-th key of a selection, of a token that could see n_keys.
__device__ static uint32_t selected_at(const td_cu_select_gather_args &a, const int32_t *selected,
                                       uint32_t n_keys, uint32_t row) {
  if (!a.group) return static_cast<uint32_t>(selected[row]);
  const uint32_t of_group = row % a.group, i = row / a.group;
  if (i < a.top_k) return static_cast<uint32_t>(selected[i]) * a.group + of_group;
  return n_keys - n_keys % a.group + of_group;
}

__global__ static void select_gather_kernel(td_cu_select_gather_args a) {
  uint32_t t = blockIdx.y, n_keys = keys_of(a.batch, t), n = n_keys;
  const bool selects = n_keys > a.most;
  if (selects) n = a.group ? a.top_k * a.group + n_keys % a.group : a.top_k;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    a.seq[t] = a.page_table[t] = static_cast<int32_t>(t);
    a.position[t] = static_cast<int32_t>(n) - 1;
  }
  uint32_t row = blockIdx.x * GATHER_ROWS + threadIdx.x / WARP;
  if (row >= n) return;
  const int32_t *selected = a.selected + static_cast<size_t>(t) * a.top_k;
  uint32_t position = selects ? selected_at(a, selected, n_keys, row) : row;
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
  dim3 grid(ceil_div(a->most, GATHER_ROWS), a->batch.n_tokens);
  return TD_LAUNCH(select_gather_kernel, grid, GATHER_ROWS * WARP, 0, stream, args);
}
