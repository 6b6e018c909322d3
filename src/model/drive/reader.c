// src/model/drive/reader.c - the threads, their queue and one read.
#include "model/drive/reader.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/thread.h"
#include "model/drive/places.h"

enum {
  N_DRIVES = 2,   // the files', and the mirror's
  N_THREADS = 16, // NVMe drives need many large reads at once
  N_TRIES = 3,
  PAUSE_US = 20000, // before the second try, and twice that before the third
};

typedef struct {
  int fd;
  bool is_direct;
} open_file;

// The files on a drive.
typedef struct {
  td_drive_reader *reader;
  const char *folder; // of a mirror; NULL: where the store has them
  td_file_id *ids;    // [n_files], as they were opened
  open_file *files;   // [n_files]
} drive;

struct td_drive_reader {
  td_drive_reader_opts opts;
  drive drives[N_DRIVES];
  unsigned n_drives;
  size_t n_files;
  pthread_t *threads;
  unsigned n_threads;
  pthread_mutex_t lock;
  pthread_cond_t more;
  td_drive_read *queue; // [cap], under lock: [first, first + n) in a ring
  size_t first, n, cap;
  bool is_closing;
  unsigned n_busy; // threads that read
  uint64_t busy_since_ns;
  td_drive_stats stats;
};

static td_file_id id_of(const struct stat *s) {
  return (td_file_id){.dev = s->st_dev,
                      .ino = s->st_ino,
                      .n_bytes = (uint64_t)s->st_size,
                      .mtime_ns = (uint64_t)s->st_mtim.tv_sec * 1000000000u +
                                  (uint64_t)s->st_mtim.tv_nsec};
}

td_status td_file_id_of(td_file_id *out, const char *path, td_err *err) {
  struct stat s;
  if (stat(path, &s) != 0)
    return td_fail(err, TD_EIO, "%s: cannot read: %s", path, strerror(errno));
  *out = id_of(&s);
  return TD_OK;
}

// Returns 0 or an errno.
static int open_shard(const drive *d, uint32_t shard, bool direct, open_file *out) {
  const td_shard_info info = td_store_shard(d->reader->opts.store, shard);
  char path[PATH_MAX];
  struct stat s;
  const char *const parts[] = {d->folder ? d->folder : "", d->folder ? "/" : "",
                               d->folder ? info.name : info.path};
  if (snprintf(path, sizeof path, "%s%s%s", parts[0], parts[1], parts[2]) >= (int)sizeof path)
    return ENAMETOOLONG;
  out->fd = direct ? open(path, O_RDONLY | O_CLOEXEC | O_DIRECT) : -1;
  out->is_direct = out->fd >= 0;
  if (out->fd < 0) out->fd = open(path, O_RDONLY | O_CLOEXEC); // some file systems lack O_DIRECT
  if (out->fd < 0) return errno;
  const int code = fstat(out->fd, &s) != 0 ? errno : 0;
  const td_file_id id = id_of(&s);
  if (!code && !d->ids[shard].n_bytes) d->ids[shard] = id; // a mirror's, the first time
  if (!code && memcmp(&id, &d->ids[shard], sizeof id) == 0) return 0;
  close(out->fd);
  out->fd = -1;
  return code ? code : ESTALE;
}

// Reads from f; another descriptor takes over where a direct one is refused. Returns an errno or 0.
static int read_from(const drive *d, const td_drive_read *job, open_file f) {
  open_file plain = {.fd = -1};
  uint64_t have = 0;
  int code = 0;
  while (have < job->n_needed && !code) {
    const int fd = plain.fd >= 0 ? plain.fd : f.fd;
    const bool is_direct = plain.fd < 0 && f.is_direct;
    const ssize_t n = d->reader->opts.pread(fd, (char *)job->to + have, job->n_bytes - have,
                                            (off_t)(job->offset + have));
    if (n > 0) have += (uint64_t)n;
    if (n < 0 && errno == EINTR) continue;
    const bool is_refused = n < 0 && errno == EINVAL && is_direct;
    const bool is_odd = is_direct && have % TD_DRIVE_ALIGN && have < job->n_needed;
    if (n == 0)
      code = ENODATA;
    else if (is_refused || is_odd)
      code = open_shard(d, job->shard, false, &plain);
    else if (n < 0)
      code = errno;
  }
  const int used = plain.fd >= 0 ? plain.fd : f.is_direct ? -1 : f.fd;
  if (used >= 0) // no second copy in the page cache
    posix_fadvise(used, (off_t)job->offset, (off_t)job->n_bytes, POSIX_FADV_DONTNEED);
  if (plain.fd >= 0) close(plain.fd);
  return code;
}

