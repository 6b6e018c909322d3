// src/base/json_write.h - writes JSON into a td_buf and takes care of commas and quoting.
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "base/buf.h"

typedef struct {
  td_buf *out;     // borrowed
  unsigned depth;  // open objects and arrays
  bool need_comma; // a value precedes at this level
} td_json_writer;

#define TD_JSON_WRITER(buf)                                                                        \
  (td_json_writer) {                                                                               \
    .out = (buf)                                                                                   \
  }

// Pass key NULL inside arrays and at the top level.
void td_jw_begin_object(td_json_writer *w, const char *key);
void td_jw_begin_array(td_json_writer *w, const char *key);
void td_jw_end_object(td_json_writer *w);
void td_jw_end_array(td_json_writer *w);
// text NULL: null.
void td_jw_str(td_json_writer *w, const char *key, const char *text);
void td_jw_str_len(td_json_writer *w, const char *key, const char *text, size_t len);
// The text of a buffer. One that lacks some for want of memory makes the output fail, too.
void td_jw_buf(td_json_writer *w, const char *key, const td_buf *text);
void td_jw_int(td_json_writer *w, const char *key, int64_t value);
// Shortest form that reads back as the same value; null for infinities and NaN.
void td_jw_double(td_json_writer *w, const char *key, double value);
void td_jw_bool(td_json_writer *w, const char *key, bool value);
void td_jw_null(td_json_writer *w, const char *key);
// Writes members or values by their form: JSON in which ' stands for " and blanks between values
// are left out. Brackets may stay open, or close what earlier calls opened; behind a form that ends
// in a colon follows a value.
//   td_jw_add(w, "'error': {'message': %s, 'code': %d", message, code);
// %s: text (NULL: null); %p: that of a td_buf, as td_jw_buf; %d, %u, %ld, %lu and %zu: a whole
// number; %g: a double, as td_jw_double; %i: true or false.
void td_jw_add(td_json_writer *w, const char *form, ...) __attribute__((format(printf, 2, 3)));
// Inserts text that already is JSON.
void td_jw_raw(td_json_writer *w, const char *key, const char *json);

// Prints what was written as one line and starts over. False: out of memory, or writing failed.
bool td_jw_print_line(td_json_writer *w, FILE *file);

// Appends text as a quoted JSON string. Invalid UTF-8 bytes, and NUL, which td_json_check rejects,
// become U+FFFD, so that the output can be parsed again.
void td_json_quote(td_buf *out, const char *text, size_t len);
