// kernels/cpu/scalar/linear_w4a8.c - the reference for 4-bit weights times 8-bit activations, with
// the same bits as linear_w4a8.h.
#include <math.h>

#include "kernels/cpu/linear/w4a8.h"
#include "kernels/decl.h"

enum { TOKENS = 32 };

// A block of columns of some tokens.
typedef struct {
  int8_t x[TOKENS][A8_MOST_BLOCK];
  float scale[TOKENS];
  uint32_t token0, n_tokens, k, n;
} x_block;

static void round_token(const td_linear_args *a, x_block *b, uint32_t i) {
  uint32_t t = b->token0 + i, largest = 0;
  const float *x = a->x + (a->x_rows ? a->x_rows[t] : t) * a->ldx + b->k;
  for (uint32_t k = 0; k < b->n; k++) {
    uint32_t bits = bits_from_f32(x[k]) & 0x7fffffffu;
    if (bits > largest) largest = bits;
  }
  a8_scale scale = a8_scale_of(largest);
  for (uint32_t k = 0; k < b->n; k++)
    b->x[i][k] = scale.times > 0 ? (int8_t)rintf(x[k] * scale.times) : 0;
  b->scale[i] = scale.scale;
}

// Codes are integers here; FP4 codes are twice their value.
static void add_block(const td_linear_args *a, const x_block *b, uint32_t row) {
  const td_weight *w = a->w;
  int codes[A8_MOST_BLOCK];
  for (uint32_t k = 0; k < b->n; k++) {
    float code = dequant_at(w, row, b->k + k);
    codes[k] = (int)(w->dtype == TD_F4E2M1 ? 2 * code : code);
  }
  float scale = scale_at(w, row, b->k / w->scale_cols);
  for (uint32_t i = 0; i < b->n_tokens; i++) {
    int sum = 0;
    for (uint32_t k = 0; k < b->n; k++)
      sum += codes[k] * b->x[i][k];
    float *y = &a->y[(b->token0 + i) * a->ldy + row - a->y_row0];
    *y = fmaf((float)sum, scale * b->scale[i], *y);
  }
}

static void set_tokens(const td_linear_args *a, x_block *b) {
  uint32_t block = a8_block(a->w), cols = a->w->cols;
  for (uint32_t i = 0; i < b->n_tokens; i++) {
    memset(&a->y[(b->token0 + i) * a->ldy + a->row_begin - a->y_row0], 0,
           (a->row_end - a->row_begin) * sizeof *a->y);
  }
  for (b->k = 0; b->k < cols; b->k += block) {
    b->n = cols - b->k < block ? cols - b->k : block;
    for (uint32_t i = 0; i < b->n_tokens; i++)
      round_token(a, b, i);
    for (uint32_t row = a->row_begin; row < a->row_end; row++)
      add_block(a, b, row);
  }
  for (uint32_t i = 0; i < b->n_tokens; i++) {
    for (uint32_t row = a->row_begin; row < a->row_end; row++) {
      float *y = &a->y[(b->token0 + i) * a->ldy + row - a->y_row0];
      *y = a8_result(a->w, *y);
    }
  }
}

void linear_w4a8__scalar(const td_linear_args *args) {
  x_block b;
  for (b.token0 = 0; b.token0 < args->n_tokens; b.token0 += b.n_tokens) {
    uint32_t left = args->n_tokens - b.token0;
    b.n_tokens = left < TOKENS ? left : TOKENS;
    set_tokens(args, &b);
  }
}
