// kernels/cpu/avx512amx/linear_split.c - y = W x with BF16 weights and exact x, by AMX's tiles.
// A number in FP32 is the sum of three in BF16, each the upper bits of what the ones before leave,
// so products are exact, and sums are FP32: three times the products, at sixteen times the rate.
// Parts below 2^-126 count as 0. A result depends on its row and token alone: for each 32 columns
// the products of the upper parts come first, then those of the middle and of the lower ones.
#include "kernels/cpu/avx512/vec.h"
#include "kernels/decl.h"

enum {
  TILE = 16, // rows or tokens of a tile
  STEP = 32, // columns
  PARTS = 3,
  SPAN = 512, // columns of x that are packed at once
  STEPS = SPAN / STEP,
  MOST_ROWS = 512,
  MOST_TOKENS = 192
};

typedef struct {
  _Alignas(64) uint16_t x[MOST_TOKENS / TILE][STEPS][PARTS][TILE][STEP]; // pairs of columns, tokens
  float total[MOST_ROWS / TILE][MOST_TOKENS / TILE][TILE][TILE];         // rows, tokens
  uint16_t w[2 * TILE][STEP]; // of rows and columns that fill no tile, zeros beyond
  const td_linear_args *a;
  uint32_t token0, n_tokens, row0, n_rows, span, n_span; // the block
} split;

