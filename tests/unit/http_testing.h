// tests/unit/http_testing.h - a server with a few plain handlers in a thread, and raw sockets to
// it.
#pragma once

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/buf.h"
#include "base/clock.h"
#include "http/http.h"
#include "unit/testing.h"

typedef struct {
  uv_loop_t loop;
  uv_async_t wake;
  uv_thread_t thread;
  td_http_server *server;
  uint16_t port;
  _Atomic int command; // 1: drain, 2: close
  _Atomic int n_gone, n_drained, n_handled;
  _Atomic size_t n_connections; // when the last /hello was answered
  char unix_path[64];
} fixture;

// Handlers.

static void serve_hello(void *ctx, td_http_exchange *x) {
  fixture *f = ctx;
  f->n_handled++;
  f->n_connections = td_http_server_n_connections(f->server);
  td_http_respond(x, 200, "text/plain", "hello", 5);
}

static void serve_echo(void *ctx, td_http_exchange *x) {
  ((fixture *)ctx)->n_handled++;
  const td_buf *body = td_http_body(x);
  td_http_respond(x, 200, "text/plain", td_buf_text(body), body->len);
}

static void serve_path(void *ctx, td_http_exchange *x) {
  (void)ctx;
  td_http_respond(x, 200, "text/plain", td_http_path(x), strlen(td_http_path(x)));
}

static void serve_stream(void *ctx, td_http_exchange *x) {
  (void)ctx;
  td_http_stream_begin(x, "text/plain");
  td_http_stream_write(x, "one ", 4);
  td_http_stream_write(x, "two", 3);
  td_http_stream_end(x);
}

static void count_gone(void *arg) {
  ((fixture *)arg)->n_gone++;
}

static void serve_hang(void *ctx, td_http_exchange *x) {
  ((fixture *)ctx)->n_handled++;
  td_http_on_gone(x, count_gone, ctx);
}

typedef struct {
  uv_timer_t timer;
  fixture *f;
  td_http_exchange *x;
  uint64_t n_bytes;
} later;

static void free_later(uv_handle_t *handle) {
  free(handle->data);
}

static void later_gone(void *arg) {
  later *l = arg;
  l->f->n_gone++;
  uv_close((uv_handle_t *)&l->timer, free_later);
}

static later *start_later(fixture *f, td_http_exchange *x, uv_timer_cb cb, uint64_t delay_ms,
                          uint64_t repeat_ms) {
  later *l = calloc(1, sizeof *l);
  l->f = f;
  l->x = x;
  uv_timer_init(&f->loop, &l->timer);
  l->timer.data = l;
  uv_timer_start(&l->timer, cb, delay_ms, repeat_ms);
  td_http_on_gone(x, later_gone, l);
  return l;
}

// The first time an event, the second time the last.
static void end_sse(uv_timer_t *timer) {
  later *l = timer->data;
  if (l->n_bytes++ == 0) {
    td_http_sse_data(l->x, "{}", 2);
    return;
  }
  td_http_sse_data(l->x, "[DONE]", 6);
  td_http_sse_end(l->x);
  uv_close((uv_handle_t *)timer, free_later);
}

// Headers at once, an event half a second later, and the last when as much has passed again.
static void serve_sse(void *ctx, td_http_exchange *x) {
  td_http_sse_begin(x);
  start_later(ctx, x, end_sse, 500, 500);
}

static void write_more(uv_timer_t *timer) {
  static char block[65536];
  later *l = timer->data;
  memset(block, 'x', sizeof block);
  td_http_stream_write(l->x, block, sizeof block);
  l->n_bytes += sizeof block;
}

// Writes without end.
static void serve_flood(void *ctx, td_http_exchange *x) {
  td_http_stream_begin(x, "text/plain");
  start_later(ctx, x, write_more, 1, 1);
}

static void end_slow(uv_timer_t *timer) {
  later *l = timer->data;
  td_http_respond(l->x, 200, "text/plain", "slow", 4);
  uv_close((uv_handle_t *)timer, free_later);
}

static void serve_slow(void *ctx, td_http_exchange *x) {
  ((fixture *)ctx)->n_handled++;
  start_later(ctx, x, end_slow, 300, 0);
}

// One large body, more than sockets hold.
static void serve_large(void *ctx, td_http_exchange *x) {
  size_t len = 32u << 20;
  char *body = malloc(len);
  memset(body, 'x', len);
  td_http_respond(x, 200, "text/plain", body, len);
  free(body);
  ((fixture *)ctx)->n_handled++;
}

static bool check_key(void *ctx, td_http_exchange *x) {
  (void)ctx;
  if (!td_http_header(x, "X-Refuse")) return true;
  td_http_error(x, 401, "no");
  return false;
}

