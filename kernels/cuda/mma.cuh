// kernels/cuda/mma.cuh - the tensor core instruction the kernels use, from sm_80 up, and what
// brings its fragments from shared memory.
#ifndef KERNELS_CUDA_MMA_CUH
#define KERNELS_CUDA_MMA_CUH

#include "kernels/cuda/copy.cuh"

// c += a b over a warp, a 16x16 and b 16x8 in BF16, c 16x8 in f32. With g = lane / 4 and
// p = lane % 4 * 2, two elements a register, the lower first:
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

// Four 8x8 matrices of shared memory, to which lanes 8 i to 8 i + 7 give the rows of matrix i, each
// aligned to 16 bytes. Register i has elements p and p + 1 of row g of it or, turned, of column g.
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

// Two elements as they stand in a row of shared memory; at is even.
__device__ inline uint32_t pair_at(const uint16_t *row, uint32_t at) {
  return *reinterpret_cast<const uint32_t *>(row + at);
}

// a's registers for rows [0, 16) and columns [k, k + 16) of a matrix in shared memory.
__device__ inline void load_a(uint32_t (&a)[4], const uint16_t *m, uint32_t stride, uint32_t k) {
  uint32_t g = threadIdx.x % WARP / 4, p = threadIdx.x % 4 * 2;
  a[0] = pair_at(m + g * stride, k + p);
  a[1] = pair_at(m + (g + 8) * stride, k + p);
  a[2] = pair_at(m + g * stride, k + p + 8);
  a[3] = pair_at(m + (g + 8) * stride, k + p + 8);
}

// b's registers for columns [0, 8) and k in [k, k + 16) of a matrix kept as [column][k].
__device__ inline void load_b(uint32_t (&b)[2], const uint16_t *m, uint32_t stride, uint32_t k) {
  uint32_t g = threadIdx.x % WARP / 4, p = threadIdx.x % 4 * 2;
  b[0] = pair_at(m + g * stride, k + p);
  b[1] = pair_at(m + g * stride, k + p + 8);
}

#endif
