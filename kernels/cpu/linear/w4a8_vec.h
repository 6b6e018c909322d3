// kernels/cpu/linear/w4a8_vec.h - the products of linear_w4a8.h by vectors.
#pragma once

TD_INLINE void put_codes(a8 *g, uint32_t word, uint32_t v, vi codes) {
  vi_store(g->w[word][v * VL], codes);
}

// What a block's codes of VL rows are too large by, times the sum of x, to be added.
TD_INLINE vi less_of(const a8 *g, const bool zeros, uint32_t block, int v, int32_t sum) {
  return zeros ? a8_mul(vi_load(&g->zero[block][v * VL]), a8_set1(-sum))
               : a8_set1(-codes_less(g) * sum);
}

// acc [T][VECTORS] += products of a step's words.
TD_INLINE void a8_step(const int T, uint8_t (*w)[STRIP][4], const int8_t *x, vi *acc) {
  vi sum[TILE_TOKENS * VECTORS];
  TD_UNROLL for (int word = 0; word < A8_STEP_WORDS; word++) {
    vi wv[VECTORS];
    TD_UNROLL for (int v = 0; v < VECTORS; v++) wv[v] = vi_load(w[word][v * VL]);
    TD_UNROLL for (int t = 0; t < T; t++) {
      int32_t four;
      memcpy(&four, x + t * WINDOW + word * 4, sizeof four);
      const vi xv = a8_set1(four);
      TD_UNROLL for (int v = 0; v < VECTORS; v++) {
        vi *of = &sum[t * VECTORS + v];
        *of = a8_dot(word == 0 ? a8_begin(acc[t * VECTORS + v]) : *of, wv[v], xv);
        // Forces the sum now; the compiler would keep products in registers, of which there are too
        // few.
        __asm__("" : "+v"(*of));
      }
    }
  }
  TD_UNROLL for (int i = 0; i < T * VECTORS; i++) acc[i] = a8_end(acc[i], sum[i]);
}

// total[t][..] += products of the window with tokens [t, t + T).
TD_INLINE void a8_tile(const int T, const bool zeros, a8 *g, uint32_t window, uint32_t t) {
  const int8_t *x = a8_x(g, window, t);
  size_t at = a8_at(g, window, t);
  for (uint32_t b = 0; b < g->n_blocks; b++) {
    uint32_t word = b * g->block / 4;
    uint32_t left = (g->n + 7) / 8 * 2 - word;
    uint32_t end = word + (left < g->block / 4 ? left : g->block / 4);
    vi acc[TILE_TOKENS * VECTORS];
    TD_UNROLL for (int i = 0; i < T; i++) {
      const int32_t sum = g->x_sum[at + (size_t)i * g->n_in_window + b];
      TD_UNROLL for (int v = 0; v < VECTORS; v++) {
        acc[i * VECTORS + v] = less_of(g, zeros, b, v, sum);
      }
    }
    for (; word < end; word += A8_STEP_WORDS) { // x is zero after the last column
      const int8_t *xs = x + word * 4;
      __asm__("" : "+r"(xs)); // one address instead of one per token
      a8_step(T, g->w + word, xs, acc);
    }
    TD_UNROLL for (int i = 0; i < T; i++) {
      const vf scale = vf_set1(g->x_scale[at + (size_t)i * g->n_in_window + b]);
      TD_UNROLL for (int v = 0; v < VECTORS; v++) {
        add_block(g, b, v, t + (uint32_t)i, scale, acc[i * VECTORS + v]);
      }
    }
  }
}

#define A8_TILE(T)                                                                                 \
  for (; T <= TILE_TOKENS && t + T <= g->n_tokens; t += T) {                                       \
    if (g->a->w->zero) {                                                                           \
      a8_tile(T, true, g, window, t);                                                              \
    } else {                                                                                       \
      a8_tile(T, false, g, window, t);                                                             \
    }                                                                                              \
  }

static void multiply_window(a8 *g, uint32_t window) {
  uint32_t t = 0;
  A8_TILE(8)
  A8_TILE(6)
  A8_TILE(4)
  A8_TILE(2)
  A8_TILE(1)
}

static bool left_to_others(const td_linear_args *a) {
  (void)a;
  return false;
}

static void begin_tokens(const a8 *g) {
  (void)g;
}

static void end_tokens(void) {}