// After a failure the file is opened anew: it may have been replaced by the same one. With a mirror
// drives take turns.
static int run(drive *own, const td_drive_read *job) {
  td_drive_reader *r = own->reader;
  int code = read_from(own, job, own->files[job->shard]);
  for (unsigned i = 1; code && i < N_TRIES * r->n_drives; i++) {
    const drive *d = &r->drives[((unsigned)(own - r->drives) + i) % r->n_drives];
    open_file again;
    usleep((useconds_t)(PAUSE_US * (i / r->n_drives)));
    code = open_shard(d, job->shard, true, &again);
    if (code) continue;
    code = read_from(d, job, again);
    close(again.fd);
  }
  return code;
}

static void *reader_main(void *arg) {
  drive *own = arg;
  td_drive_reader *r = own->reader;
  pthread_mutex_lock(&r->lock);
  for (;;) {
    while (!r->n && !r->is_closing)
      pthread_cond_wait(&r->more, &r->lock);
    if (r->is_closing) break;
    const td_drive_read job = r->queue[r->first];
    r->first = (r->first + 1) % r->cap;
    r->n--;
    if (!r->n_busy++) r->busy_since_ns = td_clock_ns();
    pthread_mutex_unlock(&r->lock);
    const int code = run(own, &job);
    r->opts.done(r->opts.ctx, &job, code);
    pthread_mutex_lock(&r->lock);
    if (!code) r->stats.n_bytes += job.n_bytes;
    if (!--r->n_busy) r->stats.busy_ns += td_clock_ns() - r->busy_since_ns;
  }
  pthread_mutex_unlock(&r->lock);
  return NULL;
}

static td_status refuse(const drive *d, size_t shard, int code, td_err *err) {
  const td_shard_info info = td_store_shard(d->reader->opts.store, shard);
  if (d->folder) {
    return td_fail(err, TD_EINVAL, "--mirror %s: %s: %s", d->folder, info.name,
                   code == ESTALE ? "it is not the file that the model has" : strerror(code));
  }
  return td_fail(err, TD_EIO, "%s: %s", info.path,
                 code == ESTALE ? "it has changed since it was loaded, start the server again"
                                : strerror(code));
}

// Whether some pages of the file are those of the first drive: the first, the last, and others.
static bool is_alike(const drive *d, const open_file *f, const open_file *first, uint32_t shard) {
  enum { N_PAGES = 16, PAGE = TD_DRIVE_ALIGN };
  _Alignas(PAGE) char pages[2][PAGE];
  const uint64_t n_bytes = d->reader->drives[0].ids[shard].n_bytes;
  if (d->ids[shard].n_bytes != n_bytes) return false;
  for (uint64_t i = 0; i < N_PAGES; i++) {
    const off_t at = (off_t)((n_bytes - 1) / (N_PAGES - 1) * i / PAGE * PAGE);
    const ssize_t n = pread(f->fd, pages[0], PAGE, at),
                  n_first = pread(first->fd, pages[1], PAGE, at);
    if (n <= 0 || n != n_first || memcmp(pages[0], pages[1], (size_t)n) != 0) return false;
  }
  return true;
}

static td_status open_files(td_drive_reader *r, drive *d, td_err *err) {
  const bool is_mirror = d != r->drives;
  d->reader = r;
  d->folder = is_mirror ? r->opts.mirror : NULL;
  d->files = calloc(r->n_files + 1, sizeof *d->files);
  d->ids = calloc(r->n_files + 1, sizeof *d->ids);
  if (!d->files || !d->ids) return td_fail(err, TD_ENOMEM, "out of memory: files of experts");
  if (!is_mirror) memcpy(d->ids, r->opts.ids, r->n_files * sizeof *d->ids);
  for (size_t i = 0; i < r->n_files; i++)
    d->files[i].fd = -1;
  for (uint32_t i = 0; i < r->n_files; i++) {
    int code = open_shard(d, i, true, &d->files[i]);
    if (!code && is_mirror && !is_alike(d, &d->files[i], &r->drives[0].files[i], i)) code = ESTALE;
    if (code) return refuse(d, i, code, err);
  }
  return TD_OK;
}

