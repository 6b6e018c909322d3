// tests/cuda_emu/emu.h - enough of CUDA C++ to compile kernels/cuda as C++ and run it on the host.
// A block's threads are fibers of one host thread: each runs until it must wait for the others
// (barrier, shuffle, mma), so a block is deterministic; every second block visits its threads
// backwards. Blocks run one after the other. Shared memory is static memory of the host thread, and
// what kernels have not written there, or in device memory, is not zero. A library of its own finds
// races on it, whether they do harm here or not (race.h).
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <math.h>
#include <utility>
#include <vector>

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

void emu_store_for_all(uint32_t *signal, uint32_t value);
uint32_t emu_load_from_all(const uint32_t *signal);
uint64_t emu_now_ns();
void __nanosleep(unsigned ns);

#define __global__
#define __device__
#define __host__
#define __shared__   static thread_local
#define __align__(n) __attribute__((aligned(n)))

#define __launch_bounds__(...)

// Every GPU that kernels are for has the first for a block, and the second once a kernel asks; one
// of sm_90 has the third.
enum {
  EMU_WARP = 32,
  EMU_MAX_THREADS = 1024,
  EMU_MAX_WARPS = EMU_MAX_THREADS / EMU_WARP,
  EMU_PLAIN_SHARED = 48 << 10,
  EMU_SHARED_BYTES = 99 << 10,
  EMU_SHARED_BYTES_90 = 227 << 10
};

// What a running kernel sees of itself. A thread finds the same of what is its own, wherever it
// asks.
#define EMU_OWN __attribute__((const))
struct emu_place {
  dim3 thread, block, block_dim, grid_dim;
};
EMU_OWN const emu_place &emu_here();
#define threadIdx (emu_here().thread)
#define blockIdx  (emu_here().block)
#define blockDim  (emu_here().block_dim)
#define gridDim   (emu_here().grid_dim)

void __syncthreads();
void __syncwarp();
EMU_OWN unsigned char *emu_dynamic_shared();

// All lanes of the warp, none of which has returned, bring n_bytes; returns [32] slots
// EMU_SLOT_BYTES apart, valid until this lane's next exchange.
enum { EMU_SLOT_BYTES = 96 };
const unsigned char *emu_exchange(const void *mine, size_t n_bytes);

template <class T> T __shfl_xor_sync(unsigned mask, T v, int lane_mask) {
  (void)mask;
  const unsigned char *slots = emu_exchange(&v, sizeof v);
  unsigned lane = threadIdx.x % EMU_WARP;
  T out;
  std::memcpy(&out, slots + (lane ^ static_cast<unsigned>(lane_mask)) * EMU_SLOT_BYTES, sizeof out);
  return out;
}

template <class T> T __shfl_sync(unsigned mask, T v, unsigned lane) {
  (void)mask;
  const unsigned char *slots = emu_exchange(&v, sizeof v);
  T out;
  std::memcpy(&out, slots + lane % EMU_WARP * EMU_SLOT_BYTES, sizeof out);
  return out;
}

inline bool __any_sync(unsigned mask, bool v) {
  (void)mask;
  const unsigned char *slots = emu_exchange(&v, sizeof v);
  bool any = false;
  for (unsigned lane = 0; lane < EMU_WARP; lane++) {
    bool other;
    std::memcpy(&other, slots + lane * EMU_SLOT_BYTES, sizeof other);
    any |= other;
  }
  return any;
}

void emu_mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
void emu_mma_f16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
void emu_mma_f16_sums(uint32_t (&c)[2], const uint32_t (&a)[4], const uint32_t (&b)[2]);
void emu_mma_e4m3(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
void emu_mma_i8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

unsigned atomicAdd(unsigned *at, unsigned v);

inline int __clz(int v) {
  return v ? __builtin_clz(static_cast<unsigned>(v)) : 32;
}

// A load wants its address to be a multiple of its size, which hosts do not ask for.
[[noreturn]] void emu_misaligned(const void *at, size_t n_bytes);

template <class T> T __ldg(const T *from) {
  if (reinterpret_cast<uintptr_t>(from) % sizeof(T) != 0) emu_misaligned(from, sizeof(T));
  return *from;
}

// Byte i of the result is the one of low's four and high's that selector's digit i names.
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  uint64_t bytes = low | static_cast<uint64_t>(high) << 32;
  uint32_t out = 0;
  for (int i = 0; i < 4; i++)
    out |= static_cast<uint32_t>(bytes >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  return out;
}

inline float __uint_as_float(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}
inline uint32_t __float_as_uint(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof bits);
  return bits;
}

// Runs body for every thread of every block, on the calling thread.
void emu_run(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()> &body);
// Queues work on a stream.
void emu_enqueue(void *stream, std::function<void()> work);
// Waits for the calling thread's device to be idle, as the driver may when it loads code: meanwhile
// no thread can queue work, on any device.
void emu_await_idle_inside();
// Notes a launch that hardware would refuse; true when it is fine.
bool emu_check_launch(const void *kernel, dim3 grid, dim3 block, size_t shared_bytes, void *stream);
// Whether no pointer among the n words is to another device's memory than the stream's; notes the
// failure, and says it.
bool emu_check_pointers(void *stream, const void *words, size_t n_bytes);

template <class Args>
void emu_launch(void (*kernel)(Args), dim3 grid, dim3 block, size_t shared_bytes, void *stream,
                const Args &args) {
  const void *code = reinterpret_cast<const void *>(kernel);
  if (!emu_check_launch(code, grid, block, shared_bytes, stream)) return;
  if (!emu_check_pointers(stream, &args, sizeof args)) return;
  emu_enqueue(stream, [=] { emu_run(grid, block, shared_bytes, [&] { kernel(args); }); });
}

#include "async.h"
