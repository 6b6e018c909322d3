// kernels/cuda/ngrams.cu - embeddings of n-grams (device/device.h), whose rows the host has
// gathered: the gates of their keys, the convolution over time, and what tokens leave in a state
// for later ones.
//
// td_cu_ngram_gate: keys and queries bf16 [n_streams][dim] a token, values [dim]; 4 x 2048: 52 KiB,
// so memory is the limit: 16 ns at 3.35 TB/s.
// td_cu_ngram_conv: in and y read, x read and written: 64 KiB a token, 20 ns; the n_taps rows of
// `in` that a token needs are in L2. States take (n_taps - 1) * step rows in f32 a page and
// sequence.
#include "kernels/cuda/states.cuh"

enum { GATE_THREADS = 256, CONV_THREADS = 128 };

// ---- states -------------------------------------------------------------------------------------

// Calls keep(t, state) for all states that a sequence's tokens of the step leave: after token t.
// The page that the tokens before it may have filled in part is the last, since others follow from
// it.
template <class Keep>
__device__ static void keep_all(const td_batch_view &b, const td_kv_view &states,
                                const td_state_trail &trail, uint32_t seq, const Keep &keep) {
  const int32_t first = b.q_begin[seq], end = b.q_begin[seq + 1];
  if (first >= end || b.position[first] < 0) return;
  const bool has_trail = trail.slots && trail.first[seq] >= 0;
  for (int32_t t = first; has_trail && t + 1 < end; t++)
    if (float *slot = trail_slot(trail, b, seq, t)) keep(t, slot);
  const uint32_t past = static_cast<uint32_t>(b.position[first]);
  const uint32_t last = past + static_cast<uint32_t>(end - first) - 1;
  for (uint32_t page = last / b.page_tokens + 1; page-- > past / b.page_tokens;) {
    const uint32_t p = at_most((page + 1) * b.page_tokens - 1, last);
    float *state = state_of(b, states, seq, static_cast<int32_t>(p));
    if (state) keep(first + static_cast<int32_t>(p - past), state);
  }
}

// ---- ids ----------------------------------------------------------------------------------------

struct keep_ids {
  const td_cu_ngram_ids_args &a;
  const int32_t *before; // NULL: none
  int32_t first;

  __device__ void operator()(int32_t t, float *state) const {
    const int32_t n = static_cast<int32_t>(a.n_ids);
    int32_t *to = reinterpret_cast<int32_t *>(state + a.ids_at);
    for (int32_t i = 0; i < n; i++) { // in rising order, as `to` may be `before`
      const int32_t from = t + 1 - n + i;
      to[i] = from >= first ? a.tokens[from] : before ? before[n + from - first] : a.end;
    }
  }
};

// A thread per sequence.
__global__ static void ngram_ids_kernel(td_cu_ngram_ids_args a) {
  const uint32_t seq = blockIdx.x * blockDim.x + threadIdx.x;
  if (seq >= a.batch.n_seqs) return;
  const int32_t first = a.batch.q_begin[seq];
  if (first >= a.batch.q_begin[seq + 1]) return;
  const float *before = state_before(a.batch, a.state, seq, a.batch.position[first]);
  const int32_t *ids = before ? reinterpret_cast<const int32_t *>(before + a.ids_at) : nullptr;
  keep_all(a.batch, a.state, a.trail, seq, keep_ids{a, ids, first});
}

extern "C" int td_cu_ngram_ids(const td_cu_ngram_ids_args *a, td_cu_stream stream) {
  return TD_LAUNCH(ngram_ids_kernel, ceil_div(a->batch.n_seqs, WARP), WARP, 0, stream, *a);
}

// ---- gates --------------------------------------------------------------------------------------

