// kernels/cpu/linear/blocks_rows.h - GGUF's blocks of VL rows, a row a lane. BLOCK_DTYPE: the one
// of this kernel. Include after an ISA's blocks.h, which has put_codes.
// A dword of four consecutive columns is as kernels/blocks.h has it, so that shifts and masks of
// the rows' transposed dwords give codes in the order of columns.
#pragma once

#include <stdbool.h>

#include "kernels/cpu/common/blocks_vec.h"
#include "kernels/cpu/common/transpose.h"

enum {
  HAS_OFFSETS = GGUF_HAS_OFFSETS(BLOCK_DTYPE),
  // decoded a row at a time, with 32 columns in a vector
  IS_BY_ROW = BLOCK_DTYPE == TD_TQ1_0 || GGUF_IS_GRID(BLOCK_DTYPE),
  GROUP_COLS = GGUF_IS_FINE(BLOCK_DTYPE) ? BLOCK_GROUP : 2 * BLOCK_GROUP, // that share a scale
};

#define IS_SHORT (td_dtype_block(BLOCK_DTYPE).cols == GROUP_COLS)

// One block of each row.
typedef struct {
  const uint8_t *p;  // the first row's
  size_t apart;      // bytes from row to row
  uint32_t n_rows;   // the other lanes get zeros
  const char *ahead; // what is prefetched next
} row_blocks;

// Vector i has dword i of the 16 bytes at `at`. Prefetches as much as it loads. Volatile in long
// blocks, whose loads and prefetches the compiler would move to the beginning: a burst stalls.
TD_INLINE void dwords_at(row_blocks *b, uint32_t at, vi out[4]) {
  const bool is_long = td_dtype_block(BLOCK_DTYPE).cols > 32;
  TD_UNROLL for (int i = 0; i < VL / 4; i++, b->ahead += 64) {
    if (is_long) {
      __asm__ volatile("prefetcht1 %0" : : "m"(*b->ahead));
    } else {
      __builtin_prefetch(b->ahead, 0, 2);
    }
  }
  transpose_rows((const char *)b->p + at, b->apart, b->n_rows, 16, out);
  if (!is_long) return;
  TD_UNROLL for (int i = 0; i < 4; i++) __asm__ volatile("" : "+v"(out[i]));
}

TD_INLINE vi dword_at(row_blocks *b, uint32_t at) {
  return vi_gather(b->p + at, b->apart, b->n_rows);
}

TD_INLINE vf high_halves(vi dwords) {
  return vf_from_low_halves(vi_srl(dwords, 16));
}

// (dwords >> shift) & mask, in every byte.
TD_INLINE vi bits_of(vi dwords, unsigned shift, int mask) {
  return vi_and(vi_srl(dwords, shift), vi_set1(mask * 0x01010101));
}

// Byte i of every lane, as a number.
TD_INLINE vf byte_of(vi dwords, unsigned i) {
  return vf_from_vi(vi_and(vi_srl(dwords, 8 * i), vi_set1(255)));
}

TD_INLINE vf signed_byte_of(vi dwords, unsigned i) {
  return vf_from_vi(vi_sra(vi_sll(dwords, 24 - 8 * i), 24));
}

TD_INLINE vf negated(vf a, vf b) {
  return vf_sub(vf_zero(), vf_mul(a, b));
}

// ---- scales -------------------------------------------------------------------------------------

