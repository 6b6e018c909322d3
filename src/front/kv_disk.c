// src/front/kv_disk.c - the disk tier of the KV cache: loading a prompt's pages, writing pages
// ahead of their eviction. Everything but the run_* functions is on the loop's thread.
#include "front/kv_disk.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/jitter.h"
#include "base/log.h"
#include "base/units.h"
#include "kv/record.h"

#define AHEAD       2  // 1/AHEAD of the pages are kept empty or already on disk
#define MAX_VICTIMS 64 // most files removed to make room for one
#define MAX_FAILED  3  // failed writes in a row before a pause
#define PAUSE_S     60u
#define WRITE_PAUSE 9 // times what a write took, while the drive is busy

struct td_kv_disk_read {
  uv_work_t work;
  td_kv_disk *disk;
  td_kv_load load;
  int32_t *pages;   // [n], the pages to fill
  td_digest *names; // [n], their names
  uint32_t n, n_loaded;
  atomic_bool is_canceled;
  td_err err; // of page n_loaded, where loading stopped; code TD_OK: none
  uint64_t ns;
};

// What a page held when it was last written, and when it had become idle; 0: not written.
typedef struct {
  uint64_t serial, idled;
} written_page;

// The page being written; there is one at a time.
typedef struct {
  uv_work_t work;
  int32_t page;
  written_page what;
  td_kv_record record;
  uint64_t used_ns;
  td_digest victims[MAX_VICTIMS];
  uint32_t n_victims;
  bool has_room;
  td_err err;
  uint64_t pause_ns; // before the next one, if the drive is busy
} saving;

struct td_kv_disk {
  td_kv_disk_opts opts;
  td_kv_shape shape;
  uint64_t record_bytes;
  td_kv_disk_stats stats;
  uint32_t n_loadings;
  td_kv_disk_read **loadings; // [shape.n_pages]: each load has at least one page of its own
  saving save;
  char *file;               // [record_bytes], the record being written
  int32_t *tokens;          // [page_tokens], its tokens
  int32_t *idle;            // [shape.n_pages], scratch list of pages
  written_page *written;    // [shape.n_pages]
  uint64_t given_max_bytes; // of the directory, before a full disk shrank it
  bool is_saving, has_shrunk;
  uint32_t n_failed;          // failed writes in a row
  uint64_t paused_until_ns;   // no writes before then
  double read_ns, prefill_ns; // averages per page; 0: not measured yet
  // closing
  void (*closed)(void *ctx);
  void *closed_ctx;
  bool is_closing, is_flushing;
  uint32_t n_to_flush;
  uint64_t deadline_ns, flush_used_ns, flush_left_bytes;
};

static uint64_t realtime_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static td_kv_record record_of(const td_kv_disk *disk, const td_digest *name,
                              const int32_t *tokens) {
  return (td_kv_record){.model = disk->opts.model,
                        .name = *name,
                        .tokens = tokens,
                        .n_tokens = disk->shape.page_tokens,
                        .n_bytes = td_kv_shape_page_bytes(&disk->shape)};
}

// At most for so long.
static void wait_for_drive(const td_kv_disk *disk, uint64_t most_ns) {
  const uint64_t begin_ns = td_clock_ns();
  while (disk->opts.is_drive_busy && disk->opts.is_drive_busy(disk->opts.ctx) &&
         td_clock_ns() - begin_ns < most_ns)
    usleep(1000);
}

// ---- loading ----------------------------------------------------------------------------------

static td_status load_page(td_kv_disk_read *l, char *file, td_err *err) {
  const td_kv_disk *disk = l->disk;
  uint32_t page_tokens = disk->shape.page_tokens, i = l->n_loaded;
  const char *dir = td_kv_dir_path(disk->opts.dir);
  const int32_t *tokens = l->load.prompt + l->load.n_cached + (size_t)i * page_tokens;
  td_kv_record record = record_of(disk, &l->names[i], tokens);
  td_status st = td_kv_record_read(dir, &record, file, err);
  if (st == TD_EFORMAT) td_kv_record_remove(dir, &record.name);
  if (st != TD_OK) return st;
  const char *content = file + td_kv_record_offset(&record);
  return td_kv_pool_put(disk->opts.pool_fd, &disk->shape, l->pages[i], content, err);
}

