// src/base/status.c - status texts, error messages, TD_CHECK's abort.
#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"

const char *td_status_text(td_status status) {
  switch (status) {
#define X(name, code, text)                                                                        \
  case TD_##name: return text;
    TD_STATUS_MAP(X)
#undef X
  }
  return "unknown status";
}

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
  char prefix[TD_ERR_BYTES];
  va_list args;
  va_start(args, fmt);
  vsnprintf(prefix, sizeof prefix, fmt, args);
  va_end(args);
  char msg[TD_ERR_BYTES];
  memcpy(msg, err->msg, sizeof msg);
  int n = snprintf(err->msg, sizeof err->msg, "%s: ", prefix);
  if (n > 0 && (size_t)n < sizeof err->msg) {
    snprintf(err->msg + n, sizeof err->msg - (size_t)n, "%s", msg);
  }
  return err->code;
}

void td_check_failed(const char *file, int line, const char *what) {
  td_error("%s:%d: broken invariant: %s", file, line, what);
  abort();
}
