// src/http/framing.h - the byte rules of HTTP/1 framing, checked ahead of llhttp.
// llhttp's strictness differs between versions (bare LF, chunk extensions, control characters), so
// every byte passes here first. The guard also finds where the head and the message end; llhttp
// must agree with it, and a message the two would cut differently is refused.
#ifndef TD_HTTP_FRAMING_H
#define TD_HTTP_FRAMING_H

#include <stddef.h>
#include <stdint.h>

typedef enum {
  TD_GUARD_MORE,  // all bytes are fine so far
  TD_GUARD_HEAD,  // the last byte taken ends the head; call td_http_guard_body next
  TD_GUARD_CHUNK, // the last byte taken ends a chunk's size line; n_left is the chunk's size
  TD_GUARD_DONE,  // the last byte taken ends the message
  TD_GUARD_BAD,   // status and reason say why
} td_framing_verdict;

typedef struct {
  size_t max_line_bytes; // of the request line: 414
  size_t max_head_bytes; // of all header lines, and of all trailer lines: 431
} td_framing_limits;

typedef struct {
  td_framing_limits limits;
  int state;
  int next_state;     // where an expected LF leads
  size_t n_line;      // bytes of the current line
  size_t n_head;      // bytes of header or trailer lines
  unsigned n_empty;   // blank lines before the request line
  unsigned n_digits;  // of the chunk size
  uint64_t n_left;    // bytes of body or chunk still to come
  char version[9];    // "HTTP/1.1"
  int status;         // after TD_GUARD_BAD: the answer's status code
  const char *reason; // static text
} td_http_guard;

// Ready for a request's first byte.
void td_http_guard_init(td_http_guard *guard, td_framing_limits limits);

// Scans bytes[0..len) and sets *used to how many were taken: all of them for MORE, those before the
// bad one for BAD.
td_framing_verdict td_http_guard_scan(td_http_guard *guard, const char *bytes, size_t len,
                                      size_t *used);

// After TD_GUARD_HEAD: tells what follows. DONE when there is no body, else MORE.
td_framing_verdict td_http_guard_body(td_http_guard *guard, int chunked, uint64_t content_length);

#endif
