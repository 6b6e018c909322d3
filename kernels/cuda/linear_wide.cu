// kernels/cuda/linear_wide.cu - linear_vec for 17 to 64 tokens, with its bits: W is read once.
// A block computes 128 rows, 16 a warp, or 64 of gate and of up, by all tokens. Its warps go
// through the chunks of the columns together: the activations of one are in shared memory while
// those of the next are copied there, and the weights of the next are on their way to registers.
// What a block reads of activations from L2 is then no more than what it reads of 8-bit weights.
// Chunks are taken slice by slice, and all sums in linear_vec's order. Where tiles of rows are
// fewer than SMs, a tile is several blocks, with some parts of the sum each, which they leave in
// memory; the last of them to be done adds them.
#include "kernels/cuda/attn.cuh"
#include "kernels/cuda/linear_chunk.cuh"

enum {
  WARPS = 8,
  THREADS = WARPS * WARP,
  TILE_ROWS = WARPS * ROWS,
  TOGETHER = 2, // fragments of tokens whose sums do not wait for each other
  PADDING = 4   // of results in shared memory: a fragment's rows are in different banks
};
static_assert(static_cast<int>(TILE_ROWS) == static_cast<int>(TD_CU_WIDE_ROWS), "");

struct alignas(16) fragment {
  float v[4];
};

template <int COLUMNS, int N> struct wide_shared {
  uint16_t x[2][N * TOKENS][COLUMNS];
  fragment sums[N][THREADS]; // each thread's own
};

template <int N> struct wide_results { // at the same place
  float y[N * TOKENS][TILE_ROWS + PADDING];
};

// The rows of a warp of the block's tile; as linear_rows_of. Of gate and up, the first half of the
// warps has gate.
__device__ static linear_rows wide_rows_of(const td_cu_linear_args &a, uint32_t warp) {
  uint32_t i = blockIdx.x, n = (a.n_rows + TILE_ROWS - 1) / TILE_ROWS;
  const uint32_t end = a.row0 + a.n_rows, of_also = a.also[0].w.rows;
  if (a.glu.out) {
    const uint32_t row0 = a.row0 + i * (TILE_ROWS / 2) + warp % (WARPS / 2) * ROWS;
    return {warp / (WARPS / 2), row0, end};
  }
  if (i < n) return {0, a.row0 + i * TILE_ROWS + warp * ROWS, end};
  i -= n;
  n = (of_also + TILE_ROWS - 1) / TILE_ROWS;
  if (i < n) return {1, i * TILE_ROWS + warp * ROWS, of_also};
  return {2, (i - n) * TILE_ROWS + warp * ROWS, a.also[1].w.rows};
}

__device__ static td_weight wide_weight_of(const td_cu_linear_args &a, uint32_t matrix) {
  if (a.experts) return a.experts[matrix * a.n_experts];
  td_weight w = a.w;
  if (matrix == 1) w = a.also[0].w;
  if (matrix == 2) w = a.also[1].w;
  return w;
}

// Where 16-byte piece c of a token's activations is in its row: so that what eight lanes load at a
// time, of two tokens, is in different banks. It is (piece_of_unit ^ piece_of_lane) of those who
// load.
template <int RUN, int PIECES> __device__ static uint32_t place_of(uint32_t token, uint32_t c) {
  if (RUN > 1) return c ^ (c / 8 % 2) ^ token % 2 * 2;
  return PIECES < 8 ? c : c ^ token % 2 * 4;
}

template <int RUN> __device__ static uint32_t piece_of_unit(uint32_t u) {
  return unit_at<RUN>(u) / UNIT;
}

template <int RUN, int PIECES> __device__ static uint32_t piece_of_lane() {
  return place_of<RUN, PIECES>(threadIdx.x % WARP / 4, threadIdx.x % 4 * RUN);
}