// Q4_K and Q5_K: gguf_scale_k4 of all parts.
TD_INLINE void scales_k4(row_blocks *b, vf *scale, vf *offset, size_t step) {
  vi q[4];
  dwords_at(b, 0, q);
  const vf d = vf_from_low_halves(q[0]), least = high_halves(q[0]);
  const vi upper[2] = {vi_and(vi_srl(q[1], 2), vi_set1(0x30303030)),
                       vi_and(vi_srl(q[2], 2), vi_set1(0x30303030))};
  const vi of_scale[2] = {bits_of(q[1], 0, 63), vi_or(bits_of(q[3], 0, 15), upper[0])};
  const vi of_offset[2] = {bits_of(q[2], 0, 63), vi_or(bits_of(q[3], 4, 15), upper[1])};
  TD_UNROLL for (unsigned j = 0; j < 8; j++) {
    scale[j * step] = vf_mul(d, byte_of(of_scale[j / 4], j % 4));
    offset[j * step] = negated(least, byte_of(of_offset[j / 4], j % 4));
  }
}

TD_INLINE void scales_q6(row_blocks *b, vf *scale, size_t step) {
  vi q[4];
  dwords_at(b, Q6_K_SCALES, q);
  const vf d = high_halves(dword_at(b, Q6_K_D - 2));
  TD_UNROLL for (unsigned g = 0; g < 16; g++)
      scale[g * step] = vf_mul(d, signed_byte_of(q[g / 4], g % 4));
}

TD_INLINE void scales_q2(row_blocks *b, vf *scale, vf *offset, size_t step) {
  vi q[4];
  dwords_at(b, 0, q);
  const vi both = dword_at(b, Q2_K_D);
  const vf d = vf_from_low_halves(both), least = high_halves(both);
  TD_UNROLL for (unsigned g = 0; g < 16; g++) {
    scale[g * step] = vf_mul(d, byte_of(bits_of(q[g / 4], 0, 15), g % 4));
    offset[g * step] = negated(least, byte_of(bits_of(q[g / 4], 4, 15), g % 4));
  }
}

// gguf_scale_q3 of all groups, from the last 16 bytes of the block.
TD_INLINE void scales_q3(row_blocks *b, vf *scale, size_t step) {
  enum { AT = Q3_K_D - 14 };
  vi q[4];
  dwords_at(b, AT, q);
  const vf d = high_halves(q[3]);
  TD_UNROLL for (unsigned g = 0; g < 16; g++) {
    const unsigned low = Q3_K_SCALES - AT + g % 8, high = Q3_K_SCALES - AT + 8 + g % 4;
    const vi bits = vi_sll(vi_and(vi_srl(q[high / 4], 8 * (high % 4) + g / 4 * 2), vi_set1(3)), 4);
    const vi four = vi_and(vi_srl(q[low / 4], 8 * (low % 4) + g / 8 * 4), vi_set1(15));
    const vi code = vi_sub(vi_or(four, bits), vi_set1(32));
    scale[g * step] = vf_mul(d, vf_from_vi(code));
  }
}

TD_INLINE void scales_iq4(row_blocks *b, vf *scale, size_t step) {
  vi q[4];
  dwords_at(b, 0, q);
  const vf d = vf_from_low_halves(q[0]);
  TD_UNROLL for (unsigned j = 0; j < 8; j++) {
    const vi low = vi_and(vi_srl(q[1], 4 * j), vi_set1(15));
    const vi high = vi_and(vi_srl(q[0], 16 + 2 * j), vi_set1(3));
    const vi code = vi_sub(vi_or(low, vi_sll(high, 4)), vi_set1(32));
    scale[j * step] = vf_mul(d, vf_from_vi(code));
  }
}

// One scale of all parts, the block's last two bytes.
TD_INLINE void scales_equal(row_blocks *b, uint32_t at, vf *scale, size_t step) {
  const vf d = high_halves(dword_at(b, at - 2));
  TD_UNROLL for (unsigned j = 0; j < 8; j++) scale[j * step] = d;
}

