// src/http/server.c - listening sockets, the list of connections, draining and closing.
#include <limits.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "http/http_impl.h"

#define BACKLOG              512
#define ACCEPT_WARNING_EVERY 10000000000u // ns
#define ACCEPT_RETRY_MS      50

// Listening.

static void warn_of_accept(td_http_server *server, const char *why) {
  uint64_t now = td_clock_ns();
  if (now - server->last_accept_warning_ns < ACCEPT_WARNING_EVERY) return;
  server->last_accept_warning_ns = now;
  td_warn("a connection could not be accepted: %s", why);
}

static void on_retry(uv_timer_t *timer) {
  td_http_server *server = timer->data;
  for (unsigned i = 0; i < server->n_listeners; i++) {
    const uint32_t bit = 1u << i;
    if (!(server->stalled & bit)) continue;
    if (td_http_conn_accept(server, &server->listeners[i].stream)) server->stalled &= ~bit;
  }
  if (server->stalled) uv_timer_start(&server->retry, on_retry, ACCEPT_RETRY_MS, 0);
}

static void on_connection(uv_stream_t *listener, int status) {
  td_http_server *server = listener->data;
  if (status != 0) {
    // Out of descriptors: libuv has closed the new connection so that the loop does not spin.
    warn_of_accept(server, uv_strerror(status));
  } else if (!td_http_conn_accept(server, listener)) {
    warn_of_accept(server, "out of memory; trying again");
    for (unsigned i = 0; i < server->n_listeners; i++)
      if (&server->listeners[i].stream == listener) server->stalled |= 1u << i;
    uv_timer_start(&server->retry, on_retry, ACCEPT_RETRY_MS, 0);
  }
}

static void try_finish(td_http_server *server) {
  if (server->n_open > 0) return;
  if (!server->closing) return;
  void (*closed)(void *ctx) = server->closed;
  void *ctx = server->closed_ctx;
  free(server->url);
  free(server->unix_path);
  free(server);
  if (closed) closed(ctx);
}

static void on_listener_closed(uv_handle_t *handle) {
  td_http_server *server = handle->data;
  server->n_open--;
  try_finish(server);
}

static td_status listen_failed(td_err *err, int error, const char *where) {
  if (error == UV_EADDRINUSE)
    return td_fail(err, TD_EIO, "%s is in use by another program: choose another --port", where);
  if (error == UV_EACCES)
    return td_fail(err, TD_EIO, "%s: not permitted (ports below 1024 need privileges)", where);
  return td_fail(err, TD_EIO, "%s: cannot listen: %s", where, uv_strerror(error));
}

static td_http_io *add_listener(td_http_server *server) {
  td_http_io *io = &server->listeners[server->n_listeners++];
  io->handle.data = server;
  server->n_open++;
  return io;
}

static uint16_t bound_port(const uv_tcp_t *tcp) {
  struct sockaddr_storage addr;
  int len = sizeof addr;
  if (uv_tcp_getsockname(tcp, (struct sockaddr *)&addr, &len)) return 0;
  return ntohs(addr.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&addr)->sin6_port
                                          : ((struct sockaddr_in *)&addr)->sin_port);
}

static int listen_on(td_http_server *server, struct sockaddr *addr) {
  // "localhost" with port 0: the second address uses the port chosen for the first.
  uint16_t port = htons(server->port ? server->port : server->opts.port);
  if (addr->sa_family == AF_INET6)
    ((struct sockaddr_in6 *)addr)->sin6_port = port;
  else
    ((struct sockaddr_in *)addr)->sin_port = port;
  td_http_io *io = add_listener(server);
  int error = uv_tcp_init(server->loop, &io->tcp);
  TD_CHECK(error == 0);
  io->handle.data = server;
  error = uv_tcp_bind(&io->tcp, addr, 0);
  if (!error) error = uv_listen(&io->stream, BACKLOG, on_connection);
  if (!error && server->port == 0) server->port = bound_port(&io->tcp);
  return error;
}

