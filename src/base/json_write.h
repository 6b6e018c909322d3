// src/base/json_write.h - writes JSON into a td_buf, commas and quoting taken care of.
#ifndef TD_BASE_JSON_WRITE_H
#define TD_BASE_JSON_WRITE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "base/buf.h"

typedef struct {
  td_buf *out;     // borrowed
  unsigned depth;  // open objects and arrays
  bool need_comma; // a value stands before the next one
} td_json_writer;

#define TD_JSON_WRITER(buf)                                                                        \
  (td_json_writer) {                                                                               \
    .out = (buf)                                                                                   \
  }

// key is NULL inside arrays and at the top.
void td_jw_begin_object(td_json_writer *w, const char *key);
void td_jw_begin_array(td_json_writer *w, const char *key);
void td_jw_end_object(td_json_writer *w);
void td_jw_end_array(td_json_writer *w);
void td_jw_str(td_json_writer *w, const char *key, const char *text);
void td_jw_str_len(td_json_writer *w, const char *key, const char *text, size_t len);
void td_jw_int(td_json_writer *w, const char *key, int64_t value);
// Shortest form that reads back the same; null for infinities and NaN.
void td_jw_double(td_json_writer *w, const char *key, double value);
void td_jw_bool(td_json_writer *w, const char *key, bool value);
void td_jw_null(td_json_writer *w, const char *key);
// Text that is JSON already.
void td_jw_raw(td_json_writer *w, const char *key, const char *json);

// Ends a line of JSON: prints what is written, and begins anew. False: memory or the file's end.
bool td_jw_print_line(td_json_writer *w, FILE *file);

// Appends text as a JSON string with its quotes. Bytes that are not UTF-8, and NUL, which
// td_json_check refuses, become U+FFFD: what is written is read again.
void td_json_quote(td_buf *out, const char *text, size_t len);

#endif
