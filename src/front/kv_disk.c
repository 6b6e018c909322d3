#include "front/kv_disk.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/log.h"
#include "kv/record.h"

#define AHEAD       2  // 1/AHEAD of memory's pages are kept empty or written
#define MAX_VICTIMS 64 // files removed for one that is written
#define MAX_FAILED  3  // pages in a row that could not be written, before a pause
#define PAUSE_S     60u

struct td_kv_loading {
  uv_work_t work;
  td_kv_tier *tier;
  td_kv_load load;
  int32_t *pages;   // [n], those to be filled
  td_digest *names; // [n] of them
  uint32_t n, n_loaded;
  atomic_bool is_canceled;
  td_err err; // of page n_loaded; TD_OK: none
  uint64_t ns;
};

// The one page on its way to the disk.
typedef struct {
  uv_work_t work;
  int32_t page;
  uint64_t serial;
  td_kv_record record;
  uint64_t used_ns;
  td_digest victims[MAX_VICTIMS];
  uint32_t n_victims;
  bool has_room;
  td_err err;
} saving;

struct td_kv_tier {
  td_kv_tier_opts opts;
  td_kv_shape shape;
  uint64_t record_bytes;
  td_kv_tier_stats stats;
  uint32_t n_loadings;
  td_kv_loading **loadings; // [shape.n_pages], as each has a page of its own
  saving save;
  char *file;      // [record_bytes] of what is being saved
  int32_t *tokens; // [page_tokens] of it
  int32_t *idle;   // [shape.n_pages] room for a list of pages
  bool is_saving, has_shrunk;
  uint32_t n_failed;          // pages in a row that could not be written
  uint64_t paused_until_ns;   // nothing is written before
  double read_ns, prefill_ns; // a page; 0: not known yet
  // the end
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

static td_kv_record record_of(const td_kv_tier *tier, const td_digest *name,
                              const int32_t *tokens) {
  return (td_kv_record){.model = tier->opts.model,
                        .name = *name,
                        .tokens = tokens,
                        .n_tokens = tier->shape.page_tokens,
                        .n_bytes = tier->shape.part_bytes * tier->shape.n_layers};
}

// ---- loading ----------------------------------------------------------------------------------

static td_status load_page(td_kv_loading *l, char *file, td_err *err) {
  const td_kv_tier *tier = l->tier;
  uint32_t page_tokens = tier->shape.page_tokens, i = l->n_loaded;
  const char *dir = td_kv_dir_path(tier->opts.dir);
  const int32_t *tokens = l->load.prompt + l->load.n_cached + (size_t)i * page_tokens;
  td_kv_record record = record_of(tier, &l->names[i], tokens);
  td_status st = td_kv_record_read(dir, &record, file, err);
  if (st == TD_EFORMAT) td_kv_record_remove(dir, &record.name);
  if (st != TD_OK) return st;
  const char *content = file + td_kv_record_offset(&record);
  return td_kv_pool_put(tier->opts.pool_fd, &tier->shape, l->pages[i], content, err);
}

// A prefix is of use from its start on: that is to be the last that goes.
static void touch_loaded(const td_kv_loading *l) {
  uint64_t now_ns = realtime_ns();
  for (uint32_t i = 0; i < l->n_loaded; i++)
    td_kv_record_touch(td_kv_dir_path(l->tier->opts.dir), &l->names[i], now_ns - i);
}

static void run_load(uv_work_t *work) {
  td_kv_loading *l = work->data;
  uint64_t begin_ns = td_clock_ns();
  char *file = malloc(l->tier->record_bytes);
  td_status st = file ? TD_OK : TD_ENOENT; // without memory nothing was found
  while (st == TD_OK && l->n_loaded < l->n && !atomic_load(&l->is_canceled)) {
    st = load_page(l, file, &l->err);
    if (st == TD_OK) l->n_loaded++;
  }
  free(file);
  l->err.code = st;
  l->ns = td_clock_ns() - begin_ns;
  touch_loaded(l);
}

static void free_loading(td_kv_loading *l) {
  if (!l) return;
  free(l->pages);
  free(l->names);
  free(l);
}

// What was found wrong is not looked for again.
static void note_failure(td_kv_tier *tier, const td_kv_loading *l) {
  if (l->err.code == TD_OK || l->n_loaded == l->n) return;
  const td_digest *name = &l->names[l->n_loaded];
  td_kv_dir_forget(tier->opts.dir, name);
  if (l->err.code == TD_ENOENT) return;
  char hex[TD_DIGEST_HEX];
  td_digest_hex(hex, name);
  tier->stats.n_damaged++;
  td_warn("%s/%s" TD_KV_RECORD_SUFFIX " is dropped: %s", td_kv_dir_path(tier->opts.dir), hex,
          l->err.msg);
}

static double blend(double old, double now) {
  return old > 0 ? old * 0.75 + now * 0.25 : now;
}

static void maybe_finish(td_kv_tier *tier);

static void after_load(uv_work_t *work, int status) {
  (void)status; // nobody cancels the work itself
  td_kv_loading *l = work->data;
  td_kv_tier *tier = l->tier;
  uint32_t i = 0;
  while (tier->loadings[i] != l)
    i++;
  tier->loadings[i] = tier->loadings[--tier->n_loadings];
  for (i = l->n_loaded; i > 0; i--)
    td_kv_dir_use(tier->opts.dir, &l->names[i - 1]);
  note_failure(tier, l);
  if (l->n_loaded) tier->read_ns = blend(tier->read_ns, (double)l->ns / l->n_loaded);
  uint32_t n_tokens = l->n_loaded * tier->shape.page_tokens;
  tier->stats.n_hits += n_tokens;
  tier->stats.read_bytes += l->n_loaded * tier->record_bytes;
  l->load.on_loaded(l->load.ctx, l->load.id, l->load.n_cached + n_tokens);
  free_loading(l);
  maybe_finish(tier);
}

// The names of the prompt's pages behind those it has, as far as the directory has them all. The
// prompt's last token is computed in any case.
static void look_up(td_kv_loading *l) {
  const td_kv_tier *tier = l->tier;
  uint32_t page_tokens = tier->shape.page_tokens, n_had = l->load.n_cached / page_tokens;
  td_digest name = tier->opts.model;
  for (uint32_t i = 0; i < (l->load.n_prompt - 1) / page_tokens; i++) {
    td_kv_name_next(&name, &name, l->load.prompt + (size_t)i * page_tokens, page_tokens);
    if (i < n_had) continue;
    if (!td_kv_dir_has(tier->opts.dir, &name)) return;
    l->names[l->n++] = name;
  }
}

// As measured, and until then, yes. What was slow once gets another try after a while.
static bool is_worth_reading(td_kv_tier *tier) {
  if (tier->prefill_ns <= 0 || tier->read_ns <= tier->prefill_ns) return true;
  tier->read_ns *= 0.9;
  return false;
}

static td_kv_loading *make_loading(td_kv_tier *tier, const td_kv_load *load) {
  uint32_t n_most = load->n_prompt / tier->shape.page_tokens;
  uint32_t n_had = load->n_cached / tier->shape.page_tokens;
  td_kv_loading *l = calloc(1, sizeof *l);
  if (!l) return NULL;
  *l = (td_kv_loading){.tier = tier,
                       .load = *load,
                       .pages = malloc((n_most - n_had) * sizeof *l->pages),
                       .names = malloc((n_most - n_had) * sizeof *l->names)};
  if (l->pages && l->names) return l;
  free_loading(l);
  return NULL;
}

td_kv_loading *td_kv_tier_load(td_kv_tier *tier, const td_kv_load *load) {
  uint32_t page_tokens = tier->shape.page_tokens;
  if (tier->is_closing || td_kv_dir_is_empty(tier->opts.dir)) return NULL;
  if (load->n_prompt - load->n_cached <= page_tokens || !is_worth_reading(tier)) return NULL;
  td_kv_loading *l = make_loading(tier, load);
  if (l) look_up(l);
  if (!l || !l->n) {
    free_loading(l);
    return NULL;
  }
  memcpy(l->pages, load->pages + load->n_cached / page_tokens, l->n * sizeof *l->pages);
  TD_CHECK(tier->n_loadings < tier->shape.n_pages);
  tier->loadings[tier->n_loadings++] = l;
  l->work.data = l;
  TD_CHECK(uv_queue_work(tier->opts.loop, &l->work, run_load, after_load) == 0);
  return l;
}

void td_kv_loading_cancel(td_kv_loading *loading) {
  atomic_store(&loading->is_canceled, true);
}

void td_kv_tier_note_prefill(td_kv_tier *tier, uint32_t n_tokens, uint64_t ns) {
  if (n_tokens < tier->shape.page_tokens) return;
  tier->prefill_ns = blend(tier->prefill_ns,
                           (double)ns / n_tokens * (double)tier->shape.page_tokens);
}

// ---- saving -----------------------------------------------------------------------------------
// A page is not held while it is copied: if afterwards it still has its serial, nobody has written
// to it.

static void run_copy(uv_work_t *work) {
  td_kv_tier *tier = work->data;
  saving *s = &tier->save;
  char *content = tier->file + td_kv_record_offset(&s->record);
  s->err.code = TD_OK;
  s->err.code = td_kv_pool_get(tier->opts.pool_fd, &tier->shape, s->page, content, &s->err);
}

static void run_write(uv_work_t *work) {
  td_kv_tier *tier = work->data;
  saving *s = &tier->save;
  const char *dir = td_kv_dir_path(tier->opts.dir);
  for (uint32_t i = 0; i < s->n_victims; i++)
    td_kv_record_remove(dir, &s->victims[i]);
  s->err.code = TD_OK;
  if (!s->has_room) return;
  td_kv_record_seal(tier->file, &s->record);
  s->err.code = td_kv_record_write(dir, &s->record, tier->file, s->used_ns, &s->err);
}

static void save_next(td_kv_tier *tier);

// The disk is full: what the directory has is all that it may have, and others make room for what
// is to be written now. False: it has nothing to give.
static bool shrink(td_kv_tier *tier) {
  td_kv_dir *dir = tier->opts.dir;
  uint64_t n_bytes = td_kv_dir_bytes(dir), less = td_kv_dir_max_bytes(dir) - n_bytes;
  if (n_bytes < tier->record_bytes) return false;
  if (!tier->has_shrunk) {
    td_warn("--kv-dir %s: %s; it is kept to the %.2f GiB that it has", td_kv_dir_path(dir),
            tier->save.err.msg, (double)n_bytes / (1 << 30));
  }
  tier->has_shrunk = true;
  td_kv_dir_limit(dir, n_bytes);
  if (tier->is_flushing) {
    uint64_t left = tier->flush_left_bytes + tier->record_bytes; // it is tried again
    tier->n_to_flush++;
    tier->flush_left_bytes = left > less ? left - less : 0;
  }
  return true;
}

static void pause_saving(td_kv_tier *tier) {
  tier->n_failed = 0;
  tier->paused_until_ns = td_clock_ns() + PAUSE_S * 1000000000ull;
  td_warn("--kv-dir %s: %s; no more pages are written to it%s", td_kv_dir_path(tier->opts.dir),
          tier->save.err.msg, tier->is_flushing ? "" : " for a minute");
}

// The page is not tried again soon: until it is looked for, it counts as written.
static void note_failed_write(td_kv_tier *tier) {
  td_kv_dir_add(tier->opts.dir, &tier->save.record.name, 0);
  if (++tier->n_failed == MAX_FAILED) pause_saving(tier);
}

static void after_write(uv_work_t *work, int status) {
  (void)status;
  td_kv_tier *tier = work->data;
  saving *s = &tier->save;
  tier->is_saving = false;
  if (s->err.code != TD_OK) {
    if (s->err.code != TD_ELIMIT) {
      note_failed_write(tier);
    } else if (!shrink(tier)) {
      pause_saving(tier);
    }
  } else if (s->has_room) {
    td_kv_dir_add(tier->opts.dir, &s->record.name, tier->record_bytes);
    tier->stats.written_bytes += tier->record_bytes;
    tier->n_failed = 0;
  }
  save_next(tier);
}

static void after_copy(uv_work_t *work, int status) {
  (void)status;
  td_kv_tier *tier = work->data;
  saving *s = &tier->save;
  td_kv_content now;
  bool is_whole = td_kv_content_of(tier->opts.kv, s->page, &now) && now.serial == s->serial;
  if (s->err.code != TD_OK) pause_saving(tier);
  if (s->err.code != TD_OK || !is_whole) {
    tier->is_saving = false;
    save_next(tier);
    return;
  }
  td_kv_dir *dir = tier->opts.dir;
  s->n_victims = 0;
  while (s->n_victims < MAX_VICTIMS &&
         td_kv_dir_evict(dir, tier->record_bytes, &s->victims[s->n_victims]))
    s->n_victims++;
  s->has_room = td_kv_dir_bytes(dir) + tier->record_bytes <= td_kv_dir_max_bytes(dir);
  TD_CHECK(uv_queue_work(tier->opts.loop, &s->work, run_write, after_write) == 0);
}

static void save_page(td_kv_tier *tier, int32_t page, const td_kv_content *content) {
  saving *s = &tier->save;
  memcpy(tier->tokens, content->tokens, tier->shape.page_tokens * sizeof *tier->tokens);
  s->page = page;
  s->serial = content->serial;
  s->record = record_of(tier, &content->name, tier->tokens);
  s->used_ns = tier->is_flushing ? tier->flush_used_ns-- : realtime_ns();
  s->work.data = tier;
  tier->is_saving = true;
  TD_CHECK(uv_queue_work(tier->opts.loop, &s->work, run_copy, after_copy) == 0);
}

// The next page that memory will need, if that may be soon and it is not on disk.
static bool find_endangered(td_kv_tier *tier, int32_t *page, td_kv_content *content) {
  uint32_t ahead = tier->shape.n_pages / AHEAD + 1, n_empty = td_kv_n_empty(tier->opts.kv);
  uint32_t n = n_empty < ahead ? td_kv_idle(tier->opts.kv, ahead - n_empty, tier->idle) : 0;
  for (uint32_t i = 0; i < n; i++) {
    *page = tier->idle[i];
    bool is_published = td_kv_content_of(tier->opts.kv, *page, content);
    if (is_published && !td_kv_dir_has(tier->opts.dir, &content->name)) return true;
  }
  return false;
}

// The next page to be kept over a restart, from the most recently used on.
static bool find_remaining(td_kv_tier *tier, int32_t *page, td_kv_content *content) {
  while (tier->n_to_flush && tier->flush_left_bytes >= tier->record_bytes) {
    tier->flush_left_bytes -= tier->record_bytes;
    *page = tier->idle[--tier->n_to_flush];
    if (!td_kv_content_of(tier->opts.kv, *page, content)) continue;
    if (!td_kv_dir_has(tier->opts.dir, &content->name)) return true;
    td_kv_dir_use(tier->opts.dir, &content->name);
  }
  return false;
}

static void save_next(td_kv_tier *tier) {
  int32_t page;
  td_kv_content content;
  bool is_late = tier->is_flushing && td_clock_ns() >= tier->deadline_ns;
  if (is_late && tier->n_to_flush) {
    td_warn("--kv-dir %s: %u pages were not written in time", td_kv_dir_path(tier->opts.dir),
            tier->n_to_flush);
  }
  bool is_paused = td_clock_ns() < tier->paused_until_ns;
  bool is_stopped = is_paused || is_late || (tier->is_closing && !tier->is_flushing);
  if (!is_stopped &&
      (tier->is_flushing ? find_remaining : find_endangered)(tier, &page, &content)) {
    save_page(tier, page, &content);
  } else {
    maybe_finish(tier);
  }
}

void td_kv_tier_save(td_kv_tier *tier) {
  if (!tier->is_saving && !tier->is_closing) save_next(tier);
}

// ---- open and close ---------------------------------------------------------------------------

static void free_tier(td_kv_tier *tier) {
  free(tier->loadings);
  free(tier->file);
  free(tier->tokens);
  free(tier->idle);
  free(tier);
}

static void maybe_finish(td_kv_tier *tier) {
  if (!tier->is_closing || tier->n_loadings || tier->is_saving) return;
  if (!tier->is_flushing) {
    tier->is_flushing = true;
    tier->n_to_flush = td_kv_idle(tier->opts.kv, tier->shape.n_pages, tier->idle);
    tier->deadline_ns = td_clock_ns() + tier->opts.flush_ns;
    tier->flush_used_ns = realtime_ns();
    tier->flush_left_bytes = td_kv_dir_max_bytes(tier->opts.dir);
    save_next(tier); // comes back here when nothing is left
    return;
  }
  void (*closed)(void *) = tier->closed;
  void *ctx = tier->closed_ctx;
  free_tier(tier);
  closed(ctx);
}

void td_kv_tier_close(td_kv_tier *tier, void (*closed)(void *ctx), void *ctx) {
  if (!tier) {
    closed(ctx);
    return;
  }
  tier->is_closing = true;
  tier->closed = closed;
  tier->closed_ctx = ctx;
  for (uint32_t i = 0; i < tier->n_loadings; i++)
    td_kv_loading_cancel(tier->loadings[i]);
  maybe_finish(tier);
}

td_status td_kv_tier_open(td_kv_tier **out, const td_kv_tier_opts *opts, td_err *err) {
  *out = NULL;
  td_kv_shape shape;
  td_status st = td_kv_pool_shape(&shape, opts->pool_fd, err);
  if (st != TD_OK) return st;
  td_kv_tier *tier = calloc(1, sizeof *tier);
  if (!tier) return td_fail(err, TD_ENOMEM, "out of memory");
  *tier = (td_kv_tier){.opts = *opts, .shape = shape};
  td_kv_record record = record_of(tier, &opts->model, NULL);
  tier->record_bytes = td_kv_record_bytes(&record);
  tier->loadings = malloc(shape.n_pages * sizeof *tier->loadings);
  tier->file = malloc(tier->record_bytes);
  tier->tokens = malloc(shape.page_tokens * sizeof *tier->tokens);
  tier->idle = malloc(shape.n_pages * sizeof *tier->idle);
  if (!tier->loadings || !tier->file || !tier->tokens || !tier->idle) {
    st = td_fail(err, TD_ENOMEM, "out of memory for --kv-dir");
  } else if (tier->record_bytes > td_kv_dir_max_bytes(opts->dir)) {
    st = td_fail(err, TD_EINVAL, "one KV page takes %llu bytes: give a larger --kv-dir-size",
                 (unsigned long long)tier->record_bytes);
  }
  if (st != TD_OK) {
    free_tier(tier);
    return st;
  }
  *out = tier;
  return TD_OK;
}

td_kv_tier_stats td_kv_tier_stats_of(const td_kv_tier *tier) {
  if (!tier) return (td_kv_tier_stats){0};
  td_kv_tier_stats stats = tier->stats;
  stats.bytes = td_kv_dir_bytes(tier->opts.dir);
  return stats;
}
