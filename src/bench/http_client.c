// src/bench/http_client.c - an HTTP/1.1 client on libuv that timestamps server-sent events.
#include "bench/http_client.h"

#include <netdb.h>
#include <string.h>

#include "base/clock.h"

td_status td_load_target_parse(td_load_target *out, const char *url, td_err *err) {
  memset(out, 0, sizeof *out);
  if (strncmp(url, "http://", 7))
    return td_fail(err, TD_EINVAL, "--server %s: give http://HOST:PORT", url);
  const char *authority = url + 7;
  size_t len = strcspn(authority, "/");
  const char *path = authority + len;
  size_t path_len = strlen(path);
  while (path_len && path[path_len - 1] == '/')
    path_len--;
  if (path_len >= 3 && !strncmp(path + path_len - 3, "/v1", 3)) path_len -= 3;
  if (!len || len >= sizeof out->host || path_len >= sizeof out->base)
    return td_fail(err, TD_EINVAL, "--server %s: give http://HOST:PORT", url);
  memcpy(out->host, authority, len);
  memcpy(out->base, path, path_len);
  char name[256], *port;
  memcpy(name, out->host, sizeof name);
  char *host = name, *bracket = strchr(name, ']');
  if (name[0] == '[' && bracket) {
    host = name + 1;
    *bracket = '\0';
    port = bracket + 1;
  } else {
    port = strchr(name, ':');
    if (!port) port = name + len;
  }
  const char *service = *port == ':' ? port + 1 : "80";
  *port = '\0';
  struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_family = AF_UNSPEC}, *found;
  int code = getaddrinfo(host, service, &hints, &found);
  if (code != 0)
    return td_fail(err, TD_EINVAL, "--server %s: cannot resolve: %s", url, gai_strerror(code));
  for (const struct addrinfo *a = found; a && out->n_addresses < TD_LOAD_ADDRESSES; a = a->ai_next)
    memcpy(&out->addresses[out->n_addresses++], a->ai_addr, a->ai_addrlen);
  freeaddrinfo(found);
  return TD_OK;
}

static void on_closed(uv_handle_t *handle) {
  td_load_call *call = handle->data;
  call->on_done(call);
}

static void finish(td_load_call *call, const char *error) {
  if (uv_is_closing((uv_handle_t *)&call->tcp)) return;
  if (error && !call->is_whole) snprintf(call->error, sizeof call->error, "%s", error);
  uv_close((uv_handle_t *)&call->tcp, on_closed);
}

void td_load_call_cancel(td_load_call *call) {
  finish(call, "canceled");
}

// Splits the body into lines and passes on what follows "data:".
static void split_events(td_load_call *call, const char *bytes, size_t len) {
  td_buf_add(&call->line, bytes, len);
  size_t begin = 0;
  for (;;) {
    const char *at = td_buf_text(&call->line) + begin;
    const char *end = memchr(at, '\n', call->line.len - begin);
    if (!end) break;
    size_t n = (size_t)(end - at);
    begin += n + 1;
    if (n && at[n - 1] == '\r') n--;
    if (n < 5 || strncmp(at, "data:", 5)) continue;
    at += 5;
    n -= 5;
    while (n && *at == ' ')
      at++, n--;
    call->on_event(call, at, n);
  }
  td_buf_drop(&call->line, begin);
}

static int on_body(llhttp_t *parser, const char *at, size_t len) {
  td_load_call *call = parser->data;
  call->http_status = parser->status_code;
  if (call->on_event && parser->status_code == 200)
    split_events(call, at, len);
  else
    td_buf_add(&call->body, at, len);
  return 0;
}

static int on_complete(llhttp_t *parser) {
  td_load_call *call = parser->data;
  call->http_status = parser->status_code;
  call->is_whole = 1;
  return 0;
}

static void on_alloc(uv_handle_t *handle, size_t suggested, uv_buf_t *buf) {
  (void)suggested;
  td_load_call *call = handle->data;
  *buf = uv_buf_init(call->chunk, sizeof call->chunk);
}

static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *buf) {
  td_load_call *call = stream->data;
  if (n == 0) return;
  if (n < 0) {
    if (n == UV_EOF && llhttp_finish(&call->parser) == HPE_OK) call->is_whole |= call->http_status;
    finish(call, n == UV_EOF ? "the server closed the connection early" : uv_strerror((int)n));
    return;
  }
  if (llhttp_execute(&call->parser, buf->base, (size_t)n) != HPE_OK)
    finish(call, "the response is not HTTP");
  else if (call->is_whole)
    finish(call, NULL);
}

static void on_written(uv_write_t *write, int status) {
  if (status < 0 && status != UV_ECANCELED) finish(write->data, uv_strerror(status));
}

static void connect_next(td_load_call *call);

static void on_given_up(uv_handle_t *handle) {
  connect_next(handle->data);
}

static void on_connected(uv_connect_t *connect, int status) {
  td_load_call *call = connect->data;
  if (uv_is_closing((uv_handle_t *)&call->tcp)) return;
  if (status < 0 && call->n_tried < call->target->n_addresses) {
    uv_close((uv_handle_t *)&call->tcp, on_given_up);
    return;
  }
  if (status < 0) {
    finish(call, uv_strerror(status));
    return;
  }
  uv_tcp_nodelay(&call->tcp, 1);
  uv_buf_t out = uv_buf_init(call->request.data, (unsigned)call->request.len);
  call->write.data = call;
  int code = uv_write(&call->write, (uv_stream_t *)&call->tcp, &out, 1, on_written);
  if (code == 0) code = uv_read_start((uv_stream_t *)&call->tcp, on_alloc, on_read);
  if (code < 0) finish(call, uv_strerror(code));
}

static void connect_next(td_load_call *call) {
  const struct sockaddr_storage *address = &call->target->addresses[call->n_tried++];
  uv_tcp_init(call->loop, &call->tcp);
  call->tcp.data = call->connect.data = call;
  const int code = uv_tcp_connect(&call->connect, &call->tcp, (const struct sockaddr *)address,
                                  on_connected);
  if (code < 0) on_connected(&call->connect, code);
}

static void build_request(td_load_call *call, const char *path, const td_buf *json) {
  const td_load_target *t = call->target;
  td_buf *r = &call->request;
  td_buf_clear(r);
  td_buf_printf(r, "%s %s%s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n", json ? "POST" : "GET",
                t->base, path, t->host);
  if (t->api_key) td_buf_printf(r, "Authorization: Bearer %s\r\n", t->api_key);
  if (json)
    td_buf_printf(r, "Content-Type: application/json\r\nContent-Length: %zu\r\n", json->len);
  td_buf_str(r, "\r\n");
  if (json) td_buf_add(r, td_buf_text(json), json->len);
}

void td_load_call_start(td_load_call *call, uv_loop_t *loop, const char *path, const td_buf *json) {
  build_request(call, path, json);
  td_buf_clear(&call->body);
  td_buf_clear(&call->line);
  call->http_status = call->is_whole = 0;
  call->error[0] = '\0';
  llhttp_settings_init(&call->settings);
  call->settings.on_body = on_body;
  call->settings.on_message_complete = on_complete;
  llhttp_init(&call->parser, HTTP_RESPONSE, &call->settings);
  call->parser.data = call;
  call->start_ns = td_clock_ns();
  call->loop = loop;
  call->n_tried = 0;
  connect_next(call);
}

void td_load_call_free(td_load_call *call) {
  td_buf_free(&call->body);
  td_buf_free(&call->request);
  td_buf_free(&call->line);
}