static void run_load(uv_work_t *work) {
  td_kv_disk_read *l = work->data;
  uint64_t begin_ns = td_clock_ns();
  char *file = malloc(l->disk->record_bytes);
  td_status st = file ? TD_OK : TD_ENOENT; // out of memory counts as not found
  while (st == TD_OK && l->n_loaded < l->n && !atomic_load(&l->is_canceled)) {
    const uint64_t page_ns = td_clock_ns();
    st = load_page(l, file, &l->err);
    if (st == TD_OK && ++l->n_loaded < l->n) wait_for_drive(l->disk, td_clock_ns() - page_ns);
  }
  free(file);
  l->err.code = st;
  l->ns = td_clock_ns() - begin_ns;
  // A prefix is only usable from its start, so its first pages are marked as the most recently
  // used.
  uint64_t now_ns = realtime_ns();
  for (uint32_t i = 0; i < l->n_loaded; i++)
    td_kv_record_touch(td_kv_dir_path(l->disk->opts.dir), &l->names[i], now_ns - i);
}

static void free_loading(td_kv_disk_read *l) {
  if (!l) return;
  free(l->pages);
  free(l->names);
  free(l);
}

// Forgets the page that failed to load, so that it is not looked up again.
static void note_failure(td_kv_disk *disk, const td_kv_disk_read *l) {
  if (l->err.code == TD_OK || l->n_loaded == l->n) return;
  const td_digest *name = &l->names[l->n_loaded];
  td_kv_dir_forget(disk->opts.dir, name);
  if (l->err.code == TD_ENOENT) return;
  char hex[TD_DIGEST_HEX];
  td_digest_hex(hex, name);
  disk->stats.n_damaged++;
  td_warn("%s/%s" TD_KV_RECORD_SUFFIX " is dropped: %s", td_kv_dir_path(disk->opts.dir), hex,
          l->err.msg);
}

static double blend(double old, double now) {
  return old > 0 ? old * 0.75 + now * 0.25 : now;
}

static void maybe_finish(td_kv_disk *disk);

static void after_load(uv_work_t *work, int status) {
  (void)status; // the work itself is never canceled
  td_kv_disk_read *l = work->data;
  td_kv_disk *disk = l->disk;
  uint32_t i = 0;
  while (disk->loadings[i] != l)
    i++;
  disk->loadings[i] = disk->loadings[--disk->n_loadings];
  for (i = l->n_loaded; i > 0; i--)
    td_kv_dir_use(disk->opts.dir, &l->names[i - 1]);
  note_failure(disk, l);
  if (l->n_loaded) disk->read_ns = blend(disk->read_ns, (double)l->ns / l->n_loaded);
  uint32_t n_tokens = l->n_loaded * disk->shape.page_tokens;
  disk->stats.n_hits += n_tokens;
  disk->stats.read_bytes += l->n_loaded * disk->record_bytes;
  l->load.on_loaded(l->load.ctx, l->load.id, l->load.n_cached + n_tokens);
  free_loading(l);
  maybe_finish(disk);
}

// Lists the prompt's pages that follow those it has, up to the first that the directory lacks.
// Excludes the prompt's last token, which is always computed.
static void look_up(td_kv_disk_read *l) {
  const td_kv_disk *disk = l->disk;
  uint32_t page_tokens = disk->shape.page_tokens, n_had = l->load.n_cached / page_tokens;
  td_digest name;
  td_kv_name_salted(&name, &disk->opts.model, l->load.salt);
  for (uint32_t i = 0; i < (l->load.n_prompt - 1) / page_tokens; i++) {
    td_kv_name_next(&name, &name, l->load.prompt + (size_t)i * page_tokens, page_tokens);
    if (i < n_had) continue;
    if (!td_kv_dir_has(disk->opts.dir, &name)) return;
    l->names[l->n++] = name;
  }
}

// Compares the measured times; true until both are known. The read time decays, so a slow disk is
// tried again after a while.
static bool is_worth_reading(td_kv_disk *disk) {
  if (disk->prefill_ns <= 0 || disk->read_ns <= disk->prefill_ns) return true;
  disk->read_ns *= 0.9;
  return false;
}

static td_kv_disk_read *make_loading(td_kv_disk *disk, const td_kv_load *load) {
  uint32_t n_max = load->n_prompt / disk->shape.page_tokens;
  uint32_t n_had = load->n_cached / disk->shape.page_tokens;
  td_kv_disk_read *l = calloc(1, sizeof *l);
  if (!l) return NULL;
  *l = (td_kv_disk_read){.disk = disk,
                         .load = *load,
                         .pages = malloc((n_max - n_had) * sizeof *l->pages),
                         .names = malloc((n_max - n_had) * sizeof *l->names)};
  if (l->pages && l->names) return l;
  free_loading(l);
  return NULL;
}

