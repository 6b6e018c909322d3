// src/kv/record.c - the format of a KV page's file; reading and writing it.
#include "kv/record.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAGIC   0x50564b54u // "TKVP"
#define VERSION 1u

typedef struct {
  uint32_t magic, version, n_tokens, reserved;
  uint64_t n_bytes;
  uint64_t checksum; // of keys and values; all other fields are compared with known values
  td_digest model, name;
  uint8_t unused[32];
} head;
static_assert(sizeof(head) == TD_KV_RECORD_MIN_BYTES, "file layout");

void td_kv_name_next(td_digest *out, const td_digest *before, const int32_t *tokens, uint32_t n) {
  td_sha256 sha;
  td_sha256_begin(&sha);
  td_sha256_add(&sha, before, sizeof *before);
  td_sha256_add(&sha, tokens, n * sizeof *tokens);
  td_sha256_end(&sha, out);
}

void td_kv_name_salted(td_digest *out, const td_digest *root, uint64_t salt) {
  const int32_t words[] = {(int32_t)(uint32_t)salt, (int32_t)(uint32_t)(salt >> 32)};
  *out = *root;
  if (salt) td_kv_name_next(out, root, words, TD_COUNT(words));
}

// ---- bytes ------------------------------------------------------------------------------------

#define LANES    4
#define MULTIPLE 0x9e3779b97f4a7c15u // odd, so multiplication is invertible

static uint64_t mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * MULTIPLE;
  return hash >> 29 | hash << 35;
}

// Detects damage, not tampering. Each step is invertible, so damage within one 8-byte word is
// always detected. The lanes are for speed.
static uint64_t checksum(const uint8_t *bytes, uint64_t n) {
  uint64_t lanes[LANES] = {1, 2, 3, 4}, sum = n, word, i = 0;
  for (; n - i >= LANES * sizeof word; i += LANES * sizeof word) {
    for (int lane = 0; lane < LANES; lane++) {
      memcpy(&word, bytes + i + (size_t)lane * sizeof word, sizeof word);
      lanes[lane] = mix(lanes[lane], word);
    }
  }
  for (; i < n; i++)
    sum = mix(sum, bytes[i]);
  for (int lane = 0; lane < LANES; lane++)
    sum = mix(sum, lanes[lane]);
  return sum;
}

uint64_t td_kv_record_offset(const td_kv_record *record) {
  return sizeof(head) + record->n_tokens * sizeof record->tokens[0];
}

uint64_t td_kv_record_bytes(const td_kv_record *record) {
  return td_kv_record_offset(record) + record->n_bytes;
}

static head head_of(const void *file, const td_kv_record *record) {
  const uint8_t *content = (const uint8_t *)file + td_kv_record_offset(record);
  return (head){.magic = MAGIC,
                .version = VERSION,
                .n_tokens = record->n_tokens,
                .n_bytes = record->n_bytes,
                .checksum = checksum(content, record->n_bytes),
                .model = record->model,
                .name = record->name};
}

void td_kv_record_seal(void *file, const td_kv_record *record) {
  head h = head_of(file, record);
  memcpy(file, &h, sizeof h);
  memcpy((uint8_t *)file + sizeof h, record->tokens, record->n_tokens * sizeof record->tokens[0]);
}

td_status td_kv_record_check(const void *file, uint64_t n_bytes, const td_kv_record *record,
                             td_err *err) {
  head found;
  if (n_bytes < sizeof found) return td_fail(err, TD_EFORMAT, "it is cut short");
  memcpy(&found, file, sizeof found);
  if (found.magic != MAGIC) return td_fail(err, TD_EFORMAT, "not a KV page record");
  if (found.version != VERSION)
    return td_fail(err, TD_EFORMAT, "it has version %u, not %u", found.version, VERSION);
  if (memcmp(&found.model, &record->model, sizeof found.model) != 0)
    return td_fail(err, TD_EFORMAT, "it belongs to another model");
  if (n_bytes != td_kv_record_bytes(record)) {
    return td_fail(err, TD_EFORMAT, "it has %llu bytes, not %llu", (unsigned long long)n_bytes,
                   (unsigned long long)td_kv_record_bytes(record));
  }
  const uint8_t *tokens = (const uint8_t *)file + sizeof found;
  head expected = head_of(file, record);
  if (memcmp(&found, &expected, sizeof found) != 0 ||
      memcmp(tokens, record->tokens, record->n_tokens * sizeof record->tokens[0]) != 0)
    return td_fail(err, TD_EFORMAT, "it is damaged");
  return TD_OK;
}

