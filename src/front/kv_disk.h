// src/front/kv_disk.h - KV pages on disk behind those in memory, on the front's loop.
// Pages that memory will soon need for others are written to the directory ahead of that, and at
// the end all that memory still caches. A prompt whose pages are there has them read into its own
// pages before a worker sees it. Files are read and written on the loop's thread pool; calls and
// callbacks happen on the loop's thread.
#ifndef TD_FRONT_KV_DISK_H
#define TD_FRONT_KV_DISK_H

#include <uv.h>

#include "kv/dir.h"
#include "kv/kv.h"
#include "kv/pool.h"

typedef struct td_kv_disk td_kv_disk;
typedef struct td_kv_disk_read td_kv_disk_read;

typedef struct {
  uv_loop_t *loop;
  td_kv_dir *dir;    // borrowed, like all below
  td_digest model;   // root of pages' names
  const td_kv *kv;   // what memory holds; has this root
  int pool_fd;       // that some worker has attached to
  uint64_t flush_ns; // how long writing may take at the end
} td_kv_disk_opts;

// On success the caller owns *out; on error *out is NULL.
td_status td_kv_disk_open(td_kv_disk **out, const td_kv_disk_opts *opts, td_err *err);
// Cancels what is loading, and when its on_loaded have come writes what memory caches; then closed
// is called. Sequences may be closed meanwhile, none opened. NULL is legal.
void td_kv_disk_close(td_kv_disk *disk, void (*closed)(void *ctx), void *ctx);

typedef struct {
  uint64_t id;           // the request's
  const int32_t *prompt; // [n_prompt], borrowed until on_loaded
  uint32_t n_prompt;
  uint32_t n_cached;    // tokens that its pages hold already, a whole number of pages
  const int32_t *pages; // for the whole prompt; copied
  // n_cached tokens are there now, at least as many as before; also called when canceled.
  void (*on_loaded)(void *ctx, uint64_t id, uint32_t n_cached);
  void *ctx;
} td_kv_load;

// Begins to read pages of the prompt behind those it has. Until on_loaded, which comes later, its
// pages are this disk's to write. NULL: none are there, or computing them is quicker.
td_kv_disk_read *td_kv_disk_load(td_kv_disk *disk, const td_kv_load *load);
void td_kv_loading_cancel(td_kv_disk_read *loading);

// Writes what memory may lose soon; to be called when pages were given out or let go.
void td_kv_disk_save(td_kv_disk *disk);
// How long a worker took to read so many tokens, to weigh loading against.
void td_kv_disk_note_prefill(td_kv_disk *disk, uint32_t n_tokens, uint64_t ns);

typedef struct {
  uint64_t n_hits; // tokens that were loaded
  uint64_t read_bytes, written_bytes;
  uint64_t n_damaged; // records that were dropped
  uint64_t bytes;     // in the directory now
} td_kv_disk_stats;

td_kv_disk_stats td_kv_disk_stats_of(const td_kv_disk *disk); // NULL: zeros

#endif
