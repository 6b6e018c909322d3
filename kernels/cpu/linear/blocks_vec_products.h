// kernels/cpu/linear/blocks_vec_products.h - the products of linear_blocks.h by vectors. Those of
// a tile of rows and tokens take longest to compile, and know nothing of a dtype but its groups.
#pragma once

_Static_assert(HAS_OFFSETS == GGUF_HAS_OFFSETS(PRODUCTS_LIKE) &&
                   GGUF_IS_FINE(BLOCK_DTYPE) == GGUF_IS_FINE(PRODUCTS_LIKE),
               "products of other groups");
#ifdef PRODUCTS_MADE
#define PRODUCT_ANY_TILE PRODUCTS_MADE
#else
#define PRODUCT_ANY_TILE PRODUCTS_USED
#endif

// total of n_vectors of rows and n_tokens += a part of n_groups groups.
void PRODUCT_ANY_TILE(uint32_t n_vectors, uint32_t n_tokens, const product *g, uint32_t n_groups,
                      const tile_x *x, vf *total);

#ifdef PRODUCTS_MADE
_Static_assert(BLOCK_DTYPE == PRODUCTS_LIKE, "its own");

// total [R][..] of T tokens += a part of n_groups groups; a vector of rows is total_step from the
// next. is_a8: x is in 8 bits.
TD_INLINE void product_tile(const int R, const int T, const bool is_a8, const product *g,
                            uint32_t n_groups, const tile_x *x, vf *total, size_t total_step) {
  const uint32_t n_bytes = is_a8 && T > 1 ? A8_BYTES : 2; // as x_bytes
  const bool by_group = is_a8 && IS_SHORT;
  enum { STEPS = GROUP_COLS / 4 };
  const bool has_less = gguf_less(BLOCK_DTYPE) > 0;
  vf part[ROW_VECTORS * TOKENS];
  TD_UNROLL for (int i = 0; i < R * T; i++) part[i] = vf_zero();
  for (uint32_t i = 0; i < n_groups; i++) {
    group_sum sums[ROW_VECTORS * TOKENS];
    TD_UNROLL for (int t = 0; t < T; t++) {
      const vi less = has_less ? vi_set1(x->less[i * g->n_slots + t]) : vi_zero();
      TD_UNROLL for (int r = 0; r < R; r++) sums[r * T + t] = begin_group(less);
    }
    TD_UNROLL for (uint32_t d = 0; d < STEPS; d++) {
      const uint8_t *w = g->w[i * STEPS + d][0];
      multiply_fours(R, T, n_bytes, w, x->x + (i * STEPS + d) * 4 * n_bytes, x_stride(g), sums);
    }
    TD_UNROLL for (int t = 0; t < T; t++) {
      const vf sum_x = vf_set1(HAS_OFFSETS ? x->sum[i * g->n_slots + t] : 0);
      const vf scale_x = vf_set1(by_group ? x->scale[i * g->n_slots + t] : 1);
      TD_UNROLL for (int r = 0; r < R; r++) {
        vf *to = &part[r * T + t];
        const vf scale = by_group ? vf_mul(g->scale[i][r], scale_x) : g->scale[i][r];
        *to = vf_fma(vf_from_vi(end_group(sums[r * T + t])), scale, *to);
        if (HAS_OFFSETS) *to = vf_fma(g->offset[i][r], sum_x, *to);
      }
    }
    // Keeps the compiler from holding many sums in registers, of which there are too few.
    if (T > 1) __asm__ volatile("" : "+m"(part));
  }
  TD_UNROLL for (int t = 0; t < T; t++) {
    const vf scale = vf_set1(by_group ? 1 : x->scale[t]);
    TD_UNROLL for (int r = 0; r < R; r++) {
      vf *to = total + (size_t)r * total_step + t;
      *to = vf_fma(part[r * T + t], scale, *to);
    }
  }
}

#define PRODUCT_TILE(T)                                                                            \
  case T:                                                                                          \
    if (is_a8 && n_vectors == 1) {                                                                 \
      product_tile(1, T, true, g, n_groups, x, total, g->n_tokens);                                \
    } else if (is_a8) {                                                                            \
      product_tile(2, T, true, g, n_groups, x, total, g->n_tokens);                                \
    } else if (n_vectors == 1) {                                                                   \
      product_tile(1, T, false, g, n_groups, x, total, g->n_tokens);                               \
    } else {                                                                                       \
      product_tile(2, T, false, g, n_groups, x, total, g->n_tokens);                               \
    }                                                                                              \
    return;

// Not inlined, since its caller's constants would take registers.
__attribute__((noinline)) void PRODUCT_ANY_TILE(uint32_t n_vectors, uint32_t n_tokens,
                                                const product *g, uint32_t n_groups,
                                                const tile_x *x, vf *total) {
  const bool is_a8 = g->a->x_int8 && (A8_BYTES == 1 || IS_SHORT); // or there is no difference
  switch (n_tokens) {
    PRODUCT_TILE(1)
    PRODUCT_TILE(2)
    PRODUCT_TILE(3)
    PRODUCT_TILE(4)
    PRODUCT_TILE(5)
    PRODUCT_TILE(6)
  default: return;
  }
}
_Static_assert(TOKENS == 6 && ROW_VECTORS == 2, "a case for every size of tile");
#endif