static td_status listen_tcp(td_http_server *server, td_err *err) {
  const char *host = server->opts.host;
  char where[300];
  snprintf(where, sizeof where, strchr(host, ':') ? "[%s]:%u" : "%s:%u", host,
           (unsigned)server->opts.port);
  struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, *list = NULL;
  int code = getaddrinfo(host, NULL, &hints, &list);
  if (code) return td_fail(err, TD_EINVAL, "--host %s: %s", host, gai_strerror(code));
  int error = UV_EADDRNOTAVAIL;
  bool listening = false;
  for (struct addrinfo *a = list; a && server->n_listeners < TD_HTTP_MAX_LISTENERS;
       a = a->ai_next) {
    if (a->ai_family != AF_INET && a->ai_family != AF_INET6) continue;
    int result = listen_on(server, a->ai_addr);
    if (result == 0) listening = true;
    // A machine without IPv6 may still resolve localhost to ::1.
    if (result != 0) error = result;
    if (result == UV_EADDRINUSE) break;
  }
  freeaddrinfo(list);
  if (!listening || error == UV_EADDRINUSE) return listen_failed(err, error, where);
  char url[320];
  snprintf(url, sizeof url, strchr(host, ':') ? "http://[%s]:%u" : "http://%s:%u", host,
           (unsigned)server->port);
  server->url = strdup(url);
  return server->url ? TD_OK : td_fail(err, TD_ENOMEM, "out of memory");
}

// Removes a socket file that nobody listens on, left by a killed server. Connecting to any other
// kind of file is refused, too, and that is not ours to remove.
static td_status remove_stale_socket(const char *path, td_err *err) {
  struct sockaddr_un addr = {.sun_family = AF_UNIX};
  struct stat file;
  if (!path[0]) return td_fail(err, TD_EINVAL, "--host unix: without a path: give unix:PATH");
  if (strlen(path) >= sizeof addr.sun_path) {
    return td_fail(err, TD_EINVAL, "%s: longer than the %zu bytes a socket's path may have", path,
                   sizeof addr.sun_path - 1);
  }
  strcpy(addr.sun_path, path);
  int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return td_fail(err, TD_EIO, "socket: %s", strerror(errno));
  int result = connect(fd, (struct sockaddr *)&addr, sizeof addr), error = errno;
  close(fd);
  if (result == 0) return td_fail(err, TD_EIO, "%s is in use by another program", path);
  if (error == ECONNREFUSED && lstat(path, &file) == 0 && S_ISSOCK(file.st_mode)) unlink(path);
  return TD_OK;
}

static td_status listen_unix(td_http_server *server, const char *path, td_err *err) {
  td_status status = remove_stale_socket(path, err);
  if (status != TD_OK) return status;
  td_http_io *io = add_listener(server);
  int error = uv_pipe_init(server->loop, &io->pipe, 0);
  TD_CHECK(error == 0);
  io->handle.data = server;
  error = uv_pipe_bind(&io->pipe, path);
  if (!error) error = uv_listen(&io->stream, BACKLOG, on_connection);
  if (error == UV_EADDRINUSE) return td_fail(err, TD_EIO, "%s exists and is not a socket", path);
  if (error == UV_EACCES) // libuv's for an absent folder as well
    return td_fail(err, TD_EIO, "%s: its folder is absent, or may not be written", path);
  if (error) return listen_failed(err, error, path);
  server->unix_path = strdup(path);
  size_t size = strlen(path) + 6;
  server->url = malloc(size);
  if (!server->url || !server->unix_path) return td_fail(err, TD_ENOMEM, "out of memory");
  snprintf(server->url, size, "unix:%s", path);
  return TD_OK;
}

// Options.

