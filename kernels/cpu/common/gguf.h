// kernels/cpu/common/gguf.h - GGUF's blocks (kernels/blocks.h) for the CPU.
#pragma once

#include "kernels/cpu/common/numeric.h"

#ifdef __F16C__
#include <immintrin.h>
#define TD_HALF_VALUE(bits) _cvtsh_ss(bits)
#else
#define TD_HALF_VALUE(bits) f32_from_half(bits)
#endif
#define TD_BITS_VALUE(bits) f32_from_bits(bits)

#include "kernels/blocks.h"

// What unsigned codes of vectors are larger by than a block's codes.
static inline int gguf_less(td_dtype dtype) {
  switch (dtype) {
  case TD_Q8_0:
  case TD_IQ4_NL:
  case TD_IQ4_XS:
  case TD_MXFP4: return 128;
  case TD_Q4_0: return 8;
  case TD_Q5_0: return 16;
  case TD_Q3_K: return 4;
  case TD_Q6_K: return 32;
  case TD_TQ2_0:
  case TD_TQ1_0: return 1;
  default: return GGUF_IS_GRID(dtype) ? 128 : 0;
  }
}
