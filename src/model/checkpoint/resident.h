// src/model/checkpoint/resident.h - a checkpoint's shards in shared memory: read once, sealed, and
// mapped by every process that computes with them, so that weights exist once and survive a
// worker's crash. The memory holds the shards unchanged, one after the other, followed by the JSON
// files that describe the tensors, so that a model can be opened without its directory. Tables of
// n-grams (td_store_is_table) are holes in it and stay in their files. On several
// NUMA nodes it lies in stripes on them (base/numa.h).
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/mem_info.h"
#include "base/numa.h"
#include "base/status.h"
#include "model/checkpoint/store.h"
#include "model/convert.h"

// Name of the shard made by td_resident_opts.conversion. No file can have it.
#define TD_RESIDENT_CONVERTED "converted/"
// Name of the memory of td_resident_opts.arena_bytes, likewise.
#define TD_RESIDENT_EXPERTS "experts/"

// Bytes [begin, end) of a shard.
typedef struct {
  uint32_t shard; // td_store_shard
  uint64_t begin, end;
} td_shard_range;

typedef struct {
  uint32_t n_threads;          // reader threads; 0: enough to keep a disk busy
  const atomic_bool *canceled; // set to abort the loading; may be NULL
  // Called on the caller's thread about every 200 ms and at the end; may be NULL.
  void (*on_progress)(void *ctx, uint64_t done_bytes, uint64_t total_bytes);
  void *ctx;
  const td_conversion *conversion; // conversion of the store, run after reading; may be NULL
  // The memory will be registered with a device. Drivers refuse that for write-sealed memory, so
  // only its size is sealed. Mappings are read-only in either case.
  bool for_device;
  // What stays in the files, as tables of n-grams do: whole pages of it are holes. By shard and
  // begin, rising.
  const td_shard_range *left_out;
  size_t n_left_out;
  // Bytes of memory behind the weights that processes may write to (model/drive/arena.h), not
  // allocated yet. With arena_bytes the memory is sealed as for a device.
  uint64_t arena_bytes;
} td_resident_opts;

typedef struct {
  td_page_kind pages;
  uint64_t n_bytes;                  // bytes of the shards that were read
  uint64_t huge_bytes;               // bytes in 2 MB pages, including gaps between shards
  unsigned n_nodes;                  // nodes that stripes are spread over; 1: not spread
  uint64_t node_bytes[TD_MAX_NODES]; // of the memory, on each node
} td_resident_stats;

// Memory needed for the store's shards, without tables of n-grams, and for the result of conversion
// (may be NULL), in bytes.
uint64_t td_resident_bytes(const td_store *store, const td_conversion *conversion);

// Reads the shards of a file-mapping store into sealed shared memory, in parallel and bypassing the
// page cache where the file system permits. The caller owns *fd, which is close-on-exec and, unless
// for_device, read-only. The memory lives as long as *fd or a mapping. TD_ENOMEM: it does not fit.
// TD_EIO: a file cannot be read or changed meanwhile. TD_ECANCELED: canceled was set.
td_status td_resident_load(int *fd, td_resident_stats *stats, const td_store *store,
                           const td_resident_opts *opts, td_err *err);

// A mapping of loaded weights. Zeroed: not attached.
typedef struct {
  const char *base;
  size_t n_bytes;
} td_resident;

// TD_EFORMAT if fd was not made by td_resident_load.
td_status td_resident_attach(td_resident *out, int fd, td_err *err);
void td_resident_detach(td_resident *resident);
// How the memory lies on NUMA nodes; base is NULL if it is not spread. The memory is borrowed.
td_stripes td_resident_stripes(const td_resident *resident);
// Data and size of the file called name, or NULL.
const void *td_resident_find(const td_resident *resident, const char *name, size_t *n_bytes);
