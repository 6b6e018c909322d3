// src/http/http.h - an HTTP/1.1 server on a libuv loop. It handles framing, limits, timers,
// keep-alive, pipelining, slow readers and draining; handlers give requests their meaning. Thread:
// the loop's only.
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "base/buf.h"
#include "base/status.h"
#include "http/parser.h"

typedef struct td_http_server td_http_server;

// One request and its response. Valid from the handler's call until the response is complete
// (td_http_respond, td_http_error, td_http_stream_end, td_http_sse_end) or on_gone has been called.
typedef struct td_http_conn td_http_exchange;

typedef struct {
  const char *method;                             // "GET" also handles HEAD
  const char *path;                               // exact, or "/prefix/*" for everything below
  void (*handle)(void *ctx, td_http_exchange *x); // called when the request is complete
  bool always;                                    // served even beyond max_connections
} td_http_route;

typedef struct {
  const char *host;            // a name, an IPv4 or IPv6 address, or "unix:/path"
  uint16_t port;               // 0: any free one
  const td_http_route *routes; // borrowed
  size_t n_routes;
  void *ctx; // passed to every callback

  // Called first with every request whose head is well-formed; may add headers to the response. May
  // be NULL.
  void (*on_request)(void *ctx, td_http_exchange *x);
  // Called when a request's head is complete and its route was found, before the body is read.
  // Returns false if it has already responded (401). May be NULL.
  bool (*on_head)(void *ctx, td_http_exchange *x);
  // Writes the JSON body of an error response; may add headers. The head of x may be malformed or
  // incomplete: its path may be "". NULL: {"error":{"message":...}}.
  void (*write_error)(void *ctx, td_http_exchange *x, td_buf *out, int status, const char *message);
  // Called once after td_http_server_drain, when no connection is left. May be NULL.
  void (*on_drained)(void *ctx);

  // Accept only Host headers that name the loopback, else 403. Protects against DNS rebinding.
  bool loopback_hosts_only;

  // Origin whose pages may use the server from a browser ("*": any): enables CORS headers and
  // responses to OPTIONS. NULL: none.
  const char *cors;

  // 0 selects the default
  td_http_limits limits; // 8 KiB, 32 KiB, 32 MiB
  // 256 MiB: total of all bodies over 64 KiB, three quarters of one client (td_http_peer); 503 if
  // exceeded
  size_t max_bodies_bytes;
  // 8192, or fewer as descriptors become scarce. One more connection replaces one that waits for a
  // request: the longest idle of the client with most of them, or one whose request arrives slowly.
  // If there is none, it gets 503 except on routes with `always`.
  uint32_t max_connections;
  size_t max_write_queue_bytes; // 1 MiB: a streaming client is dropped when more bytes are queued
                                // for it
  uint32_t head_timeout_ms;     // 10 s from the first byte of a request, then 408
  uint32_t body_timeout_ms;     // 30 s, plus 1 ms per 64 bytes received, then 408
  uint32_t idle_timeout_ms;     // 75 s between requests
  uint32_t write_timeout_ms;    // 30 s without progress by the reader
  uint32_t sse_comment_ms;      // 2 s without an event before a stream's keep-alive is sent
} td_http_opts;

// Binds and listens. On success the caller owns *out; on error *out is NULL.
td_status td_http_server_open(td_http_server **out, uv_loop_t *loop, const td_http_opts *opts,
                              td_err *err);
// "http://127.0.0.1:8080" or "unix:/path".
const char *td_http_server_url(const td_http_server *server);
uint16_t td_http_server_port(const td_http_server *server); // 0 for a Unix socket
bool td_http_server_is_loopback(const char *host);          // host is unreachable from other
                                                            // machines
size_t td_http_server_n_connections(const td_http_server *server);
// Stops accepting, closes idle connections, and closes each busy one after its response.
void td_http_server_drain(td_http_server *server);
// Drops all connections. When no handle is left on the loop, frees the server and calls `closed`
// (may be NULL).
void td_http_server_close(td_http_server *server, void (*closed)(void *ctx), void *ctx);

// Index in opts.routes of the request's route.
size_t td_http_route_of(const td_http_exchange *x);
// Properties of the request. Strings live as long as the exchange.
const char *td_http_method(const td_http_exchange *x);
const char *td_http_path(const td_http_exchange *x);  // percent-decoded
const char *td_http_query(const td_http_exchange *x); // for td_query_get; "": none
const char *td_http_header(const td_http_exchange *x, const char *name); // NULL when absent
// Identifies the client: its IPv4 address, or the /64 network of its IPv6 address. All Unix socket
// clients share one value.
uint64_t td_http_peer(const td_http_exchange *x);
const td_buf *td_http_body(const td_http_exchange *x);
// What a body counts against max_bodies_bytes.
typedef struct {
  uint64_t peer;
  size_t n_bytes;
} td_http_held;
// Moves the body into out, which is overwritten; the caller frees it. It counts until what is
// returned is passed to td_http_bodies_freed, which makes that nothing.
td_http_held td_http_take_body(td_http_exchange *x, td_buf *out);
void td_http_bodies_freed(td_http_server *server, td_http_held *held);

// Registers on_gone, which is called once, never from inside another call, if the client
// disconnects before the response is complete. The exchange is invalid afterwards.
void td_http_on_gone(td_http_exchange *x, void (*on_gone)(void *arg), void *arg);

// Adds a header to the response, before it begins.
void td_http_add_header(td_http_exchange *x, const char *name, const char *value);
// The value of a header added to the response, appended to out. False: there is none of that name.
bool td_http_added_header(const td_http_exchange *x, const char *name, td_buf *out);
void td_http_respond(td_http_exchange *x, int status, const char *content_type, const void *body,
                     size_t len);
// td_http_respond with a body from write_error.
void td_http_error(td_http_exchange *x, int status, const char *message);

// A response (200) in pieces: chunked, or for HTTP/1.0 delimited by closing the connection. Writes
// never block. A client with too much queued is dropped, which the handler learns through on_gone.
void td_http_stream_begin(td_http_exchange *x, const char *content_type);
void td_http_stream_write(td_http_exchange *x, const void *bytes, size_t len);
void td_http_stream_end(td_http_exchange *x);
// From now on text (borrowed until the stream ends) is sent whenever nothing was written for
// sse_comment_ms.
void td_http_stream_keep_alive(td_http_exchange *x, const char *text);

// Server-sent events. Headers are sent at once; a comment is sent whenever nothing was written for
// sse_comment_ms.
void td_http_sse_begin(td_http_exchange *x);
void td_http_sse_data(td_http_exchange *x, const char *data, size_t len); // one line of text
void td_http_sse_end(td_http_exchange *x);
// Closes the connection before the response is complete. on_gone is called later.
void td_http_abort(td_http_exchange *x);
