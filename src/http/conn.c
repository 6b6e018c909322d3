// src/http/conn.c - the life of one connection: reading, dispatch in order, timers, closing.
// A connection handles one request at a time. Bytes after it wait in `pending`, so pipelined
// requests get their responses in order. Reading continues while a handler works, because that is
// how a disconnected client is noticed: end of input during a request means that it is gone.
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "http/http_impl.h"

#define MAX_PENDING_BYTES 65536
#define LINGER_MS         2000
#define BODY_BYTES_PER_MS 64
#define SMALL_BODY_BYTES  65536 // smaller bodies are not charged to the shared budget
#define STALLED_MS        1000  // age at which a stalled body is dropped if another needs memory

enum { STAGE_NONE, STAGE_IDLE, STAGE_HEAD, STAGE_BODY };

static void pump(td_http_conn *conn);
static void update_reading(td_http_conn *conn);
static void on_timer(uv_timer_t *timer);

static void on_closed(uv_handle_t *handle) {
  td_http_conn *conn = handle->data;
  if (--conn->n_handles > 0) return;
  if (conn->open && conn->on_gone) conn->on_gone(conn->gone_arg);
  td_http_server *server = conn->server;
  td_http_count_held(server, conn->peer, conn->held_bytes, 0);
  td_http_server_conn_closed(server, conn);
  td_http_parser_free(&conn->parser);
  td_buf_free(&conn->pending);
  td_buf_free(&conn->extra_headers);
  free(conn);
}

void td_http_conn_drop(td_http_conn *conn) {
  if (conn->phase == TD_CONN_CLOSED) return;
  conn->phase = TD_CONN_CLOSED;
  conn->server->n_closing++;
  uv_close(&conn->io.handle, on_closed);
  uv_close((uv_handle_t *)&conn->timer, on_closed);
}

bool td_http_conn_is_idle(const td_http_conn *conn) {
  return conn->phase == TD_CONN_READ && !conn->parser.started && conn->pending.len == 0;
}

static void arm(td_http_conn *conn, uint64_t delay_ms, uint64_t repeat_ms) {
  uv_update_time(conn->server->loop);
  uv_timer_start(&conn->timer, on_timer, delay_ms, repeat_ms);
}

// Time limit of the current reading stage, in milliseconds.
static uint64_t stage_limit_ms(const td_http_conn *conn) {
  const td_http_opts *opts = &conn->server->opts;
  switch (conn->stage) {
  case STAGE_IDLE: return conn->served ? opts->idle_timeout_ms : opts->head_timeout_ms;
  case STAGE_HEAD: return opts->head_timeout_ms;
  default: return opts->body_timeout_ms + conn->parser.body.len / BODY_BYTES_PER_MS;
  }
}

static void update_stage(td_http_conn *conn) {
  int stage = !conn->parser.started     ? STAGE_IDLE
              : !conn->parser.head_done ? STAGE_HEAD
                                        : STAGE_BODY;
  if (conn->phase != TD_CONN_READ || stage == conn->stage) return;
  conn->stage = stage;
  conn->stage_since_ms = conn->body_ms = td_http_now_ms();
  arm(conn, stage_limit_ms(conn), 0);
}

void td_http_conn_count_body(td_http_conn *conn) {
  size_t now = conn->parser.body.cap > SMALL_BODY_BYTES ? conn->parser.body.cap : 0;
  td_http_count_held(conn->server, conn->peer, conn->held_bytes, now);
  conn->held_bytes = now;
}

static void refuse(td_http_conn *conn, int status, const char *message) {
  conn->keep_alive = false;
  td_buf_free(&conn->parser.body);
  td_http_conn_count_body(conn);
  if (status == 503) td_http_add_header(conn, "Retry-After", "1");
  td_http_error(conn, status, message);
}

// The body that has received nothing for the longest time, at least STALLED_MS; is_own: of the same
// client. NULL: none.
static td_http_conn *most_stalled(const td_http_conn *conn, bool is_own) {
  td_http_conn *found = NULL;
  uint64_t before = td_http_now_ms() - STALLED_MS;
  for (td_http_conn *c = conn->server->conns; c; c = c->next) {
    if (c == conn || c->phase != TD_CONN_READ || !c->held_bytes || c->body_ms > before) continue;
    if (is_own && c->peer != conn->peer) continue;
    before = c->body_ms;
    found = c;
  }
  return found;
}

