// kernels/cuda/dequant8.cuh - dequantizes eight weights of a row at a time in registers, with their
// scales, to BF16 pairs for tensor cores or to floats.
#pragma once

#include "kernels/cuda/blocks.cuh"

template <int READ> constexpr bool IS_FP4 = READ == TD_CU_READ_MXFP4 || READ == TD_CU_READ_NVFP4;
template <int READ>
constexpr int BITS = READ == TD_CU_READ_F32                              ? 32
                     : READ == TD_CU_READ_F16 || READ == TD_CU_READ_BF16 ? 16
                     : READ == TD_CU_READ_F8 || READ == TD_CU_READ_I8    ? 8
                                                                         : 4;

// Address of a row's scales, for all td_cu_read but TD_CU_READ_ANY.
struct row_scales {
  const char *first;
  uint32_t shift; // the group's index is column >> shift
  td_dtype dtype;
};

// Bytes per scale.
template <int READ> __device__ inline uint32_t scale_bytes(td_dtype dtype) {
  if (IS_FP4<READ>) return 1;
  return READ == TD_CU_READ_I4 && dtype != TD_F32 ? 2 : 4;
}

// A shift, because a division takes as long as decoding eight weights.
__device__ inline uint32_t group_shift(const td_weight &w) {
  return w.scale_cols >= w.cols ? 31 : 31 - __clz(static_cast<int>(w.scale_cols));
}

template <int READ> __device__ inline row_scales scales_of_row(const td_weight &w, uint32_t row) {
  row_scales s = {};
  s.shift = group_shift(w);
  s.dtype = w.scale_dtype;
  bool is_power = (w.scale_rows & (w.scale_rows - 1)) == 0;
  size_t at = is_power ? row >> (31 - __clz(static_cast<int>(w.scale_rows))) : row / w.scale_rows;
  at *= weight_groups(w);
  s.first = static_cast<const char *>(w.scale) + at * scale_bytes<READ>(s.dtype);
  return s;
}

// Loads the scales of N groups in stored form. Conversion is separate, so that the load does not
// stall.
template <int READ, int N>
__device__ inline void load_scales(const row_scales &s, const uint32_t (&group)[N],
                                   uint32_t (&out)[N]) {
  const uint8_t *bytes = reinterpret_cast<const uint8_t *>(s.first);
  const uint16_t *halves = reinterpret_cast<const uint16_t *>(s.first);
  const uint32_t *words = reinterpret_cast<const uint32_t *>(s.first);
  if (IS_FP4<READ>) {
    for (int i = 0; i < N; i++)
      out[i] = __ldg(bytes + group[i]);
  } else if (READ == TD_CU_READ_I4 && s.dtype != TD_F32) {
    for (int i = 0; i < N; i++)
      out[i] = __ldg(halves + group[i]);
  } else {
    for (int i = 0; i < N; i++)
      out[i] = __ldg(words + group[i]);
  }
}

// Loads N words (1, 2 or 4), aligned to their total size.
template <int N> __device__ inline void load_words(const void *from, uint32_t (&out)[N]) {
  if constexpr (N == 1) {
    out[0] = __ldg(static_cast<const uint32_t *>(from));
  } else if constexpr (N == 2) {
    uint2 v = __ldg(static_cast<const uint2 *>(from));
    out[0] = v.x, out[1] = v.y;
  } else {
    uint4 v = __ldg(static_cast<const uint4 *>(from));
    out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
  }
}

// Loads N scales of EACH bytes, aligned to their total size.
template <int EACH, int N> __device__ inline void load_each(const char *from, uint32_t (&out)[N]) {
  uint32_t words[N * EACH / 4];
  load_words(from, words);
  for (uint32_t i = 0; i < N; i++) {
    uint32_t at = i * EACH;
    out[i] = EACH == 4 ? words[i] : words[at / 4] >> at % 4 * 8 & ((1u << 8 * EACH) - 1);
  }
}

// load_scales for consecutive groups whose scales are aligned to their total size.
template <int READ, int N>
__device__ inline void load_scales_at_once(const row_scales &s, uint32_t group,
                                           uint32_t (&out)[N]) {
  const char *from = s.first + group * scale_bytes<READ>(s.dtype);
  if (READ == TD_CU_READ_I4 && s.dtype != TD_F32) {
    load_each<2>(from, out);
  } else {
    load_each<4>(from, out);
  }
}

