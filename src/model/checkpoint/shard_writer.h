// src/model/checkpoint/shard_writer.h - writes one safetensors file: tensors in any order and in
// pieces, under a temporary name until it is complete.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/status.h"
#include "model/checkpoint/safetensors.h"

typedef struct {
  char *name;        // owned
  const char *dtype; // spelled as in the file; static
  uint32_t n_dims;
  uint64_t shape[TD_SAFETENSORS_MAX_DIMS];
  uint64_t n_bytes;
  uint64_t offset; // in the file; set by td_shard_layout
} td_shard_entry;

// Sets every entry's offset and appends the start of the file, header length included, to header.
// In the file, tensors whose size is a multiple of 64 bytes come first, each aligned to a cache
// line, which speeds up reading; the rest follow by descending element size, so that each is
// aligned. The order of entries[] is unchanged.
td_status td_shard_layout(td_shard_entry *entries, size_t n, td_buf *header, td_err *err);

typedef struct {
  char *path, *temporary; // owned
  int fd;
} td_shard_writer;

// Creates the temporary file for path, n_bytes long, replacing one of an earlier attempt. On error
// nothing is open.
td_status td_shard_writer_open(td_shard_writer *out, const char *path, uint64_t n_bytes,
                               const td_buf *header, td_err *err);
// Writes bytes at offset. Any thread.
td_status td_shard_writer_put(const td_shard_writer *w, uint64_t offset, const void *bytes,
                              size_t len, td_err *err);
// Syncs the file to disk, still under its temporary name.
td_status td_shard_writer_sync(const td_shard_writer *w, td_err *err);
// Renames the file to its final name.
td_status td_shard_writer_commit(const td_shard_writer *w, td_err *err);
// Frees the writer. Without a commit the temporary file remains. A zeroed writer is legal.
void td_shard_writer_close(td_shard_writer *w);
