// kernels/blocks.h - GGUF's formats, in which a block of 32 or 256 columns stores its scales beside
// its codes (TD_BLOCK_DTYPES), value by value, for the CPU and the GPU.
// A block is cut into groups of 16 columns, whose values are scale * code + offset. Sixteen bytes
// hold the group's codes after a shift and a mask, in the order of columns. Scales and codes are so
// short that scale * code is exact in FP32.
// Include after TD_HALF_VALUE and TD_BITS_VALUE, which make floats of the bits of an F16 or F32.
#pragma once

#include "tandem/types.h"

#ifdef __cplusplus
#define TD_BLOCK_FN __device__ inline
#else
#define TD_BLOCK_FN static inline
#endif

// Places in a block, in bytes, and what the codes mean.
enum {
  BLOCK_GROUP = 16,
  Q8_0_CODES = 2,
  Q4_0_CODES = 2,
  Q4_1_CODES = 4,
  Q5_0_HIGH = 2,
  Q5_0_CODES = 6,
  Q5_1_HIGH = 4,
  Q5_1_CODES = 8,
  Q2_K_CODES = 16,
  Q2_K_D = 80,
  Q3_K_CODES = 32,
  Q3_K_SCALES = 96,
  Q3_K_D = 108,
  Q4_K_SCALES = 4,
  Q4_K_CODES = 16,
  Q5_K_HIGH = 16,
  Q5_K_CODES = 48,
  Q6_K_HIGH = 128,
  Q6_K_SCALES = 192,
  Q6_K_D = 208,
  IQ4_NL_CODES = 2,
  IQ4_XS_LOW = 4,
  IQ4_XS_CODES = 8,
  MXFP4_CODES = 1,
  TQ2_0_D = 64,
  TQ1_0_LATER = 32, // 16 bytes for columns from 160 on
  TQ1_0_LAST = 48,  // 4 bytes for columns from 240 on
  TQ1_0_D = 52,
};

// Formats with offsets, and those whose groups of 16 columns have a scale each.
#define GGUF_HAS_OFFSETS(dtype)                                                                    \
  ((dtype) == TD_Q4_1 || (dtype) == TD_Q5_1 || (dtype) == TD_Q2_K || (dtype) == TD_Q4_K ||         \
   (dtype) == TD_Q5_K)
#define GGUF_IS_FINE(dtype) ((dtype) == TD_Q2_K || (dtype) == TD_Q3_K || (dtype) == TD_Q6_K)

#define GGUF_IQ4_VALUES                                                                            \
  { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 }
#define GGUF_MXFP4_VALUES                                                                          \
  { 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12 }

typedef struct {
  float scale, offset;
} gguf_scale;

TD_BLOCK_FN gguf_scale gguf_scaled(float scale, float offset) {
  gguf_scale s;
  s.scale = scale;
  s.offset = offset;
  return s;
}

// The block of a dtype; cols 0: it has none.
TD_BLOCK_FN td_block gguf_block(td_dtype dtype) {
  td_block b;
  b.cols = b.bytes = 0;
  switch (dtype) {
#define X(id, n_cols, n_bytes)                                                                     \
  case TD_##id:                                                                                    \
    b.cols = n_cols;                                                                               \
    b.bytes = n_bytes;                                                                             \
    break;
    TD_BLOCK_DTYPES(X)
#undef X
  default: break;
  }
  return b;
}

TD_BLOCK_FN float gguf_half(const uint8_t *p) {
  return TD_HALF_VALUE((uint16_t)(p[0] | p[1] << 8));
}

// The 6-bit scales and offsets of the eight parts of Q4_K and Q5_K.
TD_BLOCK_FN gguf_scale gguf_scale_k4(const uint8_t *block, unsigned group) {
  const uint8_t *q = block + Q4_K_SCALES;
  const unsigned j = group / 2;
  unsigned scale, offset;
  if (j < 4) {
    scale = q[j] & 63;
    offset = q[j + 4] & 63;
  } else {
    scale = (q[j + 4] & 15u) | (q[j - 4] >> 6) << 4;
    offset = (q[j + 4] >> 4) | (q[j] >> 6) << 4;
  }
  return gguf_scaled(gguf_half(block) * (float)scale, -(gguf_half(block + 2) * (float)offset));
}

