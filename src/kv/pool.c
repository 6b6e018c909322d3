// src/kv/pool.c - a header page, the KV pages, their versions. Workers that start together are
// serialized by a record lock, which the kernel releases if one dies. The size is sealed last: a
// pool with a sealed size has a complete header, one without is unused.
#include "kv/pool.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAGIC        0x33564b54u // "TKV3"
#define HEADER_BYTES 4096

typedef struct {
  uint32_t magic;
  uint32_t n_ctx, n_pages, page_tokens, n_layers, is_device;
  uint64_t bytes_per_token, state_bytes;
  uint32_t n_states;
} header;

// Whether the pages are in a device's memory and nowhere else.
static bool is_elsewhere(const td_kv_need *need) {
  return need->is_device && !need->host_bytes;
}

// Bytes of n_pages pages in the pool itself; 0 if they are elsewhere.
static uint64_t pages_bytes(const td_kv_need *need, uint32_t n_pages) {
  return is_elsewhere(need) ? 0 : td_kv_need_page_bytes(need) * n_pages;
}

static uint64_t pool_bytes(const td_kv_need *need, uint32_t n_pages) {
  const uint64_t versions = is_elsewhere(need) ? 0 : n_pages * sizeof(uint32_t);
  return HEADER_BYTES + pages_bytes(need, n_pages) + versions;
}

td_status td_kv_pool_create(int *fd, td_err *err) {
  return td_segment_reserve(fd, "tandem-kv", err);
}

static td_status lock(int fd, short type, td_err *err) {
  struct flock lock = {.l_type = type, .l_whence = SEEK_SET};
  while (fcntl(fd, F_SETLKW, &lock) != 0)
    if (errno != EINTR) return td_fail(err, TD_EIO, "the KV pool: lock: %s", strerror(errno));
  return TD_OK;
}

static bool is_decided(int fd) {
  int seals = fcntl(fd, F_GET_SEALS);
  return seals > 0 && (seals & F_SEAL_SHRINK);
}

// Sizes an empty pool by this worker's plan.
static td_status decide(int fd, const td_kv_need *need, td_err *err) {
  td_kv_plan plan;
  td_status st = td_kv_plan_make(&plan, need, err);
  if (st != TD_OK) return st;
  const uint64_t page_bytes = td_kv_need_page_bytes(need);
  if (page_bytes > (INT64_MAX - HEADER_BYTES) / plan.n_pages) {
    return td_fail(err, TD_ENOMEM, "out of memory for a KV pool of %u pages of %llu bytes",
                   plan.n_pages, (unsigned long long)page_bytes);
  }
  const header h = {.magic = MAGIC,
                    .n_ctx = plan.n_ctx,
                    .n_pages = plan.n_pages,
                    .page_tokens = td_kv_need_page_tokens(need),
                    .n_layers = need->n_layers,
                    .n_states = need->n_states,
                    .state_bytes = need->state_bytes,
                    .bytes_per_token = need->kv_bytes_per_token,
                    .is_device = is_elsewhere(need)};
  if (pwrite(fd, &h, sizeof h, 0) != (ssize_t)sizeof h)
    return td_fail(err, TD_ENOMEM, "cannot write to the KV pool: %s", strerror(errno));
  return td_segment_size(fd, pool_bytes(need, plan.n_pages), err);
}

static bool is_ours(const td_segment *segment, const td_kv_need *need) {
  const header *h = segment->base;
  return segment->n_bytes >= HEADER_BYTES && h->magic == MAGIC &&
         h->page_tokens == td_kv_need_page_tokens(need) && h->n_states == need->n_states &&
         h->state_bytes == need->state_bytes && h->bytes_per_token == need->kv_bytes_per_token &&
         h->n_layers == need->n_layers && h->n_ctx && h->is_device == is_elsewhere(need) &&
         segment->n_bytes == pool_bytes(need, h->n_pages);
}

static td_status map(td_kv_pool *out, int fd, const td_kv_need *need, td_err *err) {
  td_status st = td_segment_attach(&out->segment, fd, err);
  if (st != TD_OK) return st;
  if (!is_ours(&out->segment, need)) {
    out->segment.fd = -1; // fd stays the caller's
    td_segment_close(&out->segment);
    return td_fail(err, TD_EFORMAT,
                   "the KV pool is not this model's: the checkpoint or the device has changed "
                   "under the server; start it again");
  }
  const header *h = out->segment.base;
  out->plan = (td_kv_plan){.n_ctx = h->n_ctx, .n_pages = h->n_pages};
  if (!is_elsewhere(need)) {
    char *pages = (char *)out->segment.base + HEADER_BYTES;
    out->pages = pages;
    out->versions = (void *)(pages + pages_bytes(need, h->n_pages));
  }
  // has no effect where shared memory has no huge pages
  madvise(out->segment.base, out->segment.n_bytes, MADV_HUGEPAGE);
  return TD_OK;
}

