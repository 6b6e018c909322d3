// src/http/parser.c - passes guarded bytes to llhttp and validates the head as a whole.
#include "http/parser.h"

#include <ctype.h>
#include <string.h>
#include <strings.h>

#include "base/query.h"

static int fail(td_http_parser *p, int status, const char *reason) {
  if (p->status == 0) {
    p->status = status;
    p->reason = reason;
  }
  return -1;
}

// llhttp callbacks. Text may arrive in pieces; each complete item is terminated by a NUL.

static int on_text(llhttp_t *llhttp, const char *at, size_t len) {
  td_http_parser *p = llhttp->data;
  if (!p->head_done) td_buf_add(&p->text, at, len);
  return 0;
}

static int on_url_complete(llhttp_t *llhttp) {
  td_http_parser *p = llhttp->data;
  td_buf_char(&p->text, 0);
  return 0;
}

static int on_field(llhttp_t *llhttp, const char *at, size_t len) {
  td_http_parser *p = llhttp->data;
  if (p->head_done) return 0; // trailers are ignored
  if (p->n_headers == TD_HTTP_MAX_HEADERS) return fail(p, 431, "too many header lines");
  if (p->headers[p->n_headers].name == 0) p->headers[p->n_headers].name = p->text.len;
  return on_text(llhttp, at, len);
}

static int on_field_complete(llhttp_t *llhttp) {
  td_http_parser *p = llhttp->data;
  if (p->head_done) return 0;
  td_buf_char(&p->text, 0);
  p->headers[p->n_headers].value = p->text.len;
  return 0;
}

static int on_value_complete(llhttp_t *llhttp) {
  td_http_parser *p = llhttp->data;
  if (p->head_done) return 0;
  size_t begin = p->headers[p->n_headers].value;
  while (p->text.len > begin && strchr(" \t", p->text.data[p->text.len - 1]))
    p->text.len--;
  td_buf_char(&p->text, 0);
  p->n_headers++;
  return 0;
}

static int on_headers_complete(llhttp_t *llhttp) {
  td_http_parser *p = llhttp->data;
  llhttp->upgrade = 0;                                   // servers may ignore Upgrade, and this one
                                                         // does
  p->keep_alive = llhttp_should_keep_alive(llhttp) != 0; // cannot be queried after the message
  p->head_done = true;
  return 0;
}

// Grows by a quarter, at most to the announced size, so that bytes not yet received take no memory.
static void make_room(td_http_parser *p, size_t len) {
  td_buf *body = &p->body;
  if (len < body->cap - body->len) return;
  size_t more = body->len / 4, left = p->announced - body->len;
  if (p->announced && more > left) more = left;
  td_buf_reserve_exact(body, more > len ? more : len);
}

static int on_body(llhttp_t *llhttp, const char *at, size_t len) {
  td_http_parser *p = llhttp->data;
  make_room(p, len);
  td_buf_add(&p->body, at, len);
  return 0;
}

static int on_message_complete(llhttp_t *llhttp) {
  td_http_parser *p = llhttp->data;
  p->message_done = true;
  return 0;
}

static const llhttp_settings_t settings = {
    .on_url = on_text,
    .on_url_complete = on_url_complete,
    .on_header_field = on_field,
    .on_header_field_complete = on_field_complete,
    .on_header_value = on_text,
    .on_header_value_complete = on_value_complete,
    .on_headers_complete = on_headers_complete,
    .on_body = on_body,
    .on_message_complete = on_message_complete,
};

void td_http_parser_init(td_http_parser *parser, const td_http_limits *limits) {
  memset(parser, 0, sizeof *parser);
  parser->limits = *limits;
  td_http_parser_reset(parser);
}

void td_http_parser_free(td_http_parser *parser) {
  td_buf_free(&parser->text);
  td_buf_free(&parser->path);
  td_buf_free(&parser->query);
  td_buf_free(&parser->host);
  td_buf_free(&parser->body);
}

