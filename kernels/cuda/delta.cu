// kernels/cuda/delta.cu - gated delta nets (device/device.h): the causal convolution with what
// belongs to it, the recurrence over tokens, and gates.
//
// td_cu_delta_conv, per token: x bf16 [channels] and the n_taps - 1 rows before it, conv f32
// [n_taps][channels], out bf16 [channels]; 2 * n_taps operations and some ten for SiLU and norm an
// element. Qwen3-Next (16 heads of keys and 32 of values, 128 wide, 4 taps): 8192 channels, 16 KiB
// in and 16 KiB out a token and layer, so memory is the limit: 10 ns at 3.35 TB/s.
//
// td_cu_delta_rule, per value head and token, S f32 [k_dim][v_dim], q, k, v bf16, out bf16:
//   d = strength * (v - decay * k S),  S = decay * S + k d^T,  out = q S
// where a decay may be that of a row of S each, and k S then one of k times the decays.
// That is 7 operations an element of S. S is read and written once a launch and sequence, 2 x 2 MiB
// for the 32 heads of Qwen3-Next: a step of decode is at best 1.25 us a sequence and layer at
// 3.35 TB/s, and 0.63 us more for each drafted token, whose state is written to the trail. Tokens
// follow one another with S in registers, so results do not depend on how a sequence is cut into
// steps. Prompts whose shape they take go through delta_chunks.cu and delta_channels.cu.
#include "kernels/cuda/delta.cuh"

#define NORM_EPS 1e-6f // of queries and keys

// ---- states -------------------------------------------------------------------------------------

// Of the tokens from t to `end` of a sequence, how many are in the page of the first, whose
// position is given.
__device__ static int32_t in_page(const td_batch_view &b, int32_t position, int32_t n) {
  int32_t left = static_cast<int32_t>(b.page_tokens -
                                      static_cast<uint32_t>(position) % b.page_tokens);
  return n < left ? n : left;
}

// ---- the convolution ----------------------------------------------------------------------------

enum { CONV_WARPS = 4, CONV_LANE = 4, CONV_PIECE = CONV_LANE * WARP };
enum { CONV_TOKENS = 8, CONV_MANY = 512 }; // tokens a warp takes of a batch of at least so many
static_assert(int{TD_CU_DELTA_KEYS} <= int{CONV_PIECE}, "a warp's registers hold a head of keys");

// Channels [channel, channel + n) of the convolution, whose inputs are at `input` of a token's row.
struct conv_head {
  size_t input;
  uint32_t channel, n;
};

// Heads of queries, of keys and of values follow one another.
__device__ static conv_head conv_head_of(const td_delta_conv_args &a, uint32_t head) {
  const td_delta_shape &s = a.shape;
  if (head < 2 * s.n_k_heads) {
    const td_row_part &part = head < s.n_k_heads ? a.q : a.k;
    return {part.offset + head % s.n_k_heads * part.stride, head * s.k_dim, s.k_dim};
  }
  uint32_t v = head - 2 * s.n_k_heads, of_group = s.n_v_heads / s.n_k_heads;
  return {a.v.offset + v / of_group * a.v.stride + static_cast<size_t>(v % of_group) * s.v_dim,
          2 * s.n_k_heads * s.k_dim + v * s.v_dim, s.v_dim};
}

// The tokens before a sequence's first one of the step.
struct conv_past {
  const float *state; // NULL: zeros
  int32_t first;      // the sequence's first token of the step
};

__device__ static conv_past past_of(const td_delta_conv_args &a, uint32_t seq) {
  int32_t first = a.batch.q_begin[seq];
  return {state_before(a.batch, a.state, seq, a.batch.position[first]), first};
}

// Input of a channel at token t, which may be up to n_taps - 1 before the first.
__device__ static float input_at(const td_delta_conv_args &a, const conv_past &past, int32_t t,
                                 size_t input, uint32_t channel) {
  if (t >= past.first) return f32_from_bf16(a.x[static_cast<size_t>(t) * a.x_stride + input]);
  int32_t row = t - past.first + static_cast<int32_t>(a.shape.n_taps) - 1;
  return past.state ? past.state[static_cast<size_t>(row) * a.channels + channel] : 0;
}