template <int READ, int N>
__device__ inline void scale_values(td_dtype dtype, const uint32_t (&bits)[N], float (&out)[N]) {
  if (READ == TD_CU_READ_MXFP4) {
    for (int i = 0; i < N; i++)
      out[i] = f32_from_e8m0(bits[i]);
  } else if (READ == TD_CU_READ_NVFP4) {
    for (int i = 0; i < N; i++)
      out[i] = f32_from_e4m3(bits[i]);
  } else if (READ == TD_CU_READ_I4 && dtype == TD_F16) {
    for (int i = 0; i < N; i++)
      out[i] = f32_from_f16(static_cast<uint16_t>(bits[i]));
  } else {
    uint32_t shift = READ == TD_CU_READ_I4 && dtype == TD_BF16 ? 16 : 0;
    for (int i = 0; i < N; i++)
      out[i] = __uint_as_float(bits[i] << shift);
  }
}

template <int READ> __device__ inline float scale_in(const row_scales &s, uint32_t col) {
  uint32_t bits[1];
  float value[1];
  load_scales<READ>(s, {col >> s.shift}, bits);
  scale_values<READ>(s.dtype, bits, value);
  return value[0];
}

__device__ inline void floats_from_bf16x8(uint4 v, float *out) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
  for (int i = 0; i < 4; i++) {
    out[2 * i] = __uint_as_float(words[i] << 16);
    out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}

// Eight weights of a row in stored form; empty where values are read one by one.
template <int READ> struct raw8 {};
template <> struct raw8<TD_CU_READ_F32> { uint4 low, high; };
template <> struct raw8<TD_CU_READ_F16> { uint4 v; };
template <> struct raw8<TD_CU_READ_BF16> { uint4 v; };
template <> struct raw8<TD_CU_READ_F8> { uint2 v; };
template <> struct raw8<TD_CU_READ_I8> { uint2 v; };
template <> struct raw8<TD_CU_READ_I4> { uint32_t v; };
template <> struct raw8<TD_CU_READ_MXFP4> { uint32_t v; };
template <> struct raw8<TD_CU_READ_NVFP4> { uint32_t v; };

// Bytes of n weights, a multiple of eight.
template <int READ> __device__ inline size_t bytes_of(size_t n) {
  return n / 8 * BITS<READ>;
}

// Load with a streaming hint: this SM does not need the data again, which leaves the cache to other
// data.
__device__ inline uint4 load_once(const uint4 *from) {
#if defined(__CUDA_ARCH__)
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(__cvta_generic_to_global(from)));
  return v;
#else
  return __ldg(from);
#endif
}

__device__ inline uint2 load_once(const uint2 *from) {
#if defined(__CUDA_ARCH__)
  uint2 v;
  asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
      : "=r"(v.x), "=r"(v.y)
      : "l"(__cvta_generic_to_global(from)));
  return v;
#else
  return __ldg(from);
#endif
}

// Cached, because the next loads use the other words of the 32-byte sector.
__device__ inline uint32_t load_once(const uint32_t *from) {
  return __ldg(from);
}

// READ is a td_cu_read whose requirements hold.
template <int READ> __device__ inline raw8<READ> load8(const char *from) {
  if constexpr (READ == TD_CU_READ_ANY) {
    return {};
  } else if constexpr (READ == TD_CU_READ_F32) {
    const uint4 *halves = reinterpret_cast<const uint4 *>(from);
    return {load_once(halves), load_once(halves + 1)};
  } else {
    return {load_once(reinterpret_cast<const decltype(raw8<READ>::v) *>(from))};
  }
}

template <int READ>
__device__ inline raw8<READ> load8(const td_weight &w, uint32_t row, uint32_t k) {
  return load8<READ>(static_cast<const char *>(w.data) +
                     bytes_of<READ>(static_cast<size_t>(row) * w.cols + k));
}

// BF16 terms needed to represent a format's weights exactly: BF16 has 8 bits of mantissa, F16 11
// and F32 24.
template <int READ>
constexpr int N_TERMS = READ == TD_CU_READ_F32   ? 3
                        : READ == TD_CU_READ_F16 ? 2
                                                 : 1;

// Whether pair i consists of weights i and i + 4, which is how 4-bit codes unpack, instead of
// weights 2 i and 2 i + 1.
template <int READ> constexpr bool IN_FOURS = BITS<READ> == 4;

