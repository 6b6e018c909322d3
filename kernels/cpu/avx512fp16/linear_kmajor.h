// kernels/cpu/avx512fp16/linear_kmajor.h - y = W x for column-major INT4 (TD_LAYOUT_GPTQ,
// TD_LAYOUT_AWQ) with chains of FP16 additions.
// Include after Q4_EXACT (q4_results.h) and these definitions of a layout (kmajor_awq.h,
// kmajor_gptq.h):
//   LINES, LINE_ROWS    adjacent cache lines of a strip, which is read from top to bottom; rows per
//                       line
//   WORD_ROWS           rows per word
//   TURN_COLS, TURN_STEPS    columns that a line holds (a turn), and the steps that they make
//   VECTORS, ZEROS      vectors of 32 values per step, equally many of each line: all codes of its
//                       16-bit words in turn, or the code of the step; vectors of zero points: one
//                       for each of those, or one for even steps and one for odd ones
//   AHEAD, NEAR         prefetch distances in turns, into L2 and into L1
//   X_SCALE, put_steps  factor of x besides q4_power's; stores the steps of x, pairs of FP16
//   TOTALS, totals_from_rows, rows_from_totals    FP32 vectors of a strip's sums, and their order
//   zeros_of, end_chain    a group's zero points; what a chain adds to the totals of a vector
//
// Lanes are rows. A chain is CHAIN_STEPS steps within one group: FP16 products and sums, converted
// to FP32, multiplied by the group's scales and added to the (row, token) pair's total. If two
// lanes are columns of the same row, they are added first. All paths keep this order, so they agree
// to the last bit:
//   1 to 3 tokens  values are multiplied as they are decoded
//   more           a chain of a strip is decoded into L1 for all tokens of a block
// The error is that of linear_q4.h.
#pragma once

#include "kernels/cpu/avx512fp16/q4_results.h"

#define TD_UNROLL _Pragma("GCC unroll 32")

enum {
  STRIP = LINES * LINE_ROWS, // rows
  CHAIN_TURNS = CHAIN_STEPS / TURN_STEPS,
  CHAIN_COLS = CHAIN_TURNS * TURN_COLS,
  PANEL_ROWS = 256, // rows that share reordered x
  DIRECT_TOKENS = 3,
  BLOCK_TOKENS = 64,
  TILE_VECTORS = 4, // a tile's sums fit registers
  TILE_TOKENS = 6,
  X_STEPS = 8192, // reordered x, in L1
};

// Some rows times some tokens. Lives on the stack.
typedef struct {
  _Alignas(64) _Float16 w[CHAIN_STEPS * VECTORS * VHL]; // a chain: [step][vector][lane]
  uint32_t x[X_STEPS];                                  // of the window: [token][step], FP16 pairs
  vh zero[ZEROS];                                       // of the strip, as scale
  _Alignas(64) float scale[TOTALS * VL];
  _Alignas(64) float total[PANEL_ROWS / STRIP][BLOCK_TOKENS][TOTALS * VL];
  float power[BLOCK_TOKENS];
  __mmask16 mask[LINES]; // which words of the strip exist
  const td_linear_args *a;
  uint32_t row0, n_rows;     // the panel
  uint32_t token0, n_tokens; // the block
  uint32_t k, n, n_steps;    // the window: columns [k, k + n), steps per token
} panel;

// Address of a strip's first word of column k.
static const uint32_t *words_at(const td_weight *w, uint32_t row0, uint32_t k) {
  return (const uint32_t *)w->data + (size_t)(k / TURN_COLS) * (w->rows / WORD_ROWS) +
         row0 / WORD_ROWS;
}

// ---- reading --------------------------------------------------------------------------------

// A strip's turns of a chain, and the distances to what is prefetched meanwhile.
typedef struct {
  const uint32_t *words;
  size_t step; // words from one turn to the next
  uint32_t n_turns;
  uintptr_t far, near; // prefetch distances in bytes, to L2 and L1
} chain;

// Address read after a strip's part of the window.
static uintptr_t next_place(const panel *p, uint32_t strip) {
  const td_weight *w = p->a->w;
  uint32_t row = (strip + 1) * STRIP, end = p->k + p->n;
  if (row < p->n_rows) return (uintptr_t)words_at(w, p->row0 + row, p->k);
  if (end < w->cols) return (uintptr_t)words_at(w, p->row0, end);
  bool is_last = p->row0 + p->n_rows >= p->a->row_end;
  if (is_last && p->a->next) return (uintptr_t)p->a->next;
  return (uintptr_t)words_at(w, p->row0 + p->n_rows, 0);
}

