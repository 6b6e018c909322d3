// kernels/cpu/linear/blocks.h - GGUF's formats for linear_vec.h. BLOCK_DTYPE: the one of this
// kernel.
// Groups of 32 columns, which lie in one block. Rows consist of whole blocks, so that there are no
// shorter groups.
#pragma once

#include <stdbool.h>

#include "kernels/cpu/common/blocks_vec.h"

typedef uint8_t elem;
enum { HAS_SCALES = 0, DOWN = 1, GROUP = 32, HALVES = GROUP / BLOCK_GROUP };

typedef struct {
  __m128i bytes[HALVES];
  vf scale[HALVES], offset[HALVES];
} codes;

#define WHOLE_GROUPS      1
#define COLUMN_AT(row, k) ((row) + columns_bytes(k))
#define LOAD_AT(row, k)   load_group(row, k)
#define COLUMNS_BYTES(n)  columns_bytes(n)
#define BYTES_COLUMNS(n)  bytes_columns(n)

// Of a count of columns that may be negative.
static inline size_t columns_bytes(size_t n) {
  const td_block block = td_dtype_block(BLOCK_DTYPE);
  return (size_t)((ptrdiff_t)n / (ptrdiff_t)block.cols * (ptrdiff_t)block.bytes);
}

static inline uint32_t bytes_columns(uint32_t n) {
  const td_block block = td_dtype_block(BLOCK_DTYPE);
  return (n + block.bytes - 1) / block.bytes * block.cols;
}

static inline __attribute__((always_inline)) codes load_group(const elem *row, uint32_t k) {
  const td_block block = td_dtype_block(BLOCK_DTYPE);
  const uint8_t *at = row + (size_t)(k / block.cols) * block.bytes;
  const unsigned first = k % block.cols / GROUP * HALVES;
  codes c;
  gguf_signed_codes(BLOCK_DTYPE, at, first / HALVES, c.bytes);
  for (unsigned i = 0; i < HALVES; i++) {
    const gguf_scale s = gguf_scale_of(BLOCK_DTYPE, at, first + i);
    c.scale[i] = vf_set1(s.scale);
    c.offset[i] = vf_set1(s.offset);
  }
  return c;
}

static inline bool plain(int n, const codes *c) {
  (void)n, (void)c;
  return true;
}

static inline __attribute__((always_inline)) vf vector_of(const codes *c, int j) {
  const int half = j * VL / BLOCK_GROUP, part = j * VL % BLOCK_GROUP / VL;
  return vf_fma(vf_from_bytes(c->bytes[half], part), c->scale[half], c->offset[half]);
}

static inline vf any_vector_of(const codes *c, int j) {
  return vector_of(c, j);
}

static inline bool has_nan(const codes *c) {
  (void)c;
  return false;
}
