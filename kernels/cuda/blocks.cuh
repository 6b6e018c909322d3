// kernels/cuda/blocks.cuh - GGUF's blocks (kernels/blocks.h) four codes at a time.
#pragma once

#include "kernels/cuda/dequant.cuh"

// A block's columns and bytes, and whether its groups have offsets, as constants.
template <int DTYPE> struct block_of;
#define X(id, cols, bytes)                                                                         \
  template <> struct block_of<TD_##id> {                                                           \
    enum { COLS = cols, BYTES = bytes };                                                           \
  };
TD_BLOCK_DTYPES(X)
#undef X

template <int DTYPE> constexpr bool HAS_OFFSETS = GGUF_HAS_OFFSETS(DTYPE);

// Groups of 16 columns that share a scale.
template <int DTYPE> constexpr int SCALE_GROUPS = GGUF_IS_FINE(DTYPE) ? 1 : 2;

// Four bytes, the first in the lowest bits: in shared memory, of which the aligned words around
// them must exist, and anywhere.
struct shared_word {
  __device__ uint32_t operator()(const uint8_t *p) const {
    const uintptr_t at = reinterpret_cast<uintptr_t>(p);
    const uint32_t *words = reinterpret_cast<const uint32_t *>(at - at % 4);
    return __byte_perm(words[0], words[1], 0x3210u + 0x1111u * static_cast<uint32_t>(at % 4));
  }
};

struct any_word {
  __device__ uint32_t operator()(const uint8_t *p) const {
    if (reinterpret_cast<uintptr_t>(p) % 2 == 0) {
      const uint16_t *halves = reinterpret_cast<const uint16_t *>(p);
      return __ldg(halves) | static_cast<uint32_t>(__ldg(halves + 1)) << 16;
    }
    return p[0] | static_cast<uint32_t>(p[1]) << 8 | static_cast<uint32_t>(p[2]) << 16 |
           static_cast<uint32_t>(p[3]) << 24;
  }
};

// Bits `first` to first + 3 of a string of bits, as bit 4 of four bytes; first % 4 == 0.
__device__ inline uint32_t gguf_fifths(const uint8_t *p, uint32_t first) {
  const uint32_t four = p[first / 8] >> first % 8 & 15u;
  return (four * 0x00204081u & 0x01010101u) << 4;
}

// Looks up four codes, each the low half of a byte, in a table of sixteen signed bytes.
__device__ inline uint32_t gguf_look_up(uint32_t codes, uint4 table) {
  uint32_t digits = codes & 0x07070707u;
  digits = (digits | digits >> 4) & 0x00ff00ffu;
  digits |= digits >> 8;
  const uint32_t low = __byte_perm(table.x, table.y, digits & 0xffffu);
  const uint32_t high = __byte_perm(table.z, table.w, digits & 0xffffu);
  return select_bits((codes >> 3 & 0x01010101u) * 0xffu, high, low);
}

__device__ inline uint32_t gguf_iq4_of(uint32_t codes) {
  return gguf_look_up(codes, {0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u});
}

__device__ inline uint32_t gguf_mxfp4_of(uint32_t codes) {
  return gguf_look_up(codes, {0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu});
}

// Whether gguf_codes4 gives signed bytes; otherwise gguf_less is to be subtracted from each.
__device__ constexpr bool gguf_is_signed(td_dtype dtype) {
  return dtype == TD_Q8_0 || dtype == TD_IQ4_NL || dtype == TD_IQ4_XS || dtype == TD_MXFP4 ||
         dtype == TD_TQ1_0 || GGUF_IS_GRID(dtype);
}

__device__ constexpr uint32_t gguf_less(td_dtype dtype) {
  return dtype == TD_Q4_0    ? 8
         : dtype == TD_Q5_0  ? 16
         : dtype == TD_Q3_K  ? 4
         : dtype == TD_Q6_K  ? 32
         : dtype == TD_TQ2_0 ? 1
                             : 0;
}

