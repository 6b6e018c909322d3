// kernels/cuda/linear_ring.cuh - what products of many tokens share on sm_90a: warps that copy,
// warps that multiply, and a ring of steps between them in shared memory. A block has two
// warpgroups that multiply and a warp for each stage of the ring, which copies all of its steps: a
// fence that publishes a step waits for all copies of its warp, and so for none of other steps. The
// warps that copy go on to the next tile while the others store sums.
#pragma once

#include "kernels/cuda/attn.cuh"
#include "kernels/cuda/linear.cuh"
#include "kernels/cuda/mbarrier.cuh"

enum {
  GROUP = 4 * WARP, // threads of a warpgroup
  RING_THREADS = 3 * GROUP,
  MULTIPLY_WARPS = 8,
  RING_ROWS = 256, // of W
  COPY = 16        // bytes
};

// Whether a thread belongs to a warp that copies. Divides the block's registers: threads that
// multiply get N each, threads that copy the rest.
template <int N> __device__ inline bool begin_copying() {
  enum { EACH = 65536 / RING_THREADS / 8 * 8, LEFT = 3 * EACH - 2 * N };
  static_assert(N % 8 == 0 && N > LEFT, "");
  if (threadIdx.x >= MULTIPLY_WARPS * WARP) {
    leave_registers<LEFT>();
    return true;
  }
  take_registers<N>();
  return false;
}

// Whether there is a stage for a warp that copies.
template <int STAGES> __device__ inline bool has_stage() {
  return threadIdx.x < (MULTIPLY_WARPS + STAGES) * WARP;
}

// What a block computes: tiles [begin, end) of RING_ROWS rows, of parts first, first + gridDim.y
// and so on. Blocks that run at a time share rows of W and tokens: eight parts go through the rows
// together.
struct linear_span {
  uint32_t first, begin, end;
};

__device__ inline linear_span linear_span_of(const td_cu_linear_args &a) {
  enum { TOGETHER = 8 };
  const uint32_t flat = blockIdx.y * gridDim.x + blockIdx.x, of_group = TOGETHER * gridDim.x;
  const uint32_t group = flat / of_group * TOGETHER, in_group = flat % of_group;
  const uint32_t n = at_most(gridDim.y - group, TOGETHER);
  const uint32_t n_tiles = (a.n_rows + RING_ROWS - 1) / RING_ROWS;
  const uint32_t each = (n_tiles + gridDim.x - 1) / gridDim.x, begin = in_group / n * each;
  return {group + in_group % n, begin, at_most(begin + each, n_tiles)};
}

template <int STAGES> struct linear_ring {
  static_assert(STAGES <= GROUP / WARP, "a warp for each");
  uint64_t full[STAGES], free[STAGES];
  // What registers would be too few for:
  linear_span span;
  linear_part part[RING_THREADS / WARP]; // see find_part
};

// By all threads of the block.
template <int STAGES>
__device__ inline void ring_open(const td_cu_linear_args &a, linear_ring<STAGES> &ring) {
  if (threadIdx.x == 0) {
    ring.span = linear_span_of(a);
    for (uint32_t i = 0; i < STAGES; i++) {
      mbarrier_open(&ring.full[i], 1);
      mbarrier_open(&ring.free[i], MULTIPLY_WARPS);
    }
  }
  __syncthreads();
}

// Step n of a block, counted over all its tiles, is at stage n % STAGES.
template <int STAGES> __device__ inline void ring_wait_free(linear_ring<STAGES> &ring, uint32_t n) {
  mbarrier_wait(&ring.free[n % STAGES], n / STAGES + 1);
}

// The first step of the warp's stage from step n on.
template <int STAGES> __device__ inline uint32_t ring_next(uint32_t n) {
  const uint32_t warp = threadIdx.x / WARP - MULTIPLY_WARPS;
  return n + (warp + STAGES - n % STAGES) % STAGES;
}

// By the warp that has copied the step.
template <int STAGES> __device__ inline void ring_fill(linear_ring<STAGES> &ring, uint32_t n) {
  copy_async_wait();
  wgmma_publish();
  __syncwarp();
  if (threadIdx.x % WARP == 0) mbarrier_arrive(&ring.full[n % STAGES]);
}

template <int STAGES> __device__ inline void ring_wait_full(linear_ring<STAGES> &ring, uint32_t n) {
  mbarrier_wait(&ring.full[n % STAGES], n / STAGES);
}

