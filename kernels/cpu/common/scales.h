// kernels/cpu/common/scales.h - scales of groups of 4-bit codes as floats. Include after a vec.h.
#pragma once

#include "tandem/types.h"

static vf scales_from(const void *p, td_dtype dtype) {
  switch (dtype) {
  case TD_BF16: return vf_from_bf16(p);
  case TD_F16: return vf_from_half(p);
  case TD_F8E8M0: return vf_from_e8m0(p);
  case TD_F8E4M3: return vf_from_e4m3_exact(p);
  default: return vf_load(p);
  }
}

// Converts n scales to F32; `left` scales are readable. out has room for whole vectors; entries
// past n are undefined.
static inline void scales_to_f32(const void *from, td_dtype dtype, size_t left, uint32_t n,
                                 float *out) {
  size_t bytes = td_dtype_bytes(dtype), at = 0;
  for (; at < n && at + VL <= left; at += VL)
    vf_store(out + at, scales_from((const char *)from + at * bytes, dtype));
  if (at >= n) return;
  _Alignas(64) char part[VL * sizeof(float)] = {0};
  memcpy(part, (const char *)from + at * bytes, (left - at) * bytes);
  vf_store(out + at, scales_from(part, dtype));
}