// k: the chain's first column, counted in the window.
static chain chain_at(const panel *p, uint32_t strip, uint32_t k) {
  const td_weight *w = p->a->w;
  const uint32_t left = p->n - k, n_turns = (left + TURN_COLS - 1) / TURN_COLS;
  chain c = {.words = words_at(w, p->row0 + strip * STRIP, p->k + k),
             .step = w->rows / WORD_ROWS,
             .n_turns = n_turns < CHAIN_TURNS ? n_turns : CHAIN_TURNS};
  const size_t bytes = c.step * sizeof *c.words;
  const uintptr_t behind = next_place(p, strip) - (uintptr_t)c.words - n_turns * bytes;
  c.far = AHEAD * bytes + (AHEAD < n_turns ? 0 : behind);
  c.near = NEAR * bytes + (NEAR < n_turns ? 0 : behind);
  return c;
}

TD_INLINE void load_turn(const panel *p, const chain *c, uint32_t turn, vi words[LINES]) {
  const uint32_t *at = c->words + turn * c->step;
  TD_UNROLL for (int i = 0; i < LINES; i++) {
    __builtin_prefetch((const void *)((uintptr_t)(at + i * VL) + c->far), 0, 2);
    __builtin_prefetch((const void *)((uintptr_t)(at + i * VL) + c->near));
    words[i] = _mm512_maskz_loadu_epi32(p->mask[i], at + i * VL);
  }
}

// Vector v of a step of a turn.
TD_INLINE vh value_of(const vi words[LINES], int v, int step, const vh zero[ZEROS]) {
  enum { OF_LINE = VECTORS / LINES, ZEROS_EACH = ZEROS / VECTORS };
  return q4_less(words[v / OF_LINE], v % OF_LINE + step, zero[v * ZEROS_EACH + step % ZEROS_EACH]);
}

// A step of x, broadcast to all lanes.
TD_INLINE vh pair_of(const uint32_t *step) {
  return _mm512_castsi512_ph(_mm512_set1_epi32((int)*step));
}

static void find_strip(panel *p, uint32_t strip) {
  for (uint32_t i = 0; i < LINES; i++) {
    uint32_t begin = strip * STRIP + i * LINE_ROWS;
    uint32_t n = p->n_rows > begin ? (p->n_rows - begin + WORD_ROWS - 1) / WORD_ROWS : 0;
    p->mask[i] = n < VL ? mask_n(n) : 0xffff;
  }
}

// Sets the scales and zero points of the strip's rows.
static void find_group(panel *p, uint32_t strip, uint32_t k) {
  const td_weight *w = p->a->w;
  float scale[STRIP + VL] = {0};
  const size_t group = k / w->scale_cols, row0 = p->row0 + strip * STRIP;
  const size_t at = group * w->rows + row0, n = td_weight_groups(w) * w->rows;
  const char *from = (const char *)w->scale + at * td_dtype_bytes(w->scale_dtype);
  const uint32_t left = p->n_rows - strip * STRIP;
  scales_to_f32(from, w->scale_dtype, n - at, left < STRIP ? left : STRIP, scale);
  totals_from_rows(scale, p->scale);
  zeros_of(w, group, (uint32_t)row0, p->mask, p->zero);
}

// ---- products -------------------------------------------------------------------------------

// For T tokens; x: the first one's steps.
TD_INLINE void dot_chain(const int T, const panel *p, const chain *c, const uint32_t *x,
                         float (*total)[TOTALS * VL]) {
  vh sum[DIRECT_TOKENS * VECTORS], zero[ZEROS];
  TD_UNROLL for (int i = 0; i < T * VECTORS; i++) sum[i] = vh_zero();
  TD_UNROLL for (int i = 0; i < ZEROS; i++) zero[i] = p->zero[i];
  for (uint32_t turn = 0; turn < c->n_turns; turn++, x += TURN_STEPS) {
    vi words[LINES];
    load_turn(p, c, turn, words);
    TD_UNROLL for (int s = 0; s < TURN_STEPS; s++) {
      vh xv[DIRECT_TOKENS];
      TD_UNROLL for (int t = 0; t < T; t++) xv[t] = pair_of(x + (uint32_t)t * p->n_steps + s);
      TD_UNROLL for (int v = 0; v < VECTORS; v++) {
        vh value = value_of(words, v, s, zero);
        TD_UNROLL for (int t = 0; t < T; t++) {
          sum[t * VECTORS + v] = vh_fma(value, xv[t], sum[t * VECTORS + v]);
        }
      }
    }
  }
  TD_UNROLL for (int i = 0; i < T * VECTORS; i++) {
    const int at = i % VECTORS * (TOTALS / VECTORS) * VL;
    end_chain(sum[i], p->scale + at, total[i / VECTORS] + at);
  }
}

