// kernels/cpu/avx512bf16/linear_q4.h - y = W x for rows of 4-bit codes, activations rounded to
// BF16, for each dtype's file to include behind what kernels/cpu/linear_q4.h needs and
//   q4_table       the values of codes, twice
// An answer's tokens go the ways of few there, however many they are, a prompt's that of
// gemm_prompt.h.
#ifndef KERNELS_CPU_AVX512BF16_LINEAR_Q4_H
#define KERNELS_CPU_AVX512BF16_LINEAR_Q4_H

#include "kernels/cpu/avx512bf16/codes.h"
#include "kernels/cpu/linear_q4.h"

enum { DWORD_COLS = 8, HAS_SCALES = 1, MIN_GROUP = 8 };

static inline void pairs_of(vi dwords, pv out[4]) {
  const vi table = q4_table();
  TD_UNROLL for (int i = 0; i < 4; i++) {
    out[i] = pv_of(_mm512_permutexvar_epi16(_mm512_srli_epi16(dwords, 4 * i), table));
  }
}

static void put_scales(const td_weight *w, uint32_t row, uint32_t n_rows, uint32_t first,
                       uint32_t n, vf *out, size_t step);

static inline float whole_scale(const td_weight *w) {
  return w->dtype == TD_F4E2M1 ? w->global_scale : 1;
}

static inline void linear_exact(const td_linear_args *args) {
  Q4_EXACT(args);
}

#include "kernels/cpu/avx512bf16/gemm_prompt.h"

// Scale i of those that a dword of each row has.
TD_INLINE vf scale_in(vi dwords, td_dtype dtype, uint32_t i) {
  const uint32_t bytes = (uint32_t)td_dtype_bytes(dtype);
  if (dtype == TD_F32) return (vf)dwords;
  dwords = _mm512_srl_epi32(dwords, _mm_cvtsi32_si128((int)(8 * bytes * i)));
  if (dtype == TD_BF16) return (vf)_mm512_slli_epi32(dwords, 16);
  _Alignas(64) char in_order[sizeof(vf)];
  if (bytes == 2) {
    _mm256_store_si256((void *)in_order, _mm512_cvtepi32_epi16(dwords));
  } else {
    _mm_store_si128((void *)in_order, _mm512_cvtepi32_epi8(dwords));
  }
  return scales_from(in_order, dtype);
}

// Turned as they are stored.
static void put_scales(const td_weight *w, uint32_t row, uint32_t n_rows, uint32_t first,
                       uint32_t n, vf *out, size_t step) {
  const size_t bytes = td_dtype_bytes(w->scale_dtype), of_row = td_weight_groups(w) * bytes;
  const uint32_t in_dword = (uint32_t)(4 / bytes);
  const char *from = (const char *)w->scale + row * of_row + first * bytes;
  size_t left = (w->rows - row - n_rows + 1) * of_row - first * bytes; // from the last row's on
  for (uint32_t i = 0; i < n; from += 16, left -= left < 16 ? left : 16) {
    vi dwords[4];
    turn_some(from, of_row, n_rows, left, dwords);
    for (uint32_t j = 0; j < 4 * in_dword && i < n; i++, j++, out += step)
      *out = scale_in(dwords[j / in_dword], w->scale_dtype, j % in_dword);
  }
}

static inline void linear_q4(const td_linear_args *a) {
  if (a->n_tokens == 0) return;
  if (a->prompt) {
    linear_prompt(a);
    return;
  }
  in_parts(a, MAX_TOKENS, linear_few);
}

#endif
