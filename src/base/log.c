#include "base/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

static td_log_level max_log_level = TD_LOG_INFO;

void td_log_set_level(td_log_level max_level) {
  max_log_level = max_level;
}

void td_log(td_log_level level, const char *fmt, ...) {
  static const char *const names[] = {"error", "warning", "info", "debug"};
  if (level > max_log_level) return;
  char line[2048];
  int n = snprintf(line, sizeof line, "tandem: %s: ", names[level]);
  va_list args;
  va_start(args, fmt);
  int m = vsnprintf(line + n, sizeof line - (size_t)n - 1, fmt, args);
  va_end(args);
  if (m < 0) return;
  size_t len = (size_t)n + (size_t)m;
  if (len > sizeof line - 2) len = sizeof line - 2;
  line[len++] = '\n';
  // A log line that cannot be written has nowhere else to go.
  if (write(STDERR_FILENO, line, len) < 0) return;
}
