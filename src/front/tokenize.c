// src/front/tokenize.c - /tokenize, /detokenize, /apply-template, count_tokens and vLLM's render:
// tokenizer and chat template alone, for debugging prompts and for routers that need token ids. The
// work runs on the thread pool.
#include <malloc.h>
#include <stdlib.h>
#include <sys/random.h>

#include "api/response.h"
#include "base/json_write.h"
#include "front/serve_impl.h"

typedef enum {
  RENDER_TEXT,
  RENDER_CHAT,
  TOKENIZE,
  DETOKENIZE,
  APPLY_TEMPLATE,
  COUNT,
  COUNT_INPUT
} task_kind;

typedef struct {
  td_serve *serve;
  td_host *host; // the model; NULL until it is known
  const td_chat *chat;
  task_kind kind;
  td_http_exchange *x; // NULL once the client is gone
  td_lane_work work;
  td_buf body, answer;
  td_http_held held; // its share of the HTTP server's body budget
  td_api_caller caller;
  td_status status;
  td_api_error error;
} task;

static void write_ids(td_json_writer *w, const char *key, const td_token_ids *ids) {
  td_jw_begin_array(w, key);
  for (size_t i = 0; i < ids->n; i++)
    td_jw_int(w, NULL, ids->ids[i]);
  td_jw_end_array(w);
}

static void write_tokens(task *t, const td_token_ids *ids) {
  td_json_writer w = TD_JSON_WRITER(&t->answer);
  td_jw_begin_object(&w, NULL);
  write_ids(&w, "tokens", ids);
  td_jw_add(&w, "'count': %lu, 'max_model_len': %u}", ids->n, t->host->n_ctx);
}

// llama-server calls a text of tokens content, vLLM prompt.
static void write_prompt(task *t, const td_buf *text) {
  td_json_writer w = TD_JSON_WRITER(&t->answer);
  td_jw_add(&w, "{'prompt': %p", text);
  if (t->kind == DETOKENIZE) td_jw_buf(&w, "content", text);
  td_jw_end_object(&w);
}

static td_status open_host(task *t) {
  td_err err;
  t->host = td_serve_pick(t->serve, &t->body, NULL, &t->error);
  if (!t->host) return TD_EINVAL;
  t->chat = td_host_chat(t->host, &err);
  return t->chat ? TD_OK : td_api_fail_err(&t->error, NULL, &err);
}

static td_status encode_request(task *t, td_api_request *request, td_turns *turns,
                                td_token_ids *prompts, td_buf *text) {
  td_picture_list *pictures;
  td_status st = td_pictures_take(&pictures, &t->host->pictures, request, 0, false,
                                  &t->work.is_canceled, &t->error);
  if (st == TD_OK)
    st = td_serve_encode(t->chat, turns, request, pictures, prompts, text, &t->error);
  td_pictures_drop(pictures);
  return st;
}

static td_status encode(task *t, td_api_request *request) {
  if (t->kind >= APPLY_TEMPLATE && !request->is_chat)
    return td_api_wrong(&t->error, "messages", "are missing");
  if (!request->is_chat && request->n_prompts != 1)
    return td_api_bad(&t->error, "prompt", "only one prompt at a time");
  td_token_ids ids = {.most = t->kind >= COUNT, // counted, not kept
                      .is_canceled = &t->work.is_canceled};
  td_buf text = TD_BUF_INIT;
  td_status st = encode_request(t, request, NULL, &ids, &text);
  if (st == TD_OK && t->kind == TOKENIZE) write_tokens(t, &ids);
  if (st == TD_OK && t->kind >= COUNT) {
    td_json_writer w = TD_JSON_WRITER(&t->answer);
    td_jw_begin_object(&w, NULL);
    if (t->kind == COUNT_INPUT) td_jw_str(&w, "object", "response.input_tokens");
    td_jw_add(&w, "'input_tokens': %lu}", ids.n + ids.n_cut);
  }
  if (st == TD_OK && t->kind == APPLY_TEMPLATE) write_prompt(t, &text);
  td_token_ids_free(&ids);
  td_buf_free(&text);
  return st;
}

