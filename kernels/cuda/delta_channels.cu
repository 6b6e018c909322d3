// kernels/cuda/delta_channels.cu - the gated delta rule (device/device.h) of prompts whose states
// have a decay for each channel of the keys, a chunk of 16 positions at a time.
//
// As in delta_chunks.cu, but that g_i is a vector, and so is G_ij, the product of g_(j+1) .. g_i
// (arXiv 2510.26692, where decays are logarithms). With x y of vectors an element each:
//   A_ij = b_i k_i . (G_ij k_j) for j < i, T = (I + A)^-1, P_ij = q_i . (G_ij k_j) for j <= i
//   R_i = b_i (v_i - (G_i0 k_i) S), D = T R, out_i = (G_i0 q_i) S + P_i D
//   the next S = G_n0 S + sum of (G_nj k_j) d_j
// G is always a product of decays, never a quotient, and so at most 1, however strong decays are:
// nothing overflows, and what becomes 0 is less than FP32 has numbers for.
//
// relate_kernel: A and P in FP32, then T; a warp per head and chunk, to memory in two BF16 parts,
// since the four blocks of a head's tiles need them. For each j, G_ij k_j follows from that of i -
// 1 by a product, so there are 3 operations a channel and pair of i and j. Compiled for sm_90a, a
// chunk is 6,000 instructions: for 8192 tokens of Kimi-Linear (32 heads, 128 x 128) 0.11 ms of an
// H100 that issues one a clock. Memory: 32 KiB a token in, 4 KiB out, 0.09 ms at 3.35 TB/s.
//
// channels_kernel: S, from chunk to chunk. A block has a tile as in delta_chunks.cu, of which four
// warps keep S. Four others multiply keys and queries by decays and split the results: for what k
// and q find in S while S is being updated, for the update while it is read, so that one buffer
// does. The inputs of two chunks are on their way meanwhile. A chunk and tile are 324 mma.sync, 87
// GFLOP for the 8192 tokens, 0.14 ms where mma.sync has 62 % of the 989 TFLOPS of an H100. Memory:
// 52 KiB a token, 0.13 ms. One sequence has 128 blocks, of which two warps that share a scheduler
// issue 1,300 instructions a chunk: 0.38 ms at one a clock.
#include "kernels/cuda/delta_chunks.cuh"

enum { TOKENS = TD_CU_CHANNEL_CHUNK, HALF = TOKENS / 2, PAIRS = KEYS / 2 };
enum { SCALE_WARPS = 4, SCALE_THREADS = SCALE_WARPS * WARP, STATE_THREADS = STATE_WARPS * WARP };
enum { THREADS = STATE_THREADS + SCALE_THREADS, BUFFERS = 3, REST_BUFFERS = BUFFERS + 1 };
enum { ROW = TOKENS + CHUNK };                     // elements: rows that share few banks
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 // whose shared memory has room for two
enum { BLOCKS_OF_SM = 2 };
#else
enum { BLOCKS_OF_SM = 1 };
#endif
static_assert(TOKENS == 16 && int{SCALE_THREADS} == 2 * int{PAIRS}, "");

// T and P, and the parts of each.
enum { T_HIGH, T_LOW, P_HIGH, P_LOW, N_PRODUCTS };
enum { OF_PRODUCT = TOKENS * TOKENS, OF_PRODUCTS = N_PRODUCTS * OF_PRODUCT };
static_assert(int{OF_PRODUCTS} == int{TD_CU_CHANNEL_PRODUCTS}, "");

// The products of a chunk in slot `slot`.
__device__ static uint16_t *products_of(const td_delta_rule_op_args &a, size_t slot,
                                        uint32_t head) {
  return a.products + (slot * a.shape.n_v_heads + head) * OF_PRODUCTS;
}

__device__ static token_range range_of(const td_batch_view &b, uint32_t seq) {
  const int32_t first = b.q_begin[seq], end = b.q_begin[seq + 1];
  return {first, first < end ? b.position[first] : 0, static_cast<uint32_t>(end - first)};
}