// Up to CONV_PIECE channels of a head, from channel `from` of it on. TAPS 0: any number.
template <int TAPS>
__device__ static void convolve(const td_delta_conv_args &a, const conv_head &head, uint32_t from,
                                int32_t t, const conv_past &past, float (&out)[CONV_LANE]) {
  const int32_t n_taps = TAPS ? TAPS : static_cast<int32_t>(a.shape.n_taps);
#pragma unroll
  for (int i = 0; i < CONV_LANE; i++) {
    uint32_t c = from + threadIdx.x % WARP + i * WARP;
    out[i] = 0;
    if (c >= head.n) continue;
#pragma unroll
    for (int32_t j = 0; j < n_taps; j++) {
      float x = input_at(a, past, t + j - n_taps + 1, head.input + c, head.channel + c);
      out[i] = fmaf(a.conv[static_cast<size_t>(j) * a.channels + head.channel + c], x, out[i]);
    }
    out[i] /= 1 + expf(-out[i]);
  }
}

// Queries and keys divided by their norms, queries by sqrt(k_dim) too.
__device__ static void divide_by_norm(float (&x)[CONV_LANE], uint32_t k_dim, bool is_query) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < CONV_LANE; i++)
    sum = fmaf(x[i], x[i], sum);
  float factor = 1 / sqrtf(warp_sum(sum) + NORM_EPS);
  if (is_query) factor /= sqrtf(static_cast<float>(k_dim));
#pragma unroll
  for (int i = 0; i < CONV_LANE; i++)
    x[i] *= factor;
}

__device__ static float bounded_decay(float x, float rate, float bound) {
  return expf(bound / (1 + expf(-rate * x)));
}

__device__ static float decay_of(float x, float rate) {
  return expf(-rate * (x > 20 ? x : log1pf(expf(x))));
}

// A lane per channel of value head h.
__device__ static void gates_of_head(const td_delta_conv_args &a, uint32_t t, uint32_t h) {
  const uint32_t of_group = a.shape.n_v_heads / a.shape.n_k_heads, k_dim = a.shape.k_dim;
  const uint16_t *row = a.x + t * a.x_stride;
  const size_t group = h / of_group, i = h % of_group;
  const uint16_t *x = row + a.a.offset + group * a.a.stride + i * k_dim;
  const float *bias = a.bias + static_cast<size_t>(h) * k_dim, rate = expf(a.decay[h]);
  float *gates = a.gates + (static_cast<size_t>(t) * a.shape.n_v_heads + h) * (k_dim + 1);
  for (uint32_t c = threadIdx.x % WARP; c < k_dim; c += WARP) {
    const float decay = f32_from_bf16(x[c]) + bias[c];
    gates[c] = a.bound < 0 ? bounded_decay(decay, rate, a.bound) : decay_of(decay, rate);
  }
  const float strength = f32_from_bf16(row[a.b.offset + group * a.b.stride + i]);
  if (threadIdx.x % WARP == 0) gates[k_dim] = 1 / (1 + expf(-strength));
}

// A lane per value head, from head h0 on.
__device__ static void gates_of_token(const td_delta_conv_args &a, uint32_t t, uint32_t h0) {
  uint32_t h = h0 + threadIdx.x % WARP, of_group = a.shape.n_v_heads / a.shape.n_k_heads;
  if (h >= a.shape.n_v_heads) return;
  const uint16_t *row = a.x + t * a.x_stride;
  size_t group = h / of_group, i = h % of_group;
  float decay = f32_from_bf16(row[a.a.offset + group * a.a.stride + i]) + a.bias[h];
  float strength = f32_from_bf16(row[a.b.offset + group * a.b.stride + i]);
  float *gates = a.gates + (static_cast<size_t>(t) * a.shape.n_v_heads + h) * 2;
  gates[0] = decay_of(decay, expf(a.decay[h]));
  gates[1] = 1 / (1 + expf(-strength));
}