// Keeps all bodies within the budget, and a client's within three quarters of it: refuses stalled
// ones first, then this one.
static void keep_to_budget(td_http_conn *conn) {
  const td_http_server *server = conn->server;
  const size_t *held_of_client = &server->held_of[td_http_bucket_of(conn->peer)];
  const size_t most = server->opts.max_bodies_bytes, max_of_client = most / 4 * 3;
  while (conn->held_bytes && (server->held_bytes > most || *held_of_client > max_of_client)) {
    td_http_conn *stalled = most_stalled(conn, *held_of_client > max_of_client);
    if (stalled)
      refuse(stalled, 408, "the request made no progress while others needed the memory");
    else
      refuse(conn, 503, "too many large requests are being received at once");
  }
}

static void on_read_timer(td_http_conn *conn) {
  uint64_t now = td_http_now_ms(), spent = now - conn->stage_since_ms, limit = stage_limit_ms(conn);
  // A large body may take long in total, but must not stall.
  uint64_t still = now - conn->body_ms, most = conn->server->opts.body_timeout_ms;
  bool stands_still = conn->stage == STAGE_BODY && still >= most;
  if (spent < limit && !stands_still) {
    uint64_t left = limit - spent;
    arm(conn, conn->stage == STAGE_BODY && most - still < left ? most - still : left, 0);
  } else if (conn->stage == STAGE_IDLE) {
    td_http_conn_drop(conn);
  } else {
    refuse(conn, 408, "the request took too long to arrive");
  }
}

// Four ticks per SSE comment interval, so that a comment is at most a quarter late.
static void arm_writes(td_http_conn *conn) {
  uint32_t ms = (conn->server->opts.sse_comment_ms + 3) / 4;
  arm(conn, ms, ms);
}

// While a response is generated or written: sends SSE keep-alive comments and drops a client that
// stops reading.
static void on_write_timer(td_http_conn *conn) {
  const td_http_opts *opts = &conn->server->opts;
  size_t waiting = uv_stream_get_write_queue_size(&conn->io.stream);
  uint64_t moved = conn->n_queued - waiting, now = td_clock_ns();
  if (waiting == 0 || moved > conn->n_moved) {
    conn->n_moved = moved;
    conn->moved_ns = now;
  } else if (now - conn->moved_ns >= (uint64_t)opts->write_timeout_ms * 1000000) {
    td_debug("http: a client that reads nothing was dropped");
    td_http_conn_drop(conn);
    return;
  }
  if (conn->keep_alive_text && conn->phase == TD_CONN_BUSY &&
      now - conn->stream_ns >= (uint64_t)opts->sse_comment_ms * 1000000)
    td_http_stream_write(conn, conn->keep_alive_text, strlen(conn->keep_alive_text));
}

static void on_timer(uv_timer_t *timer) {
  td_http_conn *conn = timer->data;
  switch (conn->phase) {
  case TD_CONN_READ: on_read_timer(conn); break;
  case TD_CONN_BUSY:
  case TD_CONN_FLUSH: on_write_timer(conn); break;
  case TD_CONN_LINGER: td_http_conn_drop(conn); break;
  case TD_CONN_CLOSED: break;
  }
}

static void on_shutdown(uv_shutdown_t *req, int error) {
  td_http_conn *conn = req->data;
  if (error) td_http_conn_drop(conn);
}

// Shuts down the sending side, then reads for a while. Closing with unread input would reset the
// connection, and the client could lose the response.
static void linger(td_http_conn *conn) {
  conn->phase = TD_CONN_LINGER;
  td_buf_free(&conn->pending);
  conn->shutdown.data = conn;
  if (conn->eof || uv_shutdown(&conn->shutdown, &conn->io.stream, on_shutdown)) {
    td_http_conn_drop(conn);
    return;
  }
  arm(conn, LINGER_MS, 0);
}

void td_http_conn_finish(td_http_conn *conn) {
  conn->open = false;
  if (conn->phase == TD_CONN_CLOSED) return;
  if (conn->phase == TD_CONN_READ) arm_writes(conn);
  conn->phase = TD_CONN_FLUSH;
  if (conn->n_written == conn->n_queued) td_http_conn_flushed(conn);
}

static void begin_request(td_http_conn *conn) {
  conn->phase = TD_CONN_READ;
  conn->stage = STAGE_NONE;
  td_http_parser_reset(&conn->parser);
  td_http_conn_count_body(conn);
  td_buf_clear(&conn->extra_headers);
  conn->route = NULL;
  conn->on_gone = NULL;
  conn->head_sent = conn->chunked = conn->no_body = false;
  conn->keep_alive_text = NULL;
}