// By each warp that multiplies, when it needs the step no more.
template <int STAGES> __device__ inline void ring_free(linear_ring<STAGES> &ring, uint32_t n) {
  __syncwarp();
  if (threadIdx.x % WARP == 0) mbarrier_arrive(&ring.free[n % STAGES]);
}

// ---- tiles --------------------------------------------------------------------------------------

// Part `at`, the warp's own copy.
template <int STAGES>
__device__ inline const linear_part &find_part(const td_cu_linear_args &a, uint32_t at,
                                               linear_ring<STAGES> &ring) {
  linear_part &part = ring.part[threadIdx.x / WARP];
  __syncwarp(); // the one before is no longer read
  if (threadIdx.x % WARP == 0) part = linear_part_of(a, at);
  __syncwarp();
  return part;
}

// A block begins and ends with a pipeline that is not full, so it has several tiles of a part where
// there are blocks enough for some 130 SMs all the same.
static inline dim3 linear_grid(const td_cu_linear_args &a) {
  enum { ENOUGH = 1024 };
  const uint32_t n_tiles = ceil_div(a.n_rows, RING_ROWS);
  const size_t n = static_cast<size_t>(n_tiles) * a.n_at_once * a.n_matrices / ENOUGH;
  const uint32_t each = n < 1 ? 1 : n < n_tiles ? static_cast<uint32_t>(n) : n_tiles;
  return dim3(ceil_div(n_tiles, each), a.n_at_once, a.n_matrices);
}

// ---- copies, by one warp ------------------------------------------------------------------------

// Where the rows of x of a part's tokens begin, in units of COPY, a table a warp, since registers
// are few. Tokens that there are not have the last one's row, and sums that are not stored.
template <int TOKENS> struct token_rows {
  uint4 at[TOKENS / 4]; // of tokens t, t + 4, t + 8 and t + 12, which a lane copies together
};

__device__ inline uint32_t &row_of_token(uint4 *at, uint32_t n_tokens, uint32_t t) {
  return reinterpret_cast<uint32_t *>(at)[t % 4 * (n_tokens / 4) + t / 4];
}

template <int TOKENS>
__device__ inline void find_rows(const td_cu_linear_args &a, const linear_part &part,
                                 uint32_t row_bytes, token_rows<TOKENS> &rows) {
  __syncwarp(); // the rows of the part before are no longer read
#pragma unroll 1
  for (uint32_t t = threadIdx.x % WARP; t < TOKENS; t += WARP) {
    const uint32_t i = part.x_begin + at_most(t, part.n - 1);
    row_of_token(rows.at, TOKENS, t) = (a.x_rows ? a.x_rows[i] : i) * (row_bytes / COPY);
  }
  __syncwarp();
}