// gguf_scale_grid of all groups.
TD_INLINE void scales_grid(row_blocks *b, vf *scale, size_t step) {
  vi word = dword_at(b, BLOCK_DTYPE == TD_IQ1_M ? 48 : 0);
  vf d;
  if (BLOCK_DTYPE == TD_IQ1_M) {
    const vi high = dword_at(b, 52), four = vi_set1(15);
    const vi lower = vi_or(vi_and(vi_srl(word, 12), four), vi_sll(vi_srl(word, 28), 4));
    const vi upper = vi_or(vi_and(vi_srl(high, 12), four), vi_sll(vi_srl(high, 28), 4));
    d = vf_from_low_halves(vi_or(lower, vi_sll(upper, 8)));
  } else {
    d = vf_from_low_halves(word);
  }
  d = vf_mul(d, vf_set1(gguf_grid_unit(BLOCK_DTYPE)));
  TD_UNROLL for (unsigned i = 0; i < 256 / GROUP_COLS; i++) {
    const gguf_place p = gguf_grid_scale(BLOCK_DTYPE, i * (GROUP_COLS / BLOCK_GROUP));
    if (p.at != gguf_grid_scale(BLOCK_DTYPE, (i - 1) * (GROUP_COLS / BLOCK_GROUP)).at || i == 0)
      word = dword_at(b, p.at);
    const vi code = vi_and(vi_srl(word, p.shift), vi_set1((int)p.mask));
    scale[i * step] = vf_mul(d, vf_from_vi(vi_add(vi_add(code, code), vi_set1(1))));
  }
}

// gguf_scale_mx.
TD_INLINE vf scales_mx(vi dwords) {
  const vi e = vi_and(dwords, vi_set1(255)), one = vi_set1(1);
  const vi tiny = vi_mul(vi_add(e, one), vi_set1(0x00200000));
  return vf_from_bits(vi_where_less(e, vi_set1(2), tiny, vi_sll(vi_sub(e, one), 23)));
}

// Scales and offsets of a block's groups, step vectors apart.
TD_INLINE void block_scales(row_blocks *b, vf *scale, vf *offset, size_t step) {
  switch (BLOCK_DTYPE) {
  case TD_Q4_K:
  case TD_Q5_K: scales_k4(b, scale, offset, step); return;
  case TD_Q6_K: scales_q6(b, scale, step); return;
  case TD_Q2_K: scales_q2(b, scale, offset, step); return;
  case TD_Q3_K: scales_q3(b, scale, step); return;
  case TD_IQ4_XS: scales_iq4(b, scale, step); return;
  case TD_TQ2_0: scales_equal(b, TQ2_0_D, scale, step); return;
  case TD_TQ1_0: scales_equal(b, TQ1_0_D, scale, step); return;
  default: break;
  }
  if (GGUF_IS_GRID(BLOCK_DTYPE)) {
    scales_grid(b, scale, step);
    return;
  }
  const vi first = dword_at(b, 0);
  *scale = BLOCK_DTYPE == TD_MXFP4 ? scales_mx(first) : vf_from_low_halves(first);
  if (HAS_OFFSETS) *offset = high_halves(first);
}

// ---- codes --------------------------------------------------------------------------------------

// Where a block's codes go, four columns of every row at a time: to memory, or into one token's
// sums.
typedef struct {
  uint8_t *out; // four columns are step bytes from the next; NULL: into sums
  size_t step;
  const int8_t *x; // of the block's columns
  group_sum *sums; // [group]
} code_sink;

TD_INLINE void put_at(const code_sink *to, uint32_t four, vi codes) {
  if (to->out) {
    put_codes(codes, to->out + four * to->step);
  } else {
    multiply_codes(codes, to->x + four * X_FOUR, &to->sums[four * 4 / GROUP_COLS]);
  }
}

// The codes of bytes that have one of sixteen values each, as unsigned numbers.
TD_INLINE vi values_of(vi codes) {
  static const int8_t iq4[16] = GGUF_IQ4_VALUES, mxfp4[16] = GGUF_MXFP4_VALUES;
  const int8_t *table = BLOCK_DTYPE == TD_MXFP4 ? mxfp4 : iq4;
  return vi_bytes_at(vi_xor(vi_repeat16(table), vi_set1((int)0x80808080)), codes);
}

