// src/http/http_impl.h - what server.c, conn.c, response.c and route.c share.
#ifndef TD_HTTP_HTTP_IMPL_H
#define TD_HTTP_HTTP_IMPL_H

#include "http/http.h"

#define TD_HTTP_MAX_LISTENERS 8

typedef struct td_http_conn td_http_conn;

typedef union {
  uv_handle_t handle;
  uv_stream_t stream;
  uv_tcp_t tcp;
  uv_pipe_t pipe;
} td_http_io;

struct td_http_server {
  uv_loop_t *loop;
  td_http_opts opts; // defaults filled in
  char *url;
  char *unix_path; // removed when the listener closes
  uint16_t port;
  td_http_io listeners[TD_HTTP_MAX_LISTENERS];
  unsigned n_listeners;
  unsigned n_open; // handles of ours on the loop, listeners and connections
  td_http_conn *conns;
  size_t n_conns;
  size_t n_closing;  // of them
  size_t held_bytes; // of bodies that are being received or that handlers have taken
  bool draining, drained, closing;
  uint64_t last_accept_warning_ns;
  void (*closed)(void *ctx);
  void *closed_ctx;
  char read_buf[1 << 16]; // one read is handled before the next begins
};

typedef enum {
  TD_CONN_READ,   // a request is awaited or being read
  TD_CONN_BUSY,   // a handler has it
  TD_CONN_FLUSH,  // the response is complete and being written
  TD_CONN_LINGER, // our side is shut down; what the client still sends is read over
  TD_CONN_CLOSED, // handles are closing
} td_conn_phase;

struct td_http_conn {
  td_http_io io; // first: the handles' data point here
  uv_timer_t timer;
  uv_shutdown_t shutdown;
  td_http_server *server;
  td_http_conn *prev, *next;
  unsigned n_handles; // not yet closed
  td_conn_phase phase;
  td_http_parser parser;
  td_buf pending; // bytes behind the current request
  const td_http_route *route;
  bool pumping, reading, eof;
  bool is_extra;     // beyond max_connections
  bool served;       // a request has been answered
  size_t held_bytes; // of the server's: the body's
  uint64_t body_ms;  // when its last bytes came
  int stage;         // of reading: idle, head, body
  uint64_t stage_since_ms;
  // the response
  td_buf extra_headers;
  bool open; // a handler owes an answer
  bool head_sent, chunked, keep_alive, no_body;
  bool sse;
  uint64_t sse_ns; // of an event stream: when it was last written to
  void (*on_gone)(void *arg);
  void *gone_arg;
  // bytes handed to libuv, those whose callbacks came, and those the kernel took by the last tick
  uint64_t n_queued, n_written, n_moved;
  uint64_t moved_ns; // when n_moved last grew, or the queue was last empty
};

// server.c
bool td_http_host_is_allowed(const char *host); // names the loopback, with or without a port
void td_http_server_conn_closed(td_http_server *server, td_http_conn *conn);

// conn.c
// Accepts from listener; the connection belongs to the loop from then on.
void td_http_conn_accept(td_http_server *server, uv_stream_t *listener);
bool td_http_conn_is_idle(const td_http_conn *conn);
// Counts the body as it is now.
void td_http_conn_count_body(td_http_conn *conn);
// Closes without another byte. on_gone is called later when the response is incomplete.
void td_http_conn_drop(td_http_conn *conn);
// The response is complete: go on when it is written.
void td_http_conn_finish(td_http_conn *conn);
// A complete response is written.
void td_http_conn_flushed(td_http_conn *conn);

// response.c
// Queues bytes as they are.
void td_http_conn_write(td_http_conn *conn, const void *bytes, size_t len);

// route.c
// Finds the route of a method and path. NULL: none, and *allow tells the methods that the path
// knows ("" when the path itself is unknown).
const td_http_route *td_http_route_find(const td_http_route *routes, size_t n, const char *method,
                                        const char *path, td_buf *allow);

#endif