static void begin_tiles(void) {
  struct {
    uint8_t palette, start, none[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } shape = {.palette = 1};
  for (int i = 0; i < 8; i++) {
    shape.row_bytes[i] = 64;
    shape.rows[i] = TILE;
  }
  // The compiler does not know that it reads all of this.
  __asm__ volatile("" : : "r"(&shape) : "memory");
  _tile_loadconfig(&shape);
}

// The upper halves of 32 numbers; what is left of these.
static inline __m512i take_part(vf v[2]) {
  static const uint16_t odd[STEP] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                     23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                     45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  const __m512i mask = _mm512_set1_epi32((int)0xffff0000u);
  __m512i upper[2];
  for (int i = 0; i < 2; i++) {
    upper[i] = _mm512_and_si512(_mm512_castps_si512(v[i]), mask);
    v[i] = _mm512_sub_ps(v[i], _mm512_castsi512_ps(upper[i]));
  }
  return _mm512_permutex2var_epi16(upper[0], _mm512_loadu_si512(odd), upper[1]);
}

// Packs 16 tokens of a step, missing ones and missing columns as zeros.
static void pack(split *s, uint32_t tile, uint32_t step) {
  _Alignas(64) uint16_t rows[PARTS][TILE][STEP];
  const uint32_t from = s->span + step * STEP, left = s->n_span - step * STEP;
  for (uint32_t t = 0; t < TILE; t++) {
    const uint32_t token = tile * TILE + t;
    vf v[2] = {vf_zero(), vf_zero()};
    if (token < s->n_tokens) {
      const uint32_t at = s->token0 + token;
      const float *x = s->a->x + (s->a->x_rows ? s->a->x_rows[at] : at) * s->a->ldx + from;
      v[0] = left < VL ? vf_load_n(x, left) : vf_load(x);
      if (left > VL) v[1] = left < STEP ? vf_load_n(x + VL, left - VL) : vf_load(x + VL);
    }
    for (int part = 0; part < PARTS; part++)
      _mm512_store_si512(rows[part][t], take_part(v));
  }
  for (int part = 0; part < PARTS; part++) {
    for (int i = 0; i < 4; i++) {
      vi turned[4];
      vi_transpose((const char *)rows[part] + 16 * i, 64, turned);
      for (int k = 0; k < 4; k++)
        _mm512_store_si512(s->x[tile][step][part][4 * i + k], turned[k]);
    }
  }
}

// 32 rows of weights from `row` on, of one step; *stride is in bytes.
static const uint16_t *weights_at(split *s, uint32_t row, uint32_t step, size_t *stride) {
  const td_weight *w = s->a->w;
  const uint32_t left = s->n_span - step * STEP, n = s->row0 + s->n_rows - row;
  const uint16_t *at = (const uint16_t *)w->data + (size_t)row * w->cols + s->span + step * STEP;
  *stride = (size_t)w->cols * sizeof *at;
  if (left >= STEP && n >= 2 * TILE) return at;
  memset(s->w, 0, sizeof s->w);
  for (uint32_t r = 0; r < n && r < 2 * TILE; r++)
    memcpy(s->w[r], at + (size_t)r * w->cols, (left < STEP ? left : STEP) * sizeof *at);
  *stride = sizeof s->w[0];
  return s->w[0];
}

// Two tiles of rows times two of tokens, added to their totals.
static void multiply(split *s, uint32_t r, uint32_t t) {
  const uint32_t n_steps = (s->n_span + STEP - 1) / STEP;
  float(*c)[MOST_TOKENS / TILE][TILE][TILE] = &s->total[r];
  if (s->span) {
    _tile_loadd(0, c[0][t], 64);
    _tile_loadd(1, c[0][t + 1], 64);
    _tile_loadd(2, c[1][t], 64);
    _tile_loadd(3, c[1][t + 1], 64);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (uint32_t step = 0; step < n_steps; step++) {
    size_t stride;
    const uint16_t *w = weights_at(s, s->row0 + r * TILE, step, &stride);
    __asm__ volatile("" : : : "memory"); // the compiler does not know what tiles load
    _tile_loadd(4, w, stride);
    _tile_loadd(5, (const char *)w + TILE * stride, stride);
    for (int part = 0; part < PARTS; part++) {
      _tile_loadd(6, s->x[t][step][part], 64);
      _tile_loadd(7, s->x[t + 1][step][part], 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c[0][t], 64);
  _tile_stored(1, c[0][t + 1], 64);
  _tile_stored(2, c[1][t], 64);
  _tile_stored(3, c[1][t + 1], 64);
}

// Totals of a tile to y, a token a row.
static void put(const split *s, uint32_t r, uint32_t t) {
  const td_linear_args *a = s->a;
  const uint32_t row = s->row0 + r * TILE, left = s->n_rows - r * TILE;
  __asm__ volatile("" : : : "memory"); // nor what they store
  for (uint32_t i = 0; i < TILE; i += 4) {
    vi turned[4];
    vi_transpose((const char *)s->total[r][t] + 4 * i, 64, turned);
    for (uint32_t k = 0; k < 4 && t * TILE + i + k < s->n_tokens; k++) {
      float *y = a->y + (s->token0 + t * TILE + i + k) * a->ldy + (row - a->y_row0);
      vf_store_n(y, _mm512_castsi512_ps(turned[k]), left < TILE ? left : TILE);
    }
  }
}

static void multiply_block(split *s) {
  const uint32_t n_rows = (s->n_rows + TILE - 1) / TILE, n_tokens = (s->n_tokens + TILE - 1) / TILE;
  const uint32_t cols = s->a->w->cols;
  for (s->span = 0; s->span < cols; s->span += SPAN) {
    s->n_span = cols - s->span < SPAN ? cols - s->span : SPAN;
    for (uint32_t t = 0; t < (n_tokens + 1) / 2 * 2; t++)
      for (uint32_t step = 0; step * STEP < s->n_span; step++)
        pack(s, t, step);
    for (uint32_t r = 0; r < n_rows; r += 2)
      for (uint32_t t = 0; t < n_tokens; t += 2)
        multiply(s, r, t);
  }
  for (uint32_t r = 0; r < n_rows; r++)
    for (uint32_t t = 0; t < n_tokens; t++)
      put(s, r, t);
}

void linear_split__avx512amx(const td_linear_args *a) {
  split s;
  s.a = a;
  begin_tiles();
  for (s.row0 = a->row_begin; s.row0 < a->row_end; s.row0 += MOST_ROWS) {
    s.n_rows = a->row_end - s.row0 < MOST_ROWS ? a->row_end - s.row0 : MOST_ROWS;
    for (s.token0 = 0; s.token0 < a->n_tokens; s.token0 += MOST_TOKENS) {
      s.n_tokens = a->n_tokens - s.token0 < MOST_TOKENS ? a->n_tokens - s.token0 : MOST_TOKENS;
      multiply_block(&s);
    }
  }
  _tile_release();
}