void td_http_parser_reset(td_http_parser *parser) {
  td_http_parser *p = parser;
  td_framing_limits limits = {p->limits.max_line_bytes, p->limits.max_head_bytes};
  td_http_guard_init(&p->guard, limits);
  llhttp_init(&p->llhttp, HTTP_REQUEST, &settings);
  p->llhttp.data = p;
  td_buf_clear(&p->text);
  td_buf_clear(&p->path);
  td_buf_clear(&p->query);
  td_buf_clear(&p->host);
  td_buf_free(&p->body); // may be large
  memset(p->headers, 0, sizeof p->headers);
  p->n_headers = 0;
  p->started = p->head_done = p->message_done = false;
  p->has_length = p->expect_continue = p->keep_alive = p->http10 = false;
  p->announced = 0;
  p->status = 0;
  p->reason = NULL;
}

const char *td_http_parser_method(const td_http_parser *parser) {
  return llhttp_method_name((llhttp_method_t)parser->llhttp.method);
}

static const char *find_header(const td_http_parser *p, const char *name, unsigned *count) {
  const char *found = NULL;
  *count = 0;
  for (unsigned i = 0; i < p->n_headers; i++) {
    if (strcasecmp(p->text.data + p->headers[i].name, name) != 0) continue;
    if (!found) found = p->text.data + p->headers[i].value;
    ++*count;
  }
  return found;
}

const char *td_http_parser_header(const td_http_parser *parser, const char *name) {
  unsigned count;
  return find_header(parser, name, &count);
}

static int split_target(td_http_parser *p, const char *target) {
  size_t len = strcspn(target, "?");
  if (strchr(target, '#')) return fail(p, 400, "the request target holds a fragment");
  if (target[len] == '?') td_buf_str(&p->query, target + len + 1);
  if (!td_percent_decode(&p->path, target, len))
    return fail(p, 400, "malformed percent-encoding in the request target");
  return 0;
}

// Accepts origin form, absolute form (http://host/path), or "*".
static int check_target(td_http_parser *p) {
  const char *target = td_buf_text(&p->text);
  if (target[0] == '/') return split_target(p, target);
  if (strcmp(target, "*") == 0 && p->llhttp.method == HTTP_OPTIONS) return split_target(p, target);
  size_t scheme = strncasecmp(target, "http://", 7) == 0    ? 7
                  : strncasecmp(target, "https://", 8) == 0 ? 8
                                                            : 0;
  if (scheme == 0) return fail(p, 400, "malformed request target");
  size_t authority = strcspn(target + scheme, "/?");
  if (authority == 0) return fail(p, 400, "malformed request target");
  td_buf_clear(&p->host);
  td_buf_add(&p->host, target + scheme, authority);
  const char *path = target + scheme + authority;
  return split_target(p, *path == '/' ? path : "/");
}

static int check_host(td_http_parser *p) {
  unsigned count;
  const char *host = find_header(p, "host", &count);
  if (count > 1) return fail(p, 400, "several Host headers");
  if (count == 0) return p->http10 ? 0 : fail(p, 400, "the Host header is missing");
  if (host[0] == 0 && !p->http10) return fail(p, 400, "the Host header is empty");
  for (const char *c = host; *c; c++)
    if (!isalnum((unsigned char)*c) && !strchr("-._~%!$&'()*+,;=:[]", *c))
      return fail(p, 400, "malformed Host header");
  td_buf_str(&p->host, host);
  return 0;
}

