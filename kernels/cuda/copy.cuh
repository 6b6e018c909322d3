// kernels/cuda/copy.cuh - copies from device memory to shared memory that a thread does not wait
// for.
#ifndef KERNELS_CUDA_COPY_CUH
#define KERNELS_CUDA_COPY_CUH

#include "kernels/cuda/common.cuh"

// Where that lies in the shared memory of the block.
__device__ inline uint32_t shared_address(const void *p) {
#if defined(__CUDACC__)
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
#else
  return emu_shared_address(p);
#endif
}

// BYTES, which are 4, 8 or 16 and aligned to as many; zeros behind the first n_there, which nothing
// is read for.
template <int BYTES>
__device__ inline void copy_async(void *to, const void *from, uint32_t n_there) {
#if defined(__CUDA_ARCH__)
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(n_there)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_address(to)),
                 "l"(from), "n"(BYTES), "r"(n_there)
                 : "memory");
  }
#elif !defined(__CUDACC__)
  emu_copy_async(to, from, BYTES, n_there);
#endif
}

// Sixteen of them or zeros.
__device__ inline void copy_async(uint16_t *to, const uint16_t *from, bool there) {
  copy_async<16>(to, from, there ? 16 : 0);
}

// What this thread has asked for since the last one is a group, if of nothing.
__device__ inline void copy_async_commit() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.commit_group;" ::: "memory");
#elif !defined(__CUDACC__)
  emu_copy_async_commit();
#endif
}

// For all of this thread's groups but the last KEEP; others see them behind the next barrier.
template <int KEEP> __device__ inline void copy_async_wait() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.wait_group %0;" ::"n"(KEEP) : "memory");
#elif !defined(__CUDACC__)
  emu_copy_async_wait(KEEP);
#endif
}

// For all of this thread's.
__device__ inline void copy_async_wait() {
  copy_async_commit();
  copy_async_wait<0>();
}

#endif
