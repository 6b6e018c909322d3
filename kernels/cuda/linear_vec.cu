// kernels/cuda/linear_vec.cu - y = W x for few tokens, at the speed of reading W.
// Up to 16 tokens are one pass; more are passes of 16, by consecutive blocks that find W in L2. A
// block computes 16 rows of W by 8 or 16 tokens on tensor cores; its n warps take every n-th chunk
// of the columns. Weights go from memory directly to fragments. The assignment of columns to a
// fragment's elements is free as long as the activations match: so a lane loads eight consecutive
// weights of a row at once, and the activations of the same columns. A warp loads a chunk of 1 or 2
// KB, waits, and multiplies; TD_CU_VEC_WARPS warps per SM hide the memory latency. Nothing else is
// prefetched, because loads complete in order and needed data would wait for data needed later.
// Weights are exact in the fragments. FP4 weights are multiplied by their scales there, since BF16
// can hold the products; for other formats, sums over a scale's columns are multiplied by it in
// FP32. A token's result does not depend on the other tokens.
#include "kernels/cuda/dequant8.cuh"
#include "kernels/cuda/linear.cuh"
#include "kernels/cuda/mma.cuh"

enum {
  ROWS = VEC_ROWS,
  TOKENS = VEC_TILE_TOKENS,
  UNIT = 8, // columns per lane
  QUAD = 4 * UNIT
};

// A lane's data for its two rows in a chunk. SPAN: columns per scale, at least QUAD; 0 if sums have
// no scale. A run of FP4 has one scale, or two.
template <int READ, int SPAN> struct chunk_part {
  enum {
    RUN = IS_FP4<READ> || (READ == TD_CU_READ_I4 && SPAN > QUAD) ? 4 : 1, // units per load
    UNITS = RUN > 1          ? 8
            : BITS<READ> > 8 ? 32 / BITS<READ>
                             : 4,
    COLUMNS = UNITS * QUAD,
    SCALES = IS_FP4<READ> ? UNITS / RUN
             : SPAN > 0   ? COLUMNS / (SPAN > 0 ? SPAN : 1)
                          : 1
  };
  raw8<READ> w[UNITS][2];
  uint32_t scale[2][SCALES], zero[2][SCALES]; // zero: words of eight rows, if ZEROS
};

// Offset of unit u from a lane's first column.
template <int RUN> __device__ static uint32_t unit_at(uint32_t u) {
  return u / RUN * RUN * QUAD + u % RUN * UNIT;
}

// Addresses of a lane's rows.
struct lane_rows {
  const char *first[2]; // the lane's first eight weights
  row_scales scales[2];
  const uint32_t *zero[2]; // words of eight zero points
  uint32_t zero_shift[2];
  uint32_t column, n_cols; // the lane's first column; columns of the matrix
  bool at_once;            // scales and zero points of a whole chunk are loaded together
};

// Whether a chunk's scales are consecutive in their row and aligned in all chunks.
template <int READ, int SPAN> __device__ static bool are_at_once(const td_weight &w) {
  enum { SCALES = chunk_part<READ, SPAN>::SCALES };
  return SCALES > 1 && w.scale_cols == SPAN && weight_groups(w) % SCALES == 0;
}

template <int READ, int SPAN>
__device__ static lane_rows rows_of(const td_weight &w, uint32_t row0, uint32_t row_end) {
  lane_rows r = {};
  r.column = threadIdx.x % 4 * chunk_part<READ, SPAN>::RUN * UNIT;
  r.n_cols = w.cols;
  r.at_once = are_at_once<READ, SPAN>(w);
  for (uint32_t i = 0; i < 2; i++) {
    uint32_t row = at_most(row0 + threadIdx.x % WARP / 4 + 8 * i, row_end - 1);
    r.first[i] = static_cast<const char *>(w.data) +
                 bytes_of<READ>(static_cast<size_t>(row) * w.cols + r.column);
    settle(r.first[i]);
    if (w.scale) r.scales[i] = scales_of_row<READ>(w, row);
    if (w.zero) r.zero[i] = w.zero + static_cast<size_t>(row / 8) * weight_groups(w);
    r.zero_shift[i] = row % 8 * 4;
  }
  return r;
}

