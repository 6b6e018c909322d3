// src/kv/pool.h - the bytes of all KV pages, in one piece of memory that every worker maps,
// so that a prompt read by one is continued by another without a copy. The front creates the pool
// empty and hands its descriptor to every worker it starts. The first that comes decides how large
// it is (kv_plan.h); the others, and those that replace the dead, find that decision in it. Which
// page holds what is the front's to know. Where pages live in a device's memory instead, the pool
// is that decision alone.
#ifndef TD_KV_POOL_H
#define TD_KV_POOL_H

#include "base/status.h"
#include "kv/plan.h"
#include "shm/segment.h"

typedef struct {
  td_segment segment;
  td_kv_plan plan;
  // plan.n_pages of TD_KV_PAGE_TOKENS tokens over all layers; page-aligned; NULL: the device's
  void *pages;
} td_kv_pool;

// The front's side. The caller owns *fd; on error it is -1.
td_status td_kv_pool_create(int *fd, td_err *err);

// How pages lie in a pool that has a plan: each layer's parts of all pages, layer behind layer.
typedef struct {
  uint32_t n_pages, n_layers, page_tokens;
  uint64_t part_bytes; // one layer of one page
} td_kv_shape;

// TD_EFORMAT: the pool has no plan yet. TD_EUNSUPPORTED: a device has the pages.
td_status td_kv_pool_shape(td_kv_shape *out, int fd, td_err *err);
// Copies a page, n_layers * part_bytes layer by layer, to or from a process that does not map it.
// Any thread.
td_status td_kv_pool_get(int fd, const td_kv_shape *shape, int32_t page, void *out, td_err *err);
td_status td_kv_pool_put(int fd, const td_kv_shape *shape, int32_t page, const void *in,
                         td_err *err);

// The worker's side; fd is owned by *out on success, untouched on error. Of need, what decides is
// kv_bytes_per_token, n_layers and is_device alone once the pool has a plan. TD_EFORMAT: the pool
// was made for pages of another size or in another place. Other errors are td_kv_plan_make's.
td_status td_kv_pool_attach(td_kv_pool *out, int fd, const td_kv_need *need, td_err *err);
void td_kv_pool_close(td_kv_pool *pool); // closing a zeroed one is legal

#endif
