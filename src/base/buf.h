// src/base/buf.h - a growable byte buffer, used for text, JSON and files.
// Appending functions do not report errors: when memory runs out, the buffer keeps its contents and
// sets `failed`, and the caller checks td_buf_status once at the end. data is NUL-terminated
// whenever len or cap > 0.
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "base/status.h"

typedef struct {
  char *data;  // owned; NULL while empty
  size_t len;  // bytes, without the terminating NUL
  size_t cap;  // bytes allocated
  bool failed; // an append was lost because memory ran out
} td_buf;

#define TD_BUF_INIT                                                                                \
  (td_buf) {                                                                                       \
    0                                                                                              \
  }

void td_buf_free(td_buf *buf);  // frees and zeroes; legal for a zeroed buffer
void td_buf_clear(td_buf *buf); // len = 0, failed = false; keeps the memory
void td_buf_reserve(td_buf *buf, size_t extra_bytes);
// Like td_buf_reserve, without spare capacity: for many large buffers.
void td_buf_reserve_exact(td_buf *buf, size_t extra_bytes);
void td_buf_add(td_buf *buf, const void *bytes, size_t len);
void td_buf_str(td_buf *buf, const char *text);
void td_buf_char(td_buf *buf, char byte);
void td_buf_printf(td_buf *buf, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
// Removes the first len bytes.
void td_buf_drop(td_buf *buf, size_t len);
// TD_OK, or TD_ENOMEM if any append was lost.
td_status td_buf_status(const td_buf *buf, td_err *err);
// "" for an empty buffer, never NULL.
const char *td_buf_text(const td_buf *buf);