td_status td_kv_pool_attach(td_kv_pool *out, int fd, const td_kv_need *need, td_err *err) {
  *out = (td_kv_pool){.segment = TD_SEGMENT_CLOSED};
  td_status st = lock(fd, F_WRLCK, err);
  if (st != TD_OK) return st;
  if (!is_decided(fd)) st = decide(fd, need, err);
  if (st == TD_OK) st = map(out, fd, need, err);
  td_err ignored;
  lock(fd, F_UNLCK, &ignored);
  return st;
}

void td_kv_pool_close(td_kv_pool *pool) {
  if (pool->plan.n_pages) td_segment_close(&pool->segment);
  *pool = (td_kv_pool){.segment = TD_SEGMENT_CLOSED};
}

// ---- access without mapping -------------------------------------------------------------------

td_status td_kv_pool_shape(td_kv_shape *out, int fd, td_err *err) {
  header h;
  *out = (td_kv_shape){0};
  if (!is_decided(fd) || pread(fd, &h, sizeof h, 0) != (ssize_t)sizeof h || h.magic != MAGIC ||
      !(h.n_layers + h.n_states))
    return td_fail(err, TD_EFORMAT, "the KV pool has no plan");
  if (h.is_device) return td_fail(err, TD_EUNSUPPORTED, "KV pages are in the device's memory");
  *out = (td_kv_shape){.n_pages = h.n_pages,
                       .n_layers = h.n_layers,
                       .page_tokens = h.page_tokens,
                       // 0: all layers keep states
                       .part_bytes = h.n_layers ? h.bytes_per_token / h.n_layers * h.page_tokens
                                                : 0,
                       .n_states = h.n_states,
                       .state_bytes = h.state_bytes};
  return TD_OK;
}

// A part of a page: where it is in the pool, and in the page by itself.
typedef struct {
  uint64_t in_pool, in_page, n_bytes;
} page_part;

static page_part part_at(const td_kv_shape *shape, int32_t page, uint32_t part) {
  const uint64_t kv_bytes = shape->part_bytes * shape->n_layers;
  if (part < shape->n_layers) {
    return (page_part){.in_pool = ((uint64_t)part * shape->n_pages + (uint32_t)page) *
                                  shape->part_bytes,
                       .in_page = part * shape->part_bytes,
                       .n_bytes = shape->part_bytes};
  }
  const uint64_t state = part - shape->n_layers;
  return (page_part){.in_pool = kv_bytes * shape->n_pages +
                                (state * shape->n_pages + (uint32_t)page) * shape->state_bytes,
                     .in_page = kv_bytes + state * shape->state_bytes,
                     .n_bytes = shape->state_bytes};
}

static td_status check_part(ssize_t n, const page_part *part, td_err *err) {
  if (n == (ssize_t)part->n_bytes) return TD_OK;
  return td_fail(err, TD_EIO, "the KV pool: %s", n < 0 ? strerror(errno) : "it is cut short");
}

td_status td_kv_pool_get(int fd, const td_kv_shape *shape, int32_t page, void *out, td_err *err) {
  td_status st = TD_OK;
  for (uint32_t i = 0; st == TD_OK && i < shape->n_layers + shape->n_states; i++) {
    const page_part part = part_at(shape, page, i);
    const off_t at = (off_t)(HEADER_BYTES + part.in_pool);
    st = check_part(pread(fd, (char *)out + part.in_page, part.n_bytes, at), &part, err);
  }
  return st;
}

static td_status add_version(int fd, const td_kv_shape *shape, int32_t page, td_err *err) {
  const uint64_t pages = td_kv_shape_page_bytes(shape) * shape->n_pages;
  const off_t at = (off_t)(HEADER_BYTES + pages) + (off_t)page * (off_t)sizeof(uint32_t);
  uint32_t version;
  bool is_done = pread(fd, &version, sizeof version, at) == sizeof version;
  version++;
  is_done = is_done && pwrite(fd, &version, sizeof version, at) == sizeof version;
  return is_done ? TD_OK : td_fail(err, TD_EIO, "the KV pool: %s", strerror(errno));
}

td_status td_kv_pool_put(int fd, const td_kv_shape *shape, int32_t page, const void *in,
                         td_err *err) {
  td_status st = TD_OK;
  for (uint32_t i = 0; st == TD_OK && i < shape->n_layers + shape->n_states; i++) {
    const page_part part = part_at(shape, page, i);
    const off_t at = (off_t)(HEADER_BYTES + part.in_pool);
    st = check_part(pwrite(fd, (const char *)in + part.in_page, part.n_bytes, at), &part, err);
  }
  return st == TD_OK ? add_version(fd, shape, page, err) : st;
}