td_kv_disk_read *td_kv_disk_load(td_kv_disk *disk, const td_kv_load *load) {
  uint32_t page_tokens = disk->shape.page_tokens;
  if (disk->is_closing || td_kv_dir_is_empty(disk->opts.dir)) return NULL;
  if (load->n_prompt - load->n_cached <= page_tokens || !is_worth_reading(disk)) return NULL;
  td_kv_disk_read *l = make_loading(disk, load);
  if (l) look_up(l);
  if (!l || !l->n) {
    free_loading(l);
    return NULL;
  }
  memcpy(l->pages, load->pages + load->n_cached / page_tokens, l->n * sizeof *l->pages);
  TD_CHECK(disk->n_loadings < disk->shape.n_pages);
  disk->loadings[disk->n_loadings++] = l;
  l->work.data = l;
  TD_CHECK(uv_queue_work(disk->opts.loop, &l->work, run_load, after_load) == 0);
  return l;
}

void td_kv_loading_cancel(td_kv_disk_read *loading) {
  atomic_store(&loading->is_canceled, true);
}

void td_kv_disk_note_prefill(td_kv_disk *disk, uint32_t n_tokens, uint64_t ns) {
  if (n_tokens < disk->shape.page_tokens) return;
  disk->prefill_ns = blend(disk->prefill_ns,
                           (double)td_jitter_time(ns) / n_tokens * (double)disk->shape.page_tokens);
}

// ---- saving -----------------------------------------------------------------------------------
// A page is not pinned while it is copied. If its serial is unchanged afterwards, it was not
// overwritten.

static void run_copy(uv_work_t *work) {
  td_kv_disk *disk = work->data;
  saving *s = &disk->save;
  char *content = disk->file + td_kv_record_offset(&s->record);
  wait_for_drive(disk, s->pause_ns);
  s->err.code = TD_OK;
  s->err.code = td_kv_pool_get(disk->opts.pool_fd, &disk->shape, s->page, content, &s->err);
}

static void run_write(uv_work_t *work) {
  td_kv_disk *disk = work->data;
  saving *s = &disk->save;
  const char *dir = td_kv_dir_path(disk->opts.dir);
  const uint64_t begin_ns = td_clock_ns();
  for (uint32_t i = 0; i < s->n_victims; i++)
    td_kv_record_remove(dir, &s->victims[i]);
  s->err.code = TD_OK;
  if (!s->has_room) return;
  td_kv_record_seal(disk->file, &s->record);
  s->err.code = td_kv_record_write(dir, &s->record, disk->file, s->used_ns, &s->err);
  s->pause_ns = WRITE_PAUSE * (td_clock_ns() - begin_ns);
}

static void save_next(td_kv_disk *disk);

// The disk is full: limits the directory to its current size, so that old records make room for new
// ones. False: the directory has nothing to evict.
static bool shrink(td_kv_disk *disk) {
  td_kv_dir *dir = disk->opts.dir;
  uint64_t n_bytes = td_kv_dir_bytes(dir), less = td_kv_dir_max_bytes(dir) - n_bytes;
  if (n_bytes < disk->record_bytes) {
    td_kv_dir_limit(dir, disk->given_max_bytes); // after the pause from the start
    return false;
  }
  if (!disk->has_shrunk) {
    td_warn("--kv-dir %s: %s; it is kept to the %s that it has", td_kv_dir_path(dir),
            disk->save.err.msg, td_size(n_bytes).text);
  }
  disk->has_shrunk = true;
  td_kv_dir_limit(dir, n_bytes);
  if (disk->is_flushing) {
    uint64_t left = disk->flush_left_bytes + disk->record_bytes; // the failed page is retried
    disk->n_to_flush++;
    disk->flush_left_bytes = left > less ? left - less : 0;
  }
  return true;
}

static void pause_saving(td_kv_disk *disk) {
  disk->n_failed = 0;
  disk->paused_until_ns = td_clock_ns() + PAUSE_S * 1000000000ull;
  td_warn("--kv-dir %s: %s; no more pages are written to it%s", td_kv_dir_path(disk->opts.dir),
          disk->save.err.msg, disk->is_flushing ? "" : " for a minute");
}