// Reorders eight BF16 values from sequential order to IN_FOURS order.
__device__ inline void order_in_fours(uint32_t (&v)[4]) {
  const uint32_t in[4] = {v[0], v[1], v[2], v[3]};
  for (int i = 0; i < 4; i++)
    v[i] = __byte_perm(in[i / 2], in[2 + i / 2], i % 2 ? 0x7632 : 0x5410);
}

__device__ inline void order_from_fours(uint32_t (&v)[4]) {
  const uint32_t in[4] = {v[0], v[1], v[2], v[3]};
  for (int i = 0; i < 4; i++)
    v[i] = __byte_perm(in[i % 2 * 2], in[i % 2 * 2 + 1], i < 2 ? 0x5410 : 0x7632);
}

// The upper halves of two floats: BF16 by truncation, exact where the lower halves are zero.
__device__ inline uint32_t bf16x2_cut(float low, float high) {
  return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
}

// Splits two values into sums of BF16 terms; each term is the truncated remainder. Exact, except
// for F32 weights whose last term would be below BF16's range (values below 2^-110).
template <int N>
__device__ inline void terms_of(float low, float high, int i, uint32_t (&out)[N][4]) {
  for (int n = 0; n < N; n++) {
    out[n][i] = bf16x2_cut(low, high);
    low -= __uint_as_float(__float_as_uint(low) & 0xffff0000u);
    high -= __uint_as_float(__float_as_uint(high) & 0xffff0000u);
  }
}

// E4M3 codes 2 i and 2 i + 1 of a word.
__device__ inline uint32_t bf16x2_from_e4m3(uint32_t codes, int i) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint32_t pair = f16x2_from_e4m3x2(codes >> 16 * i);
  return bf16x2_from_f32(f32_from_f16(static_cast<uint16_t>(pair)),
                         f32_from_f16(static_cast<uint16_t>(pair >> 16)));
#else
  // Exponent bias differs from BF16's by 120; multiplying by 2^120 is exact for subnormals too.
  uint32_t spread = __byte_perm(codes, 0, i ? 0x3424 : 0x1404);
  return bf16x2_fma(and_or(spread >> 4, 0x07f007f0u, spread & 0x80008000u), 0x7b807b80u,
                    0x80008000u);
#endif
}

// NaN where E4M3 codes are, which conversions by shifting do not see.
__device__ inline void keep_nan(uint2 codes, uint32_t (&out)[4]) {
  uint32_t carried = ((codes.x & 0x7f7f7f7fu) + 0x01010101u) |
                     ((codes.y & 0x7f7f7f7fu) + 0x01010101u);
  if (carried & 0x80808080u) {
    for (int i = 0; i < 8; i++) {
      uint32_t code = (i < 4 ? codes.x : codes.y) >> i % 4 * 8;
      if ((code & 0x7f) == 0x7f) out[i / 2] |= 0x7fffu << i % 2 * 16;
    }
  }
}

__device__ inline void pairs_from_e4m3(uint2 codes, uint32_t (&out)[4]) {
  for (int i = 0; i < 4; i++)
    out[i] = bf16x2_from_e4m3(i < 2 ? codes.x : codes.y, i % 2);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 890
  keep_nan(codes, out);
#endif
}

// As F16, divided by 2^E4M3_AS_F16_LOG, which is what the exponent biases differ by; exact.
enum { E4M3_AS_F16_LOG = 8 };
__device__ inline void f16_pairs_from_e4m3(uint2 codes, uint32_t (&out)[4]) {
  for (int i = 0; i < 4; i++) {
    const uint32_t word = i < 2 ? codes.x : codes.y;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    asm("mul.rn.f16x2 %0, %1, %2;"
        : "=r"(out[i])
        : "r"(f16x2_from_e4m3x2(word >> i % 2 * 16)), "r"(0x1c001c00u)); // 2^-8
#else
    const uint32_t spread = __byte_perm(word, 0, i % 2 ? 0x3424 : 0x1404);
    out[i] = and_or(spread >> 1, 0x3f803f80u, spread & 0x80008000u);
#endif
  }
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 890
  keep_nan(codes, out);
#endif
}

