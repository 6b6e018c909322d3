// src/front/worker_process.c - spawning a worker, its rings on the loop, and its stderr.
#include "front/worker_process.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/log.h"
#include "shm/channel.h"

#define RING_RECORDS   1024
#define RECORDS_A_TURN 1024 // received before the loop's other handles get their turn
#define SAID_BYTES     1024
#define LINE_BYTES     8192 // longer lines are forwarded in pieces

struct td_process {
  td_process_events events;
  uint32_t role; // a td_worker_role
  td_channel channel;
  int life_fd; // writing end, never written
  uv_process_t process;
  uv_poll_t data, space; // of the channel's eventfds
  uv_pipe_t said_pipe;   // the worker's stderr
  int n_handles;         // not yet closed
  bool is_spawned;       // else on_exit is not called
  bool has_exited, has_closed_output, is_closing;
  int64_t exit_status;
  int term_signal;
  char said[SAID_BYTES]; // the end of its stderr
  size_t said_len;
  char line[LINE_BYTES]; // of its stderr; the first line_len bytes are not forwarded yet
  size_t line_len;
};

// ---- the channel ------------------------------------------------------------------------------

void td_process_kill(td_process *p) {
  if (!p->has_exited) uv_process_kill(&p->process, SIGKILL);
}

static void on_corrupt(td_process *p) {
  td_error("the ring shared with the %s process is corrupt; killing it",
           td_worker_role_name(p->role));
  td_process_kill(p);
}

// True: some messages are left for the next turn. False: all were received, and the reader is
// armed.
static bool receive_some(td_process *p) {
  td_ring_reader *rx = &p->channel.rx;
  td_ring_reader_disarm(rx);
  int n = 0;
  do {
    td_wire_msg msg;
    td_status st;
    while ((st = td_ring_pop(rx, &msg)) == TD_OK) {
      p->events.on_record(p->events.ctx, &msg);
      if (++n == RECORDS_A_TURN) return true;
    }
    if (st != TD_EAGAIN) {
      on_corrupt(p);
      return false;
    }
  } while (!td_ring_reader_arm(rx));
  return false;
}

void td_process_drain(td_process *p) {
  if (!receive_some(p)) return;
  uint64_t one = 1; // makes the loop's poll fire again
  if (write(p->channel.fds[TD_CHANNEL_UP_DATA], &one, sizeof one) < 0) return; // signaled already
}

td_status td_process_send(td_process *p, const td_wire_msg *msg) {
  td_status st;
  do
    st = td_ring_push(&p->channel.tx, msg);
  while (st == TD_EAGAIN && !td_ring_writer_arm(&p->channel.tx));
  if (st != TD_OK && st != TD_EAGAIN) on_corrupt(p);
  return st;
}

void td_process_lease(td_process *p, uint32_t n_threads) {
  atomic_store_explicit(p->channel.lease, n_threads, memory_order_relaxed);
}

uint32_t td_process_pulse(const td_process *p) {
  return atomic_load_explicit(p->channel.pulse, memory_order_relaxed);
}

// What the kernel says of the process behind its name, in which there may be anything; "": nothing.
// text is the caller's.
static const char *read_stat(const td_process *p, td_buf *text) {
  char path[64];
  td_err err;
  snprintf(path, sizeof path, "/proc/%d/stat", p->process.pid);
  const char *end = td_file_read(text, path, 4096, &err) == TD_OK ? strrchr(td_buf_text(text), ')')
                                                                  : NULL;
  return end ? end : "";
}

uint64_t td_process_progress(const td_process *p) {
  td_buf text = TD_BUF_INIT;
  unsigned long long n[4] = {0}; // minor and major faults, user and system time
  sscanf(read_stat(p, &text), ") %*c %*d %*d %*d %*d %*d %*u %llu %*u %llu %*u %llu %llu", &n[0],
         &n[1], &n[2], &n[3]);
  td_buf_free(&text);
  return n[0] + n[1] + n[2] + n[3] + td_process_pulse(p);
}

void td_process_lingers(const td_process *p, char *out, size_t n_bytes) {
  char state = '?';
  td_buf text = TD_BUF_INIT;
  if (p->has_exited) {
    snprintf(out, n_bytes, "has ended, but a process that it started holds its output");
    return;
  }
  sscanf(read_stat(p, &text), ") %c", &state);
  td_buf_free(&text);
  snprintf(out, n_bytes, "has not ended (process %d, state %c)%s", p->process.pid, state,
           state == 'D'
               ? ": it hangs in the kernel, as beside a GPU that does not respond; if that "
                 "lasts, restart the machine"
               : "");
}

// ---- exit -------------------------------------------------------------------------------------

