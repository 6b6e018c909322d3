// src/base/json_write.c - writes JSON values and strings.
#include "base/json_write.h"

#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"

// The character of a two-character escape; 0 if c has none.
static char short_escape(char c) {
  switch (c) {
  case '"': return '"';
  case '\\': return '\\';
  case '\b': return 'b';
  case '\f': return 'f';
  case '\n': return 'n';
  case '\r': return 'r';
  case '\t': return 't';
  default: return 0;
  }
}

static bool is_plain(char c) {
  return (uint8_t)c >= 0x20 && c != '"' && c != '\\' && c != 0x7f;
}

// U+0080 to U+009F: C1 control characters, which terminals interpret.
static bool is_c1(const char *text, size_t len) {
  return len > 1 && (uint8_t)text[0] == 0xc2 && (uint8_t)text[1] >= 0x80 && (uint8_t)text[1] < 0xa0;
}

void td_json_quote(td_buf *out, const char *text, size_t len) {
  td_buf_char(out, '"');
  for (size_t i = 0; i < len;) {
    size_t start = i;
    while (i < len && is_plain(text[i]) && !is_c1(text + i, len - i))
      i++;
    td_utf8_add_replaced(out, text + start, i - start);
    if (i == len) break;
    char letter = short_escape(text[i]);
    if (letter) {
      td_buf_char(out, '\\');
      td_buf_char(out, letter);
    } else if (is_plain(text[i])) { // is_plain accepts the first byte of a C1 character
      td_buf_printf(out, "\\u%04x", (unsigned)(uint8_t)text[++i]);
    } else if (text[i]) {
      td_buf_printf(out, "\\u%04x", (unsigned)text[i]);
    } else {
      td_buf_str(out, "\xEF\xBF\xBD");
    }
    i++;
  }
  td_buf_char(out, '"');
}

// Writes the comma and key that precede a value.
static void begin_value(td_json_writer *w, const char *key) {
  if (w->need_comma) td_buf_char(w->out, ',');
  if (key) {
    td_json_quote(w->out, key, strlen(key));
    td_buf_char(w->out, ':');
  }
  w->need_comma = true;
}

static void begin_container(td_json_writer *w, const char *key, char bracket) {
  begin_value(w, key);
  td_buf_char(w->out, bracket);
  w->depth++;
  w->need_comma = false;
}

static void end_container(td_json_writer *w, char bracket) {
  TD_CHECK(w->depth > 0);
  w->depth--;
  td_buf_char(w->out, bracket);
  w->need_comma = true;
}

void td_jw_begin_object(td_json_writer *w, const char *key) {
  begin_container(w, key, '{');
}

void td_jw_begin_array(td_json_writer *w, const char *key) {
  begin_container(w, key, '[');
}

void td_jw_end_object(td_json_writer *w) {
  end_container(w, '}');
}

void td_jw_end_array(td_json_writer *w) {
  end_container(w, ']');
}

void td_jw_str(td_json_writer *w, const char *key, const char *text) {
  if (text)
    td_jw_str_len(w, key, text, strlen(text));
  else
    td_jw_null(w, key);
}

void td_jw_str_len(td_json_writer *w, const char *key, const char *text, size_t len) {
  begin_value(w, key);
  td_json_quote(w->out, text, len);
}

void td_jw_buf(td_json_writer *w, const char *key, const td_buf *text) {
  td_jw_str_len(w, key, td_buf_text(text), text->len);
  w->out->failed |= text->failed;
}

void td_jw_int(td_json_writer *w, const char *key, int64_t value) {
  begin_value(w, key);
  td_buf_printf(w->out, "%" PRId64, value);
}

void td_jw_double(td_json_writer *w, const char *key, double value) {
  if (!isfinite(value)) {
    td_jw_null(w, key);
    return;
  }
  begin_value(w, key);
  // 15 digits always survive a round trip through a normal double, and %g drops trailing zeros, so
  // this finds a shorter form if there is one. Subnormals have fewer digits.
  char text[40];
  for (int digits = fabs(value) < DBL_MIN ? 1 : 15; digits <= 17; digits++) {
    snprintf(text, sizeof text, "%.*g", digits, value);
    if (strtod(text, NULL) == value) break;
  }
  td_buf_str(w->out, text);
}

void td_jw_bool(td_json_writer *w, const char *key, bool value) {
  td_jw_raw(w, key, value ? "true" : "false");
}

void td_jw_null(td_json_writer *w, const char *key) {
  td_jw_raw(w, key, "null");
}

void td_jw_raw(td_json_writer *w, const char *key, const char *json) {
  begin_value(w, key);
  td_buf_str(w->out, json);
}

// Writes the value of the conversion behind a %; returns what follows it.
static const char *add_converted(td_json_writer *w, const char *form, va_list *args) {
  const bool is_long = *form == 'l' || *form == 'z';
  form += is_long;
  w->need_comma = false; // the form has its own
  switch (*form) {
  case 's': td_jw_str(w, NULL, va_arg(*args, const char *)); break;
  case 'p': td_jw_buf(w, NULL, va_arg(*args, const td_buf *)); break;
  case 'd': td_jw_int(w, NULL, is_long ? va_arg(*args, long) : va_arg(*args, int)); break;
  case 'u': td_jw_int(w, NULL, is_long ? va_arg(*args, long) : va_arg(*args, unsigned)); break;
  case 'g': td_jw_double(w, NULL, va_arg(*args, double)); break;
  case 'i': td_jw_bool(w, NULL, va_arg(*args, int)); break;
  default: TD_CHECK(!"a conversion that JSON forms do not have");
  }
  return form + 1;
}

void td_jw_add(td_json_writer *w, const char *form, ...) {
  va_list args;
  va_start(args, form);
  bool in_text = false;
  char last = ',';
  if (!strchr("}],", *form)) begin_value(w, NULL);
  while (*form) {
    const size_t n = strcspn(form, in_text ? "'" : "'% {[]}");
    td_buf_add(w->out, form, n);
    if (n) last = form[n - 1];
    form += n;
    if (*form == '%') {
      form = add_converted(w, form + 1, &args);
      last = '%';
      continue;
    }
    if (!*form) break;
    if (*form == '\'') in_text = !in_text;
    if (*form != ' ') td_buf_char(w->out, *form == '\'' ? '"' : *form);
    if (*form != ' ') last = *form;
    w->depth += *form == '{' || *form == '[';
    if (*form == '}' || *form == ']') TD_CHECK(w->depth-- > 0);
    form++;
  }
  w->need_comma = !strchr("{[:", last);
  va_end(args);
}

bool td_jw_print_line(td_json_writer *w, FILE *file) {
  const bool is_whole = td_buf_status(w->out, NULL) == TD_OK &&
                        fprintf(file, "%s\n", td_buf_text(w->out)) >= 0 && fflush(file) == 0;
  td_buf_clear(w->out);
  w->need_comma = false;
  return is_whole;
}
