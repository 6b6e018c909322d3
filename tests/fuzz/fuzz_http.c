// tests/fuzz/fuzz_http.c - request bytes through the connection's parser.
// What a request means must not depend on how its bytes are cut into reads: the whole input and the
// same input byte by byte must give the same events.
#include <stdint.h>
#include <string.h>

#include "http/parser.h"

// What was seen of an input, folded into one number.
typedef struct {
  uint64_t hash;
  unsigned n_requests;
  int status;
} outcome;

static void fold(outcome *o, const td_buf *buf) {
  for (size_t i = 0; i < buf->len; i++) {
    o->hash = (o->hash ^ (uint8_t)buf->data[i]) * 1099511628211u;
  }
  o->hash = (o->hash ^ buf->len) * 1099511628211u;
}

static outcome parse(const char *bytes, size_t len, size_t step) {
  td_http_limits limits = {.max_line_bytes = 64, .max_head_bytes = 512, .max_body_bytes = 256};
  td_http_parser parser;
  td_http_parser_init(&parser, &limits);
  outcome o = {0};
  size_t at = 0;
  for (;;) {
    size_t n = len - at < step ? len - at : step, used;
    td_http_event event = td_http_parser_feed(&parser, bytes + at, n, &used);
    TD_CHECK(used <= n);
    TD_CHECK(parser.body.len <= limits.max_body_bytes);
    at += used;
    if (event == TD_HTTP_BAD) {
      TD_CHECK(parser.status >= 400 && parser.reason);
      o.status = parser.status;
      break;
    }
    if (event == TD_HTTP_HEAD) {
      fold(&o, &parser.path);
      fold(&o, &parser.host);
      o.hash += parser.keep_alive;
    }
    if (event == TD_HTTP_DONE) {
      fold(&o, &parser.body);
      o.n_requests++;
      td_http_parser_reset(&parser);
    }
    if (event == TD_HTTP_MORE && at == len) break;
  }
  td_http_parser_free(&parser);
  return o;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  outcome whole = parse((const char *)data, size, SIZE_MAX);
  outcome bytes = parse((const char *)data, size, 1);
  TD_CHECK(whole.hash == bytes.hash && whole.n_requests == bytes.n_requests);
  TD_CHECK(whole.status == bytes.status);
  return 0;
}