enum {
  HAS_TABLE = BLOCK_DTYPE == TD_IQ4_NL || BLOCK_DTYPE == TD_IQ4_XS || BLOCK_DTYPE == TD_MXFP4
};

// 16 bytes of nibbles: the lower ones are the first 16 columns. high: fifth bits, or 0.
TD_INLINE void nibbles_32(row_blocks *b, uint32_t at, vi high, bool is_five, const code_sink *to,
                          uint32_t first) {
  vi q[4];
  dwords_at(b, at, q);
  TD_UNROLL for (unsigned j = 0; j < 8; j++) {
    vi codes = bits_of(q[j % 4], j / 4 * 4, 15);
    if (HAS_TABLE) codes = values_of(codes);
    if (is_five) {
      const vi four = vi_and(vi_srl(high, 4 * j), vi_set1(15));
      const vi spread = vi_mul(four, vi_set1(0x00204081));
      codes = vi_or(codes, vi_sll(bits_of(spread, 0, 1), 4));
    }
    put_at(to, first + j, codes);
  }
}

// Q4_K and Q5_K: in 32 bytes the lower nibbles are 32 columns, then the upper ones.
TD_INLINE void codes_k4(row_blocks *b, const code_sink *to) {
  vi high[8];
  if (BLOCK_DTYPE == TD_Q5_K) {
    dwords_at(b, Q5_K_HIGH, high);
    dwords_at(b, Q5_K_HIGH + 16, high + 4);
  }
  TD_UNROLL for (uint32_t c = 0; c < 8; c++) { // 16 bytes each
    vi q[4];
    dwords_at(b, (BLOCK_DTYPE == TD_Q5_K ? Q5_K_CODES : Q4_K_CODES) + 16 * c, q);
    TD_UNROLL for (uint32_t i = 0; i < 8; i++) {
      const uint32_t part = c / 2 * 2 + i / 4, j = c % 2 * 4 + i % 4;
      vi codes = bits_of(q[i % 4], i / 4 * 4, 15);
      if (BLOCK_DTYPE == TD_Q5_K) codes = vi_or(codes, vi_sll(bits_of(high[j], part, 1), 4));
      put_at(to, part * 8 + j, codes);
    }
  }
}

TD_INLINE void codes_q6(row_blocks *b, const code_sink *to) {
  TD_UNROLL for (uint32_t c = 0; c < 4; c++) { // half c / 2 of the columns, 16 of 32 bytes
    vi low[8], high[4];
    dwords_at(b, c / 2 * 64 + c % 2 * 16, low);
    dwords_at(b, c / 2 * 64 + 32 + c % 2 * 16, low + 4);
    dwords_at(b, Q6_K_HIGH + c / 2 * 32 + c % 2 * 16, high);
    TD_UNROLL for (uint32_t part = 0; part < 4; part++) {
      TD_UNROLL for (uint32_t j = 0; j < 4; j++) {
        const vi upper = vi_sll(bits_of(high[j], 2 * part, 3), 4);
        put_at(to, c / 2 * 32 + part * 8 + c % 2 * 4 + j,
               vi_or(bits_of(low[part % 2 * 4 + j], part / 2 * 4, 15), upper));
      }
    }
  }
}

// Q2_K, Q3_K and TQ2_0: in 32 bytes four times 32 columns of two bits.
TD_INLINE void codes_pairs(row_blocks *b, uint32_t at, const code_sink *to) {
  TD_UNROLL for (uint32_t c = 0; c < 4; c++) {
    vi q[4], high[4];
    dwords_at(b, at + 16 * c, q);
    if (BLOCK_DTYPE == TD_Q3_K) dwords_at(b, c % 2 * 16, high);
    TD_UNROLL for (uint32_t part = 0; part < 4; part++) {
      TD_UNROLL for (uint32_t j = 0; j < 4; j++) {
        vi codes = bits_of(q[j], 2 * part, 3);
        if (BLOCK_DTYPE == TD_Q3_K)
          codes = vi_or(codes, vi_sll(bits_of(high[j], c / 2 * 4 + part, 1), 2));
        put_at(to, c / 2 * 32 + part * 8 + c % 2 * 4 + j, codes);
      }
    }
  }
}

