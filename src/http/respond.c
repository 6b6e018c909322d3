// src/http/respond.c - complete responses, chunked responses, and server-sent events.
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/json_write.h"
#include "http/http_impl.h"

typedef struct {
  uv_write_t req;
  td_http_conn *conn;
  size_t len;
  char bytes[];
} write_job;

static const char *status_text(int status) {
  switch (status) {
  case 200: return "OK";
  case 400: return "Bad Request";
  case 401: return "Unauthorized";
  case 403: return "Forbidden";
  case 404: return "Not Found";
  case 405: return "Method Not Allowed";
  case 408: return "Request Timeout";
  case 411: return "Length Required";
  case 413: return "Content Too Large";
  case 414: return "URI Too Long";
  case 415: return "Unsupported Media Type";
  case 417: return "Expectation Failed";
  case 429: return "Too Many Requests";
  case 431: return "Request Header Fields Too Large";
  case 500: return "Internal Server Error";
  case 501: return "Not Implemented";
  case 503: return "Service Unavailable";
  default: return "Status";
  }
}

static void on_written(uv_write_t *req, int error) {
  write_job *job = req->data;
  td_http_conn *conn = job->conn;
  conn->n_written += job->len;
  free(job);
  if (error)
    td_http_conn_drop(conn);
  else if (conn->phase == TD_CONN_FLUSH && conn->n_written == conn->n_queued)
    td_http_conn_flushed(conn);
}

// Queues a followed by b in one write.
static void write_two(td_http_conn *conn, const void *a, size_t a_len, const void *b,
                      size_t b_len) {
  if (conn->phase == TD_CONN_CLOSED || conn->phase == TD_CONN_LINGER) return;
  write_job *job = malloc(sizeof *job + a_len + b_len);
  if (!job) {
    td_http_conn_drop(conn);
    return;
  }
  job->conn = conn;
  job->len = a_len + b_len;
  job->req.data = job;
  memcpy(job->bytes, a, a_len);
  if (b_len > 0) memcpy(job->bytes + a_len, b, b_len);
  if (conn->n_written == conn->n_queued) conn->moved_ns = td_clock_ns();
  uv_buf_t buf = uv_buf_init(job->bytes, (unsigned)job->len);
  if (uv_write(&job->req, &conn->io.stream, &buf, 1, on_written)) {
    free(job);
    td_http_conn_drop(conn);
    return;
  }
  conn->n_queued += job->len;
}

void td_http_conn_write(td_http_conn *conn, const void *bytes, size_t len) {
  write_two(conn, bytes, len, NULL, 0);
}

static void add_date(td_buf *out) {
  char text[64];
  struct tm tm;
  time_t now = time(NULL);
  gmtime_r(&now, &tm);
  strftime(text, sizeof text, "Date: %a, %d %b %Y %H:%M:%S GMT\r\n", &tm);
  td_buf_str(out, text);
}

// Writes status line and headers, up to the blank line. content_length < 0: a response in pieces.
static void make_head(td_http_conn *conn, td_buf *out, int status, const char *content_type,
                      int64_t content_length) {
  td_buf_printf(out, "HTTP/1.1 %d %s\r\n", status, status_text(status));
  add_date(out);
  if (content_type) td_buf_printf(out, "Content-Type: %s\r\n", content_type);
  if (content_length >= 0)
    td_buf_printf(out, "Content-Length: %lld\r\n", (long long)content_length);
  else if (conn->chunked)
    td_buf_str(out, "Transfer-Encoding: chunked\r\n");
  if (!conn->keep_alive)
    td_buf_str(out, "Connection: close\r\n");
  else if (conn->parser.http10)
    td_buf_str(out, "Connection: keep-alive\r\n");
  td_buf_add(out, td_buf_text(&conn->extra_headers), conn->extra_headers.len);
  td_buf_str(out, "\r\n");
}

void td_http_add_header(td_http_exchange *x, const char *name, const char *value) {
  td_buf_printf(&x->extra_headers, "%s: %s\r\n", name, value);
}

bool td_http_added_header(const td_http_exchange *x, const char *name, td_buf *out) {
  const size_t len = strlen(name);
  for (const char *line = td_buf_text(&x->extra_headers); *line; line = strstr(line, "\r\n") + 2) {
    if (strncmp(line, name, len) != 0 || line[len] != ':') continue;
    const char *value = line + len + 2;
    td_buf_add(out, value, (size_t)(strstr(value, "\r\n") - value));
    return true;
  }
  return false;
}

void td_http_respond(td_http_exchange *x, int status, const char *content_type, const void *body,
                     size_t len) {
  TD_CHECK(!x->head_sent);
  td_buf head = TD_BUF_INIT;
  // Unread bytes of this request would be parsed as the next one.
  if (x->server->draining || !x->parser.message_done) x->keep_alive = false;
  make_head(x, &head, status, content_type, (int64_t)len);
  x->head_sent = true;
  if (head.failed || x->extra_headers.failed)
    td_http_conn_drop(x);
  else
    write_two(x, head.data, head.len, body, x->no_body ? 0 : len);
  td_buf_free(&head);
  td_http_conn_finish(x);
}

