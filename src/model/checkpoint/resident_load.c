// src/model/checkpoint/resident_load.c - reads the shards into shared memory.
// Threads take chunks in file order. The memory is written only by read(2): when memory runs out
// the call fails, whereas touching a page would kill the process.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/grow.h"
#include "base/log.h"
#include "base/thread.h"
#include "base/units.h"
#include "gguf/files.h"
#include "model/checkpoint/resident.h"
#include "model/checkpoint/resident_impl.h"

#define CHUNK_BYTES    ((uint64_t)8 << 20)
#define STRIPE_BYTES   ((uint64_t)256 << 10) // in pages of 4 KB: many rows, and many in a matrix
#define N_READERS      8 // NVMe needs several large concurrent reads; more do not help
#define PROGRESS_NS    200000000
#define SEAL_TRIES     100               // 1 ms apart
#define HUGE_2MB       (21u << 26)       // MFD_HUGE_2MB of linux/memfd.h
#define MAX_FILE_BYTES ((off_t)64 << 20) // limit for a JSON file kept with the shards

typedef struct {
  uint64_t begin, end;
} byte_range;

typedef struct {
  const char *path, *name;  // name: the end of path
  char *own_path;           // owned; NULL for a shard, whose path belongs to the store
  uint64_t n_bytes, offset; // offset in memory
  uint64_t first_chunk;     // index among all chunks
  byte_range *tables;       // whole pages of tables and of what is left out; rising
  size_t n_tables, cap_tables;
  uint64_t table_bytes; // of them
  struct stat before;
} source;

typedef struct {
  const td_resident_opts *opts;
  source *sources; // [n_sources]
  size_t n_sources;
  char *base;
  td_nodes nodes; // several: stripes lie on them in turn
  uint64_t stripe_bytes;
  uint64_t converted_offset;               // in memory, after the shards
  uint64_t arena_offset;                   // after that
  uint64_t n_bytes, total_bytes, n_chunks; // n_bytes: the memory's size; total_bytes: the shards'
                                           // size
  _Atomic uint64_t next_chunk, done_bytes;
  atomic_bool is_over; // a reader failed or loading was canceled
  pthread_mutex_t lock;
  pthread_cond_t ended;
  unsigned n_active; // running readers; under lock
  td_err err;        // first error; under lock
} loading;

static uint64_t round_up(uint64_t n, uint64_t unit) {
  return (n + unit - 1) / unit * unit;
}

// ---- NUMA placement ---------------------------------------------------------------------------
// A page is allocated where the thread that first touches it prefers. So memory is filled a stripe
// at a time, which leaves no policy for the kernel to keep.

// Bytes of the stripe at offset from there on, at most n_bytes, and its node preferred.
static uint64_t enter_stripe(const loading *l, uint64_t offset, uint64_t n_bytes) {
  if (l->nodes.n < 2) return n_bytes;
  td_nodes_prefer(l->nodes.ids[offset / l->stripe_bytes % l->nodes.n]);
  const uint64_t left = l->stripe_bytes - offset % l->stripe_bytes;
  return left < n_bytes ? left : n_bytes;
}

static void leave_stripes(const loading *l) {
  if (l->nodes.n > 1) td_nodes_prefer(-1);
}

static void choose_stripes(loading *l, td_page_kind pages) {
  l->stripe_bytes = pages == TD_PAGES_PLAIN ? STRIPE_BYTES : TD_HUGE_PAGE_BYTES;
  l->nodes = td_nodes_get();
  if (l->nodes.n < 2 || l->nodes.is_fake) return;
  if (td_nodes_prefer(l->nodes.ids[0]) && td_nodes_prefer(-1)) return;
  td_warn("weights are not placed by NUMA node: the kernel does not place memory: %s",
          strerror(errno));
  l->nodes = (td_nodes){.n = 1};
}

// ---- one reader ---------------------------------------------------------------------------------

typedef struct {
  loading *l;
  const source *source; // file open at fd; NULL: none
  int fd;
  bool is_direct;
} reader;

