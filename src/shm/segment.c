// src/shm/segment.c - memfd segments with a sealed size.
#include "shm/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define SIZE_SEALS (F_SEAL_SHRINK | F_SEAL_GROW)

static td_status map(td_segment *out, int fd, size_t n_bytes, td_err *err) {
  void *base = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) {
    return td_fail(err, TD_ENOMEM, "cannot map %zu bytes of shared memory: %s", n_bytes,
                   strerror(errno));
  }
  *out = (td_segment){.base = base, .n_bytes = n_bytes, .fd = fd};
  return TD_OK;
}

td_status td_segment_reserve(int *fd, const char *name, td_err *err) {
  *fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (*fd >= 0) return TD_OK;
  return td_fail(err, TD_EIO, "cannot create shared memory \"%s\": %s", name, strerror(errno));
}

td_status td_segment_size(int fd, size_t n_bytes, td_err *err) {
  if (ftruncate(fd, (off_t)n_bytes) == 0 && fcntl(fd, F_ADD_SEALS, SIZE_SEALS | F_SEAL_SEAL) == 0)
    return TD_OK;
  return td_fail(err, TD_ENOMEM, "cannot size shared memory to %zu bytes: %s", n_bytes,
                 strerror(errno));
}

td_status td_segment_create(td_segment *out, const char *name, size_t n_bytes, td_err *err) {
  *out = TD_SEGMENT_CLOSED;
  int fd;
  td_status st = td_segment_reserve(&fd, name, err);
  if (st != TD_OK) return st;
  st = td_segment_size(fd, n_bytes, err);
  if (st == TD_OK) st = map(out, fd, n_bytes, err);
  if (st != TD_OK) close(fd);
  return st;
}

td_status td_segment_attach(td_segment *out, int fd, td_err *err) {
  *out = TD_SEGMENT_CLOSED;
  int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & SIZE_SEALS) != SIZE_SEALS)
    return td_fail(err, TD_EFORMAT, "descriptor %d is not shared memory of a sealed size", fd);
  struct stat info;
  if (fstat(fd, &info) != 0 || info.st_size <= 0)
    return td_fail(err, TD_EFORMAT, "descriptor %d is empty shared memory", fd);
  return map(out, fd, (size_t)info.st_size, err);
}

void td_segment_close(td_segment *segment) {
  if (segment->base) munmap(segment->base, segment->n_bytes);
  if (segment->fd >= 0) close(segment->fd);
  *segment = TD_SEGMENT_CLOSED;
}
