// kernels/cuda/delta_chunks.cu - the gated delta rule (device/device.h) of prompts, a chunk of 32
// positions at a time on tensor cores.
//
// Of a value head and a chunk, S is the state before it, token i has decay g_i and strength b_i,
// and G_ij = g_(j+1) .. g_i is what i sees of j; G_i0 of S. With k_i, q_i and v_i as rows of K, Q
// and V (arXiv 2412.06464, whose WY form keeps S out of T):
//   A_ij = b_i G_ij k_i k_j for j < i, T = (I + A)^-1, P_ij = G_ij q_i k_j for j <= i, others 0
//   R_i = b_i (v_i - G_i0 k_i S), D = T R, out_i = G_i0 q_i S + P_i D
//   the next S = G_n0 S + sum of k_j G_nj d_j
// K, Q and V are BF16. What is not (S, T, P, R, D) is multiplied as the sum of two BF16 numbers, so
// that a product errs by 2^-16 of its terms; sums and S are FP32. Chunks begin at multiples of 32
// positions, so results do not depend on cuts there, and on others by rounding.
//
// A block has a tile of 32 columns of a head's S. Four warps each keep 16 columns of half of its
// rows in registers, transposed: then registers of sums are those of the next product's operand.
// Meanwhile three warps compute T and P of the next chunk, and one loads the inputs of the one
// after; each of an SM's four tensor cores has one warp of the first kind. Qwen3-Next (32 heads,
// 128 x 128): a chunk and tile are 612 mma.sync, 82 GFLOP for 8192 tokens: 0.13 ms where mma.sync
// has 62 % of the 989 TFLOPS of an H100. Memory: 24.3 KiB a token, 0.06 ms. One sequence has 128
// blocks, of which two warps that share a scheduler issue up to 1400 instructions a chunk: 0.2 ms
// at one a clock.
#include "kernels/cuda/delta_chunks.cuh"

enum { TOKENS = TD_CU_DELTA_CHUNK, HALF = TOKENS / 2 };
enum { KEY_WARP = STATE_WARPS, LOW_WARP, QUERY_WARP, INPUT_WARP, N_WARPS };
enum { THREADS = N_WARPS * WARP, BUFFERS = 3 };
enum { SPAN = TOKENS + 4, ROW = TOKENS + CHUNK };  // rows that share few banks
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 // whose shared memory has room for two
enum { BLOCKS_OF_SM = 2 };
#else
enum { BLOCKS_OF_SM = 1 };
#endif
static_assert(int{TOKENS} == int{WARP} && HALF == 16, "");

// A chunk's inputs; zeros where it has no token. since: G_i0; until: G_nj.
struct chunk_inputs {
  alignas(128) uint16_t k[KEYS / PANEL][TOKENS][PANEL], q[KEYS / PANEL][TOKENS][PANEL];
  uint16_t v[TOKENS][ROW];
  float gates[TOKENS][2], since[TOKENS], until[TOKENS];
};

struct split_matrix {
  alignas(16) uint16_t high[TOKENS][ROW], low[TOKENS][ROW];
};

// Above its diagonal blocks of 16 x 16, t has the block of A that is below them.
struct chunk_products {
  split_matrix t, p;
};

struct chunks_shared {
  chunk_inputs inputs[BUFFERS];
  chunk_products products[2];
  alignas(16) float between[TOKENS][SPAN], a[TOKENS][SPAN]; // G; A's diagonal blocks
  four_floats partial[STATE_WARPS][6][WARP];                // sums over a warp's half of the keys
};

// ---- tokens -------------------------------------------------------------------------------------

