// kernels/cuda/signal.cu - signals in host memory by which host threads and a stream synchronize
// without the driver.
#include "kernels/cuda/common.cuh"

// Release store: whoever sees the value also sees everything the stream did before, copies to host
// memory included.
__device__ static void store_for_all(uint32_t *signal, uint32_t value) {
#if defined(__CUDA_ARCH__)
  __threadfence_system();
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(signal), "r"(value) : "memory");
#elif !defined(__CUDACC__)
  emu_store_for_all(signal, value);
#endif
}

__device__ static uint32_t load_from_all(const uint32_t *signal) {
#if defined(__CUDA_ARCH__)
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(signal) : "memory");
  return value;
#elif !defined(__CUDACC__)
  return emu_load_from_all(signal);
#else
  return *signal;
#endif
}

__global__ static void signal_kernel(td_signal_args a) {
  if (threadIdx.x == 0) store_for_all(a.signal, *a.value);
}

extern "C" int td_cu_signal(const td_signal_args *a, td_cu_stream stream) {
  return TD_LAUNCH(signal_kernel, 1, WARP, 0, stream, *a);
}

__device__ static void fence_for_all() {
#if defined(__CUDA_ARCH__)
  __threadfence_system();
#endif
}

// One block, so that a barrier orders its writes before the signal. Every thread's fence makes them
// visible to other devices first.
template <class Element> __global__ static void post_kernel(td_post_args a) {
  for (size_t i = threadIdx.x; i < a.n_bytes / sizeof(Element); i += blockDim.x)
    static_cast<Element *>(a.dst)[i] = static_cast<const Element *>(a.src)[i];
  fence_for_all();
  __syncthreads();
  if (threadIdx.x == 0) store_for_all(a.signal, *a.value);
}

extern "C" int td_cu_post(const td_post_args *a, td_cu_stream stream) {
  enum { POST_THREADS = 1024 };
  const uintptr_t all = reinterpret_cast<uintptr_t>(a->dst) | reinterpret_cast<uintptr_t>(a->src) |
                        a->n_bytes;
  auto kernel = all % sizeof(uint4) == 0 ? post_kernel<uint4> : post_kernel<unsigned char>;
  return TD_LAUNCH(kernel, 1, POST_THREADS, 0, stream, *a);
}

__device__ static uint64_t now_ns() {
#if defined(__CUDA_ARCH__)
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
#elif !defined(__CUDACC__)
  return emu_now_ns();
#else
  return 0;
#endif
}

// Sleeps between polls, which leaves the SM and the bus to others.
__global__ static void await_kernel(td_await_args a) {
  if (threadIdx.x != 0) return;
  uint32_t value = *a.value;
  if (load_from_all(a.signal) == value) return;
  if (*a.fault == TD_CU_FAULT_TIMEOUT || *a.fault == TD_CU_FAULT_CANCELED) return;
  for (uint64_t begin = now_ns(); load_from_all(a.signal) != value; __nanosleep(100)) {
    bool is_canceled = a.canceled && load_from_all(a.canceled) != 0;
    if (!is_canceled && now_ns() - begin < a.most_ns) continue;
    *a.fault = is_canceled ? TD_CU_FAULT_CANCELED : TD_CU_FAULT_TIMEOUT;
    return;
  }
}

extern "C" int td_cu_await(const td_await_args *a, td_cu_stream stream) {
  return TD_LAUNCH(await_kernel, 1, WARP, 0, stream, *a);
}
