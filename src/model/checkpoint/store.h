// src/model/checkpoint/store.h - the tensors of a checkpoint directory: every shard mapped, found
// by name.
#ifndef TD_MODEL_CHECKPOINT_STORE_H
#define TD_MODEL_CHECKPOINT_STORE_H

#include <stdbool.h>

#include "model/checkpoint/safetensors.h"

typedef struct td_store td_store;

// Opens model.safetensors, or else the shards that model.safetensors.index.json names. Errors name
// file and tensor. On success the caller owns *out; tensors and their data live until close.
td_status td_store_open(td_store **out, const char *dir, td_err *err);
// The same out of resident weights (model/checkpoint/resident.h): of the directory, only the index
// is read. weights_fd is borrowed for the call.
td_status td_store_open_resident(td_store **out, const char *dir, int weights_fd, td_err *err);
void td_store_close(td_store *store);

// Adds the tensors of a shard in memory (model/convert.h), borrowed until close, behind the others;
// td_store_open_resident does so where the resident weights hold one. TD_EFORMAT: a name is taken.
td_status td_store_add_converted(td_store *store, const void *bytes, size_t n_bytes, td_err *err);
bool td_store_is_converted(const td_store *store, const td_tensor *t);

size_t td_store_n_tensors(const td_store *store);
// In order of shards, and in a shard of data; converted ones last.
const td_tensor *td_store_tensor(const td_store *store, size_t idx);
// Index of the tensor, or -1.
ptrdiff_t td_store_find(const td_store *store, const char *name);
// Path of the file that lists the tensors: the index, or the only shard.
const char *td_store_listing(const td_store *store);

// One file of the checkpoint; what is converted is in none.
typedef struct {
  const char *path, *name; // name: path without the directory; both live until close
  uint64_t n_bytes;
  const uint8_t *bytes; // [n_bytes], in which its tensors lie
} td_shard_info;
size_t td_store_n_shards(const td_store *store);
td_shard_info td_store_shard(const td_store *store, size_t idx);
// The resident weights that all shards are parts of; NULL: they are files.
const void *td_store_memory(const td_store *store, size_t *n_bytes);

#endif
