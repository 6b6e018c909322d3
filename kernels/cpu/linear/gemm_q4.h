// kernels/cpu/linear/gemm_q4.h - rows of 4-bit codes times many tokens in FP32.
// Uses gemm_vec.h with the column order of linear_q4.h; include after that.
#pragma once

// A run is a block, and every lane has its own scale.
enum { SCALED = 1, WINDOW_RUNS = 512 / BLOCK };
typedef vf gemm_scale;
TD_INLINE vf lanes_of(gemm_scale scale) {
  return scale;
}
#include "kernels/cpu/linear/gemm_f32.h"

_Static_assert(WINDOW_RUNS == WINDOW / BLOCK, "runs are blocks");

TD_INLINE const uint8_t *row_codes(const td_weight *w, uint32_t row, uint32_t k) {
  return (const uint8_t *)w->data + row * td_weight_row_bytes(w) + k / 2;
}

static void find_window(gemm *g) {
  uint32_t left = g->a->w->cols - g->k;
  g->n = left < WINDOW ? left : WINDOW;
  g->n_runs = (g->n + BLOCK - 1) / BLOCK;
  g->n_vectors = g->n_runs * STEPS;
  for (uint32_t i = 0; i < g->n_runs; i++)
    g->run_vectors[i] = STEPS;
}

static void pack_token(gemm *g, uint32_t token, size_t step, packed *out) {
  x_range unused = 0;
  order_x(gemm_x(g->a, g->token0 + token) + g->k, g->n, out, step, &unused);
}

static void decode_row(gemm *g, uint32_t row, uint32_t place, packed *out) {
  float scales[LIST], zeros[LIST];
  const td_weight *w = g->a->w;
  const size_t step = GEMM_ROWS * PL;
  q4_groups groups = groups_of(w);
  q4_window win = window_of(w, &groups, g->k, g->n);
  row += g->row0;
  list_groups(w, &groups, &win, row, false, scales);
  if (w->zero) list_groups(w, &groups, &win, row, true, zeros);
  const uint8_t *codes = row_codes(w, row, g->k);
  size_t n_bytes = td_weight_row_bytes(w) - g->k / 2;
  for (uint32_t b = 0; b < g->n_runs; b++, codes += sizeof(vi), n_bytes -= sizeof(vi)) {
    vi v[4];
    load_words(codes, n_bytes, v);
    uint32_t at = ((b + win.first) >> groups.shift) * groups.per_block;
    g->scale[place][b] = vf_permute(vf_load(scales + at), groups.spread);
    vf zero = vf_zero();
    if (w->zero) zero = vf_permute(vf_load(zeros + at), groups.spread);
    TD_UNROLL for (int i = 0; i < STEPS / 2; i++, out += 2 * step) {
      pv lo, hi;
      nibbles_pair(v, i, Q4_TABLE(), &lo, &hi);
      if (Q4_ZEROS) q4_less(&lo, &hi, zero);
      pv_store(out, lo);
      pv_store(out + step, hi);
    }
  }
}

static const char *stored_row(const td_weight *w, uint32_t row, uint32_t k) {
  return (const char *)row_codes(w, row, k);
}

static void end_block(const gemm *g) {
  (void)g;
}

static inline void linear_q4(const td_linear_args *a) {
  if (a->n_tokens > MAX_TOKENS) {
    gemm_all(a, NULL);
  } else if (a->n_tokens > 0) {
    linear_few(a);
  }
}
