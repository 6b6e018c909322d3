// src/cli/run_server.c - answers from a running server instead of a model opened here.
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/json_parse.h"
#include "base/json_write.h"
#include "bench/http_client.h"
#include "cli/find_model.h"
#include "cli/remote.h"
#include "cli/run_impl.h"
#include "cli/terminal.h"

enum { PROBE_MS = 1000 }; // for a program at the usual port, which may be another

// ---- which model --------------------------------------------------------------------------------

// Whether a server's model is the one that was asked for: by its name, as a folder's, or of the
// hub.
static bool is_same(const char *id, const char *asked) {
  const char *slash = strrchr(asked, '/'), *its = strrchr(id, '/');
  return strcmp(id, asked) == 0 || (slash && strcmp(id, slash + 1) == 0) ||
         (its && strcmp(its + 1, slash ? slash + 1 : asked) == 0);
}

// The server's model of that name, or its first if asked is NULL. *list is the caller's.
static const cJSON *find(cJSON **list, const td_options *o, const char *asked, uint64_t max_ms,
                         td_err *err) {
  td_buf body = TD_BUF_INIT;
  td_status st = td_cli_fetch(&body, o, "/v1/models", NULL, max_ms, err);
  *list = NULL;
  if (st == TD_OK) st = td_json_parse(list, td_buf_text(&body), body.len, TD_JSON_MAX_DEPTH, err);
  td_buf_free(&body);
  const cJSON *data = td_json_get(*list, "data"), *m = data ? data->child : NULL;
  char *full = asked ? td_cli_full_name(asked) : NULL;
  for (; m; m = m->next) {
    const cJSON *id = td_json_get(m, "id");
    if (cJSON_IsString(id) &&
        (!asked || is_same(id->valuestring, asked) || (full && is_same(id->valuestring, full))))
      break;
  }
  free(full);
  if (st == TD_OK && !m)
    td_fail(err, TD_EINVAL, "the server has no model %s", asked ? asked : "at all");
  return m;
}

bool td_cli_is_served(const td_options *o) {
  cJSON *list;
  td_err ignored;
  if (o->command != TD_CMD_RUN || o->models || o->raw || o->token_ids.n || o->trace ||
      td_options_place_model(o))
    return false;
  const bool found = find(&list, o, o->model, PROBE_MS, &ignored);
  cJSON_Delete(list);
  return found;
}

td_status td_run_open_server(td_runner *r, td_err *err) {
  cJSON *list;
  const cJSON *m = find(&list, r->options, r->options->model, 0, err);
  if (!m) {
    cJSON_Delete(list);
    return err->code;
  }
  const cJSON *n_ctx = td_json_get(m, "max_model_len");
  r->served = strdup(td_json_get(m, "id")->valuestring);
  r->n_ctx = cJSON_IsNumber(n_ctx) ? (uint32_t)n_ctx->valuedouble : 0;
  cJSON_Delete(list);
  return r->served ? TD_OK : td_fail(err, TD_ENOMEM, "out of memory");
}

// ---- an answer ----------------------------------------------------------------------------------

typedef struct {
  td_runner *r;
  td_load_call call;
  uv_timer_t timer;
  uint64_t first_ns;
  td_status status; // err if not TD_OK
  td_err err;
} answer;

static uint32_t number(const cJSON *object, const char *key) {
  const cJSON *item = td_json_get(object, key);
  return cJSON_IsNumber(item) ? (uint32_t)item->valuedouble : 0;
}

static void take_usage(td_runner *r, const cJSON *usage) {
  if (!cJSON_IsObject(usage)) return;
  r->stats.n_prompt = number(usage, "prompt_tokens");
  r->stats.n_output = number(usage, "completion_tokens");
  r->stats.n_reused = number(td_json_get(usage, "prompt_tokens_details"), "cached_tokens");
  r->n_cached = r->stats.n_prompt + r->stats.n_output;
}

static void show(answer *a, const cJSON *delta, const char *key, bool is_reasoning) {
  const cJSON *text = td_json_get(delta, key);
  if (!cJSON_IsString(text) || !text->valuestring[0]) return;
  if (!a->first_ns) a->first_ns = td_clock_ns();
  td_run_show(a->r, text->valuestring, strlen(text->valuestring), is_reasoning);
}

static void on_event(td_load_call *call, const char *data, size_t len) {
  answer *a = call->ctx;
  cJSON *event;
  if (len == 6 && memcmp(data, "[DONE]", 6) == 0) return;
  td_status st = td_json_parse(&event, data, len, TD_JSON_MAX_DEPTH, &a->err);
  if (st != TD_OK) {
    a->status = st;
    return;
  }
  const cJSON *message = td_json_get(td_json_get(event, "error"), "message");
  if (cJSON_IsString(message)) a->status = td_fail(&a->err, TD_EIO, "%s", message->valuestring);
  take_usage(a->r, td_json_get(event, "usage"));
  const cJSON *choices = td_json_get(event, "choices"), *choice = choices ? choices->child : NULL;
  const cJSON *delta = td_json_get(choice, "delta"), *end = td_json_get(choice, "finish_reason");
  show(a, delta, "reasoning_content", true);
  show(a, delta, "content", false);
  if (cJSON_IsString(end))
    a->r->stats.reason = strcmp(end->valuestring, "length") == 0 ? TD_DONE_LENGTH : TD_DONE_STOP;
  cJSON_Delete(event);
}

