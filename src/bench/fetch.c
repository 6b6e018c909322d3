// src/bench/fetch.c - a blocking request.
#include "bench/fetch.h"

#include <stdlib.h>

#include "bench/http_client.h"
#include "bench/openai_client.h"

static void on_done(td_load_call *call) {
  uv_close(call->ctx, NULL); // the timer; the loop ends
}

static void on_late(uv_timer_t *timer) {
  td_load_call_cancel(timer->data);
}

static td_status check(const td_load_call *call, const char *server, td_err *err) {
  td_client_event event;
  td_err ignored;
  if (call->error[0]) return td_fail(err, TD_EIO, "%s: %s", server, call->error);
  if (call->http_status == 200) return TD_OK;
  const bool is_said = td_client_parse_event(&event, td_buf_text(&call->body), call->body.len,
                                             &ignored) == TD_OK &&
                       event.is_error && event.message[0];
  if (is_said) return td_fail(err, TD_EIO, "%s: %s", server, event.message);
  return td_fail(err, TD_EIO, "%s: status %d", server, call->http_status);
}

td_status td_fetch(td_buf *out, const td_fetch_args *args, td_err *err) {
  td_load_target target;
  td_status st = td_load_target_parse(&target, args->server, err);
  if (st != TD_OK) return st;
  target.api_key = args->api_key;
  uv_loop_t loop;
  uv_timer_t timer;
  const int error = uv_loop_init(&loop);
  if (error) return td_fail(err, TD_EIO, "cannot make an event loop: %s", uv_strerror(error));
  td_load_call *call = calloc(1, sizeof *call);
  if (call) {
    call->target = &target;
    call->on_done = on_done;
    call->ctx = &timer;
    uv_timer_init(&loop, &timer);
    timer.data = call;
    if (args->max_ms) uv_timer_start(&timer, on_late, args->max_ms, 0);
    td_load_call_start(call, &loop, args->path, args->json);
    uv_run(&loop, UV_RUN_DEFAULT);
    st = check(call, args->server, err);
    if (st == TD_OK) td_buf_add(out, td_buf_text(&call->body), call->body.len);
    td_load_call_free(call);
    free(call);
  }
  uv_loop_close(&loop);
  if (!call) return td_fail(err, TD_ENOMEM, "out of memory");
  return st == TD_OK ? td_buf_status(out, err) : st;
}