// Signed bytes: 128 + the lower seven bits, minus 128, or minus 256 if the sign is set.
__device__ inline uint32_t bf16x2_from_i8(uint32_t codes, int i) {
  uint32_t spread = __byte_perm(codes, 0, i ? 0x4342 : 0x4140);
  return bf16x2_fma(and_or(spread, 0x007f007fu, 0x43004300u), 0x3f803f80u,
                    and_or(spread, 0x00800080u, 0xc300c300u));
}

// Codes 2 i and 2 i + 1 of a word of bytes.
template <int READ> __device__ inline uint32_t bf16x2_of_bytes(uint32_t codes, int i) {
  static_assert(READ == TD_CU_READ_I8 || READ == TD_CU_READ_F8, "");
  if (READ == TD_CU_READ_I8) return bf16x2_from_i8(codes, i);
  uint32_t pair = bf16x2_from_e4m3(codes, i);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 890
  for (int j = 0; j < 2; j++)
    if ((codes >> (16 * i + 8 * j) & 0x7f) == 0x7f) pair |= 0x7fffu << 16 * j;
#endif
  return pair;
}

// Both codes of a byte, the lower one in bits 0 to 3, the other one in bits 16 to 19.
__device__ inline uint32_t spread_nibbles(uint32_t byte) {
  return byte * 0x1001u; // bits between them are left over
}

// Codes i and i + 4 of a word; less_zero is a pair of -(128 + the zero point).
__device__ inline uint32_t bf16x2_from_i4(uint32_t codes, int i, uint32_t less_zero) {
  return bf16x2_fma(and_or(codes >> 4 * i, 0x000f000fu, 0x43004300u), 0x3f803f80u, less_zero);
}

__device__ inline uint32_t bf16x2_from_i4_pair(uint32_t byte, uint32_t less_zero) {
  return bf16x2_from_i4(spread_nibbles(byte), 0, less_zero);
}

__device__ inline uint32_t less_zero_point(uint32_t zero) {
  return (0xc300u + zero) * 0x00010001u;
}

// Rotates v left by n bits.
__device__ inline uint32_t transposed(uint32_t v, uint32_t n) {
  return n ? v << n | v >> (32 - n) : v;
}

// Pairs i and i + 4 of E2M1, whose exponent bias differs from BF16's by 126, times factor / 2^126.
// First the signs are moved to nine bits above the last bit of the magnitudes, for half of the
// codes at a time; then one rotation brings each pair into place.
__device__ inline void pairs_from_e2m1(uint32_t codes, uint32_t factor, uint32_t (&out)[4]) {
  uint32_t signs = transposed(codes, 26);
  uint32_t low = select_bits(0x00880088u, codes, signs);
  uint32_t high = select_bits(0x88008800u, codes, signs);
  for (int i = 0; i < 4; i++)
    out[i] = bf16x2_fma(transposed(i < 2 ? low : high, 12 - 4 * i) & 0x81c081c0u, factor,
                        0x80008000u);
}

// Both codes of a byte.
__device__ inline uint32_t bf16x2_from_e2m1_pair(uint32_t byte) {
  const uint32_t codes = spread_nibbles(byte);
  return bf16x2_fma(and_or(codes << 6, 0x01c001c0u, codes << 12 & 0x80008000u), 0x7e807e80u,
                    0x80008000u);
}

// Converts the result of load8 to BF16 pairs. less_zero is for TD_CU_READ_I4.
template <int READ>
__device__ inline void pairs8(const raw8<READ> &raw, uint32_t less_zero,
                              uint32_t (&out)[N_TERMS<READ>][4]) {
  if constexpr (READ == TD_CU_READ_F32) {
    const uint4 v[2] = {raw.low, raw.high};
    for (int i = 0; i < 2; i++) {
      terms_of(__uint_as_float(v[i].x), __uint_as_float(v[i].y), 2 * i, out);
      terms_of(__uint_as_float(v[i].z), __uint_as_float(v[i].w), 2 * i + 1, out);
    }
  } else if constexpr (READ == TD_CU_READ_F16) {
    const uint32_t v[4] = {raw.v.x, raw.v.y, raw.v.z, raw.v.w};
    for (int i = 0; i < 4; i++)
      terms_of(f32_from_f16(static_cast<uint16_t>(v[i])),
               f32_from_f16(static_cast<uint16_t>(v[i] >> 16)), i, out);
  } else if constexpr (READ == TD_CU_READ_BF16) {
    out[0][0] = raw.v.x, out[0][1] = raw.v.y, out[0][2] = raw.v.z, out[0][3] = raw.v.w;
  } else if constexpr (READ == TD_CU_READ_F8) {
    pairs_from_e4m3(raw.v, out[0]);
  } else if constexpr (IS_FP4<READ>) {
    pairs_from_e2m1(raw.v, 0x7e807e80u, out[0]);
  } else {
    for (int i = 0; i < 4; i++) {
      if constexpr (READ == TD_CU_READ_I8)
        out[0][i] = bf16x2_from_i8(i < 2 ? raw.v.x : raw.v.y, i % 2);
      if constexpr (READ == TD_CU_READ_I4) out[0][i] = bf16x2_from_i4(raw.v, i, less_zero);
    }
  }
}