static const td_http_route routes[] = {
    {"GET", "/hello", serve_hello, false},    {"POST", "/echo", serve_echo, false},
    {"GET", "/path/vital", serve_path, true}, {"GET", "/path/*", serve_path, false},
    {"GET", "/stream", serve_stream, false},  {"GET", "/sse", serve_sse, false},
    {"GET", "/hang", serve_hang, false},      {"GET", "/flood", serve_flood, false},
    {"GET", "/slow", serve_slow, false},      {"GET", "/large", serve_large, false},
};

// The thread.

static void count_drained(void *ctx) {
  ((fixture *)ctx)->n_drained++;
}

static void on_wake(uv_async_t *wake) {
  fixture *f = wake->data;
  if (f->command == 1) td_http_server_drain(f->server);
  if (f->command == 2) {
    td_http_server_close(f->server, NULL, NULL);
    uv_close((uv_handle_t *)wake, NULL);
  }
}

static void run_loop(void *arg) {
  uv_run(&((fixture *)arg)->loop, UV_RUN_DEFAULT);
}

static inline void start_server(fixture *f, td_http_opts opts) {
  signal(SIGPIPE, SIG_IGN); // as the program does: libuv writes to peers that have gone
  memset(f, 0, sizeof *f);
  uv_loop_init(&f->loop);
  uv_async_init(&f->loop, &f->wake, on_wake);
  f->wake.data = f;
  if (!opts.host) opts.host = "127.0.0.1";
  opts.routes = routes;
  opts.n_routes = TD_COUNT(routes);
  opts.ctx = f;
  opts.on_head = check_key;
  opts.on_drained = count_drained;
  if (strncmp(opts.host, "unix:", 5) == 0) strcpy(f->unix_path, opts.host + 5);
  td_err err;
  if (td_http_server_open(&f->server, &f->loop, &opts, &err) != TD_OK) fail_msg("%s", err.msg);
  f->port = td_http_server_port(f->server);
  uv_thread_create(&f->thread, run_loop, f);
}

static inline void command(fixture *f, int what) {
  f->command = what;
  uv_async_send(&f->wake);
}

static inline void stop_server(fixture *f) {
  command(f, 2);
  uv_thread_join(&f->thread);
  assert_int_equal(uv_loop_close(&f->loop), 0); // nothing of the server is left
}

// Waits up to two seconds.
static inline bool becomes(const _Atomic int *value, int wanted) {
  for (int i = 0; i < 1500 && *value != wanted; i++) // the machine may be busy
    usleep(10000);
  return *value == wanted;
}

// Clients.

static uint32_t dial_from; // address; 0: any

static inline int dial(const fixture *f) {
  int fd;
  if (f->unix_path[0]) {
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    strcpy(addr.sun_path, f->unix_path);
    fd = socket(AF_UNIX, SOCK_STREAM, 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&addr, sizeof addr), 0);
    return fd;
  }
  struct sockaddr_in addr = {.sin_family = AF_INET, .sin_port = htons(f->port)};
  addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  fd = socket(AF_INET, SOCK_STREAM, 0);
  if (dial_from) { // another address of the loopback's network
    const struct sockaddr_in own = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(dial_from)};
    assert_int_equal(bind(fd, (const struct sockaddr *)&own, sizeof own), 0);
  }
  assert_int_equal(connect(fd, (struct sockaddr *)&addr, sizeof addr), 0);
  return fd;
}

static inline void put(int fd, const void *bytes, size_t len) {
  while (len > 0) {
    ssize_t n = send(fd, bytes, len, MSG_NOSIGNAL);
    if (n <= 0) return; // the server may have refused already
    bytes = (const char *)bytes + n;
    len -= (size_t)n;
  }
}

static inline void put_str(int fd, const char *text) {
  put(fd, text, strlen(text));
}

// Reads until the end of input, or until the text holds `until`. Returns whether it ended so; false
// after timeout_ms of silence.
static inline bool get(int fd, td_buf *out, const char *until, int timeout_ms) {
  char buf[65536];
  for (;;) {
    if (until && strstr(td_buf_text(out), until)) return true;
    struct pollfd p = {.fd = fd, .events = POLLIN};
    if (poll(&p, 1, timeout_ms) <= 0) return false;
    ssize_t n = recv(fd, buf, sizeof buf, 0);
    if (n <= 0) return until == NULL;
    td_buf_add(out, buf, (size_t)n);
  }
}

// Sends bytes on a fresh connection and returns everything up to the server's close.
static inline td_buf exchange(const fixture *f, const void *bytes, size_t len) {
  td_buf out = TD_BUF_INIT;
  int fd = dial(f);
  put(fd, bytes, len);
  if (!get(fd, &out, NULL, 3000)) {
    td_buf_str(&out, "<not closed>");
  }
  close(fd);
  return out;
}

static inline int status_of(const td_buf *response) {
  int status = 0;
  if (sscanf(td_buf_text(response), "HTTP/1.1 %d ", &status) != 1) return 0;
  return status;
}