// ---- T and P ------------------------------------------------------------------------------------

// Lane 8 g + s has 16 channels of the columns j with j % 4 == g: two runs, from 8 s on.
enum { RELATE_WARPS = 4, SLICES = 8, GROUPS = WARP / SLICES, COLUMNS = TOKENS / GROUPS };
enum { SLICE = KEYS / SLICES, SPAN = TOKENS + 4 };

struct matrix_of_chunk {
  alignas(16) float m[TOKENS][SPAN];
};

struct relate_shared {
  matrix_of_chunk a[RELATE_WARPS], p[RELATE_WARPS];
};

// A lane's channels of a token: those of a token that is not there, and channels past the last, are
// zeros that do not decay.
struct token_slice {
  float q[SLICE], k[SLICE], decay[SLICE], strength;
};

__device__ static void load_slice(const td_delta_rule_op_args &a, const rule_part &part,
                                  const token_range &r, int32_t token, token_slice &row) {
  const bool there = is_there(r, token);
  const uint32_t t = there ? static_cast<uint32_t>(r.first + token) : 0;
  const float *gates = gates_of(a, part, t);
#pragma unroll
  for (uint32_t run = 0; run < SLICE / RUN_OF_8; run++) {
    const uint32_t d = run * PANEL + threadIdx.x % SLICES * RUN_OF_8;
    const bool has = there && d < a.shape.k_dim;
    float q[RUN_OF_8] = {}, k[RUN_OF_8] = {};
    if (has) {
      load_run(a.qkv + q_of(a, part, t) + d, q);
      load_run(a.qkv + k_of(a, part, t) + d, k);
    }
#pragma unroll
    for (uint32_t e = 0; e < RUN_OF_8; e++) {
      row.q[run * RUN_OF_8 + e] = q[e];
      row.k[run * RUN_OF_8 + e] = k[e];
      row.decay[run * RUN_OF_8 + e] = has ? gates[d + e] : 1;
    }
  }
  row.strength = there ? gates[a.shape.k_dim] : 0;
}

__device__ static float sum_of_slices(float v) {
#pragma unroll
  for (int offset = 1; offset < SLICES; offset *= 2)
    v += __shfl_xor_sync(TD_FULL_WARP, v, offset);
  return v;
}

// G_ij k_j of row i from that of row i - 1.
__device__ static void decay_keys(const token_slice &row, bool is_new, float (&w)[SLICE]) {
#pragma unroll
  for (uint32_t e = 0; e < SLICE; e++)
    w[e] = is_new ? row.k[e] : product(row.decay[e], w[e]);
}

// A and P, with any numbers above their diagonals.
__device__ static void relate(const td_delta_rule_op_args &a, const rule_part &part,
                              const token_range &r, uint32_t idx, matrix_of_chunk &known,
                              matrix_of_chunk &asked) {
  const uint32_t slice = threadIdx.x % SLICES, group = threadIdx.x % WARP / SLICES;
  float w[COLUMNS][SLICE] = {};
#pragma unroll 1
  for (uint32_t rows = 0; rows < COLUMNS; rows++) {
#pragma unroll
    for (uint32_t of_rows = 0; of_rows < GROUPS; of_rows++) {
      const uint32_t i = rows * GROUPS + of_rows;
      token_slice row;
      load_slice(a, part, r, token_at<TOKENS>(r, idx, i), row);
#pragma unroll
      for (uint32_t m = 0; m < COLUMNS; m++) {
        if (m > rows) continue;
        if (m == rows) { // j <= i from lane to lane
          decay_keys(row, group >= of_rows, w[m]);
        } else {
          decay_keys(row, false, w[m]);
        }
        float k = 0, q = 0;
#pragma unroll
        for (uint32_t e = 0; e < SLICE; e++) {
          k = fmaf(row.k[e], w[m][e], k);
          q = fmaf(row.q[e], w[m][e], q);
        }
        k = sum_of_slices(k), q = sum_of_slices(q);
        if (slice != m) continue;
        known.m[i][GROUPS * m + group] = row.strength * k;
        asked.m[i][GROUPS * m + group] = q;
      }
    }
  }
  __syncwarp();
}

