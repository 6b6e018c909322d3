// src/bench/http_client.h - sends one HTTP request and reports every server-sent event as it
// arrives. For `tandem bench --server`. HTTP/1.1 without TLS, one connection per request.
#pragma once

#include <llhttp.h>
#include <netinet/in.h>
#include <stdint.h>
#include <uv.h>

#include "base/buf.h"
#include "base/status.h"

#define TD_LOAD_ADDRESSES 8

typedef struct {
  char host[256];      // value of the Host header, including the port
  char base[256];      // path before /v1, without trailing slash
  const char *api_key; // NULL: none
  struct sockaddr_storage addresses[TD_LOAD_ADDRESSES]; // tried in turn until one accepts
  unsigned n_addresses;
} td_load_target;

// Parses http://HOST[:PORT][/BASE], dropping a trailing /v1, and resolves the host.
td_status td_load_target_parse(td_load_target *out, const char *url, td_err *err);

typedef struct td_load_call td_load_call;
struct td_load_call {
  // set by the caller before start
  const td_load_target *target;
  void (*on_event)(td_load_call *call, const char *data,
                   size_t len);        // called for each "data:" line; may be NULL
  void (*on_done)(td_load_call *call); // last callback; may free or restart the call
  void *ctx;
  // results
  int http_status;   // 0: no response
  uint64_t start_ns; // td_clock_ns at the start of the request
  td_buf body;       // the body, if on_event is NULL or the status is not 200
  char error[160];   // "" if the response is complete
  // private
  uv_loop_t *loop;
  unsigned n_tried; // of the target's addresses
  uv_tcp_t tcp;
  uv_connect_t connect;
  uv_write_t write;
  td_buf request, line;
  llhttp_t parser;
  llhttp_settings_t settings;
  char chunk[16384];
  int is_whole;
};

// Starts a request: GET if json is NULL, otherwise POST. path follows the target's base, as
// /v1/models. Callbacks run on the loop.
void td_load_call_start(td_load_call *call, uv_loop_t *loop, const char *path, const td_buf *json);
// Ends a request that runs; on_done follows.
void td_load_call_cancel(td_load_call *call);
void td_load_call_free(td_load_call *call);
