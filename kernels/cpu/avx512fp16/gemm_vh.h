// kernels/cpu/avx512fp16/gemm_vh.h - definitions for gemm_vec.h where products are F16 and sums
// begin at zero. Include after gemm_scale, which serves as gemm_lanes as well.
#pragma once

#include "kernels/cpu/avx512fp16/vec.h"

typedef _Float16 packed;
typedef vh pv, sv;
enum { PL = VHL };

TD_INLINE pv pv_load(const packed *p) {
  return vh_load(p);
}
TD_INLINE sv pv_fma(pv a, pv b, sv c) {
  return vh_fma(a, b, c);
}
TD_INLINE sv sv_add(sv a, sv b) {
  return vh_add(a, b);
}
TD_INLINE gemm_lanes lanes_of(gemm_scale scale) {
  return scale;
}
TD_INLINE sv begin_sum(vf total) {
  (void)total;
  return vh_zero();
}