static void fill_defaults(td_http_opts *o) {
#define OR(field, value)                                                                           \
  if ((field) == 0) (field) = (value)
  OR(o->limits.max_line_bytes, 8u << 10);
  OR(o->limits.max_head_bytes, 32u << 10);
  OR(o->limits.max_body_bytes, 32u << 20);
  OR(o->max_bodies_bytes, 256u << 20);
  OR(o->max_connections, 8192);
  OR(o->max_write_queue_bytes, 1u << 20);
  OR(o->head_timeout_ms, 10000);
  OR(o->body_timeout_ms, 30000);
  OR(o->idle_timeout_ms, 75000);
  OR(o->write_timeout_ms, 30000);
  OR(o->sse_comment_ms, 2000);
#undef OR
}

bool td_http_server_is_loopback(const char *host) {
  return strncmp(host, "unix:", 5) == 0 || td_http_host_is_allowed(host);
}

// Length of the host without its port; *name is past an opening bracket.
static size_t host_name(const char *host, const char **name) {
  *name = host;
  if (host[0] == '[') {
    *name = host + 1;
    return strcspn(host + 1, "]");
  }
  const char *colon = strchr(host, ':');
  if (colon && strchr(colon + 1, ':')) return strlen(host); // an IPv6 address without brackets
  return strcspn(host, ":");
}

bool td_http_host_is_allowed(const char *host) {
  const char *name;
  size_t len = host_name(host, &name);
  if (len > 0 && name[len - 1] == '.') len--;
  if (len == 9 && strncasecmp(name, "localhost", 9) == 0) return true;
  if (len > 10 && strncasecmp(name + len - 10, ".localhost", 10) == 0) return true;
  if (len == 3 && strncmp(name, "::1", 3) == 0) return true;
  if (len < 7 || len > 15 || strncmp(name, "127.", 4) != 0) return false;
  return strspn(name, "0123456789.") >= len;
}

// Open, drain, close.

td_status td_http_server_open(td_http_server **out, uv_loop_t *loop, const td_http_opts *opts,
                              td_err *err) {
  *out = NULL;
  td_http_server *server = calloc(1, sizeof *server);
  if (!server) return td_fail(err, TD_ENOMEM, "out of memory");
  server->loop = loop;
  server->opts = *opts;
  fill_defaults(&server->opts);
  struct rlimit limit;
  const bool is_known = getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < INT_MAX;
  server->n_descriptors = is_known ? (int)limit.rlim_cur : INT_MAX;
  uv_timer_init(loop, &server->retry);
  server->retry.data = server;
  server->n_open++;
  bool is_unix = strncmp(opts->host, "unix:", 5) == 0;
  if (is_unix) server->opts.loopback_hosts_only = false; // browsers cannot connect to Unix sockets
  td_status status = is_unix ? listen_unix(server, opts->host + 5, err) : listen_tcp(server, err);
  if (status != TD_OK) {
    td_http_server_close(server, NULL, NULL);
    return status;
  }
  *out = server;
  return TD_OK;
}

const char *td_http_server_url(const td_http_server *server) {
  return server->url;
}

uint16_t td_http_server_port(const td_http_server *server) {
  return server->port;
}

size_t td_http_server_n_connections(const td_http_server *server) {
  return server->n_conns;
}

static void report_drained(td_http_server *server) {
  if (!server->draining || server->drained || server->n_conns > 0) return;
  server->drained = true;
  if (server->opts.on_drained) server->opts.on_drained(server->opts.ctx);
}

void td_http_server_conn_closed(td_http_server *server, td_http_conn *conn) {
  if (conn->prev) conn->prev->next = conn->next;
  if (conn->next) conn->next->prev = conn->prev;
  if (server->conns == conn) server->conns = conn->next;
  server->n_conns--;
  server->n_closing--;
  server->n_open--;
  if (server->closing)
    try_finish(server);
  else
    report_drained(server);
}