// Copies the activations of the columns from k on.
template <int RUN, int COLUMNS, int N>
__device__ static void copy_activations(const td_cu_linear_args &a, uint32_t k,
                                        uint16_t (&to)[N * TOKENS][COLUMNS]) {
  enum { PIECES = COLUMNS / UNIT, AT_ONCE = THREADS / PIECES }; // tokens
  static_assert(THREADS % PIECES == 0, "");
  const uint32_t c = threadIdx.x % PIECES, column = k + c * UNIT;
#pragma unroll
  for (uint32_t i = 0; i < N * TOKENS; i += AT_ONCE) {
    const uint32_t t = threadIdx.x / PIECES + i;
    if (N * TOKENS % AT_ONCE != 0 && t >= N * TOKENS) break;
    const bool is_there = t < a.n_tokens && column < a.w.cols;
    const uint16_t *from = a.x + static_cast<size_t>(t) * a.x_stride + column;
    copy_async(&to[t][place_of<RUN, PIECES>(t, c) * UNIT], is_there ? from : a.x, is_there);
  }
  copy_async_commit();
}

// A chunk, which is of a slice.
struct wide_chunk {
  uint32_t slice, idx;
};

__device__ static wide_chunk next_of(wide_chunk at, uint32_t n_slices, uint32_t n_chunks) {
  at.idx += n_slices;
  if (at.idx < n_chunks) return at;
  return {at.slice + 1, at.slice + 1};
}

template <bool ZEROS, int READ, int SPAN>
__device__ static void fetch_chunk(const lane_rows &r, uint32_t k, chunk_part<READ, SPAN> &part) {
  if (k + part.COLUMNS <= r.n_cols) {
    fetch<true, ZEROS>(r, k, part);
  } else {
    fetch<false, ZEROS>(r, k, part);
  }
}

// total += a chunk's products.
template <bool ZEROS, int READ, int SPAN, int COLUMNS, int N>
__device__ static void multiply_chunk(const lane_rows &r, const chunk_part<READ, SPAN> &part,
                                      const uint16_t (&x)[N * TOKENS][COLUMNS],
                                      float (&total)[N][4]) {
  // units that are converted at a time: those that share a scale
  enum { RUN = part.RUN, SOME = SPAN > QUAD ? SPAN / QUAD : RUN, PIECES = COLUMNS / UNIT };
  const uint32_t lane = piece_of_lane<RUN, PIECES>();
  float scale[2][part.SCALES];
  for (int i = 0; SPAN > 0 && i < 2; i++)
    scale_values<READ>(r.scales[i].dtype, part.scale[i], scale[i]);
#pragma unroll
  for (int first = 0; first < part.UNITS; first += SOME) {
    uint32_t pairs[SOME][2][N_TERMS<READ>][4];
#pragma unroll
    for (int u = 0; u < SOME; u++)
      unit_pairs<ZEROS>(r, part, first + u, pairs[u]);
#pragma unroll
    for (int t = 0; t < N; t += TOGETHER) {
      float sum[TOGETHER][4] = {};
#pragma unroll
      for (int u = 0; u < SOME; u++) {
        const uint32_t at = (piece_of_unit<RUN>(first + u) ^ lane) * UNIT;
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) {
          const uint16_t *row = x[(t + i) * TOKENS + threadIdx.x % WARP / 4];
          const uint4 v = *reinterpret_cast<const uint4 *>(row + at);
          uint32_t of_x[4] = {v.x, v.y, v.z, v.w};
          if (IN_FOURS<READ>) order_in_fours(of_x);
          multiply(pairs[u], of_x, SPAN > 0 ? sum[i] : total[t + i]);
        }
      }
#pragma unroll
      for (int i = 0; SPAN > 0 && i < TOGETHER; i++)
        add_scaled(scale[0][first / SOME], scale[1][first / SOME], sum[i], total[t + i]);
    }
  }
}

// The thread's sums of a part, in memory.
template <int N>
__device__ static fragment *split_sums(const td_cu_linear_args &a, uint32_t n_parts,
                                       uint32_t part) {
  const size_t at = static_cast<size_t>(blockIdx.x) * n_parts + part;
  return reinterpret_cast<fragment *>(a.wide.sums) + at * N * THREADS + threadIdx.x;
}

// sums += total, which is of a slice that ends; total = 0. With `to`, a part ends, whose sums go
// there.
template <int N>
__device__ static void end_slice(float (&total)[N][4], fragment (&sums)[N][THREADS], fragment *to) {
#pragma unroll
  for (int t = 0; t < N; t++) {
    fragment s = sums[t][threadIdx.x];
    for (int c = 0; c < 4; c++) {
      s.v[c] += total[t][c];
      total[t][c] = 0;
    }
    if (to) to[t * THREADS] = s;
    sums[t][threadIdx.x] = to ? fragment{} : s;
  }
}

