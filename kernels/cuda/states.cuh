// kernels/cuda/states.cuh - states of sequences in KV pages: that after a position is in its page.
#pragma once

#include "kernels/cuda/attn.cuh"

// The state after a position of a sequence; NULL and a fault: no page.
__device__ inline float *state_of(const td_batch_view &b, const td_kv_view &s, uint32_t seq,
                                  int32_t position) {
  uint32_t p = static_cast<uint32_t>(position);
  bool fits = position >= 0 && p / b.page_tokens < b.max_pages;
  int32_t id = fits ? kv_page(b, seq, p) : -1;
  if (id < 0) {
    *b.fault = fits ? TD_CU_FAULT_PAGE : TD_CU_FAULT_POSITION;
    return nullptr;
  }
  return reinterpret_cast<float *>(s.pages + static_cast<size_t>(id) * s.page_bytes);
}

// The state before a position; NULL: zeros.
__device__ inline const float *state_before(const td_batch_view &b, const td_kv_view &s,
                                            uint32_t seq, int32_t position) {
  return position == 0 ? nullptr : state_of(b, s, seq, position - 1);
}

// Where the state after token t of a sequence, which is not its last, is kept; NULL: nowhere.
__device__ inline float *trail_slot(const td_state_trail &trail, const td_batch_view &b,
                                    uint32_t seq, int32_t t) {
  if (!trail.slots || trail.first[seq] < 0 || t + 1 >= b.q_begin[seq + 1]) return nullptr;
  const size_t slot = static_cast<size_t>(trail.first[seq] + t - b.q_begin[seq]);
  return reinterpret_cast<float *>(trail.slots + slot * trail.slot_bytes);
}