// T instead of A, a column a lane, by forward substitution.
__device__ static void invert(matrix_of_chunk &a) {
  const uint32_t column = threadIdx.x % TOKENS;
  float x[TOKENS];
#pragma unroll
  for (uint32_t i = 0; i < TOKENS; i++) {
    float sum = i == column ? 1 : 0;
#pragma unroll
    for (uint32_t j = 0; j < i; j += 4) {
      const four_floats of_row = *reinterpret_cast<const four_floats *>(&a.m[i][j]);
#pragma unroll
      for (uint32_t e = 0; e < 4 && j + e < i; e++)
        sum = fmaf(-of_row.v[e], x[j + e], sum);
    }
    x[i] = sum;
  }
  __syncwarp();
#pragma unroll
  for (uint32_t i = 0; i < TOKENS; i++)
    if (threadIdx.x % WARP < TOKENS) a.m[i][column] = x[i];
  __syncwarp();
}

// A matrix that is 0 above its diagonal, in two parts; eight elements a lane.
__device__ static void put_product(const matrix_of_chunk &of, uint16_t *to) {
  const uint32_t row = threadIdx.x % WARP / 2, first = threadIdx.x % 2 * RUN_OF_8;
  float v[RUN_OF_8];
  load_run(&of.m[row][first], v);
  uint32_t high[RUN_OF_8 / 2], low[RUN_OF_8 / 2];
#pragma unroll
  for (uint32_t e = 0; e < RUN_OF_8; e += 2)
    split(first + e <= row ? v[e] : 0, first + e + 1 <= row ? v[e + 1] : 0, high[e / 2],
          low[e / 2]);
  put_run(to + row * TOKENS + first, {high[0], high[1], high[2], high[3]});
  put_run(to + OF_PRODUCT + row * TOKENS + first, {low[0], low[1], low[2], low[3]});
}

// The sequence whose chunk may be in a slot.
__device__ static uint32_t seq_of_slot(const td_batch_view &b, size_t slot) {
  uint32_t seq = 0, end = b.n_seqs;
  while (end - seq > 1) {
    const uint32_t middle = (seq + end) / 2;
    if (td_cu_channel_slot(static_cast<uint32_t>(b.q_begin[middle]), middle) <= slot) {
      seq = middle;
    } else {
      end = middle;
    }
  }
  return seq;
}

// blockIdx: slot, heads.
__global__ static void __launch_bounds__(RELATE_WARPS *WARP)
    relate_kernel(td_delta_rule_op_args a) {
  __shared__ relate_shared s;
  const uint32_t warp = threadIdx.x / WARP, head = blockIdx.y * RELATE_WARPS + warp;
  const uint32_t slot = blockIdx.x, seq = seq_of_slot(a.batch, slot);
  const token_range r = range_of(a.batch, seq);
  const size_t idx = slot - td_cu_channel_slot(static_cast<uint32_t>(r.first), seq);
  if (head >= a.shape.n_v_heads || r.n == 0 || idx >= chunks_of<TOKENS>(r)) return;
  matrix_of_chunk &t = s.a[warp], &p = s.p[warp];
  relate(a, rule_part_of(a.shape, head, 0), r, static_cast<uint32_t>(idx), t, p);
  invert(t);
  uint16_t *to = products_of(a, slot, head);
  put_product(t, to + T_HIGH * OF_PRODUCT);
  put_product(p, to + P_HIGH * OF_PRODUCT);
}

// ---- inputs of a chunk --------------------------------------------------------------------------