template <bool WHOLE, bool ZEROS, int READ, int SPAN>
__device__ static void fetch_scales(const lane_rows &r, uint32_t k, chunk_part<READ, SPAN> &part) {
  enum { SCALES = part.SCALES };
  uint32_t group[SCALES];
#pragma unroll
  for (uint32_t s = 0; s < SCALES; s++)
    group[s] = (WHOLE ? k + s * SPAN : at_most(k + s * SPAN, r.n_cols - 1)) >> r.scales[0].shift;
#pragma unroll
  for (uint32_t i = 0; i < 2; i++) {
    if constexpr (WHOLE && SCALES > 1) {
      if (r.at_once) {
        load_scales_at_once<READ>(r.scales[i], group[0], part.scale[i]);
        if (ZEROS) load_words(r.zero[i] + group[0], part.zero[i]);
        continue;
      }
    }
    load_scales<READ>(r.scales[i], group, part.scale[i]);
    for (uint32_t s = 0; ZEROS && s < SCALES; s++)
      part.zero[i][s] = __ldg(r.zero[i] + group[s]);
  }
}

// Loads the scales of each run of FP4.
template <bool WHOLE, int READ, int SPAN>
__device__ static void fetch_scales_of_runs(const lane_rows &r, uint32_t k,
                                            chunk_part<READ, SPAN> &part) {
  enum { RUN = chunk_part<READ, SPAN>::RUN, RUN_SCALES = READ == TD_CU_READ_NVFP4 ? 2 : 1 };
#pragma unroll
  for (uint32_t i = 0; i < 2; i++) {
#pragma unroll
    for (uint32_t s = 0; s < part.SCALES; s++) {
      uint32_t column = k + unit_at<RUN>(s * RUN) + r.column;
      const char *from = r.scales[i].first + column / (RUN * UNIT) * RUN_SCALES;
      part.scale[i][s] = 0;
      if (!WHOLE && column >= r.n_cols) continue;
      part.scale[i][s] = RUN_SCALES == 2 ? __ldg(reinterpret_cast<const uint16_t *>(from))
                                         : __ldg(reinterpret_cast<const uint8_t *>(from));
    }
  }
}

// WHOLE: all columns of the chunk at k exist; otherwise missing ones are zero.
template <bool WHOLE, bool ZEROS, int READ, int SPAN>
__device__ static void fetch(const lane_rows &r, uint32_t k, chunk_part<READ, SPAN> &part) {
  enum { UNITS = part.UNITS, RUN = part.RUN };
#pragma unroll
  for (uint32_t i = 0; i < 2; i++) {
    const char *first = r.first[i] + bytes_of<READ>(k);
#pragma unroll
    for (uint32_t u = 0; u < UNITS; u += RUN) {
      const char *from = first + bytes_of<READ>(unit_at<RUN>(u));
      bool is_there = WHOLE || k + unit_at<RUN>(u) + r.column < r.n_cols;
      if constexpr (RUN == 1) {
        part.w[u][i] = {};
        if (is_there) part.w[u][i] = load8<READ>(from);
      } else {
        uint4 run = {};
        if (is_there) run = load_once(reinterpret_cast<const uint4 *>(from));
        part.w[u][i] = {run.x}, part.w[u + 1][i] = {run.y};
        part.w[u + 2][i] = {run.z}, part.w[u + 3][i] = {run.w};
      }
    }
  }
  if constexpr (IS_FP4<READ>) fetch_scales_of_runs<WHOLE>(r, k, part);
  if constexpr (SPAN > 0) fetch_scales<WHOLE, ZEROS>(r, k, part);
}

// sum += a unit of two rows times the tokens' activations.
template <int TERMS>
__device__ static void multiply(const uint32_t (&w)[2][TERMS][4], const uint32_t (&x)[4],
                                float (&sum)[4]) {
  for (int n = 0; n < TERMS; n++) {
    for (int j = 0; j < 4; j += 2)
      mma_bf16(sum, {w[0][n][j], w[1][n][j], w[0][n][j + 1], w[1][n][j + 1]}, {x[j], x[j + 1]});
  }
}

// total += the sums of two rows, each times its scale.
__device__ static void add_scaled(float first, float second, const float (&sum)[4],
                                  float (&total)[4]) {
  for (int c = 0; c < 4; c++)
    total[c] += (c < 2 ? first : second) * sum[c];
}

// FP4's products with scales are stored divided by this, so that MXFP4 scales from 2^-93 to 2^33
// and all NVFP4 scales fit in BF16.
template <int READ>
constexpr float SUMS_UNIT = READ == TD_CU_READ_MXFP4   ? 0x1p32f
                            : READ == TD_CU_READ_NVFP4 ? 0x1p8f
                                                       : 1;

// The scale of unit u of a run, in the form that pairs_from_e2m1 takes.
template <int READ> __device__ static uint32_t factor_of(uint32_t scales, uint32_t u) {
  if (READ == TD_CU_READ_MXFP4) return scales * 0x00800080u + (126 - 32) * 0x00800080u;
  float scale = f32_from_e4m3(scales >> u / 2 * 8 & 0xff) * 0x1p118f;
  return bf16x2_cut(scale, scale);
}

