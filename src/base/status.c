// src/base/status.c - error messages, TD_CHECK's abort.
#include "base/status.h"

#include <ctype.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"

td_status td_fail(td_err *err, td_status code, const char *fmt, ...) {
  if (!err) return code;
  va_list args;
  va_start(args, fmt);
  err->code = code;
  vsnprintf(err->msg, sizeof err->msg, fmt, args);
  va_end(args);
  return code;
}

td_status td_err_prefix(td_err *err, const char *fmt, ...) {
  if (!err) return TD_EINTERNAL;
  char prefix[TD_ERR_BYTES];
  va_list args;
  va_start(args, fmt);
  vsnprintf(prefix, sizeof prefix, fmt, args);
  va_end(args);
  char msg[TD_ERR_BYTES];
  memcpy(msg, err->msg, sizeof msg);
  int n = snprintf(err->msg, sizeof err->msg, "%s: ", prefix);
  if (n > 0 && (size_t)n < sizeof err->msg)
    snprintf(err->msg + n, sizeof err->msg - (size_t)n, "%s", msg);
  return err->code;
}

static bool is_word(char c) {
  return isalnum((unsigned char)c) || c == '_';
}

// Where text names it. NULL: nowhere.
static const char *find_name(const char *text, const char *name) {
  const size_t n = strlen(name);
  for (const char *at = strstr(text, name); at; at = strstr(at + n, name)) {
    const char before = at == text ? ' ' : at[-1];
    if (!is_word(before) && before != '.' && before != '"' && !is_word(at[n])) return at;
  }
  return NULL;
}

void td_msg_rename(char msg[TD_ERR_BYTES], size_t begin, const char *name, const char *to) {
  char old[TD_ERR_BYTES];
  size_t n = begin;
  memcpy(old, msg, sizeof old);
  const char *from = old + begin;
  for (const char *at; (at = find_name(from, name)) != NULL; from = at + strlen(name)) {
    n += (size_t)snprintf(msg + n, sizeof old - n, "%.*s%s", (int)(at - from), from, to);
    if (n >= sizeof old) n = sizeof old - 1;
  }
  snprintf(msg + n, sizeof old - n, "%s", from);
}

void td_check_failed(const char *file, int line, const char *what) {
  td_error("%s:%d: broken invariant: %s", file, line, what);
  abort();
}
