// tests/unit/ref_blocks.h - GGUF's blocks from their definition: element by element, in double.
#pragma once

#include "kernels/grids.inc"
#include "unit/ref.h"

// Where the F16 numbers of a block are, and whether the second one is subtracted, in places of
// scales and offsets; -1: there is none.
typedef struct {
  td_dtype dtype;
  const char *family;
  int scale_at, offset_at;
} ref_block_format;

static const ref_block_format ref_block_formats[] = {
    {TD_Q8_0, "linear_q8_0", 0, -1},       {TD_Q4_K, "linear_q4_k", 0, 2},
    {TD_Q6_K, "linear_q6_k", 208, -1},     {TD_Q5_K, "linear_q5_k", 0, 2},
    {TD_Q4_0, "linear_q4_0", 0, -1},       {TD_Q4_1, "linear_q4_1", 0, 2},
    {TD_Q5_0, "linear_q5_0", 0, -1},       {TD_Q5_1, "linear_q5_1", 0, 2},
    {TD_Q2_K, "linear_q2_k", 80, 82},      {TD_Q3_K, "linear_q3_k", 108, -1},
    {TD_IQ4_NL, "linear_iq4_nl", 0, -1},   {TD_IQ4_XS, "linear_iq4_xs", 0, -1},
    {TD_MXFP4, "linear_mxfp4", -1, -1},    {TD_TQ2_0, "linear_tq2_0", 64, -1},
    {TD_TQ1_0, "linear_tq1_0", 52, -1},    {TD_IQ2_XXS, "linear_iq2_xxs", 0, -1},
    {TD_IQ2_XS, "linear_iq2_xs", 0, -1},   {TD_IQ2_S, "linear_iq2_s", 0, -1},
    {TD_IQ3_XXS, "linear_iq3_xxs", 0, -1}, {TD_IQ3_S, "linear_iq3_s", 0, -1},
    {TD_IQ1_S, "linear_iq1_s", 0, -1},     {TD_IQ1_M, "linear_iq1_m", -1, -1},
};

static inline double ref_half_at(const uint8_t *p) {
  return ref_half((uint16_t)(p[0] | p[1] << 8));
}

// Bit `bit` of a string of bits, the lowest of each byte first.
static inline int ref_bit(const uint8_t *p, uint32_t bit) {
  return p[bit / 8] >> bit % 8 & 1;
}

static const int ref_iq4[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                1,    13,   25,  38,  53,  69,  89,  113};

// Blocks of 32: column c < 16 is the low half of byte c, the others the high half of byte c - 16.
static inline int ref_half_byte(const uint8_t *codes, uint32_t c) {
  return c < 16 ? codes[c] & 15 : codes[c - 16] >> 4;
}

static inline double ref_block32(td_dtype dtype, const uint8_t *b, uint32_t c) {
  const double d = ref_half_at(b);
  switch (dtype) {
  case TD_Q8_0: return d * (int8_t)b[2 + c];
  case TD_Q4_0: return d * (ref_half_byte(b + 2, c) - 8);
  case TD_Q4_1: return d * ref_half_byte(b + 4, c) + ref_half_at(b + 2);
  case TD_Q5_0: return d * (ref_half_byte(b + 6, c) + 16 * ref_bit(b + 2, c) - 16);
  case TD_Q5_1: return d * (ref_half_byte(b + 8, c) + 16 * ref_bit(b + 4, c)) + ref_half_at(b + 2);
  case TD_IQ4_NL: return d * ref_iq4[ref_half_byte(b + 2, c)];
  default: return ldexp(ref_e2m1((unsigned)ref_half_byte(b + 1, c)), b[0] - 127);
  }
}

// Part c / 32 of Q4_K and Q5_K: scales 0 to 3 and offsets 0 to 3 are the low six bits of bytes 0 to
// 3 and 4 to 7; of the others bytes 8 to 11 have four bits each, and the bytes before the upper
// two.
static inline void ref_k4(const uint8_t *s, uint32_t part, int *scale, int *offset) {
  *scale = part < 4 ? s[part] & 63 : (s[part + 4] & 15) + (s[part - 4] >> 6) * 16;
  *offset = part < 4 ? s[part + 4] & 63 : (s[part + 4] >> 4) + (s[part] >> 6) * 16;
}

// Bits 2 n of byte c % 32, where 128 columns share 32 bytes.
static inline int ref_two(const uint8_t *codes, uint32_t c) {
  return codes[c / 128 * 32 + c % 32] >> c % 128 / 32 * 2 & 3;
}

static inline double ref_q3(const uint8_t *b, uint32_t c) {
  const uint8_t *s = b + 96;
  const uint32_t part = c / 16;
  const int low = part < 8 ? s[part] & 15 : s[part - 8] >> 4;
  const int high = s[8 + part % 4] >> 2 * (part / 4) & 3;
  const int sub = b[c % 32] >> c / 32 & 1 ? 0 : 4;
  return ref_half_at(b + 108) * (low + 16 * high - 32) * (ref_two(b + 32, c) - sub);
}

