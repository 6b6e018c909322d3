// kernels/cuda/mbarrier.cuh - how warps with different work hand over buffers in shared memory and
// share a block's registers, on sm_90a.
// An mbarrier counts phases from 0 on. A phase completes when as many arrivals have come as the
// barrier was opened with; what was done before them is done for whoever has waited for the phase.
#pragma once

#include "kernels/cuda/wgmma.cuh"

// By one thread, ahead of a __syncthreads of all that use it.
__device__ inline void mbarrier_open(uint64_t *barrier, uint32_t n_arrivals) {
#if defined(__CUDA_ARCH__) && TD_HAS_WGMMA
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(n_arrivals)
               : "memory");
#elif !defined(__CUDACC__)
  emu_phase_open(barrier, n_arrivals);
#endif
}

// By one lane, for its warp behind a __syncwarp.
__device__ inline void mbarrier_arrive(uint64_t *barrier) {
#if defined(__CUDA_ARCH__) && TD_HAS_WGMMA
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
               : "memory");
#elif !defined(__CUDACC__)
  emu_phase_arrive(barrier);
#endif
}

// Returns when a phase has completed. Only the one that is under way and the one before it can be
// told apart; the one before the first has completed, so that phase + 1 waits for what came before.
__device__ inline void mbarrier_wait(uint64_t *barrier, uint32_t phase) {
#if defined(__CUDA_ARCH__) && TD_HAS_WGMMA
  uint32_t is_complete;
  do {
    asm volatile("{ .reg .pred p;\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p; }"
                 : "=r"(is_complete)
                 : "r"(shared_address(barrier)), "r"(phase & 1)
                 : "memory");
  } while (!is_complete);
#elif !defined(__CUDACC__)
  emu_phase_wait(barrier, phase);
#endif
}

// Sets the registers per thread of a warpgroup to N, a multiple of 8, out of those that its block
// was launched with.
template <int N> __device__ inline void take_registers() {
#if defined(__CUDA_ARCH__) && TD_HAS_WGMMA
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
#endif
}

template <int N> __device__ inline void leave_registers() {
#if defined(__CUDA_ARCH__) && TD_HAS_WGMMA
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
#endif
}
