// kernels/cuda/common.cuh - shared by all kernel files: launching, conversions, reductions over a
// warp or a block.
// Blocks consist of whole warps, and shuffles involve all 32 lanes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "kernels/cuda/abi.h"

// Launches a kernel; the result is that of a launcher.
#ifdef __CUDACC__
#define TD_LAUNCH(kernel, grid, block, shared_bytes, stream, args)                                 \
  (kernel<<<grid, block, shared_bytes, static_cast<cudaStream_t>(stream)>>>(args), launched())
#define TD_DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]
#else // tests/cuda_emu
#define TD_LAUNCH(kernel, grid, block, shared_bytes, stream, args)                                 \
  (emu_launch(kernel, grid, block, shared_bytes, stream, args), launched())
#define TD_DYNAMIC_SHARED(name) unsigned char *name = emu_dynamic_shared()
#endif

#define TD_FULL_WARP 0xffffffffu
enum { WARP = 32 };

__host__ __device__ inline uint32_t at_most(uint32_t n, uint32_t limit) {
  return n < limit ? n : limit;
}

static inline uint32_t ceil_div(size_t n, size_t d) {
  return static_cast<uint32_t>((n + d - 1) / d);
}

// The result of a launcher.
static inline int launched() {
  return static_cast<int>(cudaGetLastError());
}

__device__ inline float f32_from_bf16(uint16_t h) {
  return __uint_as_float(static_cast<uint32_t>(h) << 16);
}

__device__ inline uint16_t bf16_from_f32(float f) { // round to nearest even
  return __bfloat16_as_ushort(__float2bfloat16_rn(f));
}

__device__ inline float f32_from_f16(uint16_t h) {
  return __half2float(__ushort_as_half(h));
}

__device__ inline uint16_t f16_from_f32(float f) { // saturated at the largest finite value
  float clamped = fminf(fmaxf(f, -65504.0f), 65504.0f);
  return __half_as_ushort(__float2half_rn(isnan(f) ? f : clamped));
}

__device__ inline uint32_t bf16x2_from_f32(float low, float high) {
#if defined(__CUDA_ARCH__)
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return bf16_from_f32(low) | static_cast<uint32_t>(bf16_from_f32(high)) << 16;
#endif
}

// Infinite from 65520 on.
__device__ inline uint32_t f16x2_from_f32(float low, float high) {
#if defined(__CUDA_ARCH__)
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return __half_as_ushort(__float2half_rn(low)) |
         static_cast<uint32_t>(__half_as_ushort(__float2half_rn(high))) << 16;
#endif
}

// Fuses the parts of an address into one value; the compiler would add them again for every load.
template <class T> __device__ inline void settle(T *&address) {
#if defined(__CUDA_ARCH__)
  asm("" : "+l"(address));
#else
  (void)address;
#endif
}

// A value that the compiler does not know, to compute what follows from it where it is needed
// instead of ahead, in registers that are wanted for other things.
__device__ inline uint32_t unknown(uint32_t v) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+r"(v));
#endif
  return v;
}

// bits & mask | set in one instruction; with constant mask and set the compiler would use two.
__device__ inline uint32_t and_or(uint32_t bits, uint32_t mask, uint32_t set) {
#if defined(__CUDA_ARCH__)
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(bits), "r"(mask), "r"(set));
  return out;
#else
  return (bits & mask) | set;
#endif
}

// Bits of a where the mask is set, else of b. The compiler would mask both operands if the result
// is masked again.
__device__ inline uint32_t select_bits(uint32_t mask, uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(out) : "r"(mask), "r"(a), "r"(b));
  return out;
#else
  return (a & mask) | (b & ~mask);
#endif
}

// a * b + c of BF16 pairs, rounded once; subnormals are kept.
__device__ inline uint32_t bf16x2_fma(uint32_t a, uint32_t b, uint32_t c) {
#if defined(__CUDA_ARCH__)
  uint32_t pair;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(a), "r"(b), "r"(c));
  return pair;
#else
  float v[2];
  for (int i = 0; i < 2; i++)
    v[i] = fmaf(f32_from_bf16(static_cast<uint16_t>(a >> 16 * i)),
                f32_from_bf16(static_cast<uint16_t>(b >> 16 * i)),
                f32_from_bf16(static_cast<uint16_t>(c >> 16 * i)));
  return bf16x2_from_f32(v[0], v[1]);
#endif
}

// 2^v with relative error at most 2^-22; 0 for subnormal results (PTX ISA, ex2.approx.ftz).
__device__ inline float exp2_approx(float v) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(v));
  return result;
#else
  return exp2f(v);
#endif
}

// a * b, rounded, never contracted into an FMA.
__device__ inline float product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  volatile float rounded = a * b;
  return rounded;
#endif
}