static void close_source(reader *r) {
  if (r->source) close(r->fd);
  r->source = NULL;
}

static bool same_file(const struct stat *a, const struct stat *b) {
  return a->st_dev == b->st_dev && a->st_ino == b->st_ino && a->st_size == b->st_size &&
         a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

static td_status changed(const source *s, td_err *err) {
  return td_fail(err, TD_EIO,
                 "%s: it changed while it was being loaded; start again when nothing writes to it "
                 "any more",
                 s->path);
}

static td_status open_source(reader *r, const source *s, bool direct, td_err *err) {
  close_source(r);
  int fd = direct ? open(s->path, O_RDONLY | O_CLOEXEC | O_DIRECT) : -1;
  r->is_direct = fd >= 0;
  if (fd < 0) fd = open(s->path, O_RDONLY | O_CLOEXEC); // some file systems lack O_DIRECT
  if (fd < 0) return td_fail(err, TD_EIO, "%s: cannot open: %s", s->path, strerror(errno));
  r->fd = fd;
  r->source = s;
  struct stat now;
  return fstat(fd, &now) == 0 && same_file(&now, &s->before) ? TD_OK : changed(s, err);
}

static td_status read_failed(const reader *r, int code, td_err *err) {
  const source *s = r->source;
  if (code != EFAULT && code != ENOMEM && code != ENOSPC)
    return td_fail(err, TD_EIO, "%s: cannot read: %s", s->path, strerror(code));
  return td_fail(err, TD_ENOMEM,
                 "%s: memory ran out after %s of %s of weights: free some, or give "
                 "--weights mmap, which needs none to spare",
                 s->path, td_size(r->l->done_bytes).text, td_size(r->l->total_bytes).text);
}

// Reads [pos, pos + len) of the source into memory. pos is a multiple of RESIDENT_ALIGN.
static td_status read_piece(reader *r, uint64_t pos, uint64_t len, td_err *err) {
  const source *s = r->source;
  char *to = r->l->base + s->offset + pos;
  uint64_t have = 0;
  while (have < len) {
    uint64_t left = len - have;
    // Each shard is followed by padding up to the alignment.
    uint64_t want = r->is_direct ? round_up(left, RESIDENT_ALIGN) : left;
    ssize_t n = pread(r->fd, to + have, want, (off_t)(pos + have));
    if (n < 0 && errno == EINTR) continue;
    bool is_refused = n < 0 && errno == EINVAL;
    if (n < 0 && !(is_refused && r->is_direct)) return read_failed(r, errno, err);
    if (n == 0) return changed(s, err);
    if (n > 0) have += (uint64_t)n;
    if (r->is_direct && (is_refused || (have < len && have % RESIDENT_ALIGN))) {
      td_status st = open_source(r, s, false, err);
      if (st != TD_OK) return st;
    }
  }
  // Do not keep a second copy in the page cache.
  if (!r->is_direct) posix_fadvise(r->fd, (off_t)pos, (off_t)len, POSIX_FADV_DONTNEED);
  return TD_OK;
}

// The part of [begin, end) that is read first, up to a table or the end.
static byte_range next_read(const source *s, uint64_t begin, uint64_t end) {
  for (size_t i = 0; i < s->n_tables && s->tables[i].begin < end; i++) {
    if (begin < s->tables[i].begin) end = s->tables[i].begin;
    if (begin >= s->tables[i].begin && begin < s->tables[i].end) begin = s->tables[i].end;
  }
  return (byte_range){begin, end};
}

// The same, a stripe at a time, without tables.
static td_status read_chunk(reader *r, uint64_t pos, uint64_t len, td_err *err) {
  td_status st = TD_OK;
  const uint64_t end = pos + len;
  while (st == TD_OK) {
    const byte_range part = next_read(r->source, pos, end);
    if (part.begin >= part.end) return st;
    const uint64_t n = enter_stripe(r->l, r->source->offset + part.begin, part.end - part.begin);
    st = read_piece(r, part.begin, n, err);
    pos = part.begin + n;
    if (st == TD_OK && !r->source->own_path) atomic_fetch_add(&r->l->done_bytes, n);
  }
  return st;
}

static const source *source_of(const loading *l, uint64_t chunk) {
  size_t low = 0, high = l->n_sources;
  while (high - low > 1) {
    size_t mid = (low + high) / 2;
    *(l->sources[mid].first_chunk <= chunk ? &low : &high) = mid;
  }
  return &l->sources[low];
}

static td_status read_chunks(reader *r, td_err *err) {
  loading *l = r->l;
  for (;;) {
    uint64_t chunk = atomic_fetch_add(&l->next_chunk, 1);
    if (chunk >= l->n_chunks || atomic_load(&l->is_over)) return TD_OK;
    if (l->opts->canceled && atomic_load(l->opts->canceled))
      return td_fail(err, TD_ECANCELED, "the loading of the weights was canceled");
    const source *s = source_of(l, chunk);
    td_status st = r->source == s ? TD_OK : open_source(r, s, true, err);
    uint64_t pos = (chunk - s->first_chunk) * CHUNK_BYTES, left = s->n_bytes - pos;
    uint64_t len = left < CHUNK_BYTES ? left : CHUNK_BYTES;
    if (st == TD_OK) st = read_chunk(r, pos, len, err);
    if (st != TD_OK) return st;
  }
}

static void *reader_main(void *arg) {
  loading *l = arg;
  reader r = {.l = l};
  td_err err = {0};
  td_status st = read_chunks(&r, &err);
  close_source(&r);
  pthread_mutex_lock(&l->lock);
  if (st != TD_OK) {
    atomic_store(&l->is_over, true);
    if (l->err.code == TD_OK) l->err = err;
  }
  l->n_active--;
  pthread_cond_signal(&l->ended);
  pthread_mutex_unlock(&l->lock);
  return NULL;
}

// ---- all readers ----------------------------------------------------------------------------

static void tell_progress(const loading *l) {
  if (!l->opts->on_progress) return;
  l->opts->on_progress(l->opts->ctx, atomic_load(&l->done_bytes), l->total_bytes);
}

static void wait_for_readers(loading *l) {
  pthread_mutex_lock(&l->lock);
  while (l->n_active) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += PROGRESS_NS;
    if (until.tv_nsec >= 1000000000) {
      until.tv_nsec -= 1000000000;
      until.tv_sec++;
    }
    pthread_cond_timedwait(&l->ended, &l->lock, &until);
    pthread_mutex_unlock(&l->lock);
    tell_progress(l);
    pthread_mutex_lock(&l->lock);
  }
  pthread_mutex_unlock(&l->lock);
  tell_progress(l);
}