// A warp per head and some tokens; the warps after the heads have the gates of 32 heads each, or of
// one that has a decay for each channel.
template <int TAPS> __global__ static void conv_kernel(td_delta_conv_args a) {
  uint32_t head_idx = blockIdx.y * CONV_WARPS + threadIdx.x / WARP;
  uint32_t n_heads = 2 * a.shape.n_k_heads + a.shape.n_v_heads;
  uint32_t n = (a.batch.n_tokens + gridDim.x - 1) / gridDim.x, begin = blockIdx.x * n;
  uint32_t end = at_most(begin + n, a.batch.n_tokens);
  if (head_idx >= n_heads) {
    const uint32_t i = head_idx - n_heads;
    for (uint32_t t = begin; t < end; t++) {
      if (!a.shape.by_channel) {
        gates_of_token(a, t, i * WARP);
      } else if (i < a.shape.n_v_heads) {
        gates_of_head(a, t, i);
      }
    }
    return;
  }
  const conv_head head = conv_head_of(a, head_idx);
  for (uint32_t from = 0; from < head.n; from += CONV_PIECE) {
    for (uint32_t t = begin; t < end; t++) {
      const conv_past past = past_of(a, static_cast<uint32_t>(a.batch.seq[t]));
      float x[CONV_LANE];
      convolve<TAPS>(a, head, from, static_cast<int32_t>(t), past, x);
      if (head_idx < 2 * a.shape.n_k_heads)
        divide_by_norm(x, a.shape.k_dim, head_idx < a.shape.n_k_heads);
#pragma unroll
      for (int i = 0; i < CONV_LANE; i++) {
        uint32_t c = from + threadIdx.x % WARP + i * WARP;
        if (c < head.n)
          a.out[static_cast<size_t>(t) * a.channels + head.channel + c] = bf16_from_f32(x[i]);
      }
    }
  }
}

// The last inputs of each page's tokens into its state. A thread per channel, blockIdx.y: sequence,
// blockIdx.z: the page, counted from the sequence's first one of the step. The first block also
// fills the trail, and pages whose state still has rows from before the step, since it alone has
// read those before they are overwritten. Runs after conv_kernel.
__global__ static void conv_states_kernel(td_delta_conv_args a) {
  uint32_t seq = blockIdx.y, c = blockIdx.x * blockDim.x + threadIdx.x, head_idx;
  int32_t first = a.batch.q_begin[seq], end = a.batch.q_begin[seq + 1];
  if (c >= a.channels || first >= end) return;
  uint32_t keys = 2 * a.shape.n_k_heads * a.shape.k_dim;
  head_idx = c < keys ? c / a.shape.k_dim : 2 * a.shape.n_k_heads + (c - keys) / a.shape.v_dim;
  const conv_head head = conv_head_of(a, head_idx);
  const size_t input = head.input + c - head.channel;
  const conv_past past = past_of(a, seq);
  const int32_t n_past = static_cast<int32_t>(a.shape.n_taps) - 1;
  float old[TD_DELTA_MAX_TAPS];
  for (int32_t i = 0; i < n_past && blockIdx.z == 0; i++)
    old[i] = input_at(a, past, first - n_past + i, input, c);
  for (int32_t t = first; a.trail.slots && blockIdx.z == 0 && t < end; t++) {
    float *slot = trail_slot(a.trail, a.batch, seq, t);
    for (int32_t i = 0; slot && i < n_past; i++) {
      int32_t row = t + 1 - n_past + i;
      slot[static_cast<size_t>(i) * a.channels + c] = row < first
                                                          ? old[row - first + n_past]
                                                          : input_at(a, past, row, input, c);
    }
  }
  int32_t position = a.batch.position[first], page = 0;
  for (int32_t t = first; t < end; page++) {
    int32_t n = in_page(a.batch, position, end - t);
    t += n, position += n;
    if (static_cast<int32_t>(blockIdx.z) != (t - first < n_past ? 0 : page)) continue;
    float *state = state_of(a.batch, a.state, seq, position - 1);
    for (int32_t i = 0; state && i < n_past; i++) {
      int32_t row = t - n_past + i;
      state[static_cast<size_t>(i) * a.channels + c] = row < first
                                                           ? old[row - first + n_past]
                                                           : input_at(a, past, row, input, c);
    }
  }
}

