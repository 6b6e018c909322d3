// tests/unit/test_http.c - the server over real sockets: framing rules, limits, timers, order.
#include "base/query.h"
#include "http_testing.h"

#define HOST "Host: localhost\r\n"

static fixture shared;

static int start_shared(void **state) {
  start_server(&shared, (td_http_opts){.loopback_hosts_only = true, .head_timeout_ms = 5000});
  *state = &shared;
  return 0;
}

static int stop_shared(void **state) {
  stop_server(*state);
  return 0;
}

static void expect_status(const fixture *f, const char *request, size_t len, int status) {
  td_buf response = exchange(f, request, len);
  if (status_of(&response) != status || strstr(td_buf_text(&response), "<not closed>")) {
    fail_msg("wanted %d and a close for:\n%.200s\ngot:\n%.400s", status, request,
             td_buf_text(&response));
  }
  if (status >= 400) assert_non_null(strstr(td_buf_text(&response), "{\"error\":{\"message\":"));
  td_buf_free(&response);
}

typedef struct {
  int status;
  const char *request;
  size_t len;
} bad_request;
#define BAD(status, text)                                                                          \
  { (status), (text), sizeof(text) - 1 }

static void refuses_bad_requests(void **state) {
  static const bad_request list[] = {
      BAD(400, "GET /hello HTTP/1.1\r\n\r\n"),
      BAD(400, "GET /hello HTTP/1.1\r\n" HOST HOST "\r\n"),
      BAD(400, "GET /hello HTTP/1.1\r\nHost: a b\r\n\r\n"),
      BAD(400, "GET /hello HTTP/1.1\r\nHost:\r\n\r\n"),
      BAD(400, "GET /hello HTTP/1.1\r\nHost: user@localhost\r\n\r\n"),
      BAD(400, "GET /hello HTTP/1.1\r\n" HOST
               "Authorization: Bearer a\r\nauthorization: Bearer b\r\n\r\n"),
      BAD(403, "GET /hello HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n"),
      BAD(403, "GET /hello HTTP/1.1\r\nHost: localhost.evil.example:80\r\n\r\n"),
      BAD(403, "GET http://evil.example/hello HTTP/1.1\r\n" HOST "\r\n"),
      BAD(400, "POST /echo HTTP/1.1\r\n" HOST "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n"
               "\r\n0\r\n\r\n"),
      BAD(400, "POST /echo HTTP/1.1\r\n" HOST "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n"
               "\r\n0\r\n\r\n"),
      BAD(400, "POST /echo HTTP/1.1\r\n" HOST "Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd"),
      BAD(400, "POST /echo HTTP/1.1\r\n" HOST "Content-Length: 3, 4\r\n\r\nabcd"),
      BAD(400, "POST /echo HTTP/1.1\r\n" HOST "Content-Length: -1\r\n\r\n"),
      BAD(400, "POST /echo HTTP/1.1\r\n" HOST "Content-Length: +3\r\n\r\nabc"),
      BAD(400, "POST /echo HTTP/1.1\r\n" HOST "Content-Length: 0x3\r\n\r\nabc"),
      BAD(400, "POST /echo HTTP/1.1\r\n" HOST "Content-Length:\r\n\r\n"),
      BAD(400, "POST /echo HTTP/1.1\r\n" HOST "Content-Length: 3 3\r\n\r\nabc"),
      BAD(400, "POST /echo HTTP/1.1\r\n" HOST "Content-Length: 99999999999999999999999\r\n\r\n"),
      BAD(400, "POST /echo HTTP/1.1\r\n" HOST "Transfer-Encoding: gzip\r\n\r\n"),
      BAD(400, "POST /echo HTTP/1.1\r\n" HOST "Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
      BAD(400, "POST /echo HTTP/1.1\r\n" HOST "Transfer-Encoding: chunked, chunked\r\n\r\n"),
      BAD(400, "POST /echo HTTP/1.1\r\n" HOST "Transfer-Encoding: chunkedx\r\n\r\n0\r\n\r\n"),
      BAD(400, "POST /echo HTTP/1.1\r\n" HOST "Transfer-Encoding: \vchunked\r\n\r\n0\r\n\r\n"),
      BAD(400, "POST /echo HTTP/1.1\r\n" HOST "Transfer-Encoding:\r\n\r\n"),
      BAD(400, "POST /echo HTTP/1.0\r\n" HOST "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
      BAD(400, "GET /hello HTTP/1.1\r\nHost : localhost\r\n\r\n"),
      BAD(400, "GET /hello HTTP/1.1\r\n" HOST "X: a\r\n b\r\n\r\n"),
      BAD(400, "GET /hello HTTP/1.1\r\n X: a\r\n" HOST "\r\n"),
      BAD(400, "GET /hello HTTP/1.1\nHost: localhost\n\n"),
      BAD(400, "GET /hello HTTP/1.1\r\nHost: localhost\n\r\n"),
      BAD(400, "GET /hello HTTP/1.1\r\nHost: localhost\r\n\n"),
      BAD(400, "GET /hello HTTP/1.1\r\n" HOST "X: a\rb\r\n\r\n"),
      BAD(400, "GET /hello HTTP/1.1\r" HOST "\r\n"),
      BAD(400, "GET /hello HTTP/1.1\r\n" HOST "X: a\0b\r\n\r\n"),
      BAD(400, "GET /hello HTTP/1.1\r\n" HOST "X\0: ab\r\n\r\n"),
      BAD(400, "GET /hello HTTP/1.1\r\n" HOST "X: a\x01z\r\n\r\n"),
      BAD(400, "GET /hello HTTP/1.1\r\n" HOST ": novalue\r\n\r\n"),
      BAD(400, "GET /hello HTTP/1.1\r\n" HOST "no colon\r\n\r\n"),
      BAD(400, "GET /hello HTTP/1.1\r\n" HOST "nocolon\r\n\r\n"),
      BAD(400, "GET /he\0llo HTTP/1.1\r\n" HOST "\r\n"),
      BAD(400, "GET /hello\x80 HTTP/1.1\r\n" HOST "\r\n"),
      BAD(400, "GET /path/%00 HTTP/1.1\r\n" HOST "\r\n"),
      BAD(400, "GET /path/%zz HTTP/1.1\r\n" HOST "\r\n"),
      BAD(400, "GET /path/%4 HTTP/1.1\r\n" HOST "\r\n"),
      BAD(400, "GET hello HTTP/1.1\r\n" HOST "\r\n"),
      BAD(400, "GET  /hello HTTP/1.1\r\n" HOST "\r\n"),
      BAD(400, "GET /hello  HTTP/1.1\r\n" HOST "\r\n"),
      BAD(400, "GET /hello HTTP/1.1 \r\n" HOST "\r\n"),
      BAD(400, "GET /hello\r\n" HOST "\r\n"),
      BAD(400, "GET /hello HTTP/2.0\r\n" HOST "\r\n"),
      BAD(400, "GET /hello HTTP/1.2\r\n" HOST "\r\n"),
      BAD(400, "GET /hello HTTP/11\r\n" HOST "\r\n"),
      BAD(400, "GET /hello http/1.1\r\n" HOST "\r\n"),
      BAD(400, "get /hello HTTP/1.1\r\n" HOST "\r\n"),
      BAD(400, "BREW /hello HTTP/1.1\r\n" HOST "\r\n"),
      BAD(400, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
      BAD(400, "CONNECT localhost:80 HTTP/1.1\r\n" HOST "\r\n"),
      BAD(400, "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
      BAD(417, "POST /echo HTTP/1.1\r\n" HOST "Expect: miracles\r\nContent-Length: 1\r\n\r\n"),
      BAD(411, "POST /echo HTTP/1.1\r\n" HOST "\r\n"),
      BAD(413, "POST /echo HTTP/1.1\r\n" HOST "Content-Length: 33554433\r\n\r\n"),
      BAD(404, "POST /nothing HTTP/1.1\r\n" HOST "Content-Length: 100\r\n\r\n"),
      BAD(401, "POST /echo HTTP/1.1\r\n" HOST "X-Refuse: 1\r\nContent-Length: 100\r\n\r\n"),
  };
  for (size_t i = 0; i < TD_COUNT(list); i++) {
    expect_status(*state, list[i].request, list[i].len, list[i].status);
  }
}

static void refuses_bad_chunks(void **state) {
  static const bad_request list[] = {
      BAD(400, "x\r\nabc\r\n0\r\n\r\n"),        BAD(400, "-3\r\nabc\r\n0\r\n\r\n"),
      BAD(400, "+3\r\nabc\r\n0\r\n\r\n"),       BAD(400, "0x3\r\nabc\r\n0\r\n\r\n"),
      BAD(400, " 3\r\nabc\r\n0\r\n\r\n"),       BAD(400, "3 \r\nabc\r\n0\r\n\r\n"),
      BAD(400, "\r\nabc\r\n0\r\n\r\n"),         BAD(400, "3\nabc\n0\n\n"),
      BAD(400, "3\r\nabcd\r\n0\r\n\r\n"),       BAD(400, "3\r\nabc0\r\n\r\n"),
      BAD(400, "3\r\nabc\n0\r\n\r\n"),          BAD(400, "fffffffffffffffff\r\nabc\r\n"),
      BAD(413, "fffffffffffffff\r\nabc\r\n"),   BAD(413, "2000001\r\n"),
      BAD(400, "3;a=\x01\r\nabc\r\n0\r\n\r\n"), BAD(400, "3;a\nabc\r\n0\r\n\r\n"),
      BAD(400, "0\r\nX : y\r\n\r\n"),           BAD(400, "0\r\nX: y\n\r\n"),
      BAD(400, "0\r\n X: y\r\n\r\n"),
  };
  for (size_t i = 0; i < TD_COUNT(list); i++) {
    td_buf request = TD_BUF_INIT;
    td_buf_str(&request, "POST /echo HTTP/1.1\r\n" HOST "Transfer-Encoding: chunked\r\n\r\n");
    td_buf_add(&request, list[i].request, list[i].len);
    expect_status(*state, request.data, request.len, list[i].status);
    td_buf_free(&request);
  }
}

static void holds_its_limits(void **state) {
  td_buf line = TD_BUF_INIT, big = TD_BUF_INIT, many = TD_BUF_INIT;
  td_buf_str(&line, "GET /");
  for (int i = 0; i < 9000; i++)
    td_buf_char(&line, 'a');
  td_buf_str(&line, " HTTP/1.1\r\n" HOST "\r\n");
  expect_status(*state, line.data, line.len, 414);
  td_buf_str(&big, "GET /hello HTTP/1.1\r\n" HOST "X: ");
  for (int i = 0; i < 40000; i++)
    td_buf_char(&big, 'a');
  td_buf_str(&big, "\r\n\r\n");
  expect_status(*state, big.data, big.len, 431);
  td_buf_str(&many, "GET /hello HTTP/1.1\r\n" HOST);
  for (int i = 0; i < TD_HTTP_MAX_HEADERS; i++)
    td_buf_str(&many, "X: y\r\n");
  td_buf_str(&many, "\r\n");
  expect_status(*state, many.data, many.len, 431);
  td_buf_free(&line);
  td_buf_free(&big);
  td_buf_free(&many);
}

static void expect_text(const fixture *f, const char *request, const char *const *wanted) {
  td_buf response = exchange(f, request, strlen(request));
  const char *at = td_buf_text(&response);
  for (; *wanted; wanted++) {
    at = strstr(at, *wanted);
    if (!at) {
      fail_msg("no '%s' (in this order) after:\n%s\nin:\n%s", *wanted, request,
               td_buf_text(&response));
    }
    at += strlen(*wanted);
  }
  td_buf_free(&response);
}
#define EXPECT_TEXT(f, request, ...)                                                               \
  expect_text((f), (request), (const char *const[]){__VA_ARGS__, NULL})

#define CLOSE "Connection: close\r\n"

static void answers(void **state) {
  fixture *f = *state;
  EXPECT_TEXT(f, "GET /hello HTTP/1.1\r\n" HOST CLOSE "\r\n", "HTTP/1.1 200 OK\r\n", "Date: ",
              "Content-Type: text/plain\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello");
  EXPECT_TEXT(f, "\r\n\r\nGET /hello?a=b HTTP/1.1\r\n" HOST CLOSE "\r\n", " 200 ", "hello");
  EXPECT_TEXT(f, "GET http://localhost:80/hello HTTP/1.1\r\n" HOST CLOSE "\r\n", " 200 ", "hello");
  EXPECT_TEXT(f, "GET /hello HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n", " 200 ", "close", "hello");
  EXPECT_TEXT(f, "GET /hello HTTP/1.1\r\nHost: [::1]:80\r\n" CLOSE "\r\n", " 200 ");
  EXPECT_TEXT(f, "GET /hello HTTP/1.1\r\n" HOST "X:\r\nEmpty: \t \r\n" CLOSE "\r\n", " 200 ");
  EXPECT_TEXT(f, "GET /path/a%2Fb%20c?q HTTP/1.1\r\n" HOST CLOSE "\r\n", "\r\n\r\n/path/a/b c");
  EXPECT_TEXT(f, "POST /echo HTTP/1.1\r\n" HOST CLOSE "Content-Length: 3\r\n\r\nabc",
              "\r\n\r\nabc");
  EXPECT_TEXT(f, "GET /path/ HTTP/1.1\r\n" HOST CLOSE "\r\n", " 404 ");
  EXPECT_TEXT(f, "DELETE /hello HTTP/1.1\r\n" HOST CLOSE "\r\n", " 405 ", "Allow: GET, HEAD\r\n");
  EXPECT_TEXT(f, "OPTIONS * HTTP/1.1\r\n" HOST CLOSE "\r\n", " 404 ");
  // Offers of other protocols are ignored.
  EXPECT_TEXT(f,
              "GET /hello HTTP/1.1\r\n" HOST "Connection: Upgrade, HTTP2-Settings, close\r\n"
              "Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n",
              " 200 ", "hello");
}

static void reads_queries(void **state) {
  (void)state;
  static const struct {
    const char *query, *want; // NULL: there is no parameter n
  } cases[] = {
      {"n=ORG%2FNAME", "ORG/NAME"},
      {"m=1&n=2&n=3", "2"},
      {"n=a+b%2bc&m", "a b+c"},
      {"n=&m=1", ""},
      {"", NULL},
      {"n", NULL},
      {"nn=1&=n=2", NULL},
      {"n=1%&m", "1%"},
      {"n=%4&m=1", "%4"},
      {"n=%00%zz", "%00%zz"},
      {"&&n==%3D&", "=="},
      {"m=%26n%3D1", NULL},
  };
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    td_buf value = TD_BUF_INIT;
    assert_int_equal(td_query_get(&value, cases[i].query, "n"), cases[i].want != NULL);
    assert_string_equal(td_buf_text(&value), cases[i].want ? cases[i].want : "");
    td_buf_free(&value);
  }
}

static void answers_head_without_a_body(void **state) {
  td_buf response = exchange(*state, "HEAD /hello HTTP/1.1\r\n" HOST CLOSE "\r\n",
                             strlen("HEAD /hello HTTP/1.1\r\n" HOST CLOSE "\r\n"));
  assert_int_equal(status_of(&response), 200);
  assert_non_null(strstr(response.data, "Content-Length: 5\r\n"));
  assert_string_equal(response.data + response.len - 4, "\r\n\r\n");
  td_buf_free(&response);
}

static void reads_chunked_bodies(void **state) {
  fixture *f = *state;
#define CHUNKED "POST /echo HTTP/1.1\r\n" HOST CLOSE "Transfer-Encoding: Chunked\r\n\r\n"
  EXPECT_TEXT(f, CHUNKED "3\r\nabc\r\n0A;x=\"y\"\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n",
              "\r\n\r\nabc0123456789");
  EXPECT_TEXT(f, CHUNKED "0\r\n\r\n", "Content-Length: 0\r\n");
}

static void streams(void **state) {
  fixture *f = *state;
  EXPECT_TEXT(f, "GET /stream HTTP/1.1\r\n" HOST CLOSE "\r\n", "Transfer-Encoding: chunked\r\n",
              "\r\n\r\n4\r\none \r\n3\r\ntwo\r\n0\r\n\r\n");
  static const char old[] = "GET /stream HTTP/1.0\r\nConnection: keep-alive\r\n\r\n";
  td_buf response = exchange(f, old, strlen(old));
  assert_null(strstr(response.data, "chunked"));
  assert_non_null(strstr(response.data, "Connection: close\r\n"));
  assert_non_null(strstr(response.data, "\r\n\r\none two"));
  td_buf_free(&response);
}

static void answers_pipelined_requests_in_order(void **state) {
  fixture *f = *state;
  EXPECT_TEXT(f,
              "GET /slow HTTP/1.1\r\n" HOST "\r\n"
              "POST /echo HTTP/1.1\r\n" HOST "Content-Length: 5\r\n\r\nfirst"
              "GET /stream HTTP/1.1\r\n" HOST "\r\n"
              "DELETE /hello HTTP/1.1\r\n" HOST "\r\n"
              "GET /hello HTTP/1.1\r\n" HOST CLOSE "\r\n"
              "GET /hello HTTP/1.1\r\n" HOST "\r\n",
              "slow", "first", "two", " 405 ", "hello");
}

static void keeps_connections(void **state) {
  fixture *f = *state;
  int fd = dial(f);
  for (int i = 0; i < 3; i++) {
    td_buf out = TD_BUF_INIT;
    put_str(fd, "GET /hello HTTP/1.1\r\n" HOST "\r\n");
    assert_true(get(fd, &out, "\r\n\r\nhello", 2000));
    assert_null(strstr(out.data, "Connection"));
    td_buf_free(&out);
  }
  close(fd);
  fd = dial(f);
  td_buf out = TD_BUF_INIT;
  put_str(fd, "GET /hello HTTP/1.0\r\n" HOST "Connection: keep-alive\r\n\r\n");
  assert_true(get(fd, &out, "\r\n\r\nhello", 2000));
  assert_non_null(strstr(out.data, "Connection: keep-alive\r\n"));
  td_buf_free(&out);
  close(fd);
}

static void reads_byte_by_byte(void **state) {
  int fd = dial(*state);
  static const char text[] = "POST /echo HTTP/1.1\r\n" HOST CLOSE
                             "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n";
  for (size_t i = 0; i < sizeof text - 1; i++) {
    put(fd, text + i, 1);
    usleep(200);
  }
  td_buf out = TD_BUF_INIT;
  assert_true(get(fd, &out, NULL, 2000));
  assert_non_null(strstr(out.data, "\r\n\r\nabcde"));
  td_buf_free(&out);
  close(fd);
}

static void says_100_continue(void **state) {
  int fd = dial(*state);
  td_buf out = TD_BUF_INIT;
  put_str(fd,
          "POST /echo HTTP/1.1\r\n" HOST CLOSE "Expect: 100-continue\r\nContent-Length: 3\r\n\r\n");
  assert_true(get(fd, &out, "\r\n\r\n", 2000));
  assert_string_equal(out.data, "HTTP/1.1 100 Continue\r\n\r\n");
  put_str(fd, "abc");
  assert_true(get(fd, &out, NULL, 2000));
  assert_non_null(strstr(out.data, "200 OK"));
  td_buf_free(&out);
  close(fd);
}

static void answers_before_a_body_too_large(void **state) {
  // The body is sent whole although it is refused: the answer must survive that.
  fixture *f = *state;
  int fd = dial(f);
  size_t len = 8u << 20;
  char *body = calloc(1, len);
  put_str(fd, "POST /echo HTTP/1.1\r\n" HOST "Content-Length: 40000000\r\n\r\n");
  put(fd, body, len);
  td_buf out = TD_BUF_INIT;
  assert_true(get(fd, &out, "\r\n\r\n", 3000));
  assert_int_equal(status_of(&out), 413);
  td_buf_free(&out);
  free(body);
  close(fd);
}

static void notices_clients_that_leave(void **state) {
  fixture *f = *state;
  int before = f->n_gone, handled = f->n_handled;
  int fd = dial(f);
  put_str(fd, "GET /hang HTTP/1.1\r\n" HOST "\r\n");
  assert_true(becomes(&f->n_handled, handled + 1));
  assert_int_equal(f->n_gone, before);
  close(fd);
  assert_true(becomes(&f->n_gone, before + 1));
}

static void keeps_event_streams_alive(void **state) {
  (void)state;
  fixture f;
  start_server(&f, (td_http_opts){.sse_comment_ms = 100});
  int fd = dial(&f);
  td_buf out = TD_BUF_INIT;
  uint64_t begin = td_clock_ns();
  put_str(fd, "GET /sse HTTP/1.1\r\nHost: x\r\n" CLOSE "\r\n");
  assert_true(get(fd, &out, "\r\n\r\n", 2000));
  assert_true(td_clock_ns() - begin < 300000000u); // headers do not wait for the first event
  assert_non_null(strstr(out.data, "Content-Type: text/event-stream"));
  assert_true(get(fd, &out, NULL, 2000));
  const char *comment = strstr(out.data, "3\r\n:\n\n\r\n3\r\n:\n\n\r\n");
  assert_non_null(comment);
  const char *event = strstr(out.data, "data: {}\n\n");
  assert_non_null(event);
  assert_true(comment < event);
  // Silence after an event is no other than silence in front of it.
  const char *comments = strstr(event, "3\r\n:\n\n\r\n3\r\n:\n\n\r\n");
  const char *end = strstr(event, "data: [DONE]\n\n\r\n0\r\n\r\n");
  assert_non_null(comments);
  assert_non_null(end);
  assert_true(comments < end);
  td_buf_free(&out);
  close(fd);
  stop_server(&f);
}

static void drops_readers_that_fall_behind(void **state) {
  (void)state;
  fixture f;
  start_server(&f, (td_http_opts){.max_write_queue_bytes = 200000});
  int fd = dial(&f);
  put_str(fd, "GET /flood HTTP/1.1\r\nHost: x\r\n\r\n");
  assert_true(becomes(&f.n_gone, 1));
  close(fd);
  stop_server(&f);
}

static void drops_readers_that_stall(void **state) {
  (void)state;
  fixture f;
  start_server(&f, (td_http_opts){.write_timeout_ms = 200, .sse_comment_ms = 50});
  int fd = dial(&f);
  put_str(fd, "GET /large HTTP/1.1\r\nHost: x\r\n\r\n");
  assert_true(becomes(&f.n_handled, 1));
  usleep(3000000); // many times the limit: the machine may be busy
  td_buf out = TD_BUF_INIT;
  get(fd, &out, NULL, 2000);
  assert_true(out.len < 32u << 20);
  td_buf_free(&out);
  close(fd);
  stop_server(&f);
}

static void times_out(void **state) {
  (void)state;
  fixture f;
  start_server(
      &f, (td_http_opts){.head_timeout_ms = 300, .body_timeout_ms = 300, .idle_timeout_ms = 100});
  int fd = dial(&f);
  td_buf out = TD_BUF_INIT;
  for (int i = 0; i < 20 && out.len == 0; i++) { // a byte at a time earns no more time
    put(fd, "GET /hello HTTP/1.1\r\n" + i, 1);
    get(fd, &out, "408", 30);
  }
  assert_int_equal(status_of(&out), 408);
  close(fd);
  td_buf_clear(&out);
  fd = dial(&f);
  put_str(fd, "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nab");
  assert_true(get(fd, &out, NULL, 2000));
  assert_int_equal(status_of(&out), 408);
  close(fd);
  td_buf_clear(&out);
  fd = dial(&f); // nothing asked: nothing answered
  assert_true(get(fd, &out, NULL, 2000));
  assert_int_equal(out.len, 0);
  close(fd);
  fd = dial(&f);
  put_str(fd, "GET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
  assert_true(get(fd, &out, NULL, 2000)); // an idle connection is closed without a word
  assert_int_equal(status_of(&out), 200);
  assert_null(strstr(out.data, "408"));
  close(fd);
  td_buf_free(&out);
  stop_server(&f);
}

#define HELLO "GET /hello HTTP/1.1\r\nHost: x\r\n\r\n"
#define VITAL "GET /path/vital HTTP/1.1\r\nHost: x\r\n\r\n"
#define HANG  "GET /hang HTTP/1.1\r\nHost: x\r\n\r\n"

static int dial_and_put(fixture *f, const char *request) {
  int fd = dial(f);
  put_str(fd, request);
  return fd;
}

static void check_status(fixture *f, const char *request, int status) {
  td_buf out = TD_BUF_INIT;
  int fd = dial_and_put(f, request);
  assert_true(get(fd, &out, "\r\n\r\n", 3000));
  assert_int_equal(status_of(&out), status);
  assert_true(status != 503 || strstr(out.data, "Retry-After: "));
  td_buf_free(&out);
  close(fd);
}

// With every place taken by requests others get 503, but those of vital paths an answer.
static void bounds_connections(void **state) {
  (void)state;
  fixture f;
  start_server(&f, (td_http_opts){.max_connections = 2});
  int a = dial_and_put(&f, HANG), b = dial_and_put(&f, HANG), silent[200];
  assert_true(becomes(&f.n_handled, 2));
  check_status(&f, HELLO, 503);
  check_status(&f, VITAL, 200);
  for (int i = 0; i < 200; i++)
    silent[i] = dial(&f); // not one of these keeps a place
  check_status(&f, HELLO, 503);
  check_status(&f, VITAL, 200);
  td_buf out = TD_BUF_INIT;
  assert_true(get(silent[0], &out, NULL, 3000)); // has made room, and was told
  assert_int_equal(status_of(&out), 503);
  td_buf_free(&out);
  for (int i = 0; i < 200; i++)
    close(silent[i]);
  close(a);
  close(b);
  assert_true(becomes(&f.n_gone, 2));
  check_status(&f, HELLO, 200);
  stop_server(&f);
}

static int dial_and_put_body(fixture *f, size_t announced, size_t sent) {
  char head[128], block[65536];
  memset(block, 'x', sizeof block);
  snprintf(head, sizeof head, "POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: %zu\r\n\r\n",
           announced);
  int fd = dial_and_put(f, head);
  for (size_t n; sent > 0; sent -= n) {
    n = sent < sizeof block ? sent : sizeof block;
    put(fd, block, n);
  }
  return fd;
}

// Half heads and half bodies take every place again and again, from one address: others, and whole
// requests of the same, are served all the same, and what others have open stays so.
static void slow_senders_make_room(void **state) {
  (void)state;
  enum { PLACES = 40, N = 400 };
  static const char half[] = "POST /echo HTTP/1.1\r\nHost: x\r\n";
  fixture f;
  start_server(&f, (td_http_opts){.max_connections = PLACES});
  td_buf out = TD_BUF_INIT;
  dial_from = INADDR_LOOPBACK + 1;
  const int idle = dial_and_put(&f, HELLO), slow = dial_and_put(&f, "GET /hello HT");
  assert_true(get(idle, &out, "hello", 3000));
  int fds[N];
  for (int i = 0; i < N; i++) {
    dial_from = 0;
    fds[i] = dial_and_put(&f, half);
    if (i % 40) continue;
    check_status(&f, HELLO, 200);
    check_status(&f, VITAL, 200);
    dial_from = INADDR_LOOPBACK + 2;
    check_status(&f, HELLO, 200);
  }
  td_buf_clear(&out);
  put_str(idle, HELLO);
  assert_true(get(idle, &out, "hello", 3000));
  td_buf_clear(&out);
  put_str(slow, "TP/1.1\r\nHost: x\r\n\r\n");
  assert_true(get(slow, &out, "hello", 3000));
  assert_in_range(f.n_connections, PLACES / 2, PLACES + 1);
  for (int i = 0; i < N; i++)
    close(fds[i]);
  close(idle);
  close(slow);
  dial_from = 0;
  for (int i = 0; i < PLACES; i++)
    fds[i] = dial_and_put_body(&f, 60000, 100);
  usleep(2100000); // slow by now
  check_status(&f, HELLO, 200);
  for (int i = 0; i < PLACES; i++)
    close(fds[i]);
  td_buf_free(&out);
  stop_server(&f);
}

// The connection that has stood idle longest makes room for a new one.
static void idle_connections_make_room(void **state) {
  (void)state;
  fixture f;
  start_server(&f, (td_http_opts){.max_connections = 3});
  int fds[3];
  td_buf out = TD_BUF_INIT;
  for (int i = 0; i < 3; i++) {
    fds[i] = dial_and_put(&f, HELLO);
    td_buf_clear(&out);
    assert_true(get(fds[i], &out, "hello", 3000));
    usleep(20000);
  }
  put_str(fds[0], HELLO); // used again: the second is the longest idle now
  td_buf_clear(&out);
  assert_true(get(fds[0], &out, "hello", 3000));
  int newcomer = dial_and_put(&f, HELLO);
  td_buf_clear(&out);
  assert_true(get(newcomer, &out, "hello", 3000));
  td_buf_clear(&out);
  assert_true(get(fds[1], &out, NULL, 3000));
  assert_int_equal(out.len, 0);
  for (int i = 0; i < 3; i += 2) {
    put_str(fds[i], HELLO);
    td_buf_clear(&out);
    assert_true(get(fds[i], &out, "hello", 3000));
  }
  for (int i = 0; i < 3; i++)
    close(fds[i]);
  close(newcomer);
  td_buf_free(&out);
  stop_server(&f);
}

// Bodies together are held to a budget, a client's to three quarters: one that stands still gives
// way to one that comes in, and without such a one what is too much is refused. Small ones, and
// those of other clients, get in.
static void bounds_the_memory_of_bodies(void **state) {
  (void)state;
  enum { MIB = 1 << 20 };
  fixture f;
  start_server(&f, (td_http_opts){.max_bodies_bytes = 4 * MIB * 4 / 3});
  td_buf out = TD_BUF_INIT;
  int a = dial_and_put_body(&f, 8 * MIB, 2 * MIB), b = dial_and_put_body(&f, 8 * MIB, MIB);
  usleep(700000); // until the server has taken them, also where it is slow
  int c = dial_and_put_body(&f, 3 * MIB, 3 * MIB);
  assert_true(get(c, &out, "\r\n\r\n", 3000));
  assert_int_equal(status_of(&out), 503);
  close(c);
  dial_from = INADDR_LOOPBACK + 1;
  c = dial_and_put_body(&f, MIB, MIB);
  dial_from = 0;
  td_buf_clear(&out);
  assert_true(get(c, &out, "\r\n\r\n", 3000));
  assert_int_equal(status_of(&out), 200);
  close(c);
  usleep(1200000); // a and b stand still
  c = dial_and_put_body(&f, 3 * MIB, 3 * MIB);
  td_buf_clear(&out);
  assert_true(get(c, &out, "\r\n\r\n", 3000));
  assert_int_equal(status_of(&out), 200);
  td_buf_clear(&out);
  assert_true(get(a, &out, NULL, 3000));
  assert_int_equal(status_of(&out), 408);
  int small = dial_and_put_body(&f, 1000, 1000);
  td_buf_clear(&out);
  assert_true(get(small, &out, "\r\n\r\n", 3000));
  assert_int_equal(status_of(&out), 200);
  close(a);
  close(b);
  close(c);
  close(small);
  td_buf_free(&out);
  stop_server(&f);
}

// A large body has long for the whole of it, but not to stand still.
static void a_body_that_stands_still(void **state) {
  (void)state;
  fixture f;
  start_server(&f, (td_http_opts){.body_timeout_ms = 300});
  td_buf out = TD_BUF_INIT;
  int fd = dial_and_put_body(&f, 16 << 20, 12 << 20); // 197 s of grace
  assert_true(get(fd, &out, "\r\n\r\n", 5000));
  assert_int_equal(status_of(&out), 408);
  close(fd);
  td_buf_free(&out);
  stop_server(&f);
}

static void drains(void **state) {
  (void)state;
  fixture f;
  start_server(&f, (td_http_opts){.port = 0});
  int idle = dial(&f), busy = dial(&f);
  put_str(busy, "GET /slow HTTP/1.1\r\nHost: x\r\n\r\n");
  assert_true(becomes(&f.n_handled, 1));
  command(&f, 1);
  td_buf out = TD_BUF_INIT;
  assert_true(get(idle, &out, NULL, 200));
  assert_int_equal(out.len, 0);
  assert_int_equal(f.n_drained, 0);
  assert_true(get(busy, &out, NULL, 2000));
  assert_non_null(strstr(out.data, "Connection: close\r\n"));
  assert_non_null(strstr(out.data, "\r\n\r\nslow"));
  close(busy);
  assert_true(becomes(&f.n_drained, 1));
  struct sockaddr_in addr = {.sin_family = AF_INET, .sin_port = htons(f.port)};
  addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  int fd = socket(AF_INET, SOCK_STREAM, 0);
  assert_int_equal(connect(fd, (struct sockaddr *)&addr, sizeof addr), -1);
  close(fd);
  close(idle);
  td_buf_free(&out);
  stop_server(&f);
}

static void closes_with_requests_running(void **state) {
  (void)state;
  fixture f;
  start_server(&f, (td_http_opts){.port = 0});
  int fd = dial(&f);
  put_str(fd, "GET /hang HTTP/1.1\r\nHost: x\r\n\r\n");
  assert_true(becomes(&f.n_handled, 1));
  stop_server(&f);
  assert_int_equal(f.n_gone, 1);
  close(fd);
}

static void serves_unix_sockets(void **state) {
  (void)state;
  char host[64];
  snprintf(host, sizeof host, "unix:/tmp/td-test-http-%d.sock", (int)getpid());
  fixture f;
  for (int i = 0; i < 2; i++) {
    start_server(&f, (td_http_opts){.host = host, .loopback_hosts_only = true});
    EXPECT_TEXT(&f, "GET /hello HTTP/1.1\r\nHost: anything\r\n" CLOSE "\r\n", " 200 ", "hello");
    stop_server(&f);
    assert_int_equal(access(host + 5, F_OK), -1);
    // A file left by a killed server does not stop the next one.
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    strcpy(addr.sun_path, host + 5);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&addr, sizeof addr), 0);
    close(fd);
  }
  unlink(host + 5);
}

static void reports_a_port_in_use(void **state) {
  fixture *f = *state;
  uv_loop_t loop;
  uv_loop_init(&loop);
  td_http_server *server;
  td_err err;
  td_http_opts opts = {.host = "127.0.0.1", .port = f->port, .routes = routes, .n_routes = 1};
  assert_int_equal(td_http_server_open(&server, &loop, &opts, &err), TD_EIO);
  assert_null(server);
  assert_non_null(strstr(err.msg, "in use"));
  opts.host = "no.such.host.invalid";
  assert_int_equal(td_http_server_open(&server, &loop, &opts, &err), TD_EINVAL);
  uv_run(&loop, UV_RUN_DEFAULT);
  assert_int_equal(uv_loop_close(&loop), 0);
}

static void knows_loopback_names(void **state) {
  (void)state;
  assert_true(td_http_server_is_loopback("127.0.0.1"));
  assert_true(td_http_server_is_loopback("localhost"));
  assert_true(td_http_server_is_loopback("::1"));
  assert_true(td_http_server_is_loopback("unix:/tmp/x"));
  assert_false(td_http_server_is_loopback("0.0.0.0"));
  assert_false(td_http_server_is_loopback("::"));
  assert_false(td_http_server_is_loopback("127.0.0.1.example.com"));
  assert_false(td_http_server_is_loopback("127.evil"));
}

int main(void) {
  const struct CMUnitTest with_shared[] = {
      cmocka_unit_test(refuses_bad_requests),
      cmocka_unit_test(refuses_bad_chunks),
      cmocka_unit_test(holds_its_limits),
      cmocka_unit_test(answers),
      cmocka_unit_test(reads_queries),
      cmocka_unit_test(answers_head_without_a_body),
      cmocka_unit_test(reads_chunked_bodies),
      cmocka_unit_test(streams),
      cmocka_unit_test(answers_pipelined_requests_in_order),
      cmocka_unit_test(keeps_connections),
      cmocka_unit_test(reads_byte_by_byte),
      cmocka_unit_test(says_100_continue),
      cmocka_unit_test(answers_before_a_body_too_large),
      cmocka_unit_test(notices_clients_that_leave),
      cmocka_unit_test(reports_a_port_in_use),
  };
  const struct CMUnitTest alone[] = {
      cmocka_unit_test(keeps_event_streams_alive),
      cmocka_unit_test(drops_readers_that_fall_behind),
      cmocka_unit_test(drops_readers_that_stall),
      cmocka_unit_test(times_out),
      cmocka_unit_test(bounds_connections),
      cmocka_unit_test(slow_senders_make_room),
      cmocka_unit_test(idle_connections_make_room),
      cmocka_unit_test(bounds_the_memory_of_bodies),
      cmocka_unit_test(a_body_that_stands_still),
      cmocka_unit_test(drains),
      cmocka_unit_test(closes_with_requests_running),
      cmocka_unit_test(serves_unix_sockets),
      cmocka_unit_test(knows_loopback_names),
  };
  int failed = cmocka_run_group_tests(with_shared, start_shared, stop_shared);
  return failed + cmocka_run_group_tests(alone, NULL, NULL);
}