TD_BLOCK_FN float gguf_scale_q3(const uint8_t *block, unsigned group) {
  const uint8_t *q = block + Q3_K_SCALES;
  const unsigned low = group < 8 ? q[group] & 15u : q[group - 8] >> 4;
  const unsigned high = q[8 + group % 4] >> group / 4 * 2 & 3u;
  return gguf_half(block + Q3_K_D) * (float)((int)(low | high << 4) - 32);
}

TD_BLOCK_FN float gguf_scale_iq4(const uint8_t *block, unsigned group) {
  const unsigned j = group / 2;
  const unsigned low = block[IQ4_XS_LOW + j / 2] >> j % 2 * 4 & 15u;
  const unsigned high = (unsigned)(block[2] | block[3] << 8) >> 2 * j & 3u;
  return gguf_half(block) * (float)((int)(low | high << 4) - 32);
}

// 2^(code - 128): half of the format's power of two, because values are doubled.
TD_BLOCK_FN float gguf_scale_mx(const uint8_t *block) {
  const unsigned e = block[0];
  return TD_BITS_VALUE(e < 2 ? 0x00200000u << e : (e - 1) << 23);
}

// The scale and the offset of a group of a block.
TD_BLOCK_FN gguf_scale gguf_scale_of(td_dtype dtype, const uint8_t *block, unsigned group) {
  switch (dtype) {
  case TD_Q4_1:
  case TD_Q5_1: return gguf_scaled(gguf_half(block), gguf_half(block + 2));
  case TD_Q2_K: {
    const unsigned both = block[group];
    return gguf_scaled(gguf_half(block + Q2_K_D) * (float)(both & 15),
                       -(gguf_half(block + Q2_K_D + 2) * (float)(both >> 4)));
  }
  case TD_Q3_K: return gguf_scaled(gguf_scale_q3(block, group), 0);
  case TD_Q4_K:
  case TD_Q5_K: return gguf_scale_k4(block, group);
  case TD_Q6_K:
    return gguf_scaled(gguf_half(block + Q6_K_D) * (float)(int8_t)block[Q6_K_SCALES + group], 0);
  case TD_IQ4_XS: return gguf_scaled(gguf_scale_iq4(block, group), 0);
  case TD_MXFP4: return gguf_scaled(gguf_scale_mx(block), 0);
  case TD_TQ2_0: return gguf_scaled(gguf_half(block + TQ2_0_D), 0);
  case TD_TQ1_0: return gguf_scaled(gguf_half(block + TQ1_0_D), 0);
  default: return gguf_scaled(gguf_half(block), 0);
  }
}

// The four bits of column i of a group in blocks of 32: the first half has the low ones.
TD_BLOCK_FN unsigned gguf_nibble(const uint8_t *codes, unsigned group, unsigned i) {
  return codes[i] >> 4 * group & 15u;
}

// The same in blocks of 256, which have 64 columns in 32 bytes.
TD_BLOCK_FN unsigned gguf_nibble_k(const uint8_t *codes, unsigned group, unsigned i) {
  return codes[group / 4 * 32 + group % 2 * 16 + i] >> group / 2 % 2 * 4 & 15u;
}

// Bits `shift` and on of Q2_K's, Q3_K's and Q6_K's columns, 128 in 32 bytes.
TD_BLOCK_FN unsigned gguf_pair_k(const uint8_t *codes, unsigned group, unsigned i) {
  return codes[group / 8 * 32 + group % 2 * 16 + i] >> group % 8 / 2 * 2 & 3u;
}

TD_BLOCK_FN int gguf_iq4(unsigned code) {
  const int8_t values[16] = GGUF_IQ4_VALUES;
  return values[code];
}

