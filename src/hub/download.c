// src/hub/download.c - downloads the files of a listing, several at once, each on a thread of its
// own: a blob is hashed as it comes, and gets its name when size and hash are right.
#include <errno.h>
#include <fcntl.h>
#include <nettle/sha1.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/env.h"
#include "base/log.h"
#include "base/sha256.h"
#include "base/thread.h"
#include "hub/hub_impl.h"

#define MAX_THREADS    8
#define MAX_TRIES      6 // in a row that bring little
#define LITTLE_BYTES   (64u << 10)
#define MAX_MISMATCHES 2 // downloads of one file with another hash than listed
#define MAX_WAIT_S     120
#define READ_BYTES     (1u << 20)
#define REPORT_MS      200   // on a terminal
#define LINE_MS        10000 // elsewhere
#define GB             1e9
#define KEEP_BYTES     (64u << 20) // that stay free on the disk

typedef struct {
  const td_hub_download *what;
  pthread_mutex_t lock;
  uint32_t next, n_done;
  td_err err;               // the first
  atomic_bool is_ending;    // a file failed, or the user stopped
  _Atomic uint64_t n_bytes; // that are there
  _Atomic uint32_t n_left;  // threads
  uint64_t total, begun_ns, at_begin;
} download;

// ---- one blob -----------------------------------------------------------------------------------

// The partial file, and its hash.
typedef struct {
  download *d;
  const td_hub_file *file;
  td_buf path; // of the blob; with .incomplete while it comes
  int fd;
  bool is_ours; // locked, and the path is its name
  uint64_t n;   // bytes there
  td_sha256 sha256;
  struct sha1_ctx sha1;
} blob;

static void start_hash(blob *b) {
  char head[32];
  td_sha256_begin(&b->sha256);
  sha1_init(&b->sha1);
  const int n = snprintf(head, sizeof head, "blob %llu", (unsigned long long)b->file->n_bytes);
  sha1_update(&b->sha1, (size_t)n + 1, (const uint8_t *)head); // with its NUL
}

static void add_hash(blob *b, const void *bytes, size_t len) {
  if (b->file->is_sha256)
    td_sha256_add(&b->sha256, bytes, len);
  else
    sha1_update(&b->sha1, len, bytes);
}

static bool is_right(blob *b) {
  char hex[TD_DIGEST_HEX] = "";
  td_digest digest;
  if (b->file->is_sha256) {
    td_sha256_end(&b->sha256, &digest);
    td_digest_hex(hex, &digest);
  } else {
    uint8_t sha1[SHA1_DIGEST_SIZE];
    sha1_digest(&b->sha1, sizeof sha1, sha1);
    base16_encode_update(hex, sizeof sha1, sha1);
    hex[2 * sizeof sha1] = '\0';
  }
  return strcmp(hex, b->file->hash) == 0;
}

static td_status fail_errno(const blob *b, const char *verb, td_err *err) {
  return td_fail(err, TD_EIO, "%s: cannot %s: %s", td_buf_text(&b->path), verb, strerror(errno));
}

static td_status empty(blob *b, td_err *err) {
  atomic_fetch_sub(&b->d->n_bytes, b->n);
  b->n = 0;
  start_hash(b);
  if (ftruncate(b->fd, 0) != 0) return fail_errno(b, "truncate", err);
  return lseek(b->fd, 0, SEEK_SET) == 0 ? TD_OK : fail_errno(b, "rewind", err);
}

// Hashes what an earlier download left.
static td_status read_begun(blob *b, td_err *err) {
  void *bytes = malloc(READ_BYTES);
  ssize_t n = 0;
  if (!bytes) return td_fail(err, TD_ENOMEM, "out of memory");
  start_hash(b);
  while (!atomic_load(&b->d->is_ending) && (n = read(b->fd, bytes, READ_BYTES)) > 0) {
    add_hash(b, bytes, (size_t)n);
    b->n += (uint64_t)n;
  }
  free(bytes);
  if (n < 0) return fail_errno(b, "read", err);
  atomic_fetch_add(&b->d->n_bytes, b->n);
  return b->n > b->file->n_bytes ? empty(b, err) : TD_OK;
}