// Starts copying a chunk's inputs, by one warp.
__device__ static void fetch(const td_delta_rule_op_args &a, const rule_part &part,
                             const token_range &r, uint32_t idx, chunk_inputs &in) {
  enum { OF_KEY = KEYS / CHUNK, OF_VALUE = TILE / CHUNK };
  const uint32_t lane = threadIdx.x % WARP, d = lane % OF_KEY * CHUNK;
  const ptrdiff_t channels = a.channels;
  const int32_t of_keys = token_at<TOKENS>(r, idx, lane / OF_KEY);
  const uint32_t n = d < a.shape.k_dim ? r.n : 0;
  const uint16_t *q = a.qkv + (r.first + of_keys) * channels + q_of(a, part, 0) + d;
  const uint16_t *k = a.qkv + (r.first + of_keys) * channels + k_of(a, part, 0) + d;
#pragma unroll
  for (int32_t i = 0; i < TOKENS; i += WARP / OF_KEY) {
    const bool there = static_cast<uint32_t>(of_keys + i) < n;
    const uint32_t row = static_cast<uint32_t>(i) + lane / OF_KEY;
    copy_async(chunk_of(in.k, row, lane % OF_KEY), k, there);
    copy_async(chunk_of(in.q, row, lane % OF_KEY), q, there);
    q += WARP / OF_KEY * channels, k += WARP / OF_KEY * channels;
  }
  const uint32_t column = lane % OF_VALUE * CHUNK;
  const int32_t of_values = token_at<TOKENS>(r, idx, lane / OF_VALUE);
  const bool has_column = part.column + column < a.shape.v_dim;
  const uint16_t *v = a.qkv + (r.first + of_values) * channels + v_of(a, part, 0) + column;
#pragma unroll
  for (int32_t i = 0; i < TOKENS; i += WARP / OF_VALUE) {
    copy_async(&in.v[i + static_cast<int32_t>(lane / OF_VALUE)][column], v,
               is_there(r, of_values + i) && has_column);
    v += WARP / OF_VALUE * channels;
  }
  const int32_t token = token_at<TOKENS>(r, idx, lane);
  const ptrdiff_t pairs = 2 * static_cast<ptrdiff_t>(a.shape.n_v_heads);
  const float *gates = gates_of(a, part, 0) + (r.first + token) * pairs;
#pragma unroll
  for (int i = 0; i < 2; i++)
    copy_async_value(&in.gates[lane][i], gates + i, is_there(r, token));
  copy_async_commit();
}

// Waits for the inputs, by the warp that has fetched them, and makes G, whose column each lane has,
// with zeros above the diagonal.
__device__ static void decay_between(const token_range &r, uint32_t idx, chunk_inputs &in,
                                     float (&between)[TOKENS][SPAN]) {
  copy_async_wait(); // a lane's own decay is among what it has copied
  const uint32_t lane = threadIdx.x % WARP;
  const float decay = is_there(r, token_at<TOKENS>(r, idx, lane)) ? in.gates[lane][0] : 1;
  float left = 0;
#pragma unroll 8
  for (uint32_t i = 0; i < TOKENS; i++) {
    left = product(left, __shfl_sync(TD_FULL_WARP, decay, i));
    if (i == lane) left = 1;
    between[i][lane] = left;
  }
  __syncwarp();
  in.until[lane] = left;
  in.since[lane] = product(between[lane][0], __shfl_sync(TD_FULL_WARP, decay, 0));
}

// ---- T and P ------------------------------------------------------------------------------------

__device__ static void put_split(split_matrix &m, uint32_t row, uint32_t column, float x, float y) {
  uint32_t high, low;
  split(x, y, high, low);
  *reinterpret_cast<uint32_t *>(&m.high[row][column]) = high;
  *reinterpret_cast<uint32_t *>(&m.low[row][column]) = low;
}

// Two 16x8 tiles side by side.
struct block_sums {
  float tile[2][4];
};

// Registers 2 h and 2 h + 1 of tile i times G, which is from `row` and `column` on; and where in
// the block they are.
__device__ static pair_of_floats decayed(const block_sums &sums, int i, int h,
                                         const float (&between)[TOKENS][SPAN], uint32_t row,
                                         uint32_t column) {
  const pair_of_floats decay = pair_at(between[row + lane_row() + 8 * h],
                                       column + 8 * i + lane_column());
  return {{sums.tile[i][2 * h] * decay.v[0], sums.tile[i][2 * h + 1] * decay.v[1]}};
}

// Zeros above P's diagonal blocks, where nothing else is written.
__device__ static void clear_corner(split_matrix &p) {
  const uint32_t lane = threadIdx.x % WARP;
#pragma unroll
  for (uint32_t column = HALF; column < TOKENS; column += CHUNK)
    put_run(&(lane < HALF ? p.high : p.low)[lane % HALF][column], {0, 0, 0, 0});
}