static td_status run_readers(loading *l, td_err *err) {
  pthread_t threads[64];
  unsigned n = l->opts->n_threads ? l->opts->n_threads : N_READERS, n_started = 0;
  if (n > TD_COUNT(threads)) n = TD_COUNT(threads);
  if (n > l->n_chunks) n = (unsigned)l->n_chunks;
  l->n_active = n;
  while (n_started < n && td_thread_start(&threads[n_started], reader_main, l) == 0)
    n_started++;
  pthread_mutex_lock(&l->lock);
  l->n_active -= n - n_started;
  pthread_mutex_unlock(&l->lock);
  if (n && !n_started) return td_fail(err, TD_ENOMEM, "cannot start a thread to read weights");
  wait_for_readers(l);
  for (unsigned i = 0; i < n_started; i++)
    pthread_join(threads[i], NULL);
  if (l->err.code != TD_OK) {
    *err = l->err;
    return err->code;
  }
  for (size_t i = 0; i < l->n_sources; i++) {
    struct stat now;
    const source *s = &l->sources[i];
    if (stat(s->path, &now) != 0 || !same_file(&now, &s->before)) return changed(s, err);
  }
  return TD_OK;
}

// ---- shared memory --------------------------------------------------------------------------

// Size of the table of shards, including entries for the converted shard and the arena.
static uint64_t head_bytes(size_t n_shards, const td_conversion *conversion) {
  size_t n = n_shards + (td_conversion_bytes(conversion) > 0) + 1; // and of the arena
  return round_up(resident_head_bytes(n), RESIDENT_ALIGN);
}

