// kernels/cuda/cp_async.cuh - asynchronous copies from device memory to shared memory.
#pragma once

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
  emu_copy_async(to, from, 16, there);
#endif
}

// Copies 4, 8 or 16 bytes, aligned to their number. If !there, writes zeros and reads nothing.
template <class T> __device__ inline void copy_async_value(T *to, const T *from, bool there) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "");
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 16) { // past L1, which only these can
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(there ? 16 : 0)
                 : "memory");
    return;
  }
  asm volatile("cp.async.ca.shared.global [%0], [%1], %3, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(there ? static_cast<int>(sizeof(T)) : 0), "n"(sizeof(T))
               : "memory");
#elif !defined(__CUDACC__)
  emu_copy_async(to, from, sizeof(T), there);
#endif
}

// Ends a group of copies, which can then be waited for.
__device__ inline void copy_async_commit() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.commit_group;" ::: "memory");
#elif !defined(__CUDACC__)
  emu_copy_async_commit();
#endif
}

// Waits for all committed groups of this thread but the last PENDING.
template <int PENDING> __device__ inline void copy_async_wait_for() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#elif !defined(__CUDACC__)
  emu_copy_async_wait_for(PENDING);
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
