// src/base/log.h - one line a message on stderr. Not for hot paths. Any thread.
//
// Logging never waits: a line that stderr does not take at once, because nobody reads the pipe or
// the terminal is stopped, is dropped and counted, and the count is told when lines flow again.
// Control characters are written out (base/printable.h): much of what is logged comes from others.
#ifndef TD_BASE_LOG_H
#define TD_BASE_LOG_H

#include <stdbool.h>
#include <stddef.h>

typedef enum { TD_LOG_ERROR, TD_LOG_WARN, TD_LOG_INFO, TD_LOG_DEBUG } td_log_level;

// How this process logs; set by its main before threads start.
typedef struct {
  td_log_level max_level; // messages above it are dropped
  bool is_json;
  const char *role; // "front", "worker": what the process is, for JSON; static
} td_log_opts;

// Until the first call: INFO, text.
void td_log_set(const td_log_opts *opts);
td_log_opts td_log_get(void);

// Text: "tandem: <level>: <message>\n". JSON: {"ts", "level", "msg", "pid", "role"} and a newline,
// ts being UTC as RFC 3339 has it. One write, so lines of several processes never mix.
void td_log(td_log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

// Passes on a line, without its newline, that process pid wrote to its stderr: as it stands, unless
// the log is JSON and the line is not (a crash speaks plainly): then as an error of that process.
void td_log_forward(const char *role, int pid, const char *line, size_t len);

// Tells how many lines were dropped, if any were and stderr takes one now.
void td_log_catch_up(void);
// Writes bytes to stderr as they are, or not at all: for a bar on a terminal.
void td_log_draw(const char *bytes, size_t len);

#define td_error(...) td_log(TD_LOG_ERROR, __VA_ARGS__)
#define td_warn(...)  td_log(TD_LOG_WARN, __VA_ARGS__)
#define td_info(...)  td_log(TD_LOG_INFO, __VA_ARGS__)
#define td_debug(...) td_log(TD_LOG_DEBUG, __VA_ARGS__)

#endif