// A panel of n tokens' rows, and of as many more as make it 16; first: byte of their rows that it
// begins with. Zeros with !is_there: no column of the lane's chunk.
template <int TOKENS>
__device__ inline void copy_panel(const void *x, uint32_t first, bool is_there, uint32_t n,
                                  const token_rows<TOKENS> &rows, uint16_t (&to)[TOKENS][PANEL]) {
  static_assert(WARP / PANEL_CHUNKS == 4, "a lane has every fourth token");
  const uint32_t lane = unknown(threadIdx.x % WARP), t = lane / PANEL_CHUNKS;
  const uint32_t chunk = lane % PANEL_CHUNKS;
  const char *from = static_cast<const char *>(x) + first + chunk * COPY;
  const uint4 *at = rows.at + t * (TOKENS / 16);
  settle(from);
  uint16_t *even = chunk_of(&to, t, chunk), *odd = chunk_of(&to, t + 4, chunk);
#pragma unroll 1
  for (uint32_t i = 0; i < n; i += 16, even += 16 * PANEL, odd += 16 * PANEL) {
    const uint4 v = *at++;
    const uint32_t places[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (uint32_t j = 0; j < 4; j++)
      copy_async((j % 2 ? odd : even) + j / 2 * 8 * PANEL,
                 reinterpret_cast<const uint16_t *>(from + static_cast<size_t>(places[j]) * COPY),
                 is_there);
  }
}

// Rows of codes, of CHUNKS chunks each. The same bytes of eight rows cover all banks: chunk c is at
// position c ^ row / (8 / CHUNKS) % CHUNKS, which with eight chunks is swizzle.cuh's.
template <int CHUNKS> __device__ inline uint32_t code_chunk(uint32_t row, uint32_t chunk) {
  static_assert(CHUNKS == 2 || CHUNKS == 4 || CHUNKS == 8, "");
  return row * CHUNKS + (chunk ^ row / (8 / CHUNKS) % CHUNKS);
}

// What a warp copies of W: the lane's chunk of RING_ROWS rows, zeros from row n_rows on and where
// the row has ended. Copies are of COPY bytes where rows are aligned to that, else of LEAST.
struct code_source {
  const char *from; // the row of the lane's first chunk, at the chunk
  uint32_t row_bytes, n_rows;
  bool in_runs;
};

template <int CHUNKS>
__device__ inline code_source codes_of(const td_weight &w, uint32_t row_bytes, uint32_t row0,
                                       uint32_t end) {
  const uint32_t lane = threadIdx.x % WARP;
  const uint64_t row = row0 + lane / CHUNKS;
  code_source out;
  out.row_bytes = row_bytes;
  out.from = static_cast<const char *>(w.data) + row * row_bytes + lane % CHUNKS * COPY;
  out.n_rows = end - row0;
  out.in_runs = (reinterpret_cast<uintptr_t>(w.data) | row_bytes) % COPY == 0;
  return out;
}

// From byte `first` of the rows on, in pieces of Unit. WHOLE: all rows and columns exist.
template <int CHUNKS, class Unit, bool WHOLE>
__device__ inline void copy_codes_in(const code_source &s, uint32_t first, uint4 *to) {
  enum { AT_ONCE = WARP / CHUNKS, UNITS = COPY / sizeof(Unit), TURN = AT_ONCE < 8 ? 8 : AT_ONCE };
  const uint32_t lane = unknown(threadIdx.x % WARP), row0 = lane / CHUNKS, chunk = lane % CHUNKS;
  const uint32_t column = first + chunk * COPY;
  const char *from = s.from + first;
  uint4 *place[TURN / AT_ONCE]; // of rows that are TURN apart, chunks have the same position
  for (uint32_t e = 0; e < TURN / AT_ONCE; e++)
    place[e] = to + code_chunk<CHUNKS>(row0 + e * AT_ONCE, chunk);
#pragma unroll 2
  for (uint32_t i = 0; i < RING_ROWS; i += 2 * TURN) {
#pragma unroll
    for (uint32_t e = 0; e < 2 * TURN / AT_ONCE; e++, from += AT_ONCE * s.row_bytes) {
      const uint32_t row = e * AT_ONCE;
      Unit *at = reinterpret_cast<Unit *>(place[e % (TURN / AT_ONCE)] +
                                          (i + row / TURN * TURN) * CHUNKS);
      settle(from);
      for (uint32_t u = 0; u < UNITS; u++)
        copy_async_value(
            at + u, reinterpret_cast<const Unit *>(from) + u,
            WHOLE || (row0 + i + row < s.n_rows && column + u * sizeof(Unit) < s.row_bytes));
    }
  }
}

// Unit: uint32_t, uint2 or uint4, what rows are aligned to at least.
template <int CHUNKS, class Unit>
__device__ inline void copy_codes(const code_source &s, uint32_t first, uint4 *to) {
  const bool in_runs = s.in_runs || sizeof(Unit) == COPY;
  if (in_runs && s.n_rows >= RING_ROWS && first + CHUNKS * COPY <= s.row_bytes) {
    copy_codes_in<CHUNKS, uint4, true>(s, first, to);
  } else if (in_runs) {
    copy_codes_in<CHUNKS, uint4, false>(s, first, to);
  } else {
    copy_codes_in<CHUNKS, Unit, false>(s, first, to);
  }
}

// ---- launches -----------------------------------------------------------------------------------

// Stages: what the kernel has in shared memory.
template <class Stages, class Kernel>
static int launch_ring(Kernel kernel, const td_cu_linear_args *a, td_cu_stream stream) {
  static_assert(sizeof(Stages) <= 227 << 10, "shared memory of sm_90");
  if (int failed = allow_shared(kernel, sizeof(Stages))) return failed;
  return TD_LAUNCH(kernel, linear_grid(*a), RING_THREADS, sizeof(Stages), stream, *a);
}
