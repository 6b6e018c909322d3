// kernels/cuda/pool.cu - attention over a window and pooled keys (device/device.h): the pooling,
// what each token sees as a page of its own, over which the decode kernel runs, and the window's
// ring.
//
// td_cu_pool: 8 bytes of x and gate an element and some ten operations and an exponential. DeepSeek
// V4-Flash: 8 KiB a token and layer with entries of four positions and two halves of 512, and 2 KiB
// for the indexer, so memory is the limit: 3 ns at 3.35 TB/s.
// td_cu_pool_gather: a key is read as 2 KiB, or as 1 KiB of this step, and written as 1 KiB. With a
// window of 128 and 512 entries a token has 640 keys: 2 MiB, most of which tokens in a row share in
// L2, and 64 heads do 84 MFLOP over them.
// td_cu_pool_ring: 1 KiB read and 2 KiB written a token and page; a page that is full has all
// of the window once.
#include "kernels/cuda/states.cuh"

// ---- pooling ------------------------------------------------------------------------------------

enum { POOL_THREADS = 512, RUNNING = 3 };

// What a channel's softmax has taken: maximum, sum of weights, weighted sum.
struct running {
  float max, weights, sum;
};

// The same roundings wherever this is inlined.
__device__ static void take(running &r, float x, float gate) {
  bool is_most = gate > r.max;
  float other = expf(is_most ? r.max - gate : gate - r.max);
  float keep = is_most ? other : 1, gain = is_most ? 1 : other;
  r.max = is_most ? gate : r.max;
  r.weights = fold(r.weights, keep, gain, 1);
  r.sum = fold(r.sum, keep, gain, x);
}

// A sequence's part of the step.
struct pool_step {
  uint32_t first, past; // its first token, and that token's position
  const float *before;  // the state before it; NULL: none
};

// Channel d of an entry after the positions up to `last`. An entry of two groups takes the first
// halves of the group before, if there is one, and then the second halves of its own.
__device__ static running pool_channel(const td_pool_args &a, const pool_step &s, uint32_t entry,
                                       uint32_t last, uint32_t d) {
  const uint32_t own = entry * a.group, end = at_most(own + a.group, last + 1);
  const size_t width = a.overlaps ? 2 * static_cast<size_t>(a.dim) : a.dim;
  uint32_t begin = a.overlaps && entry ? own - a.group : own;
  running r = {-INFINITY, 0, 0};
  if (begin < s.past) {
    const size_t slot = entry - s.past / a.group;
    const float *open = s.before ? s.before + a.open_at + slot * RUNNING * a.dim + d : nullptr;
    if (open) r = {open[0], open[a.dim], open[2 * static_cast<size_t>(a.dim)]};
    begin = s.past;
  }
#pragma unroll 4
  for (uint32_t p = begin; p < end; p++) {
    const size_t channel = a.overlaps && p >= own ? a.dim + d : d;
    const size_t at = (s.first + p - s.past) * a.stride + channel;
    const float gate = a.gate ? a.gate[at] + a.bias[(p & (a.group - 1)) * width + channel] : 0;
    take(r, a.x[at], gate);
  }
  return r;
}

// Pools the entry that ends at a position, and norms and rotates it. scratch: that of block_sum.
__device__ static void finish_entry(const td_pool_args &a, const pool_step &s, uint32_t last,
                                    float *scratch, float *out) {
  float squares = 0;
  for (uint32_t d = threadIdx.x; d < a.dim; d += blockDim.x) {
    running r = pool_channel(a, s, last / a.group, last, d);
    out[d] = r.sum / r.weights;
    squares = fmaf(out[d], out[d], squares);
  }
  if (!a.norm.n) return;
  const float gain = 1 / sqrtf(block_sum(squares, scratch) / static_cast<float>(a.dim) + a.eps);
  for (uint32_t d = threadIdx.x; d < a.dim; d += blockDim.x)
    out[d] = out[d] * gain * vec_at(a.norm, d);
  __syncthreads();
  const float *cos_sin = a.cos_sin + static_cast<size_t>(last + 1 - a.group) * a.rot_dim;
  const uint32_t apart = a.rotates_first ? a.rot_dim / 2 : 1; // elements of a pair
  for (uint32_t i = threadIdx.x * 2; i < a.rot_dim; i += blockDim.x * 2) {
    float *x = a.rotates_first ? out + i / 2 : out + a.dim - a.rot_dim + i;
    const float u = x[0], v = x[apart];
    x[0] = u * cos_sin[i] - v * cos_sin[i + 1];
    x[apart] = v * cos_sin[i] + u * cos_sin[i + 1];
  }
}

// Stores what is open behind a position.
__device__ static void store_open(const td_pool_args &a, const pool_step &s, uint32_t last,
                                  float *out) {
  for (uint32_t slot = 0; slot <= a.overlaps; slot++, out += RUNNING * a.dim) {
    for (uint32_t d = threadIdx.x; d < a.dim; d += blockDim.x) {
      running r = pool_channel(a, s, (last + 1) / a.group + slot, last, d);
      out[d] = r.max;
      out[a.dim + d] = r.weights;
      out[2 * static_cast<size_t>(a.dim) + d] = r.sum;
    }
  }
}

