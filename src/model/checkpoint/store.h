// src/model/checkpoint/store.h - the tensors of a checkpoint directory: maps every shard, finds
// tensors by name.
#pragma once

#include <stdbool.h>

#include "base/numa.h"
#include "model/checkpoint/safetensors.h"

typedef struct td_store td_store;

// Opens model.safetensors, or else the shards listed in model.safetensors.index.json. Errors name
// file and tensor. On success the caller owns *out; tensors and their data live until close.
td_status td_store_open(td_store **out, const char *dir, td_err *err);
// Like td_store_open, from resident weights (model/checkpoint/resident.h): only the index is read
// from the directory. weights_fd is borrowed for the call.
td_status td_store_open_resident(td_store **out, const char *dir, int weights_fd, td_err *err);
void td_store_close(td_store *store);

// Appends the tensors of a converted shard in memory (model/convert.h), borrowed until close.
// td_store_open_resident does this itself if the resident weights include one. TD_EFORMAT: a name
// exists already.
td_status td_store_add_converted(td_store *store, const void *bytes, size_t n_bytes, td_err *err);
// The tensor's data have moved; borrowed until close.
void td_store_place(td_store *store, const td_tensor *t, const void *data);
bool td_store_is_converted(const td_store *store, const td_tensor *t);

size_t td_store_n_tensors(const td_store *store);
// Sorted by shard, then by data offset; converted tensors last.
const td_tensor *td_store_tensor(const td_store *store, size_t idx);
// Index of the tensor, or -1.
ptrdiff_t td_store_find(const td_store *store, const char *name);
// Path of the file that lists the tensors: the index, or the only shard.
const char *td_store_listing(const td_store *store);

// Whether the tensor is a part of a table of n-grams, of which a token reads single rows and which
// may be larger than memory: it is mapped from its file even where weights are resident.
bool td_store_is_table(const char *name);
uint64_t td_store_table_bytes(const td_store *store); // of all of them

// One shard file. Converted tensors are in none.
typedef struct {
  const char *path, *name; // name: path without the directory; both live until close
  uint64_t n_bytes;
  const uint8_t *bytes; // [n_bytes]; contains the data of its tensors
} td_shard_info;
size_t td_store_n_shards(const td_store *store);
td_shard_info td_store_shard(const td_store *store, size_t idx);
// The resident memory that contains all shards; NULL if files are mapped.
const void *td_store_memory(const td_store *store, size_t *n_bytes);
// How it lies on NUMA nodes (td_resident_stripes).
td_stripes td_store_stripes(const td_store *store);
