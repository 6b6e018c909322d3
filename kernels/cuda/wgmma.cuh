// kernels/cuda/wgmma.cuh - the wgmma tensor core instructions of sm_90a. A warpgroup of 128 threads
// issues them asynchronously. Matrices are BF16 (E4M3, INT8) in shared memory, in panels
// (swizzle.cuh) aligned to 1024 bytes.
#pragma once

#include "kernels/cuda/cp_async.cuh"
#include "kernels/cuda/swizzle.cuh"

// Whether this compilation pass generates the instructions.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDACC__)
#define TD_HAS_WGMMA 1
#else
#define TD_HAS_WGMMA 0
#endif

// Whether the library has code with these instructions and a GPU of that compute capability, ten
// times, runs it.
inline bool runs_wgmma(int capability) {
#if TD_CUDA_SM90A
  return capability == 90;
#else
  (void)capability;
  return false;
#endif
}

enum { PANEL_ROW_BYTES = PANEL * 2, EIGHT_ROWS_BYTES = 8 * PANEL_ROW_BYTES };

// Descriptor of a matrix that begins at element m, in panels of n_rows rows (PTX ISA, "Matrix
// descriptor"): 128-byte swizzle, distance between groups of eight rows, distance between panels.
__device__ inline uint64_t wgmma_matrix(const uint16_t *m, uint32_t n_rows) {
  const uint64_t swizzle_128 = 1ull << 62;
  uint64_t to_panel = n_rows * PANEL_ROW_BYTES >> 4, to_rows = EIGHT_ROWS_BYTES >> 4;
  return (shared_address(m) & 0x3ffffu) >> 4 | to_panel << 16 | to_rows << 32 | swizzle_128;
}

// Required before the first multiplication and after registers it uses were written.
__device__ inline void wgmma_begin() {
#if defined(__CUDA_ARCH__) && TD_HAS_WGMMA
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#elif !defined(__CUDACC__)
  emu_wgmma_begin();
#endif
}

// Makes a thread's writes to shared memory visible to wgmma; call before the barrier.
__device__ inline void wgmma_publish() {
#if defined(__CUDA_ARCH__) && TD_HAS_WGMMA
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#elif !defined(__CUDACC__)
  emu_wgmma_publish();
#endif
}

// Ends a group of issued multiplications, which can then be waited for.
__device__ inline void wgmma_commit() {
#if defined(__CUDA_ARCH__) && TD_HAS_WGMMA
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#elif !defined(__CUDACC__)
  emu_wgmma_commit();
#endif
}

// Waits for all committed groups but the last PENDING. Their sums are valid in these registers only
// after this.
template <int PENDING, int N> __device__ inline void wgmma_wait(float (&c)[N][4]) {
#if defined(__CUDA_ARCH__) && TD_HAS_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#pragma unroll
  for (int i = 0; i < N; i++)
    asm volatile("" : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])::"memory");
#elif !defined(__CUDACC__)
  (void)c;
  emu_wgmma_wait(PENDING);
#endif
}

template <int PENDING, int N> __device__ inline void wgmma_wait(int32_t (&c)[N][4]) {
#if defined(__CUDA_ARCH__) && TD_HAS_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#pragma unroll
  for (int i = 0; i < N; i++)
    asm volatile("" : "+r"(c[i][0]), "+r"(c[i][1]), "+r"(c[i][2]), "+r"(c[i][3])::"memory");
#elif !defined(__CUDACC__)
  (void)c;
  emu_wgmma_wait(PENDING);
#endif
}

// The same of registers that others' wait, behind this one, or none needs.
template <int PENDING> __device__ inline void wgmma_wait() {
#if defined(__CUDA_ARCH__) && TD_HAS_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#elif !defined(__CUDACC__)
  emu_wgmma_wait(PENDING);
#endif
}

#define TD_C1(as, c, i) as(c[i][0]), as(c[i][1]), as(c[i][2]), as(c[i][3])
#define TD_C4(as, c, i)                                                                            \
  TD_C1(as, c, i), TD_C1(as, c, (i) + 1), TD_C1(as, c, (i) + 2), TD_C1(as, c, (i) + 3)
#define TD_C8(as, c, i) TD_C4(as, c, i), TD_C4(as, c, (i) + 4)
#define TD_R32                                                                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, "     \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TD_R64                                                                                     \
  TD_R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "      \
         "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// c = a b^T, or c += with add, for 64 rows of a, N rows of b and 16 columns of both, starting at