// Pairs of channels. Zeros where there is no token, decays included, and past the last channel.
struct chunk_inputs {
  alignas(16) uint32_t k[TOKENS][PAIRS], q[TOKENS][PAIRS];
  alignas(16) float decay[TOKENS][KEYS];
};

// What is used as it is.
struct chunk_rest {
  alignas(16) uint16_t products[N_PRODUCTS][TOKENS][ROW], v[TOKENS][TILE + CHUNK];
  alignas(8) float strength[TOKENS];
};

struct split_panels {
  alignas(16) uint16_t high[KEYS / PANEL][TOKENS][PANEL], low[KEYS / PANEL][TOKENS][PANEL];
};

struct channels_shared {
  split_panels known, asked, kept; // G_i0 k_i, G_i0 q_i, G_nj k_j
  chunk_inputs inputs[BUFFERS];
  chunk_rest rest[REST_BUFFERS];
  alignas(8) float decay[KEYS];              // G_n0
  four_floats partial[STATE_WARPS][3][WARP]; // sums over a warp's half of the keys
};

__device__ static uint32_t scale_thread() {
  return threadIdx.x - STATE_THREADS;
}

// Starts copying a chunk's inputs, by the scaling warps.
__device__ static void fetch(const td_delta_rule_op_args &a, const rule_part &part,
                             const token_range &r, uint32_t idx, chunk_inputs &in,
                             chunk_rest &rest) {
  enum { OF_KEY = KEYS / CHUNK, OF_VALUE = TILE / CHUNK, OF_ROW = TOKENS / CHUNK };
  const uint32_t thread = scale_thread(), run = thread % OF_KEY;
  const ptrdiff_t channels = a.channels, first = r.first;
#pragma unroll
  for (uint32_t row = thread / OF_KEY; row < TOKENS; row += SCALE_THREADS / OF_KEY) {
    const int32_t token = token_at<TOKENS>(r, idx, row);
    const bool there = is_there(r, token) && run * CHUNK < a.shape.k_dim;
    const uint16_t *from = a.qkv + (first + token) * channels + run * CHUNK;
    copy_async(reinterpret_cast<uint16_t *>(&in.k[row][run * CHUNK / 2]), from + k_of(a, part, 0),
               there);
    copy_async(reinterpret_cast<uint16_t *>(&in.q[row][run * CHUNK / 2]), from + q_of(a, part, 0),
               there);
  }
  const ptrdiff_t of_token = static_cast<ptrdiff_t>(a.shape.n_v_heads) * (a.shape.k_dim + 1);
  const float *gates = gates_of(a, part, 0) + (first + token_at<TOKENS>(r, idx, 0)) * of_token;
  const float *decays = gates + thread;
#pragma unroll
  for (uint32_t row = 0; row < TOKENS; row++) {
    copy_async_value(&in.decay[row][thread], decays,
                     is_there(r, token_at<TOKENS>(r, idx, row)) && thread < a.shape.k_dim);
    decays += of_token;
  }
  const size_t slot = td_cu_channel_slot(static_cast<uint32_t>(r.first), blockIdx.z) + idx;
  const uint32_t product = thread / (TOKENS * OF_ROW), row = thread / OF_ROW % TOKENS;
  copy_async(&rest.products[product][row][thread % OF_ROW * CHUNK],
             products_of(a, slot, part.head) + thread * CHUNK, true);
  if (thread < TOKENS * OF_VALUE) {
    const uint32_t column = thread % OF_VALUE * CHUNK;
    const int32_t token = token_at<TOKENS>(r, idx, thread / OF_VALUE);
    copy_async(&rest.v[thread / OF_VALUE][column],
               a.qkv + (first + token) * channels + v_of(a, part, 0) + column,
               is_there(r, token) && part.column + column < a.shape.v_dim);
  } else if (thread < TOKENS * OF_VALUE + TOKENS) {
    const uint32_t of = thread % TOKENS;
    copy_async_value(&rest.strength[of], gates + of * of_token + a.shape.k_dim,
                     is_there(r, token_at<TOKENS>(r, idx, of)));
  }
}

