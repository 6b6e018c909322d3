// src/http/http.h - an HTTP/1.1 server on a libuv loop.
// Framing, limits, timers, keep-alive, pipelining, slow readers and draining are its business; what
// the requests mean is the handlers'. Everything happens on the loop's thread.
#ifndef TD_HTTP_HTTP_H
#define TD_HTTP_HTTP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "base/buf.h"
#include "base/status.h"
#include "http/parser.h"

typedef struct td_http_server td_http_server;

// One request and its response. Valid from the handler's call until the response is complete
// (td_http_respond, td_http_error, td_http_stream_end, td_http_sse_end) or on_gone was called.
typedef struct td_http_conn td_http_exchange;

typedef struct {
  const char *method;                             // "GET" also answers HEAD
  const char *path;                               // exact, or "/prefix/*" for everything below
  void (*handle)(void *ctx, td_http_exchange *x); // the whole request is there
} td_http_route;

typedef struct {
  const char *host;            // a name, an IPv4 or IPv6 address, or "unix:/path"
  uint16_t port;               // 0: any free one
  const td_http_route *routes; // borrowed
  size_t n_routes;
  const char *const
      *always; // paths, a NULL behind them, that are served beyond max_connections, too
  void *ctx;   // first argument of every callback

  // Called when a request's head is there and its route exists, before the body is read. Returns
  // false when it has answered already (401). May be NULL.
  bool (*on_head)(void *ctx, td_http_exchange *x);
  // Writes the body of an error answer, application/json. NULL: {"error":{"message":...}}.
  void (*write_error)(void *ctx, td_buf *out, int status, const char *message);
  // Called once after td_http_server_drain, when no connection is left. May be NULL.
  void (*on_drained)(void *ctx);

  // Only Host headers that name this machine's loopback are served (DNS rebinding): 403.
  bool loopback_hosts_only;

  // Pages of this origin ("*": of any) may use the server from a browser: answers say so, and
  // OPTIONS is answered. NULL: of none.
  const char *cors;

  // 0: the default
  td_http_limits limits;   // 8 KiB, 32 KiB, 32 MiB
  size_t max_bodies_bytes; // 256 MiB of bodies over 64 KiB, of all requests together: 503
  // 1024, within the descriptor limit. One more takes the place of one that has stood idle longest,
  // else it is served the paths of `always`, and 503 for others.
  uint32_t max_connections;
  size_t max_write_queue_bytes; // 1 MiB: a streaming reader further behind is dropped
  uint32_t head_timeout_ms;     // 10 s from the first byte of a request: 408
  uint32_t body_timeout_ms;     // 30 s, and 1 ms for every 64 bytes received: 408
  uint32_t idle_timeout_ms;     // 75 s between requests
  uint32_t write_timeout_ms;    // 30 s in which the reader takes nothing
  uint32_t sse_comment_ms;      // 2 s without an event before a comment
} td_http_opts;

// Binds and listens. On success the caller owns *out; on error *out is NULL.
td_status td_http_server_open(td_http_server **out, uv_loop_t *loop, const td_http_opts *opts,
                              td_err *err);
// "http://127.0.0.1:8080" or "unix:/path".
const char *td_http_server_url(const td_http_server *server);
uint16_t td_http_server_port(const td_http_server *server); // 0 for a Unix socket
bool td_http_server_is_loopback(const char *host);          // no other machine can reach it
size_t td_http_server_n_connections(const td_http_server *server);
// Takes no new connections, closes idle ones, and closes each busy one after its response.
void td_http_server_drain(td_http_server *server);
// Drops what is left and calls closed (may be NULL) when nothing stands on the loop any more; the
// server is freed then.
void td_http_server_close(td_http_server *server, void (*closed)(void *ctx), void *ctx);

// The request. Strings live as long as the exchange.
const char *td_http_method(const td_http_exchange *x);
const char *td_http_path(const td_http_exchange *x); // percent-decoded
const char *td_http_query(const td_http_exchange *x);
const char *td_http_header(const td_http_exchange *x, const char *name); // NULL when absent
// A number that is the peer's: of its IPv4 address, or the /64 network of its IPv6 address; Unix
// sockets are one peer.
uint64_t td_http_peer(const td_http_exchange *x);
const td_buf *td_http_body(const td_http_exchange *x);
// Moves the body into out, which is overwritten; the caller frees it. Returns the bytes that count
// against max_bodies_bytes until td_http_bodies_freed.
size_t td_http_take_body(td_http_exchange *x, td_buf *out);
void td_http_bodies_freed(td_http_server *server, size_t n_bytes);

// on_gone is called once, never from inside another call, when the client leaves before the
// response is complete. The exchange is gone after it.
void td_http_on_gone(td_http_exchange *x, void (*on_gone)(void *arg), void *arg);

// Adds a header to the response that is about to begin.
void td_http_add_header(td_http_exchange *x, const char *name, const char *value);
void td_http_respond(td_http_exchange *x, int status, const char *content_type, const void *body,
                     size_t len);
// td_http_respond with a body made by write_error.
void td_http_error(td_http_exchange *x, int status, const char *message);

// A response in pieces: chunked, or to the connection's end for HTTP/1.0. Writes never block; a
// reader that falls too far behind is dropped, which the handler learns through on_gone.
void td_http_stream_begin(td_http_exchange *x, int status, const char *content_type);
void td_http_stream_write(td_http_exchange *x, const void *bytes, size_t len);
void td_http_stream_end(td_http_exchange *x);

// Server-sent events: headers leave at once; whenever nothing was written for sse_comment_ms, a
// comment is.
void td_http_sse_begin(td_http_exchange *x);
void td_http_sse_data(td_http_exchange *x, const char *data, size_t len); // one line of text
void td_http_sse_end(td_http_exchange *x);

const char *td_http_status_text(int status);

#endif