TD_BLOCK_FN int gguf_fp4(unsigned code) {
  const int8_t values[16] = GGUF_MXFP4_VALUES;
  return values[code];
}

// TQ1_0: a byte is a fraction of 256, in which five digits of base 3 follow the point. The columns
// of 32, 16 and 4 bytes are their first digits, then their second ones, and so on.
TD_BLOCK_FN int gguf_trit(const uint8_t *b, unsigned col) {
  unsigned n_bytes = 32;
  if (col >= 240) {
    n_bytes = 4, col -= 240, b += TQ1_0_LAST;
  } else if (col >= 160) {
    n_bytes = 16, col -= 160, b += TQ1_0_LATER;
  }
  unsigned rest = b[col % n_bytes];
  for (unsigned i = col / n_bytes; i > 0; i--)
    rest = rest * 3 & 255u;
  return (int)(rest * 3 >> 8);
}

// The code of column i of a group.
TD_BLOCK_FN int gguf_code(td_dtype dtype, const uint8_t *b, unsigned group, unsigned i) {
  const unsigned bit = group * 16 + i;
  switch (dtype) {
  case TD_Q8_0: return (int8_t)b[Q8_0_CODES + bit];
  case TD_Q4_0: return (int)gguf_nibble(b + Q4_0_CODES, group, i) - 8;
  case TD_Q4_1: return (int)gguf_nibble(b + Q4_1_CODES, group, i);
  case TD_Q5_0:
    return (int)(gguf_nibble(b + Q5_0_CODES, group, i) | (b[Q5_0_HIGH + bit / 8] >> bit % 8 & 1u)
                                                             << 4) -
           16;
  case TD_Q5_1:
    return (int)(gguf_nibble(b + Q5_1_CODES, group, i) | (b[Q5_1_HIGH + bit / 8] >> bit % 8 & 1u)
                                                             << 4);
  case TD_Q2_K: return (int)gguf_pair_k(b + Q2_K_CODES, group, i);
  case TD_Q3_K: {
    const unsigned high = b[group % 2 * 16 + i] >> group / 2 & 1u;
    return (int)gguf_pair_k(b + Q3_K_CODES, group, i) - (high ? 0 : 4);
  }
  case TD_Q4_K: return (int)gguf_nibble_k(b + Q4_K_CODES, group, i);
  case TD_Q5_K:
    return (int)(gguf_nibble_k(b + Q5_K_CODES, group, i) |
                 (b[Q5_K_HIGH + group % 2 * 16 + i] >> group / 2 & 1u) << 4);
  case TD_Q6_K: {
    const unsigned at = group / 8 * 64 + group / 2 % 2 * 32 + group % 2 * 16 + i;
    return (int)((b[at] >> group % 8 / 4 * 4 & 15u) | gguf_pair_k(b + Q6_K_HIGH, group, i) << 4) -
           32;
  }
  case TD_IQ4_NL: return gguf_iq4(gguf_nibble(b + IQ4_NL_CODES, group, i));
  case TD_IQ4_XS: return gguf_iq4(b[IQ4_XS_CODES + group / 2 * 16 + i] >> group % 2 * 4 & 15u);
  case TD_MXFP4: return gguf_fp4(gguf_nibble(b + MXFP4_CODES, group, i));
  case TD_TQ2_0: return (int)gguf_pair_k(b, group, i) - 1;
  case TD_TQ1_0: return gguf_trit(b, bit) - 1;
  default: return 0;
  }
}

// An element.
TD_BLOCK_FN float gguf_value(const td_weight *w, uint32_t row, uint32_t col) {
  const td_block block = gguf_block(w->dtype);
  const size_t idx = (size_t)row * (w->cols / block.cols) + col / block.cols;
  const uint8_t *at = (const uint8_t *)w->data + idx * block.bytes;
  const unsigned in_block = col % block.cols, group = in_block / BLOCK_GROUP;
  const gguf_scale s = gguf_scale_of(w->dtype, at, group);
  return s.scale * (float)gguf_code(w->dtype, at, group, in_block % BLOCK_GROUP) + s.offset;
}