// vLLM's names; what is off has its neutral value.
static void write_sampling(td_json_writer *w, const td_api_request *r, size_t room) {
  const td_sampling *s = &r->sampling;
  const bool all = r->max_tokens < 0 || (size_t)r->max_tokens > room;
  td_jw_add(w,
            "'sampling_params': {'n': %u, 'max_tokens': %ld, 'min_tokens': %ld, 'temperature': %g, "
            "'top_p': %g, 'top_k': %u, 'min_p': %g, 'presence_penalty': %g",
            r->n, all ? (int64_t)room : r->max_tokens, r->min_tokens, (double)s->temperature,
            s->top_p != 0 ? (double)s->top_p : 1, s->top_k, (double)s->min_p,
            (double)s->presence_penalty);
  td_jw_add(w, "'frequency_penalty': %g, 'repetition_penalty': %g, 'ignore_eos': %i}",
            (double)s->frequency_penalty,
            s->repetition_penalty != 0 ? (double)s->repetition_penalty : 1, r->ignore_eos);
}

// vLLM's GenerateRequest. Images are not passed on: features are null.
static td_status write_rendered(task *t, td_json_writer *w, const td_api_request *r,
                                const td_token_ids *ids) {
  unsigned char random[16];
  if (getrandom(random, sizeof random, 0) != sizeof random)
    return td_api_fail(&t->error, 503, NULL, NULL, "no random numbers");
  td_api_head head;
  td_api_head_init(&head, r->is_chat, NULL, NULL, 0, random);
  td_jw_add(w, "{'request_id': %s", head.id);
  write_ids(w, "token_ids", ids);
  td_jw_null(w, "features");
  write_sampling(w, r, t->host->n_ctx - ids->n);
  td_jw_add(w, "'model': %s, 'stream': %i, 'cache_salt': %s, 'priority': 0}", r->model, r->stream,
            r->cache_salt);
  return TD_OK;
}

// The prompts that this request would have at its endpoint: an object for a chat, an array for
// completions.
static td_status render(task *t, td_api_request *r) {
  const uint32_t n = r->is_chat ? 1 : r->n_prompts;
  td_status st = td_serve_check_model(t->serve, r->model, NULL, &t->error);
  if (st != TD_OK) return st;
  td_token_ids *prompts = calloc(n, sizeof *prompts);
  if (!prompts) return td_api_fail(&t->error, 503, NULL, NULL, "out of memory");
  for (uint32_t i = 0; i < n; i++)
    prompts[i] = (td_token_ids){.most = t->host->n_ctx, .is_canceled = &t->work.is_canceled};
  r->owner = td_serve_turn_owner(t->serve, &t->caller, r);
  st = encode_request(t, r, t->host->turns, prompts, NULL);
  if (st == TD_OK) st = td_serve_check_context(prompts, n, r->is_chat, t->host->n_ctx, &t->error);
  td_json_writer w = TD_JSON_WRITER(&t->answer);
  if (!r->is_chat) td_jw_begin_array(&w, NULL);
  for (uint32_t i = 0; i < n; i++) {
    if (st == TD_OK) st = write_rendered(t, &w, r, &prompts[i]);
    td_token_ids_free(&prompts[i]);
  }
  if (!r->is_chat) td_jw_end_array(&w);
  free(prompts);
  return st;
}

static td_status decode(task *t, td_api_request *request) {
  td_err err;
  td_buf text = TD_BUF_INIT;
  const td_api_prompt *prompt = &request->prompts[0];
  td_status st = td_tokenizer_decode(td_chat_tokenizer(t->chat), prompt->ids, prompt->n_ids, false,
                                     &text, &err);
  if (st == TD_OK)
    write_prompt(t, &text);
  else
    td_api_fail_err(&t->error, "tokens", &err);
  td_buf_free(&text);
  return st;
}

static td_status translate(task *t, td_dialect_state *state) {
  td_buf translated = TD_BUF_INIT;
  const td_dialect *dialect = t->kind == COUNT ? &td_dialect_messages : &td_dialect_responses;
  const td_status st = td_dialect_translate(dialect, state, td_buf_text(&t->body), t->body.len,
                                            &translated, &t->error);
  td_buf_free(&t->body);
  t->body = translated;
  return st;
}

