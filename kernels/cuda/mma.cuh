// kernels/cuda/mma.cuh - the mma.sync tensor core instruction, from sm_80 up, and the loads of its
// fragments from shared memory.
#pragma once

#include "kernels/cuda/cp_async.cuh"

// c += a b over a warp, a 16x16 and b 16x8 in BF16, c 16x8 in f32. With g = lane / 4 and p = lane %
// 4 * 2, each register holds two elements, the lower index first:
//   a[0] (g, p..)  a[1] (g + 8, p..)  a[2] (g, p + 8..)  a[3] (g + 8, p + 8..)     (row, k)
//   b[0] (p.., g)  b[1] (p + 8.., g)                                               (k, column)
//   c[0], c[1] (g, p..)  c[2], c[3] (g + 8, p..)                                   (row, column)
__device__ inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if defined(__CUDA_ARCH__)
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#elif !defined(__CUDACC__)
  emu_mma_bf16(c, a, b);
#endif
}

// The same with a and b in F16.
__device__ inline void mma_f16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if defined(__CUDA_ARCH__)
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#elif !defined(__CUDACC__)
  emu_mma_f16(c, a, b);
#endif
}

// Kernels with sums in F16 are of GeForce, none of which has these compute capabilities.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
#define TD_HAS_F16_SUMS 0
#else
#define TD_HAS_F16_SUMS 1
#endif

// The same with c in F16, too: rounded after every instruction, and infinite from 65520 on. c[0]
// has (g, p..), c[1] (g + 8, p..). GeForce multiplies so at twice the speed.
__device__ inline void mma_f16(uint32_t (&c)[2], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if defined(__CUDA_ARCH__)
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 "
               "{%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
               : "+r"(c[0]), "+r"(c[1])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#elif !defined(__CUDACC__)
  emu_mma_f16_sums(c, a, b);
#endif
}

// Element e of a block of sums, in the order of those in f32.
__device__ inline float f16_sum(const uint32_t (&c)[2], int e) {
  return f32_from_f16(static_cast<uint16_t>(c[e / 2] >> e % 2 * 16));
}

// So that sums in F16 are finite, factors are first multiplied by a power of two, the one that
// brings magnitudes of up to `most` below 2^LOG and no further than to half of that, but at most by
// 2^MOST: BF16 remains exact down to 2^-17. `factor * undo` is 1.
struct power {
  float factor, undo;
};

template <int LOG, int MOST = 126> __device__ inline power power_below(float most) {
  static_assert(LOG > 2 && MOST <= 126, ""); // infinity times it is not NaN
  const uint32_t exponent = at_most(253 + LOG - (__float_as_uint(most) >> 23), 127 + MOST);
  return {__uint_as_float(exponent << 23), __uint_as_float((254 - exponent) << 23)};
}

// The larger of `most` and the magnitudes of a pair of BF16.
__device__ inline float most_of(float most, uint32_t pair) {
  return fmaxf(
      most, fmaxf(fabsf(__uint_as_float(pair << 16)), fabsf(__uint_as_float(pair & 0xffff0000u))));
}

__device__ inline float most_of(float most, uint4 pairs) {
  return most_of(most_of(most_of(most_of(most, pairs.x), pairs.y), pairs.z), pairs.w);
}

__device__ inline uint32_t f16x2_from_bf16x2(uint32_t pair, float factor) {
  return f16x2_from_f32(__uint_as_float(pair << 16) * factor,
                        __uint_as_float(pair & 0xffff0000u) * factor);
}

__device__ inline uint4 f16x8_from_bf16x8(uint4 v, float factor) {
  return {f16x2_from_bf16x2(v.x, factor), f16x2_from_bf16x2(v.y, factor),
          f16x2_from_bf16x2(v.z, factor), f16x2_from_bf16x2(v.w, factor)};
}

// c += a b over a warp, a 16x32 and b 32x8 in E4M3, c 16x8 in f32 as above; from sm_89 up. With g =
// lane / 4 and q = lane % 4 * 4, each register holds four elements, the lowest index first:
//   a[0] (g, q..)  a[1] (g + 8, q..)  a[2] (g, q + 16..)  a[3] (g + 8, q + 16..)   (row, k)
//   b[0] (q.., g)  b[1] (q + 16.., g)                                              (k, column)
// So in pairs of elements the fragments are those of mma_bf16, and load_matrices loads them.
__device__ inline void mma_8bit(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#elif !defined(__CUDACC__)
  emu_mma_e4m3(c, a, b);
#endif
}

// The same with a, b and c in integers; from sm_80 up.
__device__ inline void mma_8bit(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#if defined(__CUDA_ARCH__)
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#elif !defined(__CUDACC__)
  emu_mma_i8(c, a, b);
#endif
}

// Loads four 8x8 matrices from shared memory. Lanes 8 i to 8 i + 7 pass the rows of matrix i, each
// 16-byte aligned. Register i gets elements p and p + 1 of its row g or, transposed, of its column
// g.
__device__ inline void load_matrices(uint32_t (&r)[4], const uint16_t *row) {
#if defined(__CUDA_ARCH__)
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
#elif !defined(__CUDACC__)
  emu_load_matrices(r, row, false);
#endif
}

__device__ inline void load_matrices_turned(uint32_t (&r)[4], const uint16_t *row) {
#if defined(__CUDA_ARCH__)
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
#elif !defined(__CUDACC__)
  emu_load_matrices(r, row, true);
#endif
}

// Reductions over the four lanes that share rows of c.
__device__ inline float quad_max(float v) {
  v = fmaxf(v, __shfl_xor_sync(TD_FULL_WARP, v, 1));
  return fmaxf(v, __shfl_xor_sync(TD_FULL_WARP, v, 2));
}

__device__ inline float quad_sum(float v) {
  v += __shfl_xor_sync(TD_FULL_WARP, v, 1);
  return v + __shfl_xor_sync(TD_FULL_WARP, v, 2);
}
