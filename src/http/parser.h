// src/http/parser.h - parses one request from bytes: runs the guard and llhttp in lockstep,
// enforces limits, keeps the header table. Independent of sockets.
#pragma once

#include <llhttp.h>
#include <stdbool.h>

#include "base/buf.h"
#include "http/framing.h"

#define TD_HTTP_MAX_HEADERS 100

typedef struct {
  size_t max_line_bytes; // request line; status 414 if exceeded
  size_t max_head_bytes; // all header lines; status 431 if exceeded
  size_t max_body_bytes; // status 413 if exceeded
} td_http_limits;

typedef enum {
  TD_HTTP_MORE, // all bytes were taken
  TD_HTTP_HEAD, // the head is complete and valid; continue with the body
  TD_HTTP_DONE, // the request is complete
  TD_HTTP_BAD,  // invalid; see status and reason; the connection must close
} td_http_event;

typedef struct {
  td_http_limits limits;
  td_http_guard guard;
  llhttp_t llhttp;
  td_buf text; // target, header names and values, each NUL-terminated
  struct {
    size_t name, value; // offsets in text
  } headers[TD_HTTP_MAX_HEADERS];
  unsigned n_headers;
  td_buf path;  // percent-decoded, without the query
  td_buf query; // as sent, without '?'
  td_buf host;  // from the Host header or an absolute target
  td_buf body;
  size_t announced;     // body bytes by Content-Length; 0: unknown
  bool started;         // a byte of this request has arrived
  bool head_done;       // llhttp has seen the end of the head
  bool message_done;    // llhttp has seen the end of the message
  bool has_length;      // Content-Length or Transfer-Encoding was given
  bool expect_continue; // the client waits for 100 Continue
  bool keep_alive, http10;
  int status; // after TD_HTTP_BAD
  const char *reason;
} td_http_parser;

void td_http_parser_init(td_http_parser *parser, const td_http_limits *limits);
void td_http_parser_free(td_http_parser *parser);
// Prepares for the next request of the connection; keeps memory.
void td_http_parser_reset(td_http_parser *parser);

// Takes bytes up to the next event and sets *used to their number. After DONE call
// td_http_parser_reset first.
td_http_event td_http_parser_feed(td_http_parser *parser, const char *bytes, size_t len,
                                  size_t *used);

const char *td_http_parser_method(const td_http_parser *parser);
// The first header of that name (case-insensitive). NULL when absent.
const char *td_http_parser_header(const td_http_parser *parser, const char *name);
