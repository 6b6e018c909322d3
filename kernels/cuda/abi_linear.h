// kernels/cuda/abi_linear.h - arguments of matrices and experts: weights as kernels read them,
// products, activations in 8 bits, routing. Only abi.h includes it.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tandem/types.h"

// How a linear kernel loads eight consecutive weights of a row.
typedef enum {
  TD_CU_READ_ANY, // value by value: any format, any alignment
  // The others require: cols % 8 == 0; rows of data aligned to eight
  // weights, at most 16 bytes; rows of x aligned to eight activations; scales and zero points
  // aligned to 16 bytes; groups of whole rows or of a power of two columns, at least 32.
  TD_CU_READ_F32,
  TD_CU_READ_F16,
  TD_CU_READ_BF16,
  TD_CU_READ_F8,
  TD_CU_READ_I8,
  TD_CU_READ_I4,
  // These require cols % 32 == 0.
  TD_CU_READ_MXFP4, // groups of 32, scales E8M0 from 2^TD_CU_E8M0_LEAST to 2^TD_CU_E8M0_MOST
  TD_CU_READ_NVFP4, // groups of 16, scales E4M3
  // GGUF's blocks, at any address; rows of x aligned to eight activations. linear_vec reads them
  // whole, others value by value.
  TD_CU_READ_BLOCKS,
  TD_CU_N_READS
} td_cu_read;

// Pairs [begin, begin + n) in sorted order, all of one expert.
typedef struct {
  uint32_t expert, begin, n;
} td_cu_tile;

// A further matrix of linear_vec's x, all of its rows; w.data NULL: none.
enum { TD_CU_LINEAR_ALSO = 2 };
typedef struct {
  td_weight w;
  td_vec bias;
  void *y;
  size_t y_stride;
} td_cu_linear_also;

// The activation of gate and up, silu(gate) * up. With limit > 0, g = min(gate, limit) and u =
// clamp(up, -limit, limit) it is g * sigmoid(alpha * g) * (u + 1) or, plain, silu(g) * u.
typedef struct {
  uint16_t *out; // BF16; of td_cu_linear_args: [n_tokens][n_rows], NULL: there is none
  float limit, alpha;
  uint32_t plain, unused; // bool
} td_cu_glu;

// A window on the tiles that the sorted pairs were cut into: of the tiles [*first, *end), which are
// read from device memory, at most n_tiles after skipping `skip`. Kernels count pairs from the
// window's first one, and experts from first_expert.
typedef struct {
  const td_cu_tile *tiles; // NULL: no tiles, all pairs are one range
  const uint32_t *first, *end;
  uint32_t skip, n_tiles, first_expert, unused;
} td_cu_tile_range;

// How linear_vec computes TD_CU_WIDE_TOKENS tokens or half as many at a time: in tiles of
// TD_CU_WIDE_ROWS rows, which are several blocks each where that gives n_sms of them. sums and
// n_arrived may be NULL if there are n_sms tiles, and at most TD_CU_WIDE_PARTS warps a matrix.
enum { TD_CU_WIDE_TOKENS = 64, TD_CU_WIDE_ROWS = 128, TD_CU_WIDE_PARTS = 12 };
typedef struct {
  float *sums; // [tiles][parts][TD_CU_WIDE_ROWS * tile_tokens], parts: at most as many warps
  uint32_t *n_arrived;      // [tiles], 0 before and after
  uint32_t n_sms, n_splits; // n_splits is the launcher's
} td_cu_wide;

