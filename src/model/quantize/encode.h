// src/model/quantize/encode.h - encodes f32 matrices in the quantized formats, with the layout of
// published checkpoints. Rounds to nearest; tries several scales per block and keeps the one with
// the least squared error.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// A tensor of an encoded matrix: its name after the module's, and its dtype as safetensors spells
// it.
typedef struct {
  const char *name, *dtype;
  uint32_t item_bytes;
} td_encoded_part;

#define TD_ENCODE_WHOLE_ROW UINT32_MAX // value of block_cols

typedef struct td_encoding {
  const char *name;                // as given to `tandem quantize --to`
  const char *format, *type;       // format and number type in compressed-tensors
  uint32_t block_rows, block_cols; // elements per scale
  uint32_t codes_per_item;         // codes in one item of data
  td_encoded_part data, scale; // [rows][cols / codes_per_item], [ceil(rows / block_rows)][groups]
  bool whole_blocks;           // the columns must be a multiple of block_cols
  bool states_shape;           // has a weight_shape tensor, I64 [2]
  // Encodes one block, w[r * ld + c]; returns the squared error.
  double (*encode)(const float *w, size_t ld, uint32_t rows, uint32_t cols, uint8_t *codes,
                   size_t codes_ld, uint8_t *scale);
} td_encoding;

// One scale per row, for matrices that other encodings do not fit or would degrade too much. Not
// found by name, as no whole checkpoint is encoded with it.
extern const td_encoding td_encoding_int8;

// NULL if name is unknown; *names then lists the known ones.
const td_encoding *td_encoding_find(const char *name, const char **names);

static inline size_t td_encoded_row_bytes(const td_encoding *e, uint32_t cols) {
  return ((size_t)cols + e->codes_per_item - 1) / e->codes_per_item * e->data.item_bytes;
}

static inline uint32_t td_encoded_bits(const td_encoding *e) {
  return 8 * e->data.item_bytes / e->codes_per_item;
}

static inline size_t td_encoded_groups(const td_encoding *e, uint32_t cols) {
  return ((size_t)cols + e->block_cols - 1) / e->block_cols;
}

typedef struct {
  double error, norm; // sums of squares: of the errors, of the weights
  bool finite;        // false: the input had non-finite values; codes and scales are meaningless
} td_encode_result;

// Encodes rows that start at a block boundary: w f32 [n_rows][cols], codes [n_rows][row bytes],
// scales [ceil(n_rows / block_rows)][groups].
td_encode_result td_encode_rows(const td_encoding *e, const float *w, uint32_t n_rows,
                                uint32_t cols, uint8_t *codes, uint8_t *scales);
