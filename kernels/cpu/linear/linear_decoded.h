// kernels/cpu/linear/linear_decoded.h - y = W x in FP32 for GGUF's blocks, of any dtype: pieces of
// some rows are decoded into L1 and multiplied by all tokens.
// Include after an ISA's vec.h.
//
// Every (row, token) pair has one accumulator of VL lanes, to which the row's vectors are added in
// order, so a token's bits do not depend on its batch. This is what tokens get that the kernels
// in integers cannot round, and `--activations f32`: exactness counts, and one instance serves
// every dtype.
#pragma once

#include "kernels/cpu/common/vec_math.h"
#include "kernels/decl.h"

#define TD_UNROLL _Pragma("GCC unroll 32")

enum {
  ROWS = 4,
  TOKENS = VL == 16 ? 6 : 3, // of a register tile
  PIECE = 1024,              // columns; whole blocks
  MOST_TOKENS = 96,          // whose x stays in L2
  PAD = VL,                  // so that rows fall into different L1 sets
};

// Some rows times some tokens. Lives on the stack.
typedef struct {
  _Alignas(64) float w[ROWS][PIECE + PAD];
  vf total[MOST_TOKENS * ROWS];
  const td_linear_args *a;
  uint32_t row0, n_rows, token0, n_tokens;
} product;

static const float *token_x(const product *g, uint32_t t) {
  const td_linear_args *a = g->a;
  t += g->token0;
  return a->x + (a->x_rows ? a->x_rows[t] : t) * a->ldx;
}

// Columns [k, k + n) of the rows; those that are missing keep what they have.
static void decode_piece(product *g, uint32_t k, uint32_t n) {
  td_weight piece = *g->a->w;
  const size_t row_bytes = td_weight_row_bytes(&piece);
  const td_block block = td_dtype_block(piece.dtype);
  const char *from = (const char *)piece.data + (size_t)k / block.cols * block.bytes;
  piece.rows = 1;
  piece.cols = n;
  for (uint32_t r = 0; r < g->n_rows; r++) {
    piece.data = from + (g->row0 + r) * row_bytes;
    TD_VEC_NAME(decode_row)(&(td_decode_row_args){.w = &piece, .out = g->w[r]});
  }
}

// Tokens [t, t + T) times the decoded rows.
TD_INLINE void add_products(const int T, product *g, uint32_t t, uint32_t k, uint32_t n) {
  vf acc[TOKENS * ROWS], *total = &g->total[t * ROWS];
  const float *x[TOKENS];
  TD_UNROLL for (int i = 0; i < T; i++) x[i] = token_x(g, t + (uint32_t)i) + k;
  TD_UNROLL for (int i = 0; i < T * ROWS; i++) acc[i] = total[i];
  for (uint32_t at = 0; at < n; at += VL) {
    vf w[ROWS];
    TD_UNROLL for (int r = 0; r < ROWS; r++) w[r] = vf_load(g->w[r] + at);
    TD_UNROLL for (int i = 0; i < T; i++) {
      const vf of_token = vf_load(x[i] + at);
      TD_UNROLL for (int r = 0; r < ROWS; r++)
          acc[i * ROWS + r] = vf_fma(w[r], of_token, acc[i * ROWS + r]);
    }
  }
  TD_UNROLL for (int i = 0; i < T * ROWS; i++) total[i] = acc[i];
}

static void product_of(product *g) {
  const td_linear_args *a = g->a;
  const uint32_t cols = a->w->cols;
  for (uint32_t i = 0; i < g->n_tokens * ROWS; i++)
    g->total[i] = vf_zero();
  for (uint32_t k = 0, n; k < cols; k += n) {
    n = cols - k < PIECE ? cols - k : PIECE;
    decode_piece(g, k, n);
    uint32_t t = 0;
    for (; t + TOKENS <= g->n_tokens; t += TOKENS)
      add_products(TOKENS, g, t, k, n);
    for (; t < g->n_tokens; t++)
      add_products(1, g, t, k, n);
  }
  for (uint32_t t = 0; t < g->n_tokens; t++) {
    float *y = a->y + (g->token0 + t) * a->ldy + g->row0 - a->y_row0, sum[ROWS];
    const vf *total = &g->total[t * ROWS];
    vf_sum4(total[0], total[1], total[2], total[3], sum);
    for (uint32_t r = 0; r < g->n_rows; r++)
      y[r] = sum[r];
  }
}
_Static_assert(ROWS == 4, "vf_sum4 takes them");

void TD_VEC_NAME(linear_decoded)(const td_linear_args *a) {
  product g;
  memset(g.w, 0, sizeof g.w);
  g.a = a;
  for (g.token0 = 0; g.token0 < a->n_tokens; g.token0 += g.n_tokens) {
    const uint32_t left = a->n_tokens - g.token0;
    g.n_tokens = left < MOST_TOKENS ? left : MOST_TOKENS;
    for (g.row0 = a->row_begin; g.row0 < a->row_end; g.row0 += g.n_rows) {
      g.n_rows = a->row_end - g.row0 < ROWS ? a->row_end - g.row0 : ROWS;
      product_of(&g);
    }
  }
}
