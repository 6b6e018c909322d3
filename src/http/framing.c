// src/http/framing.c - the framing guard: a state machine over a request's bytes. Grammar: RFC
// 9112.
#include "http/framing.h"

#include <stdbool.h>
#include <string.h>

#include "base/str.h"

enum {
  S_START,
  S_METHOD,
  S_TARGET,
  S_VERSION,
  S_LF,         // after CR: LF must follow, then next_state
  S_LINE_START, // start of a header line, or CR of the blank line
  S_NAME,
  S_VALUE,
  S_HEAD_LF, // LF of the blank line
  S_HEAD_END,
  S_BODY,
  S_CHUNK_SIZE,
  S_CHUNK_EXT,
  S_CHUNK_EXT_QUOTED,
  S_CHUNK_LF,
  S_CHUNK_DATA,
  S_CHUNK_CR,
  S_TRAILER_START,
  S_TRAILER_NAME,
  S_TRAILER_VALUE,
  S_TRAILER_LF,
  S_DONE,
  S_BAD,
};

#define MAX_METHOD_BYTES    24
#define MAX_CHUNK_EXT_BYTES 512
#define MAX_EMPTY_LINES     4

static bool is_token(unsigned char c) {
  if ((c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) return true;
  return c != 0 && strchr("!#$%&'*+-.^_`|~", c) != NULL;
}

// Bytes allowed in a header value: printable ASCII, tab, and above ASCII.
static bool is_value(unsigned char c) {
  return c == '\t' || (c >= ' ' && c != 0x7f);
}

static td_framing_verdict bad(td_http_guard *g, int status, const char *reason) {
  g->state = S_BAD;
  g->status = status;
  g->reason = reason;
  return TD_GUARD_BAD;
}

static td_framing_verdict go(td_http_guard *g, int state) {
  g->state = state;
  g->n_line = 0;
  return TD_GUARD_MORE;
}

void td_http_guard_init(td_http_guard *guard, td_framing_limits limits) {
  memset(guard, 0, sizeof *guard);
  guard->limits = limits;
  guard->state = S_START;
}

static td_framing_verdict expect_lf(td_http_guard *g, int next_state) {
  g->state = S_LF;
  g->next_state = next_state;
  return TD_GUARD_MORE;
}

static td_framing_verdict version_end(td_http_guard *g) {
  g->version[8] = 0;
  if (g->n_line != 8 || memcmp(g->version, "HTTP/", 5) != 0 || g->version[6] != '.' ||
      g->version[5] < '0' || g->version[5] > '9' || g->version[7] < '0' || g->version[7] > '9')
    return bad(g, 400, "the request line does not end with HTTP/1.1");
  if (strcmp(g->version, "HTTP/2.0") == 0) return bad(g, 400, "HTTP/2 is not supported");
  if (strcmp(g->version, "HTTP/1.1") != 0 && strcmp(g->version, "HTTP/1.0") != 0)
    return bad(g, 400, "only HTTP/1.1 and HTTP/1.0 are supported");
  return expect_lf(g, S_LINE_START);
}

static td_framing_verdict scan_start(td_http_guard *g, unsigned char c) {
  if (c == '\r' && g->n_empty++ < MAX_EMPTY_LINES) return expect_lf(g, S_START);
  if (c == 0x16) return bad(g, 400, "this port speaks HTTP, not TLS: use http:// in the URL");
  if (!is_token(c)) return bad(g, 400, "the request does not begin with a method");
  g->n_line = 1;
  g->state = S_METHOD;
  return TD_GUARD_MORE;
}

static td_framing_verdict scan_request_line(td_http_guard *g, unsigned char c) {
  if (++g->n_line > g->limits.max_line_bytes) return bad(g, 414, "the request line is too long");
  if (g->state == S_METHOD) {
    if (c == ' ') {
      g->state = S_TARGET;
      return TD_GUARD_MORE;
    }
    if (!is_token(c) || g->n_line > MAX_METHOD_BYTES) return bad(g, 400, "malformed method");
    return TD_GUARD_MORE;
  }
  if (c == ' ') return go(g, S_VERSION);
  if (c <= ' ' || c >= 0x7f) return bad(g, 400, "the request target holds a byte it must not");
  return TD_GUARD_MORE;
}

static td_framing_verdict scan_version(td_http_guard *g, unsigned char c) {
  if (c == '\r') return version_end(g);
  if (g->n_line >= 8) return bad(g, 400, "the request line does not end with HTTP/1.1");
  g->version[g->n_line++] = (char)c;
  return TD_GUARD_MORE;
}

// Header lines, and trailer lines after the last chunk.
static td_framing_verdict scan_field(td_http_guard *g, unsigned char c) {
  bool trailer = g->state >= S_TRAILER_START;
  if (++g->n_head > g->limits.max_head_bytes) return bad(g, 431, "the header is too large");
  switch (g->state) {
  case S_LINE_START:
  case S_TRAILER_START:
    if (c == '\r') return go(g, trailer ? S_TRAILER_LF : S_HEAD_LF);
    if (c == ' ' || c == '\t') return bad(g, 400, "a header line is folded");
    if (!is_token(c)) return bad(g, 400, "malformed header line");
    return go(g, trailer ? S_TRAILER_NAME : S_NAME);
  case S_NAME:
  case S_TRAILER_NAME:
    if (c == ':') return go(g, trailer ? S_TRAILER_VALUE : S_VALUE);
    if (c == ' ' || c == '\t') return bad(g, 400, "white space before a header's colon");
    if (!is_token(c)) return bad(g, 400, "malformed header name");
    return TD_GUARD_MORE;
  default:
    if (c == '\r') return expect_lf(g, trailer ? S_TRAILER_START : S_LINE_START);
    if (!is_value(c)) return bad(g, 400, "a header value holds a control character");
    return TD_GUARD_MORE;
  }
}

static td_framing_verdict scan_chunk_size(td_http_guard *g, unsigned char c) {
  int digit = td_hex_digit((char)c);
  if (digit >= 0) {
    if (++g->n_digits > 15) return bad(g, 400, "a chunk size is too large");
    g->n_left = g->n_left * 16 + (uint64_t)digit;
    return TD_GUARD_MORE;
  }
  if (g->n_digits == 0) return bad(g, 400, "malformed chunk size");
  if (c == '\r') return go(g, S_CHUNK_LF);
  if (c == ';') return go(g, S_CHUNK_EXT);
  return bad(g, 400, "malformed chunk size");
}

static td_framing_verdict scan_chunk_ext(td_http_guard *g, unsigned char c) {
  if (++g->n_line > MAX_CHUNK_EXT_BYTES) return bad(g, 400, "a chunk extension is too long");
  if (c == '"') {
    g->state = g->state == S_CHUNK_EXT ? S_CHUNK_EXT_QUOTED : S_CHUNK_EXT;
    return TD_GUARD_MORE;
  }
  if (c == '\r' && g->state == S_CHUNK_EXT) return go(g, S_CHUNK_LF);
  if (!is_value(c)) return bad(g, 400, "malformed chunk extension");
  return TD_GUARD_MORE;
}

static td_framing_verdict chunk_begin(td_http_guard *g) {
  g->n_digits = 0;
  if (g->n_left > 0) {
    g->state = S_CHUNK_DATA;
    return TD_GUARD_CHUNK;
  }
  g->n_head = 0;
  return go(g, S_TRAILER_START);
}

static td_framing_verdict scan_byte(td_http_guard *g, unsigned char c) {
  switch (g->state) {
  case S_START: return scan_start(g, c);
  case S_METHOD:
  case S_TARGET: return scan_request_line(g, c);
  case S_VERSION: return scan_version(g, c);
  case S_LINE_START:
  case S_NAME:
  case S_VALUE:
  case S_TRAILER_START:
  case S_TRAILER_NAME:
  case S_TRAILER_VALUE: return scan_field(g, c);
  case S_CHUNK_SIZE: return scan_chunk_size(g, c);
  case S_CHUNK_EXT:
  case S_CHUNK_EXT_QUOTED: return scan_chunk_ext(g, c);
  case S_CHUNK_CR:
    if (c != '\r') return bad(g, 400, "a chunk is longer than its size");
    return expect_lf(g, S_CHUNK_SIZE);
  default: break;
  }
  // States that expect the LF of a CR LF.
  if (c != '\n') return bad(g, 400, "a carriage return without its line feed");
  switch (g->state) {
  case S_LF: return go(g, g->next_state);
  case S_HEAD_LF: g->state = S_HEAD_END; return TD_GUARD_HEAD;
  case S_CHUNK_LF: return chunk_begin(g);
  case S_TRAILER_LF: g->state = S_DONE; return TD_GUARD_DONE;
  default: return bad(g, 400, "bytes after the end of the request");
  }
}

// Body bytes are not inspected: takes as many as remain.
static size_t skip_data(td_http_guard *g, size_t len) {
  size_t n = g->n_left < len ? (size_t)g->n_left : len;
  g->n_left -= n;
  return n;
}

td_framing_verdict td_http_guard_scan(td_http_guard *guard, const char *bytes, size_t len,
                                      size_t *used) {
  size_t i = 0;
  td_framing_verdict verdict = guard->state == S_BAD ? TD_GUARD_BAD : TD_GUARD_MORE;
  while (i < len && verdict == TD_GUARD_MORE) {
    if (guard->state == S_BODY) {
      i += skip_data(guard, len - i);
      if (guard->n_left == 0) {
        guard->state = S_DONE;
        verdict = TD_GUARD_DONE;
      }
    } else if (guard->state == S_CHUNK_DATA) {
      i += skip_data(guard, len - i);
      if (guard->n_left == 0) guard->state = S_CHUNK_CR;
    } else {
      verdict = scan_byte(guard, (unsigned char)bytes[i++]);
    }
  }
  *used = verdict == TD_GUARD_BAD && i > 0 ? i - 1 : i;
  return verdict;
}

td_framing_verdict td_http_guard_body(td_http_guard *guard, int chunked, uint64_t content_length) {
  if (chunked) {
    guard->state = S_CHUNK_SIZE;
    guard->n_left = 0;
    return TD_GUARD_MORE;
  }
  guard->n_left = content_length;
  guard->state = content_length > 0 ? S_BODY : S_DONE;
  return content_length > 0 ? TD_GUARD_MORE : TD_GUARD_DONE;
}
