// src/http/http_impl.h - declarations shared by server.c, conn.c and respond.c.
#pragma once

#include "base/clock.h"
#include "http/http.h"

#define TD_HTTP_MAX_LISTENERS 8

typedef struct td_http_conn td_http_conn;

typedef union {
  uv_handle_t handle;
  uv_stream_t stream;
  uv_tcp_t tcp;
  uv_pipe_t pipe;
} td_http_io;

// Clients in tables, of which two in one bucket count as one.
#define TD_HTTP_N_PEERS 4096u

struct td_http_server {
  uv_loop_t *loop;
  td_http_opts opts; // with defaults filled in
  char *url;
  char *unix_path; // unlinked when the listener closes
  uint16_t port;
  td_http_io listeners[TD_HTTP_MAX_LISTENERS];
  unsigned n_listeners;
  uint32_t stalled; // bit i: listener i holds a connection for which there was no memory
  uv_timer_t retry; // accepts those
  unsigned n_open;  // open handles on the loop: listeners, retry and connections
  td_http_conn *conns;
  size_t n_conns;
  size_t n_closing;                // connections that are closing
  int n_descriptors, n_others;     // that the process may have; that are not connections
  uint32_t n_places;               // connections that there is room for
  size_t held_bytes;               // bytes of bodies being received or taken by handlers
  size_t held_of[TD_HTTP_N_PEERS]; // the same by client, td_http_bucket_of
  bool draining, drained, closing;
  uint64_t last_accept_warning_ns;
  void (*closed)(void *ctx);
  void *closed_ctx;
  char read_buf[1 << 16]; // shared: each read is handled before the next begins
};

typedef enum {
  TD_CONN_READ,   // waiting for a request or reading it
  TD_CONN_BUSY,   // a handler has the request
  TD_CONN_FLUSH,  // the response is complete and being written
  TD_CONN_LINGER, // sending side is shut down; further input is discarded
  TD_CONN_CLOSED, // handles are closing
} td_conn_phase;

struct td_http_conn {
  td_http_io io; // first member: the handles' data point here
  uv_timer_t timer;
  uv_shutdown_t shutdown;
  td_http_server *server;
  td_http_conn *prev, *next;
  unsigned n_handles; // handles not yet closed
  td_conn_phase phase;
  td_http_parser parser;
  td_buf pending; // bytes after the current request
  const td_http_route *route;
  bool pumping, reading, eof;
  uint64_t peer;     // td_http_peer
  bool is_extra;     // accepted beyond max_connections
  bool served;       // at least one response was sent
  size_t held_bytes; // this body's share of server->held_bytes
  uint64_t body_ms;  // when the body last received bytes
  int stage;         // reading stage: idle, head, body
  uint64_t stage_since_ms;
  // the response
  td_buf extra_headers;
  bool open; // a handler has not completed its response
  bool head_sent, chunked, keep_alive, no_body;
  const char *keep_alive_text; // of a stream, borrowed; NULL: none
  uint64_t stream_ns;          // when something was last written to the stream
  void (*on_gone)(void *arg);
  void *gone_arg;
  // bytes handed to libuv; bytes whose write callback came; bytes the kernel had taken by the last
  // tick
  uint64_t n_queued, n_written, n_moved;
  uint64_t moved_ns; // when n_moved last grew or the queue was last empty
};

static inline uint64_t td_http_now_ms(void) {
  return td_clock_ns() / 1000000;
}

// server.c
bool td_http_host_is_allowed(const char *host); // host names the loopback, with or without a port
void td_http_server_conn_closed(td_http_server *server, td_http_conn *conn);

// conn.c
// Accepts from listener. The connection frees itself when its handles are closed. False: out of
// memory; call again, as libuv reports no other connection until this one is accepted.
bool td_http_conn_accept(td_http_server *server, uv_stream_t *listener);
bool td_http_conn_is_idle(const td_http_conn *conn);
// Updates the charged bytes to the body's current size.
void td_http_conn_count_body(td_http_conn *conn);
// Closes at once, without sending anything. on_gone is called later if the response is incomplete.
void td_http_conn_drop(td_http_conn *conn);
// The response is complete: continue once it is written.
void td_http_conn_finish(td_http_conn *conn);
// A complete response has been written.
void td_http_conn_flushed(td_http_conn *conn);

// places.c
// Gives a connection that was just accepted a place: another may have to leave for it, or it
// becomes an extra one.
void td_http_conn_find_place(td_http_conn *conn);
static inline uint32_t td_http_bucket_of(uint64_t peer) {
  return (uint32_t)(peer * 0x9e3779b97f4a7c15u >> 32) & (TD_HTTP_N_PEERS - 1);
}
// Counts bytes of bodies that a client's connection holds from now on, or no longer.
static inline void td_http_count_held(td_http_server *server, uint64_t peer, size_t before,
                                      size_t now) {
  server->held_bytes += now - before;
  server->held_of[td_http_bucket_of(peer)] += now - before;
}
// Identifies the client of an accepted connection, for td_http_peer.
uint64_t td_http_peer_of(const td_http_conn *conn);

// respond.c
// Queues bytes unchanged.
void td_http_conn_write(td_http_conn *conn, const void *bytes, size_t len);

// server.c, of routes:
// Finds the route for method and path. NULL: none; *allow lists the methods that the path supports
// ("" if the path is unknown).
const td_http_route *td_http_route_find(const td_http_route *routes, size_t n, const char *method,
                                        const char *path, td_buf *allow);
// Says in *out why there is no route: which methods the path supports (allow, as above), or that it
// is unknown and which path was probably meant.
void td_http_route_describe_miss(const td_http_route *routes, size_t n, const char *method,
                                 const char *path, const char *allow, td_buf *out);
