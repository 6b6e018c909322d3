// kernels/cuda/linear_chunk.cuh - how the warps of linear_vec and linear_wide take a matrix: a warp
// has 16 rows, and loads a chunk of the columns at a time from memory directly to fragments of
// tensor cores. The assignment of columns to a fragment's elements is free as long as the
// activations match: so a lane loads eight consecutive weights of a row at once, and the
// activations of the same columns. Weights are exact in the fragments. FP4 weights are multiplied
// by their scales there, since BF16 can hold the products; for other formats, sums over a scale's
// columns are multiplied by it in FP32.
#pragma once

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

// Slices of a matrix's columns, one of linear_vec's warps each: slice i is of every n-th chunk from
// chunk i on.
template <int READ, int SPAN>
TD_ANYWHERE inline uint32_t n_slices_of(const td_cu_linear_args &a, uint32_t n_cols) {
  const uint32_t columns = chunk_part<READ, SPAN>::COLUMNS;
  return at_most((n_cols + columns - 1) / columns, a.vec_warps / (a.glu.out ? 2 : 1));
}

// Offset of unit u from a lane's first column.
template <int RUN> __device__ inline uint32_t unit_at(uint32_t u) {
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
template <int READ, int SPAN> __device__ inline bool are_at_once(const td_weight &w) {
  enum { SCALES = chunk_part<READ, SPAN>::SCALES };
  return SCALES > 1 && w.scale_cols == SPAN && weight_groups(w) % SCALES == 0;
}

template <int READ, int SPAN>
__device__ inline lane_rows rows_of(const td_weight &w, uint32_t row0, uint32_t row_end) {
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
__device__ inline void fetch_scales(const lane_rows &r, uint32_t k, chunk_part<READ, SPAN> &part) {
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
__device__ inline void fetch_scales_of_runs(const lane_rows &r, uint32_t k,
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
__device__ inline void fetch(const lane_rows &r, uint32_t k, chunk_part<READ, SPAN> &part) {
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
__device__ inline void multiply(const uint32_t (&w)[2][TERMS][4], const uint32_t (&x)[4],
                                float (&sum)[4]) {
  for (int n = 0; n < TERMS; n++) {
    for (int j = 0; j < 4; j += 2)
      mma_bf16(sum, {w[0][n][j], w[1][n][j], w[0][n][j + 1], w[1][n][j + 1]}, {x[j], x[j + 1]});
  }
}

// total += the sums of two rows, each times its scale.
__device__ inline void add_scaled(float first, float second, const float (&sum)[4],
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
template <int READ> __device__ inline uint32_t factor_of(uint32_t scales, uint32_t u) {
  if (READ == TD_CU_READ_MXFP4) return scales * 0x00800080u + (126 - 32) * 0x00800080u;
  float scale = f32_from_e4m3(scales >> u / 2 * 8 & 0xff) * 0x1p118f;
  return bf16x2_cut(scale, scale);
}

// Unit u of the lane's two rows as pairs of BF16.
template <bool ZEROS, int READ, int SPAN>
__device__ inline void unit_pairs(const lane_rows &r, const chunk_part<READ, SPAN> &part, int u,
                                  uint32_t (&pairs)[2][N_TERMS<READ>][4]) {
  enum { UNITS = part.UNITS, SCALES = part.SCALES, RUN = part.RUN };
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
}

// Launches kernels::launch<READ, SPAN, ZEROS>(a, stream) for the format of a->read, which is
// neither TD_CU_READ_ANY nor _BLOCKS.
template <class Kernels>
static int launch_for_format(const td_cu_linear_args *a, td_cu_stream stream) {
  const td_weight &w = a->w;
  const bool is_coarse = w.scale_cols >= 128 || w.scale_cols >= w.cols;
  switch (a->read) {
  case TD_CU_READ_F32: return Kernels::template launch<TD_CU_READ_F32, 0, false>(a, stream);
  case TD_CU_READ_F16: return Kernels::template launch<TD_CU_READ_F16, 0, false>(a, stream);
  case TD_CU_READ_F8:
    return is_coarse ? Kernels::template launch<TD_CU_READ_F8, 128, false>(a, stream)
                     : Kernels::template launch<TD_CU_READ_F8, QUAD, false>(a, stream);
  case TD_CU_READ_I8:
    return is_coarse ? Kernels::template launch<TD_CU_READ_I8, 128, false>(a, stream)
                     : Kernels::template launch<TD_CU_READ_I8, QUAD, false>(a, stream);
  case TD_CU_READ_I4:
    if (is_coarse && w.cols % 32 == 0)
      return w.zero ? Kernels::template launch<TD_CU_READ_I4, 128, true>(a, stream)
                    : Kernels::template launch<TD_CU_READ_I4, 128, false>(a, stream);
    return w.zero ? Kernels::template launch<TD_CU_READ_I4, QUAD, true>(a, stream)
                  : Kernels::template launch<TD_CU_READ_I4, QUAD, false>(a, stream);
  case TD_CU_READ_MXFP4: return Kernels::template launch<TD_CU_READ_MXFP4, 0, false>(a, stream);
  case TD_CU_READ_NVFP4: return Kernels::template launch<TD_CU_READ_NVFP4, 0, false>(a, stream);
  default: return Kernels::template launch<TD_CU_READ_BF16, 0, false>(a, stream);
  }
}
