// kernels/cuda/abi.h - the interface between the program and the CUDA library, in plain C.
// The library (kernels/cuda/*.cu, with the CUDA runtime linked in) is loaded at run time and
// exports one table of functions; the program itself does not link CUDA. tests/cuda_emu builds the
// same library from the same sources without a GPU.
//
// Functions return 0 or a code for error_text. Operators are enqueued on a stream; pointers in
// their arguments are device memory. Activations are BF16 bits in uint16_t, dense unless a stride
// (in elements) is given; accumulation is FP32. The operators are those of device/device.h or parts
// of them; shapes are documented there.
//
// No struct has padding, which the compiler checks: a field named unused is where it would be. So
// what a kernel is passed is all initialized, and the emulator can look for pointers in it.
//
// A launcher does not check sizes, dtypes or anything else the host can check. For errors that only
// the device can see (an id, position or page out of range) the kernel skips that row and stores a
// td_cu_fault in *fault, which is host memory.
#ifndef KERNELS_CUDA_ABI_H
#define KERNELS_CUDA_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tandem/types.h"

#if defined(__GNUC__) && !defined(__CUDACC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic error "-Wpadded"
#endif

#define TD_CUDA_ABI_VERSION 30u
#define TD_CUDA_ABI_SYMBOL  "td_cuda_abi"

typedef void *td_cu_stream;
typedef void *td_cu_event;
typedef void *td_cu_blas;
typedef void *td_cu_graph;
typedef void *td_cu_share; // of the GPU's SMs
// a cuBLAS function by name; NULL: not available
typedef void *(*td_cu_symbol_fn)(void *ctx, const char *name);

typedef enum {
  TD_CU_FAULT_NONE,
  TD_CU_FAULT_TOKEN,    // a token id outside the vocabulary
  TD_CU_FAULT_ROW,      // a negative row to gather
  TD_CU_FAULT_POSITION, // a negative position, or one beyond the sequence's pages
  TD_CU_FAULT_PAGE,     // an absent page
  TD_CU_FAULT_EXPERT,   // an expert id out of range
  TD_CU_FAULT_TIMEOUT,  // timeout while waiting for a signal
  TD_CU_FAULT_CANCELED, // canceled while waiting for a signal
} td_cu_fault;

typedef struct {
  char name[128];
  size_t total_bytes;
  int pci_domain, pci_bus, pci_device;
  int capability; // 10 * major + minor
  int n_sms;
  uint32_t has_wgmma; // bool: sm_90a, and the library has code for it
  uint32_t has_f8;    // bool: E4M3 on tensor cores, sm_89 and later, likewise
  uint32_t unused;
} td_cu_props;

typedef struct {
  td_weight table;
  const int32_t *ids;
  uint16_t *out;
  uint32_t n_tokens, unused;
  int32_t *fault;
} td_cu_embed_args;

// x += y; y is BF16 or, with y_f32, f32.
typedef struct {
  uint16_t *x;
  const void *y;
  size_t n;
  uint32_t y_f32; // bool
  uint32_t unused;
} td_cu_add_args;

// dst and src may be host memory that the device accesses; they do not overlap.
typedef struct {
  void *dst;
  const void *src;
  size_t n_bytes;
} td_cu_copy_args;

// out[i] = the sum over p, in order and in f32, of parts[p][i], which is BF16, or f32 and rounded
// to BF16 first (bit p of f32_parts).
enum { TD_CU_MAX_SUM_PARTS = 8 };
typedef struct {
  const void *parts[TD_CU_MAX_SUM_PARTS];
  void *out;
  size_t n;
  uint32_t n_parts, f32_parts;
  uint32_t out_f32; // bool
  uint32_t unused;
} td_cu_sum_parts_args;

typedef struct {
  uint16_t *out;
  const uint16_t *x;
  const int32_t *rows;
  uint32_t n_rows, dim;
  int32_t *fault;
} td_cu_gather_args;

typedef struct {
  const uint16_t *x;
  uint16_t *residual; // NULL or [n_rows][dim]; residual += x comes first
  td_vec w;           // data NULL: 1
  uint16_t *out;      // may be x
  size_t x_stride, out_stride;
  uint32_t n_rows, dim;
  float eps;
  uint32_t unused;
} td_cu_rmsnorm_args;

// x[i][:] = (x[i][:] - mean) / sqrt(variance + eps) * w[:] + b[:]
typedef struct {
  uint16_t *x;
  td_vec w, b;
  size_t stride;
  uint32_t n_rows, dim;
  float eps;
  uint32_t unused;
} td_cu_layernorm_args;

typedef struct {
  uint16_t *x;
  size_t token_stride, head_stride;
  uint32_t n_heads, unused;
} td_cu_rope_heads;

