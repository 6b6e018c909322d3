// kernels/cuda/attn.cuh - where cached keys and values lie.
// KV elements were BF16 before they were stored, so taking them out of the pages as BF16 is exact
// (F16 pages have rounded the smallest ones and saturated the largest).
#ifndef KERNELS_CUDA_ATTN_CUH
#define KERNELS_CUDA_ATTN_CUH

#include "kernels/cuda/common.cuh"

__device__ inline uint16_t kv_bf16(const td_cu_kv &kv, const char *page, size_t at) {
  if (kv.f16) return bf16_from_f32(f32_from_f16(reinterpret_cast<const uint16_t *>(page)[at]));
  return bf16_from_f32(reinterpret_cast<const float *>(page)[at]);
}

__device__ inline const char *kv_page(const td_cu_batch &b, const td_cu_kv &kv, uint32_t seq,
                                      uint32_t position) {
  size_t slot = static_cast<size_t>(seq) * b.max_pages + position / b.page_tokens;
  return kv.pages + static_cast<size_t>(b.page_table[slot]) * kv.page_bytes;
}

// Where a position's row of a head begins in its page's plane of k_dim wide heads, in elements.
__device__ inline size_t kv_row(const td_cu_batch &b, uint32_t position, uint32_t head,
                                uint32_t dim) {
  return (static_cast<size_t>(head) * b.page_tokens + position % b.page_tokens) * dim;
}

#endif
