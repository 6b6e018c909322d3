// src/base/log.c - formats log lines and writes them to stderr without blocking.
#include "base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/json_write.h"
#include "base/utf8.h"

#define MAX_MESSAGE 2048

static const char *const level_names[] = {"error", "warning", "info", "debug"};
static td_log_opts log_opts = {.max_level = TD_LOG_INFO, .role = "tandem"};

void td_log_set(const td_log_opts *opts) {
  log_opts = *opts;
}

td_log_opts td_log_get(void) {
  return log_opts;
}

// ---- non-blocking writes ------------------------------------------------------------------------

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t n_dropped; // lines dropped; under lock
static bool is_cut;        // the last line was written only in part; under lock

// Writes as much as fd accepts now and returns the number of bytes.
static size_t write_some(int fd, bool is_socket, const char *bytes, size_t len) {
  size_t done = 0;
  while (done < len) {
    ssize_t n = is_socket ? send(fd, bytes + done, len - done, MSG_DONTWAIT | MSG_NOSIGNAL)
                          : write(fd, bytes + done, len - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    done += (size_t)n;
  }
  return done;
}

// stderr may be shared with other processes, so O_NONBLOCK must not be set on it. Instead a pipe or
// terminal is opened a second time. If that is not permitted, a writable pipe accepts PIPE_BUF
// bytes without blocking.
static size_t write_now(const char *bytes, size_t len) {
  struct stat info;
  if (fstat(STDERR_FILENO, &info) != 0) return 0;
  if (S_ISSOCK(info.st_mode)) return write_some(STDERR_FILENO, true, bytes, len);
  bool may_wait = S_ISFIFO(info.st_mode) || (S_ISCHR(info.st_mode) && isatty(STDERR_FILENO) == 1);
  if (!may_wait) return write_some(STDERR_FILENO, false, bytes, len);
  int fd = open("/proc/self/fd/2", O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  if (fd >= 0) {
    size_t done = write_some(fd, false, bytes, len);
    close(fd);
    return done;
  }
  for (size_t done = 0;;) {
    struct pollfd ready = {.fd = STDERR_FILENO, .events = POLLOUT};
    size_t n = len - done < PIPE_BUF ? len - done : PIPE_BUF;
    if (!n || poll(&ready, 1, 0) != 1 || !(ready.revents & POLLOUT)) return done;
    n = write_some(STDERR_FILENO, false, bytes + done, n);
    if (!n) return done;
    done += n;
  }
}

// Returns true if the line was written completely. Under lock.
static bool put_locked(const char *bytes, size_t len) {
  if (is_cut && write_now("\n", 1) != 1) return false;
  is_cut = false;
  size_t done = write_now(bytes, len);
  is_cut = done > 0 && done < len;
  return done == len;
}

static void make_line(td_buf *line, td_log_level level, const char *role, int pid, const char *text,
                      size_t len);

static void catch_up_locked(void) {
  if (!n_dropped) return;
  char text[96];
  td_buf line = TD_BUF_INIT;
  int n = snprintf(text, sizeof text, "%llu lines of the log were dropped: stderr was not read",
                   (unsigned long long)n_dropped);
  make_line(&line, TD_LOG_WARN, log_opts.role, getpid(), text, (size_t)n);
  if (!line.failed && put_locked(line.data, line.len)) n_dropped = 0;
  td_buf_free(&line);
}

static void put(td_buf *line) {
  pthread_mutex_lock(&lock);
  catch_up_locked();
  if (line->failed || n_dropped || !put_locked(line->data, line->len)) n_dropped++;
  pthread_mutex_unlock(&lock);
  td_buf_free(line);
}

void td_log_catch_up(void) {
  pthread_mutex_lock(&lock);
  catch_up_locked();
  pthread_mutex_unlock(&lock);
}

void td_log_draw(const char *bytes, size_t len) {
  pthread_mutex_lock(&lock);
  write_now(bytes, len);
  pthread_mutex_unlock(&lock);
}

// ---- lines --------------------------------------------------------------------------------------

static void make_json(td_buf *line, td_log_level level, const char *role, int pid, const char *text,
                      size_t len) {
  struct timespec now;
  struct tm utc;
  char ts[64];
  clock_gettime(CLOCK_REALTIME, &now);
  gmtime_r(&now.tv_sec, &utc);
  size_t n = strftime(ts, sizeof ts, "%Y-%m-%dT%H:%M:%S", &utc);
  snprintf(ts + n, sizeof ts - n, ".%06ldZ", now.tv_nsec / 1000);
  td_json_writer w = TD_JSON_WRITER(line);
  td_jw_add(&w, "{'ts': %s, 'level': %s", ts, level_names[level]);
  td_jw_str_len(&w, "msg", text, len);
  td_jw_add(&w, "'pid': %d, 'role': %s}", pid, role);
}

static void make_line(td_buf *line, td_log_level level, const char *role, int pid, const char *text,
                      size_t len) {
  if (log_opts.is_json) {
    make_json(line, level, role, pid, text, len);
  } else {
    td_buf_printf(line, "tandem: %s: ", level_names[level]);
    td_printable_add(line, text, len, "\t"); // a line break in the message must not start a new log
                                             // line
  }
  td_buf_char(line, '\n');
}

void td_log(td_log_level level, const char *fmt, ...) {
  if (level > log_opts.max_level) return;
  char text[MAX_MESSAGE];
  va_list args;
  va_start(args, fmt);
  int n = vsnprintf(text, sizeof text, fmt, args);
  va_end(args);
  if (n < 0) return;
  size_t len = (size_t)n < sizeof text ? (size_t)n : td_utf8_whole(text, sizeof text - 1);
  td_buf line = TD_BUF_INIT;
  make_line(&line, level, log_opts.role, getpid(), text, len);
  put(&line);
}

void td_log_forward(const char *role, int pid, const char *line, size_t len) {
  td_buf copy = TD_BUF_INIT;
  if (log_opts.is_json && (len == 0 || line[0] != '{')) {
    if (!len) return;
    make_line(&copy, TD_LOG_ERROR, role, pid, line, len);
  } else {
    td_printable_add(&copy, line, len, "\t");
    td_buf_char(&copy, '\n');
  }
  put(&copy);
}
