// tests/cuda_emu/mma.cpp - a warp's products of small matrices in registers. It touches nothing but
// what lanes bring, and no sanitizer watches it.
#include "cuda_fp16.h"
#include "emu.h"

#include <array>

// What a lane brings, decoded: N elements of each register, of a's rows g and g + 8 side by side.
template <class T, unsigned N> struct operands { T a[2][N][2], b[2][N]; };

// Rows g and g + 8 of c, columns p and p + 1, each sum in the order of k.
template <class T, unsigned N> static void multiply(T (&c)[4], const operands<T, N> &mine) {
  typedef T four __attribute__((vector_size(16)));
  static_assert(sizeof mine <= EMU_SLOT_BYTES, "");
  const unsigned char *slots = emu_exchange(&mine, sizeof mine);
  const auto of = [slots](unsigned lane) {
    return reinterpret_cast<const operands<T, N> *>(slots + lane * EMU_SLOT_BYTES);
  };
  const unsigned lane = threadIdx.x % EMU_WARP, g = lane / 4, p = lane % 4 * 2;
  four sums = {c[0], c[1], c[2], c[3]};
  for (unsigned half = 0; half < 2; half++) {
    for (unsigned k = 0; k < 4; k++) {
      const auto *x = of(g * 4 + k), *y = of(p * 4 + k), *z = of(p * 4 + 4 + k);
      for (unsigned e = 0; e < N; e++) {
        const T upper = x->a[half][e][0], lower = x->a[half][e][1];
        const T left = y->b[half][e], right = z->b[half][e];
        sums += four{upper, upper, lower, lower} * four{left, right, left, right};
      }
    }
  }
  std::memcpy(c, &sums, sizeof sums);
}

template <class T, unsigned N, class Decode>
static void mma(T (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Decode decode) {
  operands<T, N> mine;
  const auto element = [=](uint32_t bits, unsigned e) { return decode(bits >> 32 / N * e); };
  for (unsigned half = 0; half < 2; half++) {
    for (unsigned e = 0; e < N; e++) {
      for (unsigned row = 0; row < 2; row++)
        mine.a[half][e][row] = element(a[2 * half + row], e);
      mine.b[half][e] = element(b[half], e);
    }
  }
  multiply(c, mine);
}

const float *emu_e4m3_values() {
  static const auto values = [] {
    std::array<float, 256> v;
    for (unsigned code = 0; code < 256; code++) {
      const int exponent = code >> 3 & 15, mantissa = code & 7;
      const float m = exponent ? std::ldexp(8.0f + static_cast<float>(mantissa), exponent - 10)
                               : std::ldexp(static_cast<float>(mantissa), -9);
      v[code] = (code & 0x7f) == 0x7f ? NAN : code & 0x80 ? -m : m;
    }
    return v;
  }();
  return values.data();
}

// Products are exact, as on hardware; sums are FP32, of which hardware keeps fewer bits (some 14 on
// sm_90, arXiv 2412.19437, 3.3.2).
void emu_mma_e4m3(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  const float *value = emu_e4m3_values();
  mma<float, 4>(c, a, b, [value](uint32_t bits) { return value[bits & 255]; });
}

void emu_mma_i8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  mma<int32_t, 4>(
      c, a, b, [](uint32_t bits) { return static_cast<int32_t>(static_cast<int8_t>(bits & 255)); });
}

void emu_mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  mma<float, 2>(c, a, b, [](uint32_t bits) { return emu_bf16(static_cast<uint16_t>(bits)); });
}

void emu_mma_f16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  mma<float, 2>(c, a, b, [](uint32_t bits) {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
  });
}

// Sums are F16 between instructions: rounded to nearest, infinite from 65520 on. Within one they are
// FP32, of which hardware keeps fewer bits, but more than F16 has.
void emu_mma_f16_sums(uint32_t (&c)[2], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  float sums[4];
  for (unsigned i = 0; i < 4; i++)
    sums[i] = __half2float(__ushort_as_half(static_cast<uint16_t>(c[i / 2] >> i % 2 * 16)));
  emu_mma_f16(sums, a, b);
  for (unsigned i = 0; i < 2; i++)
    c[i] = __half_as_ushort(__float2half_rn(sums[2 * i])) |
           static_cast<uint32_t>(__half_as_ushort(__float2half_rn(sums[2 * i + 1]))) << 16;
}
