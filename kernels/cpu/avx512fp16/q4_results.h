// kernels/cpu/avx512fp16/q4_results.h - results from sums of FP16 chains.
// Include after Q4_EXACT, the kernel for results beyond the range of such sums. A sum in the range
// of FP32 does not imply that about the result. If a sum is not well inside the range, because of
// x, scales or being 0, Q4_EXACT computes the result.
#pragma once

#include "kernels/cpu/common/numeric.h"
#include "kernels/cpu/common/vec_math.h"
#include "kernels/decl.h"

TD_INLINE const float *token_x(const td_linear_args *a, uint32_t t) {
  return a->x + (a->x_rows ? a->x_rows[t] : t) * a->ldx;
}

// Which sums are well inside the range, both with the token's power and without.
static inline __mmask16 good_sums(vf sum, vf unscaled) {
  const vf least = vf_set1(0x1p-100f), most = vf_set1(0x1p120f);
  vf with = _mm512_abs_ps(sum), without = _mm512_abs_ps(vf_mul(sum, unscaled));
  return _mm512_cmp_ps_mask(with, least, _CMP_GE_OQ) & _mm512_cmp_ps_mask(with, most, _CMP_LT_OQ) &
         _mm512_cmp_ps_mask(without, least, _CMP_GE_OQ) &
         _mm512_cmp_ps_mask(without, most, _CMP_LT_OQ);
}

// Recomputes some rows of a token.
static void do_exactly(const td_linear_args *a, uint32_t token, uint32_t row, uint32_t end) {
  td_linear_args one = one_token(a, token, row, end);
  Q4_EXACT(&one);
}

// Results of some rows of a token, from the sums of all lanes.
static void finish_token(const td_linear_args *a, uint32_t token, float power, uint32_t row0,
                         uint32_t n, const float *sums) {
  float *y = a->y + token * a->ldy + row0 - a->y_row0;
  const vf global = vf_set1(a->w->dtype == TD_F4E2M1 ? a->w->global_scale : 1);
  const vf unscaled = vf_set1(power > 0 ? 1 / power : 0);
  for (uint32_t i = 0; i < n; i += VL) {
    const uint32_t left = n - i < VL ? n - i : VL;
    vf sum = vf_load_n(sums + i, left);
    uint32_t bad = ~(uint32_t)good_sums(sum, unscaled) & ((1u << left) - 1);
    vf_store_n(y + i, vf_mul(vf_mul(sum, unscaled), global), left);
    while (bad) { // a run of bad rows at once
      uint32_t begin = (uint32_t)__builtin_ctz(bad), end = begin;
      while (bad >> end & 1)
        end++;
      do_exactly(a, token, row0 + i + begin, row0 + i + end);
      bad &= ~0u << end;
    }
  }
}
