// include/tandem/types.h - dtypes, and descriptors of weights as checkpoints store them.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __CUDACC__
#define TD_ANYWHERE __host__ __device__ // a GPU's kernels call it, too
#else
#define TD_ANYWHERE
#endif

// The structs here have no padding, as kernels/cuda/abi.h, which embeds some of them, requires.
#if defined(__GNUC__) && !defined(__CUDACC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic error "-Wpadded"
#endif

// Dtypes of GGUF, whose blocks hold scales beside codes, through a macro ROW(X, ..) of the list
// that is made of them: dtype, its name in lower case, columns of a block, bytes of it. A row of a
// matrix is a whole number of blocks. kernels/blocks.h says what is in one. Add at the end.
#define TD_BLOCK_ROWS(ROW, X)                                                                      \
  ROW(X, Q8_0, q8_0, 32, 34)                                                                       \
  ROW(X, Q4_K, q4_k, 256, 144)                                                                     \
  ROW(X, Q6_K, q6_k, 256, 210)                                                                     \
  ROW(X, Q5_K, q5_k, 256, 176)                                                                     \
  ROW(X, Q4_0, q4_0, 32, 18)                                                                       \
  ROW(X, Q4_1, q4_1, 32, 20)                                                                       \
  ROW(X, Q5_0, q5_0, 32, 22)                                                                       \
  ROW(X, Q5_1, q5_1, 32, 24)                                                                       \
  ROW(X, Q2_K, q2_k, 256, 84)                                                                      \
  ROW(X, Q3_K, q3_k, 256, 110)                                                                     \
  ROW(X, IQ4_NL, iq4_nl, 32, 18)                                                                   \
  ROW(X, IQ4_XS, iq4_xs, 256, 136)                                                                 \
  ROW(X, MXFP4, mxfp4, 32, 17)                                                                     \
  ROW(X, TQ2_0, tq2_0, 256, 66)                                                                    \
  ROW(X, TQ1_0, tq1_0, 256, 54)                                                                    \
  ROW(X, IQ2_XXS, iq2_xxs, 256, 66)                                                                \
  ROW(X, IQ2_XS, iq2_xs, 256, 74)                                                                  \
  ROW(X, IQ2_S, iq2_s, 256, 82)                                                                    \
  ROW(X, IQ3_XXS, iq3_xxs, 256, 98)                                                                \
  ROW(X, IQ3_S, iq3_s, 256, 110)                                                                   \
  ROW(X, IQ1_S, iq1_s, 256, 50)                                                                    \
  ROW(X, IQ1_M, iq1_m, 256, 56)
#define TD_BLOCK_ROW(X, ID, name, cols, bytes) X(ID, cols, bytes)
#define TD_BLOCK_DTYPES(X)                     TD_BLOCK_ROWS(TD_BLOCK_ROW, X)

// Dtypes: name, spelling in safetensors or GGUF, bits of an element (0: see TD_BLOCK_DTYPES). 4-bit
// dtypes, which safetensors stores as words or bytes, are spelled by the same pattern. Numbers are
// part of stored KV records and of the CUDA library's interface.
//   F8E4M3  OCP: no infinities, 0x7f and 0xff are NaN
//   I4      codes 0 .. 15 minus a zero point
//   F4E2M1  0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign
//   F8E8M0  2^(code - 127), 0xff is NaN; scales only
#define TD_DTYPE_ROW(X, ID, name, cols, bytes) X(ID, #ID, 0)
#define TD_DTYPES(X)                                                                               \
  X(F32, "F32", 32)                                                                                \
  X(F16, "F16", 16)                                                                                \
  X(BF16, "BF16", 16)                                                                              \
  X(F8E4M3, "F8_E4M3", 8)                                                                          \
  X(I32, "I32", 32)                                                                                \
  X(I8, "I8", 8)                                                                                   \
  X(I4, "I4", 4)                                                                                   \
  X(F4E2M1, "F4_E2M1", 4)                                                                          \
  X(F8E8M0, "F8_E8M0", 8)                                                                          \
  TD_BLOCK_ROWS(TD_DTYPE_ROW, X)

typedef enum {
#define X(id, name, bits) TD_##id,
  TD_DTYPES(X)
#undef X
      TD_N_DTYPES
} td_dtype;

// Bits of one element.
static inline uint32_t td_dtype_bits(td_dtype dtype) {
  switch (dtype) {
#define X(id, name, bits)                                                                          \
  case TD_##id: return bits;
    TD_DTYPES(X)
#undef X
  case TD_N_DTYPES: break;
  }
  return 0;
}

// Bytes of one element; 0 for dtypes of less than a byte.
static inline size_t td_dtype_bytes(td_dtype dtype) {
  return td_dtype_bits(dtype) / 8;
}

typedef struct {
  uint32_t cols, bytes;
} td_block;

// The block of a dtype; cols 0: it has none.
static inline td_block td_dtype_block(td_dtype dtype) {
  switch (dtype) {
#define X(id, n_cols, n_bytes)                                                                     \
  case TD_##id: return (td_block){n_cols, n_bytes};
    TD_BLOCK_DTYPES(X)
#undef X
  default: return (td_block){0, 0};
  }
}

const char *td_dtype_name(td_dtype dtype);
// The dtype of this spelling. False: there is none, and *out is TD_N_DTYPES.
bool td_dtype_find(const char *name, td_dtype *out);