// A block per token and stream.
__global__ static void __launch_bounds__(GATE_THREADS) ngram_gate_kernel(td_ngram_gate_args a) {
  __shared__ float scratch[WARP];
  const size_t row = blockIdx.x;
  uint16_t *x = a.x + row * a.dim;
  const uint16_t *query = a.query + row * a.dim, *value = a.value + row / a.n_streams * a.dim;
  float sum = 0;
  for (uint32_t i = threadIdx.x; i < a.dim; i += GATE_THREADS)
    sum = fmaf(f32_from_bf16(x[i]), f32_from_bf16(query[i]), sum);
  const float s = block_sum(sum, scratch) / sqrtf(static_cast<float>(a.dim));
  const float root = sqrtf(fmaxf(fabsf(s), 1e-6f)), g = s > 0 ? root : s < 0 ? -root : 0;
  const float factor = 1 / (1 + expf(-g));
  for (uint32_t i = threadIdx.x; i < a.dim; i += GATE_THREADS)
    x[i] = bf16_from_f32(factor * f32_from_bf16(value[i]));
}

extern "C" int td_cu_ngram_gate(const td_ngram_gate_args *a, td_cu_stream stream) {
  return TD_LAUNCH(ngram_gate_kernel, dim3(a->n_tokens * a->n_streams), GATE_THREADS, 0, stream,
                   *a);
}

// ---- the convolution ----------------------------------------------------------------------------

// A channel of a sequence: its inputs of the step, and those before.
struct conv_channel {
  const td_ngram_conv_args &a;
  const float *before; // NULL: zeros
  int32_t first;
  uint32_t channel;

  __device__ int32_t n_past() const { return static_cast<int32_t>((a.n_taps - 1) * a.step); }

  __device__ float input(int32_t t) const {
    const size_t n = a.channels;
    if (t >= first) return f32_from_bf16(a.in[static_cast<size_t>(t) * n + channel]);
    const int32_t row = n_past() + t - first;
    return before ? before[a.rows_at + static_cast<size_t>(row) * n + channel] : 0;
  }

  __device__ void operator()(int32_t t, float *state) const {
    float *to = state + a.rows_at + channel;
    for (int32_t i = 0; i < n_past(); i++) // in rising order, as the state may be `before`
      to[static_cast<size_t>(i) * a.channels] = input(t + 1 - n_past() + i);
  }
};

__device__ static conv_channel channel_of(const td_ngram_conv_args &a, uint32_t seq,
                                          uint32_t channel) {
  const int32_t first = a.batch.q_begin[seq];
  return {a, state_before(a.batch, a.state, seq, a.batch.position[first]), first, channel};
}

// A thread per channel of token blockIdx.y.
__global__ static void ngram_conv_kernel(td_ngram_conv_args a) {
  const uint32_t channel = blockIdx.x * blockDim.x + threadIdx.x;
  if (channel >= a.channels) return;
  const int32_t t = static_cast<int32_t>(blockIdx.y), n_taps = static_cast<int32_t>(a.n_taps);
  const conv_channel c = channel_of(a, static_cast<uint32_t>(a.batch.seq[t]), channel);
  float sum = 0;
  for (int32_t j = 0; j < n_taps; j++) {
    const int32_t back = (n_taps - 1 - j) * static_cast<int32_t>(a.step);
    sum = fmaf(a.conv[static_cast<size_t>(j) * a.channels + channel], c.input(t - back), sum);
  }
  const size_t at = static_cast<size_t>(t) * a.channels + channel;
  const float more = f32_from_bf16(a.y[at]) + sum / (1 + expf(-sum));
  a.x[at] = bf16_from_f32(f32_from_bf16(a.x[at]) + more);
}

// A thread per channel of sequence blockIdx.y.
__global__ static void ngram_keep_kernel(td_ngram_conv_args a) {
  const uint32_t channel = blockIdx.x * blockDim.x + threadIdx.x, seq = blockIdx.y;
  if (channel >= a.channels || a.batch.q_begin[seq] >= a.batch.q_begin[seq + 1]) return;
  keep_all(a.batch, a.state, a.trail, seq, channel_of(a, seq, channel));
}

extern "C" int td_cu_ngram_conv(const td_ngram_conv_args *a, td_cu_stream stream) {
  const uint32_t n_blocks = ceil_div(a->channels, CONV_THREADS);
  if (int failed = TD_LAUNCH(ngram_conv_kernel, dim3(n_blocks, a->batch.n_tokens), CONV_THREADS, 0,
                             stream, *a))
    return failed;
  return TD_LAUNCH(ngram_keep_kernel, dim3(n_blocks, a->batch.n_seqs), CONV_THREADS, 0, stream, *a);
}
