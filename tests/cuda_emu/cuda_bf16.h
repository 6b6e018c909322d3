// tests/cuda_emu/cuda_bf16.h - BF16 conversions as <cuda_bf16.h> has them.
#pragma once

#include "emu.h"

struct __nv_bfloat16 {
  unsigned short bits;
};

inline __nv_bfloat16 __float2bfloat16_rn(float f) {
  uint32_t bits = __float_as_uint(f);
  if (std::isnan(f)) return {0x7fff};
  return {static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 h) {
  return h.bits;
}