uint64_t td_resident_bytes(const td_store *store, const td_conversion *conversion) {
  size_t n_shards = td_store_n_shards(store);
  uint64_t n_bytes = head_bytes(n_shards, conversion);
  for (size_t i = 0; i < n_shards; i++)
    n_bytes += round_up(td_store_shard(store, i).n_bytes, RESIDENT_ALIGN);
  n_bytes += round_up(td_conversion_bytes(conversion), RESIDENT_ALIGN);
  return round_up(n_bytes - td_store_table_bytes(store), TD_HUGE_PAGE_BYTES);
}

// Files a worker reads in addition to the shards: configuration and index, but not the tokenizer.
static bool is_read_by_workers(const char *name) {
  size_t len = strlen(name);
  if (len < 6 || len >= RESIDENT_NAME || strcmp(name + len - 5, ".json") != 0) return false;
  return strcmp(name, "tokenizer.json") != 0 && strcmp(name, "vocab.json") != 0;
}

static td_status add_file(loading *l, const char *dir, size_t dir_len, const char *name,
                          td_err *err) {
  source s = {0};
  if (asprintf(&s.own_path, "%.*s%s", (int)dir_len, dir, name) < 0)
    return td_fail(err, TD_ENOMEM, "out of memory");
  s.path = s.own_path;
  s.name = s.path + dir_len;
  bool is_wanted = stat(s.path, &s.before) == 0 && S_ISREG(s.before.st_mode) &&
                   s.before.st_size > 0 && s.before.st_size <= MAX_FILE_BYTES;
  s.n_bytes = (uint64_t)s.before.st_size;
  source *grown = is_wanted ? realloc(l->sources, (l->n_sources + 1) * sizeof *grown) : NULL;
  if (!grown) {
    free(s.own_path);
    return is_wanted ? td_fail(err, TD_ENOMEM, "out of memory") : TD_OK;
  }
  l->sources = grown;
  l->sources[l->n_sources++] = s;
  return TD_OK;
}

static td_status add_files(loading *l, td_err *err) {
  if (!l->n_sources || td_gguf_is(l->sources[0].path)) return TD_OK; // GGUF: all is in the shards
  const char *path = l->sources[0].path;
  size_t dir_len = (size_t)(l->sources[0].name - path); // including the slash
  char dir[4096];
  snprintf(dir, sizeof dir, "%.*s", (int)dir_len, path);
  DIR *stream = opendir(dir);
  td_status st = TD_OK;
  for (const struct dirent *d; stream && st == TD_OK && (d = readdir(stream));)
    if (is_read_by_workers(d->d_name)) st = add_file(l, dir, strlen(dir), d->d_name, err);
  if (stream) closedir(stream);
  return st;
}

// The whole pages of [begin, end) are not read. Ranges come in rising order, but may overlap.
static td_status leave_out(source *s, uint64_t begin, uint64_t end, td_err *err) {
  begin = round_up(begin, RESIDENT_ALIGN);
  end = end / RESIDENT_ALIGN * RESIDENT_ALIGN;
  if (begin >= end) return TD_OK;
  if (!TD_GROW(s->tables, s->n_tables, s->cap_tables, 16))
    return td_fail(err, TD_ENOMEM, "out of memory");
  s->tables[s->n_tables++] = (byte_range){begin, end};
  s->table_bytes += end - begin;
  return TD_OK;
}

static int by_begin(const void *a, const void *b) {
  const byte_range *x = a, *y = b;
  return (x->begin > y->begin) - (x->begin < y->begin);
}