static void dot_tokens(const panel *p, const chain *c, const uint32_t *x,
                       float (*total)[TOTALS * VL]) {
  switch (p->n_tokens) {
  case 1: dot_chain(1, p, c, x, total); return;
  case 2: dot_chain(2, p, c, x, total); return;
  case 3: dot_chain(3, p, c, x, total); return;
  default: return;
  }
}
_Static_assert(DIRECT_TOKENS == 3, "a case for every number");

static void decode_chain(panel *p, const chain *c) {
  vh zero[ZEROS];
  TD_UNROLL for (int i = 0; i < ZEROS; i++) zero[i] = p->zero[i];
  _Float16 *out = p->w;
  for (uint32_t turn = 0; turn < c->n_turns; turn++) {
    vi words[LINES];
    load_turn(p, c, turn, words);
    TD_UNROLL for (int s = 0; s < TURN_STEPS; s++) {
      TD_UNROLL for (int v = 0; v < VECTORS; v++, out += VHL) {
        vh_store(out, value_of(words, v, s, zero));
      }
    }
  }
}

// TILE_VECTORS vectors of the decoded chain times T tokens; x: the first token's steps.
TD_INLINE void multiply_tile(const int T, const panel *p, uint32_t n_steps, const _Float16 *w,
                             const uint32_t *x, const float *scale, float (*total)[TOTALS * VL]) {
  vh sum[TILE_TOKENS * TILE_VECTORS];
  TD_UNROLL for (int i = 0; i < T * TILE_VECTORS; i++) sum[i] = vh_zero();
  for (uint32_t s = 0; s < n_steps; s++, w += VECTORS * VHL, x++) {
    vh value[TILE_VECTORS];
    TD_UNROLL for (int v = 0; v < TILE_VECTORS; v++) value[v] = vh_load(w + v * VHL);
    TD_UNROLL for (int t = 0; t < T; t++) {
      vh xv = pair_of(x + (uint32_t)t * p->n_steps);
      TD_UNROLL for (int v = 0; v < TILE_VECTORS; v++) {
        sum[t * TILE_VECTORS + v] = vh_fma(value[v], xv, sum[t * TILE_VECTORS + v]);
      }
    }
  }
  TD_UNROLL for (int i = 0; i < T * TILE_VECTORS; i++) {
    const int at = i % TILE_VECTORS * (TOTALS / VECTORS) * VL;
    end_chain(sum[i], scale + at, total[i / TILE_VECTORS] + at);
  }
}

#define MULTIPLY_TILE(T)                                                                           \
  case T: multiply_tile(T, p, n_steps, w, x, scale, total); return;

static void multiply_tokens(const panel *p, uint32_t n_tokens, uint32_t n_steps, const _Float16 *w,
                            const uint32_t *x, const float *scale, float (*total)[TOTALS * VL]) {
  switch (n_tokens) {
    MULTIPLY_TILE(1)
    MULTIPLY_TILE(2)
    MULTIPLY_TILE(3)
    MULTIPLY_TILE(4)
    MULTIPLY_TILE(5)
    MULTIPLY_TILE(6)
  default: return;
  }
}
_Static_assert(TILE_TOKENS == 6, "a case for every size of tile");

// The decoded chain times all tokens. step: the chain's first step, counted in the window.
static void multiply(panel *p, uint32_t strip, uint32_t n_steps, uint32_t step) {
  const uint32_t n_tiles = (p->n_tokens + TILE_TOKENS - 1) / TILE_TOKENS;
  for (uint32_t i = 0; i < n_tiles; i++) {
    uint32_t begin = i * p->n_tokens / n_tiles, end = (i + 1) * p->n_tokens / n_tiles;
    for (uint32_t v = 0; v < VECTORS; v += TILE_VECTORS) {
      const uint32_t at = v * (TOTALS / VECTORS) * VL;
      multiply_tokens(p, end - begin, n_steps, p->w + v * VHL,
                      p->x + (size_t)begin * p->n_steps + step, p->scale + at,
                      (float(*)[TOTALS * VL])(p->total[strip][begin] + at));
    }
  }
}