void td_http_conn_flushed(td_http_conn *conn) {
  conn->served = true;
  if (!conn->keep_alive || conn->server->draining) {
    linger(conn);
    return;
  }
  begin_request(conn);
  pump(conn);
}

// Adds CORS headers that let the requesting page read the response. False: its origin is not
// allowed, or there is no Origin.
static bool allow_origin(td_http_conn *conn) {
  const char *cors = conn->server->opts.cors, *origin = td_http_header(conn, "Origin");
  bool is_any = cors && strcmp(cors, "*") == 0;
  if (!cors || !origin || !(is_any || strcmp(cors, origin) == 0)) return false;
  td_http_add_header(conn, "Access-Control-Allow-Origin", cors);
  if (!is_any) td_http_add_header(conn, "Vary", "Origin");
  td_http_add_header(conn, "Access-Control-Expose-Headers",
                     "Retry-After, WWW-Authenticate, x-request-id, request-id");
  return true;
}

// Responds to a CORS preflight request.
static void answer_preflight(td_http_conn *conn, const char *methods) {
  const char *headers = td_http_header(conn, "Access-Control-Request-Headers");
  td_http_add_header(conn, "Access-Control-Allow-Methods", methods);
  td_http_add_header(conn, "Access-Control-Allow-Headers",
                     headers ? headers : "Authorization, Content-Type");
  td_http_add_header(conn, "Access-Control-Max-Age", "86400");
  if (td_http_header(conn, "Access-Control-Request-Private-Network"))
    td_http_add_header(conn, "Access-Control-Allow-Private-Network", "true");
  td_http_respond(conn, 200, "text/plain", "", 0);
}

// Responds to a path without a route, or with routes for the methods of allow only.
static void refuse_unknown(td_http_conn *conn, const char *method, const char *allow) {
  const td_http_opts *opts = &conn->server->opts;
  td_buf message = TD_BUF_INIT;
  td_http_route_describe_miss(opts->routes, opts->n_routes, method, td_http_path(conn), allow,
                              &message);
  if (allow[0]) td_http_add_header(conn, "Allow", allow);
  td_http_error(conn, allow[0] ? 405 : 404, td_buf_text(&message));
  td_buf_free(&message);
}

// The head is complete: refuses the request before its body is read, where possible.
static void on_head(td_http_conn *conn) {
  td_http_server *server = conn->server;
  const td_http_opts *opts = &server->opts;
  td_http_parser *parser = &conn->parser;
  const char *method = td_http_parser_method(parser);
  conn->keep_alive = parser->keep_alive;
  conn->no_body = strcmp(method, "HEAD") == 0;
  if (opts->on_request) opts->on_request(opts->ctx, conn);
  // Only HTTP/1.0 requests lack a host, and no browser sends them.
  if (opts->loopback_hosts_only && parser->host.len > 0 &&
      !td_http_host_is_allowed(td_buf_text(&parser->host))) {
    refuse(conn, 403,
           "the Host header is not localhost, and the server has no API key: have the proxy send "
           "Host: localhost, or start the server with --api-key "
           "(or, without protection, with --host 0.0.0.0)");
    return;
  }
  td_buf allow = TD_BUF_INIT;
  if (conn->is_extra) conn->keep_alive = false;
  conn->route = td_http_route_find(opts->routes, opts->n_routes, method, td_http_path(conn),
                                   &allow);
  bool is_allowed_origin = allow_origin(conn);
  if (is_allowed_origin && allow.len > 0 && strcmp(method, "OPTIONS") == 0) {
    answer_preflight(conn, td_buf_text(&allow));
  } else if (conn->route && strcmp(method, "POST") == 0 && !parser->has_length) {
    refuse(conn, 411, "the request has neither Content-Length nor Transfer-Encoding: chunked");
  } else if (conn->is_extra && !(conn->route && conn->route->always)) {
    refuse(conn, 503, "too many connections");
  } else if (conn->route) {
    if (opts->on_head && !opts->on_head(opts->ctx, conn)) TD_CHECK(conn->head_sent);
  } else {
    refuse_unknown(conn, method, td_buf_text(&allow));
  }
  td_buf_free(&allow);
  if (conn->phase == TD_CONN_READ && parser->expect_continue && !parser->message_done &&
      conn->pending.len == 0) {
    static const char go_on[] = "HTTP/1.1 100 Continue\r\n\r\n";
    td_http_conn_write(conn, go_on, sizeof go_on - 1);
  }
}