// One block per token: those that end a group have an entry, those that a page or the step ends
// with leave a state, and those that may be the last have one in the trail. Other blocks read what
// is open in the page of the first token, so that its successor goes to scratch.
__global__ static void __launch_bounds__(POOL_THREADS) pool_kernel(td_pool_args a) {
  __shared__ float scratch[WARP];
  const td_batch_view &b = a.batch;
  const uint32_t t = blockIdx.x, seq = static_cast<uint32_t>(b.seq[t]);
  const int32_t position = b.position[t];
  const uint32_t last = static_cast<uint32_t>(position), page_tokens = b.page_tokens;
  const bool ends = ((last + 1) & (a.group - 1)) == 0;
  const bool leaves = (last + 1) % page_tokens == 0 ||
                      static_cast<int32_t>(t) + 1 == b.q_begin[seq + 1];
  float *slot_of_trail = trail_slot(a.trail, b, seq, static_cast<int32_t>(t));
  if (!ends && !leaves && !slot_of_trail) return;
  const uint32_t first = static_cast<uint32_t>(b.q_begin[seq]);
  const int32_t past = b.position[first];
  float *page = state_of(b, a.state, seq, position);
  if (!page || past < 0) return;
  const pool_step s = {first, static_cast<uint32_t>(past), state_before(b, a.state, seq, past)};
  const size_t of_open = static_cast<size_t>(a.overlaps + 1) * RUNNING * a.dim;
  const bool is_first = last / page_tokens == s.past / page_tokens;
  if (slot_of_trail) store_open(a, s, last, slot_of_trail + a.trail_at);
  if (leaves) store_open(a, s, last, is_first ? a.open + seq * of_open : page + a.open_at);
  const size_t slot = last / a.group % a.page_entries;
  if (ends) finish_entry(a, s, last, scratch, page + a.entry_at + slot * a.dim);
}

// One block per sequence: the open state of its first page.
__global__ static void pool_open_kernel(td_pool_args a) {
  const uint32_t seq = blockIdx.x, n = (a.overlaps + 1) * RUNNING * a.dim;
  const int32_t first = a.batch.q_begin[seq];
  if (first >= a.batch.q_begin[seq + 1]) return;
  float *page = state_of(a.batch, a.state, seq, a.batch.position[first]);
  for (uint32_t i = threadIdx.x; page && i < n; i += blockDim.x)
    page[a.open_at + i] = a.open[static_cast<size_t>(seq) * n + i];
}

extern "C" int td_cu_pool(const td_pool_args *a, td_cu_stream stream) {
  const uint32_t threads = at_most(ceil_div(a->dim, WARP) * WARP, POOL_THREADS);
  if (int failed = TD_LAUNCH(pool_kernel, a->batch.n_tokens, threads, 0, stream, *a)) return failed;
  return TD_LAUNCH(pool_open_kernel, a->batch.n_seqs, threads, 0, stream, *a);
}

// ---- what a token sees --------------------------------------------------------------------------

enum { ROW_WARPS = 8, ROW_THREADS = ROW_WARPS * WARP };

// A row of dim elements, F32 or BF16; both NULL: zeros.
struct key_row {
  const float *wide;
  const uint16_t *own;
};

// The key in the ring or, of this step, in its row.
__device__ static key_row window_key(const td_batch_view &b, const float *ring, const uint16_t *key,
                                     size_t key_stride, uint32_t seq, uint32_t position,
                                     uint32_t n_ring, uint32_t dim) {
  const uint32_t first = static_cast<uint32_t>(b.q_begin[seq]);
  const uint32_t past = static_cast<uint32_t>(b.position[first]);
  if (position >= past) return {nullptr, key + (first + position - past) * key_stride};
  return {ring ? ring + static_cast<size_t>(position % n_ring) * dim : nullptr, nullptr};
}

__device__ static const float *state_if_any(const td_batch_view &b, const td_kv_view &s,
                                            uint32_t seq, uint32_t position) {
  const int32_t id = position / b.page_tokens < b.max_pages ? kv_page(b, seq, position) : -1;
  if (id < 0) return nullptr;
  return reinterpret_cast<const float *>(s.pages + static_cast<size_t>(id) * s.page_bytes);
}

__device__ static const float *entry_key(const td_cu_pool_gather_args &a, uint32_t seq,
                                         uint32_t entry) {
  const float *state = state_if_any(a.batch, a.state, seq, (entry + 1) * a.group - 1);
  if (!state) return nullptr;
  return state + a.entry_at + static_cast<size_t>(entry % a.page_entries) * a.dim;
}