// P's block from `row` and `column` on.
__device__ static void put_block(const block_sums &sums, const float (&between)[TOKENS][SPAN],
                                 uint32_t row, uint32_t column, split_matrix &p) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const pair_of_floats x = decayed(sums, i, h, between, row, column);
      put_split(p, row + lane_row() + 8 * h, column + 8 * i + lane_column(), x.v[0], x.v[1]);
    }
  }
}

// P's last 16 rows.
__device__ static void relate_queries(const chunk_inputs &in, const float (&between)[TOKENS][SPAN],
                                      split_matrix &p) {
  block_sums left = {}, right = {};
#pragma unroll
  for (uint32_t k = 0; k < KEYS / CHUNK; k += 2) {
    uint32_t rows[4], keys[4];
    load_a(rows, in.q, HALF, k);
    load_rows(keys, in.k, 0, k);
    multiply(left.tile[0], left.tile[1], rows, keys);
    load_rows(keys, in.k, HALF, k);
    multiply(right.tile[0], right.tile[1], rows, keys);
  }
  put_block(left, between, HALF, 0, p);
  put_block(right, between, HALF, HALF, p);
}

// P's first 16 rows, and to T's free corner A's block below the diagonal ones.
__device__ static void relate_low(const chunk_inputs &in, const float (&between)[TOKENS][SPAN],
                                  split_matrix &p, split_matrix &t) {
  block_sums first = {}, below = {};
#pragma unroll
  for (uint32_t k = 0; k < KEYS / CHUNK; k += 2) {
    uint32_t rows[4], keys[4];
    load_rows(keys, in.k, 0, k);
    load_a(rows, in.q, 0, k);
    multiply(first.tile[0], first.tile[1], rows, keys);
    load_a(rows, in.k, HALF, k);
    multiply(below.tile[0], below.tile[1], rows, keys);
  }
  put_block(first, between, 0, 0, p);
#pragma unroll
  for (int i = 0; i < 2; i++) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const pair_of_floats x = decayed(below, i, h, between, HALF, 0);
      const uint32_t row = lane_row() + 8 * h;
      const float strength = in.gates[HALF + row][1];
      put_split(t, row, HALF + 8 * i + lane_column(), strength * x.v[0], strength * x.v[1]);
    }
  }
}

// A's diagonal blocks.
__device__ static void relate_keys(const chunk_inputs &in, const float (&between)[TOKENS][SPAN],
                                   float (&a)[TOKENS][SPAN]) {
  block_sums sums[2] = {};
#pragma unroll
  for (uint32_t k = 0; k < KEYS / CHUNK; k += 2) {
#pragma unroll
    for (uint32_t block = 0; block < 2; block++) {
      uint32_t rows[4], keys[4];
      load_a(rows, in.k, HALF * block, k);
      load_rows(keys, in.k, HALF * block, k);
      multiply(sums[block].tile[0], sums[block].tile[1], rows, keys);
    }
  }
#pragma unroll
  for (int e = 0; e < 8; e++) {
    const uint32_t block = e / 4, i = e / 2 % 2, h = e % 2;
    const uint32_t row = lane_row() + 8 * h, column = 8 * i + lane_column(), first = HALF * block;
    const pair_of_floats x = decayed(sums[block], static_cast<int>(i), static_cast<int>(h), between,
                                     first, first);
    const float strength = in.gates[first + row][1];
    *reinterpret_cast<pair_of_floats *>(&a[first + row][first + column]) = {
        {column < row ? strength * x.v[0] : 0, column + 1 < row ? strength * x.v[1] : 0}};
  }
}

// T's diagonal blocks, a column a lane, by forward substitution in FP32.
__device__ static void invert_blocks(const float (&a)[TOKENS][SPAN], split_matrix &t) {
  const uint32_t first = threadIdx.x % WARP / HALF * HALF, column = threadIdx.x % HALF;
  float x[HALF];
#pragma unroll
  for (uint32_t i = 0; i < HALF; i++) {
    float sum = i == column ? 1 : 0;
#pragma unroll
    for (uint32_t m = 0; m < i; m += 4) {
      const four_floats of_row = *reinterpret_cast<const four_floats *>(&a[first + i][first + m]);
#pragma unroll
      for (uint32_t e = 0; e < 4 && m + e < i; e++)
        sum = fmaf(-of_row.v[e], x[m + e], sum);
    }
    x[i] = sum;
  }
#pragma unroll
  for (uint32_t i = 0; i < HALF; i++) {
    const uint16_t high = bf16_from_f32(x[i]);
    t.high[first + i][first + column] = high;
    t.low[first + i][first + column] = bf16_from_f32(x[i] - f32_from_bf16(high));
  }
  __syncwarp();
}

