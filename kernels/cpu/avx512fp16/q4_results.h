// kernels/cpu/avx512fp16/q4_results.h - results from sums of FP16 chains, to be included behind
//   Q4_EXACT    the version that does what is beyond the range of such sums
// What FP32 holds of a sum may not be what it holds of the result: where a sum is not well inside
// its range, be it for x, for scales or because it is 0, Q4_EXACT gives the result.
#ifndef KERNELS_CPU_AVX512FP16_Q4_RESULTS_H
#define KERNELS_CPU_AVX512FP16_Q4_RESULTS_H

#include <math.h>
#include <stdbool.h>

#include "kernels/cpu/vec_math.h"
#include "kernels/decl.h"

TD_INLINE const float *token_x(const td_linear_args *a, uint32_t t) {
  return a->x + (a->x_rows ? a->x_rows[t] : t) * a->ldx;
}

// Whether a sum is, with the token's power and without.
static inline bool is_good(float sum, float unscaled) {
  float with = fabsf(sum), without = fabsf(sum * unscaled);
  float least = with < without ? with : without, most = with < without ? without : with;
  return least >= 0x1p-100f && most < 0x1p120f;
}

// Some rows of a token, again.
static void do_exactly(const td_linear_args *a, uint32_t token, uint32_t row, uint32_t end) {
  td_linear_args again = *a;
  again.x = token_x(a, token);
  again.x_rows = NULL;
  again.y = a->y + token * a->ldy;
  again.n_tokens = 1;
  again.row_begin = row;
  again.row_end = end;
  Q4_EXACT(&again);
}

// Results of some rows of a token from the sums of all lanes.
static void finish_token(const td_linear_args *a, uint32_t token, float power, uint32_t row0,
                         uint32_t n, const float *sums) {
  float *y = a->y + token * a->ldy + row0 - a->y_row0;
  float global = a->w->dtype == TD_F4E2M1 ? a->w->global_scale : 1;
  float unscaled = power > 0 ? 1 / power : 0;
  uint32_t n_good = 0;
  for (uint32_t i = 0; i < n; i++) {
    y[i] = sums[i] * unscaled * global;
    n_good += is_good(sums[i], unscaled);
  }
  for (uint32_t i = 0, end; n_good < n && i < n; i = end + 1) {
    for (end = i; end < n; end++) {
      if (is_good(sums[end], unscaled)) break;
    }
    if (end > i) do_exactly(a, token, row0 + i, row0 + end);
  }
}

#endif
