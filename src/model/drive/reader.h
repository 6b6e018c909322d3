// src/model/drive/reader.h - threads that read parts of files, bypassing the page cache where the
// file system permits. Reads that fail are tried again.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/status.h"
#include "model/checkpoint/store.h"

typedef struct td_drive_reader td_drive_reader;

// What identifies a file's content.
typedef struct {
  uint64_t dev, ino, n_bytes, mtime_ns;
} td_file_id;
// TD_EIO: it cannot be read.
td_status td_file_id_of(td_file_id *out, const char *path, td_err *err);

// One read: [offset, offset + n_bytes) to `to`, all multiples of TD_DRIVE_ALIGN, of which the first
// n_needed must be there: a file may end behind them.
typedef struct {
  void *to;
  uint64_t offset, n_bytes, n_needed;
  uint32_t shard;
  uint32_t slot, generation, part; // for done
} td_drive_read;

typedef struct {
  const td_store *store; // borrowed, as is ids
  const td_file_id *ids; // [td_store_n_shards]: files must be these
  unsigned n_threads;    // of each drive; 0: enough for one
  // A folder with the same files on another drive, or NULL or "". Whichever drive's thread is free
  // takes the next read; what fails on one is read from the other.
  const char *mirror;
  // Called by a thread when a read has ended, with an errno or 0. ESTALE: the file has changed.
  void (*done)(void *ctx, const td_drive_read *read, int error);
  void *ctx;
  // In place of pread, for tests; may be NULL.
  ssize_t (*pread)(int fd, void *to, size_t n_bytes, off_t offset);
} td_drive_reader_opts;

typedef struct {
  uint64_t n_bytes; // read
  uint64_t busy_ns; // time with a read in progress
} td_drive_stats;

// TD_EINVAL: the mirror's files are not the same.
td_status td_drive_reader_open(td_drive_reader **out, const td_drive_reader_opts *opts,
                               td_err *err);
// Reads that have not begun are dropped; done is not called for them.
void td_drive_reader_close(td_drive_reader *reader);
// Queues a read, first in, first out. False: out of memory.
bool td_drive_reader_queue(td_drive_reader *reader, const td_drive_read *read);
// Ends the slot's reads that have not begun, with ECANCELED.
void td_drive_reader_drop(td_drive_reader *reader, uint32_t slot);
td_drive_stats td_drive_reader_stats(td_drive_reader *reader);
