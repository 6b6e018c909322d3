// kernels/cpu/avx512bf16/linear_q4.h - y = W x for rows of 4-bit codes, activations rounded to
// BF16, for each dtype's file to include behind what kernels/cpu/linear_q4.h needs and
//   q4_table       the values of codes, twice
// Tokens of answers take the ways of few there, however many they are; those of prompts the other.
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

static void scales_of(const td_weight *w, uint32_t row, uint32_t first, uint32_t n, float *out) {
  const size_t of_row = td_weight_groups(w), at = row * of_row + first;
  const char *from = (const char *)w->scale + at * td_dtype_bytes(w->scale_dtype);
  scales_to_f32(from, w->scale_dtype, of_row * w->rows - at, n, out);
}

static inline float whole_scale(const td_weight *w) {
  return w->dtype == TD_F4E2M1 ? w->global_scale : 1;
}

static inline void linear_exact(const td_linear_args *args) {
  Q4_EXACT(args);
}

#include "kernels/cpu/avx512bf16/gemm_prompt.h"

static inline void linear_q4(const td_linear_args *a) {
  if (a->n_tokens == 0) return;
  if (a->prompt) {
    linear_prompt(a);
    return;
  }
  const uint32_t n_parts = (a->n_tokens + MAX_TOKENS - 1) / MAX_TOKENS;
  for (uint32_t i = 0; i < n_parts; i++) {
    const uint32_t begin = i * a->n_tokens / n_parts;
    const td_linear_args part = tokens_of(a, begin, (i + 1) * a->n_tokens / n_parts - begin);
    linear_few(&part);
  }
}

#endif