static inline double ref_q6(const uint8_t *b, uint32_t c) {
  const uint8_t *low = b + c / 128 * 64;
  const uint32_t in_128 = c % 128;
  const int four = in_128 < 64 ? low[in_128] & 15 : low[in_128 - 64] >> 4;
  const int code = four + 16 * ref_two(b + 128, c) - 32;
  return ref_half_at(b + 208) * (int8_t)b[192 + c / 16] * code;
}

// Digit `digit` of a byte that is a fraction of 256 in base 3, less 1.
static inline int ref_trit(uint8_t byte, uint32_t digit) {
  double rest = byte / 256.0;
  for (; digit > 0; digit--)
    rest = rest * 3 - floor(rest * 3);
  return (int)(rest * 3) - 1;
}

static inline double ref_tq1(const uint8_t *b, uint32_t c) {
  const int trit = c < 160   ? ref_trit(b[c % 32], c / 32)
                   : c < 240 ? ref_trit(b[32 + (c - 160) % 16], (c - 160) / 16)
                             : ref_trit(b[48 + c % 4], (c - 240) / 4);
  return ref_half_at(b + 52) * trit;
}

// Bits [first, first + n) of a string of bits, the lowest of each byte first.
static inline int ref_bits(const uint8_t *p, uint32_t first, uint32_t n) {
  int value = 0;
  for (uint32_t i = 0; i < n; i++)
    value |= ref_bit(p, first + i) << i;
  return value;
}

#define REF_ENTRY(entry) entry,
static const uint16_t ref_iq2_xxs[] = {GGUF_IQ2_XXS_GRID(REF_ENTRY)};
static const uint16_t ref_iq2_xs[] = {GGUF_IQ2_XS_GRID(REF_ENTRY)};
static const uint16_t ref_iq2_s[] = {GGUF_IQ2_S_GRID(REF_ENTRY)};
static const uint16_t ref_iq3_xxs[] = {GGUF_IQ3_XXS_GRID(REF_ENTRY)};
static const uint16_t ref_iq3_s[] = {GGUF_IQ3_S_GRID(REF_ENTRY)};
static const uint16_t ref_iq1[] = {GGUF_IQ1_GRID(REF_ENTRY)};

// Column c of an entry.
static inline double ref_iq2_at(uint16_t entry, uint32_t c) {
  static const double values[] = {8, 25, 43};
  return values[entry >> 2 * c & 3];
}

// Seven bits are signs of seven columns; the eighth makes the number of negative ones even.
static inline int ref_sign(int seven, uint32_t c) {
  if (c < 7) return seven >> c & 1 ? -1 : 1;
  return __builtin_popcount((unsigned)seven) % 2 ? -1 : 1;
}

// IQ2_XXS and IQ3_XXS: a word of a part has four times seven signs, and its scale above them.
static inline double ref_scaled_sign(const uint8_t *word, uint32_t c) {
  return (ref_bits(word, 28, 4) + 0.5) * ref_sign(ref_bits(word, c % 32 / 8 * 7, 7), c % 8);
}

// IQ2 and IQ3: half * (1/2 + code) * unit * value * sign.
static inline double ref_signed_grid(td_dtype dtype, const uint8_t *b, uint32_t c) {
  static const double xxs[] = {4, 12, 20, 28, 36, 44, 52, 62};
  const uint32_t part = c / 32, eight = c / 8, four = c / 4;
  const double d = ref_half_at(b);
  switch (dtype) {
  case TD_IQ2_XXS:
    return d * ref_scaled_sign(b + 6 + 8 * part, c) / 4 *
           ref_iq2_at(ref_iq2_xxs[b[2 + 8 * part + eight % 4]], c % 8);
  case TD_IQ2_XS:
    return d * (ref_bits(b + 66, c / 16 * 4, 4) + 0.5) / 4 *
           ref_sign(ref_bits(b + 2, 16 * eight + 9, 7), c % 8) *
           ref_iq2_at(ref_iq2_xs[ref_bits(b + 2, 16 * eight, 9)], c % 8);
  case TD_IQ2_S:
    return d * (ref_bits(b + 74, c / 16 * 4, 4) + 0.5) / 4 * (ref_bit(b + 34, c) ? -1 : 1) *
           ref_iq2_at(ref_iq2_s[b[2 + eight] + 256 * ref_bits(b + 66, 2 * eight, 2)], c % 8);
  case TD_IQ3_XXS:
    return d * ref_scaled_sign(b + 66 + 4 * part, c) / 2 *
           xxs[ref_iq3_xxs[b[2 + four]] >> 4 * (c % 4) & 15];
  default: // IQ3_S
    return d * (1 + 2 * ref_bits(b + 106, part * 4, 4)) * (ref_bit(b + 74, c) ? -1 : 1) *
           (1 + 2 * (ref_iq3_s[b[2 + four] + 256 * ref_bit(b + 66, four)] >> 4 * (c % 4) & 15));
  }
}

