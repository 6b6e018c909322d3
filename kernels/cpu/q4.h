// kernels/cpu/q4.h - words of 4-bit codes and their scales, as vectors. To be included after
// Q4_CODES(name), which makes int4_name or fp4_name of what int4.h and fp4.h of an ISA define:
//   load     the words at p, VL of them, made ready; may read three bytes more
//   load_n   the first n <= 4 VL bytes of them, zeros behind; reads no more
//   pair     codes 2 i and 2 i + 1 of every word, as their values; codes of INT4 are worth what
//   they
//            are with zero point 8
#ifndef KERNELS_CPU_Q4_H
#define KERNELS_CPU_Q4_H

#include <stdbool.h>

#include "kernels/cpu/codes.h"
#include "kernels/cpu/vec_math.h"

#define TD_UNROLL _Pragma("GCC unroll 32")

// A block of words of which n_bytes may be read.
TD_INLINE void load_words(const uint8_t *p, size_t n_bytes, vi v[4]) {
  if (n_bytes >= sizeof(vi) + 3) {
    Q4_CODES(load)(p, v);
  } else {
    Q4_CODES(load_n)(p, n_bytes < sizeof(vi) ? (uint32_t)n_bytes : (uint32_t)sizeof(vi), v);
  }
}

static vf scales_from(const void *p, td_dtype dtype) {
  switch (dtype) {
  case TD_BF16: return vf_from_bf16(p);
  case TD_F16: return vf_from_half(p);
  case TD_F8E8M0: return vf_from_e8m0(p);
  case TD_F8E4M3: return vf_from_e4m3_exact(p);
  default: return vf_load(p);
  }
}

// n scales as F32, where left are stored from there on; out has room for whole vectors, what is
// behind n in them is any number.
static void scales_to_f32(const void *from, td_dtype dtype, size_t left, uint32_t n, float *out) {
  size_t bytes = td_dtype_bytes(dtype), at = 0;
  for (; at < n && at + VL <= left; at += VL)
    vf_store(out + at, scales_from((const char *)from + at * bytes, dtype));
  if (at >= n) return;
  _Alignas(64) char part[VL * sizeof(float)] = {0};
  memcpy(part, (const char *)from + at * bytes, (left - at) * bytes);
  vf_store(out + at, scales_from(part, dtype));
}

#endif