// Two channels of a token, times decays, in two parts.
__device__ static void put_scaled(split_panels &to, uint32_t row, uint32_t pair, uint32_t bf16s,
                                  const float (&factor)[2]) {
  uint32_t high, low;
  split(product(f32_from_bf16(static_cast<uint16_t>(bf16s)), factor[0]),
        product(f32_from_bf16(static_cast<uint16_t>(bf16s >> 16)), factor[1]), high, low);
  const uint32_t in_chunk = pair % (CHUNK / 2) * 2;
  *reinterpret_cast<uint32_t *>(chunk_of(to.high, row, pair / (CHUNK / 2)) + in_chunk) = high;
  *reinterpret_cast<uint32_t *>(chunk_of(to.low, row, pair / (CHUNK / 2)) + in_chunk) = low;
}

// A chunk's decays of two channels, multiplied from token to token.
struct decay_walk {
  const chunk_inputs &in;
  const token_range &r;
  uint32_t idx, pair;
  float left[2];
};

__device__ static void pass_token(decay_walk &w, uint32_t row) {
  if (!is_there(w.r, token_at<TOKENS>(w.r, w.idx, row))) return;
  const pair_of_floats decay = pair_at(w.in.decay[row], 2 * w.pair);
#pragma unroll
  for (int c = 0; c < 2; c++)
    w.left[c] = product(w.left[c], decay.v[c]);
}

// G_i0 k_i and G_i0 q_i: two channels of half of the tokens a thread.
__device__ static void scale_from_start(const token_range &r, uint32_t idx, const chunk_inputs &in,
                                        channels_shared &s) {
  const uint32_t first = scale_thread() / PAIRS * HALF;
  decay_walk w = {in, r, idx, scale_thread() % PAIRS, {1, 1}};
#pragma unroll
  for (uint32_t row = 0; row < HALF; row++)
    if (first > 0) pass_token(w, row);
#pragma unroll
  for (uint32_t i = 0; i < HALF; i++) {
    const uint32_t row = first + i;
    pass_token(w, row);
    put_scaled(s.known, row, w.pair, in.k[row][w.pair], w.left);
    put_scaled(s.asked, row, w.pair, in.q[row][w.pair], w.left);
  }
}

// G_nj k_j likewise, and G_n0.
__device__ static void scale_to_end(const token_range &r, uint32_t idx, const chunk_inputs &in,
                                    channels_shared &s) {
  const uint32_t first = scale_thread() / PAIRS * HALF;
  decay_walk w = {in, r, idx, scale_thread() % PAIRS, {1, 1}};
#pragma unroll
  for (uint32_t row = TOKENS; row-- > HALF;)
    if (first == 0) pass_token(w, row);
#pragma unroll
  for (uint32_t i = HALF; i-- > 0;) {
    const uint32_t row = first + i;
    put_scaled(s.kept, row, w.pair, in.k[row][w.pair], w.left);
    pass_token(w, row);
  }
  if (first == 0)
    *reinterpret_cast<pair_of_floats *>(&s.decay[2 * w.pair]) = {{w.left[0], w.left[1]}};
}

// ---- states -------------------------------------------------------------------------------------

// Sums over keys, transposed: register c of tile n is at token 8 n + lane_column() + c % 2 and
// column_of(c).
struct token_sums {
  float known[TOKENS / 8][4]; // k S
  float asked[1][4];          // q S, of the eight tokens whose results the warp finishes
};