// A warp copies a row as BF16.
__device__ static void copy_key(const key_row &from, uint32_t dim, bool in_runs, uint16_t *to) {
  const uint32_t lane = threadIdx.x % WARP;
  for (uint32_t d = lane * RUN_OF_8; in_runs && d < dim; d += WARP * RUN_OF_8) {
    float v[RUN_OF_8] = {};
    if (from.wide) load_run(from.wide + d, v);
    if (from.own) load_run(from.own + d, v);
    store_run(to + d, v);
  }
  for (uint32_t d = lane; !in_runs && d < dim; d += WARP)
    to[d] = from.own ? from.own[d] : from.wide ? bf16_from_f32(from.wide[d]) : 0;
}

// One warp per row of token token0 + blockIdx.y; the first block also describes the token's page.
__global__ static void pool_gather_kernel(td_cu_pool_gather_args a) {
  const uint32_t i = blockIdx.y, t = a.token0 + i, seq = static_cast<uint32_t>(a.batch.seq[t]);
  const uint32_t n = keys_of(a.batch, t), first = first_seen(n, a.window);
  const uint32_t n_all = a.group ? n / a.group : 0;
  const bool selects = a.selected && n_all > a.top_k;
  const uint32_t n_entries = selects ? a.top_k : n_all, n_keys = n_entries + n - first;
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    a.seq[i] = a.page_table[i] = static_cast<int32_t>(i);
    a.position[i] = static_cast<int32_t>(n_keys) - 1;
  }
  const uint32_t row = blockIdx.x * ROW_WARPS + threadIdx.x / WARP;
  if (row >= n_keys) return;
  key_row from = {nullptr, nullptr};
  if (row < n_entries) {
    const size_t at = static_cast<size_t>(t) * a.top_k + row;
    const uint32_t entry = selects ? static_cast<uint32_t>(a.selected[at]) : row;
    if (entry < n_all) from.wide = entry_key(a, seq, entry);
  } else {
    const uint32_t past = static_cast<uint32_t>(a.batch.position[a.batch.q_begin[seq]]);
    const float *ring = past ? state_if_any(a.batch, a.state, seq, past - 1) : nullptr;
    from = window_key(a.batch, ring, a.key, a.key_stride, seq, first + row - n_entries, a.ring,
                      a.dim);
  }
  copy_key(from, a.dim, a.in_runs, a.out + (static_cast<size_t>(i) * a.page_tokens + row) * a.dim);
}

static bool states_in_runs(const td_kv_view &s, size_t at) {
  return (reinterpret_cast<uintptr_t>(s.pages) | s.page_bytes | at * sizeof(float)) %
             sizeof(uint4) ==
         0;
}

extern "C" int td_cu_pool_gather(const td_cu_pool_gather_args *a, td_cu_stream stream) {
  td_cu_pool_gather_args args = *a;
  args.in_runs = in_runs(a->key, a->key_stride) && in_runs(a->out, a->dim) &&
                 states_in_runs(a->state, a->entry_at);
  dim3 grid(ceil_div(a->most_keys, ROW_WARPS), a->n);
  return TD_LAUNCH(pool_gather_kernel, grid, ROW_THREADS, 0, stream, args);
}

// ---- the window ---------------------------------------------------------------------------------

// One warp per key of the ring that page blockIdx.y of sequence blockIdx.z's step ends with. The
// page of the first token has the earlier ones already, or gets them from the page before; no
// other page's slots are read where they are written.
__global__ static void pool_ring_kernel(td_cu_pool_ring_args a) {
  const td_batch_view &b = a.batch;
  const uint32_t seq = blockIdx.z, page_tokens = b.page_tokens;
  const int32_t first = b.q_begin[seq], n = b.q_begin[seq + 1] - first;
  if (n <= 0) return;
  const int32_t past = b.position[first];
  const uint32_t page_idx = static_cast<uint32_t>(past) / page_tokens + blockIdx.y;
  const uint32_t end = at_most((page_idx + 1) * page_tokens, static_cast<uint32_t>(past + n));
  const uint32_t in_ring = blockIdx.x * ROW_WARPS + threadIdx.x / WARP;
  if (past < 0 || end <= page_idx * page_tokens || in_ring >= at_most(a.ring, end)) return;
  const uint32_t position = end - 1 - in_ring;
  float *ring = state_of(b, a.state, seq, static_cast<int32_t>(end) - 1);
  const float *before = state_before(b, a.state, seq, past);
  const key_row from = window_key(b, before, a.key, a.key_stride, seq, position, a.ring, a.dim);
  if (!ring || (!from.own && (!from.wide || before == ring))) return;
  float *to = ring + static_cast<size_t>(position % a.ring) * a.dim;
  for (uint32_t d = threadIdx.x % WARP; d < a.dim; d += WARP)
    to[d] = from.own ? f32_from_bf16(from.own[d]) : from.wide[d];
}

extern "C" int td_cu_pool_ring(const td_cu_pool_ring_args *a, td_cu_stream stream) {
  dim3 grid(ceil_div(a->ring, ROW_WARPS), a->batch.n_tokens / a->batch.page_tokens + 2,
            a->batch.n_seqs);
  return TD_LAUNCH(pool_ring_kernel, grid, ROW_THREADS, 0, stream, *a);
}