typedef struct {
  td_cu_rope_heads heads, also; // also.x NULL: none
  const float *cos_sin;
  const int32_t *position;
  uint32_t n_tokens, rot_dim;
  uint16_t interleaved, backwards; // bool
  uint32_t unused;
  int32_t *fault;
} td_cu_rope_args;

typedef struct {
  uint16_t *x;
  const float *factor;
  const int32_t *position;
  uint32_t n_tokens, dim;
  int32_t *fault;
} td_cu_scale_rows_args;

// How a linear kernel loads eight consecutive weights of a row.
typedef enum {
  TD_CU_READ_ANY, // value by value: any format, any alignment
  // The others require: TD_LAYOUT_ROWS, no zero_add, cols % 8 == 0; rows of data aligned to eight
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

// A window on the tiles that the sorted pairs were cut into: of the tiles [*first, *end), which are
// read from device memory, at most n_tiles after skipping `skip`. Kernels count pairs from the
// window's first one, and experts from first_expert.
typedef struct {
  const td_cu_tile *tiles; // NULL: no tiles, all pairs are one range
  const uint32_t *first, *end;
  uint32_t skip, n_tiles, first_expert, unused;
} td_cu_tile_range;

// y[i][r - row0] = sum_k w[r][k] * x[i][k] (+ bias[r - row0]) for r in [row0, row0 + n_rows), with
// expert_bias also + expert_bias[tile's expert][r - row0]. Without tiles, i runs over the n_tokens
// rows of x. With tiles, a tile gives the expert and the rows of y; row i of y uses row
// x_rows[pair] of x (row i if x_rows is NULL). A table may hold several matrices per expert; their
// results are y_step elements apart. n_at_once: tiles that get their own blocks. A block of
// linear_mma or linear_wgmma loops over further tiles; linear_vec needs n_at_once to cover all
// possible tiles. also: linear_vec without experts, and not with TD_CU_READ_ANY or _BLOCKS;
// matrices that differ from w in data and number of rows alone. linear_wgmma needs
// td_cu_props.has_wgmma and no TD_CU_READ_ANY, _BLOCKS, _F32 or _F16.
// linear_f8 needs td_cu_props.has_f8, x8 in place of x, and weights in E4M3: TD_LAYOUT_ROWS,
// cols % 8 == 0, rows of data aligned to 8 bytes, scales in f32, of whole rows or of multiples of
// TD_CU_F8_BLOCK columns.
typedef struct {
  td_weight w;              // with experts: one of them, since all have the same dims and format
  const td_weight *experts; // NULL, or in device memory: [n_matrices][n_experts]
  const int32_t *slots;     // NULL, or i32: an expert's index in experts
  uint32_t n_matrices, n_experts;
  size_t y_step;
  td_cu_tile_range range;
  const uint32_t *x_rows; // indexed by pair, counted over all pairs
  const uint16_t *x;
  const uint8_t *x8; // linear_f8: x as td_cu_round_f8_args leaves it
  const float *x8_scale;
  void *y; // BF16 or, with y_f32, f32
  td_vec bias;
  // NULL, or f32 [experts of the layer][n_rows], those of the matrices bias_step elements apart;
  // with tiles only
  const float *expert_bias;
  size_t bias_step;
  size_t x_stride, y_stride;
  uint32_t n_tokens, row0, n_rows;
  // linear_vec: 8 or TD_CU_VEC_TOKENS; linear_mma: TD_CU_MMA_TOKENS; linear_wgmma: either that or
  // TD_CU_WGMMA_TOKENS; linear_f8: either that or TD_CU_F8_TOKENS
  uint32_t tile_tokens;
  uint32_t vec_warps; // linear_vec: warps per block, at most; determines summation order
  uint32_t n_at_once;
  td_cu_read read;
  uint32_t y_f32; // bool
  td_cu_linear_also also[TD_CU_LINEAR_ALSO];
} td_cu_linear_args;

enum { TD_CU_E8M0_LEAST = -93, TD_CU_E8M0_MOST = 33 };
enum {
  TD_CU_VEC_TOKENS = 16,
  TD_CU_VEC_WARPS = 24,
  TD_CU_MMA_TOKENS = 64,
  TD_CU_WGMMA_TOKENS = 128,
  TD_CU_F8_TOKENS = 128
};

// Rounds x to E4M3 in blocks of TD_CU_F8_BLOCK columns: with m the largest magnitude in a block, or
// TD_CU_F8_LEAST_MOST if that is more, codes are x * (TD_CU_F8_MOST / m) rounded to nearest even,
// and the scale is m / TD_CU_F8_MOST. NaN and infinity become NaN.
#define TD_CU_F8_MOST       448.0f // the largest E4M3
#define TD_CU_F8_LEAST_MOST 0x1p-100f
enum { TD_CU_F8_BLOCK = 128 };
typedef struct {
  const uint16_t *x;
  uint8_t *codes; // [n_rows][n_blocks * TD_CU_F8_BLOCK], 16-byte aligned; from cols on zeros
  float *scales;  // [n_rows][n_blocks], n_blocks = ceil(cols / TD_CU_F8_BLOCK)
  td_cu_tile_range range; // with tiles: x and codes are of its pairs, n_rows at most
  size_t x_stride;
  uint32_t n_rows, cols;
} td_cu_round_f8_args;

// y[i][r] = sum_k w[r][k] * x[i][k] through cuBLAS; w is dense.
typedef struct {
  const uint16_t *w; // [n_rows][cols]
  const uint16_t *x; // [n_tokens][x_stride]
  void *y;           // [n_tokens][y_stride], BF16 or, with y_f32, f32
  size_t x_stride, y_stride;
  uint32_t n_tokens, n_rows, cols;
  uint32_t y_f32; // bool
} td_cu_gemm_args;

// Repacks a matrix of 4-bit codes from another layout to TD_LAYOUT_ROWS; zero_add is applied.
typedef struct {
  td_weight w;
  uint32_t *data, *zero; // zero only if w has zero points
  void *scale;
} td_cu_as_rows_args;

// out[r][k] = w[row0 + r][k], rounded to BF16. cols % 8 == 0.
typedef struct {
  td_weight w;
  uint16_t *out; // [n_rows][cols], 16-byte aligned
  uint32_t row0, n_rows, unused;
  td_cu_read read;
} td_cu_dequant_args;

typedef struct {
  const int32_t *seq, *position, *q_begin, *page_table;
  uint32_t n_tokens, n_seqs, max_pages, page_tokens;
} td_cu_batch;

typedef struct {
  char *pages;
  size_t page_bytes;
  uint32_t f16; // bool; else BF16
  uint32_t unused;
} td_cu_kv;

// Stores n_heads rows of head_dim elements per token: k in plane 0 of its page
// ([n_heads][page_tokens][head_dim]) and, unless NULL, v in plane 1. MLA entries are one head
// without v.
typedef struct {
  td_cu_batch batch;
  td_cu_kv kv;
  const uint16_t *k, *v;
  size_t k_stride, v_stride;
  uint32_t n_heads, head_dim;
  int32_t *fault;
} td_cu_kv_store_args;

// A layer's states: that of page i begins at pages + i * page_bytes, f32.
typedef struct {
  char *pages;
  size_t page_bytes;
} td_cu_states;

// A state is the convolution's last n_taps - 1 inputs [n_taps - 1][channels], then, from element
// rule_at on, [n_v_heads][tiles][k_dim][TD_CU_DELTA_TILE].
// k_dim is at most TD_CU_DELTA_KEYS, n_taps TD_CU_DELTA_TAPS. is_tiled: value head h has key head
// h % n_k_heads; if not, those in a row share one.
enum { TD_CU_DELTA_TILE = 32, TD_CU_DELTA_KEYS = 128, TD_CU_DELTA_TAPS = 16 };
typedef struct {
  uint32_t n_k_heads, n_v_heads, k_dim, v_dim, n_taps, channels, is_tiled, unused;
} td_cu_delta_shape;

// Part of a token's row: group g begins at element offset + g * stride.
typedef struct {
  size_t offset, stride;
} td_cu_row_part;

typedef struct {
  td_cu_batch batch;
  td_cu_states states;
  td_cu_delta_shape shape;
  const uint16_t *x;
  size_t x_stride;
  td_cu_row_part q, k, v, a, b;
  const float *conv;         // [n_taps][channels]
  const float *decay, *bias; // [n_v_heads]
  uint16_t *out;             // [n_tokens][channels]
  float *gates;              // [n_tokens][n_v_heads][2]: decay, strength
  int32_t *fault;
} td_cu_delta_conv_args;

typedef struct {
  td_cu_batch batch;
  td_cu_states states;
  size_t rule_at;
  td_cu_delta_shape shape;
  const uint16_t *qkv; // [n_tokens][channels]
  const float *gates;
  uint16_t *out; // [n_tokens][n_v_heads][v_dim]
  int32_t *fault;
} td_cu_delta_rule_args;

// x[t][g][:] *= sigmoid(gate) or, with silu, silu(gate). scalar: one f32 gate a group.
typedef struct {
  uint16_t *x; // [n_tokens][n_groups][dim]
  const void *gate;
  size_t gate_stride;
  td_cu_row_part part;
  uint32_t n_tokens, n_groups, dim;
  uint16_t silu, scalar; // bool
} td_cu_gate_rows_args;

enum { TD_CU_MAX_SPLITS = 128, TD_CU_FOLDED = 4 };

#ifdef __CUDACC__
#define TD_CU_ANYWHERE __host__ __device__
#else
#define TD_CU_ANYWHERE
#endif

// The most keys that attn_latents cuts into splits of `keys`, which is at least 64. Short sequences
// have few splits, so that batches of them do not leave more partial sums than they read keys.
enum { TD_CU_LATENT_SPLITS = 64 }; // of a sequence, at most
TD_CU_ANYWHERE static inline uint64_t td_cu_latent_reach(uint64_t keys) {
  const uint64_t most = TD_CU_LATENT_SPLITS;
  return keys * (keys / 4 < most ? keys / 4 : most);
}

// Keys per split of a sequence of n_keys: a power of two, `least` (which is one) or more.
TD_CU_ANYWHERE static inline uint32_t td_cu_latent_split(uint32_t n_keys, uint32_t least) {
  uint64_t keys = least;
  while (n_keys > td_cu_latent_reach(keys))
    keys *= 2;
  return (uint32_t)keys;
}

// Maximum heads that share keys in one block of attn_decode.
static inline uint32_t td_cu_decode_heads(uint32_t k_dim, bool v_in_k) {
  return k_dim <= 128 && !v_in_k ? 16 : 32;
}

// Attention of every token to the cached positions up to its own. Keys are cut into n_splits splits
// of split_keys, a power of two; at most TD_CU_MAX_SPLITS. Each split leaves partial sums, which a
// last kernel merges. With v_in_k, the sums of every TD_CU_FOLDED splits are first added in order:
// with by_block in the block that computes all of them, otherwise in the last kernel, with the same
// bits. n_rows: partial sums per head, which is n_splits or, by_block, n_splits / TD_CU_FOLDED
// rounded up.
//   GQA: n_kv_heads planes of keys, then of values; k_dim, v_dim at most TD_CU_MMA_HEAD. With a
//   window > 0 a token sees that many positions, its own the last, and its splits are counted from
//   the one with the first of them on. A sink is a logit of the head that adds to the sum of
//   weights and has no value.
//   MLA absorbed: n_kv_heads 1, v_in_k: values are the first v_dim elements of the keys; k_dim at
//   most TD_CU_MMA_ENTRY, v_dim TD_CU_MMA_LORA.
// attn_latents does the latter for many heads and needs td_cu_props.has_wgmma, BF16 pages, queries
// in BF16 and results in f32, k_dim and v_dim multiples of 8, page_tokens one of TD_CU_LATENT_KEYS,
// pages, page_bytes and q of 16 bytes. Splits are by_length: those of td_cu_latent_split of a
// token's own number of keys with split_keys as `least`; there are at most n_splits.
enum { TD_CU_LATENT_HEADS = 64, TD_CU_LATENT_KEYS = 64 }; // of a block, of a tile
typedef struct {
  td_cu_batch batch;
  td_cu_kv kv;
  const void *q;      // [n_tokens][n_heads][k_dim], BF16 or, with q_f32, f32
  void *out;          // [n_tokens][n_heads][v_dim], likewise; of attn_latents always f32
  float *part;        // [n_tokens][n_heads][n_rows][v_dim]: sums, not normalized
  float *part_ml;     // [n_tokens][n_heads][n_rows][2]: maximum m, sum of weights 2^(.. - m)
  const float *sinks; // [n_heads] or NULL
  uint32_t n_heads, n_kv_heads, k_dim, v_dim, n_splits, split_keys, n_rows, window;
  float scale;
  uint32_t q_f32, v_in_k, by_block, by_length; // bool
  uint32_t in_runs, in_pages, out_f32; // bool, set by the launcher: how the kernel loads and stores
} td_cu_attn_decode_args;

// The sequences of one launch of prefill attention. Their keys, of n_keys positions from `first`
// on, a multiple of TD_CU_PREFILL_TOKENS, are stored one sequence after the other in n_keys slots,
// each sequence from key_begin on. Their tokens are cut into n_tiles tiles of TD_CU_PREFILL_TOKENS,
// each sequence from tile_begin on.
enum { TD_CU_PREFILL_SEQS = 32, TD_CU_PREFILL_TOKENS = 128 };
typedef struct {
  struct {
    uint32_t seq, first, n_keys, key_begin, tile_begin;
  } seqs[TD_CU_PREFILL_SEQS];
  uint32_t n_seqs, n_keys, n_tiles;
  uint32_t max_keys; // of a single sequence
} td_cu_prefill_list;

// out[plane][head - head0][key_begin + p][:] = position first + p of a listed sequence's pages as
// BF16, for p < its n_keys and heads [head0, head0 + n_heads) of each plane's n_kv_heads. Elements
// from dim up to a multiple of 8 are zeros; nothing is written past the sequence's end.
typedef struct {
  td_cu_batch batch;
  td_cu_kv kv;
  td_cu_prefill_list list;
  uint16_t *out; // [n_planes][n_heads][list.n_keys][dim, rounded up]
  uint32_t n_planes, n_kv_heads, head0, n_heads, dim;
  uint32_t in_runs; // bool, set by the launcher: how the kernel loads
} td_cu_kv_gather_args;

// Causal attention on tensor cores, of the tokens of the listed sequences to their sequence's
// n_keys positions; windows and sinks as in td_cu_attn_decode_args. Slot p of KV head h has its key
// at k[h * k_head + p * k_stride ..) with the last rope_dim elements at rope[p * rope_stride ..),
// and its value at v[h * v_head + p * v_stride
// ..). All are BF16. Addresses are multiples of 16 bytes, strides multiples of 8 elements. Dims are
// multiples of 8 too, unless rope_dim is 0 and rows can be read up to the next multiple. k_dim and
// v_dim are at most TD_CU_MMA_HEAD.
typedef struct {
  td_cu_batch batch;
  td_cu_prefill_list list;
  const uint16_t *q; // token t, head h at q + t * q_stride + h * k_dim
  uint16_t *out;     // likewise with out_stride, v_dim
  const uint16_t *k, *rope, *v;
  size_t q_stride, out_stride;
  size_t k_head, v_head, k_stride, rope_stride, v_stride;
  const float *sinks; // [n_heads] or NULL
  uint32_t n_heads, heads_per_kv, k_dim, v_dim, rope_dim, window;
  float scale;
  uint32_t q_in_runs; // bool, set by the launcher: how the kernel loads
} td_cu_attn_prefill_args;

enum { TD_CU_MMA_HEAD = 256, TD_CU_MMA_ENTRY = 576, TD_CU_MMA_LORA = 512 };

// absorb: query[t][h][0 .. lora) = q_nope times kv_b's key rows of head h; query[t][h][lora ..) =
// q_rope; f32 or, with query_bf16, BF16. values: out[t][h][:] = kv_b's value rows of head h times
// latent[t][h][:].
typedef struct {
  td_weight kv_b;
  const uint16_t *q;   // [n_tokens][n_heads][nope + rope]
  void *query;         // [n_tokens][n_heads][lora + rope]
  const float *latent; // [n_tokens][n_heads][lora]
  uint16_t *out;       // [n_tokens][n_heads][v_dim]
  uint32_t n_tokens, n_heads, nope_dim, rope_dim, v_dim, lora;
  uint32_t query_bf16; // bool
  td_cu_read read;     // of kv_b
} td_cu_mla_args;

// selected[t] = the positions of the top_k largest scores of those up to token t's own, in rising
// order, lower positions first among equal ones. A token that sees no more than top_k is skipped.
// dim is at most TD_CU_INDEX_DIM. group > 0: keys are entries of so many positions each, f32,
// page_entries of them in a page; a token sees those of the groups that end with it or before.
enum { TD_CU_INDEX_DIM = 128 };
typedef struct {
  td_cu_batch batch;
  td_cu_kv kv;          // keys, [page_tokens][dim]
  const uint16_t *q;    // [n_tokens][n_heads][dim]
  const float *weights; // [n_tokens][n_heads]
  float *scores;        // [n_tokens][stride]
  int32_t *selected;    // [n_tokens][top_k]
  size_t stride;        // at least the largest number of keys of any token
  uint32_t n_heads, dim, top_k, group, page_entries;
  uint32_t in_runs; // bool, set by the launcher: how the kernel loads
} td_cu_select_args;

// Copies what token t attends to into page t of `out`, [page_tokens][dim] each, in the order of
// positions: the selected entries or, of a token that sees no more than top_k, all. seq, position
// and page_table describe these pages: tokens are sequences of one page.
typedef struct {
  td_cu_batch batch;
  td_cu_kv kv;
  const int32_t *selected;
  uint16_t *out;
  int32_t *seq, *position, *page_table; // [n_tokens]
  uint32_t dim, top_k, page_tokens;
  uint32_t in_runs; // bool, set by the launcher: how the kernel copies
} td_cu_select_gather_args;

// Pools keys (td_pool_args in device/device.h); a page has page_entries entries. open: scratch for
// what stays open in the page of each sequence's first token.
typedef struct {
  td_cu_batch batch;
  td_cu_states states;
  const float *x, *gate; // token t at x + t * stride
  size_t stride;
  const float *bias; // [group][dim or 2 * dim]
  td_vec norm;
  const float *cos_sin;
  float *open;              // [n_seqs][overlaps + 1][3][dim]
  size_t open_at, entry_at; // elements of the state
  uint32_t dim, rot_dim, group, page_entries;
  float eps;
  uint32_t overlaps; // bool
  int32_t *fault;
} td_cu_pool_args;

// Copies what tokens [token0, token0 + n) of the batch see (td_attn_pool_args in device/device.h)
// into pages of `out`, [page_tokens][dim] each: entries, then the window's keys. seq, position and
// page_table describe these pages: tokens are sequences of one page.
typedef struct {
  td_cu_batch batch;
  td_cu_states states; // the ring is at their begin
  const uint16_t *key; // of the batch's token t at key + t * key_stride
  size_t key_stride;
  const int32_t *selected; // [batch.n_tokens][top_k], or NULL: all entries
  uint16_t *out;
  int32_t *seq, *position, *page_table; // [n]
  size_t entry_at;                      // elements of the state
  uint32_t token0, n, dim, window, group, top_k, page_entries, page_tokens;
  uint32_t most_keys; // that any token sees
  uint32_t in_runs;   // bool, set by the launcher: how the kernel copies
} td_cu_pool_gather_args;

// Leaves the window's last keys in each page that the batch's sequences pass: that of position p at
// element p % window * dim of the state. Earlier keys are in the page of the position before.
typedef struct {
  td_cu_batch batch;
  td_cu_states states;
  const uint16_t *key;
  size_t key_stride;
  uint32_t dim, window;
  int32_t *fault;
} td_cu_pool_ring_args;

enum { TD_CU_MAX_STREAMS = 16, TD_CU_STREAM_DIM = 24 << 10 };

// td_hyper_read_args in device/device.h; dim is at most TD_CU_STREAM_DIM.
typedef struct {
  const uint16_t *x;         // [n_tokens][n_streams][dim]
  float *scores;             // [n_tokens][n_scores]
  const float *base, *scale; // [n_scores], [3 or, of a head, 1]
  td_vec w;
  uint16_t *out; // [n_tokens][dim]
  uint32_t n_tokens, n_streams, dim, n_rounds;
  float eps, norm_eps;
  uint32_t n_scores; // n_streams of a head, else (2 + n_streams) * n_streams
  uint32_t unused;
} td_cu_hyper_read_args;

// td_hyper_write_args in device/device.h.
typedef struct {
  uint16_t *x;
  const uint16_t *y;
  const float *scores; // or NULL
  uint32_t n_tokens, n_streams, dim, unused;
} td_cu_hyper_write_args;

// How logits become scores: softmax, sigmoid, or the square root of softplus.
typedef enum { TD_CU_SOFTMAX, TD_CU_SIGMOID, TD_CU_SOFTPLUS } td_cu_scoring;

typedef struct {
  const float *logits, *bias;
  // [n_vocab][top_k], or NULL: the experts of token tokens[t] are a row of it
  const int32_t *table, *tokens;
  int32_t *ids;
  float *weights;
  uint32_t n_tokens, n_experts, top_k, n_groups, topk_groups, n_vocab;
  td_cu_scoring scoring;
  uint32_t norm_topk; // bool
  float scaling;
  uint32_t unused;
  int32_t *fault;
} td_cu_router_args;

enum { TD_CU_MAX_EXPERTS = 1024 };

typedef struct {
  const float *logits;      // [n_rows][n_vocab]
  const float *temperature; // [n_rows]; 0 counts as 1
  td_top_logits *out;       // [n_rows]
  uint64_t *part;           // [n_rows][n_slices][TD_TOP_LOGITS]
  float *part_sums;         // [n_rows][n_slices][2]
  uint32_t n_rows, n_vocab;
  uint32_t unused;
  uint32_t n_slices; // slices of TD_CU_TOP_SLICE logits that cover n_vocab
} td_cu_top_logits_args;

enum { TD_CU_TOP_SLICE = 1024, TD_CU_TOP_MAX_SLICES = 1024 };

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

// out[i] = silu(gate[i]) * up[i] over the range's rows of dim elements, at most n_rows. With limit
// > 0, g = min(gate, limit) and u = clamp(up, -limit, limit) it is out[i] = g * sigmoid(alpha * g)
// * (u + 1) or, plain, silu(g) * u. pairs, with a limit: gate has twice as many elements, those of
// gate and up alternating.
typedef struct {
  const float *gate, *up;
  uint16_t *out;
  td_cu_tile_range range;
  uint32_t n_rows, dim;
  float limit, alpha;
  uint32_t pairs, plain; // bool
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

// out[t] = sum_j weights[t][j] * parts[t][j] in the order of j, with parts `here` for experts with
// a slot >= 0, `peer` (unless NULL) for those with one in peer_slots, `there` for the others.
typedef struct {
  const float *here, *there, *peer;  // [n_tokens][top_k][dim]
  const int32_t *slots, *peer_slots; // [n_experts]
  const int32_t *ids;
  const float *weights;
  uint16_t *out;
  uint32_t n_tokens, n_experts, top_k, dim; // top_k <= TD_CU_MAX_TOP_K
  int32_t *fault;
} td_cu_moe_join_args;

enum { TD_CU_MAX_TOP_K = 64 };

// *signal, in host memory, becomes *value, which is in device memory. Visible to the host.
typedef struct {
  uint32_t *signal;
  const uint32_t *value;
} td_cu_signal_args;

// dst = src, then *signal becomes *value, visible to the host and to other devices. dst and signal
// are memory that the device reaches, also of the host or of another device.
typedef struct {
  void *dst;
  const void *src;
  size_t n_bytes;
  uint32_t *signal;
  const uint32_t *value;
} td_cu_post_args;

// Later work waits until *signal equals *value, for at most most_ns, or until *canceled (may be
// NULL) is not zero. The fault is set to TIMEOUT or CANCELED then, and later waits that see such a
// fault return at once.
typedef struct {
  const uint32_t *signal;
  const uint32_t *value;
  const uint32_t *canceled;
  uint64_t most_ns;
  int32_t *fault;
} td_cu_await_args;

// Nothing but mma.sync, to measure its peak: each warp of n_blocks blocks multiplies
// TD_CU_PEAK_MMAS times n_rounds tiles of TD_CU_PEAK_FLOPS, twice that in E4M3.
enum { TD_CU_PEAK_WARPS = 8, TD_CU_PEAK_MMAS = 8, TD_CU_PEAK_FLOPS = 2 * 16 * 8 * 16 };
typedef struct {
  float *out; // [n_blocks][32 * TD_CU_PEAK_WARPS]
  uint32_t n_blocks, n_rounds;
  uint32_t is_f8; // bool: E4M3, which needs td_cu_props.has_f8; else BF16
  uint32_t unused;
} td_cu_mma_peak_args;

#define TD_CU_OPS(X)                                                                               \
  X(embed, td_cu_embed_args)                                                                       \
  X(add, td_cu_add_args)                                                                           \
  X(copy_direct, td_cu_copy_args)                                                                  \
  X(gather, td_cu_gather_args)                                                                     \
  X(sum_parts, td_cu_sum_parts_args)                                                               \
  X(rmsnorm, td_cu_rmsnorm_args)                                                                   \
  X(layernorm, td_cu_layernorm_args)                                                               \
  X(rope, td_cu_rope_args)                                                                         \
  X(scale_rows, td_cu_scale_rows_args)                                                             \
  X(linear_vec, td_cu_linear_args)                                                                 \
  X(linear_mma, td_cu_linear_args)                                                                 \
  X(linear_wgmma, td_cu_linear_args)                                                               \
  X(round_f8, td_cu_round_f8_args)                                                                 \
  X(linear_f8, td_cu_linear_args)                                                                  \
  X(as_rows, td_cu_as_rows_args)                                                                   \
  X(dequant, td_cu_dequant_args)                                                                   \
  X(kv_store, td_cu_kv_store_args)                                                                 \
  X(kv_gather, td_cu_kv_gather_args)                                                               \
  X(attn_decode, td_cu_attn_decode_args)                                                           \
  X(attn_latents, td_cu_attn_decode_args)                                                          \
  X(attn_prefill, td_cu_attn_prefill_args)                                                         \
  X(delta_conv, td_cu_delta_conv_args)                                                             \
  X(delta_rule, td_cu_delta_rule_args)                                                             \
  X(gate_rows, td_cu_gate_rows_args)                                                               \
  X(mla_absorb, td_cu_mla_args)                                                                    \
  X(mla_values, td_cu_mla_args)                                                                    \
  X(select, td_cu_select_args)                                                                     \
  X(select_gather, td_cu_select_gather_args)                                                       \
  X(pool, td_cu_pool_args)                                                                         \
  X(pool_gather, td_cu_pool_gather_args)                                                           \
  X(pool_ring, td_cu_pool_ring_args)                                                               \
  X(hyper_read, td_cu_hyper_read_args)                                                             \
  X(hyper_write, td_cu_hyper_write_args)                                                           \
  X(router, td_cu_router_args)                                                                     \
  X(top_logits, td_cu_top_logits_args)                                                             \
  X(moe_sort, td_cu_moe_sort_args)                                                                 \
  X(swiglu, td_cu_swiglu_args)                                                                     \
  X(moe_sum, td_cu_moe_sum_args)                                                                   \
  X(moe_join, td_cu_moe_join_args)                                                                 \
  X(signal, td_cu_signal_args)                                                                     \
  X(post, td_cu_post_args)                                                                         \
  X(await, td_cu_await_args)                                                                       \
  X(mma_peak, td_cu_mma_peak_args)

// The library's other functions: name, result (a CUDA error code where it is an int), parameters.
//   open           also makes it the calling thread's current device; threads waiting for it sleep
//                  instead of spinning
//   use            makes an open device current on the calling thread: memory, streams and events
//                  are created on it, and operators go to its streams only
//   probe          whether the driver can run the library's code
//   alloc_host     host memory that the device accesses at the same address
//   reach          lets kernels of the current device access memory of another one; *is_reached:
//                  false where there is no path between them
//   pin            registers memory; only_read: the mapping is read-only, and the device never
//                  writes to it
//   share_open     a share of *n_sms SMs, which becomes the number that it has; fails if the driver
//                  has no green contexts. Closed after its streams
//   share_stream_open
//                  a stream whose kernels run on the share's SMs alone, and yield to others there
//   event_is_done  *is_done is also true after a failure
//   capture_begin, capture_end
//                  work queued between them does not run but becomes a graph; on failure *out is
//                  NULL
//   blas_open      cuBLAS on a stream, which must be closed after it; fails if cuBLAS is not
//                  installed
//   blas_use       moves it to another stream, whose work follows that of the one before
#define TD_CU_CALLS(X)                                                                             \
  X(error_text, const char *, (int code))                                                          \
  X(count, int, (int *n_devices))                                                                  \
  X(open, int, (int device, td_cu_props *props))                                                   \
  X(use, int, (int device))                                                                        \
  X(probe, int, (void))                                                                            \
  X(memory, int, (size_t * free_bytes, size_t * total_bytes))                                      \
  X(alloc, int, (void **out, size_t n_bytes))                                                      \
  X(free, int, (void *ptr))                                                                        \
  X(alloc_host, int, (void **out, size_t n_bytes))                                                 \
  X(free_host, int, (void *ptr))                                                                   \
  X(reach, int, (int device, bool *is_reached))                                                    \
  X(pin, int, (const void *host, size_t n_bytes, bool only_read))                                  \
  X(unpin, int, (const void *host))                                                                \
  X(stream_open, int, (td_cu_stream * out, bool is_urgent))                                        \
  X(share_open, int, (td_cu_share * out, int device, int *n_sms))                                  \
  X(share_close, int, (td_cu_share share))                                                         \
  X(share_stream_open, int, (td_cu_stream * out, td_cu_share share))                               \
  X(stream_close, int, (td_cu_stream stream))                                                      \
  X(stream_sync, int, (td_cu_stream stream))                                                       \
  X(event_open, int, (td_cu_event * out))                                                          \
  X(event_close, int, (td_cu_event event))                                                         \
  X(event_record, int, (td_cu_event event, td_cu_stream stream))                                   \
  X(event_sync, int, (td_cu_event event))                                                          \
  X(event_is_done, int, (td_cu_event event, bool *is_done))                                        \
  X(stream_wait, int, (td_cu_stream stream, td_cu_event event))                                    \
  X(copy, int, (void *dst, const void *src, size_t n_bytes, td_cu_stream stream))                  \
  X(fill_zero, int, (void *dst, size_t n_bytes, td_cu_stream stream))                              \
  X(capture_begin, int, (td_cu_stream stream))                                                     \
  X(capture_end, int, (td_cu_stream stream, td_cu_graph * out))                                    \
  X(graph_launch, int, (td_cu_graph graph, td_cu_stream stream))                                   \
  X(graph_close, int, (td_cu_graph graph))                                                         \
  X(blas_open, int, (td_cu_blas * out, td_cu_stream stream, td_cu_symbol_fn symbol, void *ctx))    \
  X(blas_use, int, (td_cu_blas blas, td_cu_stream stream))                                         \
  X(blas_close, int, (td_cu_blas blas))                                                            \
  X(blas_gemm, int, (td_cu_blas blas, const td_cu_gemm_args *args))

// What the library says of one of its functions.
typedef struct {
  const char *name;
  size_t args_bytes; // size of the argument struct of TD_CU_OPS; 0 for TD_CU_CALLS
} td_cu_function;

#define TD_CU_FUNCTION_LIST                                                                        \
  { TD_CU_CALLS(TD_CU_CALL_ENTRY) TD_CU_OPS(TD_CU_OP_ENTRY) }
#define TD_CU_CALL_ENTRY(name, result, params) {#name, 0},
#define TD_CU_OP_ENTRY(name, args_type)        {#name, sizeof(args_type)},

// The first five members keep their places in all versions.
typedef struct {
  uint32_t version;                // TD_CUDA_ABI_VERSION
  uint32_t n_bytes;                // size of this struct
  uint32_t n_functions;            // of the library
  int cuda_major;                  // the CUDA release it was built with
  const td_cu_function *functions; // [n_functions], in the order of the pointers below
#define X(name, result, params) result(*name) params;
  TD_CU_CALLS(X)
#undef X
#define X(name, args_type) int (*name)(const args_type *args, td_cu_stream stream);
  TD_CU_OPS(X)
#undef X
} td_cu_abi;

typedef const td_cu_abi *(*td_cuda_abi_fn)(void);

#if defined(__GNUC__) && !defined(__CUDACC__)
#pragma GCC diagnostic pop
#endif

#ifdef __cplusplus
extern "C" {
#endif
// The library's only symbol.
const td_cu_abi *td_cuda_abi(void);
// The functions in the table.
#define X(name, result, params) result td_cu_##name params;
TD_CU_CALLS(X)
#undef X
#define X(name, args_type) int td_cu_##name(const args_type *args, td_cu_stream stream);
TD_CU_OPS(X)
#undef X
#ifdef __cplusplus
}
#endif

#endif
