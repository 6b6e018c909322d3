// kernels/cpu/avx512bf16/bytes.h - byte weights that convert to BF16 by table lookup, for
// linear_rows.h and gemm_prompt.h.
// Include after elem is defined; define after it:
//   upper_of, lower_of   the upper and lower bytes of the BF16 numbers
#pragma once

#include "kernels/cpu/avx512bf16/dequant.h"

enum { DWORD_COLS = 4 };

static inline vi upper_of(vi line);
static inline vi lower_of(vi line);

static inline vi load_line(const elem *w) {
  return _mm512_loadu_si512(w);
}

static inline vi load_line_n(const elem *w, uint32_t n) {
  return _mm512_maskz_loadu_epi8(((__mmask64)1 << n) - 1, w);
}

// Looks up each byte's seven lower bits.
static inline vi look_up(const uint8_t table[128], vi line) {
  return _mm512_permutex2var_epi8(_mm512_load_si512(table), line, _mm512_load_si512(table + 64));
}

// Vector j has groups of eight columns: those from 16 i + 8 j on, i < 4.
static inline pv vector_of(vi line, int j) {
  const vi upper = upper_of(line), lower = lower_of(line);
  return pv_of(j == 0 ? _mm512_unpacklo_epi8(lower, upper) : _mm512_unpackhi_epi8(lower, upper));
}

static inline void put_x(const vf v[4], packed *out, size_t step) {
  const vi even = _mm512_setr_epi64(0, 1, 4, 5, 8, 9, 12, 13);
  const vi odd = _mm512_setr_epi64(2, 3, 6, 7, 10, 11, 14, 15);
  vi first = pv_from_vf(v[0], v[1]), second = pv_from_vf(v[2], v[3]);
  pv_store(out, pv_of(_mm512_permutex2var_epi64(first, even, second)));
  pv_store(out + step, pv_of(_mm512_permutex2var_epi64(first, odd, second)));
}

// Each half of a dword holds two bytes, converted one after the other.
static inline void pairs_of(vi dwords, pv out[2]) {
  const vi upper = upper_of(dwords), lower = lower_of(dwords);
  enum { SELECT = 0xca }; // low_bytes ? b : c
  const vi low_bytes = _mm512_set1_epi16(0x00ff);
  out[0] = pv_of(_mm512_ternarylogic_epi32(low_bytes, lower, _mm512_slli_epi16(upper, 8), SELECT));
  out[1] = pv_of(_mm512_ternarylogic_epi32(low_bytes, _mm512_srli_epi16(lower, 8), upper, SELECT));
}
