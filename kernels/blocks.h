// kernels/blocks.h - GGUF's formats, in which a block of 32 or 256 columns stores its scales beside
// its codes (TD_BLOCK_DTYPES), value by value, for the CPU and the GPU.
// A block is cut into groups of 16 columns, whose values are scale * code + offset. Sixteen bytes
// hold the group's codes after a shift and a mask, in the order of columns; TQ1_0 and the formats
// with a grid pack them closer. Scales and codes are so short that scale * code is exact in FP32.
// Include after TD_HALF_VALUE and TD_BITS_VALUE, which make floats of the bits of an F16 or F32.
#pragma once

#include "kernels/grids.inc"
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

// Formats with offsets; a scale a group; a grid (one after the other there); signs in sevens.
#define GGUF_HAS_OFFSETS(dtype)                                                                    \
  ((dtype) == TD_Q4_1 || (dtype) == TD_Q5_1 || (dtype) == TD_Q2_K || (dtype) == TD_Q4_K ||         \
   (dtype) == TD_Q5_K)
#define GGUF_IS_FINE(dtype)                                                                        \
  ((dtype) == TD_Q2_K || (dtype) == TD_Q3_K || (dtype) == TD_Q6_K || (dtype) == TD_IQ2_XS ||       \
   (dtype) == TD_IQ2_S || (dtype) == TD_IQ1_M)
#define GGUF_IS_IQ1(dtype) ((dtype) == TD_IQ1_S || (dtype) == TD_IQ1_M)
#define GGUF_IS_IQ3(dtype) ((dtype) == TD_IQ3_XXS || (dtype) == TD_IQ3_S)
#define GGUF_HAS_SEVENS(dtype)                                                                     \
  ((dtype) == TD_IQ2_XXS || (dtype) == TD_IQ2_XS || (dtype) == TD_IQ3_XXS)
#define GGUF_IS_GRID(dtype) ((dtype) >= TD_IQ2_XXS && (dtype) <= TD_IQ1_M)

#define GGUF_IQ4_VALUES                                                                            \
  { -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113 }
#define GGUF_MXFP4_VALUES                                                                          \
  { 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12 }

// The codes of a grid's fields; those of IQ1, whose values have eighths, are eight times as large.
#define GGUF_IQ2_CODE(field)     (8 + 17 * (field) + ((field) >> 1))
#define GGUF_IQ3_XXS_CODE(field) (4 + 8 * (field) + ((field) + 1) / 8 * 2)
#define GGUF_IQ3_S_CODE(field)   (1 + 2 * (field))
#define GGUF_IQ1_CODE(field)     (8 * ((int)(field)-1))

typedef struct {
  float scale, offset;
} gguf_scale;

// Bits of a block: (the four bytes at `at`) >> shift & mask.
typedef struct {
  unsigned at, shift, mask;
} gguf_place;

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

// ---- formats with a grid ------------------------------------------------------------------------
// The columns of an entry, eight or (IQ3) four, get signs, or (IQ1) an eighth more or less.