// ---- files ------------------------------------------------------------------------------------
// Files are opened by path, not relative to the directory's descriptor: ThreadSanitizer tracks the
// reuse of descriptors from open but not from openat.

typedef struct {
  char text[4096];
} file_path;

// A path that is too long becomes "", which cannot be opened.
static file_path path_of(const char *dir, const td_digest *name, const char *suffix) {
  file_path path;
  char hex[TD_DIGEST_HEX];
  td_digest_hex(hex, name);
  int n = snprintf(path.text, sizeof path.text, "%s/%s%s", dir, hex, suffix);
  if (n < 0 || (size_t)n >= sizeof path.text) path.text[0] = '\0';
  return path;
}

static struct timespec time_of(uint64_t ns) {
  return (struct timespec){.tv_sec = (time_t)(ns / 1000000000u),
                           .tv_nsec = (long)(ns % 1000000000u)};
}

static td_status fail_write(td_err *err) {
  bool is_full = errno == ENOSPC || errno == EDQUOT;
  return td_fail(err, is_full ? TD_ELIMIT : TD_EIO, "%s", strerror(errno));
}

static td_status write_file(int fd, const char *bytes, uint64_t n, uint64_t used_ns, td_err *err) {
  while (n) {
    ssize_t written = write(fd, bytes, n);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return fail_write(err);
    bytes += written;
    n -= (uint64_t)written;
  }
  const struct timespec times[2] = {time_of(used_ns), time_of(used_ns)};
  if (futimens(fd, times) != 0) return fail_write(err);
  // Without fsync the renamed file could be empty after a crash.
  return fsync(fd) == 0 || errno == EINVAL ? TD_OK : fail_write(err);
}

td_status td_kv_record_write(const char *dir, const td_kv_record *record, const void *file,
                             uint64_t used_ns, td_err *err) {
  file_path path = path_of(dir, &record->name, TD_KV_RECORD_SUFFIX);
  file_path temp = path_of(dir, &record->name, TD_KV_TEMP_SUFFIX);
  int fd = open(temp.text, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0) return fail_write(err);
  td_status st = write_file(fd, file, td_kv_record_bytes(record), used_ns, err);
  if (close(fd) != 0 && st == TD_OK) st = fail_write(err);
  if (st == TD_OK && rename(temp.text, path.text) != 0) st = fail_write(err);
  if (st != TD_OK) unlink(temp.text);
  return st;
}

static td_status read_file(int fd, char *file, uint64_t n, td_err *err) {
  struct stat info;
  if (fstat(fd, &info) != 0) return td_fail(err, TD_EIO, "%s", strerror(errno));
  if (!S_ISREG(info.st_mode)) return td_fail(err, TD_EFORMAT, "not a regular file");
  if ((uint64_t)info.st_size != n) {
    return td_fail(err, TD_EFORMAT, "it has %lld bytes, not %llu", (long long)info.st_size,
                   (unsigned long long)n);
  }
  while (n) {
    ssize_t got = read(fd, file, n);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return td_fail(err, TD_EIO, "%s", strerror(errno));
    if (got == 0) return td_fail(err, TD_EFORMAT, "it is cut short");
    file += got;
    n -= (uint64_t)got;
  }
  return TD_OK;
}

td_status td_kv_record_read(const char *dir, const td_kv_record *record, void *file, td_err *err) {
  file_path path = path_of(dir, &record->name, TD_KV_RECORD_SUFFIX);
  int fd = open(path.text, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) {
    bool is_useless = errno == EACCES || errno == EPERM || errno == ELOOP || errno == ENXIO;
    td_status st = errno == ENOENT ? TD_ENOENT : is_useless ? TD_EFORMAT : TD_EIO;
    return td_fail(err, st, "%s", strerror(errno));
  }
  uint64_t n = td_kv_record_bytes(record);
  td_status st = read_file(fd, file, n, err);
  close(fd);
  return st == TD_OK ? td_kv_record_check(file, n, record, err) : st;
}

void td_kv_record_touch(const char *dir, const td_digest *name, uint64_t used_ns) {
  file_path path = path_of(dir, name, TD_KV_RECORD_SUFFIX);
  const struct timespec times[2] = {time_of(used_ns), time_of(used_ns)};
  if (utimensat(AT_FDCWD, path.text, times, AT_SYMLINK_NOFOLLOW) != 0)
    return; // only the age is lost
}

void td_kv_record_remove(const char *dir, const td_digest *name) {
  unlink(path_of(dir, name, TD_KV_RECORD_SUFFIX).text);
}