// ---- one token ----------------------------------------------------------------------------------

// One token's x in the order that block_sums takes.
static int8_t *ordered_x(product *g) {
  return ROW_SUMS ? g->x + X_COLS : g->x; // behind the only token's
}

// The sums of VL rows over a block, a row a lane; less [group], or 0.
TD_INLINE void block_sums(row_blocks *b, const int8_t *x, const int32_t *less, vi *sums) {
  const td_block block = td_dtype_block(BLOCK_DTYPE);
  const uint32_t n_groups = block.cols / GROUP_COLS;
  const bool has_less = gguf_less(BLOCK_DTYPE) > 0;
  if (ROW_SUMS) {
    enum { OF_32 = 32 / GROUP_COLS };
    row_signs signs;
    signs_of_rows(b, signs);
    if (IS_BY_ROW) { // much code
      for (uint32_t i = 0; i < n_groups; i += OF_32, x += 32 / 4 * X_FOUR)
        row_sums(BLOCK_DTYPE, OF_32, b->p, b->apart, i / OF_32, x, signs, sums + i);
    } else {
      TD_UNROLL for (uint32_t i = 0; i < n_groups; i += OF_32, x += 32 / 4 * X_FOUR)
          row_sums(BLOCK_DTYPE, OF_32, b->p, b->apart, i / OF_32, x, signs, sums + i);
    }
    if (!has_less) return;
    TD_UNROLL for (uint32_t i = 0; i < n_groups; i++) sums[i] = vi_add(sums[i], vi_set1(less[i]));
    return;
  }
  group_sum of[GROUPS];
  TD_UNROLL for (uint32_t i = 0; i < n_groups; i++)
      of[i] = begin_group(has_less ? vi_set1(less[i]) : vi_zero());
  block_codes(b, &(code_sink){.x = x, .sums = of});
  TD_UNROLL for (uint32_t i = 0; i < n_groups; i++) sums[i] = end_group(of[i]);
}

// VL rows times the block's only token, over the span.
static void product_of_one(product *g, uint32_t row) {
  const td_block block = td_dtype_block(BLOCK_DTYPE);
  const int8_t *x = ordered_x(g);
  const int32_t *less = g->x_less;
  const float *sum_x = g->x_sum, *scale_x = g->x_scale;
  row_blocks b = {.apart = g->row_bytes, .n_rows = VL, .ahead = g->ahead};
  b.p = (const uint8_t *)g->a->w->data + (size_t)(g->row0 + row) * g->row_bytes +
        bytes_before(g->span);
  for (uint32_t k = 0; k < g->n_span; k += PART) {
    const uint32_t n = g->n_span - k < PART ? g->n_span - k : PART;
    vf part = vf_zero();
    for (uint32_t at = 0; at < n; at += block.cols, b.p += block.bytes) {
      vf scale[GROUPS], offset[GROUPS];
      vi sums[GROUPS];
      g->ahead += block.bytes * VL;
      block_scales(&b, scale, offset, 1);
      block_sums(&b, x, less, sums);
      x += block.cols / 4 * X_FOUR;
      less += block.cols / GROUP_COLS;
      TD_UNROLL for (uint32_t i = 0; i < block.cols / GROUP_COLS; i++) {
        if (IS_SHORT && g->scales_by_group) scale[i] = vf_mul(scale[i], vf_set1(*scale_x++));
        part = vf_fma(vf_from_vi(sums[i]), scale[i], part);
        if (HAS_OFFSETS) part = vf_fma(offset[i], vf_set1(*sum_x++), part);
      }
      for (; b.ahead < g->ahead; b.ahead += 64)
        __builtin_prefetch(b.ahead, 0, 2);
    }
    vf *total = &g->total[row / VL];
    const bool is_scaled = IS_SHORT && g->scales_by_group;
    *total = vf_fma(part, vf_set1(is_scaled ? 1 : g->x_scale[k / PART]), *total);
  }
}

// The rows of which the block's only token was computed.
static uint32_t rows_of_one(product *g) {
  uint32_t row = 0;
  if (g->n_tokens > 1) return row;
  if (ROW_SUMS) order_x(g->x, g->n_span, ordered_x(g));
  for (; row + VL <= g->n_rows; row += VL) {
    g->ahead = rows_behind(g, row + VL);
    product_of_one(g, row);
  }
  return row;
}

// Decoded rows from `row` on times the block's tokens, over n columns of a part.
static void multiply_rows(product *g, uint32_t row, uint32_t n_vectors, uint32_t part, uint32_t n) {
  for (uint32_t i = 0; i < g->n_tiles; i++) {
    const uint32_t t = i * g->n_tokens / g->n_tiles, end = (i + 1) * g->n_tokens / g->n_tiles;
    const tile_x x = x_of_tile(g, part, t);
    PRODUCT_ANY_TILE(n_vectors, end - t, g, n / GROUP_COLS, &x,
                     g->total + (size_t)row / VL * g->n_tokens + t);
  }
}

static bool left_to_others(const td_linear_args *a) {
  (void)a;
  return false;
}

static void begin_tokens(product *g) {
  g->n_slots = g->n_tokens;
  g->n_tiles = (g->n_tokens + TOKENS - 1) / TOKENS;
}

static void end_tokens(void) {}
