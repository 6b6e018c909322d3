// kernels/cuda/linear_blocks.cu - y = W x for few tokens, W in GGUF's blocks.
// The division of work is linear_vec's: a block of threads computes 16 rows by 8 or 16 tokens, its
// n warps take every n-th chunk of 256 columns. Blocks are hardly ever aligned, so a warp copies a
// chunk of its rows to shared memory in whole words of 16 bytes, and finds codes there at any
// address. A group of 16 columns is one instruction of the tensor cores: a lane has four
// consecutive columns of two rows and of a token. Codes are exact in BF16; the group's sum is
// multiplied by its scale in FP32, and offsets by the sum of the group's activations, which a
// matrix of ones gives. A token's result does not depend on the other tokens.
#include "kernels/cuda/blocks.cuh"
#include "kernels/cuda/dequant8.cuh"
#include "kernels/cuda/linear.cuh"
#include "kernels/cuda/mma.cuh"

enum { CHUNK = 256, WARPS = 8 };

template <int DTYPE> struct chunk_of {
  enum {
    BYTES = CHUNK / block_of<DTYPE>::COLS * block_of<DTYPE>::BYTES,
    // of a row, which begins up to 15 bytes before its chunk; codes are found by words, up to four
    // bytes behind it
    PIECES = (15 + BYTES + 4 + 15) / 16,
    STRIDE = (PIECES | 1) * 16 // an odd number of pieces: rows begin in different banks
  };
};

// A lane's rows, in shared memory, and those that its warp copies.
struct block_rows {
  const uint8_t *data, *end; // the matrix
  size_t row_bytes;
  uint32_t row0, last;
  uint8_t *stage; // the warp's
};

__device__ static const uint8_t *row_at(const block_rows &r, uint32_t i) {
  return r.data + at_most(r.row0 + i, r.last) * r.row_bytes;
}

// Copies n_bytes from byte `at` of each row.
template <int DTYPE>
__device__ static void fetch(const block_rows &r, size_t at, uint32_t n_bytes) {
  enum { PIECES = chunk_of<DTYPE>::PIECES };
#pragma unroll 4
  for (uint32_t i = threadIdx.x % WARP; i < VEC_ROWS * PIECES; i += WARP) {
    const uint32_t row = i / PIECES, piece = i % PIECES;
    const uint8_t *begin = row_at(r, row) + at;
    const uint8_t *from = begin - reinterpret_cast<uintptr_t>(begin) % 16 + piece * 16;
    uint8_t *to = r.stage + row * chunk_of<DTYPE>::STRIDE + piece * 16;
    if (from >= begin + n_bytes) continue;
    if (from >= r.data && from + 16 <= r.end) {
      *reinterpret_cast<uint4 *>(to) = load_once(reinterpret_cast<const uint4 *>(from));
      continue;
    }
    for (uint32_t e = 0; e < 16; e++) // the matrix begins or ends within
      to[e] = from + e >= r.data && from + e < r.end ? from[e] : 0;
  }
}

// Four codes as two pairs of BF16.
template <int DTYPE> __device__ static void pairs4(uint32_t codes, uint32_t (&out)[2]) {
  constexpr td_dtype dtype = static_cast<td_dtype>(DTYPE);
  for (int i = 0; i < 2; i++) {
    if constexpr (gguf_is_signed(dtype)) {
      out[i] = bf16x2_from_i8(codes, i);
    } else {
      const uint32_t spread = __byte_perm(codes, 0, i ? 0x4342 : 0x4140);
      out[i] = bf16x2_fma(spread | 0x43004300u, 0x3f803f80u, less_zero_point(gguf_less(dtype)));
    }
  }
}

// total += a group's products. rows: the group's blocks.
template <int DTYPE, int N>
__device__ static void add_group(const uint8_t *const (&rows)[2], uint32_t group,
                                 const gguf_scale (&s)[2], const uint16_t *const (&x)[N],
                                 uint32_t k, float (&total)[N][4]) {
  const uint32_t ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
  uint32_t w[2][2];
#pragma unroll
  for (int i = 0; i < 2; i++)
    pairs4<DTYPE>(gguf_codes4(static_cast<td_dtype>(DTYPE), rows[i], group, threadIdx.x % 4 * 4,
                              shared_word()),
                  w[i]);
#pragma unroll
  for (int t = 0; t < N; t++) {
    const uint2 v = __ldg(reinterpret_cast<const uint2 *>(x[t] + k));
    float sum[4] = {}, of_x[4] = {};
    mma_bf16(sum, {w[0][0], w[1][0], w[0][1], w[1][1]}, {v.x, v.y});
    if (HAS_OFFSETS<DTYPE>) mma_bf16(of_x, ones, {v.x, v.y});
    for (int c = 0; c < 4; c++) {
      total[t][c] += s[c / 2].scale * sum[c];
      if (HAS_OFFSETS<DTYPE>) total[t][c] += s[c / 2].offset * of_x[c];
    }
  }
}