// The last non-empty line, terminated in place.
static const char *last_line(td_process *p) {
  while (p->said_len && strchr("\n\r ", p->said[p->said_len - 1]))
    p->said_len--;
  p->said[p->said_len] = '\0';
  char *newline = strrchr(p->said, '\n');
  return newline ? newline + 1 : p->said;
}

static void free_process(td_process *p) {
  td_channel_close(&p->channel);
  if (p->life_fd >= 0) close(p->life_fd);
  free(p);
}

static void on_handle_closed(uv_handle_t *handle) {
  td_process *p = handle->data;
  if (--p->n_handles) return;
  if (p->is_spawned) {
    char why[128];
    if (p->term_signal) {
      snprintf(why, sizeof why, "the %s process died (signal %d, %s)", td_worker_role_name(p->role),
               p->term_signal, strsignal(p->term_signal));
    } else {
      snprintf(why, sizeof why, "the %s process ended with status %d", td_worker_role_name(p->role),
               (int)p->exit_status);
    }
    p->events.on_exit(p->events.ctx, why, last_line(p));
  }
  free_process(p);
}

static void close_handles(td_process *p) {
  p->is_closing = true;
  uv_handle_t *handles[] = {(uv_handle_t *)&p->process, (uv_handle_t *)&p->data,
                            (uv_handle_t *)&p->space, (uv_handle_t *)&p->said_pipe};
  for (size_t i = 0; i < TD_COUNT(handles); i++)
    if (handles[i]->data) uv_close(handles[i], on_handle_closed);
}

static void maybe_finish(td_process *p) {
  if (!p->has_exited || !p->has_closed_output || p->is_closing) return;
  while (receive_some(p)) {
  } // the writer has exited, so this terminates
  close_handles(p);
}

static void on_process_exit(uv_process_t *process, int64_t exit_status, int term_signal) {
  td_process *p = process->data;
  p->has_exited = true;
  p->exit_status = exit_status;
  p->term_signal = term_signal;
  maybe_finish(p);
}

// ---- stderr -----------------------------------------------------------------------------------

static void on_said_alloc(uv_handle_t *handle, size_t suggested, uv_buf_t *buf) {
  (void)suggested;
  td_process *p = handle->data;
  *buf = uv_buf_init(p->line + p->line_len, (unsigned)(sizeof p->line - p->line_len));
}

// Keeps the last SAID_BYTES - 1 bytes.
static void remember(td_process *p, const char *bytes, size_t n) {
  size_t room = sizeof p->said - 1;
  if (n > room) {
    bytes += n - room;
    n = room;
  }
  size_t keep = p->said_len + n > room ? room - n : p->said_len;
  memmove(p->said, p->said + p->said_len - keep, keep);
  memcpy(p->said + keep, bytes, n);
  p->said_len = keep + n;
}

// Forwards len bytes to our own stderr and drops them and the newline after them.
static void pass_on(td_process *p, size_t len) {
  td_log_forward(td_worker_role_name(p->role), p->process.pid, p->line, len);
  if (!td_log_get().is_json || p->line[0] != '{') { // said keeps plain text, not log records
    remember(p, p->line, len);
    remember(p, "\n", 1);
  }
  if (len < p->line_len) len++;
  p->line_len -= len;
  memmove(p->line, p->line + len, p->line_len);
}

static void on_said(uv_stream_t *stream, ssize_t n, const uv_buf_t *buf) {
  (void)buf; // buf is the tail of p->line
  td_process *p = stream->data;
  if (n > 0) {
    p->line_len += (size_t)n;
    for (char *newline; (newline = memchr(p->line, '\n', p->line_len));)
      pass_on(p, (size_t)(newline - p->line));
    if (p->line_len == sizeof p->line) pass_on(p, p->line_len);
  } else if (n < 0) {
    if (p->line_len) pass_on(p, p->line_len);
    uv_read_stop(stream);
    p->has_closed_output = true;
    maybe_finish(p);
  }
}

// ---- the loop's events ------------------------------------------------------------------------

static void on_data(uv_poll_t *poll, int status, int events) {
  (void)status;
  (void)events;
  td_process_drain(poll->data);
}

static void on_space(uv_poll_t *poll, int status, int events) {
  (void)status;
  (void)events;
  td_process *p = poll->data;
  td_ring_writer_disarm(&p->channel.tx);
  p->events.on_space(p->events.ctx);
}

// ---- starting ---------------------------------------------------------------------------------

