// kernels/cpu/avx512bf16/bf16.h - BF16 weights, for linear_rows.h and avx512amx/linear_tiles.h.
// Products with weights and activations of at least 2^-63 each are not subnormal; subnormal
// products would count as 0.
#pragma once

#include "kernels/cpu/avx512bf16/vec.h"
#include "kernels/cpu/common/finite_range.h"
#include "kernels/decl.h"

typedef uint16_t elem;
enum { HAS_SCALES = 0, DWORD_COLS = 2 };

static inline vi load_line(const elem *w) {
  return _mm512_loadu_si512(w);
}

static inline vi load_line_n(const elem *w, uint32_t n) {
  return _mm512_maskz_loadu_epi16(((__mmask32)1 << n) - 1, w);
}

static inline pv vector_of(vi line, int j) {
  (void)j;
  return pv_of(line);
}

static inline void pairs_of(vi dwords, pv out[1]) {
  out[0] = pv_of(dwords);
}

static inline void put_x(const vf v[2], packed *out, size_t step) {
  (void)step;
  pv_store(out, pv_of(pv_from_vf(v[0], v[1])));
}

static inline void linear_exact(const td_linear_args *args) {
  linear_bf16__avx512(args);
}

#define LEAST 0x1p-63f

// Minimum over each position of (magnitude - 1), where 0 wraps to the largest value.
static inline vi look(vi seen, vi line) {
  vi magnitude = _mm512_and_si512(line, _mm512_set1_epi16(0x7fff));
  return _mm512_min_epu16(seen, _mm512_sub_epi16(magnitude, _mm512_set1_epi16(1)));
}

static inline __mmask32 tiny_of(vi seen) {
  const vi least = _mm512_set1_epi16((64 << 7) - 1); // 2^-63
  return _mm512_cmplt_epu16_mask(seen, least);
}
