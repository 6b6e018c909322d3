// kernels/cpu/common/packed_f32.h - FP32 as the type of packed x and w, for gemm_vec.h and
// linear_q4.h. Include after a vec.h.
#pragma once

#include "kernels/cpu/common/vec_math.h"

typedef float packed;
typedef vf pv;
enum { PL = VL };

static inline pv pv_load(const packed *p) {
  return vf_load(p);
}
static inline void pv_store(packed *p, pv v) {
  vf_store(p, v);
}
static inline vf pv_fma(pv a, pv b, vf c) {
  return vf_fma(a, b, c);
}