void td_http_error(td_http_exchange *x, int status, const char *message) {
  const td_http_opts *opts = &x->server->opts;
  td_buf body = TD_BUF_INIT;
  if (opts->write_error) {
    opts->write_error(opts->ctx, x, &body, status, message);
  } else {
    td_buf_str(&body, "{\"error\":{\"message\":");
    td_json_quote(&body, message, strlen(message));
    td_buf_str(&body, "}}");
  }
  td_http_respond(x, status, "application/json", td_buf_text(&body), body.len);
  td_buf_free(&body);
}

void td_http_stream_begin(td_http_exchange *x, const char *content_type) {
  TD_CHECK(!x->head_sent);
  td_buf head = TD_BUF_INIT;
  x->chunked = !x->parser.http10;
  if (!x->chunked || x->server->draining) x->keep_alive = false;
  make_head(x, &head, 200, content_type, -1);
  x->head_sent = true;
  if (head.failed || x->extra_headers.failed)
    td_http_conn_drop(x);
  else
    td_http_conn_write(x, head.data, head.len);
  td_buf_free(&head);
}

void td_http_stream_keep_alive(td_http_exchange *x, const char *text) {
  x->keep_alive_text = text;
  x->stream_ns = td_clock_ns();
}

void td_http_stream_write(td_http_exchange *x, const void *bytes, size_t len) {
  x->stream_ns = td_clock_ns();
  if (len == 0 || x->phase != TD_CONN_BUSY || x->no_body) return;
  if (uv_stream_get_write_queue_size(&x->io.stream) > x->server->opts.max_write_queue_bytes) {
    td_http_conn_drop(x);
    return;
  }
  if (!x->chunked) {
    td_http_conn_write(x, bytes, len);
    return;
  }
  td_buf chunk = TD_BUF_INIT;
  td_buf_printf(&chunk, "%zx\r\n", len);
  td_buf_add(&chunk, bytes, len);
  td_buf_str(&chunk, "\r\n");
  if (chunk.failed)
    td_http_conn_drop(x);
  else
    td_http_conn_write(x, chunk.data, chunk.len);
  td_buf_free(&chunk);
}

void td_http_stream_end(td_http_exchange *x) {
  if (x->chunked && !x->no_body) td_http_conn_write(x, "0\r\n\r\n", 5);
  td_http_conn_finish(x);
}

void td_http_sse_begin(td_http_exchange *x) {
  td_http_add_header(x, "Cache-Control", "no-cache");
  td_http_add_header(x, "X-Accel-Buffering", "no"); // nginx must not buffer events
  td_http_stream_begin(x, "text/event-stream; charset=utf-8");
  td_http_stream_keep_alive(x, ":\n\n");
}

void td_http_sse_data(td_http_exchange *x, const char *data, size_t len) {
  td_buf event = TD_BUF_INIT;
  td_buf_str(&event, "data: ");
  td_buf_add(&event, data, len);
  td_buf_str(&event, "\n\n");
  if (event.failed)
    td_http_conn_drop(x);
  else
    td_http_stream_write(x, event.data, event.len);
  td_buf_free(&event);
}

void td_http_sse_end(td_http_exchange *x) {
  td_http_stream_end(x);
}

void td_http_abort(td_http_exchange *x) {
  td_http_conn_drop(x);
}

size_t td_http_route_of(const td_http_exchange *x) {
  return (size_t)(x->route - x->server->opts.routes);
}

const char *td_http_method(const td_http_exchange *x) {
  return td_http_parser_method(&x->parser);
}

const char *td_http_path(const td_http_exchange *x) {
  return td_buf_text(&x->parser.path);
}

const char *td_http_query(const td_http_exchange *x) {
  return td_buf_text(&x->parser.query);
}

const char *td_http_header(const td_http_exchange *x, const char *name) {
  return td_http_parser_header(&x->parser, name);
}

const td_buf *td_http_body(const td_http_exchange *x) {
  return &x->parser.body;
}

uint64_t td_http_peer(const td_http_exchange *x) {
  return x->peer;
}

td_http_held td_http_take_body(td_http_exchange *x, td_buf *out) {
  const td_http_held held = {x->peer, x->held_bytes};
  *out = x->parser.body;
  x->parser.body = TD_BUF_INIT;
  x->held_bytes = 0;
  return held;
}

void td_http_bodies_freed(td_http_server *server, td_http_held *held) {
  TD_CHECK(held->n_bytes <= server->held_bytes);
  td_http_count_held(server, held->peer, held->n_bytes, 0);
  held->n_bytes = 0;
}

void td_http_on_gone(td_http_exchange *x, void (*on_gone)(void *arg), void *arg) {
  x->on_gone = on_gone;
  x->gone_arg = arg;
}
