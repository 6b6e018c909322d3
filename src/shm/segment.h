// src/shm/segment.h - a piece of memory two processes share: an anonymous file (memfd) whose size
// is sealed, so that neither side can make the other fault by shrinking it. The kernel frees it
// when the last process that maps it or holds its descriptor is gone: a crash leaves nothing.
#ifndef TD_SHM_SEGMENT_H
#define TD_SHM_SEGMENT_H

#include <stddef.h>

#include "base/status.h"

// A zeroed segment with fd -1 is closed.
typedef struct {
  void *base; // page-aligned
  size_t n_bytes;
  int fd; // owned, close-on-exec
} td_segment;

#define TD_SEGMENT_CLOSED                                                                          \
  (td_segment) {                                                                                   \
    .fd = -1                                                                                       \
  }

// A new zeroed segment. name shows in /proc/PID/maps. On error *out is closed.
td_status td_segment_create(td_segment *out, const char *name, size_t n_bytes, td_err *err);
// An empty segment that whoever maps it first gives its size (td_segment_size), then attaches to.
// The caller owns *fd (close-on-exec); on error it is -1.
td_status td_segment_reserve(int *fd, const char *name, td_err *err);
// Gives an empty segment n_bytes of zeros for good.
td_status td_segment_size(int fd, size_t n_bytes, td_err *err);
// Maps a segment that another process made; fd is owned by *out on success, untouched on error.
// TD_EFORMAT: not a segment, or its size is not sealed.
td_status td_segment_attach(td_segment *out, int fd, td_err *err);
void td_segment_close(td_segment *segment); // closing a closed one is legal

#endif