// A matrix of weights, used exactly as stored: y = W x with W [rows][cols]. The value of element
// (r, c) is
//   code                            TD_F32, TD_F16, TD_BF16
//   code * scale                    TD_F8E4M3, TD_I8
//   (code - zero) * scale           TD_I4
//   code * scale * global_scale     TD_F4E2M1
//   code * scale + offset           TD_BLOCK_DTYPES, from within the block
// with the scale and zero point of its block. Pointers have the alignment of their elements only.
// A matrix is row-major; a row of 4-bit codes begins on a byte (TD_F4E2M1) or a word (TD_I4). A
// word is 32 bits, little-endian, and holds eight 4-bit codes, the first in its lowest bits. A
// zeroed td_weight is an absent matrix.
typedef struct {
  const void *data;
  const void *scale;    // of scale_dtype, [rows][groups], counted in blocks; NULL without scales
  const uint32_t *zero; // TD_I4: [ceil(rows/8)][groups], 8 rows a word; NULL: 8 everywhere
  td_dtype dtype;
  td_dtype scale_dtype; // TD_F32 for TD_F8E4M3 and TD_I8; TD_F32, TD_F16 or TD_BF16 for TD_I4;
                        // TD_F8E8M0 or TD_F8E4M3 for TD_F4E2M1
  uint32_t rows, cols;
  uint32_t scale_rows, scale_cols; // block one scale covers, in elements; 0 without scales
  float global_scale;              // TD_F4E2M1: finite
  uint32_t unused;
} td_weight;

// A vector of weights: norms, biases.
typedef struct {
  const void *data;
  td_dtype dtype; // TD_F32 or TD_BF16
  uint32_t n;
} td_vec;

// Part of a token's row: group g begins at element offset + g * stride.
typedef struct {
  size_t offset, stride;
} td_row_part;

// Where the states between a sequence's tokens are kept (device/device.h).
typedef struct {
  char *slots;          // [any][slot_bytes]; NULL: none are kept, nor of prompts
  const int32_t *first; // [n_seqs]: the slot for the state after the sequence's first token; that
                        // after each further one but the last follows. -1: not of this sequence
  size_t slot_bytes;
} td_state_trail;

static inline size_t td_weight_groups(const td_weight *w) { // scales of a row
  return w->scale_cols ? ((size_t)w->cols + w->scale_cols - 1) / w->scale_cols : 0;
}

// Bytes from one row to the next.
static inline size_t td_weight_row_bytes(const td_weight *w) {
  switch (w->dtype) {
  case TD_I4: return ((size_t)w->cols + 7) / 8 * 4;
  case TD_F4E2M1: return ((size_t)w->cols + 1) / 2;
  default: break;
  }
  const td_block block = td_dtype_block(w->dtype);
  return block.cols ? (size_t)(w->cols / block.cols) * block.bytes
                    : (size_t)w->cols * td_dtype_bytes(w->dtype);
}

static inline size_t td_weight_data_bytes(const td_weight *w) {
  return w->rows * td_weight_row_bytes(w);
}

static inline size_t td_weight_scale_bytes(const td_weight *w) {
  if (!w->scale) return 0;
  size_t blocks = ((size_t)w->rows + w->scale_rows - 1) / w->scale_rows;
  return blocks * td_weight_groups(w) * td_dtype_bytes(w->scale_dtype);
}

static inline size_t td_weight_zero_bytes(const td_weight *w) {
  return w->zero ? ((size_t)w->rows + 7) / 8 * td_weight_groups(w) * sizeof *w->zero : 0;
}

// Bytes of a matrix with its scales and zero points.
static inline size_t td_weight_bytes(const td_weight *w) {
  return td_weight_data_bytes(w) + td_weight_scale_bytes(w) + td_weight_zero_bytes(w);
}

// The largest logits of a row, in descending order, ties by ascending id; NaN ranks below
// everything.
enum { TD_TOP_LOGITS = 64 };
typedef struct {
  int32_t id[TD_TOP_LOGITS];
  float value[TD_TOP_LOGITS]; // logits
  uint32_t n;                 // TD_TOP_LOGITS, or the size of a smaller vocabulary
  float sum;                  // sum over the whole row of exp(logit - value[0])
  float sum_warm;             // sum over the whole row of exp((logit - value[0]) / temperature)
} td_top_logits;

// Precision of activations in products with weights. Elsewhere they are F32.
typedef enum {
  TD_ACTIVATIONS_F32, // no rounding
  // Whatever the CPU multiplies fastest:
  //
  // AVX512-FP16, for 4-bit and 8-bit weights: FP16. Products are summed in FP16 for at most 16
  // steps, these sums in FP32. The error stays within that of rounding x to BF16.
  //
  // AVX512-BF16 without FP16, for BF16 and 8-bit weights, and 4-bit weights in rows without zero
  // points: BF16, as published models are run. Sums are FP32.
  //
  // AVX2 without FP16, for other 4-bit weights: 16 bits with one scale per 16 to 128 columns, for
  // GGUF's blocks with AVX-512 15 bits per 256. Sums of a group are exact; error: 1/50 of BF16's.
  TD_ACTIVATIONS_AUTO,
  // Like AUTO, but INT8 for prefill: on CPUs with 4-bit weights (linear_w4a8) and GGUF's blocks, on
  // GPUs with INT8's.
  TD_ACTIVATIONS_INT8,
  // Like AUTO, but E4M3 for prefill with E4M3 weights on GPUs. On GPUs 8 bits have an FP32 scale
  // per token and 128 columns.
  TD_ACTIVATIONS_FP8,
  TD_N_ACTIVATIONS
} td_activations;

#if defined(__GNUC__) && !defined(__CUDACC__)
#pragma GCC diagnostic pop
#endif
