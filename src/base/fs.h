// src/base/fs.h - whole files: read, map, write in one piece.
#ifndef TD_BASE_FS_H
#define TD_BASE_FS_H

#include <stdbool.h>
#include <stddef.h>

#include "base/buf.h"
#include "base/status.h"

// Appends the file to out. TD_ENOENT, TD_EIO, or TD_ELIMIT when it has more than max_bytes.
td_status td_file_read(td_buf *out, const char *path, size_t max_bytes, td_err *err);
// The same of a model's file, which must be a regular one (TD_EINVAL: a FIFO, a device, a
// directory) and pass td_file_check_fetched.
td_status td_file_read_regular(td_buf *out, const char *path, size_t max_bytes, td_err *err);
// TD_EFORMAT when a file's bytes show that it was never downloaded whole: it is empty, or a git-lfs
// pointer in its place.
td_status td_file_check_fetched(const char *path, const void *bytes, size_t len, td_err *err);
// Files that are kept in memory, found by the path that they had; NULL: not this one.
typedef struct {
  const void *(*find)(void *ctx, const char *path, size_t *n_bytes);
  void *ctx;
} td_file_kept;

// For the calling thread, until it says otherwise (NULL): td_file_read_regular and td_file_exists
// take what kept finds before they look at the disk. Borrowed.
void td_file_keep(const td_file_kept *kept);
// Reads standard input to its end.
td_status td_stdin_read(td_buf *out, size_t max_bytes, td_err *err);
bool td_file_exists(const char *path);

// A read-only mapping of a whole file. data is NULL for an empty file.
typedef struct {
  const void *data;
  size_t n_bytes;
} td_file_map;

// TD_EINVAL: not a regular file.
td_status td_file_map_open(td_file_map *out, const char *path, td_err *err);
void td_file_map_close(td_file_map *map);

// Writes bytes to path through a temporary file beside it, so that no reader sees half of it.
td_status td_file_write(const char *path, const void *bytes, size_t len, td_err *err);

#endif