TD_INLINE void codes_bytes(row_blocks *b, const code_sink *to) {
  TD_UNROLL for (uint32_t i = 0; i < 2; i++) {
    vi q[4];
    dwords_at(b, Q8_0_CODES + 16 * i, q);
    TD_UNROLL for (uint32_t j = 0; j < 4; j++)
        put_at(to, 4 * i + j, vi_xor(q[j], vi_set1((int)0x80808080)));
  }
}

typedef uint32_t row_signs[VL][8];

TD_INLINE void signs_of_rows(const row_blocks *b, row_signs signs) {
  if (!GGUF_HAS_SEVENS(BLOCK_DTYPE)) return;
  for (uint32_t r = 0; r < b->n_rows; r++)
    gguf_block_signs(BLOCK_DTYPE, b->p + r * b->apart, signs[r]);
}

// Where IS_BY_ROW.
TD_INLINE void codes_by_row(row_blocks *b, const code_sink *to) {
  _Alignas(64) uint8_t rows[VL][32];
  if (b->n_rows < VL) memset(rows, 0, sizeof rows);
  row_signs signs;
  signs_of_rows(b, signs);
  for (uint32_t part = 0; part < 8; part++) {
    for (uint32_t r = 0; r < b->n_rows; r++)
      _mm256_store_si256((__m256i *)(void *)rows[r],
                         gguf_codes_with(BLOCK_DTYPE, b->p + r * b->apart, part, signs[r]));
    TD_UNROLL for (uint32_t half = 0; half < 2; half++) {
      vi q[4];
      vi_transpose((const char *)rows[0] + 16 * half, sizeof rows[0], q);
      TD_UNROLL for (uint32_t i = 0; i < 4; i++) put_at(to, part * 8 + half * 4 + i, q[i]);
    }
  }
}

// A block's codes as unsigned bytes, gguf_less too large.
TD_INLINE void block_codes(row_blocks *b, const code_sink *to) {
  const vi none = vi_zero();
  switch (BLOCK_DTYPE) {
  case TD_Q8_0: codes_bytes(b, to); return;
  case TD_Q4_0: nibbles_32(b, Q4_0_CODES, none, false, to, 0); return;
  case TD_Q4_1: nibbles_32(b, Q4_1_CODES, none, false, to, 0); return;
  case TD_Q5_0: nibbles_32(b, Q5_0_CODES, dword_at(b, Q5_0_HIGH), true, to, 0); return;
  case TD_Q5_1: nibbles_32(b, Q5_1_CODES, dword_at(b, Q5_1_HIGH), true, to, 0); return;
  case TD_IQ4_NL: nibbles_32(b, IQ4_NL_CODES, none, false, to, 0); return;
  case TD_MXFP4: nibbles_32(b, MXFP4_CODES, none, false, to, 0); return;
  case TD_IQ4_XS:
    TD_UNROLL for (uint32_t s = 0; s < 8; s++)
        nibbles_32(b, IQ4_XS_CODES + 16 * s, none, false, to, s * 8);
    return;
  case TD_Q2_K: codes_pairs(b, Q2_K_CODES, to); return;
  case TD_Q3_K: codes_pairs(b, Q3_K_CODES, to); return;
  case TD_TQ2_0: codes_pairs(b, 0, to); return;
  case TD_Q6_K: codes_q6(b, to); return;
  case TD_Q4_K:
  case TD_Q5_K: codes_k4(b, to); return;
  default: codes_by_row(b, to); return;
  }
}
