// src/http/framing.h - strict byte-level checks of HTTP/1 framing, done before llhttp.
// llhttp's strictness differs between versions (bare LF, chunk extensions, control characters), so
// every byte passes this guard first. The guard also finds the end of the head and of the message.
// If llhttp finds another end, the request is refused.
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef enum {
  TD_GUARD_MORE,  // all bytes are valid so far
  TD_GUARD_HEAD,  // the last byte taken ends the head; call td_http_guard_body next
  TD_GUARD_CHUNK, // the last byte taken ends a chunk's size line; n_left is the chunk's size
  TD_GUARD_DONE,  // the last byte taken ends the message
  TD_GUARD_BAD,   // invalid; see status and reason
} td_framing_verdict;

typedef struct {
  size_t max_line_bytes; // request line; status 414 if exceeded
  size_t max_head_bytes; // all header lines, and all trailer lines; status 431 if exceeded
} td_framing_limits;

typedef struct {
  td_framing_limits limits;
  int state;
  int next_state;     // state after the expected LF
  size_t n_line;      // bytes in the current line
  size_t n_head;      // bytes of header or trailer lines so far
  unsigned n_empty;   // blank lines before the request line
  unsigned n_digits;  // digits of the chunk size
  uint64_t n_left;    // remaining bytes of the body or chunk
  char version[9];    // "HTTP/1.1"
  int status;         // after TD_GUARD_BAD: status code of the response
  const char *reason; // static text
} td_http_guard;

// Prepares for the first byte of a request.
void td_http_guard_init(td_http_guard *guard, td_framing_limits limits);

// Scans bytes[0..len) and sets *used to the number taken: all for MORE, up to the invalid byte for
// BAD.
td_framing_verdict td_http_guard_scan(td_http_guard *guard, const char *bytes, size_t len,
                                      size_t *used);

// Call after TD_GUARD_HEAD to describe the body. Returns DONE if there is none, else MORE.
td_framing_verdict td_http_guard_body(td_http_guard *guard, int chunked, uint64_t content_length);
