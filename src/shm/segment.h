// src/shm/segment.h - shared memory: an anonymous file (memfd) whose size is sealed, so that no
// process can make another fault by shrinking it. The kernel frees it when the last mapping and
// descriptor are gone, so a crash leaves nothing behind.
#pragma once

#include <stddef.h>

#include "base/status.h"

// Zeroed with fd -1 is closed.
typedef struct {
  void *base; // page-aligned
  size_t n_bytes;
  int fd; // owned, close-on-exec
} td_segment;

#define TD_SEGMENT_CLOSED                                                                          \
  (td_segment) {                                                                                   \
    .fd = -1                                                                                       \
  }

// Creates a zeroed segment. name appears in /proc/PID/maps. On error *out is closed.
td_status td_segment_create(td_segment *out, const char *name, size_t n_bytes, td_err *err);
// Creates an empty segment. The first process to use it sets its size (td_segment_size) and then
// attaches. The caller owns *fd (close-on-exec); on error it is -1.
td_status td_segment_reserve(int *fd, const char *name, td_err *err);
// Sizes an empty segment to n_bytes of zeros and seals it.
td_status td_segment_size(int fd, size_t n_bytes, td_err *err);
// Maps a segment of another process. *out owns fd on success; on error fd is untouched. TD_EFORMAT:
// not a segment, or its size is not sealed.
td_status td_segment_attach(td_segment *out, int fd, td_err *err);
void td_segment_close(td_segment *segment); // closing a closed one is legal