// Codes i to i + 3 of a group of block b, one a byte; i % 4 == 0. The places are those of
// gguf_code.
template <class Word>
__device__ inline uint32_t gguf_codes4(td_dtype dtype, const uint8_t *b, uint32_t group, uint32_t i,
                                       Word word) {
  const uint32_t four = 0x0f0f0f0fu, two = 0x03030303u, one = 0x01010101u;
  const uint32_t bit = group * BLOCK_GROUP + i, at = group % 2 * 16 + i;
  switch (dtype) {
  case TD_Q8_0: return word(b + Q8_0_CODES + bit);
  case TD_Q4_0: return word(b + Q4_0_CODES + i) >> 4 * group & four;
  case TD_Q4_1: return word(b + Q4_1_CODES + i) >> 4 * group & four;
  case TD_Q5_0:
    return (word(b + Q5_0_CODES + i) >> 4 * group & four) | gguf_fifths(b + Q5_0_HIGH, bit);
  case TD_Q5_1:
    return (word(b + Q5_1_CODES + i) >> 4 * group & four) | gguf_fifths(b + Q5_1_HIGH, bit);
  case TD_Q2_K: return word(b + Q2_K_CODES + group / 8 * 32 + at) >> group % 8 / 2 * 2 & two;
  case TD_Q3_K:
    return (word(b + Q3_K_CODES + group / 8 * 32 + at) >> group % 8 / 2 * 2 & two) |
           (word(b + at) >> group / 2 & one) << 2;
  case TD_Q4_K: return word(b + Q4_K_CODES + group / 4 * 32 + at) >> group / 2 % 2 * 4 & four;
  case TD_Q5_K:
    return (word(b + Q5_K_CODES + group / 4 * 32 + at) >> group / 2 % 2 * 4 & four) |
           (word(b + Q5_K_HIGH + at) >> group / 2 & one) << 4;
  case TD_Q6_K:
    return (word(b + group / 8 * 64 + group / 2 % 2 * 32 + at) >> group % 8 / 4 * 4 & four) |
           (word(b + Q6_K_HIGH + group / 8 * 32 + at) >> group % 8 / 2 * 2 & two) << 4;
  case TD_IQ4_NL: return gguf_iq4_of(word(b + IQ4_NL_CODES + i) >> 4 * group & four);
  case TD_IQ4_XS:
    return gguf_iq4_of(word(b + IQ4_XS_CODES + group / 2 * 16 + i) >> group % 2 * 4 & four);
  case TD_MXFP4: return gguf_mxfp4_of(word(b + MXFP4_CODES + i) >> 4 * group & four);
  case TD_TQ2_0: return word(b + group / 8 * 32 + at) >> group % 8 / 2 * 2 & two;
  default: { // one by one
    uint32_t codes = 0;
    for (uint32_t e = 0; e < 4; e++)
      codes |= (gguf_code(dtype, b, group, i + e) & 0xffu) << 8 * e;
    return codes;
  }
  }
}

// Eight elements of a row from column k on; k % 8 == 0.
__device__ inline void gguf_values8(const td_weight &w, uint32_t row, uint32_t k, float *out) {
  const td_block block = gguf_block(w.dtype);
  const size_t idx = static_cast<size_t>(row) * (w.cols / block.cols) + k / block.cols;
  const uint8_t *b = static_cast<const uint8_t *>(w.data) + idx * block.bytes;
  const uint32_t group = k % block.cols / BLOCK_GROUP;
  const gguf_scale s = gguf_scale_of(w.dtype, b, group);
  for (uint32_t i = 0; i < 8; i += 4) {
    const uint32_t codes = gguf_codes4(w.dtype, b, group, k % BLOCK_GROUP + i, any_word());
    for (uint32_t e = 0; e < 4; e++) {
      const uint32_t byte = codes >> 8 * e & 0xff;
      const int code = gguf_is_signed(w.dtype) ? static_cast<int8_t>(byte)
                                               : static_cast<int>(byte - gguf_less(w.dtype));
      out[i + e] = s.scale * static_cast<float>(code) + s.offset;
    }
  }
}
