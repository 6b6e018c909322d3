// src/kv/dir.h - index of a directory of KV pages (kv/record.h): which pages exist, their total
// size, and their LRU order. Opening may happen on any thread, afterwards one thread. Only opening
// touches files; whoever writes or removes one must update the index.
//
// The directory may contain files of several models. Files of other models are never looked up, so
// they age and are evicted. Files not named like a record are left alone; files too short for one
// are removed.
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "base/sha256.h"
#include "base/status.h"

typedef struct td_kv_dir td_kv_dir;

// Creates the directory if needed and locks it against other processes. TD_EAGAIN: another process
// uses it. On success the caller owns *out; on error *out is NULL.
td_status td_kv_dir_open(td_kv_dir **out, const char *path, uint64_t max_bytes, td_err *err);
void td_kv_dir_close(td_kv_dir *dir);

const char *td_kv_dir_path(const td_kv_dir *dir);
uint64_t td_kv_dir_bytes(const td_kv_dir *dir);
uint64_t td_kv_dir_max_bytes(const td_kv_dir *dir);
// takes effect at the next td_kv_dir_evict
void td_kv_dir_limit(td_kv_dir *dir, uint64_t max_bytes);
bool td_kv_dir_is_empty(const td_kv_dir *dir);
bool td_kv_dir_has(const td_kv_dir *dir, const td_digest *name);

// Marks a record as most recently used. Unknown names are ignored.
void td_kv_dir_use(td_kv_dir *dir, const td_digest *name);
// Adds a record as most recently used. Without memory the record is not indexed.
void td_kv_dir_add(td_kv_dir *dir, const td_digest *name, uint64_t n_bytes);
void td_kv_dir_forget(td_kv_dir *dir, const td_digest *name);
// If n_bytes more would exceed the limit: removes the least recently used record from the index and
// returns its name, for the caller to delete the file. False: there is room, or no record is left.
bool td_kv_dir_evict(td_kv_dir *dir, uint64_t n_bytes, td_digest *victim);
