// kernels/cuda/swiglu.cuh - the activation of gate and up.
#pragma once

#include "kernels/cuda/common.cuh"

__device__ inline float clamped_swiglu(const td_cu_glu &a, float gate, float up) {
  float g = fminf(gate, a.limit), u = fminf(fmaxf(up, -a.limit), a.limit);
  if (a.plain) return u * (g / (1 + expf(-g)));
  return (u + 1) * (g / (1 + expf(-a.alpha * g)));
}

__device__ inline float swiglu(const td_cu_glu &a, float gate, float up) {
  return a.limit > 0 ? clamped_swiglu(a, gate, up) : gate / (1 + expf(-gate)) * up;
}
