// src/bench/openai_client.c - writes requests and parses responses of the OpenAI protocol.
#include "bench/openai_client.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json_parse.h"
#include "base/json_write.h"
#include "bench/http_client.h"

td_status td_client_check_extra(const char *extra, td_err *err) {
  cJSON *root;
  if (!extra) return TD_OK;
  td_status st = td_json_parse(&root, extra, strlen(extra), TD_JSON_MAX_DEPTH - 1, err);
  if (st != TD_OK) return td_fail(err, TD_EINVAL, "--extra-body: not JSON: %.200s", extra);
  if (!cJSON_IsObject(root)) st = td_fail(err, TD_EINVAL, "--extra-body: give a JSON object");
  cJSON_Delete(root);
  return st;
}

// Puts the members of an object in front of the closing brace of another.
static void add_members(td_buf *out, const char *object) {
  const char *begin = strchr(object, '{') + 1, *end = strrchr(object, '}');
  if (begin + strspn(begin, " \t\r\n") == end) return;
  out->len -= out->len > 0;
  td_buf_char(out, ',');
  td_buf_add(out, begin, (size_t)(end - begin));
  td_buf_char(out, '}');
}

void td_client_body(td_buf *out, const char *model, const char *prompt, uint32_t max_tokens,
                    const char *extra) {
  td_json_writer w = TD_JSON_WRITER(out);
  td_jw_add(&w,
            "{'model': %s, 'messages': [{'role': 'user', 'content': %s}], 'max_tokens': %u, "
            "'temperature': 0, 'ignore_eos': true, 'stream': true, "
            "'stream_options': {'include_usage': true, 'continuous_usage_stats': true}}",
            model, prompt, max_tokens);
  if (extra) add_members(out, extra);
}

static bool has_text(const cJSON *object, const char *key) {
  const cJSON *item = td_json_get(object, key);
  return cJSON_IsString(item) && item->valuestring[0];
}

// Lenient parsing: a model may generate a NUL character, which td_json_parse rejects.
static td_status parse(cJSON **out, const char *json, size_t len, td_err *err) {
  *out = cJSON_ParseWithLength(json, len);
  return *out ? TD_OK
              : td_fail(err, TD_EFORMAT, "not JSON: %.*s", (int)(len < 80 ? len : 80), json);
}

td_status td_client_parse_event(td_client_event *out, const char *json, size_t len, td_err *err) {
  *out = (td_client_event){.n_prompt = -1, .n_output = -1};
  cJSON *root;
  td_status st = parse(&root, json, len, err);
  if (st != TD_OK) return st;
  const cJSON *error = td_json_get(root, "error"), *usage = td_json_get(root, "usage");
  if (error) {
    const cJSON *message = cJSON_IsObject(error) ? td_json_get(error, "message") : error;
    out->is_error = true;
    snprintf(out->message, sizeof out->message, "%s",
             cJSON_IsString(message) ? message->valuestring : "an error without a message");
  }
  if (usage) {
    td_json_get_int(usage, "prompt_tokens", 0, INT32_MAX, &out->n_prompt, NULL);
    td_json_get_int(usage, "completion_tokens", 0, INT32_MAX, &out->n_output, NULL);
  }
  const cJSON *choice;
  cJSON_ArrayForEach(choice, td_json_get(root, "choices")) {
    const cJSON *delta = td_json_get(choice, "delta");
    out->has_text |= has_text(delta, "content") || has_text(delta, "reasoning_content") ||
                     has_text(delta, "reasoning") || has_text(choice, "text");
    out->is_so_far = out->n_output >= 0 && !has_text(choice, "finish_reason");
  }
  cJSON_Delete(root);
  return TD_OK;
}

td_status td_client_parse_models(td_buf *out, const char *json, size_t len, td_err *err) {
  cJSON *root;
  td_status st = parse(&root, json, len, err);
  if (st != TD_OK) return st;
  const cJSON *id = td_json_get(cJSON_GetArrayItem(td_json_get(root, "data"), 0), "id");
  if (cJSON_IsString(id)) {
    td_buf_str(out, id->valuestring);
    st = td_buf_status(out, err);
  } else {
    st = td_fail(err, TD_EFORMAT, "GET /v1/models: no model in the response");
  }
  cJSON_Delete(root);
  return st;
}

// ---- a blocking request -------------------------------------------------------------------------

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