extern "C" int td_cu_delta_conv(const td_delta_conv_args *a, td_cu_stream stream) {
  enum { STATE_THREADS = 256 };
  const td_delta_shape &s = a->shape;
  uint32_t of_gates = s.by_channel ? s.n_v_heads : ceil_div(s.n_v_heads, WARP);
  uint32_t n_warps = 2 * s.n_k_heads + s.n_v_heads + of_gates;
  uint32_t n = a->batch.n_tokens, each = n >= CONV_MANY ? CONV_TOKENS : 1;
  auto kernel = s.n_taps == 4 ? conv_kernel<4> : conv_kernel<0>;
  const dim3 tokens(ceil_div(n, each), ceil_div(n_warps, CONV_WARPS));
  if (int failed = TD_LAUNCH(kernel, tokens, CONV_WARPS * WARP, 0, stream, *a)) return failed;
  // A sequence's tokens are in one page more than they fill, at most.
  dim3 grid(ceil_div(a->channels, STATE_THREADS), a->batch.n_seqs,
            ceil_div(n, a->batch.page_tokens) + 1);
  return TD_LAUNCH(conv_states_kernel, grid, STATE_THREADS, 0, stream, *a);
}

// ---- the recurrence -----------------------------------------------------------------------------

// A block has a tile of columns of a head's state, each warp eight of them. Lane 4 g + p has two
// columns of the rows r with r / 4 % 8 == g, in registers: a token needs no barrier, and sums over
// rows take three shuffles. Tokens' inputs come to shared memory RULE_TOKENS at a time; the next
// are on their way while these are used.
enum { RULE_WARPS = 4, RULE_THREADS = RULE_WARPS * WARP, RULE_TOKENS = 16 };
enum { COLUMNS = 2, ROWS = 4, ROW_STEP = ROWS * WARP / 4 };
static_assert(RULE_WARPS * 4 * COLUMNS == TILE, "warps share a tile");

struct alignas(sizeof(float) * COLUMNS) columns_of_2 {
  float v[COLUMNS];
};
struct alignas(sizeof(float) * ROWS) rows_of_4 {
  float v[ROWS];
};

// KD: elements of a key, at most. EACH: a decay for each of them.
template <int KD, bool EACH> struct rule_shared {
  enum { DECAYS = EACH ? KD : 1 };
  alignas(16) float q[RULE_TOKENS][KD], k[RULE_TOKENS][KD], v[RULE_TOKENS][TILE];
  alignas(16) uint16_t raw_q[RULE_TOKENS][KD], raw_k[RULE_TOKENS][KD], raw_v[RULE_TOKENS][TILE];
  alignas(16) float decay[RULE_TOKENS][DECAYS], raw_gates[RULE_TOKENS][DECAYS + 1];
  float strength[RULE_TOKENS];
};

template <int KD> struct rule_state { float s[KD / ROW_STEP][ROWS][COLUMNS]; };

__device__ static uint32_t lane_row() {
  return threadIdx.x % WARP / 4 * ROWS;
}

__device__ static uint32_t lane_column() { // of the tile
  return (threadIdx.x / WARP * 4 + threadIdx.x % 4) * COLUMNS;
}

