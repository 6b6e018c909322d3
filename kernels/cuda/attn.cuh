// kernels/cuda/attn.cuh - addressing of cached keys and values.
// They were BF16 before they were stored, so reading them as BF16 is exact, except for values that
// F16 pages rounded (the smallest) or saturated (the largest).
#pragma once

#include "kernels/cuda/common.cuh"

__device__ inline uint16_t kv_bf16(const td_kv_view &kv, const char *page, size_t at) {
  uint16_t stored = reinterpret_cast<const uint16_t *>(page)[at];
  return kv.dtype == TD_F16 ? bf16_from_f32(f32_from_f16(stored)) : stored;
}

// Eight elements at once; at, the page and the destination are 16-byte aligned.
__device__ inline uint4 kv_bf16x8(const td_kv_view &kv, const char *page, size_t at) {
  uint4 v = *reinterpret_cast<const uint4 *>(page + at * sizeof(uint16_t));
  if (kv.dtype != TD_F16) return v;
  uint32_t words[4] = {v.x, v.y, v.z, v.w};
  for (int i = 0; i < 4; i++)
    words[i] = bf16x2_from_f32(f32_from_f16(static_cast<uint16_t>(words[i])),
                               f32_from_f16(static_cast<uint16_t>(words[i] >> 16)));
  return {words[0], words[1], words[2], words[3]};
}

// The page of a position within the sequence's page table; negative: absent.
__device__ inline int32_t kv_page(const td_batch_view &b, uint32_t seq, uint32_t position) {
  return b.page_table[static_cast<size_t>(seq) * b.max_pages + position / b.page_tokens];
}

__device__ inline const char *kv_page_at(const td_kv_view &kv, int32_t page) {
  return kv.pages + static_cast<size_t>(page) * kv.page_bytes;
}

// Number of positions that a token sees, limited to those its page table can hold.
__device__ inline uint32_t keys_of(const td_batch_view &b, uint32_t token) {
  int32_t position = b.position[token];
  uint32_t room = b.max_pages * b.page_tokens;
  return position < 0 ? 0 : at_most(static_cast<uint32_t>(position) + 1, room);
}

// The first of n_keys positions that the last of them sees; window 0: all.
__device__ inline uint32_t first_seen(uint32_t n_keys, uint32_t window) {
  return window && n_keys > window ? n_keys - window : 0;
}

// Dynamic shared memory per block available on every supported GPU.
enum { SHARED_BYTES = 99 << 10 };

#define LOG2_E 1.44269504f // softmax weights are powers of 2

// Raises a kernel's limit of dynamic shared memory. `most` must be the same in every call, so that
// no launch lowers the limit of another one in flight or in a graph.
template <class Kernel> static cudaError_t allow_shared(Kernel kernel, size_t most) {
  cudaError_t code = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                          static_cast<int>(most));
  // clears the error, or the next launch would report it
  if (code != cudaSuccess) cudaGetLastError();
  return code;
}

// Element offset of a position's row of a head within its page; planes continue the numbering of
// heads.
__device__ inline size_t kv_row(const td_batch_view &b, uint32_t position, uint32_t head,
                                uint32_t dim) {
  return (static_cast<size_t>(head) * b.page_tokens + position % b.page_tokens) * dim;
}
