// kernels/cpu/linear/gemm_f32.h - gemm_vec.h with sums in FP32.
// A run's products are added directly to the totals or, if SCALED, summed separately and multiplied
// by the row's scale. Include after packed_f32.h.
#pragma once

#include "kernels/cpu/common/vec_math.h"

typedef vf sv, gemm_lanes;
enum { PAIR_STEPS = 0 };

TD_INLINE sv sv_add(sv a, sv b) {
  return vf_add(a, b);
}

TD_INLINE sv begin_sum(vf total) {
  return SCALED ? vf_zero() : total;
}

#include "kernels/cpu/linear/gemm_vec.h"

TD_INLINE vf end_sum(const gemm *g, sv sum, gemm_lanes scale, uint32_t token, vf total) {
  (void)g, (void)token;
  return SCALED ? vf_fma(sum, scale, total) : sum;
}