typedef struct {
  td_status (*parse)(td_api_request *out, const char *body, size_t len,
                     const td_api_defaults *defaults, td_api_error *error);
  td_status (*answer)(task *t, td_api_request *request);
} method;

static const method methods[] = {
    [RENDER_TEXT] = {td_api_parse_completion, render},
    [RENDER_CHAT] = {td_api_parse_chat, render},
    [TOKENIZE] = {td_api_parse_tokenize, encode},
    [DETOKENIZE] = {td_api_parse_detokenize, decode},
    [APPLY_TEMPLATE] = {td_api_parse_tokenize, encode},
    [COUNT] = {td_api_parse_tokenize, encode},
    [COUNT_INPUT] = {td_api_parse_tokenize, encode},
};

// On the thread pool.
static void run(uv_work_t *work) {
  task *t = work->data;
  const method *m = &methods[t->kind];
  td_api_request request = {0};
  t->status = open_host(t);
  td_dialect_state state = {.is_count = true,
                            .sees = t->host && atomic_load(&t->host->sees),
                            .store = t->serve->responses,
                            .owner = td_serve_owner(t->serve, &t->caller)};
  if (t->status == TD_OK && t->kind >= COUNT) t->status = translate(t, &state);
  if (t->status == TD_OK) {
    td_api_defaults defaults = t->host->defaults;
    defaults.is_canceled = &t->work.is_canceled;
    defaults.sees = atomic_load(&t->host->sees);
    t->status = m->parse(&request, td_buf_text(&t->body), t->body.len, &defaults, &t->error);
    if (t->status == TD_OK) t->status = m->answer(t, &request);
    if (t->status != TD_OK) td_dialect_name(&state, &t->error);
  }
  td_dialect_state_free(&state);
  if (t->status == TD_OK && t->answer.failed)
    t->status = td_api_fail(&t->error, 503, NULL, NULL, "out of memory");
  td_api_request_free(&request);
  bool was_large = t->body.len >= TD_LANE_LARGE_BYTES;
  td_buf_free(&t->body);
  if (was_large) malloc_trim(0);
}

static void on_run(uv_work_t *work, int canceled) {
  (void)canceled;
  task *t = work->data;
  if (t->serve->http) td_http_bodies_freed(t->serve->http, &t->held);
  if (t->x && (td_serve_was_canceled(&t->work, &t->error) || t->status != TD_OK))
    td_serve_fail(t->x, &t->error);
  else if (t->x)
    td_http_respond(t->x, 200, "application/json", td_buf_text(&t->answer), t->answer.len);
  td_buf_free(&t->body);
  td_buf_free(&t->answer);
  free(t);
}

static void on_gone(void *arg) {
  task *t = arg;
  t->x = NULL;
  if (td_lane_cancel(&t->work)) on_run(&t->work.work, UV_ECANCELED);
}

static void start(td_serve *serve, td_http_exchange *x, task_kind kind) {
  task *t = calloc(1, sizeof *t);
  if (!t) {
    td_http_error(x, 503, "out of memory");
    return;
  }
  t->serve = serve;
  t->kind = kind;
  t->x = x;
  t->held = td_http_take_body(x, &t->body);
  td_serve_authorize(serve, x, &t->caller);
  t->work = (td_lane_work){.work.data = t,
                           .run = run,
                           .after = on_run,
                           .tenant = t->caller.tenant,
                           .weight = t->caller.weight,
                           .n_bytes = t->body.len};
  td_http_on_gone(x, on_gone, t);
  td_lane_queue(&serve->lane, &t->work);
}

#define TASK(name, kind)                                                                           \
  void td_serve_##name(void *ctx, td_http_exchange *x) {                                           \
    start(ctx, x, kind);                                                                           \
  }
TASK(chat_render, RENDER_CHAT)
TASK(completions_render, RENDER_TEXT)
TASK(tokenize, TOKENIZE)
TASK(detokenize, DETOKENIZE)
TASK(apply_template, APPLY_TEMPLATE)
TASK(count_tokens, COUNT)
TASK(input_tokens, COUNT_INPUT)