// T from A: of blocks [[T1, 0], [-T2 A21 T1, T2]].
__device__ static void invert(const float (&a)[TOKENS][SPAN], split_matrix &t) {
  invert_blocks(a, t);
  const uint32_t lane = threadIdx.x % WARP;
  split_a second;
  load_matrices(second.high, &t.high[HALF + lane % 16][HALF + lane / 16 * CHUNK]);
  load_matrices(second.low, &t.low[HALF + lane % 16][HALF + lane / 16 * CHUNK]);
  uint32_t high[4], low[4];
  float left[4] = {}, right[4] = {};
  load_b(high, t.high, 0, HALF);
  load_b(low, t.low, 0, HALF);
  multiply(left, right, second, high, low);
  const split_a both = split_sums(left, right);
  float sum[2][4] = {};
  load_b(high, t.high, 0, 0);
  load_b(low, t.low, 0, 0);
  multiply(sum[0], sum[1], both, high, low);
#pragma unroll
  for (int e = 0; e < 2; e++) {
#pragma unroll
    for (int h = 0; h < 2; h++)
      put_split(t, HALF + lane_row() + 8 * h, 8 * e + lane_column(), -sum[e][2 * h],
                -sum[e][2 * h + 1]);
  }
}

// ---- states -------------------------------------------------------------------------------------

// Sums over keys, transposed: register c of tile n is at token 8 n + lane_column() + c % 2 and
// column_of(c).
struct token_sums {
  float known[TOKENS / 8][4]; // k S
  float asked[HALF / 8][4];   // q S, of the 16 tokens whose results the warp finishes
};

// The warp's share of them. What it has of the other 16 tokens' goes to the warp with the other
// half of the keys, and all of known.
__device__ static void recall(const chunk_inputs &in, const warp_state &state,
                              four_floats (&partial)[6][WARP], token_sums &sums) {
  float known[TOKENS / 8][4] = {}, asked[TOKENS / 8][4] = {};
#pragma unroll
  for (uint32_t n = 0; n < STATE_TILES; n += 2) {
    const split_a part = split_sums(state.s[n], state.s[n + 1]);
#pragma unroll
    for (uint32_t j = 0; j < 2; j++) {
      uint32_t b[4];
      load_rows(b, in.k + my_half(), HALF * j, n);
      multiply(known[2 * j], known[2 * j + 1], part, b);
      load_rows(b, in.q + my_half(), HALF * j, n);
      multiply(asked[2 * j], asked[2 * j + 1], part, b);
    }
  }
  const uint32_t lane = threadIdx.x % WARP;
#pragma unroll
  for (int n = 0; n < TOKENS / 8; n++) {
    partial[n][lane] = {{known[n][0], known[n][1], known[n][2], known[n][3]}};
#pragma unroll
    for (int c = 0; c < 4; c++)
      sums.known[n][c] = known[n][c];
  }
  const bool is_second = my_half() == 1;
#pragma unroll
  for (int n = 0; n < HALF / 8; n++) {
    four_floats others;
#pragma unroll
    for (int c = 0; c < 4; c++) {
      sums.asked[n][c] = is_second ? asked[2 + n][c] : asked[n][c];
      others.v[c] = is_second ? asked[n][c] : asked[2 + n][c];
    }
    partial[TOKENS / 8 + n][lane] = others;
  }
}

__device__ static void add_partial(const four_floats (&partial)[6][WARP], token_sums &sums) {
  const uint32_t lane = threadIdx.x % WARP;
#pragma unroll
  for (int n = 0; n < TOKENS / 8; n++) {
    const four_floats more = partial[n][lane];
#pragma unroll
    for (int c = 0; c < 4; c++)
      sums.known[n][c] += more.v[c];
  }
#pragma unroll
  for (int n = 0; n < HALF / 8; n++) {
    const four_floats more = partial[TOKENS / 8 + n][lane];
#pragma unroll
    for (int c = 0; c < 4; c++)
      sums.asked[n][c] += more.v[c];
  }
}

