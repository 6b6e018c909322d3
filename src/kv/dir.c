// src/kv/dir.c - a hash table with an LRU list, and reading a directory at start.
#include "kv/dir.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/grow.h"
#include "base/log.h"
#include "kv/record.h"

#define NONE      UINT32_MAX
#define LOCK_FILE "lock"

typedef struct {
  td_digest name;
  uint64_t n_bytes;
  uint32_t bucket_next; // also links free entries
  uint32_t older, newer;
} entry;

struct td_kv_dir {
  char *path;
  int fd, lock_fd;
  uint64_t n_bytes, max_bytes;
  entry *entries; // [cap]
  uint32_t *buckets;
  uint32_t cap; // number of entries and of buckets, a power of two
  uint32_t free_list, oldest, newest;
};

// ---- the table --------------------------------------------------------------------------------

// Names are SHA-256, so any of their bytes serve as a hash.
static uint32_t *bucket_of(const td_kv_dir *dir, const td_digest *name) {
  uint32_t hash;
  memcpy(&hash, name->bytes, sizeof hash);
  return &dir->buckets[hash & (dir->cap - 1)];
}

static uint32_t find(const td_kv_dir *dir, const td_digest *name) {
  if (!dir->cap) return NONE;
  uint32_t i = *bucket_of(dir, name);
  while (i != NONE && memcmp(&dir->entries[i].name, name, sizeof *name) != 0)
    i = dir->entries[i].bucket_next;
  return i;
}

static void link_bucket(td_kv_dir *dir, uint32_t i) {
  uint32_t *bucket = bucket_of(dir, &dir->entries[i].name);
  dir->entries[i].bucket_next = *bucket;
  *bucket = i;
}

// Makes room for one more entry by doubling a full table. False: out of memory.
static bool grow(td_kv_dir *dir) {
  if (dir->free_list != NONE) return true;
  uint32_t cap = dir->cap ? dir->cap * 2 : 256;
  entry *entries = cap < NONE / 2 ? realloc(dir->entries, cap * sizeof *entries) : NULL;
  if (!entries) return false;
  dir->entries = entries;
  uint32_t *buckets = realloc(dir->buckets, cap * sizeof *buckets);
  if (!buckets) return false;
  dir->buckets = buckets;
  memset(buckets, 0xff, cap * sizeof *buckets); // NONE
  uint32_t n = dir->cap;
  dir->cap = cap;
  for (uint32_t i = 0; i < n; i++)
    link_bucket(dir, i); // the table was full, so all are in use
  for (uint32_t i = n; i < cap; i++) {
    entries[i].bucket_next = dir->free_list;
    dir->free_list = i;
  }
  return true;
}

static void enter_list(td_kv_dir *dir, uint32_t i) {
  entry *e = &dir->entries[i];
  e->older = dir->newest;
  e->newer = NONE;
  *(e->older == NONE ? &dir->oldest : &dir->entries[e->older].newer) = i;
  dir->newest = i;
}

static void leave_list(td_kv_dir *dir, uint32_t i) {
  const entry *e = &dir->entries[i];
  *(e->older == NONE ? &dir->oldest : &dir->entries[e->older].newer) = e->newer;
  *(e->newer == NONE ? &dir->newest : &dir->entries[e->newer].older) = e->older;
}

bool td_kv_dir_is_empty(const td_kv_dir *dir) {
  return dir->oldest == NONE;
}

bool td_kv_dir_has(const td_kv_dir *dir, const td_digest *name) {
  return find(dir, name) != NONE;
}

void td_kv_dir_use(td_kv_dir *dir, const td_digest *name) {
  uint32_t i = find(dir, name);
  if (i == NONE) return;
  leave_list(dir, i);
  enter_list(dir, i);
}

void td_kv_dir_add(td_kv_dir *dir, const td_digest *name, uint64_t n_bytes) {
  td_kv_dir_forget(dir, name);
  if (!grow(dir)) return;
  uint32_t i = dir->free_list;
  dir->free_list = dir->entries[i].bucket_next;
  dir->entries[i] = (entry){.name = *name, .n_bytes = n_bytes};
  link_bucket(dir, i);
  enter_list(dir, i);
  dir->n_bytes += n_bytes;
}

void td_kv_dir_forget(td_kv_dir *dir, const td_digest *name) {
  uint32_t i = find(dir, name);
  if (i == NONE) return;
  uint32_t *link = bucket_of(dir, name);
  while (*link != i)
    link = &dir->entries[*link].bucket_next;
  *link = dir->entries[i].bucket_next;
  leave_list(dir, i);
  dir->n_bytes -= dir->entries[i].n_bytes;
  dir->entries[i].bucket_next = dir->free_list;
  dir->free_list = i;
}

bool td_kv_dir_evict(td_kv_dir *dir, uint64_t n_bytes, td_digest *victim) {
  if (dir->oldest == NONE) return false;
  if (n_bytes <= dir->max_bytes && dir->n_bytes <= dir->max_bytes - n_bytes) return false;
  *victim = dir->entries[dir->oldest].name;
  td_kv_dir_forget(dir, victim);
  return true;
}

// ---- opening ----------------------------------------------------------------------------------

typedef struct {
  td_digest name;
  uint64_t n_bytes, used_ns;
} found;

typedef struct {
  found *items;
  size_t n, cap;
  size_t n_short; // files removed because they were too short
} found_list;