// Finds the tables of a shard, and what else is left out.
static td_status find_tables(source *s, const td_store *store, const td_shard_info *shard,
                             const td_resident_opts *opts, size_t shard_idx, td_err *err) {
  const size_t n_tensors = td_store_n_tensors(store);
  td_status st = TD_OK;
  for (size_t i = 0; i < n_tensors && st == TD_OK; i++) {
    const td_tensor *t = td_store_tensor(store, i);
    if (t->file != shard->path || !td_store_is_table(t->name)) continue;
    const uint64_t at = (uint64_t)(t->data - shard->bytes);
    st = leave_out(s, at, at + t->n_bytes, err);
  }
  for (size_t i = 0; i < opts->n_left_out && st == TD_OK; i++) {
    const td_shard_range *r = &opts->left_out[i];
    if (r->shard == shard_idx) st = leave_out(s, r->begin, r->end, err);
  }
  if (s->n_tables) qsort(s->tables, s->n_tables, sizeof *s->tables, by_begin);
  return st;
}

static td_status add_shards(loading *l, const td_store *store, td_err *err) {
  size_t n = td_store_n_shards(store);
  l->sources = calloc(n + 1, sizeof *l->sources);
  if (!l->sources) return td_fail(err, TD_ENOMEM, "out of memory");
  while (l->n_sources < n) {
    td_shard_info info = td_store_shard(store, l->n_sources);
    source *s = &l->sources[l->n_sources++];
    *s = (source){.path = info.path, .name = info.name, .n_bytes = info.n_bytes};
    if (strlen(info.name) >= RESIDENT_NAME) {
      return td_fail(err, TD_ELIMIT, "%s: a file name of more than %d bytes", s->path,
                     RESIDENT_NAME - 1);
    }
    if (stat(s->path, &s->before) != 0 || (uint64_t)s->before.st_size != s->n_bytes)
      return changed(s, err);
    const td_status st = find_tables(s, store, &info, l->opts, l->n_sources - 1, err);
    if (st != TD_OK) return st;
  }
  return TD_OK;
}

static td_status plan(loading *l, const td_store *store, td_err *err) {
  td_status st = add_shards(l, store, err);
  if (st == TD_OK) st = add_files(l, err);
  if (st != TD_OK) return st;
  uint64_t offset = head_bytes(l->n_sources, l->opts->conversion);
  for (size_t i = 0; i < l->n_sources; i++) {
    source *s = &l->sources[i];
    s->offset = offset;
    s->first_chunk = l->n_chunks;
    offset += round_up(s->n_bytes, RESIDENT_ALIGN);
    if (!s->own_path) l->total_bytes += s->n_bytes - s->table_bytes;
    l->n_chunks += (s->n_bytes + CHUNK_BYTES - 1) / CHUNK_BYTES;
  }
  l->converted_offset = offset;
  offset += round_up(td_conversion_bytes(l->opts->conversion), RESIDENT_ALIGN);
  l->arena_offset = round_up(offset, TD_HUGE_PAGE_BYTES);
  l->n_bytes = l->arena_offset + round_up(l->opts->arena_bytes, TD_HUGE_PAGE_BYTES);
  return TD_OK;
}

static void write_head(const loading *l) {
  resident_head *head = (void *)l->base;
  *head = (resident_head){.magic = RESIDENT_MAGIC,
                          .version = RESIDENT_VERSION,
                          .n_shards = (uint32_t)l->n_sources,
                          .n_nodes = l->nodes.n,
                          .stripe_bytes = l->stripe_bytes};
  for (size_t i = 0; i < l->n_sources; i++) {
    resident_shard *s = &head->shards[i];
    s->offset = l->sources[i].offset;
    s->n_bytes = l->sources[i].n_bytes;
    snprintf(s->name, sizeof s->name, "%s", l->sources[i].name);
  }
  const resident_shard others[] = {
      {l->converted_offset, td_conversion_bytes(l->opts->conversion), TD_RESIDENT_CONVERTED},
      {l->arena_offset, l->n_bytes - l->arena_offset, TD_RESIDENT_EXPERTS}};
  for (size_t i = 0; i < TD_COUNT(others); i++)
    if (others[i].n_bytes) head->shards[head->n_shards++] = others[i];
}

// ---- conversion -------------------------------------------------------------------------------