// Converts four codes, the lowest byte first.
__device__ inline void floats_from_e4m3x4(uint32_t codes, float *out) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  for (int i = 0; i < 2; i++) {
    uint32_t pair = f16x2_from_e4m3x2(codes >> 16 * i);
    out[2 * i] = f32_from_f16(static_cast<uint16_t>(pair));
    out[2 * i + 1] = f32_from_f16(static_cast<uint16_t>(pair >> 16));
  }
#else
  // Bytes 0 and 2, then 1 and 3, as F16; multiplied by 256 for the difference in exponent bias.
  uint32_t even = (codes << 8 & 0x80008000u) | (codes << 7 & 0x3f803f80u);
  uint32_t odd = (codes & 0x80008000u) | (codes >> 1 & 0x3f803f80u);
  out[0] = f32_from_f16(static_cast<uint16_t>(even)) * 256.0f;
  out[1] = f32_from_f16(static_cast<uint16_t>(odd)) * 256.0f;
  out[2] = f32_from_f16(static_cast<uint16_t>(even >> 16)) * 256.0f;
  out[3] = f32_from_f16(static_cast<uint16_t>(odd >> 16)) * 256.0f;
  bool any_nan = ((codes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
  for (int i = 0; any_nan && i < 4; i++)
    out[i] = f32_from_e4m3(codes >> 8 * i & 0xff);
#endif
}

// Converts the result of load8 for columns from k on to floats, without scales; 0 past the last
// column.
template <int READ>
__device__ inline void decode8(const td_weight &w, uint32_t row, uint32_t k, const raw8<READ> &raw,
                               float *out) {
  if constexpr (READ == TD_CU_READ_ANY) {
    if (gguf_block(w.dtype).cols) return gguf_values8(w, row, k, out);
    for (uint32_t i = 0; i < 8; i++)
      out[i] = k + i < w.cols ? dequant_at(w, row, k + i) : 0;
  } else if constexpr (READ == TD_CU_READ_F8) {
    floats_from_e4m3x4(raw.v.x, out);
    floats_from_e4m3x4(raw.v.y, out + 4);
  } else {
    uint32_t pairs[1][4], zero = 0;
    if (READ == TD_CU_READ_I4) zero = less_zero_point(zero_at(w, row, k >> group_shift(w)));
    pairs8<READ>(raw, zero, pairs);
    if (IN_FOURS<READ>) order_from_fours(pairs[0]);
    floats_from_bf16x8({pairs[0][0], pairs[0][1], pairs[0][2], pairs[0][3]}, out);
  }
}

// Multiplies eight weights of a row, from column k on, by their scales.
__device__ inline void scale_each(const td_weight &w, uint32_t row, uint32_t k, float *v) {
  for (uint32_t i = 0; w.scale && i < 8 && k + i < w.cols; i++)
    v[i] *= scale_at(w, row, (k + i) / w.scale_cols);
}

// Stores eight values as BF16 to a 16-byte aligned address.
__device__ inline void put8(uint16_t *to, const float *v) {
  put_run(to, {bf16x2_from_f32(v[0], v[1]), bf16x2_from_f32(v[2], v[3]),
               bf16x2_from_f32(v[4], v[5]), bf16x2_from_f32(v[6], v[7])});
}

// Eight activations of a row of n, from column k on, one by one; 0 past the end.
__device__ inline void activations8(const uint16_t *x, uint32_t k, uint32_t n, float *out) {
  for (uint32_t i = 0; i < 8; i++)
    out[i] = k + i < n ? f32_from_bf16(x[k + i]) : 0;
}