static int hex_value(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static bool parse_name(td_digest *out, const char *file, const char *suffix) {
  size_t n_hex = TD_DIGEST_HEX - 1;
  if (strlen(file) != n_hex + strlen(suffix) || strcmp(file + n_hex, suffix) != 0) return false;
  for (size_t i = 0; i < sizeof out->bytes; i++) {
    int high = hex_value(file[2 * i]), low = hex_value(file[2 * i + 1]);
    if (high < 0 || low < 0) return false;
    out->bytes[i] = (uint8_t)(high << 4 | low);
  }
  return true;
}

static int by_use(const void *a, const void *b) {
  uint64_t x = ((const found *)a)->used_ns, y = ((const found *)b)->used_ns;
  return (x > y) - (x < y);
}

static td_status note(found_list *list, const found *item, td_err *err) {
  if (!TD_GROW(list->items, list->n, list->cap, 256))
    return td_fail(err, TD_ENOMEM, "out of memory for a list of %zu files", list->n + 1);
  list->items[list->n++] = *item;
  return TD_OK;
}

// The directory is locked, so temporary files are leftovers.
static td_status look_at(const td_kv_dir *dir, found_list *list, const char *file, td_err *err) {
  found item;
  struct stat info;
  if (parse_name(&item.name, file, TD_KV_TEMP_SUFFIX)) unlinkat(dir->fd, file, 0);
  if (!parse_name(&item.name, file, TD_KV_RECORD_SUFFIX)) return TD_OK;
  if (fstatat(dir->fd, file, &info, AT_SYMLINK_NOFOLLOW) != 0) return TD_OK; // gone
  if (!S_ISREG(info.st_mode)) return TD_OK;
  item.n_bytes = (uint64_t)info.st_size;
  if (item.n_bytes < TD_KV_RECORD_MIN_BYTES) { // left by a crash
    list->n_short += unlinkat(dir->fd, file, 0) == 0;
    return TD_OK;
  }
  item.used_ns = (uint64_t)info.st_mtim.tv_sec * 1000000000u + (uint64_t)info.st_mtim.tv_nsec;
  return note(list, &item, err);
}

static td_status scan(td_kv_dir *dir, td_err *err) {
  DIR *stream = opendir(dir->path);
  if (!stream) return td_fail(err, TD_EIO, "%s: %s", dir->path, strerror(errno));
  found_list list = {0};
  td_status st = TD_OK;
  for (const struct dirent *d; st == TD_OK && (d = readdir(stream));)
    st = look_at(dir, &list, d->d_name, err);
  closedir(stream);
  if (list.n_short)
    td_warn("--kv-dir %s: %zu files too short for a KV page are removed", dir->path, list.n_short);
  if (list.n) qsort(list.items, list.n, sizeof list.items[0], by_use);
  for (size_t i = 0; st == TD_OK && i < list.n; i++)
    td_kv_dir_add(dir, &list.items[i].name, list.items[i].n_bytes);
  free(list.items);
  td_digest victim;
  while (td_kv_dir_evict(dir, 0, &victim))
    td_kv_record_remove(dir->path, &victim);
  return st;
}

static td_status enter(td_kv_dir *dir, td_err *err) {
  if (mkdir(dir->path, 0700) != 0 && errno != EEXIST)
    return td_fail(err, TD_EIO, "%s: create: %s", dir->path, strerror(errno));
  dir->fd = open(dir->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (dir->fd < 0) return td_fail(err, TD_EIO, "%s: %s", dir->path, strerror(errno));
  dir->lock_fd = openat(dir->fd, LOCK_FILE, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (dir->lock_fd < 0) return td_fail(err, TD_EIO, "%s: write: %s", dir->path, strerror(errno));
  if (flock(dir->lock_fd, LOCK_EX | LOCK_NB) == 0) return TD_OK;
  if (errno == EWOULDBLOCK)
    return td_fail(err, TD_EAGAIN, "%s is in use by another process", dir->path);
  return td_fail(err, TD_EIO, "%s: lock: %s", dir->path, strerror(errno));
}

td_status td_kv_dir_open(td_kv_dir **out, const char *path, uint64_t max_bytes, td_err *err) {
  *out = NULL;
  td_kv_dir *dir = calloc(1, sizeof *dir);
  if (!dir) return td_fail(err, TD_ENOMEM, "out of memory");
  *dir = (td_kv_dir){.path = strdup(path),
                     .fd = -1,
                     .lock_fd = -1,
                     .max_bytes = max_bytes,
                     .free_list = NONE,
                     .oldest = NONE,
                     .newest = NONE};
  td_status st = dir->path ? enter(dir, err) : td_fail(err, TD_ENOMEM, "out of memory");
  if (st == TD_OK) st = scan(dir, err);
  if (st == TD_OK)
    *out = dir;
  else
    td_kv_dir_close(dir);
  return st;
}

void td_kv_dir_close(td_kv_dir *dir) {
  if (!dir) return;
  if (dir->lock_fd >= 0) close(dir->lock_fd);
  if (dir->fd >= 0) close(dir->fd);
  free(dir->entries);
  free(dir->buckets);
  free(dir->path);
  free(dir);
}

const char *td_kv_dir_path(const td_kv_dir *dir) {
  return dir->path;
}

uint64_t td_kv_dir_bytes(const td_kv_dir *dir) {
  return dir->n_bytes;
}

uint64_t td_kv_dir_max_bytes(const td_kv_dir *dir) {
  return dir->max_bytes;
}

void td_kv_dir_limit(td_kv_dir *dir, uint64_t max_bytes) {
  dir->max_bytes = max_bytes;
}
