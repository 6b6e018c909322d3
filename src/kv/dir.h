// src/kv/dir.h - a directory of KV pages (kv/record.h): which there are, how many bytes they take,
// and which was used least recently. Opening may be done on any thread; afterwards one thread. Only
// opening touches the files: who writes or removes one says so here.
//
// Files of any model may stand in it; other models' are never found, and age. What is not a record
// by its name is left alone; what is too short for one is removed.
#ifndef TD_KV_DIR_H
#define TD_KV_DIR_H

#include <stdbool.h>
#include <stdint.h>

#include "base/sha256.h"
#include "base/status.h"

typedef struct td_kv_dir td_kv_dir;

// Makes the directory if need be, and keeps other processes out. TD_EAGAIN: one is in it already.
// On success the caller owns *out; on error *out is NULL.
td_status td_kv_dir_open(td_kv_dir **out, const char *path, uint64_t max_bytes, td_err *err);
void td_kv_dir_close(td_kv_dir *dir);

const char *td_kv_dir_path(const td_kv_dir *dir);
uint64_t td_kv_dir_bytes(const td_kv_dir *dir);
uint64_t td_kv_dir_max_bytes(const td_kv_dir *dir);
void td_kv_dir_limit(td_kv_dir *dir, uint64_t max_bytes); // from now on
bool td_kv_dir_is_empty(const td_kv_dir *dir);
bool td_kv_dir_has(const td_kv_dir *dir, const td_digest *name);

// The record is used now. Unknown ones are ignored.
void td_kv_dir_use(td_kv_dir *dir, const td_digest *name);
// A record is there, used now. Without memory it is as if it were not.
void td_kv_dir_add(td_kv_dir *dir, const td_digest *name, uint64_t n_bytes);
void td_kv_dir_forget(td_kv_dir *dir, const td_digest *name);
// Where n_bytes more are too many: forgets the least recently used record and names it, for the
// caller to remove. False: there is room, or nothing left.
bool td_kv_dir_evict(td_kv_dir *dir, uint64_t n_bytes, td_digest *victim);

#endif