__device__ static void fence_device() {
#if defined(__CUDA_ARCH__)
  __threadfence();
#endif
}

// Whether all other blocks of the tile have left their sums. By all threads.
__device__ static bool is_last_of_tile(const td_cu_linear_args &a) {
  __shared__ bool is_last;
  fence_device();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(&a.wide.n_arrived[blockIdx.x], 1u) + 1 == a.wide.n_splits;
    if (is_last) a.wide.n_arrived[blockIdx.x] = 0;
  }
  __syncthreads();
  fence_device();
  return is_last;
}

template <int N>
__device__ static void put_results(const td_cu_linear_args &a, float unit,
                                   const wide_results<N> &results) {
  const linear_rows rows = wide_rows_of(a, 0);
  const float factor = unit * global_scale(wide_weight_of(a, rows.matrix));
  if (a.glu.out) {
    enum { HALF = TILE_ROWS / 2 };
    const float up_factor = unit * global_scale(wide_weight_of(a, 1));
    for (uint32_t i = threadIdx.x; i < a.n_tokens * HALF; i += THREADS) {
      const uint32_t t = i / HALF, r = i % HALF;
      const float gate = results.y[t][r] * factor, up = results.y[t][HALF + r] * up_factor;
      if (rows.row0 + r < rows.end)
        a.glu.out[static_cast<size_t>(t) * a.n_rows + rows.row0 - a.row0 + r] = bf16_from_f32(
            swiglu(a.glu, gate, up));
    }
    return;
  }
  const linear_out out = linear_out_of(a, rows);
  for (uint32_t i = threadIdx.x; i < a.n_tokens * TILE_ROWS; i += THREADS) {
    const uint32_t t = i / TILE_ROWS, r = i % TILE_ROWS;
    if (rows.row0 + r < rows.end)
      linear_put(a, out, nullptr, t, rows.row0 + r, results.y[t][r] * factor);
  }
}

// Blocks that the shared memory of an SM has room for: 100 KB but for these.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900)
template <int N> constexpr int BLOCKS_OF_SM = 2;
#else
template <int N> constexpr int BLOCKS_OF_SM = N == 8 ? 1 : 2;
#endif