// Starts copying n tokens' inputs, from token t on.
template <int KD, bool EACH>
__device__ static void fetch(const td_delta_rule_op_args &a, const rule_part &part, uint32_t t,
                             uint32_t n, rule_shared<KD, EACH> &s) {
  enum { OF_KEY = KD / RUN_OF_8, OF_TOKEN = 2 * OF_KEY + TILE / RUN_OF_8 };
  for (uint32_t i = threadIdx.x; i < n * OF_TOKEN; i += RULE_THREADS) {
    uint32_t token = i / OF_TOKEN, run = i % OF_TOKEN;
    if (run < 2 * OF_KEY) {
      uint32_t d = run % OF_KEY * RUN_OF_8;
      bool is_key = run >= OF_KEY;
      const uint16_t *from = a.qkv + (is_key ? k_of(a, part, t + token) : q_of(a, part, t + token));
      copy_async(is_key ? &s.raw_k[token][d] : &s.raw_q[token][d], from + d, d < a.shape.k_dim);
    } else {
      uint32_t d = (run - 2 * OF_KEY) * RUN_OF_8;
      copy_async(&s.raw_v[token][d], a.qkv + v_of(a, part, t + token) + d,
                 part.column + d < a.shape.v_dim);
    }
  }
  const uint32_t of_token = (EACH ? a.shape.k_dim : 1) + 1;
  for (uint32_t i = threadIdx.x; i < n * of_token; i += RULE_THREADS) {
    uint32_t token = i / of_token, gate = i % of_token;
    copy_async_value(&s.raw_gates[token][gate], gates_of(a, part, t + token) + gate, true);
  }
  copy_async_commit();
}

// Decays, zeros past the last, and strength of a token from where they follow one another.
template <int KD, bool EACH>
__device__ static void unpack_gate(rule_shared<KD, EACH> &s, uint32_t token, uint32_t d,
                                   uint32_t k_dim, const float *gates) {
  const uint32_t n_decays = EACH ? k_dim : 1;
  s.decay[token][d] = d < n_decays ? gates[d] : 0;
  if (d == 0) s.strength[token] = gates[n_decays];
}

// What was fetched as FP32, for all threads after the next barrier.
template <int KD, bool EACH>
__device__ static void unpack(uint32_t n, uint32_t k_dim, rule_shared<KD, EACH> &s) {
  enum { DECAYS = rule_shared<KD, EACH>::DECAYS };
  float v[RUN_OF_8];
  for (uint32_t i = threadIdx.x * RUN_OF_8; i < n * KD; i += RULE_THREADS * RUN_OF_8) {
    load_run(&s.raw_q[0][0] + i, v);
    store_run(&s.q[0][0] + i, v);
    load_run(&s.raw_k[0][0] + i, v);
    store_run(&s.k[0][0] + i, v);
  }
  for (uint32_t i = threadIdx.x * RUN_OF_8; i < n * TILE; i += RULE_THREADS * RUN_OF_8) {
    load_run(&s.raw_v[0][0] + i, v);
    store_run(&s.v[0][0] + i, v);
  }
  for (uint32_t i = threadIdx.x; i < n * DECAYS; i += RULE_THREADS)
    unpack_gate(s, i / DECAYS, i % DECAYS, k_dim, s.raw_gates[i / DECAYS]);
}

// The same as fetch and unpack, for rows that runs of eight do not make.
template <int KD, bool EACH>
__device__ static void load_inputs(const td_delta_rule_op_args &a, const rule_part &part,
                                   uint32_t t, uint32_t n, rule_shared<KD, EACH> &s) {
  enum { DECAYS = rule_shared<KD, EACH>::DECAYS };
  for (uint32_t i = threadIdx.x; i < n * KD; i += RULE_THREADS) {
    uint32_t token = i / KD, d = i % KD;
    bool is_there = d < a.shape.k_dim;
    s.q[token][d] = is_there ? f32_from_bf16(a.qkv[q_of(a, part, t + token) + d]) : 0;
    s.k[token][d] = is_there ? f32_from_bf16(a.qkv[k_of(a, part, t + token) + d]) : 0;
  }
  for (uint32_t i = threadIdx.x; i < n * TILE; i += RULE_THREADS) {
    uint32_t token = i / TILE, d = i % TILE;
    bool is_there = part.column + d < a.shape.v_dim;
    s.v[token][d] = is_there ? f32_from_bf16(a.qkv[v_of(a, part, t + token) + d]) : 0;
  }
  for (uint32_t i = threadIdx.x; i < n * DECAYS; i += RULE_THREADS)
    unpack_gate(s, i / DECAYS, i % DECAYS, a.shape.k_dim, gates_of(a, part, t + i / DECAYS));
}

