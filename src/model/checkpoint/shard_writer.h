// src/model/checkpoint/shard_writer.h - writes one safetensors file, its tensors in any order and
// piece by piece, under a temporary name until it is whole.
#ifndef TD_MODEL_CHECKPOINT_SHARD_WRITER_H
#define TD_MODEL_CHECKPOINT_SHARD_WRITER_H

#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"
#include "base/status.h"
#include "model/checkpoint/safetensors.h"

typedef struct {
  char *name;        // owned
  const char *dtype; // as the format spells it; static
  uint32_t n_dims;
  uint64_t shape[TD_SAFETENSORS_MAX_DIMS];
  uint64_t n_bytes;
  uint64_t offset; // in the file; td_shard_layout sets it
} td_shard_entry;

// Gives every entry its offset and appends to header what the file begins with, its length
// included. Entries of whole cache lines (64 bytes) come first and begin with one, which reads
// faster; then those of the widest elements, so that each is aligned. entries keep their order.
td_status td_shard_layout(td_shard_entry *entries, size_t n, td_buf *header, td_err *err);

typedef struct {
  char *path, *temporary; // owned
  int fd;
} td_shard_writer;

// Begins path, n_bytes long; replaces what an earlier attempt left. On error nothing is open.
td_status td_shard_writer_open(td_shard_writer *out, const char *path, uint64_t n_bytes,
                               const td_buf *header, td_err *err);
// Any thread.
td_status td_shard_writer_put(const td_shard_writer *w, uint64_t offset, const void *bytes,
                              size_t len, td_err *err);
// Makes the file durable, still under its temporary name.
td_status td_shard_writer_sync(const td_shard_writer *w, td_err *err);
// Gives it its name.
td_status td_shard_writer_commit(const td_shard_writer *w, td_err *err);
// Frees; what was not committed stays as the temporary file. A zeroed writer is legal.
void td_shard_writer_close(td_shard_writer *w);

#endif
