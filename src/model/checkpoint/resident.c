// src/model/checkpoint/resident.c - layout of the shared memory, and attaching to it.
// resident_load.c fills it.
#include "model/checkpoint/resident.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "model/checkpoint/resident_impl.h"

static bool is_well_formed(const td_resident *r) {
  const resident_head *head = (const void *)r->base;
  if (head->magic != RESIDENT_MAGIC || head->version != RESIDENT_VERSION) return false;
  if (resident_head_bytes(head->n_shards) > r->n_bytes) return false;
  if (!head->n_nodes || head->n_nodes > TD_MAX_NODES || !head->stripe_bytes) return false;
  for (uint32_t i = 0; i < head->n_shards; i++) {
    const resident_shard *s = &head->shards[i];
    if (s->offset > r->n_bytes || s->n_bytes > r->n_bytes - s->offset) return false;
    if (!memchr(s->name, '\0', sizeof s->name)) return false;
  }
  return true;
}

td_status td_resident_attach(td_resident *out, int fd, td_err *err) {
  *out = (td_resident){0};
  int seals = fcntl(fd, F_GET_SEALS);
  struct stat info;
  if (seals < 0 || (seals & RESIDENT_SEALS) != RESIDENT_SEALS || fstat(fd, &info) != 0 ||
      (uint64_t)info.st_size < sizeof(resident_head))
    return td_fail(err, TD_EFORMAT, "descriptor %d does not hold weights", fd);
  size_t n_bytes = (size_t)info.st_size;
  void *base = mmap(NULL, n_bytes, PROT_READ, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED)
    return td_fail(err, TD_ENOMEM, "cannot map %zu bytes of weights: %s", n_bytes, strerror(errno));
  *out = (td_resident){.base = base, .n_bytes = n_bytes};
  if (is_well_formed(out)) {
    size_t n_arena; // large pages fall back to plain ones, but would fill holes beside an arena
    const bool has_holes = td_resident_find(out, TD_RESIDENT_EXPERTS, &n_arena) != NULL;
    madvise(base, n_bytes, has_holes ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
    return TD_OK;
  }
  td_resident_detach(out);
  return td_fail(err, TD_EFORMAT, "descriptor %d holds no list of shards", fd);
}

void td_resident_detach(td_resident *r) {
  if (r->base) munmap((void *)r->base, r->n_bytes);
  *r = (td_resident){0};
}

td_stripes td_resident_stripes(const td_resident *r) {
  const resident_head *head = (const void *)r->base;
  if (!head || head->n_nodes < 2) return (td_stripes){.base = NULL};
  return (td_stripes){.base = r->base,
                      .n_bytes = r->n_bytes,
                      .stripe_bytes = (size_t)head->stripe_bytes,
                      .n_nodes = head->n_nodes};
}

const void *td_resident_find(const td_resident *r, const char *name, size_t *n_bytes) {
  const resident_head *head = (const void *)r->base;
  for (uint32_t i = 0; i < head->n_shards; i++) {
    const resident_shard *s = &head->shards[i];
    if (strcmp(s->name, name) != 0) continue;
    *n_bytes = (size_t)s->n_bytes;
    return r->base + s->offset;
  }
  *n_bytes = 0;
  return NULL;
}
