// src/base/fs.c - reads, maps and writes whole files.
#include "base/fs.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static td_status fail_errno(td_err *err, const char *path, const char *verb) {
  int code = errno;
  const td_status st = code == ENOENT ? TD_ENOENT : code == ENOMEM ? TD_ENOMEM : TD_EIO;
  return td_fail(err, st, "%s: cannot %s: %s", path, verb, strerror(code));
}

static td_status read_fd(td_buf *out, int fd, const char *name, size_t max_bytes, td_err *err) {
  size_t start = out->len;
  for (;;) {
    td_buf_reserve(out, 1 << 16);
    if (out->failed) return td_buf_status(out, err);
    ssize_t n = read(fd, out->data + out->len, out->cap - out->len - 1);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return fail_errno(err, name, "read");
    if (n == 0) break;
    out->len += (size_t)n;
    out->data[out->len] = '\0';
    if (out->len - start > max_bytes)
      return td_fail(err, TD_ELIMIT, "%s: larger than the limit of %zu bytes", name, max_bytes);
  }
  return TD_OK;
}

// Opens a regular file. A FIFO is rejected instead of blocking.
static td_status open_regular(int *out, struct stat *info, const char *path, td_err *err) {
  int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  // EWOULDBLOCK: another process holds a lease, which only regular files can have. Retry and wait.
  if (fd < 0 && errno == EWOULDBLOCK) fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return fail_errno(err, path, "open");
  td_status st = TD_OK;
  if (fstat(fd, info) != 0)
    st = fail_errno(err, path, "stat");
  else if (!S_ISREG(info->st_mode))
    st = td_fail(err, TD_EINVAL, "%s: not a regular file", path);
  if (st != TD_OK) {
    close(fd);
    return st;
  }
  *out = fd;
  return TD_OK;
}

td_status td_file_read(td_buf *out, const char *path, size_t max_bytes, td_err *err) {
  int fd = -1;
  struct stat info;
  td_status st = open_regular(&fd, &info, path, err);
  if (st != TD_OK) return st;
  st = read_fd(out, fd, path, max_bytes, err);
  close(fd);
  return st;
}

static _Thread_local const td_file_kept *kept_files;

void td_file_keep(const td_file_kept *kept) {
  kept_files = kept;
}

static const void *find_kept(const char *path, size_t *n_bytes) {
  return kept_files ? kept_files->find(kept_files->ctx, path, n_bytes) : NULL;
}

td_status td_file_read_regular(td_buf *out, const char *path, size_t max_bytes, td_err *err) {
  size_t n_bytes, start = out->len;
  const void *bytes = find_kept(path, &n_bytes);
  if (bytes && n_bytes <= max_bytes) {
    td_buf_add(out, bytes, n_bytes);
    return td_buf_status(out, err);
  }
  td_status st = td_file_read(out, path, max_bytes, err);
  return st == TD_OK ? td_file_check_fetched(path, td_buf_text(out) + start, out->len - start, err)
                     : st;
}

td_status td_file_check_fetched(const char *path, const void *bytes, size_t len, td_err *err) {
  static const char pointer[] = "version https://git-lfs.github.com/spec/";
  if (len == 0) return td_fail(err, TD_EFORMAT, "%s: the file is empty: download it again", path);
  if (len < sizeof pointer || memcmp(bytes, pointer, sizeof pointer - 1) != 0) return TD_OK;
  return td_fail(err, TD_EFORMAT,
                 "%s: is a git-lfs pointer, not the file itself: run `git lfs pull` in its "
                 "directory, or download the file",
                 path);
}

td_status td_stdin_read(td_buf *out, size_t max_bytes, td_err *err) {
  return read_fd(out, STDIN_FILENO, "standard input", max_bytes, err);
}

bool td_file_exists(const char *path) {
  size_t n_bytes;
  return find_kept(path, &n_bytes) || access(path, F_OK) == 0;
}

td_status td_file_map_open(td_file_map *out, const char *path, td_err *err) {
  *out = (td_file_map){.is_kept = true};
  out->data = find_kept(path, &out->n_bytes);
  return out->data ? TD_OK : td_file_map_disk(out, path, err);
}

td_status td_file_map_disk(td_file_map *out, const char *path, td_err *err) {
  *out = (td_file_map){0};
  int fd = -1;
  struct stat info;
  td_status st = open_regular(&fd, &info, path, err);
  if (st != TD_OK) return st;
  if (info.st_size > 0) {
    void *data = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) {
      st = fail_errno(err, path, "map");
    } else {
      madvise(data, (size_t)info.st_size, MADV_HUGEPAGE); // takes effect if the file system
                                                          // supports large pages
      *out = (td_file_map){.data = data, .n_bytes = (size_t)info.st_size};
    }
  }
  close(fd);
  return st;
}

void td_file_map_close(td_file_map *map) {
  if (map->data && !map->is_kept) munmap((void *)map->data, map->n_bytes);
  *map = (td_file_map){0};
}

static td_status write_all(int fd, const char *path, const char *bytes, size_t len, td_err *err) {
  while (len) {
    ssize_t n = write(fd, bytes, len);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return fail_errno(err, path, "write");
    bytes += n;
    len -= (size_t)n;
  }
  if (fsync(fd) != 0 && errno != EINVAL) return fail_errno(err, path, "write");
  return TD_OK;
}

td_status td_file_write(const char *path, const void *bytes, size_t len, td_err *err) {
  char tmp[4096];
  int n = snprintf(tmp, sizeof tmp, "%s.tmp.%d", path, (int)getpid());
  if (n < 0 || (size_t)n >= sizeof tmp) return td_fail(err, TD_EINVAL, "%s: path too long", path);
  int fd = open(tmp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return fail_errno(err, path, "create");
  td_status st = write_all(fd, path, bytes, len, err);
  if (close(fd) != 0 && st == TD_OK) st = fail_errno(err, path, "write");
  if (st == TD_OK && rename(tmp, path) != 0) st = fail_errno(err, path, "create");
  if (st != TD_OK) unlink(tmp);
  return st;
}
