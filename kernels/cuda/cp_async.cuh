// kernels/cuda/cp_async.cuh - asynchronous copies from device memory to shared memory.
#ifndef KERNELS_CUDA_COPY_CUH
#define KERNELS_CUDA_COPY_CUH

#include "kernels/cuda/common.cuh"

// The address in the block's shared memory window.
__device__ inline uint32_t shared_address(const void *p) {
#if defined(__CUDACC__)
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
#else
  return emu_shared_address(p);
#endif
}

// Copies 16 bytes, 16-byte aligned. If !there, writes zeros and reads nothing.
__device__ inline void copy_async(uint16_t *to, const uint16_t *from, bool there) {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
#elif !defined(__CUDACC__)
  emu_copy_async(to, from, there);
#endif
}

// Waits for all copies of this thread. Other threads see them after the next barrier.
__device__ inline void copy_async_wait() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.wait_all;" ::: "memory");
#elif !defined(__CUDACC__)
  emu_copy_async_wait();
#endif
}

#endif
