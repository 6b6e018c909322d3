// kernels/cuda/attn.cuh - where cached keys and values lie.
// They were BF16 before they were stored, so taking them out of the pages as BF16 is exact, but for
// what F16 pages have rounded, the smallest ones, and saturated, the largest.
#ifndef KERNELS_CUDA_ATTN_CUH
#define KERNELS_CUDA_ATTN_CUH

#include "kernels/cuda/common.cuh"

__device__ inline uint16_t kv_bf16(const td_cu_kv &kv, const char *page, size_t at) {
  uint16_t stored = reinterpret_cast<const uint16_t *>(page)[at];
  return kv.f16 ? bf16_from_f32(f32_from_f16(stored)) : stored;
}

// Eight elements at once; at, the page and its place are multiples of 16 bytes.
__device__ inline uint4 kv_bf16x8(const td_cu_kv &kv, const char *page, size_t at) {
  uint4 v = *reinterpret_cast<const uint4 *>(page + at * sizeof(uint16_t));
  if (!kv.f16) return v;
  uint32_t words[4] = {v.x, v.y, v.z, v.w};
  for (int i = 0; i < 4; i++)
    words[i] = bf16x2_from_f32(f32_from_f16(static_cast<uint16_t>(words[i])),
                               f32_from_f16(static_cast<uint16_t>(words[i] >> 16)));
  return {words[0], words[1], words[2], words[3]};
}

// The page of a position that its sequence has room for; negative: it is absent.
__device__ inline int32_t kv_page(const td_cu_batch &b, uint32_t seq, uint32_t position) {
  return b.page_table[static_cast<size_t>(seq) * b.max_pages + position / b.page_tokens];
}

__device__ inline const char *kv_page_at(const td_cu_kv &kv, int32_t page) {
  return kv.pages + static_cast<size_t>(page) * kv.page_bytes;
}

// How many positions a token sees, those only for which its sequence has pages.
__device__ inline uint32_t keys_of(const td_cu_batch &b, uint32_t token) {
  int32_t position = b.position[token];
  uint32_t room = b.max_pages * b.page_tokens;
  return position < 0 ? 0 : at_most(static_cast<uint32_t>(position) + 1, room);
}

// What every GPU has for a block of threads.
enum { SHARED_BYTES = 99 << 10 };

#define LOG2_E 1.44269504f // weights are powers of 2

// Lets a kernel have that much shared memory, the same whoever asks: what one launch asks for must
// not take from another's that is on its way, or in a graph.
template <class Kernel> static cudaError_t allow_shared(Kernel kernel, size_t most) {
  cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          static_cast<int>(most));
  if (code != cudaSuccess) cudaGetLastError(); // or the next launch would find it
  return code;
}

// Where a position's row of a head begins in its page's plane of heads that wide, in elements;
// heads go on from plane to plane.
__device__ inline size_t kv_row(const td_cu_batch &b, uint32_t position, uint32_t head,
                                uint32_t dim) {
  return (static_cast<size_t>(head) * b.page_tokens + position % b.page_tokens) * dim;
}

#endif