// total += the products of n_groups groups from column k on, whose rows are in shared memory. The
// four lanes of a row find a scale each.
template <int DTYPE, int N>
__device__ static void add_chunk(const uint8_t *const (&rows)[2], uint32_t n_groups,
                                 const uint16_t *const (&x)[N], uint32_t k, float (&total)[N][4]) {
  enum {
    SHARE = SCALE_GROUPS<DTYPE>,
    OF_BLOCK = block_of<DTYPE>::COLS / BLOCK_GROUP,
    BYTES = block_of<DTYPE>::BYTES
  };
#pragma unroll
  for (uint32_t first = 0; first < CHUNK / BLOCK_GROUP; first += 4 * SHARE) {
    if (first >= n_groups) return;
    const uint32_t own = first + threadIdx.x % 4 * SHARE;
    gguf_scale mine[2] = {};
    for (int i = 0; i < 2 && own < n_groups; i++)
      mine[i] = gguf_scale_of(static_cast<td_dtype>(DTYPE), rows[i] + own / OF_BLOCK * BYTES,
                              own % OF_BLOCK);
#pragma unroll
    for (uint32_t j = 0; j < 4; j++) {
      const uint32_t lane = threadIdx.x % WARP / 4 * 4 + j;
      gguf_scale s[2];
      for (int i = 0; i < 2; i++) {
        s[i].scale = __shfl_sync(TD_FULL_WARP, mine[i].scale, lane);
        s[i].offset = HAS_OFFSETS<DTYPE> ? __shfl_sync(TD_FULL_WARP, mine[i].offset, lane) : 0;
      }
#pragma unroll
      for (uint32_t h = 0; h < SHARE; h++) {
        const uint32_t group = first + j * SHARE + h, skip = group / OF_BLOCK * BYTES;
        if (group >= n_groups) return;
        add_group<DTYPE>({rows[0] + skip, rows[1] + skip}, group % OF_BLOCK, s, x,
                         k + group * BLOCK_GROUP, total);
      }
    }
  }
}

template <int DTYPE, int N>
__global__ static void __launch_bounds__(WARPS *WARP) linear_blocks_kernel(td_cu_linear_args a) {
  enum { STRIDE = chunk_of<DTYPE>::STRIDE };
  TD_DYNAMIC_SHARED(shared);
  const linear_part part = linear_part_of(a, blockIdx.x);
  if (part.n == 0) return;
  const uint32_t row0 = a.row0 + blockIdx.y * VEC_ROWS, n_cols = part.w.cols;
  const uint32_t warp = threadIdx.x / WARP, g = threadIdx.x % WARP / 4;
  block_rows r;
  r.data = static_cast<const uint8_t *>(part.w.data);
  r.row_bytes = static_cast<size_t>(n_cols / block_of<DTYPE>::COLS) * block_of<DTYPE>::BYTES;
  r.end = r.data + part.w.rows * r.row_bytes;
  r.row0 = row0;
  r.last = a.row0 + a.n_rows - 1;
  r.stage = shared + warp * VEC_ROWS * STRIDE;
  const uint16_t *x[N]; // past the last token: another token, whose sums are not stored
#pragma unroll
  for (uint32_t t = 0; t < N; t++) {
    const uint32_t token = at_most(t * VEC_TILE_TOKENS + g, part.n - 1);
    x[t] = linear_x(a, part.x_begin + token) + threadIdx.x % 4 * 4;
  }
  float total[N][4] = {};
#pragma unroll 1
  for (uint32_t k = warp * CHUNK; k < n_cols; k += blockDim.x / WARP * CHUNK) {
    const size_t at = static_cast<size_t>(k / block_of<DTYPE>::COLS) * block_of<DTYPE>::BYTES;
    const uint32_t n = at_most(n_cols - k, CHUNK);
    __syncwarp(); // the previous chunk was read
    fetch<DTYPE>(r, at, n / block_of<DTYPE>::COLS * block_of<DTYPE>::BYTES);
    __syncwarp();
    const uint8_t *rows[2];
    for (uint32_t i = 0; i < 2; i++)
      rows[i] = r.stage + (g + 8 * i) * STRIDE +
                reinterpret_cast<uintptr_t>(row_at(r, g + 8 * i) + at) % 16;
    add_chunk<DTYPE>(rows, n / BLOCK_GROUP, x, k, total);
  }
  __syncthreads(); // sums take the place of the chunks
  put_row_sums(a, total, 1);
}

template <int DTYPE> static int launch(const td_cu_linear_args *a, td_cu_stream stream) {
  dim3 grid(a->n_at_once, ceil_div(a->n_rows, VEC_ROWS), a->n_matrices);
  const uint32_t n_warps = at_most(ceil_div(a->w.cols, CHUNK), at_most(a->vec_warps, WARPS));
  const uint32_t each = chunk_of<DTYPE>::STRIDE, of_sums = a->tile_tokens * sizeof(float);
  const uint32_t shared_bytes = n_warps * VEC_ROWS * (each > of_sums ? each : of_sums);
  auto kernel = a->tile_tokens == VEC_TILE_TOKENS ? linear_blocks_kernel<DTYPE, 1>
                                                  : linear_blocks_kernel<DTYPE, 2>;
  return TD_LAUNCH(kernel, grid, n_warps * WARP, shared_bytes, stream, *a);
}

int linear_blocks(const td_cu_linear_args *a, td_cu_stream stream) {
  switch (a->w.dtype) {
#define X(id, cols, bytes)                                                                         \
  case TD_##id: return launch<TD_##id>(a, stream);
    TD_BLOCK_DTYPES(X)
#undef X
  default: return static_cast<int>(cudaErrorInvalidValue);
  }
}
