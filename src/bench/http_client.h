// src/bench/http_client.h - one HTTP request as a client sends it, with the time of every event.
// For `tandem bench --server`; HTTP/1.1 without TLS, one connection a request.
#ifndef TD_BENCH_HTTP_CLIENT_H
#define TD_BENCH_HTTP_CLIENT_H

#include <llhttp.h>
#include <netinet/in.h>
#include <stdint.h>
#include <uv.h>

#include "base/buf.h"
#include "base/status.h"

typedef struct {
  char host[256];      // as in the Host header, with the port
  char base[256];      // path before /v1, without a slash at the end
  const char *api_key; // NULL: none
  struct sockaddr_storage address;
} td_load_target;

// Parses http://HOST[:PORT][/BASE], a trailing /v1 being part of no base, and resolves the host.
td_status td_load_target_parse(td_load_target *out, const char *url, td_err *err);

typedef struct td_load_call td_load_call;
struct td_load_call {
  // the caller's, set before start
  const td_load_target *target;
  void (*on_event)(td_load_call *call, const char *data,
                   size_t len);        // of one "data:" line; or NULL
  void (*on_done)(td_load_call *call); // last; the call may be freed or started again in it
  void *ctx;
  // results
  int http_status;   // 0: none came
  uint64_t start_ns; // td_clock_ns when the request was started
  td_buf body;       // the body, where on_event is NULL or the status is not 200
  char error[160];   // "" when the answer came whole
  // private
  uv_tcp_t tcp;
  uv_connect_t connect;
  uv_write_t write;
  td_buf request, line;
  llhttp_t parser;
  llhttp_settings_t settings;
  char chunk[16384];
  int is_whole;
};

// json NULL: GET, otherwise POST. path begins behind /v1. Callbacks come from the loop.
void td_load_call_start(td_load_call *call, uv_loop_t *loop, const char *path, const td_buf *json);
void td_load_call_free(td_load_call *call);

#endif
