// src/base/log.h - logs to stderr, one line per message. Not for hot paths. Any thread.
//
// Logging never blocks. If stderr does not accept a line at once, because nobody reads the pipe or
// the terminal is stopped, the line is dropped and counted; the count is logged when lines can be
// written again. Control characters are escaped (base/utf8.h), since messages contain text
// from clients and files.
#pragma once

#include <stdbool.h>
#include <stddef.h>

typedef enum { TD_LOG_ERROR, TD_LOG_WARN, TD_LOG_INFO, TD_LOG_DEBUG } td_log_level;

// Log settings of this process; set in main before threads start.
typedef struct {
  td_log_level max_level; // less important messages are discarded
  bool is_json;
  const char *role; // kind of process, e.g. "front" or "worker", for JSON; static
} td_log_opts;

// Default until the first call: INFO, text.
void td_log_set(const td_log_opts *opts);
td_log_opts td_log_get(void);

// Text: "tandem: <level>: <message>\n". JSON: {"ts", "level", "msg", "pid", "role"} and a newline;
// ts is UTC in RFC 3339 form. Written with one write call, so lines of several processes do not
// mix.
void td_log(td_log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

// Forwards a line, without its newline, that process pid wrote to its stderr. It is passed on
// unchanged, unless the log is JSON and the line is not (e.g. from a crash): then it is logged as
// an error of that process.
void td_log_forward(const char *role, int pid, const char *line, size_t len);

// Logs the number of dropped lines, if any, provided that stderr accepts it now.
void td_log_catch_up(void);
// Writes all bytes to stderr unformatted, or none: for a progress bar on a terminal.
void td_log_draw(const char *bytes, size_t len);

#define td_error(...) td_log(TD_LOG_ERROR, __VA_ARGS__)
#define td_warn(...)  td_log(TD_LOG_WARN, __VA_ARGS__)
#define td_info(...)  td_log(TD_LOG_INFO, __VA_ARGS__)
#define td_debug(...) td_log(TD_LOG_DEBUG, __VA_ARGS__)