// the descriptors' elements. Blocks of eight columns of c, from FIRST on, are laid out as in
// mma.cuh; warp w of the warpgroup has rows from 16 w on.
template <int N, int FIRST, int M>
__device__ inline void wgmma_rows(float (&c)[M][4], uint64_t a, uint64_t b, bool add) {
  static_assert(N == 64 || N == 128, "");
  static_assert(FIRST + N / 8 <= M, "");
#if defined(__CUDA_ARCH__) && TD_HAS_WGMMA
  if constexpr (N == 64) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" TD_R32
                 "}, %32, %33, p, 1, 1, 0, 0; }"
                 : TD_C8("+f", c, FIRST)
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)));
  } else {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" TD_R64
                 "}, %64, %65, p, 1, 1, 0, 0; }"
                 : TD_C8("+f", c, FIRST), TD_C8("+f", c, FIRST + 8)
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)));
  }
#elif !defined(__CUDACC__)
  emu_wgmma({&c[FIRST], N, nullptr, a, b, add, false}, EMU_BF16);
#endif
}

// The same for 32 columns of both in E4M3, or in INT8 where c is of integers: in pairs of elements
// their matrices are those of BF16. The sums of E4M3 keep some 14 bits on sm_90 (arXiv 2412.19437,
// 3.3.2).
template <int N>
__device__ inline void wgmma_rows_8bit(float (&c)[N / 8][4], uint64_t a, uint64_t b, bool add) {
  static_assert(N == 128, "");
#if defined(__CUDA_ARCH__) && TD_HAS_WGMMA
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" TD_R64
               "}, %64, %65, p, 1, 1; }"
               : TD_C8("+f", c, 0), TD_C8("+f", c, 8)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
#elif !defined(__CUDACC__)
  emu_wgmma({c, N, nullptr, a, b, add, false}, EMU_E4M3);
#endif
}

template <int N>
__device__ inline void wgmma_rows_8bit(int32_t (&c)[N / 8][4], uint64_t a, uint64_t b, bool add) {
  static_assert(N == 128, "");
#if defined(__CUDA_ARCH__) && TD_HAS_WGMMA
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {" TD_R64 "}, %64, %65, p; }"
               : TD_C8("+r", c, 0), TD_C8("+r", c, 8)
               : "l"(a), "l"(b), "r"(static_cast<int>(add)));
#elif !defined(__CUDACC__)
  emu_wgmma({reinterpret_cast<float(*)[4]>(c), N, nullptr, a, b, add, false}, EMU_I8);
#endif
}

// c = a b^T, or c += with add, for 64 rows and 16 columns of a, in registers as in mma.cuh, and N
// rows of b, starting at the descriptor's element. The registers may be written when the product is
// waited for.
template <int N, int FIRST, int M>
__device__ inline void wgmma_rows(float (&c)[M][4], const uint32_t (&a)[4], uint64_t b, bool add) {
  static_assert(N == 64 || N == 128, "");
  static_assert(FIRST + N / 8 <= M, "");
#if defined(__CUDA_ARCH__) && TD_HAS_WGMMA
  if constexpr (N == 64) {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" TD_R32
                 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
                 : TD_C8("+f", c, FIRST)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
  } else {
    asm volatile("{ .reg .pred p; setp.ne.b32 p, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" TD_R64
                 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0; }"
                 : TD_C8("+f", c, FIRST), TD_C8("+f", c, FIRST + 8)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
  }
#elif !defined(__CUDACC__)
  emu_wgmma({&c[FIRST], N, a, 0, b, add, false}, EMU_BF16);
#endif
}

// c += a b for 64 rows and 16 columns of a, in registers as in mma.cuh, and N columns of 16 rows of
// b, starting at the descriptor's element.
template <int N, int FIRST, int M>
__device__ inline void wgmma_columns(float (&c)[M][4], const uint32_t (&a)[4], uint64_t b) {
  static_assert(N == 64 || N == 128, "");
  static_assert(FIRST + N / 8 <= M, "");
#if defined(__CUDA_ARCH__) && TD_HAS_WGMMA
  if constexpr (N == 64) {
    asm volatile("{ .reg .pred p; setp.eq.b32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" TD_R32
                 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1; }"
                 : TD_C8("+f", c, FIRST)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  } else {
    asm volatile("{ .reg .pred p; setp.eq.b32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" TD_R64
                 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1; }"
                 : TD_C8("+f", c, FIRST), TD_C8("+f", c, FIRST + 8)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
#elif !defined(__CUDACC__)
  emu_wgmma({&c[FIRST], N, a, 0, b, true, true}, EMU_BF16);
#endif
}
