#include "base/log.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/json_write.h"

#define MAX_MESSAGE 2048

static const char *const level_names[] = {"error", "warning", "info", "debug"};
static td_log_opts log_opts = {.max_level = TD_LOG_INFO, .role = "tandem"};

void td_log_set(const td_log_opts *opts) {
  log_opts = *opts;
}

td_log_opts td_log_get(void) {
  return log_opts;
}

// A log line that cannot be written has nowhere else to go.
static void put(const char *bytes, size_t len) {
  if (write(STDERR_FILENO, bytes, len) < 0) return;
}

static void put_text(const char *prefix, const char *text, size_t len) {
  char line[MAX_MESSAGE + 64];
  size_t n_prefix = strlen(prefix), room = sizeof line - 1 - n_prefix;
  if (len > room) len = room;
  memcpy(line, prefix, n_prefix);
  memcpy(line + n_prefix, text, len);
  line[n_prefix + len] = '\n';
  put(line, n_prefix + len + 1);
}

static void put_json(td_log_level level, const char *role, int pid, const char *text, size_t len) {
  struct timespec now;
  struct tm utc;
  char ts[64];
  clock_gettime(CLOCK_REALTIME, &now);
  gmtime_r(&now.tv_sec, &utc);
  size_t n = strftime(ts, sizeof ts, "%Y-%m-%dT%H:%M:%S", &utc);
  snprintf(ts + n, sizeof ts - n, ".%06ldZ", now.tv_nsec / 1000);
  td_buf line = TD_BUF_INIT;
  td_json_writer w = TD_JSON_WRITER(&line);
  td_jw_begin_object(&w, NULL);
  td_jw_str(&w, "ts", ts);
  td_jw_str(&w, "level", level_names[level]);
  td_jw_str_len(&w, "msg", text, len);
  td_jw_int(&w, "pid", pid);
  td_jw_str(&w, "role", role);
  td_jw_end_object(&w);
  td_buf_char(&line, '\n');
  if (!line.failed) put(line.data, line.len);
  td_buf_free(&line);
}

void td_log(td_log_level level, const char *fmt, ...) {
  if (level > log_opts.max_level) return;
  char text[MAX_MESSAGE];
  va_list args;
  va_start(args, fmt);
  int n = vsnprintf(text, sizeof text, fmt, args);
  va_end(args);
  if (n < 0) return;
  size_t len = (size_t)n < sizeof text ? (size_t)n : sizeof text - 1;
  if (log_opts.is_json) {
    put_json(level, log_opts.role, getpid(), text, len);
  } else {
    char prefix[32];
    snprintf(prefix, sizeof prefix, "tandem: %s: ", level_names[level]);
    put_text(prefix, text, len);
  }
}

void td_log_forward(const char *role, int pid, const char *line, size_t len) {
  if (log_opts.is_json && (len == 0 || line[0] != '{')) {
    if (len) put_json(TD_LOG_ERROR, role, pid, line, len);
    return;
  }
  char copy[8192];
  if (len > sizeof copy - 1) len = sizeof copy - 1;
  memcpy(copy, line, len);
  copy[len] = '\n';
  put(copy, len + 1);
}