// The lane's part of a tile [k_dim][TILE]; tile NULL, and rows past the last: zeros.
template <int KD>
__device__ static void load_state(const float *tile, uint32_t k_dim, rule_state<KD> &state) {
#pragma unroll
  for (int j = 0; j < KD / ROW_STEP; j++) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      uint32_t row = j * ROW_STEP + lane_row() + r;
      columns_of_2 of_row = {};
      if (tile && row < k_dim)
        of_row = *reinterpret_cast<const columns_of_2 *>(tile + row * TILE + lane_column());
      state.s[j][r][0] = of_row.v[0], state.s[j][r][1] = of_row.v[1];
    }
  }
}

template <int KD>
__device__ static void store_state(float *tile, uint32_t k_dim, const rule_state<KD> &state) {
#pragma unroll
  for (int j = 0; j < KD / ROW_STEP; j++) {
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      uint32_t row = j * ROW_STEP + lane_row() + r;
      if (row < k_dim)
        *reinterpret_cast<columns_of_2 *>(tile + row * TILE +
                                          lane_column()) = {{state.s[j][r][0], state.s[j][r][1]}};
    }
  }
}

// The sum over the lanes that have other rows of the same column.
__device__ static float sum_of_rows(float v) {
#pragma unroll
  for (int offset = 4; offset < WARP; offset *= 2)
    v += __shfl_xor_sync(TD_FULL_WARP, v, offset);
  return v;
}

__device__ static rows_of_4 rows_at(const float *v) {
  return *reinterpret_cast<const rows_of_4 *>(v);
}

// Four rows of a token's key, or with EACH of its products with the decays.
template <bool EACH> __device__ static rows_of_4 keys_at(const float *k, const float *decay) {
  rows_of_4 key = rows_at(k);
  if (!EACH) return key;
  const rows_of_4 g = rows_at(decay);
#pragma unroll
  for (int r = 0; r < ROWS; r++)
    key.v[r] = product(key.v[r], g.v[r]);
  return key;
}

// known = the lane's share of k S.
template <int KD, bool EACH>
__device__ static void recall(const float *k, const float *decay, const rule_state<KD> &state,
                              float (&known)[COLUMNS]) {
  known[0] = known[1] = 0;
#pragma unroll
  for (int j = 0; j < KD / ROW_STEP; j++) {
    const uint32_t row = j * ROW_STEP + lane_row();
    const rows_of_4 key = keys_at<EACH>(k + row, decay + row);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
      for (int c = 0; c < COLUMNS; c++)
        known[c] = fmaf(key.v[r], state.s[j][r][c], known[c]);
    }
  }
}

// S = decay S + k d of token i; sum = the lane's share of q S, and known of the key of `next` S, in
// the order of recall.
template <int KD, bool EACH>
__device__ static void update(const rule_shared<KD, EACH> &s, uint32_t i, uint32_t next,
                              const float (&d)[COLUMNS], rule_state<KD> &state,
                              float (&sum)[COLUMNS], float (&known)[COLUMNS]) {
  sum[0] = sum[1] = known[0] = known[1] = 0;
#pragma unroll
  for (int j = 0; j < KD / ROW_STEP; j++) {
    const uint32_t row = j * ROW_STEP + lane_row();
    const rows_of_4 query = rows_at(s.q[i] + row), key = rows_at(s.k[i] + row);
    const rows_of_4 after = keys_at<EACH>(s.k[next] + row, s.decay[next] + row);
    rows_of_4 decay = {};
    if (EACH) decay = rows_at(s.decay[i] + row);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) {
        float *x = &state.s[j][r][c];
        *x = fmaf(key.v[r], d[c], product(EACH ? decay.v[r] : s.decay[i][0], *x));
        sum[c] = fmaf(query.v[r], *x, sum[c]);
        known[c] = fmaf(after.v[r], *x, known[c]);
      }
    }
  }
}

