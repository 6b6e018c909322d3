// kernels/cpu/gemm_f32.h - gemm_vec.h in FP32: a run's products are added to the totals themselves
// or, SCALED, summed on their own and multiplied by the row's scale.
#ifndef KERNELS_CPU_GEMM_F32_H
#define KERNELS_CPU_GEMM_F32_H

#include "kernels/cpu/vec_math.h"

typedef float packed;
typedef vf pv, gemm_lanes;
enum { PL = VL, PAIR_STEPS = 0 };

TD_INLINE pv pv_load(const packed *p) {
  return vf_load(p);
}
TD_INLINE pv pv_fma(pv a, pv b, pv c) {
  return vf_fma(a, b, c);
}
TD_INLINE pv pv_add(pv a, pv b) {
  return vf_add(a, b);
}

TD_INLINE pv begin_sum(vf total) {
  return SCALED ? vf_zero() : total;
}

#include "kernels/cpu/gemm_vec.h"

TD_INLINE vf end_sum(const gemm *g, pv sum, gemm_lanes scale, uint32_t token, vf total) {
  (void)g, (void)token;
  return SCALED ? vf_fma(sum, scale, total) : sum;
}

#endif
