// include/tandem/kv_f8.h - KV pages in E4M3: their rows and scales.
//
// A row is what shares scales: a head's key, a head's value, or MLA's latent with its rotary key. A
// token has n rows of dim elements, of which the last n_bf16 stay in BF16 (the rotary key). A page:
//   rows    [n][page_tokens], each codes E4M3 [dim - n_bf16], then BF16 [n_bf16]
//   scales  [n][page_tokens], each f32 [ceil((dim - n_bf16) / TD_KV_F8_BLOCK)]
// A value is its code times its block's scale: the smallest power of two, 2^-108 or more, with
// which the block's largest magnitude is within E4M3's. So values are exact in BF16, and every
// device reads the same ones. Rows are multiples of 16 bytes.
#pragma once

#include <stddef.h>
#include <stdint.h>

enum { TD_KV_F8_BLOCK = 128 };

typedef struct {
  uint32_t n, dim, n_bf16;
} td_kv_rows;

static inline uint32_t td_kv_f8_codes(const td_kv_rows *rows) {
  return rows->dim - rows->n_bf16;
}

static inline size_t td_kv_f8_row_bytes(const td_kv_rows *rows) {
  return td_kv_f8_codes(rows) + 2 * (size_t)rows->n_bf16;
}

static inline uint32_t td_kv_f8_blocks(const td_kv_rows *rows) {
  return (td_kv_f8_codes(rows) + TD_KV_F8_BLOCK - 1) / TD_KV_F8_BLOCK;
}

// Where a page's scales begin.
static inline size_t td_kv_f8_scales_at(const td_kv_rows *rows, uint32_t page_tokens) {
  return (size_t)rows->n * page_tokens * td_kv_f8_row_bytes(rows);
}

// All that a token has in a page.
static inline size_t td_kv_f8_token_bytes(const td_kv_rows *rows) {
  return rows->n * (td_kv_f8_row_bytes(rows) + td_kv_f8_blocks(rows) * sizeof(float));
}