// The warp's share of them. What it has of the other eight tokens' goes to the warp with the other
// half of the keys, and all of known.
__device__ static void recall(const channels_shared &s, const warp_state &state,
                              four_floats (&partial)[3][WARP], token_sums &sums) {
  float known[TOKENS / 8][4] = {}, asked[TOKENS / 8][4] = {};
#pragma unroll
  for (uint32_t n = 0; n < STATE_TILES; n += 2) {
    const split_a part = split_sums(state.s[n], state.s[n + 1]);
    uint32_t high[4], low[4];
    load_rows(high, s.known.high + my_half(), 0, n);
    load_rows(low, s.known.low + my_half(), 0, n);
    multiply(known[0], known[1], part, high, low);
    load_rows(high, s.asked.high + my_half(), 0, n);
    load_rows(low, s.asked.low + my_half(), 0, n);
    multiply(asked[0], asked[1], part, high, low);
  }
  const uint32_t lane = threadIdx.x % WARP;
  const bool is_second = my_half() == 1;
  four_floats others;
#pragma unroll
  for (int c = 0; c < 4; c++) {
    sums.asked[0][c] = is_second ? asked[1][c] : asked[0][c];
    others.v[c] = is_second ? asked[0][c] : asked[1][c];
  }
  partial[2][lane] = others;
#pragma unroll
  for (int n = 0; n < TOKENS / 8; n++) {
    partial[n][lane] = {{known[n][0], known[n][1], known[n][2], known[n][3]}};
#pragma unroll
    for (int c = 0; c < 4; c++)
      sums.known[n][c] = known[n][c];
  }
}

__device__ static void add_partial(const four_floats (&partial)[3][WARP], token_sums &sums) {
  const uint32_t lane = threadIdx.x % WARP;
#pragma unroll
  for (int c = 0; c < 4; c++) {
    sums.known[0][c] += partial[0][lane].v[c];
    sums.known[1][c] += partial[1][lane].v[c];
    sums.asked[0][c] += partial[2][lane].v[c];
  }
}

// D, transposed, as an operand.
__device__ static split_a correct(const chunk_rest &in, const float (&known)[TOKENS / 8][4]) {
  const uint32_t lane = threadIdx.x % WARP, column = threadIdx.x / (2 * WARP) * 16;
  uint32_t v[4], high[4], low[4];
  load_matrices_turned(v, &in.v[lane % 8 + lane / 16 * 8][column + lane / 8 % 2 * CHUNK]);
  float rest[2][4], d[2][4] = {};
#pragma unroll
  for (int n = 0; n < 2; n++) {
    const pair_of_floats strength = pair_at(in.strength, 8 * n + lane_column());
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const float value = f32_from_bf16(static_cast<uint16_t>(v[2 * n + c / 2] >> c % 2 * 16));
      rest[n][c] = product(strength.v[c % 2], value - known[n][c]);
    }
  }
  load_rows(high, in.products[T_HIGH], 0, 0);
  load_rows(low, in.products[T_LOW], 0, 0);
  multiply(d[0], d[1], split_sums(rest[0], rest[1]), high, low);
  return split_sums(d[0], d[1]);
}

// Results of the eight tokens that the warp finishes.
__device__ static void finish(const chunk_rest &in, const split_a &d, float (&asked)[4]) {
  const uint32_t lane = threadIdx.x % WARP;
  uint32_t p[4]; // both parts
  load_matrices(
      p, &in.products[P_HIGH + lane / 16][HALF * my_half() + lane % 8][lane / 8 % 2 * CHUNK]);
  mma_bf16(asked, d.high, {p[2], p[3]});
  mma_bf16(asked, d.low, {p[0], p[1]});
  mma_bf16(asked, d.high, {p[0], p[1]});
}

// S = G_n0 S + sum_j (G_nj k_j) d_j.
__device__ static void advance(const channels_shared &s, const split_a &d, warp_state &state) {
#pragma unroll
  for (uint32_t n = 0; n < STATE_TILES; n += 2) {
    float more[2][4] = {};
    uint32_t high[4], low[4];
    load_b(high, s.kept.high + my_half(), 0, n);
    load_b(low, s.kept.low + my_half(), 0, n);
    multiply(more[0], more[1], d, high, low);
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
      const pair_of_floats decay = pair_at(s.decay, row_of(static_cast<int>(n + i), 0));
#pragma unroll
      for (int c = 0; c < 4; c++)
        state.s[n + i][c] = fmaf(decay.v[c % 2], state.s[n + i][c], more[i][c]);
    }
  }
}