// Multiplies unit u of a chunk by the activations, which are in the order of the weights' pairs.
// sum: of the columns that share a scale.
template <int SPAN, int TERMS, int SCALES>
__device__ static void add_unit(uint32_t u, const uint32_t (&w)[2][TERMS][4],
                                const uint32_t (&x)[4], const float (&scale)[2][SCALES],
                                float (&sum)[4], float (&total)[4]) {
  enum { SHARE = SPAN / QUAD }; // units per scale
  if constexpr (SPAN == 0) {
    multiply(w, x, total);
  } else {
    if (u % SHARE == 0) sum[0] = sum[1] = sum[2] = sum[3] = 0;
    multiply(w, x, sum);
    if (u % SHARE == SHARE - 1) add_scaled(scale[0][u / SHARE], scale[1][u / SHARE], sum, total);
  }
}

template <bool WHOLE, bool ZEROS, int READ, int SPAN, int N>
__device__ static void add_chunk(const lane_rows &r, uint32_t k, const chunk_part<READ, SPAN> &part,
                                 const uint16_t *const (&x)[N], float (&total)[N][4]) {
  enum { UNITS = part.UNITS, SCALES = part.SCALES, RUN = part.RUN };
  float sum[N][4], scale[2][SCALES];
  for (int i = 0; SPAN > 0 && i < 2; i++)
    scale_values<READ>(r.scales[i].dtype, part.scale[i], scale[i]);
#pragma unroll
  for (int u = 0; u < UNITS; u++) {
    if (RUN > 1 && u % RUN == 0) __syncwarp(); // keeps the compiler from loading activations first
    uint32_t pairs[2][N_TERMS<READ>][4];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      uint32_t zero = 8;
      if (ZEROS) zero = part.zero[i][u * SCALES / UNITS] >> r.zero_shift[i] & 15;
      if constexpr (IS_FP4<READ>)
        pairs_from_e2m1(part.w[u][i].v, factor_of<READ>(part.scale[i][u / RUN], u % RUN),
                        pairs[i][0]);
      else
        pairs8<READ>(part.w[u][i], less_zero_point(zero), pairs[i]);
    }
#pragma unroll
    for (int t = 0; t < N; t++) {
      uint4 v = {};
      if (WHOLE || k + unit_at<RUN>(u) + r.column < r.n_cols)
        v = __ldg(reinterpret_cast<const uint4 *>(x[t] + k) + unit_at<RUN>(u) / 8);
      uint32_t of_x[4] = {v.x, v.y, v.z, v.w};
      if (IN_FOURS<READ>) order_in_fours(of_x);
      add_unit<SPAN>(u, pairs, of_x, scale, sum[t], total[t]);
    }
  }
}

// Bounded so that registers suffice for that many warps per SM, in blocks of that many or a third.
template <int READ, int SPAN, bool ZEROS, int N>
__global__ static void __launch_bounds__(TD_CU_VEC_WARPS *WARP, 1)
    linear_vec_kernel(td_cu_linear_args a) {
  const linear_rows rows = linear_rows_of(a);
  linear_part part = linear_part_of(a, rows);
  if (part.n == 0) return;
  uint32_t n_cols = part.w.cols;
  const lane_rows r = rows_of<READ, SPAN>(part.w, rows.row0, rows.end);
  const uint16_t *x[N]; // past the last token: another token, whose sums are not stored
#pragma unroll
  for (uint32_t t = 0; t < N; t++) {
    uint32_t token = at_most(t * TOKENS + threadIdx.x % WARP / 4, part.n - 1);
    x[t] = linear_x(a, part.x_begin + token) + r.column;
  }
  float total[N][4] = {};
  chunk_part<READ, SPAN> chunk;
  uint32_t columns = chunk.COLUMNS, end = n_cols / columns * columns;
  uint32_t k = threadIdx.x / WARP * columns, step = blockDim.x / WARP * columns;
#pragma unroll 1
  for (; k < end; k += step) {
    fetch<true, ZEROS>(r, k, chunk);
    add_chunk<true, ZEROS>(r, k, chunk, x, total);
  }
  if (k == end && end < n_cols) {
    fetch<false, ZEROS>(r, end, chunk);
    add_chunk<false, ZEROS>(r, end, chunk, x, total);
  }
  put_row_sums(a, total, SUMS_UNIT<READ>);
}

// Any format, value by value: one warp per row; a lane takes every 32nd run of eight columns.
enum { ANY_WARPS = 4 };