static void dispatch(td_http_conn *conn) {
  td_http_server *server = conn->server;
  conn->phase = TD_CONN_BUSY;
  conn->open = true;
  conn->moved_ns = td_clock_ns();
  arm_writes(conn);
  conn->route->handle(server->opts.ctx, conn);
}

// Feeds pending bytes to the parser until they are used up or a handler has the request.
static void pump(td_http_conn *conn) {
  if (conn->pumping) return;
  conn->pumping = true;
  while (conn->phase == TD_CONN_READ) {
    size_t used;
    td_http_event event = td_http_parser_feed(&conn->parser, td_buf_text(&conn->pending),
                                              conn->pending.len, &used);
    td_buf_drop(&conn->pending, used);
    if (used && conn->parser.head_done) conn->body_ms = td_http_now_ms();
    td_http_conn_count_body(conn);
    if (event == TD_HTTP_MORE) break;
    if (event == TD_HTTP_HEAD) on_head(conn);
    if (event == TD_HTTP_DONE) dispatch(conn);
    if (event == TD_HTTP_BAD) refuse(conn, conn->parser.status, conn->parser.reason);
  }
  if (conn->phase == TD_CONN_READ) keep_to_budget(conn);
  conn->pumping = false;
  if (conn->eof && (conn->phase == TD_CONN_READ || conn->phase == TD_CONN_BUSY)) {
    td_http_conn_drop(conn);
    return;
  }
  update_stage(conn);
  update_reading(conn);
}

static void on_alloc(uv_handle_t *handle, size_t suggested, uv_buf_t *buf) {
  (void)suggested;
  td_http_conn *conn = handle->data;
  *buf = uv_buf_init(conn->server->read_buf, sizeof conn->server->read_buf);
}

static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *buf);

// Stops reading while too many bytes are pending, and resumes once they are used up.
static void update_reading(td_http_conn *conn) {
  if (conn->phase == TD_CONN_CLOSED || conn->eof) return;
  bool want = conn->pending.len < MAX_PENDING_BYTES;
  if (want == conn->reading) return;
  conn->reading = want;
  if (!want)
    uv_read_stop(&conn->io.stream);
  else if (uv_read_start(&conn->io.stream, on_alloc, on_read))
    td_http_conn_drop(conn);
}

static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *buf) {
  td_http_conn *conn = stream->data;
  if (n == 0) return;
  if (n == UV_EOF) {
    conn->eof = true;
    uv_read_stop(&conn->io.stream);
    // A client may close its side while its response is still being written.
    if (conn->phase != TD_CONN_FLUSH) td_http_conn_drop(conn);
    return;
  }
  if (n < 0) {
    td_http_conn_drop(conn);
    return;
  }
  bool ends = conn->phase == TD_CONN_LINGER || (conn->phase == TD_CONN_FLUSH && !conn->keep_alive);
  if (ends) return; // the connection closes after this response
  td_buf_add(&conn->pending, buf->base, (size_t)n);
  if (conn->pending.failed) {
    td_http_conn_drop(conn);
    return;
  }
  pump(conn);
  update_reading(conn); // pump may have returned early
}

static bool open_io(td_http_conn *conn, uv_stream_t *listener) {
  uv_loop_t *loop = conn->server->loop;
  int error = listener->type == UV_TCP ? uv_tcp_init(loop, &conn->io.tcp)
                                       : uv_pipe_init(loop, &conn->io.pipe, 0);
  if (error) return false;
  uv_timer_init(loop, &conn->timer);
  conn->io.handle.data = conn;
  conn->timer.data = conn;
  conn->n_handles = 2;
  return true;
}

bool td_http_conn_accept(td_http_server *server, uv_stream_t *listener) {
  td_http_conn *conn = calloc(1, sizeof *conn);
  if (!conn) return false;
  conn->server = server;
  if (!open_io(conn, listener)) {
    free(conn);
    return false;
  }
  td_http_parser_init(&conn->parser, &server->opts.limits);
  conn->next = server->conns;
  if (conn->next) conn->next->prev = conn;
  server->conns = conn;
  server->n_conns++;
  server->n_open++;
  if (uv_accept(listener, &conn->io.stream) || server->draining) {
    td_http_conn_drop(conn);
    return true;
  }
  conn->peer = td_http_peer_of(conn);
  td_http_conn_find_place(conn);
  if (listener->type == UV_TCP) {
    uv_tcp_nodelay(&conn->io.tcp, 1);
    uv_tcp_keepalive(&conn->io.tcp, 1, 60);
  }
  begin_request(conn);
  update_reading(conn);
  update_stage(conn);
  return true;
}