static void add_strip(panel *p, uint32_t strip) {
  const uint32_t group_cols = p->a->w->scale_cols;
  find_strip(p, strip);
  for (uint32_t k = 0; k < p->n; k += CHAIN_COLS) {
    const uint32_t step = k / TURN_COLS * TURN_STEPS;
    if (k == 0 || (p->k + k) % group_cols == 0) find_group(p, strip, p->k + k);
    chain c = chain_at(p, strip, k);
    if (p->n_tokens <= DIRECT_TOKENS) {
      dot_tokens(p, &c, p->x + step, p->total[strip]);
    } else {
      decode_chain(p, &c);
      multiply(p, strip, c.n_turns * TURN_STEPS, step);
    }
  }
}

// ---- all ------------------------------------------------------------------------------------

// Packs the window's columns of all tokens, with zeros up to a whole turn.
static void pack_window(panel *p) {
  enum { AT_ONCE = VL, STEPS = AT_ONCE / TURN_COLS * TURN_STEPS };
  for (uint32_t t = 0; t < p->n_tokens; t++) {
    const float *x = token_x(p->a, p->token0 + t) + p->k;
    uint32_t *out = p->x + (size_t)t * p->n_steps;
    const vf power = vf_set1(p->power[t]);
    for (uint32_t k = 0, left = p->n; k < p->n; k += AT_ONCE, left -= AT_ONCE, out += STEPS) {
      vf columns = left < AT_ONCE ? vf_load_n(x + k, left) : vf_load(x + k);
      put_steps(_mm512_cvtxps_ph(vf_mul(columns, power)), out);
    }
  }
}

// Results of rows [row0, row0 + n_rows) for a block of tokens; writes only the requested rows.
static void finish_block(panel *p) {
  float rows[PANEL_ROWS + STRIP];
  const uint32_t begin = p->row0 < p->a->row_begin ? p->a->row_begin - p->row0 : 0;
  for (uint32_t t = 0; t < p->n_tokens; t++) {
    for (uint32_t i = 0; i * STRIP < p->n_rows; i++)
      rows_from_totals(p->total[i][t], rows + i * STRIP);
    finish_token(p->a, p->token0 + t, p->power[t], p->row0 + begin, p->n_rows - begin,
                 rows + begin);
  }
}

static void do_block(panel *p) {
  const uint32_t cols = p->a->w->cols, chains = X_STEPS / CHAIN_STEPS / p->n_tokens;
  for (uint32_t i = 0; i * STRIP < p->n_rows; i++)
    memset(p->total[i], 0, p->n_tokens * sizeof p->total[i][0]);
  for (p->k = 0; p->k < cols; p->k += p->n) {
    p->n = cols - p->k < chains * CHAIN_COLS ? cols - p->k : chains * CHAIN_COLS;
    p->n_steps = (p->n + CHAIN_COLS - 1) / CHAIN_COLS * CHAIN_STEPS;
    pack_window(p);
    for (uint32_t i = 0; i * STRIP < p->n_rows; i++)
      add_strip(p, i);
  }
  finish_block(p);
}

static inline void linear_kmajor(const td_linear_args *a) {
  if (a->w->scale_cols % CHAIN_COLS != 0 && a->w->scale_cols < a->w->cols) {
    Q4_EXACT(a);
    return;
  }
  panel p;
  p.a = a;
  for (p.token0 = 0; p.token0 < a->n_tokens; p.token0 += p.n_tokens) {
    uint32_t left = a->n_tokens - p.token0;
    p.n_tokens = left < BLOCK_TOKENS ? left : BLOCK_TOKENS;
    for (uint32_t t = 0; t < p.n_tokens; t++)
      p.power[t] = X_SCALE * q4_power(token_x(a, p.token0 + t), a->w->cols);
    for (p.row0 = a->row_begin / 8 * 8; p.row0 < a->row_end; p.row0 += p.n_rows) {
      p.n_rows = a->row_end - p.row0 < PANEL_ROWS ? a->row_end - p.row0 : PANEL_ROWS;
      do_block(&p);
    }
  }
}
