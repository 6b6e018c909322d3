// kernels/cuda/linear_ring.cuh - what products of many tokens share on sm_90a: warps that copy,
// warps that multiply, and a ring of steps between them in shared memory. A block has two
// warpgroups that multiply and a warp for each stage of the ring, which copies all of its steps: a
// fence that publishes a step waits for all copies of its warp, and so for none of other steps. The
// warps that copy go on to the next tile while the others store sums.
#pragma once

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

// Which row of x each of a part's tokens is. In shared memory, a table a warp, since registers are
// few.
enum : uint32_t { NO_ROW = 0xffffffffu };

template <int TOKENS>
__device__ inline void find_rows(const td_cu_linear_args &a, const linear_part &part,
                                 uint32_t (&row)[TOKENS]) {
  __syncwarp(); // the rows of the part before are no longer read
#pragma unroll 1
  for (uint32_t t = threadIdx.x % WARP; t < TOKENS; t += WARP)
    row[t] = t >= part.n ? NO_ROW : a.x_rows ? a.x_rows[part.x_begin + t] : part.x_begin + t;
  __syncwarp();
}

// A panel of tokens' rows, which are row_bytes apart; first: byte of their rows that it begins
// with. Zeros where there is no token or, with !is_there, no column of the lane's chunk.
template <int TOKENS>
__device__ inline void copy_panel(const void *x, uint32_t row_bytes, uint32_t first, bool is_there,
                                  const uint32_t (&row)[TOKENS], uint16_t (&to)[TOKENS][PANEL]) {
  enum { AT_ONCE = WARP / PANEL_CHUNKS };
  const uint32_t lane = unknown(threadIdx.x % WARP), chunk = lane % PANEL_CHUNKS;
  const char *from = static_cast<const char *>(x) + first + chunk * COPY;
#pragma unroll 4
  for (uint32_t t = lane / PANEL_CHUNKS; t < TOKENS; t += AT_ONCE) {
    const uint64_t r = row[t];
    copy_async(chunk_of(&to, t, chunk), reinterpret_cast<const uint16_t *>(from + r * row_bytes),
               is_there && r != NO_ROW);
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

// From byte `first` of the rows on, in pieces of Unit.
template <int CHUNKS, class Unit>
__device__ inline void copy_codes_in(const code_source &s, uint32_t first, uint4 *to) {
  enum { AT_ONCE = WARP / CHUNKS, UNITS = COPY / sizeof(Unit) };
  const uint32_t lane = unknown(threadIdx.x % WARP), row0 = lane / CHUNKS, chunk = lane % CHUNKS;
  const uint32_t column = first + chunk * COPY;
  const char *from = s.from + first;
#pragma unroll 4
  for (uint32_t i = 0; i < RING_ROWS; i += AT_ONCE, from += AT_ONCE * s.row_bytes) {
    const bool has_row = row0 + i < s.n_rows;
    Unit *at = reinterpret_cast<Unit *>(to + code_chunk<CHUNKS>(row0 + i, chunk));
    settle(from);
    for (uint32_t u = 0; u < UNITS; u++)
      copy_async_value(at + u, reinterpret_cast<const Unit *>(from) + u,
                       has_row && column + u * sizeof(Unit) < s.row_bytes);
  }
}

// Unit: uint32_t, uint2 or uint4, what rows are aligned to at least.
template <int CHUNKS, class Unit>
__device__ inline void copy_codes(const code_source &s, uint32_t first, uint4 *to) {
  if (s.in_runs || sizeof(Unit) == COPY) {
    copy_codes_in<CHUNKS, uint4>(s, first, to);
  } else {
    copy_codes_in<CHUNKS, Unit>(s, first, to);
  }
}
