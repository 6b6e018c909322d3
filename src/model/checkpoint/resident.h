// src/model/checkpoint/resident.h - a checkpoint's shards in shared memory: read once, sealed, and
// mapped by every process that computes with them, so that weights exist once and outlive a
// worker's death. Bytes are the files' own, one file behind the other, and behind them the JSON
// files that say what the tensors are, so that a model opens without its directory.
#ifndef TD_MODEL_CHECKPOINT_RESIDENT_H
#define TD_MODEL_CHECKPOINT_RESIDENT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/mem_info.h"
#include "base/numa.h"
#include "base/status.h"
#include "model/checkpoint/store.h"
#include "model/convert.h"

// The name, which no file can have, of what td_resident_opts.conversion makes.
#define TD_RESIDENT_CONVERTED "converted/"

typedef struct {
  uint32_t n_threads;          // that read; 0: as many as keep a disk busy
  const atomic_bool *canceled; // stops the loading; may be NULL
  // Called every 200 ms or so, and when all is read, on the caller's thread; may be NULL.
  void (*on_progress)(void *ctx, uint64_t done_bytes, uint64_t total_bytes);
  void *ctx;
  const td_conversion *conversion; // of the store, done behind the reading; may be NULL
  // A device is to register the memory, which drivers refuse where nobody may write to it: its size
  // alone is sealed then. Mappings are read-only all the same.
  bool for_device;
} td_resident_opts;

typedef struct {
  td_page_kind pages;
  uint64_t n_bytes;                  // of the shards
  uint64_t huge_bytes;               // of them and the gaps between them, in 2 MB pages
  unsigned n_nodes;                  // that the rows of matrices are spread over; 1: not at all
  uint64_t node_bytes[TD_MAX_NODES]; // pages of each; what is not cut is of none
} td_resident_stats;

// Memory that holding the store's shards, and what conversion (or NULL) makes, takes.
uint64_t td_resident_bytes(const td_store *store, const td_conversion *conversion);

// Reads the shards of a store that maps files, in parallel and past the page cache where the file
// system can, into memory that nobody can change afterwards. *fd, close-on-exec and read-only but
// for a device, is the caller's; the memory lives as long as it or a mapping. TD_ENOMEM: it does
// not fit. TD_EIO: a file cannot be read, or has changed meanwhile. TD_ECANCELED.
td_status td_resident_load(int *fd, td_resident_stats *stats, const td_store *store,
                           const td_resident_opts *opts, td_err *err);

// A mapping of what was loaded; zeroed is detached.
typedef struct {
  const char *base;
  size_t n_bytes;
} td_resident;

// TD_EFORMAT: fd is not what td_resident_load makes.
td_status td_resident_attach(td_resident *out, int fd, td_err *err);
void td_resident_detach(td_resident *resident);
// The bytes of the shard called name, or NULL.
const void *td_resident_find(const td_resident *resident, const char *name, size_t *n_bytes);

#endif