// y[i][r - row0] = sum_k w[r][k] * x[i][k] (+ bias[r - row0]) for r in [row0, row0 + n_rows).
// Without tiles, i runs over the n_tokens rows of x. With tiles, a tile gives the expert and the
// rows of y, and row i of y uses row x_rows[pair] of x (row i if x_rows is NULL). A table may hold
// several matrices per expert; their results are y_step elements apart.
//   linear_vec, linear_mma  all weights
//   linear_wgmma            needs td_cu_props.has_wgmma; not TD_CU_READ_ANY, _BLOCKS, _F32, _F16
//   linear_a8               weights in E4M3, which needs td_cu_props.has_f8, or I8, and x8 of the
//                           same dtype; cols % 8 == 0, rows of data aligned to 8
//                           bytes; f32 scales of whole rows or multiples of TD_CU_A8_BLOCK columns
//   linear_a8_wgmma         as linear_a8; needs td_cu_props.has_wgmma
typedef struct {
  td_weight w;              // with experts: one of them, since all have the same dims and format
  const td_weight *experts; // NULL, or in device memory: [n_matrices][n_experts]
  const int32_t *slots;     // NULL, or i32: an expert's index in experts
  uint32_t n_matrices, n_experts;
  size_t y_step;
  td_cu_tile_range range;
  const uint32_t *x_rows; // indexed by pair, counted over all pairs
  const uint16_t *x;
  const uint8_t *x8; // linear_a8, linear_a8_wgmma: codes of td_cu_round_a8_args, in place of x
  const float *x8_scale;
  void *y; // BF16 or, with y_f32, f32
  td_vec bias;
  // With tiles only: NULL, or f32 [experts of the layer][n_rows]; the row of a tile's expert is
  // added. Biases of different matrices are bias_step elements apart.
  const float *expert_bias;
  size_t bias_step;
  size_t x_stride, y_stride;
  uint32_t n_tokens, row0, n_rows;
  // Tokens of a tile:
  //   linear_vec    8 or TD_CU_VEC_TOKENS; for at most that many tokens, also TD_CU_WIDE_TOKENS or
  //                 half of it: without tiles, and not with TD_CU_READ_ANY or _BLOCKS
  //   linear_mma    TD_CU_MMA_TOKENS
  //   linear_wgmma  TD_CU_MMA_TOKENS or TD_CU_WGMMA_TOKENS
  //   linear_a8     TD_CU_MMA_TOKENS or TD_CU_A8_TOKENS
  uint32_t tile_tokens;
  uint32_t vec_warps; // linear_vec: warps per block, at most; determines summation order
  // Tiles that get their own blocks. linear_vec needs all possible ones; a block of linear_mma or
  // linear_wgmma loops over further tiles.
  uint32_t n_at_once;
  td_cu_read read;
  uint8_t y_f32;  // bool
  uint8_t in_f16; // bool; linear_mma, TD_CU_READ_F8: short sums in F16; not on compute capability 9
  uint16_t add;   // bool; linear_vec: y += instead of y =, the product rounded to f32 before
  // linear_vec, not with experts, TD_CU_READ_ANY or _BLOCKS. The matrices differ from w only in
  // data and number of rows.
  td_cu_linear_also also[TD_CU_LINEAR_ALSO];
  // linear_vec without tiles, of the two matrices gate and up, with the conditions of `also`:
  // writes the activation of both instead of y, without biases.
  td_cu_glu glu;
  td_cu_wide wide;
} td_cu_linear_args;

// Tiles of rows of linear_vec's TD_CU_WIDE_TOKENS; of gate and up, half a tile is of each.
static inline uint32_t td_cu_wide_tiles(const td_cu_linear_args *a) {
  const uint32_t rows = TD_CU_WIDE_ROWS, of_glu = TD_CU_WIDE_ROWS / 2;
  if (a->glu.out) return (a->n_rows + of_glu - 1) / of_glu;
  uint32_t n = (a->n_rows + rows - 1) / rows;
  for (uint32_t i = 0; i < TD_CU_LINEAR_ALSO; i++)
    n += (a->also[i].w.rows + rows - 1) / rows;
  return n;
}

enum { TD_CU_E8M0_LEAST = -93, TD_CU_E8M0_MOST = 33 };
enum {
  TD_CU_VEC_TOKENS = 16,
  TD_CU_VEC_WARPS = 24,
  TD_CU_MMA_TOKENS = 64,
  TD_CU_WGMMA_TOKENS = 128,
  TD_CU_A8_TOKENS = 128
};