static void after_write(uv_work_t *work, int status) {
  (void)status;
  td_kv_disk *disk = work->data;
  saving *s = &disk->save;
  disk->is_saving = false;
  written_page *before = &disk->written[s->page];
  const bool is_again = before->serial == s->what.serial;
  if (s->err.code != TD_ELIMIT) *before = s->what;
  if (s->err.code != TD_OK) {
    if (s->err.code != TD_ELIMIT) {
      // Counts the page as written until it is next looked up, so that it is not retried soon.
      td_kv_dir_add(disk->opts.dir, &disk->save.record.name, 0);
      if (++disk->n_failed == MAX_FAILED) pause_saving(disk);
    } else if (!shrink(disk)) {
      pause_saving(disk);
    }
  } else if (s->has_room) {
    td_kv_dir_add(disk->opts.dir, &s->record.name, disk->record_bytes);
    disk->stats.written_bytes += disk->record_bytes;
    if (is_again) disk->stats.rewritten_bytes += disk->record_bytes;
    disk->n_failed = 0;
  }
  save_next(disk);
}

static void after_copy(uv_work_t *work, int status) {
  (void)status;
  td_kv_disk *disk = work->data;
  saving *s = &disk->save;
  td_kv_content now;
  bool is_whole = td_kv_content_of(disk->opts.kv, s->page, &now) && now.serial == s->what.serial;
  if (s->err.code != TD_OK) pause_saving(disk);
  if (s->err.code != TD_OK || !is_whole) {
    disk->is_saving = false;
    save_next(disk);
    return;
  }
  td_kv_dir *dir = disk->opts.dir;
  s->n_victims = 0;
  while (s->n_victims < MAX_VICTIMS &&
         td_kv_dir_evict(dir, disk->record_bytes, &s->victims[s->n_victims]))
    s->n_victims++;
  s->has_room = td_kv_dir_bytes(dir) + disk->record_bytes <= td_kv_dir_max_bytes(dir);
  TD_CHECK(uv_queue_work(disk->opts.loop, &s->work, run_write, after_write) == 0);
}

static void save_page(td_kv_disk *disk, int32_t page, const td_kv_content *content) {
  saving *s = &disk->save;
  memcpy(disk->tokens, content->tokens, disk->shape.page_tokens * sizeof *disk->tokens);
  s->page = page;
  s->what = (written_page){content->serial, content->idled};
  s->record = record_of(disk, &content->name, disk->tokens);
  s->used_ns = disk->is_flushing ? disk->flush_used_ns-- : realtime_ns();
  s->work.data = disk;
  disk->is_saving = true;
  TD_CHECK(uv_queue_work(disk->opts.loop, &s->work, run_copy, after_copy) == 0);
}

// The next page likely to be evicted that is not on disk yet. Looks at no more pages than the
// directory has room for, or writing one would drive out another that is as likely to be evicted,
// for ever. Nor does a page come twice before it is used again, whoever else writes here.
static bool find_endangered(td_kv_disk *disk, int32_t *page, td_kv_content *content) {
  uint32_t ahead = disk->shape.n_pages / AHEAD + 1, n_empty = td_kv_n_empty(disk->opts.kv);
  uint32_t n = n_empty < ahead ? td_kv_idle(disk->opts.kv, ahead - n_empty, disk->idle) : 0;
  uint64_t room = td_kv_dir_max_bytes(disk->opts.dir) / disk->record_bytes;
  for (uint32_t i = 0; i < n && room; i++) {
    *page = disk->idle[i];
    if (!td_kv_content_of(disk->opts.kv, *page, content)) continue;
    room--;
    if (td_kv_dir_has(disk->opts.dir, &content->name)) continue;
    if (disk->written[*page].idled != content->idled) return true;
  }
  return false;
}

// The next page to keep across the restart, most recently used first.
static bool find_remaining(td_kv_disk *disk, int32_t *page, td_kv_content *content) {
  while (disk->n_to_flush && disk->flush_left_bytes >= disk->record_bytes) {
    disk->flush_left_bytes -= disk->record_bytes;
    *page = disk->idle[--disk->n_to_flush];
    if (!td_kv_content_of(disk->opts.kv, *page, content)) continue;
    if (!td_kv_dir_has(disk->opts.dir, &content->name)) return true;
    td_kv_dir_use(disk->opts.dir, &content->name);
  }
  return false;
}