// ---- the kernel ---------------------------------------------------------------------------------

// A block per tile, value head and sequence. In a step, the state passes chunk `step` - 1, chunk
// `step` is scaled, and the inputs of chunk `step` + 2 are asked for.
__global__ static void __launch_bounds__(THREADS, BLOCKS_OF_SM)
    channels_kernel(td_delta_rule_op_args a) {
  TD_DYNAMIC_SHARED(memory);
  auto &s = *reinterpret_cast<channels_shared *>(memory);
  const token_range r = range_of(a.batch, blockIdx.z);
  if (r.n == 0) return;
  const rule_part part = rule_part_of_block(a.shape);
  const uint32_t warp = threadIdx.x / WARP, n_chunks = chunks_of<TOKENS>(r);
  const size_t at = rule_tile_at(a);
  const bool is_state = warp < STATE_WARPS;
  warp_state state;
  token_sums sums;
  if (is_state) {
    const float *before = state_before(a.batch, a.state, blockIdx.z, r.begin);
    load_state(before ? before + at : nullptr, a.shape.k_dim, state);
  } else {
    for (uint32_t i = 0; i < 2; i++) {
      if (i < n_chunks) fetch(a, part, r, i, s.inputs[i], s.rest[i]);
      copy_async_commit();
    }
    copy_async_wait_for<1>();
  }
#pragma unroll 1
  for (uint32_t step = 0; step <= n_chunks; step++) {
    if (step > 0) {
      if (is_state) {
        recall(s, state, s.partial[warp], sums);
      } else {
        scale_to_end(r, step - 1, s.inputs[(step - 1) % BUFFERS], s);
      }
    }
    __syncthreads(); // shares of sums and `kept` are there; `known`, `asked` and inputs are free
    if (!is_state) {
      const uint32_t later = step + 2;
      if (later < n_chunks)
        fetch(a, part, r, later, s.inputs[later % BUFFERS], s.rest[later % REST_BUFFERS]);
      copy_async_commit();
      if (step < n_chunks) scale_from_start(r, step, s.inputs[step % BUFFERS], s);
      copy_async_wait_for<1>();
    } else if (step > 0) {
      const chunk_rest &rest = s.rest[(step - 1) % REST_BUFFERS];
      add_partial(s.partial[warp ^ 1], sums);
      const split_a d = correct(rest, sums.known);
      finish(rest, d, sums.asked[0]);
      advance(s, d, state);
      put_results<TOKENS>(a, part, r, step - 1, HALF * my_half(), sums.asked);
      keep_state<TOKENS>(a, r, step - 1, at, state);
    }
    __syncthreads(); // the next chunk's inputs, `known` and `asked` are there; `kept` is free
  }
}

extern "C" int td_cu_delta_channels(const td_delta_rule_op_args *a, td_cu_stream stream) {
  static_assert(sizeof(channels_shared) <= SHARED_BYTES, "");
  const td_batch_view &b = a->batch;
  const dim3 of_chunks(static_cast<uint32_t>(td_cu_channel_slot(b.n_tokens, b.n_seqs)),
                       ceil_div(a->shape.n_v_heads, RELATE_WARPS));
  if (int failed = TD_LAUNCH(relate_kernel, of_chunks, RELATE_WARPS * WARP, 0, stream, *a))
    return failed;
  if (int failed = allow_shared(channels_kernel, sizeof(channels_shared))) return failed;
  dim3 grid(ceil_div(a->shape.v_dim, TILE), a->shape.n_v_heads, b.n_seqs);
  return TD_LAUNCH(channels_kernel, grid, THREADS, sizeof(channels_shared), stream, *a);
}
