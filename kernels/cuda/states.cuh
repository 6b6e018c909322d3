// kernels/cuda/states.cuh - states of sequences in KV pages: that after a position is in its page.
#ifndef KERNELS_CUDA_STATES_CUH
#define KERNELS_CUDA_STATES_CUH

#include "kernels/cuda/attn.cuh"

// The state after a position of a sequence; NULL and a fault: no page.
__device__ inline float *state_of(const td_cu_batch &b, const td_cu_states &s, uint32_t seq,
                                  int32_t position, int32_t *fault) {
  uint32_t p = static_cast<uint32_t>(position);
  bool fits = position >= 0 && p / b.page_tokens < b.max_pages;
  int32_t id = fits ? kv_page(b, seq, p) : -1;
  if (id < 0) {
    *fault = fits ? TD_CU_FAULT_PAGE : TD_CU_FAULT_POSITION;
    return nullptr;
  }
  return reinterpret_cast<float *>(s.pages + static_cast<size_t>(id) * s.page_bytes);
}

// The state before a position; NULL: zeros.
__device__ inline const float *state_before(const td_cu_batch &b, const td_cu_states &s,
                                            uint32_t seq, int32_t position, int32_t *fault) {
  return position == 0 ? nullptr : state_of(b, s, seq, position - 1, fault);
}

#endif