static void on_done(td_load_call *call) {
  answer *a = call->ctx;
  uv_close((uv_handle_t *)&a->timer, NULL);
}

static void on_tick(uv_timer_t *timer) {
  answer *a = timer->data;
  if (td_interrupted()) td_load_call_cancel(&a->call);
}

static void write_sampling(td_json_writer *w, const td_options *o) {
  const struct {
    const char *option, *member;
    double value;
  } numbers[] = {{"temperature", "temperature", o->temperature},
                 {"top-p", "top_p", o->top_p},
                 {"min-p", "min_p", o->min_p},
                 {"top-k", "top_k", (double)o->top_k},
                 {"repetition-penalty", "repetition_penalty", o->repetition_penalty},
                 {"presence-penalty", "presence_penalty", o->presence_penalty},
                 {"frequency-penalty", "frequency_penalty", o->frequency_penalty},
                 {"seed", "seed", (double)o->seed},
                 {"n-predict", "max_tokens", (double)o->n_predict}};
  for (size_t i = 0; i < TD_COUNT(numbers); i++)
    if (td_options_given(o, numbers[i].option))
      td_jw_double(w, numbers[i].member, numbers[i].value);
}

static td_status write_body(td_runner *r, td_buf *body, td_err *err) {
  td_json_writer w = TD_JSON_WRITER(body);
  td_jw_add(&w, "{'model': %s", r->served);
  td_conversation_write(&r->conversation, &w, TD_FOR_SERVER);
  td_jw_add(&w, "'stream': true, 'stream_options': {'include_usage': true}, 'truncation': 'auto'");
  if (r->options->ignore_eos) td_jw_bool(&w, "ignore_eos", true);
  write_sampling(&w, &r->settings);
  td_run_write_reasoning(r, &w);
  td_jw_end_object(&w);
  return td_buf_status(body, err);
}

// The response's own error, or that of its body.
static td_status outcome(answer *a, td_err *err) {
  const td_load_call *call = &a->call;
  cJSON *body = NULL;
  td_err ignored;
  if (td_interrupted()) {
    a->r->stats.reason = TD_DONE_CANCELED;
    return TD_OK;
  }
  if (a->status != TD_OK) *err = a->err;
  if (a->status != TD_OK) return a->status;
  if (call->http_status == 200 && !call->error[0]) return TD_OK;
  if (call->error[0]) return td_fail(err, TD_EIO, "%s", call->error);
  td_status st = td_json_parse(&body, td_buf_text(&call->body), call->body.len, TD_JSON_MAX_DEPTH,
                               &ignored);
  const cJSON *said = td_json_get(td_json_get(body, "error"), "message");
  if (st == TD_OK && cJSON_IsString(said))
    st = td_fail(err, TD_EIO, "%s", said->valuestring);
  else
    st = td_fail(err, TD_EIO, "the server answered with status %d", call->http_status);
  cJSON_Delete(body);
  return st;
}

td_status td_run_answer_server(td_runner *r, td_err *err) {
  const td_options *o = r->options;
  answer *a = calloc(1, sizeof *a);
  td_load_target target;
  td_buf body = TD_BUF_INIT;
  uv_loop_t loop;
  if (!a) return td_fail(err, TD_ENOMEM, "out of memory");
  td_status st = td_load_target_parse(&target, td_cli_server(o), err);
  if (st == TD_OK) st = write_body(r, &body, err);
  if (st == TD_OK && uv_loop_init(&loop) != 0)
    st = td_fail(err, TD_EIO, "cannot make an event loop");
  if (st == TD_OK) {
    target.api_key = o->api_key;
    a->r = r;
    a->call = (td_load_call){.target = &target, .on_event = on_event, .on_done = on_done, .ctx = a};
    uv_timer_init(&loop, &a->timer);
    a->timer.data = a;
    uv_timer_start(&a->timer, on_tick, 50, 50);
    td_load_call_start(&a->call, &loop, "/v1/chat/completions", &body);
    uv_run(&loop, UV_RUN_DEFAULT);
    uv_loop_close(&loop);
    const uint64_t first_ns = a->first_ns ? a->first_ns : td_clock_ns();
    r->stats.prefill_s = (double)(first_ns - a->call.start_ns) * 1e-9;
    r->stats.decode_s = (double)(td_clock_ns() - first_ns) * 1e-9;
    st = outcome(a, err);
    td_load_call_free(&a->call);
  }
  td_buf_free(&body);
  free(a);
  return st;
}