// half * (1 + 2 code) * (value +- 1/8)
static inline double ref_iq1_grid(td_dtype dtype, const uint8_t *b, uint32_t c) {
  const uint32_t eight = c / 8, part = c / 32;
  double d = ref_half_at(b);
  int code = ref_bits(b + 34, part * 16 + 12, 3), is_less = ref_bit(b + 34, part * 16 + 15);
  int index = dtype == TD_IQ1_S
                  ? b[2 + eight] + 256 * ref_bits(b + 34, part * 16 + eight % 4 * 3, 3)
                  : b[eight] + 256 * ref_bits(b + 32, eight * 4, 3);
  if (dtype == TD_IQ1_M) {
    int bits = 0;
    for (uint32_t i = 0; i < 4; i++)
      bits |= ref_bits(b + 48, 16 * i + 12, 4) << 4 * i;
    d = ref_half((uint16_t)bits);
    code = ref_bits(b + 48, c / 64 * 16 + c / 16 % 4 * 3, 3);
    is_less = ref_bit(b + 32, eight * 4 + 3);
  }
  const int value = (ref_iq1[index] >> 2 * (c % 8) & 3) - 1;
  return d * (1 + 2 * code) * (value + (is_less ? -0.125 : 0.125));
}

static inline double ref_block256(td_dtype dtype, const uint8_t *b, uint32_t c) {
  const uint32_t part = c / 32;
  int scale, offset;
  ref_k4(b + 4, part, &scale, &offset);
  const double low = ref_half_at(b + 2) * offset;
  switch (dtype) {
  case TD_Q2_K:
    return ref_half_at(b + 80) * (b[c / 16] & 15) * ref_two(b + 16, c) -
           ref_half_at(b + 82) * (b[c / 16] >> 4);
  case TD_Q3_K: return ref_q3(b, c);
  case TD_Q4_K: {
    const uint8_t byte = b[16 + c / 64 * 32 + c % 32];
    return ref_half_at(b) * scale * (part % 2 ? byte >> 4 : byte & 15) - low;
  }
  case TD_Q5_K: {
    const uint8_t byte = b[48 + c / 64 * 32 + c % 32];
    const int high = b[16 + c % 32] >> part & 1;
    return ref_half_at(b) * scale * ((part % 2 ? byte >> 4 : byte & 15) + 16 * high) - low;
  }
  case TD_Q6_K: return ref_q6(b, c);
  case TD_TQ2_0: return ref_half_at(b + 64) * (ref_two(b, c) - 1);
  case TD_TQ1_0: return ref_tq1(b, c);
  case TD_IQ1_S:
  case TD_IQ1_M: return ref_iq1_grid(dtype, b, c);
  default: return ref_signed_grid(dtype, b, c);
  case TD_IQ4_XS: {
    const int four = part % 2 ? b[4 + part / 2] >> 4 : b[4 + part / 2] & 15;
    const int two = (b[2] | b[3] << 8) >> 2 * part & 3;
    const int code = ref_half_byte(b + 8 + 16 * part, c % 32);
    return ref_half_at(b) * (four + 16 * two - 32) * ref_iq4[code];
  }
  }
}

static inline double ref_block_at(const td_weight *w, uint32_t r, uint32_t c) {
  const td_block block = td_dtype_block(w->dtype);
  const uint8_t *row = (const uint8_t *)w->data + (size_t)r * (w->cols / block.cols) * block.bytes;
  const uint8_t *b = row + (size_t)(c / block.cols) * block.bytes;
  return block.cols == 32 ? ref_block32(w->dtype, b, c % 32) : ref_block256(w->dtype, b, c % 256);
}

// Random blocks; their F16 numbers are finite and of like size.
static inline ref_weight ref_make_blocks(uint64_t *state, const ref_block_format *f, uint32_t rows,
                                         uint32_t cols) {
  ref_weight r = {.w = {.dtype = f->dtype, .rows = rows, .cols = cols}};
  const td_block block = td_dtype_block(f->dtype);
  const size_t n_bytes = td_weight_data_bytes(&r.w);
  r.data = ref_guarded(n_bytes);
  r.w.data = r.data.data;
  uint8_t *b = r.data.data;
  for (size_t i = 0; i < n_bytes; i++)
    b[i] = (uint8_t)(ref_next(state) >> 40);
  for (; b < (uint8_t *)r.data.data + n_bytes; b += block.bytes) {
    const int places[] = {f->scale_at, f->offset_at};
    for (int i = 0; i < 2; i++) // 2^-9 to 2^-7, of either sign
      if (places[i] >= 0) b[places[i] + 1] = (uint8_t)((b[places[i] + 1] & 0x87) | 0x18);
    if (f->dtype == TD_IQ1_M) { // four bits each of the last words; the same sizes
      b[55] = (uint8_t)((b[55] & 0x8f) | 0x10);
      b[53] = (uint8_t)(b[53] | 0x80);
    }
    if (f->dtype == TD_MXFP4) b[0] = (uint8_t)(112 + b[0] % 16);
  }
  return r;
}
