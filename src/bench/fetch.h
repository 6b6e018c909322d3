// src/bench/fetch.h - one request to a server, and its whole answer.
#pragma once

#include <stdint.h>

#include "base/buf.h"
#include "base/status.h"

typedef struct {
  const char *server;  // http://HOST:PORT
  const char *api_key; // NULL: none
  const char *path;    // as /v1/models
  const td_buf *json;  // POST this; NULL: GET
  uint64_t max_ms;     // after which it is given up; 0: never
} td_fetch_args;

// Appends the body of a response with status 200. TD_EIO: there is none; for another status err has
// the message of its body. Blocks.
td_status td_fetch(td_buf *out, const td_fetch_args *args, td_err *err);
