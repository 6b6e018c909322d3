// src/worker/kv_memory.h - a worker's KV pages: in the pool, in its device's memory, or in both.
//
// On the CPU they are the pool's, which other workers also map. A GPU that has no other worker
// beside it keeps them in its own memory alone. Where two workers have a GPU each, the pool is the
// place where pages meet and outlive a worker, and each GPU has a copy (engine/kv_transfer.h).
#pragma once

#include "engine/attn/kv_layout.h"
#include "kv/pool.h"
#include "runtime/devices.h"
#include "worker/args.h"

typedef struct {
  td_kv_pool pool;
  td_dev *dev;
  td_kv_layout layout;
  void *pages;              // for engines
  void *dev_pages;          // pages, if they are in the device's memory; owned
  bool is_registered;       // the pool, with the device
  td_kv_transfer *transfer; // NULL: nobody else has the device's pages
} td_kv_memory;

// Attaches to the front's pool (TD_WORKER_KV_FD), which the first worker sizes. draft_bytes: of
// host memory that drafts take, besides. Call td_kv_memory_close in every case, after the engines
// are closed.
td_status td_kv_memory_open(td_kv_memory *out, const td_worker_opts *opts,
                            const td_devices *devices, const td_model *model, uint64_t draft_bytes,
                            td_err *err);
void td_kv_memory_close(td_kv_memory *memory); // closing a zeroed one is legal