// D, transposed as token_sums.
__device__ static void correct(const chunk_inputs &in, const split_matrix &t,
                               const float (&known)[TOKENS / 8][4], float (&d)[TOKENS / 8][4]) {
  const uint32_t lane = threadIdx.x % WARP, column = threadIdx.x / (2 * WARP) * 16;
  split_a rest[2];
#pragma unroll
  for (uint32_t j = 0; j < 2; j++) {
    uint32_t v[4];
    load_matrices_turned(v,
                         &in.v[HALF * j + lane % 8 + lane / 16 * 8][column + lane / 8 % 2 * CHUNK]);
    float r[2][4];
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const uint32_t token = HALF * j + 8 * n + lane_column();
      const pair_of_floats since = pair_at(in.since, token);
      const float strength[2] = {in.gates[token][1], in.gates[token + 1][1]};
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const float value = f32_from_bf16(static_cast<uint16_t>(v[2 * n + c / 2] >> c % 2 * 16));
        const float had = known[2 * j + n][c];
        r[n][c] = product(strength[c % 2], fmaf(-since.v[c % 2], had, value));
      }
    }
    rest[j] = split_sums(r[0], r[1]);
  }
  float more[2][4] = {}; // in a sum of its own, or one would wait for the other
  uint32_t high[4], low[4];
#pragma unroll
  for (int n = 0; n < TOKENS / 8; n++)
    d[n][0] = d[n][1] = d[n][2] = d[n][3] = 0;
#pragma unroll
  for (uint32_t i = 0; i < 2; i++) {
    load_rows(high, t.high, HALF * i, 0);
    load_rows(low, t.low, HALF * i, 0);
    multiply(d[2 * i], d[2 * i + 1], rest[0], high, low);
  }
  load_rows(high, t.high, HALF, HALF);
  load_rows(low, t.low, HALF, HALF);
  multiply(more[0], more[1], rest[1], high, low);
#pragma unroll
  for (int c = 0; c < 8; c++)
    d[2 + c / 4][c % 4] += more[c / 4][c % 4];
}

// S = G_n0 S + sum_j k_j G_nj d_j.
__device__ static void advance(const chunk_inputs &in, const float (&d)[TOKENS / 8][4],
                               warp_state &state) {
  split_a left[2];
#pragma unroll
  for (int j = 0; j < 2; j++) {
    float kept[2][4];
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const pair_of_floats until = pair_at(in.until, HALF * j + 8 * n + lane_column());
#pragma unroll
      for (int c = 0; c < 4; c++)
        kept[n][c] = product(until.v[c % 2], d[2 * j + n][c]);
    }
    left[j] = split_sums(kept[0], kept[1]);
  }
  const float decay = in.since[TOKENS - 1];
#pragma unroll
  for (uint32_t n = 0; n < STATE_TILES; n += 2) {
    float more[2][4] = {};
#pragma unroll
    for (uint32_t j = 0; j < 2; j++) {
      uint32_t b[4];
      load_b(b, in.k + my_half(), HALF * j, n);
      multiply(more[0], more[1], left[j], b);
    }
#pragma unroll
    for (int c = 0; c < 8; c++) {
      float *s = &state.s[n + c / 4][c % 4];
      *s = fmaf(decay, *s, more[c / 4][c % 4]);
    }
  }
}

// Results of the 16 tokens that the warp finishes, with d of all.
__device__ static void finish(const chunk_inputs &in, const split_matrix &p,
                              const float (&d)[TOKENS / 8][4], float (&asked)[HALF / 8][4]) {
#pragma unroll
  for (int n = 0; n < HALF / 8; n++) {
    const pair_of_floats since = pair_at(in.since, HALF * my_half() + 8 * n + lane_column());
#pragma unroll
    for (int c = 0; c < 4; c++)
      asked[n][c] = product(since.v[c % 2], asked[n][c]);
  }
#pragma unroll
  for (uint32_t j = 0; j < 2; j++) {
    const split_a of_tokens = split_sums(d[2 * j], d[2 * j + 1]);
    uint32_t high[4], low[4];
    load_rows(high, p.high, HALF * my_half(), HALF * j);
    load_rows(low, p.low, HALF * my_half(), HALF * j);
    multiply(asked[0], asked[1], of_tokens, high, low);
  }
}

