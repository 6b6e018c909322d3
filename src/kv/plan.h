// src/kv/plan.h - how long a context and how many KV pages. Pure arithmetic.
//
// The context is ctx_size, or the model's longest, at most 32768, when ctx_size is 0.
// The pool is kv_tokens when given, if that fits into memory at all. Otherwise it is room for
// max_batch whole contexts, but no more than half of the memory that the weights leave (a quarter
// of all that is available when they leave less than half of it: then they are read through the
// page cache anyway). One whole context must fit; if ctx_size was left to us, it is shortened until
// it does. On a device with memory of its own, a quarter of what the weights leave of that is kept
// for what its operators need, but at least TD_KV_DEVICE_SPARE.
#ifndef TD_KV_PLAN_H
#define TD_KV_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

#define TD_KV_PAGE_TOKENS  64
#define TD_KV_DEFAULT_CTX  32768
#define TD_KV_SHORTEST_CTX 256 // no context is shortened below this
// Bytes. A CUDA stream's operators keep some 1040 MiB (src/device/cuda/device.c has their bounds);
// the rest is for cuBLAS, graphs and activations.
#define TD_KV_DEVICE_SPARE (1536u << 20)

typedef struct {
  uint32_t max_position;        // of the model
  uint64_t kv_bytes_per_token;  // over all layers
  uint64_t weight_bytes;        // mapped
  uint64_t available_bytes;     // td_memory_available_bytes, page cache included
  uint32_t ctx_size, kv_tokens; // as asked for; 0: chosen here
  uint32_t max_batch;
  bool is_device;    // weights and cache go to a device's memory, and available_bytes are its
  uint32_t n_layers; // that have a part of each page, all of one size
} td_kv_need;

typedef struct {
  uint32_t n_ctx, n_pages;
} td_kv_plan;

// TD_EINVAL: longer than the model allows, or a pool that does not hold one context. TD_ENOMEM: one
// context, or the pool that was asked for, does not fit into memory.
td_status td_kv_plan_make(td_kv_plan *out, const td_kv_need *need, td_err *err);

#endif