static td_status init_handles(td_process *p, uv_loop_t *loop, td_err *err) {
  int data_fd = p->channel.fds[TD_CHANNEL_UP_DATA],
      space_fd = p->channel.fds[TD_CHANNEL_DOWN_SPACE];
  struct {
    uv_handle_t *handle;
    int rc;
  } made[] = {{(uv_handle_t *)&p->data, uv_poll_init(loop, &p->data, data_fd)},
              {(uv_handle_t *)&p->space, uv_poll_init(loop, &p->space, space_fd)},
              {(uv_handle_t *)&p->said_pipe, uv_pipe_init(loop, &p->said_pipe, 0)}};
  td_status st = TD_OK;
  for (size_t i = 0; i < TD_COUNT(made); i++) {
    if (made[i].rc != 0) {
      st = td_fail(err, TD_EIO, "cannot watch the worker: %s", uv_strerror(made[i].rc));
      continue;
    }
    made[i].handle->data = p; // also marks the handle as one to close
    p->n_handles++;
  }
  return st;
}

// Descriptors the worker inherits besides the channel's. weights, trace and images may be 0: none.
typedef struct {
  int life, weights, trace, kv, images;
} inherited;

static uv_stdio_container_t inherit(int fd) {
  return (uv_stdio_container_t){.flags = fd ? UV_INHERIT_FD : UV_IGNORE, .data.fd = fd};
}

static int spawn(td_process *p, uv_loop_t *loop, char **argv, inherited fds) {
  uv_stdio_container_t stdio[TD_WORKER_FIRST_CHANNEL + TD_CHANNEL_N_FDS] = {
      {.flags = UV_INHERIT_FD, .data.fd = fds.life},
      {.flags = UV_INHERIT_FD, .data.fd = STDERR_FILENO}, // our stdout is for our own output
      {.flags = UV_CREATE_PIPE | UV_WRITABLE_PIPE, .data.stream = (uv_stream_t *)&p->said_pipe},
  };
  stdio[TD_WORKER_WEIGHTS_FD] = inherit(fds.weights);
  stdio[TD_WORKER_TRACE_FD] = inherit(fds.trace);
  stdio[TD_WORKER_KV_FD] = inherit(fds.kv);
  stdio[TD_WORKER_IMAGES_FD] = inherit(fds.images);
  for (int i = 0; i < TD_CHANNEL_N_FDS; i++) {
    stdio[TD_WORKER_FIRST_CHANNEL + i] = (uv_stdio_container_t){.flags = UV_INHERIT_FD,
                                                                .data.fd = p->channel.fds[i]};
  }
  const uv_process_options_t options = {.exit_cb = on_process_exit,
                                        .file = "/proc/self/exe",
                                        .args = argv,
                                        .stdio_count = TD_COUNT(stdio),
                                        .stdio = stdio};
  int rc = uv_spawn(loop, &p->process, &options);
  p->process.data = p;
  p->n_handles++;
  return rc;
}

static td_status start(td_process *p, uv_loop_t *loop, const td_worker_opts *opts, int kv_fd,
                       td_err *err) {
  td_status st = td_channel_create(&p->channel, RING_RECORDS, err);
  if (st == TD_OK) st = init_handles(p, loop, err);
  if (st != TD_OK) return st;
  TD_CHECK(td_ring_reader_arm(&p->channel.rx)); // before the writer exists
  int life[2];
  if (pipe2(life, O_CLOEXEC) != 0) return td_fail(err, TD_EIO, "pipe: %s", strerror(errno));
  p->life_fd = life[1];
  td_worker_argv args;
  st = td_worker_args_format(&args, opts, err);
  const inherited fds = {.life = life[0],
                         .weights = (int)opts->weights_fd,
                         .trace = (int)opts->trace_fd,
                         .kv = kv_fd,
                         .images = (int)opts->images_fd};
  int rc = st == TD_OK ? spawn(p, loop, args.argv, fds) : 0;
  td_worker_argv_free(&args);
  close(life[0]);
  if (rc != 0) st = td_fail(err, TD_EIO, "cannot start a worker process: %s", uv_strerror(rc));
  if (st != TD_OK) return st;
  p->is_spawned = true;
  uv_poll_start(&p->data, UV_READABLE, on_data);
  uv_poll_start(&p->space, UV_READABLE, on_space);
  uv_read_start((uv_stream_t *)&p->said_pipe, on_said_alloc, on_said);
  return TD_OK;
}

td_status td_process_spawn(td_process **out, uv_loop_t *loop, const td_worker_opts *opts, int kv_fd,
                           const td_process_events *events, td_err *err) {
  *out = NULL;
  td_process *p = calloc(1, sizeof *p);
  if (!p) return td_fail(err, TD_ENOMEM, "out of memory");
  p->events = *events;
  p->role = opts->role;
  p->life_fd = -1;
  td_status st = start(p, loop, opts, kv_fd, err);
  if (st == TD_OK)
    *out = p;
  else if (p->n_handles)
    close_handles(p);
  else
    free_process(p);
  return st;
}
