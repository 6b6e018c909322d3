// src/model/fingerprint.c - hashes what identifies a checkpoint.
#include "model/fingerprint.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

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