template <int READ, int SPAN, bool ZEROS, int N>
__global__ static void __launch_bounds__(THREADS, BLOCKS_OF_SM<N>)
    linear_wide_kernel(td_cu_linear_args a) {
  enum { COLUMNS = chunk_part<READ, SPAN>::COLUMNS, RUN = chunk_part<READ, SPAN>::RUN };
  TD_DYNAMIC_SHARED(shared);
  auto &s = *reinterpret_cast<wide_shared<COLUMNS, N> *>(shared);
  const linear_rows rows = wide_rows_of(a, threadIdx.x / WARP);
  const lane_rows r = rows_of<READ, SPAN>(wide_weight_of(a, rows.matrix), rows.row0, rows.end);
  const uint32_t n = n_slices_of<READ, SPAN>(a, r.n_cols), of_part = slices_of_part(n);
  const uint32_t n_parts = (n + of_part - 1) / of_part, n_splits = a.wide.n_splits;
  const uint32_t n_chunks = (r.n_cols + COLUMNS - 1) / COLUMNS;
  const uint32_t first = blockIdx.y * n_parts / n_splits * of_part;
  const uint32_t end = at_most((blockIdx.y + 1) * n_parts / n_splits * of_part, n);
  chunk_part<READ, SPAN> chunk, next;
  float total[N][4] = {};
  for (int t = 0; t < N; t++)
    s.sums[t][threadIdx.x] = {};
  wide_chunk at = {first, first};
  copy_activations<RUN, COLUMNS, N>(a, at.idx * COLUMNS, s.x[0]);
  fetch_chunk<ZEROS>(r, at.idx * COLUMNS, next);
#pragma unroll 1
  for (uint32_t place = 0; at.slice < end; place ^= 1) {
    chunk = next;
    copy_async_wait();
    __syncthreads(); // also: nobody reads the other buffer any more
    const wide_chunk then = next_of(at, n, n_chunks);
    if (then.slice < end) {
      copy_activations<RUN, COLUMNS, N>(a, then.idx * COLUMNS, s.x[place ^ 1]);
      fetch_chunk<ZEROS>(r, then.idx * COLUMNS, next);
    }
    multiply_chunk<ZEROS, READ, SPAN, COLUMNS, N>(r, chunk, s.x[place], total);
    if (then.slice != at.slice) {
      const bool ends = n_splits > 1 && (then.slice % of_part == 0 || then.slice == end);
      end_slice(total, s.sums, ends ? split_sums<N>(a, n_parts, at.slice / of_part) : nullptr);
    }
    at = then;
  }
  if (n_splits > 1 && !is_last_of_tile(a)) return;
#pragma unroll
  for (int t = 0; t < N; t++) {
    const fragment sum = s.sums[t][threadIdx.x]; // 0 where there are several blocks
    for (int c = 0; c < 4; c++)
      total[t][c] = sum.v[c];
  }
  for (uint32_t part = 0; n_splits > 1 && part < n_parts; part++) {
    const fragment *from = split_sums<N>(a, n_parts, part);
#pragma unroll
    for (int t = 0; t < N; t++) {
      const fragment more = from[t * THREADS];
      for (int c = 0; c < 4; c++)
        total[t][c] += more.v[c];
    }
  }
  __syncthreads(); // activations and sums are no longer read
  auto &results = *reinterpret_cast<wide_results<N> *>(shared);
  const uint32_t g = threadIdx.x % WARP / 4, p = threadIdx.x % 4 * 2;
  const uint32_t row = threadIdx.x / WARP * ROWS + g;
#pragma unroll
  for (uint32_t t = 0; t < N; t++) {
    for (uint32_t c = 0; c < 4; c++)
      results.y[t * TOKENS + p + c % 2][row + c / 2 * 8] = total[t][c];
  }
  __syncthreads();
  put_results<N>(a, SUMS_UNIT<READ>, results);
}

// Blocks of a tile: the fewest that have as many parts each and are enough for all SMs, if there
// are. One can only add up parts of a slice each.
static uint32_t splits_of(uint32_t n_tiles, uint32_t n_parts, uint32_t of_part, uint32_t n_sms) {
  for (uint32_t n = of_part > 1 ? 2 : 1; n < n_parts; n++)
    if (n_parts % n == 0 && n_tiles * n >= n_sms) return n;
  return n_parts;
}

struct wide_kernels {
  template <int READ, int SPAN, bool ZEROS, int N>
  static int run(const td_cu_linear_args &args, dim3 grid, td_cu_stream stream) {
    using shared = wide_shared<chunk_part<READ, SPAN>::COLUMNS, N>;
    static_assert(sizeof(shared) <= SHARED_BYTES && sizeof(wide_results<N>) <= sizeof(shared), "");
    auto kernel = linear_wide_kernel<READ, SPAN, ZEROS, N>;
    if (int failed = allow_shared(kernel, sizeof(shared))) return failed;
    return TD_LAUNCH(kernel, grid, THREADS, sizeof(shared), stream, args);
  }

  template <int READ, int SPAN, bool ZEROS>
  static int launch(const td_cu_linear_args *a, td_cu_stream stream) {
    td_cu_linear_args args = *a;
    const uint32_t n_slices = n_slices_of<READ, SPAN>(*a, a->w.cols);
    const uint32_t of_part = slices_of_part(n_slices), n_tiles = td_cu_wide_tiles(a);
    args.wide.n_splits = splits_of(n_tiles, ceil_div(n_slices, of_part), of_part, a->wide.n_sms);
    const dim3 grid(n_tiles, args.wide.n_splits);
    return a->tile_tokens == TD_CU_WIDE_TOKENS
               ? run<READ, SPAN, ZEROS, TD_CU_WIDE_TOKENS / TOKENS>(args, grid, stream)
               : run<READ, SPAN, ZEROS, TD_CU_WIDE_TOKENS / TOKENS / 2>(args, grid, stream);
  }
};

int linear_wide(const td_cu_linear_args *a, td_cu_stream stream) {
  return launch_for_format<wide_kernels>(a, stream);
}