static void close_listeners(td_http_server *server) {
  for (unsigned i = 0; i < server->n_listeners; i++) {
    uv_handle_t *handle = &server->listeners[i].handle;
    if (!uv_is_closing(handle)) uv_close(handle, on_listener_closed);
  }
  uv_handle_t *retry = (uv_handle_t *)&server->retry;
  if (!uv_is_closing(retry)) uv_close(retry, on_listener_closed);
  if (server->unix_path) unlink(server->unix_path);
}

void td_http_server_drain(td_http_server *server) {
  if (server->draining) return;
  server->draining = true;
  close_listeners(server);
  for (td_http_conn *conn = server->conns; conn; conn = conn->next)
    if (td_http_conn_is_idle(conn)) td_http_conn_drop(conn);
  report_drained(server);
}

void td_http_server_close(td_http_server *server, void (*closed)(void *ctx), void *ctx) {
  server->closing = server->draining = true;
  server->closed = closed;
  server->closed_ctx = ctx;
  close_listeners(server);
  for (td_http_conn *conn = server->conns; conn; conn = conn->next)
    td_http_conn_drop(conn);
  try_finish(server);
}

// ---- routes -------------------------------------------------------------------------------------

// A slash behind an API's path changes nothing; a page's links would be others.
static bool path_matches(const char *pattern, const char *path) {
  size_t len = strlen(pattern);
  if (len >= 2 && strcmp(pattern + len - 2, "/*") == 0)
    return strncmp(pattern, path, len - 1) == 0 && path[len - 1] != 0;
  if (strncmp(pattern, path, len) != 0) return false;
  return !path[len] || (strchr(pattern + 1, '/') && strcmp(path + len, "/") == 0);
}

static bool method_matches(const char *allowed, const char *method) {
  if (strcmp(allowed, method) == 0) return true;
  return strcmp(allowed, "GET") == 0 && strcmp(method, "HEAD") == 0;
}

const td_http_route *td_http_route_find(const td_http_route *routes, size_t n, const char *method,
                                        const char *path, td_buf *allow) {
  for (size_t i = 0; i < n; i++) {
    if (!path_matches(routes[i].path, path)) continue;
    if (method_matches(routes[i].method, method)) return &routes[i];
    const bool is_new = strcmp(method, "POST") == 0 && strchr(routes[i].path, '*');
    if (is_new) continue; // what a client would make there is no endpoint
    if (allow->len > 0) td_buf_str(allow, ", ");
    td_buf_str(allow, routes[i].method);
    if (strcmp(routes[i].method, "GET") == 0) td_buf_str(allow, ", HEAD");
  }
  return NULL;
}

// The route that the first len characters of a path miss by what stands before them or before it,
// such as a /v1 that a client left out or gave twice. NULL: none.
static const td_http_route *nearest(const td_http_route *routes, size_t n, const char *path,
                                    size_t len) {
  for (size_t i = 0; i < n && len > 1; i++) {
    const char *other = routes[i].path;
    size_t other_len = strlen(other);
    if (other_len == 1) continue; // every path ends with it
    if (len >= other_len && memcmp(path + len - other_len, other, other_len) == 0)
      return &routes[i];
    if (other_len >= len && memcmp(other + other_len - len, path, len) == 0) return &routes[i];
  }
  return NULL;
}

void td_http_route_describe_miss(const td_http_route *routes, size_t n, const char *method,
                                 const char *path, const char *allow, td_buf *out) {
  const int shown = 128;
  if (allow[0]) {
    td_buf_printf(out, "%s is not allowed for %.*s: use %s", method, shown, path, allow);
    return;
  }
  size_t len = strlen(path);
  while (len > 1 && path[len - 1] == '/')
    len--;
  const td_http_route *other = nearest(routes, n, path, len);
  td_buf_printf(out, "there is no endpoint %.*s", shown, path);
  if (other) td_buf_printf(out, ": did you mean %s?", other->path);
}