static td_status take(void *ctx, uint64_t begin, const void *bytes, size_t len, td_err *err) {
  blob *b = ctx;
  if (begin != b->n) { // the server does not know ranges
    if (begin) return td_fail(err, TD_EFORMAT, "%s: the server ignored Range", b->file->path);
    td_status st = empty(b, err);
    if (st != TD_OK) return st;
  }
  if (len > b->file->n_bytes - b->n) {
    td_status st = empty(b, err);
    return st != TD_OK ? st
                       : td_fail(err, TD_EFORMAT, "%s: larger than the %llu bytes the hub lists",
                                 b->file->path, (unsigned long long)b->file->n_bytes);
  }
  for (size_t done = 0; done < len;) {
    const ssize_t n = write(b->fd, (const char *)bytes + done, len - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return fail_errno(b, "write", err);
    done += (size_t)n;
  }
  add_hash(b, bytes, len);
  b->n += len;
  atomic_fetch_add(&b->d->n_bytes, len);
  return TD_OK;
}

// Waits, unless the download ends.
static void wait_ms(const download *d, uint64_t ms) {
  const uint64_t until_ns = td_clock_ns() + ms * 1000000;
  while (td_clock_ns() < until_ns && !atomic_load(&d->is_ending)) {
    const struct timespec t = {.tv_nsec = 20000000};
    nanosleep(&t, NULL);
  }
}

// How long to wait after so many failures in a row. For tests the unit is
// TANDEM_HUB_BACKOFF_MS instead of a second.
static uint64_t backoff_ms(unsigned n_tries, unsigned retry_after_s) {
  const char *test = td_test_var_get(TD_ENV_HUB_BACKOFF_MS);
  const uint64_t unit = test ? strtoull(test, NULL, 10) : 1000;
  const uint64_t n = retry_after_s ? retry_after_s : 1u << (n_tries < 6 ? n_tries : 6);
  return unit * (n < MAX_WAIT_S ? n : MAX_WAIT_S);
}

static td_status explain(const blob *b, const td_hub_result *r, td_err *err) {
  const char *path = b->file->path;
  if (r->http == 401 || r->http == 403) {
    return td_fail(err, TD_EINVAL,
                   "%s: the server answers %ld: accept the model's terms on its page, and set "
                   "HF_TOKEN to a key that may read it",
                   path, r->http);
  }
  return td_err_prefix(err, "%s", path);
}

// Gets the rest of the blob, with more tries as long as each brings something.
static td_status get_rest(blob *b, const char *url, td_err *err) {
  unsigned n_tries = 0;
  while (b->n < b->file->n_bytes) {
    const uint64_t before = b->n;
    td_hub_result result;
    const td_hub_get get = {.url = url,
                            .token = b->d->what->token,
                            .begin = b->n,
                            .stop = &b->d->is_ending,
                            .take = take,
                            .ctx = b};
    td_status st = td_hub_fetch(&get, &result, err);
    if (st == TD_OK && b->n == b->file->n_bytes) return TD_OK;
    if (st == TD_OK) { // truncated response
      result.is_worth_retrying = true;
      st = td_fail(err, TD_EIO, "the server sent %llu of %llu bytes", (unsigned long long)b->n,
                   (unsigned long long)b->file->n_bytes);
    }
    if (!result.is_worth_retrying || st == TD_ECANCELED) return explain(b, &result, err);
    if (result.http == 416 && empty(b, err) != TD_OK) return err->code;
    n_tries = b->n >= before + LITTLE_BYTES ? 1 : n_tries + 1;
    if (n_tries == MAX_TRIES) return explain(b, &result, err);
    wait_ms(b->d, backoff_ms(n_tries - 1, result.retry_after_s));
    if (atomic_load(&b->d->is_ending)) return td_fail(err, TD_ECANCELED, "interrupted");
  }
  return TD_OK;
}

// Downloads until the hash is right.
static td_status get_right(blob *b, const char *url, td_err *err) {
  for (unsigned n = 0;; n++) {
    td_status st = get_rest(b, url, err);
    if (st != TD_OK) return st;
    if (is_right(b)) return TD_OK;
    st = empty(b, err);
    if (st != TD_OK) return st;
    if (n + 1 == MAX_MISMATCHES) {
      return td_fail(err, TD_EFORMAT,
                     "%s: hash mismatch: not the %.12s... that the hub lists; the partial file "
                     "was deleted",
                     b->file->path, b->file->hash);
    }
  }
}

static td_status finish(blob *b, td_err *err) {
  td_buf whole = TD_BUF_INIT;
  td_buf_printf(&whole, "%s/blobs/%s", b->d->what->folder, b->file->hash);
  td_status st = td_buf_status(&whole, err);
  if (st == TD_OK && fdatasync(b->fd) != 0) st = fail_errno(b, "write", err);
  if (st == TD_OK && rename(td_buf_text(&b->path), td_buf_text(&whole)) != 0)
    st = fail_errno(b, "rename", err);
  b->is_ours = st != TD_OK;
  td_buf_free(&whole);
  return st;
}

static bool is_there(const td_hub_download *what, const td_hub_file *file) {
  struct stat info;
  td_buf path = TD_BUF_INIT;
  td_buf_printf(&path, "%s/blobs/%s", what->folder, file->hash);
  const bool found = stat(td_buf_text(&path), &info) == 0 &&
                     (uint64_t)info.st_size == file->n_bytes;
  td_buf_free(&path);
  return found;
}

// Opens the partial file. Refuses symlinks, hard links and FIFOs.
static td_status open_begun(blob *b, struct stat *info, td_err *err) {
  const int flags = O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
  b->fd = open(td_buf_text(&b->path), flags, 0666);
  if (b->fd < 0 && errno != ELOOP && errno != ENXIO) return fail_errno(b, "open", err);
  if (b->fd >= 0 && fstat(b->fd, info) != 0) return fail_errno(b, "stat", err);
  if (b->fd >= 0 && S_ISREG(info->st_mode) && info->st_nlink <= 1) return TD_OK;
  return td_fail(err, TD_EINVAL, "%s: not a regular file with this one name: remove it",
                 td_buf_text(&b->path));
}

// Opens and locks the partial file. It may be another process's, which finishes or removes it
// before the lock: then the name is opened again.
static td_status lock_begun(blob *b, td_err *err) {
  for (;;) {
    struct stat locked, named;
    td_status st = open_begun(b, &locked, err);
    if (st != TD_OK) return st;
    if (flock(b->fd, LOCK_EX | LOCK_NB) != 0)
      return td_fail(err, TD_EAGAIN, "%s: another process is downloading it", b->file->path);
    b->is_ours = lstat(td_buf_text(&b->path), &named) == 0 && named.st_dev == locked.st_dev &&
                 named.st_ino == locked.st_ino;
    if (b->is_ours) return TD_OK;
    close(b->fd);
  }
}

static td_status get_locked(blob *b, const char *url, td_err *err) {
  td_status st = lock_begun(b, err);
  if (st == TD_OK && is_there(b->d->what, b->file)) { // another process has just finished it
    atomic_fetch_add(&b->d->n_bytes, b->file->n_bytes);
    return TD_OK;
  }
  if (st == TD_OK) st = read_begun(b, err);
  if (st == TD_OK) st = get_right(b, url, err);
  return st == TD_OK ? finish(b, err) : st;
}

static td_status get_file(download *d, const td_hub_file *file, td_err *err) {
  blob b = {.d = d, .file = file, .fd = -1};
  td_buf url = TD_BUF_INIT;
  if (file->is_twin) return TD_OK; // its blob comes for another file
  if (is_there(d->what, file)) {
    atomic_fetch_add(&d->n_bytes, file->n_bytes);
    return TD_OK;
  }
  td_buf_printf(&b.path, "%s/blobs/%s.incomplete", d->what->folder, file->hash);
  td_buf_str(&url, d->what->base_url);
  td_hub_escape(&url, file->path);
  const td_status st = get_locked(&b, td_buf_text(&url), err);
  if (b.is_ours && !b.n) (void)unlink(td_buf_text(&b.path));
  if (b.fd >= 0) close(b.fd);
  td_buf_free(&b.path);
  td_buf_free(&url);
  return st;
}

// ---- all of them --------------------------------------------------------------------------------

static const td_hub_file *next_file(download *d) {
  const td_hub_listing *l = d->what->listing;
  pthread_mutex_lock(&d->lock);
  const bool is_over = d->next == l->n || atomic_load(&d->is_ending);
  const td_hub_file *file = is_over ? NULL : &l->files[d->next++];
  pthread_mutex_unlock(&d->lock);
  return file;
}

static void end_file(download *d, td_status st, const td_err *err, const td_hub_file *file) {
  pthread_mutex_lock(&d->lock);
  d->n_done += st == TD_OK;
  const bool is_first = st != TD_OK && d->err.code == TD_OK;
  if (is_first && !(st == TD_ECANCELED && atomic_load(&d->is_ending))) d->err = *err;
  const uint32_t n_done = d->n_done;
  pthread_mutex_unlock(&d->lock);
  if (st != TD_OK) atomic_store(&d->is_ending, true);
  if (st == TD_OK && isatty(STDERR_FILENO) != 1) {
    td_info("%s: %.3f GB, %u of %u files", file->path, (double)file->n_bytes / GB, n_done,
            d->what->listing->n);
  }
}

static void *run(void *arg) {
  download *d = arg;
  for (const td_hub_file *file; (file = next_file(d));) {
    td_err err;
    const td_status st = get_file(d, file, &err);
    end_file(d, st, &err, file);
  }
  atomic_fetch_sub(&d->n_left, 1);
  return NULL;
}

static void report(const download *d, bool is_terminal) {
  const uint64_t n = atomic_load(&d->n_bytes);
  const double seconds = (double)(td_clock_ns() - d->begun_ns) * 1e-9;
  const double rate = n > d->at_begin ? (double)(n - d->at_begin) / seconds : 0;
  const double left_s = rate > 0 ? (double)(d->total - n) / rate : 0;
  if (!is_terminal) {
    td_info("%.2f of %.2f GB, %.1f MB/s, %.0f s left", (double)n / GB, (double)d->total / GB,
            rate / 1e6, left_s);
    return;
  }
  char bar[21] = "                    ";
  const unsigned filled = d->total ? (unsigned)(n * 20 / d->total) : 20;
  memset(bar, '#', filled < 20 ? filled : 20);
  fprintf(stderr, "\r[%s] %.2f of %.2f GB  %.1f MB/s  %u:%02u left \033[K", bar, (double)n / GB,
          (double)d->total / GB, rate / 1e6, (unsigned)left_s / 60, (unsigned)left_s % 60);
  fflush(stderr);
}

// Reports until all threads have ended.
static void watch(download *d) {
  const bool is_terminal = isatty(STDERR_FILENO) == 1;
  uint64_t said_ns = td_clock_ns();
  while (atomic_load(&d->n_left)) {
    const struct timespec t = {.tv_nsec = 20000000};
    nanosleep(&t, NULL);
    if (d->what->stop && atomic_load(d->what->stop)) atomic_store(&d->is_ending, true);
    const uint64_t wait_ns = (uint64_t)(is_terminal ? REPORT_MS : LINE_MS) * 1000000;
    if (td_clock_ns() - said_ns < wait_ns) continue;
    said_ns = td_clock_ns();
    if (!d->at_begin) d->at_begin = atomic_load(&d->n_bytes);
    report(d, is_terminal);
  }
  if (is_terminal) fputs("\r\033[K", stderr);
}

static td_status run_threads(download *d, td_err *err) {
  pthread_t threads[MAX_THREADS];
  uint32_t n = 0;
  const uint32_t most = d->what->listing->n < MAX_THREADS ? d->what->listing->n : MAX_THREADS;
  atomic_store(&d->n_left, most);
  while (n < most && td_thread_start(&threads[n], run, d) == 0)
    n++;
  atomic_fetch_sub(&d->n_left, most - n);
  if (n) watch(d);
  for (uint32_t i = 0; i < n; i++)
    pthread_join(threads[i], NULL);
  if (!n) return td_fail(err, TD_ELIMIT, "no thread can be started");
  if (d->err.code != TD_OK) {
    *err = d->err;
    return err->code;
  }
  if (d->n_done == d->what->listing->n) return TD_OK;
  return td_fail(err, TD_ECANCELED, "interrupted: partial files are kept for the next run");
}

// What is still to come, in bytes.
static uint64_t n_missing(const td_hub_download *what) {
  uint64_t sum = 0;
  for (uint32_t i = 0; i < what->listing->n; i++) {
    const td_hub_file *file = &what->listing->files[i];
    struct stat info;
    td_buf path = TD_BUF_INIT;
    td_buf_printf(&path, "%s/blobs/%s.incomplete", what->folder, file->hash);
    const bool begun = lstat(td_buf_text(&path), &info) == 0 && S_ISREG(info.st_mode);
    const uint64_t n = begun && info.st_size > 0 ? (uint64_t)info.st_size : 0;
    if (!file->is_twin && !is_there(what, file)) sum += n < file->n_bytes ? file->n_bytes - n : 0;
    td_buf_free(&path);
  }
  return sum;
}

static td_status check_space(const td_hub_download *what, uint64_t n_bytes, td_err *err) {
  struct statvfs disk;
  if (!n_bytes || statvfs(what->folder, &disk) != 0) return TD_OK;
  const uint64_t n_free = (uint64_t)disk.f_bavail * disk.f_frsize;
  if (n_free >= n_bytes + KEEP_BYTES) return TD_OK;
  return td_fail(err, TD_ELIMIT,
                 "%s: %.1f GB are to be downloaded and %.1f GB are free: make room, or set "
                 "HF_HUB_CACHE to a folder on another disk",
                 what->folder, (double)n_bytes / GB, (double)n_free / GB);
}

td_status td_hub_download_all(const td_hub_download *what, td_err *err) {
  download d = {.what = what, .begun_ns = td_clock_ns()};
  const uint64_t n_to_come = n_missing(what);
  td_status st = check_space(what, n_to_come, err);
  if (st != TD_OK) return st;
  for (uint32_t i = 0; i < what->listing->n; i++)
    d.total += what->listing->files[i].is_twin ? 0 : what->listing->files[i].n_bytes;
  td_info("%u files, %.2f GB, of which %.2f GB are to be downloaded to %s", what->listing->n,
          (double)d.total / GB, (double)n_to_come / GB, what->folder);
  TD_CHECK(pthread_mutex_init(&d.lock, NULL) == 0);
  st = run_threads(&d, err);
  pthread_mutex_destroy(&d.lock);
  return st;
}
