// src/base/fs.h - whole files: read, map, write atomically.
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/buf.h"
#include "base/status.h"

// Appends the file to out, which must be a regular one (TD_EINVAL: a FIFO, which could block for
// ever, a device, a directory). TD_ENOENT, TD_EIO; TD_ELIMIT if it is larger than max_bytes.
td_status td_file_read(td_buf *out, const char *path, size_t max_bytes, td_err *err);
// Like td_file_read, for a model's file: it must pass td_file_check_fetched.
td_status td_file_read_regular(td_buf *out, const char *path, size_t max_bytes, td_err *err);
// TD_EFORMAT if a file was evidently not downloaded completely: it is empty or a git-lfs pointer.
td_status td_file_check_fetched(const char *path, const void *bytes, size_t len, td_err *err);
// Files kept in memory, found by their original path. find returns NULL for any other file.
typedef struct {
  const void *(*find)(void *ctx, const char *path, size_t *n_bytes);
  void *ctx;
} td_file_kept;

// Sets the calling thread's kept files (borrowed), until the next call; NULL: none.
// td_file_read_regular, td_file_map_open and td_file_exists look there before the disk.
void td_file_keep(const td_file_kept *kept);
// Reads standard input to the end.
td_status td_stdin_read(td_buf *out, size_t max_bytes, td_err *err);
bool td_file_exists(const char *path);

// A read-only mapping of a whole file, or a kept file, borrowed. data is NULL if the file is empty.
typedef struct {
  const void *data;
  size_t n_bytes;
  bool is_kept;
} td_file_map;

// TD_EINVAL: not a regular file.
td_status td_file_map_open(td_file_map *out, const char *path, td_err *err);
td_status td_file_map_disk(td_file_map *out, const char *path, td_err *err); // never a kept file
void td_file_map_close(td_file_map *map);

// Writes path atomically: through a temporary file in the same directory.
td_status td_file_write(const char *path, const void *bytes, size_t len, td_err *err);