typedef struct {
  const loading *l;
  const td_store *store;
} moving;

static int by_place(const void *a, const void *b) {
  const td_shard_range *x = a, *y = b;
  if (x->shard != y->shard) return x->shard < y->shard ? -1 : 1;
  return (x->begin > y->begin) - (x->begin < y->begin);
}

// Whether the tensor stays in the files.
static bool is_left_out(const td_resident_opts *opts, uint32_t shard, uint64_t offset) {
  const td_shard_range key = {.shard = shard, .begin = offset};
  return opts->n_left_out && bsearch(&key, opts->left_out, opts->n_left_out, sizeof key, by_place);
}

// Where in memory a tensor's data have been read to; NULL: nowhere.
static const uint8_t *moved(void *ctx, const td_tensor *t) {
  const moving *m = ctx;
  for (size_t i = 0; i < td_store_n_shards(m->store); i++) { // shards are the first sources
    td_shard_info info = td_store_shard(m->store, i);
    if (t->data < info.bytes || t->data >= info.bytes + info.n_bytes) continue;
    if (is_left_out(m->l->opts, (uint32_t)i, (uint64_t)(t->data - info.bytes))) return NULL;
    return (const uint8_t *)m->l->base + m->l->sources[i].offset + (t->data - info.bytes);
  }
  return t->data;
}

// Frees the whole pages of tensors that were converted.
static void drop_sources(const loading *l, int fd, const moving *m, td_page_kind pages) {
  uint64_t page = pages == TD_PAGES_RESERVED ? TD_HUGE_PAGE_BYTES : RESIDENT_ALIGN;
  const td_tensor *t;
  for (size_t i = 0; (t = td_conversion_source(l->opts->conversion, i)); i++) {
    uint64_t at = (uint64_t)(moved((void *)m, t) - (const uint8_t *)l->base);
    uint64_t begin = round_up(at, page), end = (at + t->n_bytes) / page * page;
    if (begin >= end) continue;
    // Failing to free memory is not an error.
    if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)begin,
                  (off_t)(end - begin)) != 0)
      return;
  }
}

// Allocates the memory first, so that a lack of memory is reported as an error instead of a signal.
static td_status convert(const loading *l, int fd, td_page_kind pages, const td_store *store,
                         td_err *err) {
  const td_conversion *c = l->opts->conversion;
  uint64_t n_bytes = td_conversion_bytes(c);
  if (!td_conversion_memory_bytes(c)) return TD_OK;
  for (uint64_t done = 0, n; done < n_bytes; done += n) {
    n = enter_stripe(l, l->converted_offset + done, n_bytes - done);
    if (fallocate(fd, 0, (off_t)(l->converted_offset + done), (off_t)n) == 0) continue;
    return td_fail(err, TD_ENOMEM, "out of memory for %s of converted weights: %s",
                   td_size(n_bytes).text, strerror(errno));
  }
  leave_stripes(l);
  if (n_bytes) td_conversion_write_header(c, l->base + l->converted_offset);
  moving m = {.l = l, .store = store};
  const td_conversion_opts how = {.moved = moved, .ctx = &m, .canceled = l->opts->canceled};
  td_status st = td_conversion_run(c, l->base + l->converted_offset, &how, err);
  if (st == TD_OK) drop_sources(l, fd, &m, pages);
  return st;
}

// Creates shared memory of l->n_bytes and maps it for writing. -1 and errno if that kind is
// unavailable.
static int create_of(loading *l, unsigned flags) {
  int fd = memfd_create("tandem-weights", MFD_CLOEXEC | MFD_ALLOW_SEALING | flags);
  if (fd < 0) return -1;
  void *base = MAP_FAILED;
  if (ftruncate(fd, (off_t)l->n_bytes) == 0)
    base = mmap(NULL, (size_t)l->n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) {
    int code = errno;
    close(fd);
    errno = code;
    return -1;
  }
  l->base = base;
  return fd;
}

