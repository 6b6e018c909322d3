// kernels/cpu/q4.h - words of 4-bit codes and their scales, as vectors. To be included after a
// vec.h and Q4_CODES(name), which makes int4_name or fp4_name of
//   low, high   the value of bits 0 to 3, or 4 to 7, of every 32-bit lane; codes of INT4 are worth
//               what they are with zero point 8
//   ready       what is done to words before
#ifndef KERNELS_CPU_Q4_H
#define KERNELS_CPU_Q4_H

#include "kernels/cpu/codes.h"
#include "kernels/cpu/vec_math.h"

#define TD_UNROLL _Pragma("GCC unroll 32")

// The words of a block, shifted right by 0, 8, 16 and 24 bits. n_bytes are left of the row; what
// lies behind them is not read.
TD_INLINE void load_words(const uint8_t *p, size_t n_bytes, vi v[4]) {
  if (n_bytes >= sizeof(vi) + 3) { // the bytes of the next word are in bits that no one looks at
    TD_UNROLL for (int i = 0; i < 4; i++) v[i] = Q4_CODES(ready)(vi_load(p + i));
    return;
  }
  v[0] = Q4_CODES(ready)(n_bytes < sizeof(vi) ? vi_load_n(p, (uint32_t)n_bytes) : vi_load(p));
  v[1] = vi_srl8(v[0]);
  v[2] = vi_srl8(v[1]);
  v[3] = vi_srl8(v[2]);
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

// n scales as F32; out has room for whole vectors, the rest is zero.
static void scales_to_f32(const char *from, td_dtype dtype, uint32_t n, float *out) {
  size_t bytes = td_dtype_bytes(dtype);
  uint32_t i = 0;
  for (; i + VL <= n; i += VL)
    vf_store(out + i, scales_from(from + i * bytes, dtype));
  if (i == n) return;
  _Alignas(64) char part[VL * sizeof(float)] = {0};
  memcpy(part, from + i * bytes, (n - i) * bytes);
  vf_store(out + i, scales_from(part, dtype));
}

#endif