template <int T> __global__ static void linear_any_kernel(td_cu_linear_args a) {
  linear_part part = linear_part_of(a, blockIdx.y);
  uint32_t row = a.row0 + blockIdx.x * ANY_WARPS + threadIdx.x / WARP;
  if (part.n == 0 || row >= a.row0 + a.n_rows) return;
  const td_weight &w = part.w;
  float sum[T] = {};
  for (uint32_t k = threadIdx.x % WARP * UNIT; k < w.cols; k += WARP * UNIT) {
    float v[UNIT];
    decode8<TD_CU_READ_ANY>(w, row, k, {}, v);
    scale_each(w, row, k, v);
#pragma unroll
    for (uint32_t t = 0; t < T; t++) {
      if (t >= part.n) break;
      float of_x[UNIT], dot = 0;
      activations8(linear_x(a, part.x_begin + t), k, w.cols, of_x);
      for (int e = 0; e < UNIT; e++)
        dot += v[e] * of_x[e];
      sum[t] += dot;
    }
  }
  const float *bias = linear_bias(a, blockIdx.y);
#pragma unroll
  for (uint32_t t = 0; t < T; t++) {
    if (t >= part.n) break;
    float total = warp_sum(sum[t]) * global_scale(w);
    if (threadIdx.x % WARP == 0) linear_put(a, linear_out_of(a), bias, part.begin + t, row, total);
  }
}

template <int READ, int SPAN, bool ZEROS = false>
static int launch(const td_cu_linear_args *a, td_cu_stream stream) {
  uint32_t n_blocks = ceil_div(a->n_rows, ROWS);
  for (const td_cu_linear_also &more : a->also)
    n_blocks += ceil_div(more.w.rows, ROWS);
  dim3 grid(a->n_at_once, n_blocks, a->n_matrices);
  uint32_t n_chunks = ceil_div(a->w.cols, chunk_part<READ, SPAN>::COLUMNS);
  uint32_t n_warps = at_most(n_chunks, a->vec_warps);
  uint32_t shared_bytes = n_warps * a->tile_tokens * ROWS * sizeof(float);
  auto kernel = a->tile_tokens == TOKENS ? linear_vec_kernel<READ, SPAN, ZEROS, 1>
                                         : linear_vec_kernel<READ, SPAN, ZEROS, 2>;
  TD_LAUNCH(kernel, grid, n_warps * WARP, shared_bytes, stream, *a);
  return launched();
}

static int launch_any(const td_cu_linear_args *a, td_cu_stream stream) {
  dim3 grid(ceil_div(a->n_rows, ANY_WARPS), a->n_at_once, a->n_matrices);
  auto kernel = a->tile_tokens == TOKENS ? linear_any_kernel<TOKENS>
                                         : linear_any_kernel<TD_CU_VEC_TOKENS>;
  TD_LAUNCH(kernel, grid, ANY_WARPS * WARP, 0, stream, *a);
  return launched();
}

extern "C" int td_cu_linear_vec(const td_cu_linear_args *a, td_cu_stream stream) {
  const td_weight &w = a->w;
  bool is_coarse = w.scale_cols >= 128 || w.scale_cols >= w.cols;
  switch (a->read) {
  case TD_CU_READ_F32: return launch<TD_CU_READ_F32, 0>(a, stream);
  case TD_CU_READ_F16: return launch<TD_CU_READ_F16, 0>(a, stream);
  case TD_CU_READ_BF16: return launch<TD_CU_READ_BF16, 0>(a, stream);
  case TD_CU_READ_F8:
    return is_coarse ? launch<TD_CU_READ_F8, 128>(a, stream)
                     : launch<TD_CU_READ_F8, QUAD>(a, stream);
  case TD_CU_READ_I8:
    return is_coarse ? launch<TD_CU_READ_I8, 128>(a, stream)
                     : launch<TD_CU_READ_I8, QUAD>(a, stream);
  case TD_CU_READ_I4:
    if (is_coarse && w.cols % 32 == 0)
      return w.zero ? launch<TD_CU_READ_I4, 128, true>(a, stream)
                    : launch<TD_CU_READ_I4, 128>(a, stream);
    return w.zero ? launch<TD_CU_READ_I4, QUAD, true>(a, stream)
                  : launch<TD_CU_READ_I4, QUAD>(a, stream);
  case TD_CU_READ_MXFP4: return launch<TD_CU_READ_MXFP4, 0>(a, stream);
  case TD_CU_READ_NVFP4: return launch<TD_CU_READ_NVFP4, 0>(a, stream);
  case TD_CU_READ_BLOCKS: return linear_blocks(a, stream);
  default: return launch_any(a, stream);
  }
}