// a + b where one of them may be a product, which is rounded before.
__device__ inline float plain_sum(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  volatile float first = a, second = b;
  return first + second;
#endif
}

// sum * old + more * new_factor, with a fixed rounding: product first, then one FMA.
__device__ inline float fold(float sum, float old, float more, float new_factor) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(more, new_factor, product(sum, old));
#else
  return fmaf(more, new_factor, product(sum, old));
#endif
}

// Stores eight elements to a 16-byte aligned address. A barrier must come before they are read as
// another type.
__device__ inline void put_run(uint16_t *to, uint4 run) {
  *reinterpret_cast<uint4 *>(to) = run;
}

// Runs of eight elements, 16-byte aligned.
enum { RUN_OF_8 = 8 };

__device__ inline void load_run(const uint16_t *from, float (&v)[RUN_OF_8]) {
  uint4 run = *reinterpret_cast<const uint4 *>(from);
  const uint32_t pairs[4] = {run.x, run.y, run.z, run.w};
#pragma unroll
  for (int i = 0; i < RUN_OF_8; i++)
    v[i] = f32_from_bf16(static_cast<uint16_t>(pairs[i / 2] >> i % 2 * 16));
}

__device__ inline void load_run(const float *from, float (&v)[RUN_OF_8]) {
#pragma unroll
  for (int i = 0; i < RUN_OF_8; i += 4) {
    uint4 quad = *reinterpret_cast<const uint4 *>(from + i);
    v[i] = __uint_as_float(quad.x), v[i + 1] = __uint_as_float(quad.y);
    v[i + 2] = __uint_as_float(quad.z), v[i + 3] = __uint_as_float(quad.w);
  }
}

__device__ inline void store_run(uint16_t *to, const float (&v)[RUN_OF_8]) {
  put_run(to, {bf16x2_from_f32(v[0], v[1]), bf16x2_from_f32(v[2], v[3]),
               bf16x2_from_f32(v[4], v[5]), bf16x2_from_f32(v[6], v[7])});
}

__device__ inline void store_run(float *to, const float (&v)[RUN_OF_8]) {
#pragma unroll
  for (int i = 0; i < RUN_OF_8; i += 4)
    *reinterpret_cast<uint4 *>(to + i) = {__float_as_uint(v[i]), __float_as_uint(v[i + 1]),
                                          __float_as_uint(v[i + 2]), __float_as_uint(v[i + 3])};
}

// One element, or a run of eight.
__device__ inline void take_elements(const uint16_t *from, float (&v)[1]) {
  v[0] = f32_from_bf16(*from);
}

__device__ inline void take_elements(const float *from, float (&v)[1]) {
  v[0] = *from;
}

template <class Element>
__device__ inline void take_elements(const Element *from, float (&v)[RUN_OF_8]) {
  load_run(from, v);
}

__device__ inline void put_elements(uint16_t *to, const float (&v)[1]) {
  *to = bf16_from_f32(v[0]);
}

__device__ inline void put_elements(float *to, const float (&v)[1]) {
  *to = v[0];
}

template <class Element>
__device__ inline void put_elements(Element *to, const float (&v)[RUN_OF_8]) {
  store_run(to, v);
}

// Whether rows `stride` elements apart can be accessed in runs. True for NULL.
static inline bool in_runs(const void *first, size_t stride) {
  return reinterpret_cast<uintptr_t>(first) % sizeof(uint4) == 0 && stride % RUN_OF_8 == 0;
}

__device__ inline float vec_at(const td_vec &v, uint32_t i) {
  return v.dtype == TD_BF16 ? f32_from_bf16(static_cast<const uint16_t *>(v.data)[i])
                            : static_cast<const float *>(v.data)[i];
}

__device__ inline float warp_sum(float v) {
  for (int offset = WARP / 2; offset > 0; offset /= 2)
    v += __shfl_xor_sync(TD_FULL_WARP, v, offset);
  return v;
}

__device__ inline float warp_max(float v) {
  for (int offset = WARP / 2; offset > 0; offset /= 2)
    v = fmaxf(v, __shfl_xor_sync(TD_FULL_WARP, v, offset));
  return v;
}

// A barrier of the block that its warps may pass at different places of the code.
__device__ inline void barrier_anywhere() {
#if defined(__CUDA_ARCH__)
  asm volatile("bar.sync 1;" ::: "memory");
#elif !defined(__CUDACC__)
  __syncthreads();
#endif
}

// The sum over a block of at most 32 warps, returned to all threads. scratch: shared, 32 floats;
// reusable after the next barrier.
__device__ inline float block_sum(float v, float *scratch) {
  v = warp_sum(v);
  uint32_t n_warps = blockDim.x / WARP;
  if (n_warps == 1) return v;
  if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = v;
  __syncthreads();
  float total = 0;
  for (uint32_t w = 0; w < n_warps; w++)
    total += scratch[w];
  return total;
}
