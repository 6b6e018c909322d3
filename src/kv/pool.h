// src/kv/pool.h - storage of all KV pages, in shared memory that every worker maps, so that decode
// in one worker continues a prefill of another without a copy. The front creates the pool empty and
// passes its descriptor to every worker. The first worker sizes it (kv/plan.h); others, and
// restarted ones, read the size from it. The front decides which page holds what. If pages are in
// device memory alone, the pool holds only the size. If devices have copies of its pages
// (engine/kv_transfer.h), versions tell which copy is current.
#pragma once

#include "base/status.h"
#include "kv/plan.h"
#include "shm/segment.h"

typedef struct {
  td_segment segment;
  td_kv_plan plan;
  // plan.n_pages pages over all layers, then their recurrent states; page-aligned; NULL: on the
  // device
  void *pages;
  // [plan.n_pages], with pages: incremented when a page's new content is complete. 0: never
  // written.
  _Atomic uint32_t *versions;
} td_kv_pool;

// The front's side. The caller owns *fd; on error it is -1.
td_status td_kv_pool_create(int *fd, td_err *err);

// Layout of a sized pool: layer by layer, the parts of all pages, then their recurrent states.
typedef struct {
  uint32_t n_pages, n_layers, n_states, page_tokens;
  uint64_t part_bytes, state_bytes; // of one layer of one page
} td_kv_shape;

static inline uint64_t td_kv_shape_page_bytes(const td_kv_shape *shape) {
  return shape->n_layers * shape->part_bytes + shape->n_states * shape->state_bytes;
}

// TD_EFORMAT: the pool is not sized yet. TD_EUNSUPPORTED: pages are in device memory.
td_status td_kv_pool_shape(td_kv_shape *out, int fd, td_err *err);
// Copies a page (td_kv_shape_page_bytes, layer by layer, states last) from or to the pool without
// mapping it. put increments its version: nobody else may write to the page meanwhile. Any thread.
td_status td_kv_pool_get(int fd, const td_kv_shape *shape, int32_t page, void *out, td_err *err);
td_status td_kv_pool_put(int fd, const td_kv_shape *shape, int32_t page, const void *in,
                         td_err *err);

// The worker's side. *out owns fd on success; on error fd is untouched. If the pool is already
// sized, only what describes a page, is_device and host_bytes (0 or not) of need are used.
// TD_EFORMAT: the pool was made for pages of another size or location. Other errors: see
// td_kv_plan_make.
td_status td_kv_pool_attach(td_kv_pool *out, int fd, const td_kv_need *need, td_err *err);
void td_kv_pool_close(td_kv_pool *pool); // closing a zeroed one is legal