// Rounds x to dtype in blocks of TD_CU_A8_BLOCK columns: with m the largest magnitude in a block,
// or TD_CU_A8_LEAST_MOST if that is more, the scale is m / MOST, with MOST the dtype's largest
// value, and codes are x * (MOST / m) rounded to nearest even: of TD_F8E4M3 after that product was
// rounded to f32, of TD_I8 before. With NaN or infinity in a block its products are NaN.
#define TD_CU_E4M3_MOST     448.0f
#define TD_CU_INT8_MOST     127.0f
#define TD_CU_A8_LEAST_MOST 0x1p-100f
enum { TD_CU_A8_BLOCK = 128 };
typedef struct {
  const uint16_t *x;
  uint8_t *codes; // [n_rows][n_blocks * TD_CU_A8_BLOCK], 16-byte aligned; from cols on zeros
  float *scales;  // [n_rows][n_blocks], n_blocks = ceil(cols / TD_CU_A8_BLOCK)
  td_cu_tile_range range; // with tiles: x and codes are of its pairs, n_rows at most
  size_t x_stride;
  uint32_t n_rows, cols;
  td_dtype dtype; // TD_F8E4M3 or TD_I8
  uint32_t unused;
} td_cu_round_a8_args;

// y[i][r] = sum_k w[r][k] * x[i][k] through cuBLAS; w is dense.
typedef struct {
  const uint16_t *w; // [n_rows][cols]
  const uint16_t *x; // [n_tokens][x_stride]
  void *y;           // [n_tokens][y_stride], BF16 or, with y_f32, f32
  size_t x_stride, y_stride;
  uint32_t n_tokens, n_rows, cols;
  uint32_t y_f32; // bool
} td_cu_gemm_args;

// out[r][k] = w[row0 + r][k], rounded to BF16. cols % 8 == 0.
typedef struct {
  td_weight w;
  uint16_t *out; // [n_rows][cols], 16-byte aligned
  uint32_t row0, n_rows, unused;
  td_cu_read read;
} td_cu_dequant_args;

enum { TD_CU_MAX_EXPERTS = 1024 };

// Sorts the pairs (token, j) of ids [n_tokens][top_k], each in [0, n_experts), by expert and cuts
// each expert's pairs into tiles of at most tile_tokens. slots: NULL, or i32 [n_experts]; pairs of
// experts with a negative one are left out.
typedef struct {
  const int32_t *ids, *slots;
  uint32_t *token;      // [n_pairs] in sorted order: the pair's token
  uint32_t *place;      // [n_pairs]: the pair's index in sorted order; UINT32_MAX: left out
  td_cu_tile *tiles;    // at most [n_pairs]
  uint32_t *first_tile; // [n_experts + 1]: each expert's first tile, then the number of tiles
  uint32_t *counts; // [TD_CU_SORT_BLOCKS][n_experts], used with more than TD_CU_SORT_PAIRS pairs
  uint32_t n_tokens, top_k, n_experts, tile_tokens;
  int32_t *fault;
} td_cu_moe_sort_args;

enum { TD_CU_SORT_PAIRS = 4096, TD_CU_SORT_BLOCKS = 64 };

// glu.out[i] = the activation of gate[i] and up[i] over the range's rows of dim elements, at most
// n_rows. pairs, with a limit: gate has twice as many elements, those of gate and up alternating.
typedef struct {
  const float *gate, *up;
  td_cu_glu glu;
  td_cu_tile_range range;
  uint32_t n_rows, dim;
  uint32_t pairs, unused; // bool
} td_cu_swiglu_args;

// out[t] (+)= sum_j weights[t][j] * parts[place[t][j]] over the pairs in the range, in the order of
// j or, with by_expert, of place. weights NULL: all 1. place NULL: parts are in the order of pairs.
// out is BF16 or, with out_f32, f32. top_k <= TD_CU_MAX_TOP_K. by_pair: no sum, but out[pair] =
// parts[place[pair]], f32, for the pairs in the range.
typedef struct {
  const float *parts;
  const uint32_t *place;
  const float *weights;
  void *out;
  td_cu_tile_range range;
  uint32_t n_tokens, top_k, dim;
  bool accumulate, out_f32, by_expert, by_pair;
} td_cu_moe_sum_args;

enum { TD_CU_MAX_TOP_K = 64 };
