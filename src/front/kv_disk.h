// src/front/kv_disk.h - the disk tier of the KV cache, on the front's loop.
// Pages in memory that are next to be evicted are written to the directory ahead of time, at most
// as many as it has room for and each once per time that it becomes idle; at shutdown all pages
// that memory still caches. When a prompt's pages are on disk they are read into the request's own
// pages before a worker sees it. File I/O runs on the loop's thread pool; calls and callbacks
// happen on the loop's thread.
//
// While experts are read from the same drive, the tier is given half of its time to read pages,
// which saves a prefill and its experts, and a tenth to write.
#pragma once

#include <uv.h>

#include "kv/dir.h"
#include "kv/kv.h"
#include "kv/pool.h"

typedef struct td_kv_disk td_kv_disk;
typedef struct td_kv_disk_read td_kv_disk_read;

typedef struct {
  uv_loop_t *loop;
  td_kv_dir *dir;    // borrowed, like all below
  td_digest model;   // root of the page names
  const td_kv *kv;   // page metadata; has the same root
  int pool_fd;       // of the KV pool; a worker has already attached to it
  uint64_t flush_ns; // time limit for writing at close
  // Whether others need the drive more; NULL: never. Any thread.
  bool (*is_drive_busy)(void *ctx);
  void *ctx;
} td_kv_disk_opts;

// On success the caller owns *out; on error *out is NULL.
td_status td_kv_disk_open(td_kv_disk **out, const td_kv_disk_opts *opts, td_err *err);
// Cancels loads; once their on_loaded callbacks have run, writes the pages that memory caches, then
// calls closed. Sequences may be closed meanwhile, but none opened. NULL is legal.
void td_kv_disk_close(td_kv_disk *disk, void (*closed)(void *ctx), void *ctx);

typedef struct {
  uint64_t id;           // the request's
  uint64_t salt;         // the prompt's (kv/kv.h)
  const int32_t *prompt; // [n_prompt], borrowed until on_loaded
  uint32_t n_prompt;
  uint32_t n_cached;    // tokens already in its pages, a multiple of the page size
  const int32_t *pages; // pages for the whole prompt; copied
  // The pages now hold n_cached tokens, at least as many as before. Also called after cancel.
  void (*on_loaded)(void *ctx, uint64_t id, uint32_t n_cached);
  void *ctx;
} td_kv_load;

// Starts reading the pages that follow the ones the prompt has. Until on_loaded, which is never
// called from inside this function, nothing else writes to them. NULL: none are on disk, or prefill
// is faster.
td_kv_disk_read *td_kv_disk_load(td_kv_disk *disk, const td_kv_load *load);
void td_kv_loading_cancel(td_kv_disk_read *loading);

// Writes pages that may soon be evicted. Call after pages were allocated or released.
void td_kv_disk_save(td_kv_disk *disk);
// Records the duration of a prefill of n_tokens, to weigh loading against computing.
void td_kv_disk_note_prefill(td_kv_disk *disk, uint32_t n_tokens, uint64_t ns);

typedef struct {
  uint64_t n_hits; // tokens loaded
  uint64_t read_bytes, written_bytes;
  uint64_t rewritten_bytes; // of written_bytes: of pages that were written before with this content
  uint64_t n_damaged;       // records dropped as damaged
  uint64_t bytes;           // size of the directory now
} td_kv_disk_stats;

td_kv_disk_stats td_kv_disk_stats_of(const td_kv_disk *disk); // NULL: zeros
// Bytes written for each byte of pages; 1: every page was written once, or none was.
double td_kv_disk_amplification(const td_kv_disk_stats *stats);
