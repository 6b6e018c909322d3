// src/model/checkpoint/shard_writer.c - lays out and writes one safetensors file.
#include "model/checkpoint/shard_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/json_write.h"

enum { LINE = 64 }; // cache line; the format requires multiples of 8

static td_status fail_errno(td_err *err, const char *path, const char *verb) {
  return td_fail(err, TD_EIO, "%s: cannot %s: %s", path, verb, strerror(errno));
}

static uint64_t element_bytes(const td_shard_entry *e) {
  uint64_t n = 1;
  for (uint32_t i = 0; i < e->n_dims; i++)
    n *= e->shape[i];
  return n ? e->n_bytes / n : 1;
}

static void add_entry(td_json_writer *w, const td_shard_entry *e, uint64_t begin) {
  td_jw_begin_object(w, e->name);
  td_jw_add(w, "'dtype': %s, 'shape': [", e->dtype);
  for (uint32_t i = 0; i < e->n_dims; i++)
    td_jw_int(w, NULL, (int64_t)e->shape[i]);
  td_jw_add(w, "], 'data_offsets': [%lu, %lu]}", begin, begin + e->n_bytes);
}

td_status td_shard_layout(td_shard_entry *entries, size_t n, td_buf *header, td_err *err) {
  td_buf text = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&text);
  td_jw_add(&w, "{'__metadata__': {'format': 'pt'}");
  uint64_t offset = 0, len;
  for (int rest = 0; rest < 2; rest++) {
    for (uint64_t width = 8; width > 0; width /= 2) {
      for (size_t i = 0; i < n; i++) {
        uint64_t own = element_bytes(&entries[i]);
        if (entries[i].n_bytes % LINE ? !rest : rest) continue;
        if (own != width && !(own > 8 && width == 8)) continue;
        entries[i].offset = offset;
        add_entry(&w, &entries[i], offset);
        offset += entries[i].n_bytes;
      }
    }
  }
  td_jw_end_object(&w);
  while (!text.failed && (sizeof len + text.len) % LINE)
    td_buf_char(&text, ' ');
  len = text.len;
  size_t start = header->len;
  td_buf_add(header, &len, sizeof len);
  td_buf_add(header, text.data, text.len);
  for (size_t i = 0; i < n; i++)
    entries[i].offset += header->len - start;
  td_status st = td_buf_status(&text, err);
  td_buf_free(&text);
  return st == TD_OK ? td_buf_status(header, err) : st;
}

td_status td_shard_writer_open(td_shard_writer *out, const char *path, uint64_t n_bytes,
                               const td_buf *header, td_err *err) {
  *out = (td_shard_writer){.fd = -1};
  td_shard_writer w = {.path = strdup(path), .fd = -1};
  td_status st = TD_OK;
  if (!w.path || asprintf(&w.temporary, "%s.part", path) < 0) {
    w.temporary = NULL;
    st = td_fail(err, TD_ENOMEM, "%s: out of memory", path);
  }
  if (st == TD_OK) {
    w.fd = open(w.temporary, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (w.fd < 0) st = fail_errno(err, w.temporary, "create");
  }
  if (st == TD_OK && ftruncate(w.fd, (off_t)n_bytes) != 0)
    st = fail_errno(err, w.temporary, "set its length");
  if (st == TD_OK) st = td_shard_writer_put(&w, 0, header->data, header->len, err);
  if (st == TD_OK)
    *out = w;
  else
    td_shard_writer_close(&w);
  return st;
}

td_status td_shard_writer_put(const td_shard_writer *w, uint64_t offset, const void *bytes,
                              size_t len, td_err *err) {
  const char *p = bytes;
  while (len) {
    ssize_t n = pwrite(w->fd, p, len, (off_t)offset);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return fail_errno(err, w->temporary, "write");
    p += n;
    offset += (uint64_t)n;
    len -= (size_t)n;
  }
  return TD_OK;
}

td_status td_shard_writer_sync(const td_shard_writer *w, td_err *err) {
  if (fsync(w->fd) != 0 && errno != EINVAL) return fail_errno(err, w->temporary, "write");
  return TD_OK;
}

td_status td_shard_writer_commit(const td_shard_writer *w, td_err *err) {
  return rename(w->temporary, w->path) == 0 ? TD_OK : fail_errno(err, w->path, "create");
}

void td_shard_writer_close(td_shard_writer *w) {
  if (w->path && w->fd >= 0) close(w->fd);
  free(w->path);
  free(w->temporary);
  *w = (td_shard_writer){.fd = -1};
}