// ---- the kernel ---------------------------------------------------------------------------------

// A block per tile, value head and sequence. In a step, the state passes chunk `step` - 1 while T
// and P of chunk `step` are made, and the inputs of chunk `step` + 1 arrive.
__global__ static void __launch_bounds__(THREADS, BLOCKS_OF_SM)
    chunks_kernel(td_delta_rule_op_args a) {
  TD_DYNAMIC_SHARED(memory);
  auto &s = *reinterpret_cast<chunks_shared *>(memory);
  const int32_t first = a.batch.q_begin[blockIdx.z], end = a.batch.q_begin[blockIdx.z + 1];
  if (first >= end) return;
  const int32_t begin = a.batch.position[first];
  const token_range r = {first, begin, static_cast<uint32_t>(end - first)};
  const rule_part part = rule_part_of_block(a.shape);
  const uint32_t warp = threadIdx.x / WARP, n_chunks = chunks_of<TOKENS>(r);
  const size_t at = rule_tile_at(a);
  warp_state state;
  token_sums sums;
  if (warp == INPUT_WARP) {
    fetch(a, part, r, 0, s.inputs[0]);
    decay_between(r, 0, s.inputs[0], s.between);
  } else if (warp == QUERY_WARP) {
    clear_corner(s.products[0].p);
    clear_corner(s.products[1].p);
  } else if (warp < STATE_WARPS) {
    const float *before = state_before(a.batch, a.state, blockIdx.z, begin);
    load_state(before ? before + at : nullptr, a.shape.k_dim, state);
  }
#pragma unroll 1
  for (uint32_t step = 0; step <= n_chunks; step++) {
    const bool is_state = warp < STATE_WARPS && step > 0, has_more = step + 1 < n_chunks;
    const chunk_inputs &now = s.inputs[(step + BUFFERS - 1) % BUFFERS];
    const chunk_inputs &next = s.inputs[step % BUFFERS];
    chunk_inputs &later = s.inputs[(step + 1) % BUFFERS];
    chunk_products &made = s.products[step % 2], &with = s.products[(step + 1) % 2];
    __syncthreads(); // `next`, G and `with` are there; what chunk `step` - 2 used is free
    if (is_state) recall(now, state, s.partial[warp], sums);
    if (warp == INPUT_WARP && has_more) fetch(a, part, r, step + 1, later);
    if (step < n_chunks) {
      if (warp == KEY_WARP) relate_keys(next, s.between, s.a);
      if (warp == LOW_WARP) relate_low(next, s.between, made.p, made.t);
      if (warp == QUERY_WARP) relate_queries(next, s.between, made.p);
    }
    __syncthreads(); // shares of sums and A are there; G is free
    if (warp == KEY_WARP && step < n_chunks) invert(s.a, made.t);
    if (warp == INPUT_WARP && has_more) decay_between(r, step + 1, later, s.between);
    if (!is_state) continue;
    float d[TOKENS / 8][4];
    add_partial(s.partial[warp ^ 1], sums);
    correct(now, with.t, sums.known, d);
    finish(now, with.p, d, sums.asked);
    advance(now, d, state);
    put_results<TOKENS>(a, part, r, step - 1, HALF * my_half(), sums.asked);
    keep_state<TOKENS>(a, r, step - 1, at, state);
  }
}

extern "C" int td_cu_delta_chunks(const td_delta_rule_op_args *a, td_cu_stream stream) {
  static_assert(sizeof(chunks_shared) <= SHARED_BYTES, "");
  if (int failed = allow_shared(chunks_kernel, sizeof(chunks_shared))) return failed;
  dim3 grid(ceil_div(a->shape.v_dim, TILE), a->shape.n_v_heads, a->batch.n_seqs);
  return TD_LAUNCH(chunks_kernel, grid, THREADS, sizeof(chunks_shared), stream, *a);
}