TD_BLOCK_FN uint32_t gguf_word(const uint8_t *p) {
  return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

// Where the code c of a group's scale is; the scale is half * (2 c + 1) * gguf_grid_unit.
TD_BLOCK_FN gguf_place gguf_grid_scale(td_dtype dtype, unsigned group) {
  const unsigned part = group / 2;
  gguf_place p;
  p.at = p.shift = 0;
  p.mask = 15;
  switch (dtype) {
  case TD_IQ2_XXS: p.at = 6 + part * 8, p.shift = 28; break;
  case TD_IQ2_XS: p.at = 66 + group / 8 * 4, p.shift = group % 8 * 4; break;
  case TD_IQ2_S: p.at = 74 + group / 8 * 4, p.shift = group % 8 * 4; break;
  case TD_IQ3_XXS: p.at = 66 + part * 4, p.shift = 28; break;
  case TD_IQ3_S: p.at = 106, p.shift = part * 4; break;
  case TD_IQ1_S: p.at = 34 + part / 2 * 4, p.shift = part % 2 * 16 + 12, p.mask = 7; break;
  default: // IQ1_M
    p.at = 48 + group / 8 * 4, p.shift = group % 8 / 4 * 16 + group % 4 * 3, p.mask = 7;
  }
  return p;
}

TD_BLOCK_FN float gguf_grid_unit(td_dtype dtype) {
  return dtype == TD_IQ3_S ? 1 : dtype == TD_IQ3_XXS ? 0.25f : 0.125f;
}

// IQ1_M's half of its last eight bytes: four bits each of words of 16.
TD_BLOCK_FN uint32_t gguf_scattered_half(uint32_t low, uint32_t high) {
  return (low >> 12 & 15u) | low >> 28 << 4 | (high >> 12 & 15u) << 8 | high >> 28 << 12;
}

TD_BLOCK_FN float gguf_scale_grid(td_dtype dtype, const uint8_t *b, unsigned group) {
  const gguf_place p = gguf_grid_scale(dtype, group);
  const uint32_t code = gguf_word(b + p.at) >> p.shift & p.mask;
  const uint32_t bits = dtype == TD_IQ1_M
                            ? gguf_scattered_half(gguf_word(b + 48), gguf_word(b + 52))
                            : (uint32_t)(b[0] | b[1] << 8);
  return TD_HALF_VALUE((uint16_t)bits) * (float)(2 * code + 1) * gguf_grid_unit(dtype);
}

// The index of entry i of 32 columns.
TD_BLOCK_FN unsigned gguf_grid_index(td_dtype dtype, const uint8_t *b, unsigned part, unsigned i) {
  switch (dtype) {
  case TD_IQ2_XXS: return b[2 + part * 8 + i];
  case TD_IQ2_XS: return b[2 + part * 8 + i * 2] | (b[3 + part * 8 + i * 2] & 1u) << 8;
  case TD_IQ2_S: return b[2 + part * 4 + i] | (b[66 + part] >> i * 2 & 3u) << 8;
  case TD_IQ3_XXS: return b[2 + part * 8 + i];
  case TD_IQ3_S: return b[2 + part * 8 + i] | (b[66 + part] >> i & 1u) << 8;
  case TD_IQ1_S: {
    const unsigned high = b[34 + part * 2] | (unsigned)b[35 + part * 2] << 8;
    return b[2 + part * 4 + i] | (high >> i * 3 & 7u) << 8;
  }
  default: return b[part * 4 + i] | (b[32 + part * 2 + i / 2] >> i % 2 * 4 & 7u) << 8; // IQ1_M
  }
}

// A byte of signs from each seven, in the lower bits of bytes: the number of ones becomes even.
TD_BLOCK_FN uint32_t gguf_even(uint32_t sevens) {
  uint32_t odd = sevens ^ sevens >> 4;
  odd ^= odd >> 2;
  odd ^= odd >> 1;
  return sevens | (odd & 0x01010101u) << 7;
}

// Signs of 32 columns, a bit each, set where it is negative; of IQ1 those of the eighths.
TD_BLOCK_FN uint32_t gguf_grid_signs(td_dtype dtype, const uint8_t *b, unsigned part) {
  const uint8_t *q = b + 2 + part * 8;
  switch (dtype) {
  case TD_IQ2_XXS:
  case TD_IQ3_XXS: {
    const uint32_t s = gguf_word(dtype == TD_IQ2_XXS ? q + 4 : b + 66 + part * 4);
    return gguf_even((s & 0x7fu) | (s << 1 & 0x7f00u) | (s << 2 & 0x7f0000u) |
                     (s << 3 & 0x7f000000u));
  }
  case TD_IQ2_XS: {
    const uint32_t low = gguf_word(q), high = gguf_word(q + 4);
    return gguf_even((low >> 9 & 0x7fu) | (low >> 17 & 0x7f00u) |
                     ((high >> 9 & 0x7fu) | (high >> 17 & 0x7f00u)) << 16);
  }
  case TD_IQ2_S: return gguf_word(b + 34 + part * 4);
  case TD_IQ3_S: return gguf_word(b + 74 + part * 4);
  case TD_IQ1_S: return b[35 + part * 2] & 128u ? 0xffffffffu : 0;
  default: { // IQ1_M
    const uint32_t low = b[32 + part * 2], high = b[33 + part * 2];
    return (low >> 3 & 1u) * 0xffu | (low >> 7) * 0xff00u | (high >> 3 & 1u) * 0xff0000u |
           (high >> 7) * 0xff000000u;
  }
  }
}

#define GGUF_ENTRY(entry) entry,
TD_BLOCK_FN unsigned gguf_grid_entry(td_dtype dtype, unsigned index) {
  static const uint16_t iq2_xxs[] = {GGUF_IQ2_XXS_GRID(GGUF_ENTRY)};
  static const uint16_t iq2_xs[] = {GGUF_IQ2_XS_GRID(GGUF_ENTRY)};
  static const uint16_t iq2_s[] = {GGUF_IQ2_S_GRID(GGUF_ENTRY)};
  static const uint16_t iq3_xxs[] = {GGUF_IQ3_XXS_GRID(GGUF_ENTRY)};
  static const uint16_t iq3_s[] = {GGUF_IQ3_S_GRID(GGUF_ENTRY)};
  static const uint16_t iq1[] = {GGUF_IQ1_GRID(GGUF_ENTRY)};
  switch (dtype) {
  case TD_IQ2_XXS: return iq2_xxs[index];
  case TD_IQ2_XS: return iq2_xs[index];
  case TD_IQ2_S: return iq2_s[index];
  case TD_IQ3_XXS: return iq3_xxs[index];
  case TD_IQ3_S: return iq3_s[index];
  default: return iq1[index];
  }
}

TD_BLOCK_FN int gguf_code_grid(td_dtype dtype, const uint8_t *b, unsigned part, unsigned col) {
  const int is_less = gguf_grid_signs(dtype, b, part) >> col & 1u;
  const unsigned n = GGUF_IS_IQ3(dtype) ? 4 : 8, bits = 16 / n;
  const unsigned entry = gguf_grid_entry(dtype, gguf_grid_index(dtype, b, part, col / n));
  const unsigned field = entry >> col % n * bits & ((1u << bits) - 1);
  if (GGUF_IS_IQ1(dtype)) return GGUF_IQ1_CODE(field) + (is_less ? -1 : 1);
  const int code = (int)(dtype == TD_IQ3_XXS ? GGUF_IQ3_XXS_CODE(field)
                         : dtype == TD_IQ3_S ? GGUF_IQ3_S_CODE(field)
                                             : GGUF_IQ2_CODE(field));
  return is_less ? -code : code;
}

// ---- all formats --------------------------------------------------------------------------------

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
  default: break;
  }
  if (GGUF_IS_GRID(dtype)) return gguf_scaled(gguf_scale_grid(dtype, block, group), 0);
  return gguf_scaled(gguf_half(block), 0);
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
  default: return gguf_code_grid(dtype, b, group / 2, group % 2 * 16 + i);
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
