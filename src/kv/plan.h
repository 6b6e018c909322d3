// src/kv/plan.h - sizes of the context and of the KV pool. Pure arithmetic.
//
// Context: ctx_size, or if that is 0 the model's maximum, at most 32768.
// Pool: kv_tokens if given, provided it fits into memory. Otherwise max_batch full contexts, at
// most half of the memory left after the weights. If the weights leave less than half of the
// available memory, the limit is a quarter of the available memory: the weights are then read
// through the page cache anyway. One full context must fit; if ctx_size is 0, the context is
// shortened until it does. On a device with its own memory, a quarter of what the weights leave is
// kept for workspaces, at least TD_KV_DEVICE_SPARE. Where host memory has a copy of a device's
// pages, that takes at most half of it.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

#define TD_KV_PAGE_TOKENS  64
#define TD_KV_DEFAULT_CTX  32768
#define TD_KV_SHORTEST_CTX 256 // tokens; a context is never shortened below this
// Bytes. The workspaces of a CUDA stream's operators take about 1040 MiB (bounds in
// src/device/cuda/device.c); the rest is for cuBLAS, graphs and activations.
#define TD_KV_DEVICE_SPARE (1536u << 20)

typedef struct {
  uint32_t max_position;        // of the model
  uint64_t kv_bytes_per_token;  // over all layers
  uint64_t weight_bytes;        // weights not yet counted in available_bytes
  uint64_t available_bytes;     // td_memory_available_bytes, page cache included
  uint32_t ctx_size, kv_tokens; // as requested; 0: chosen here
  uint32_t max_batch;
  bool is_device; // weights and KV cache go to a device's memory, which available_bytes describes
  uint32_t n_layers; // layers with keys and values, a part of each page, all of one size
  // With is_device: host memory available for a second copy of all pages; 0: there is none.
  uint64_t host_bytes;
  // Layers with a state instead (engine/attn/kv_layout.h), and what it takes of each page, per
  // layer.
  uint32_t n_states;
  uint64_t state_bytes;
  uint32_t page_tokens; // 0: TD_KV_PAGE_TOKENS
} td_kv_need;

static inline uint32_t td_kv_need_page_tokens(const td_kv_need *need) {
  return need->page_tokens ? need->page_tokens : TD_KV_PAGE_TOKENS;
}

static inline uint64_t td_kv_need_page_bytes(const td_kv_need *need) {
  return need->kv_bytes_per_token * td_kv_need_page_tokens(need) +
         need->n_states * need->state_bytes;
}

typedef struct {
  uint32_t n_ctx, n_pages;
} td_kv_plan;

// TD_EINVAL: ctx_size exceeds the model's maximum, or the requested pool does not hold one context.
// TD_ENOMEM: one context, or the requested pool, does not fit into memory.
td_status td_kv_plan_make(td_kv_plan *out, const td_kv_need *need, td_err *err);
