// src/model/fingerprint.c - hashes what identifies a checkpoint; its files' content, once.
#include "model/fingerprint.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fs.h"
#include "gguf/files.h"
#include "model/checkpoint/store.h"
#include "model/config.h"

#define SAMPLES      32
#define SAMPLE_BYTES 4096

static td_status add_config(td_sha256 *sha, const char *dir, td_err *err) {
  td_buf text = TD_BUF_INIT;
  td_status st = td_checkpoint_read(&text, dir, "config.json", TD_CONFIG_MAX_BYTES, err);
  if (st == TD_OK) td_sha256_add(sha, td_buf_text(&text), text.len + 1);
  td_buf_free(&text);
  return st;
}

static td_status add_bytes(td_sha256 *sha, int fd, const td_shard_info *shard, td_err *err) {
  struct stat info;
  if (fstat(fd, &info) != 0)
    return td_fail(err, TD_EIO, "%s: stat: %s", shard->path, strerror(errno));
  const int64_t written[] = {info.st_size, info.st_mtim.tv_sec, info.st_mtim.tv_nsec};
  td_sha256_add(sha, written, sizeof written);
  off_t step = info.st_size / SAMPLES > SAMPLE_BYTES ? info.st_size / SAMPLES : SAMPLE_BYTES;
  for (off_t at = 0; at < info.st_size; at += step) {
    char sample[SAMPLE_BYTES];
    ssize_t n = pread(fd, sample, sizeof sample, at);
    if (n < 0) return td_fail(err, TD_EIO, "%s: read: %s", shard->path, strerror(errno));
    td_sha256_add(sha, sample, (size_t)n);
  }
  return TD_OK;
}

static td_status add_shard(td_sha256 *sha, const td_shard_info *shard, td_err *err) {
  int fd = open(shard->path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return td_fail(err, TD_EIO, "%s: open: %s", shard->path, strerror(errno));
  td_sha256_add(sha, shard->name, strlen(shard->name) + 1);
  td_status st = add_bytes(sha, fd, shard, err);
  close(fd);
  return st;
}

td_status td_model_fingerprint(td_sha256 *sha, const char *dir, td_err *err) {
  td_store *store;
  td_status st = td_store_open(&store, dir, err);
  if (st != TD_OK) return st;
  st = add_config(sha, dir, err);
  for (size_t i = 0; st == TD_OK && i < td_store_n_shards(store); i++) {
    td_shard_info shard = td_store_shard(store, i);
    st = add_shard(sha, &shard, err);
  }
  td_store_close(store);
  return st;
}

// ---- the digest of all content ------------------------------------------------------------------

// What is kept: the fingerprint, a blank, the digest, a line break.
enum { KEPT_BYTES = 2 * TD_DIGEST_HEX };

static td_status fingerprint_hex(char out[TD_DIGEST_HEX], const char *dir, td_err *err) {
  td_sha256 sha;
  td_digest digest;
  td_sha256_begin(&sha);
  td_status st = td_model_fingerprint(&sha, dir, err);
  td_sha256_end(&sha, &digest);
  td_digest_hex(out, &digest);
  return st;
}

static bool read_kept(td_digest *out, const char *path, const char *fingerprint) {
  td_buf text = TD_BUF_INIT;
  size_t n = sizeof out->bytes;
  struct base16_decode_ctx hex;
  base16_decode_init(&hex);
  bool is_kept = td_file_read(&text, path, KEPT_BYTES, NULL) == TD_OK && text.len == KEPT_BYTES &&
                 !strncmp(td_buf_text(&text), fingerprint, TD_DIGEST_HEX - 1);
  is_kept = is_kept &&
            base16_decode_update(&hex, &n, out->bytes, TD_DIGEST_HEX - 1,
                                 td_buf_text(&text) + TD_DIGEST_HEX) &&
            n == sizeof out->bytes;
  td_buf_free(&text);
  return is_kept;
}

static td_status compute(td_digest *out, const td_store *store, const char *dir, td_err *err) {
  const size_t n_shards = td_store_n_shards(store);
  td_digest *shards = calloc(n_shards + 1, sizeof *shards);
  td_buf config = TD_BUF_INIT;
  td_sha256 whole;
  if (!shards) return td_fail(err, TD_ENOMEM, "out of memory: digests of %zu files", n_shards);
  td_status st = td_checkpoint_read(&config, dir, "config.json", TD_CONFIG_MAX_BYTES, err);
#pragma omp parallel for schedule(dynamic, 1)
  for (size_t i = 0; i < n_shards; i++) {
    const td_shard_info shard = td_store_shard(store, i);
    td_sha256 sha;
    td_sha256_begin(&sha);
    td_sha256_add(&sha, shard.bytes, shard.n_bytes);
    td_sha256_end(&sha, &shards[i]);
  }
  td_sha256_begin(&whole);
  td_sha256_add(&whole, td_buf_text(&config), config.len);
  td_sha256_add(&whole, shards, n_shards * sizeof *shards);
  td_sha256_end(&whole, out);
  td_buf_free(&config);
  free(shards);
  return st;
}

td_status td_model_digest(td_digest *out, const char *dir, td_err *err) {
  td_store *store;
  td_buf path = TD_BUF_INIT, kept = TD_BUF_INIT;
  char fingerprint[TD_DIGEST_HEX], digest[TD_DIGEST_HEX];
  td_status st = td_store_open(&store, dir, err);
  if (st != TD_OK) return st;
  if (td_store_n_shards(store))
    td_buf_printf(&path, "%s.tandem-sha256", td_store_shard(store, 0).path);
  st = fingerprint_hex(fingerprint, dir, err);
  if (st == TD_OK) st = td_buf_status(&path, err);
  if (st == TD_OK && !read_kept(out, td_buf_text(&path), fingerprint)) {
    st = compute(out, store, dir, err);
    td_digest_hex(digest, out);
    td_buf_printf(&kept, "%s %s\n", fingerprint, digest);
    if (st == TD_OK && !kept.failed) {
      td_err unused; // it is computed again next time
      td_file_write(td_buf_text(&path), td_buf_text(&kept), kept.len, &unused);
    }
  }
  td_buf_free(&path);
  td_buf_free(&kept);
  td_store_close(store);
  return st;
}