static void save_next(td_kv_disk *disk) {
  int32_t page;
  td_kv_content content;
  bool is_late = disk->is_flushing && td_clock_ns() >= disk->deadline_ns;
  if (is_late && disk->n_to_flush) {
    td_warn("--kv-dir %s: %u pages were not written in time", td_kv_dir_path(disk->opts.dir),
            disk->n_to_flush);
  }
  bool is_paused = td_clock_ns() < disk->paused_until_ns;
  bool is_stopped = is_paused || is_late || (disk->is_closing && !disk->is_flushing);
  if (!is_stopped && (disk->is_flushing ? find_remaining : find_endangered)(disk, &page, &content))
    save_page(disk, page, &content);
  else
    maybe_finish(disk);
}

void td_kv_disk_save(td_kv_disk *disk) {
  if (!disk->is_saving && !disk->is_closing) save_next(disk);
}

// ---- open and close ---------------------------------------------------------------------------

static void free_tier(td_kv_disk *disk) {
  free(disk->loadings);
  free(disk->file);
  free(disk->tokens);
  free(disk->idle);
  free(disk->written);
  free(disk);
}

static void maybe_finish(td_kv_disk *disk) {
  if (!disk->is_closing || disk->n_loadings || disk->is_saving) return;
  if (!disk->is_flushing) {
    disk->is_flushing = true;
    disk->opts.is_drive_busy = NULL; // no worker reads any more
    disk->n_to_flush = td_kv_idle(disk->opts.kv, disk->shape.n_pages, disk->idle);
    disk->deadline_ns = td_clock_ns() + disk->opts.flush_ns;
    disk->flush_used_ns = realtime_ns();
    disk->flush_left_bytes = td_kv_dir_max_bytes(disk->opts.dir);
    save_next(disk); // calls this again when nothing is left
    return;
  }
  void (*closed)(void *) = disk->closed;
  void *ctx = disk->closed_ctx;
  free_tier(disk);
  closed(ctx);
}

void td_kv_disk_close(td_kv_disk *disk, void (*closed)(void *ctx), void *ctx) {
  if (!disk) {
    closed(ctx);
    return;
  }
  disk->is_closing = true;
  disk->closed = closed;
  disk->closed_ctx = ctx;
  for (uint32_t i = 0; i < disk->n_loadings; i++)
    td_kv_loading_cancel(disk->loadings[i]);
  maybe_finish(disk);
}

td_status td_kv_disk_open(td_kv_disk **out, const td_kv_disk_opts *opts, td_err *err) {
  *out = NULL;
  td_kv_shape shape;
  td_status st = td_kv_pool_shape(&shape, opts->pool_fd, err);
  if (st != TD_OK) return st;
  td_kv_disk *disk = calloc(1, sizeof *disk);
  if (!disk) return td_fail(err, TD_ENOMEM, "out of memory");
  *disk = (td_kv_disk){.opts = *opts, .shape = shape};
  td_kv_record record = record_of(disk, &opts->model, NULL);
  disk->record_bytes = td_kv_record_bytes(&record);
  disk->loadings = malloc(shape.n_pages * sizeof *disk->loadings);
  disk->file = malloc(disk->record_bytes);
  disk->tokens = malloc(shape.page_tokens * sizeof *disk->tokens);
  disk->idle = malloc(shape.n_pages * sizeof *disk->idle);
  disk->written = calloc(shape.n_pages, sizeof *disk->written);
  disk->given_max_bytes = td_kv_dir_max_bytes(opts->dir);
  if (!disk->loadings || !disk->file || !disk->tokens || !disk->idle || !disk->written) {
    st = td_fail(err, TD_ENOMEM, "out of memory for --kv-dir");
  } else if (disk->record_bytes > td_kv_dir_max_bytes(opts->dir)) {
    st = td_fail(err, TD_EINVAL, "one KV page takes %llu bytes: give a larger --kv-dir-size",
                 (unsigned long long)disk->record_bytes);
  }
  if (st != TD_OK) {
    free_tier(disk);
    return st;
  }
  *out = disk;
  return TD_OK;
}

td_kv_disk_stats td_kv_disk_stats_of(const td_kv_disk *disk) {
  if (!disk) return (td_kv_disk_stats){0};
  td_kv_disk_stats stats = disk->stats;
  stats.bytes = td_kv_dir_bytes(disk->opts.dir);
  return stats;
}

double td_kv_disk_amplification(const td_kv_disk_stats *stats) {
  const uint64_t once = stats->written_bytes - stats->rewritten_bytes;
  return once ? (double)stats->written_bytes / (double)once : 1;
}