static int check_framing(td_http_parser *p) {
  unsigned n_coding, n_length;
  const char *coding = find_header(p, "transfer-encoding", &n_coding);
  find_header(p, "content-length", &n_length);
  p->has_length = n_coding + n_length > 0;
  if (n_length > 1) return fail(p, 400, "several Content-Length headers");
  if (n_coding + n_length > 1) return fail(p, 400, "Content-Length beside Transfer-Encoding");
  if (n_coding > 0 && (strcasecmp(coding, "chunked") != 0 || p->http10))
    return fail(p, 400, "unknown transfer coding: only chunked is supported");
  if (n_coding > 0 && !(p->llhttp.flags & F_CHUNKED)) return fail(p, 400, "malformed framing");
  if (n_length > 0 && p->llhttp.content_length > p->limits.max_body_bytes)
    return fail(p, 413, "the request body is too large");
  return 0;
}

static int check_expect(td_http_parser *p) {
  const char *expect = td_http_parser_header(p, "expect");
  if (!expect || p->http10) return 0;
  if (strcasecmp(expect, "100-continue") != 0) return fail(p, 417, "unknown expectation");
  p->expect_continue = true;
  return 0;
}

static int check_head(td_http_parser *p) {
  p->http10 = p->llhttp.http_minor == 0;
  if (p->llhttp.method == HTTP_CONNECT) return fail(p, 400, "CONNECT is not supported");
  // The path first: who answers an error chooses its form by it.
  if (check_host(p) || check_target(p) || check_framing(p)) return -1;
  unsigned n_authorization; // reject several: one could be checked and another used
  find_header(p, "authorization", &n_authorization);
  if (n_authorization > 1) return fail(p, 400, "several Authorization headers");
  return check_expect(p);
}

// Passes the bytes the guard took to llhttp, which must end head and message at the same places.
static int run_llhttp(td_http_parser *p, const char *bytes, size_t len) {
  llhttp_errno_t error = llhttp_execute(&p->llhttp, bytes, len);
  if (error != HPE_OK) fail(p, 400, llhttp_get_error_reason(&p->llhttp));
  if (p->text.failed || p->body.failed || p->path.failed || p->query.failed || p->host.failed)
    fail(p, 503, "out of memory");
  return p->status == 0 ? 0 : -1;
}

static td_http_event head_end(td_http_parser *p) {
  if (!p->head_done) fail(p, 400, "malformed request head");
  if (p->status != 0 || check_head(p)) return TD_HTTP_BAD;
  if (!(p->llhttp.flags & F_CHUNKED)) p->announced = (size_t)p->llhttp.content_length;
  td_http_guard_body(&p->guard, (p->llhttp.flags & F_CHUNKED) != 0, p->llhttp.content_length);
  return TD_HTTP_HEAD;
}

td_http_event td_http_parser_feed(td_http_parser *parser, const char *bytes, size_t len,
                                  size_t *used) {
  td_http_parser *p = parser;
  *used = 0;
  if (p->status != 0) return TD_HTTP_BAD;
  // A request without a body is complete after its head.
  if (p->message_done) return TD_HTTP_DONE;
  p->started = p->started || len > 0;
  while (*used < len) {
    size_t n;
    td_framing_verdict verdict = td_http_guard_scan(&p->guard, bytes + *used, len - *used, &n);
    // Also passes the bytes before an invalid one, so that the first error is the one reported.
    if (run_llhttp(p, bytes + *used, n)) return TD_HTTP_BAD;
    *used += n;
    if (verdict == TD_GUARD_BAD) {
      fail(p, p->guard.status, p->guard.reason);
      return TD_HTTP_BAD;
    }
    if (verdict == TD_GUARD_HEAD) return head_end(p);
    if (p->message_done != (verdict == TD_GUARD_DONE)) {
      fail(p, 400, "malformed request body");
      return TD_HTTP_BAD;
    }
    if (verdict == TD_GUARD_DONE) return TD_HTTP_DONE;
    if (verdict == TD_GUARD_CHUNK && p->guard.n_left > p->limits.max_body_bytes - p->body.len) {
      fail(p, 413, "the request body is too large");
      return TD_HTTP_BAD;
    }
  }
  return TD_HTTP_MORE;
}