// The result of token t in the lane's columns.
__device__ static void put_result(const td_delta_rule_op_args &a, const rule_part &part, uint32_t t,
                                  const float (&sum)[COLUMNS]) {
  uint32_t column = part.column + lane_column();
  uint16_t *out = a.out + (static_cast<size_t>(t) * a.shape.n_v_heads + part.head) * a.shape.v_dim;
#pragma unroll
  for (int c = 0; c < COLUMNS; c++) {
    float all = sum_of_rows(sum[c]);
    if (lane_row() == 0 && column + c < a.shape.v_dim) out[column + c] = bf16_from_f32(all);
  }
}

// n tokens from token t on, whose inputs are in shared memory. position: of the first; last: of the
// sequence's last in this step. State `at` elements into those of its page.
template <int KD, bool EACH>
__device__ static void run_tokens(const td_delta_rule_op_args &a, const rule_part &part,
                                  const rule_shared<KD, EACH> &s, uint32_t t, uint32_t n,
                                  int32_t position, int32_t last, size_t at,
                                  rule_state<KD> &state) {
  float known[COLUMNS], sum[COLUMNS];
  recall<KD, EACH>(s.k[0], s.decay[0], state, known);
#pragma unroll 1
  for (uint32_t i = 0; i < n; i++, position++) {
    const float decay = EACH ? 1 : s.decay[i][0]; // of what is known as a whole
    float d[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
      d[c] = product(s.strength[i], fmaf(-decay, sum_of_rows(known[c]), s.v[i][lane_column() + c]));
    update<KD, EACH>(s, i, i + 1 < n ? i + 1 : i, d, state, sum, known);
    put_result(a, part, t + i, sum);
    float *slot = trail_slot(a.trail, a.batch, blockIdx.z, static_cast<int32_t>(t + i));
    if (slot) store_state<KD>(slot + at, a.shape.k_dim, state);
    if (position != last && static_cast<uint32_t>(position + 1) % a.batch.page_tokens) continue;
    float *page = state_of(a.batch, a.state, blockIdx.z, position);
    if (page) store_state<KD>(page + at, a.shape.k_dim, state);
  }
}

// A block per tile, value head and sequence.
template <int KD, bool IN_RUNS, bool EACH>
__global__ static void __launch_bounds__(RULE_THREADS) rule_kernel(td_delta_rule_op_args a) {
  __shared__ rule_shared<KD, EACH> s;
  const int32_t first = a.batch.q_begin[blockIdx.z], end = a.batch.q_begin[blockIdx.z + 1];
  if (first >= end) return;
  const uint32_t begin = static_cast<uint32_t>(first),
                 n_tokens = static_cast<uint32_t>(end - first);
  const rule_part part = rule_part_of_block(a.shape);
  if (IN_RUNS) fetch<KD, EACH>(a, part, begin, at_most(n_tokens, RULE_TOKENS), s);
  const int32_t position = a.batch.position[begin];
  const size_t at = rule_tile_at(a);
  const float *before = state_before(a.batch, a.state, blockIdx.z, position);
  rule_state<KD> state;
  load_state<KD>(before ? before + at : nullptr, a.shape.k_dim, state);
  const int32_t last = position + static_cast<int32_t>(n_tokens) - 1;
#pragma unroll 1
  for (uint32_t done = 0; done < n_tokens; done += RULE_TOKENS) {
    const uint32_t n = at_most(n_tokens - done, RULE_TOKENS), next = done + RULE_TOKENS;
    if (IN_RUNS) copy_async_wait();
    __syncthreads(); // the inputs before these are no longer used, and these are there
    if (IN_RUNS) {
      unpack<KD, EACH>(n, a.shape.k_dim, s);
    } else {
      load_inputs<KD, EACH>(a, part, begin + done, n, s);
    }
    __syncthreads();
    if (IN_RUNS && next < n_tokens)
      fetch<KD, EACH>(a, part, begin + next, at_most(n_tokens - next, RULE_TOKENS), s);
    run_tokens<KD, EACH>(a, part, s, begin + done, n, position + static_cast<int32_t>(done), last,
                         at, state);
  }
}

template <int KD, bool EACH>
static int launch_rule(const td_delta_rule_op_args *a, dim3 grid, td_cu_stream stream) {
  const td_delta_shape &s = a->shape;
  bool runs = in_runs(a->qkv, a->channels) && s.k_dim % RUN_OF_8 == 0 && s.v_dim % RUN_OF_8 == 0;
  auto kernel = runs ? rule_kernel<KD, true, EACH> : rule_kernel<KD, false, EACH>;
  return TD_LAUNCH(kernel, grid, RULE_THREADS, 0, stream, *a);
}

extern "C" int td_cu_delta_rule(const td_delta_rule_op_args *a, td_cu_stream stream) {
  dim3 grid(ceil_div(a->shape.v_dim, TILE), a->shape.n_v_heads, a->batch.n_seqs);
  const bool is_short = a->shape.k_dim <= ROW_STEP;
  auto launch = a->shape.by_channel
                    ? is_short ? launch_rule<ROW_STEP, true> : launch_rule<TD_CU_DELTA_KEYS, true>
                : is_short ? launch_rule<ROW_STEP, false>
                           : launch_rule<TD_CU_DELTA_KEYS, false>;
  return launch(a, grid, stream);
}

// ---- gates --------------------------------------------------------------------------------------

__device__ static float gated(float x, float gate, bool silu) {
  float factor = 1 / (1 + expf(-gate));
  return x * (silu ? gate * factor : factor);
}

// A block per token and group; N elements of a thread at a time.
template <int N> __global__ static void gate_rows_kernel(td_gate_rows_args a) {
  const size_t t = blockIdx.x, group = blockIdx.y;
  uint16_t *x = a.x + (t * a.n_groups + group) * a.dim;
  const size_t at = t * a.gate_stride + a.part.offset + group * a.part.stride;
  const uint16_t *gates = static_cast<const uint16_t *>(a.gate) + at;
  const float gate = a.scalar ? static_cast<const float *>(a.gate)[at] : 0;
  for (uint32_t i = threadIdx.x * N; i < a.dim; i += blockDim.x * N) {
    float v[N], g[N];
    take_elements(x + i, v);
    if (!a.scalar) take_elements(gates + i, g);
#pragma unroll
    for (int e = 0; e < N; e++)
      v[e] = gated(v[e], a.scalar ? gate : g[e], a.silu);
    put_elements(x + i, v);
  }
}

extern "C" int td_cu_gate_rows(const td_gate_rows_args *a, td_cu_stream stream) {
  enum { MOST_THREADS = 256 };
  bool runs = in_runs(a->x, a->dim) &&
              (a->scalar || (in_runs(a->gate, a->gate_stride) && a->part.offset % RUN_OF_8 == 0 &&
                             a->part.stride % RUN_OF_8 == 0));
  auto kernel = runs ? gate_rows_kernel<RUN_OF_8> : gate_rows_kernel<1>;
  uint32_t n_threads = ceil_div(ceil_div(a->dim, runs ? RUN_OF_8 : 1), WARP) * WARP;
  return TD_LAUNCH(kernel, dim3(a->n_tokens, a->n_groups), at_most(n_threads, MOST_THREADS), 0,
                   stream, *a);
}
