// src/base/buf.c - a growable byte buffer.
#include "base/buf.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void td_buf_free(td_buf *buf) {
  free(buf->data);
  *buf = TD_BUF_INIT;
}

void td_buf_clear(td_buf *buf) {
  buf->len = 0;
  buf->failed = false;
  if (buf->data) buf->data[0] = '\0';
}

static void grow_to(td_buf *buf, size_t cap) {
  char *data = realloc(buf->data, cap);
  if (!data) {
    buf->failed = true;
    return;
  }
  buf->data = data;
  buf->cap = cap;
  buf->data[buf->len] = '\0';
}

void td_buf_reserve(td_buf *buf, size_t extra_bytes) {
  if (extra_bytes >= SIZE_MAX / 2 - buf->len) {
    buf->failed = true;
    return;
  }
  size_t need = buf->len + extra_bytes + 1;
  if (need <= buf->cap) return;
  size_t cap = buf->cap ? buf->cap : 64;
  while (cap < need)
    cap *= 2;
  grow_to(buf, cap);
}

void td_buf_reserve_exact(td_buf *buf, size_t extra_bytes) {
  if (extra_bytes >= SIZE_MAX / 2 - buf->len)
    buf->failed = true;
  else if (buf->len + extra_bytes >= buf->cap)
    grow_to(buf, buf->len + extra_bytes + 1);
}

void td_buf_add(td_buf *buf, const void *bytes, size_t len) {
  td_buf_reserve(buf, len);
  if (buf->failed || !len) return;
  memcpy(buf->data + buf->len, bytes, len);
  buf->len += len;
  buf->data[buf->len] = '\0';
}

void td_buf_str(td_buf *buf, const char *text) {
  td_buf_add(buf, text, strlen(text));
}

void td_buf_char(td_buf *buf, char byte) {
  td_buf_add(buf, &byte, 1);
}

void td_buf_printf(td_buf *buf, const char *fmt, ...) {
  va_list args, again;
  va_start(args, fmt);
  va_copy(again, args);
  int n = vsnprintf(NULL, 0, fmt, args);
  va_end(args);
  if (n < 0) {
    buf->failed = true;
  } else {
    td_buf_reserve(buf, (size_t)n);
    if (!buf->failed) {
      vsnprintf(buf->data + buf->len, (size_t)n + 1, fmt, again);
      buf->len += (size_t)n;
    }
  }
  va_end(again);
}

void td_buf_drop(td_buf *buf, size_t len) {
  TD_CHECK(len <= buf->len);
  if (!len) return;
  buf->len -= len;
  memmove(buf->data, buf->data + len, buf->len + 1);
}

td_status td_buf_status(const td_buf *buf, td_err *err) {
  if (buf->failed) return td_fail(err, TD_ENOMEM, "out of memory after %zu bytes", buf->len);
  return TD_OK;
}

const char *td_buf_text(const td_buf *buf) {
  return buf->data ? buf->data : "";
}
