// src/model/quantize/encode.h - float32 matrices into the quantized formats, laid out as their
// publishers do. Round to nearest; of a few scales for each block, the one with the least squared
// error.
#ifndef TD_MODEL_QUANTIZE_ENCODE_H
#define TD_MODEL_QUANTIZE_ENCODE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// A tensor that stands for a matrix: the name behind the module's, dtype as safetensors spells it.
typedef struct {
  const char *name, *dtype;
  uint32_t item_bytes;
} td_encoded_part;

#define TD_ENCODE_WHOLE_ROW UINT32_MAX // as block_cols

typedef struct td_encoding {
  const char *name;                // what `tandem quantize --to` calls it
  const char *format, *type;       // what compressed-tensors calls it, and its numbers
  uint32_t block_rows, block_cols; // elements one scale covers
  uint32_t codes_per_item;         // of data
  td_encoded_part data, scale; // [rows][cols / codes_per_item], [ceil(rows / block_rows)][groups]
  bool whole_blocks;           // only matrices of whole columns of blocks
  bool states_shape;           // has weight_shape, I64 [2], too
  // Codes and scale of one block, w[r * ld + c]; returns the squared error.
  double (*encode)(const float *w, size_t ld, uint32_t rows, uint32_t cols, uint8_t *codes,
                   size_t codes_ld, uint8_t *scale);
} td_encoding;

// A scale a row, for what the others do not fit or would cost too much of. No whole checkpoint is
// made of it, so it is not found by name.
extern const td_encoding td_encoding_int8;

// NULL for a name that is none; *names then lists those there are.
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
  double error, norm; // sums of squares: of what was lost, of the whole
  bool finite;        // false: codes and scales mean nothing
} td_encode_result;

// Encodes rows that begin a block: w f32 [n_rows][cols], codes [n_rows][row bytes], scales
// [ceil(n_rows / block_rows)][groups].
td_encode_result td_encode_rows(const td_encoding *e, const float *w, uint32_t n_rows,
                                uint32_t cols, uint8_t *codes, uint8_t *scales);

#endif