td_status td_drive_reader_open(td_drive_reader **out, const td_drive_reader_opts *opts,
                               td_err *err) {
  const unsigned n_drives = opts->mirror && opts->mirror[0] ? 2 : 1;
  const unsigned n = n_drives * (opts->n_threads ? opts->n_threads : N_THREADS);
  *out = NULL;
  td_drive_reader *r = calloc(1, sizeof *r);
  if (!r) return td_fail(err, TD_ENOMEM, "out of memory: readers of experts");
  r->opts = *opts;
  if (!r->opts.pread) r->opts.pread = pread;
  pthread_mutex_init(&r->lock, NULL);
  pthread_cond_init(&r->more, NULL);
  r->n_files = td_store_n_shards(opts->store);
  r->threads = calloc(n, sizeof *r->threads);
  td_status st = r->threads ? TD_OK : td_fail(err, TD_ENOMEM, "out of memory: readers of experts");
  for (; r->n_drives < n_drives && st == TD_OK; r->n_drives++)
    st = open_files(r, &r->drives[r->n_drives], err);
  for (unsigned i = 0; i < n && st == TD_OK; i++)
    if (td_thread_start(&r->threads[i], reader_main, &r->drives[i % n_drives]) == 0)
      r->n_threads++;
    else if (!r->n_threads)
      st = td_fail(err, TD_ENOMEM, "cannot start a thread to read experts");
  if (st == TD_OK)
    *out = r;
  else
    td_drive_reader_close(r);
  return st;
}

void td_drive_reader_close(td_drive_reader *r) {
  if (!r) return;
  pthread_mutex_lock(&r->lock);
  r->is_closing = true;
  pthread_cond_broadcast(&r->more);
  pthread_mutex_unlock(&r->lock);
  for (unsigned i = 0; i < r->n_threads; i++)
    pthread_join(r->threads[i], NULL);
  for (drive *d = r->drives; d < r->drives + N_DRIVES; d++) {
    for (size_t i = 0; d->files && i < r->n_files; i++)
      if (d->files[i].fd >= 0) close(d->files[i].fd);
    free(d->files);
    free(d->ids);
  }
  pthread_cond_destroy(&r->more);
  pthread_mutex_destroy(&r->lock);
  free(r->threads);
  free(r->queue);
  free(r);
}

// The ring is unrolled into a larger one.
static bool grow(td_drive_reader *r) {
  const size_t cap = r->cap ? 2 * r->cap : 256;
  td_drive_read *grown = malloc(cap * sizeof *grown);
  if (!grown) return false;
  for (size_t i = 0; i < r->n; i++)
    grown[i] = r->queue[(r->first + i) % r->cap];
  free(r->queue);
  r->queue = grown;
  r->first = 0;
  r->cap = cap;
  return true;
}

bool td_drive_reader_queue(td_drive_reader *r, const td_drive_read *read) {
  pthread_mutex_lock(&r->lock);
  const bool has_room = r->n < r->cap || grow(r);
  if (has_room) r->queue[(r->first + r->n++) % r->cap] = *read;
  pthread_cond_signal(&r->more);
  pthread_mutex_unlock(&r->lock);
  return has_room;
}

void td_drive_reader_drop(td_drive_reader *r, uint32_t slot) {
  td_drive_read dropped = {.slot = slot};
  size_t n_kept = 0, n_dropped = 0;
  pthread_mutex_lock(&r->lock);
  for (size_t i = 0; i < r->n; i++) {
    const td_drive_read read = r->queue[(r->first + i) % r->cap];
    if (read.slot == slot) {
      dropped = read;
      n_dropped++;
    } else {
      r->queue[(r->first + n_kept++) % r->cap] = read;
    }
  }
  r->n = n_kept;
  pthread_mutex_unlock(&r->lock);
  for (size_t i = 0; i < n_dropped; i++)
    r->opts.done(r->opts.ctx, &dropped, ECANCELED);
}

td_drive_stats td_drive_reader_stats(td_drive_reader *r) {
  pthread_mutex_lock(&r->lock);
  td_drive_stats stats = r->stats;
  if (r->n_busy) stats.busy_ns += td_clock_ns() - r->busy_since_ns;
  pthread_mutex_unlock(&r->lock);
  return stats;
}