static td_status create(loading *l, int *fd, td_page_kind *pages, td_err *err) {
  const bool has_holes = l->opts->n_left_out > 0; // which large pages would fill
  *pages = has_holes ? TD_PAGES_PLAIN : td_memory_shared_pages(l->n_bytes);
  *fd = *pages == TD_PAGES_RESERVED ? create_of(l, MFD_HUGETLB | HUGE_2MB) : -1;
  if (*fd >= 0) return TD_OK;
  if (*pages == TD_PAGES_RESERVED) *pages = TD_PAGES_TRANSPARENT; // another process took them
  *fd = create_of(l, 0);
  if (*fd < 0) {
    return td_fail(err, TD_ENOMEM,
                   "cannot create %s of shared memory for the weights: %s; give --weights "
                   "mmap, which needs none",
                   td_size(l->n_bytes).text, strerror(errno));
  }
  // subject to the kernel's THP settings
  madvise(l->base, (size_t)l->n_bytes, has_holes ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
  return TD_OK;
}

// Seals the memory: contents and size, or for a device the size only. The kernel returns EBUSY
// while reads into it are in flight. Before Linux 6.7, write-sealed memory can be mapped shared
// only from a read-only descriptor.
static td_status publish(int *fd, bool for_device, td_err *err) {
  int rc = -1, seals = RESIDENT_SEALS | F_SEAL_SEAL | (for_device ? 0 : F_SEAL_WRITE);
  for (int i = 0; i < SEAL_TRIES && rc != 0; i++) {
    rc = fcntl(*fd, F_ADD_SEALS, seals);
    if (rc != 0 && errno != EBUSY) break;
    if (rc != 0) usleep(1000);
  }
  if (rc != 0) return td_fail(err, TD_EIO, "cannot seal the weights: %s", strerror(errno));
  if (for_device) return TD_OK;
  char path[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", *fd);
  int read_only = open(path, O_RDONLY | O_CLOEXEC);
  if (read_only < 0) return td_fail(err, TD_EIO, "%s: cannot open: %s", path, strerror(errno));
  close(*fd);
  *fd = read_only;
  return TD_OK;
}

static td_status load(loading *l, int *fd, td_resident_stats *stats, const td_store *store,
                      td_err *err) {
  td_status st = plan(l, store, err);
  if (st == TD_OK) st = create(l, fd, &stats->pages, err);
  if (st != TD_OK) return st;
  choose_stripes(l, stats->pages);
  const td_stripes all = {
      .n_bytes = l->n_bytes, .stripe_bytes = l->stripe_bytes, .n_nodes = l->nodes.n};
  stats->n_nodes = l->nodes.n;
  for (unsigned k = 0; k < l->nodes.n; k++)
    stats->node_bytes[k] = td_stripes_bytes(&all, k);
  enter_stripe(l, 0, l->n_bytes);
  write_head(l);
  leave_stripes(l);
  st = run_readers(l, err);
  if (st == TD_OK) st = convert(l, *fd, stats->pages, store, err);
  stats->n_bytes = l->total_bytes;
  stats->huge_bytes = stats->pages == TD_PAGES_RESERVED ? l->n_bytes
                                                        : td_memory_shared_huge_bytes();
  munmap(l->base, (size_t)l->n_bytes);
  return st == TD_OK ? publish(fd, l->opts->for_device || l->opts->arena_bytes, err) : st;
}

td_status td_resident_load(int *fd, td_resident_stats *stats, const td_store *store,
                           const td_resident_opts *opts, td_err *err) {
  loading l = {.opts = opts};
  pthread_mutex_init(&l.lock, NULL);
  pthread_cond_init(&l.ended, NULL);
  *fd = -1;
  *stats = (td_resident_stats){0};
  td_status st = load(&l, fd, stats, store, err);
  if (st != TD_OK && *fd >= 0) {
    close(*fd);
    *fd = -1;
  }
  for (size_t i = 0; i < l.n_sources; i++) {
    free(l.sources[i].own_path);
    free(l.sources[i].tables);
  }
  free(l.sources);
  pthread_cond_destroy(&l.ended);
  pthread_mutex_destroy(&l.lock);
  return st;
}
