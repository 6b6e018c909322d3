// src/front/completions.c - POST /v1/chat/completions, /v1/completions and the other protocols
// (api/dialect.h): one job per request.
// A job is prepared on the thread pool (parse, check, template, tokenize); everything else is on
// the loop's thread: each choice is submitted to the backend, tokens become text, and text becomes
// SSE events or one response. Every error a client can cause is detected before the first byte of
// the response.
#include <malloc.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "api/dialect.h"
#include "api/response.h"
#include "api/turn.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/trace.h"
#include "front/serve_impl.h"

#define LARGE_BODY_BYTES (1u << 20)

typedef struct td_job job;

typedef struct {
  job *job;
  uint32_t index;
  uint64_t id; // of the backend request
  bool running, started;
  uint64_t prefill_ns;                    // duration of the prefill
  uint64_t first_token_ns, last_token_ns; // arrival times
  uint32_t n_cached;                      // prompt tokens found in the prefix cache
  td_answer answer;
  td_output_parser parts;   // chat
  td_delta delta;           // chat: output not sent yet; without streaming, all of it
  uint32_t n_before_answer; // tokens up to the one that ended the reasoning; 0: none did
  double sum_logprob;       // of its tokens, if there are choices to choose from (best_of)
  const char *finish_reason;
  td_token_ids ids;      // chat: generated
  bool has_end;          // the last of them is an end token
  td_wire_token *prompt; // owned, [n_prompt]: its log-probabilities; NULL: not asked for
} choice;

struct td_job {
  td_serve *serve;
  td_host *host;       // the model; NULL until it is known
  td_host_use use;     // while it has or waits for the host
  job *prev, *next;    // in serve->jobs
  td_http_exchange *x; // NULL once the client is gone
  bool is_chat;
  const td_dialect *dialect; // NULL: OpenAI's chat or completions
  td_dialect_state state;
  td_lane_work work;
  bool preparing;
  td_buf body;
  size_t body_bytes; // its share of the HTTP server's body budget
  uint32_t n_ctx;    // context size when the request arrived
  td_api_request request;
  td_status status; // result of prepare
  td_api_error error;
  td_token_ids *prompts; // [n_prompts]
  uint32_t n_prompts;
  bool prompt_thinks; // the chat's prompt ends inside a reasoning block
  td_digest place;    // of the chat's answer (api/turn.h)
  uint64_t call_id;   // random; ids of tool calls are derived from it
  choice *choices;    // [n_choices]
  uint32_t n_choices, n_running;
  td_api_head head;
  td_api_usage usage;
  uint64_t begin_ns, first_token_ns;
  td_api_caller caller;
};

static void choice_free(choice *c) {
  td_answer_free(&c->answer);
  td_output_parser_free(&c->parts);
  td_delta_free(&c->delta);
  td_token_ids_free(&c->ids);
  free(c->prompt);
}

static void job_enter(job *j) {
  job **first = &j->serve->jobs;
  j->next = *first;
  if (j->next) j->next->prev = j;
  *first = j;
}

// Its body is no longer in memory.
static void release_body(job *j) {
  if (j->serve->http) td_http_bodies_freed(j->serve->http, j->body_bytes);
  j->body_bytes = 0;
}

static void job_free(job *j) {
  release_body(j);
  *(j->prev ? &j->prev->next : &j->serve->jobs) = j->next;
  if (j->next) j->next->prev = j->prev;
  for (uint32_t i = 0; i < j->n_choices; i++)
    choice_free(&j->choices[i]);
  free(j->choices);
  for (uint32_t i = 0; i < j->n_prompts; i++)
    td_token_ids_free(&j->prompts[i]);
  free(j->prompts);
  td_api_request_free(&j->request);
  td_dialect_state_free(&j->state);
  td_buf_free(&j->body);
  td_host_leave(&j->use);
  free(j);
}

// ---- ending a job ---------------------------------------------------------------------------

static void leave_worker(choice *c, td_finish how) {
  td_metrics *m = &c->job->host->metrics;
  c->running = false;
  c->job->n_running--;
  m->n_finished[how]++;
  td_trace_async(c->job->begin_ns, TD_TRACE_REQUEST, (uint32_t)c->answer.n_tokens, c->id);
  if (how == TD_FINISH_STOP || how == TD_FINISH_LENGTH) {
    td_histogram_add(&m->whole, td_clock_ns() - c->job->begin_ns);
  }
}

static void cancel_running(job *j) {
  for (uint32_t i = 0; i < j->n_choices; i++) {
    choice *c = &j->choices[i];
    if (!c->running) continue;
    td_backend_cancel(j->host->backend, c->id);
    leave_worker(c, TD_FINISH_ABORT);
  }
}

static void log_end(const job *j, int status) {
  uint64_t now = td_clock_ns();
  double first = j->first_token_ns ? (double)(j->first_token_ns - j->begin_ns) * 1e-6 : 0;
  td_info("%s %d: %llu prompt and %llu output tokens, first token after %.0f ms, %.2f s in all",
          j->is_chat ? "chat" : "completion", status, (unsigned long long)j->usage.n_prompt,
          (unsigned long long)j->usage.n_output, first, (double)(now - j->begin_ns) * 1e-9);
}

// Cached tokens are counted once per prompt, from its first choice.
static void count_usage(job *j) {
  for (uint32_t i = 0; i < j->n_choices; i++) {
    j->usage.n_output += j->choices[i].answer.n_tokens;
    if (i % j->request.n == 0) j->usage.n_cached += j->choices[i].n_cached;
  }
}

static void on_gone(void *arg) {
  job *j = arg;
  j->x = NULL;
  cancel_running(j);
  if (j->preparing) return; // the thread pool still uses it
  count_usage(j);
  log_end(j, 499);
  job_free(j);
}

// Fails a job whose response has not begun.
static void refuse(job *j, const td_api_error *error) {
  cancel_running(j);
  log_end(j, error->status);
  td_serve_fail_as(j->x, error, j->dialect);
  job_free(j);
}

// Sends an event and clears it. An event for which memory ran out ends the connection, so that the
// client does not take the rest for the whole.
static void send_event(job *j, td_buf *event) {
  if (event->failed) {
    td_http_abort(j->x);
  } else {
    td_http_sse_data(j->x, td_buf_text(event), event->len);
  }
  td_buf_clear(event);
}

// The same for bytes of a dialect's stream.
static void send_raw(job *j, td_buf *text) {
  if (text->failed) {
    td_http_abort(j->x);
  } else {
    td_http_sse_raw(j->x, td_buf_text(text), text->len);
  }
  td_buf_clear(text);
}

// Fails a running job: a stream gets an error event and ends without [DONE].
static void fail_running(job *j, int status, const char *message) {
  td_api_error error;
  td_api_fail(&error, status, NULL, NULL, "%s", message);
  if (!j->request.stream) {
    refuse(j, &error);
    return;
  }
  cancel_running(j);
  count_usage(j);
  td_buf text = TD_BUF_INIT;
  if (j->dialect) {
    j->dialect->error(&text, &error, true);
    send_raw(j, &text);
  } else {
    td_api_error_write(&text, &error);
    send_event(j, &text);
  }
  td_buf_free(&text);
  td_http_sse_end(j->x);
  log_end(j, error.status);
  job_free(j);
}

void td_serve_end_jobs(td_serve *serve, const char *why) {
  for (job *j = serve->jobs, *next; j; j = next) {
    next = j->next;
    if (!j->preparing) fail_running(j, 503, why);
  }
}

static uint64_t n_prompt_of(const choice *c) {
  return c->job->prompts[c->index / c->job->request.n].n;
}

static void add_timings(td_api_timings *t, const choice *c) {
  uint64_t n = c->answer.n_tokens;
  t->n_prefilled += n_prompt_of(c) - c->n_cached;
  t->n_cached += c->n_cached;
  t->prefill_ns += c->prefill_ns;
  t->n_output += n;
  t->n_followed += n ? n - 1 : 0;
  t->follow_ns += c->last_token_ns - c->first_token_ns;
}

static void end_dialect(job *j, td_buf *out, const td_delta *message) {
  const choice *c = &j->choices[0];
  const bool has_reasoning = message ? message->reasoning.len > 0 : j->state.reasoning.len > 0;
  if (has_reasoning) {
    j->usage.n_reasoning = c->n_before_answer ? c->n_before_answer : c->answer.n_tokens;
  }
  td_api_timings timings = {0};
  add_timings(&timings, c);
  const td_dialect_end end = {.finish_reason = c->finish_reason,
                              .answer = &c->answer,
                              .usage = &j->usage,
                              .timings = &timings};
  if (message) {
    j->dialect->whole(out, &j->state, message, &end);
  } else {
    j->dialect->end(out, &j->state, &end);
  }
}

static void end_stream(job *j) {
  td_buf event = TD_BUF_INIT;
  if (j->dialect) {
    end_dialect(j, &event, NULL);
    send_raw(j, &event);
    td_buf_free(&event);
    td_http_sse_end(j->x);
    return;
  }
  if (j->request.include_usage) {
    td_api_write_usage(&event, &j->head, &j->usage);
    send_event(j, &event);
  }
  td_buf_free(&event);
  td_http_sse_data(j->x, "[DONE]", 6);
  td_http_sse_end(j->x);
}

static double mean_logprob(const choice *c) {
  return c->answer.n_tokens ? c->sum_logprob / (double)c->answer.n_tokens : -INFINITY;
}

// Whether fewer than n_best choices for the same prompt are likelier per token; of equals the first
// wins.
static bool is_among_best(const job *j, uint32_t index) {
  const uint32_t n = j->request.n, first = index / n * n;
  const double own = mean_logprob(&j->choices[index]);
  uint32_t n_before = 0;
  for (uint32_t i = first; i < first + n; i++) {
    const double other = mean_logprob(&j->choices[i]);
    n_before += other > own || (other == own && i < index);
  }
  return n_before < j->request.n_best;
}

static bool send_response(job *j) {
  td_api_choice *choices = calloc(j->n_choices, sizeof *choices);
  td_buf body = TD_BUF_INIT;
  td_api_timings timings = {0}; // sums over all choices
  if (choices && j->dialect) {
    end_dialect(j, &body, &j->choices[0].delta);
  } else if (choices) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < j->n_choices; i++) {
      const choice *c = &j->choices[i];
      add_timings(&timings, c);
      if (!is_among_best(j, i)) continue;
      choices[n++] = (td_api_choice){.answer = &c->answer,
                                     .message = &c->delta,
                                     .parts = &c->parts,
                                     .finish_reason = c->finish_reason,
                                     .prompt = c->prompt,
                                     .n_prompt = (uint32_t)n_prompt_of(c),
                                     .n_prompt_top = (uint32_t)j->request.n_prompt_logprobs};
    }
    td_api_write_response(&body, &j->head, choices, n, &j->usage, &timings);
  }
  bool ok = choices && !body.failed;
  if (ok) td_http_respond(j->x, 200, "application/json", body.data, body.len);
  free(choices);
  td_buf_free(&body);
  return ok;
}

static void end_job(job *j) {
  count_usage(j);
  if (j->request.stream) {
    end_stream(j);
  } else if (!send_response(j)) {
    fail_running(j, 500, "out of memory");
    return;
  }
  log_end(j, 200);
  job_free(j);
}

// ---- tokens ---------------------------------------------------------------------------------

static void send_dialect(choice *c, td_buf *out, bool has_piece) {
  job *j = c->job;
  const td_api_usage usage = {.n_prompt = n_prompt_of(c), .n_cached = c->n_cached};
  if (!c->started) j->dialect->begin(out, &j->state, &usage);
  c->started = true;
  if (has_piece) j->dialect->delta(out, &j->state, &c->delta);
  td_delta_clear(&c->delta, &c->parts);
  if (out->len) send_raw(j, out);
}

// Takes the output of a choice that is final, and sends it if the response is streamed. With usage
// in every chunk each token gets its own event, even if it adds no text.
static td_status take_piece(choice *c, td_err *err) {
  job *j = c->job;
  td_answer_piece piece;
  bool has_piece = td_answer_take(&c->answer, &piece);
  if (j->is_chat) {
    td_status st = td_delta_gather(&c->delta, &c->parts, &c->answer, err);
    if (st != TD_OK) return st;
    has_piece = !td_delta_is_empty(&c->delta) || piece.last > piece.first;
  }
  if (!j->request.stream) return TD_OK; // the output is kept for the response
  td_buf event = TD_BUF_INIT;
  if (j->dialect) {
    send_dialect(c, &event, has_piece);
    td_buf_free(&event);
    return TD_OK;
  }
  if (!c->started && j->is_chat) {
    td_api_write_role(&event, &j->head, c->index);
    send_event(j, &event);
  }
  c->started = true;
  const td_api_usage usage = {
      .n_prompt = n_prompt_of(c), .n_output = c->answer.n_tokens, .n_cached = c->n_cached};
  const td_api_usage *so_far = j->request.include_usage_so_far ? &usage : NULL;
  if (has_piece || (so_far && !c->answer.finished)) {
    if (j->is_chat) {
      td_api_write_delta(&event, &j->head, c->index, &c->answer, &piece, &c->parts, &c->delta,
                         so_far);
      td_delta_clear(&c->delta, &c->parts);
    } else {
      td_api_write_piece(&event, &j->head, c->index, &c->answer, &piece, so_far);
    }
    send_event(j, &event);
  }
  td_buf_free(&event);
  return TD_OK;
}

static const char *finish_reason(const choice *c, td_finish how) {
  if (how != TD_FINISH_STOP || c->job->request.max_tokens == 0) return "length";
  return c->parts.n_calls ? "tool_calls" : "stop";
}

// Remembers what was generated for when the conversation comes back. An answer that a stop string
// cut is not: its last tokens hold more than was sent.
static void keep_turn(const choice *c) {
  const job *j = c->job;
  if (!j->is_chat || j->n_choices != 1 || j->request.is_continued || c->answer.stopped) return;
  const td_generated g = {.place = &j->place,
                          .how = &c->parts,
                          .text = &c->answer.text,
                          .prompt = &j->prompts[0],
                          .ids = &c->ids,
                          .has_end = c->has_end};
  td_serve_keep_turn(j->host->turns, &g);
}

static void end_choice(choice *c, td_finish how) {
  job *j = c->job;
  td_err err;
  td_status st = td_answer_finish(&c->answer, &err);
  if (st == TD_OK) st = take_piece(c, &err);
  if (st != TD_OK) {
    leave_worker(c, TD_FINISH_ERROR);
    fail_running(j, 500, err.msg);
    return;
  }
  if (c->answer.stopped) how = TD_FINISH_STOP;
  leave_worker(c, how);
  keep_turn(c);
  c->finish_reason = finish_reason(c, how);
  if (j->request.stream && !j->dialect) {
    td_buf event = TD_BUF_INIT;
    td_api_timings timings = {0};
    add_timings(&timings, c);
    td_api_write_finish(&event, &j->head, c->index, c->finish_reason, &timings);
    send_event(j, &event);
    td_buf_free(&event);
  }
  if (j->n_running == 0) end_job(j);
}

static void note_token(choice *c) {
  job *j = c->job;
  td_metrics *m = &j->host->metrics;
  uint64_t now_ns = td_clock_ns();
  if (!c->first_token_ns) {
    c->first_token_ns = now_ns;
    td_histogram_add(&m->first_token, now_ns - j->begin_ns);
  } else {
    td_histogram_add(&m->next_token, now_ns - c->last_token_ns);
  }
  if (!j->first_token_ns) j->first_token_ns = now_ns;
  c->last_token_ns = now_ns;
  m->n_output++;
}

// Notes which token ended the reasoning. from: the text's length before it.
static void note_reasoning(choice *c, size_t from) {
  static const char *const marks[] = {"</think>", "[/THINK]"};
  const td_buf *text = &c->answer.text;
  if (c->n_before_answer || text->len == from) return;
  for (size_t i = 0; i < TD_COUNT(marks); i++) {
    const size_t n = strlen(marks[i]), begin = from > n ? from - n : 0;
    if (memmem(text->data + begin, text->len - begin, marks[i], n)) {
      c->n_before_answer = c->answer.n_tokens;
    }
  }
}

static void on_token(void *ctx, const td_wire_token *token) {
  choice *c = ctx;
  job *j = c->job;
  td_err err;
  if (j->request.max_tokens == 0) return; // drawn by the way
  note_token(c);
  c->sum_logprob += (double)token->logprob;
  size_t n_text = c->answer.text.len;
  td_status st = td_answer_add(&c->answer, token, &err);
  if (st == TD_OK && j->is_chat) st = td_token_ids_push(&c->ids, token->id, &err);
  note_reasoning(c, n_text);
  if (st == TD_OK && c->answer.stopped) {
    td_backend_cancel(j->host->backend, c->id);
    end_choice(c, TD_FINISH_STOP);
    return;
  }
  bool ends_early = j->is_chat && j->request.one_call;
  if (st == TD_OK && (j->request.stream || ends_early)) st = take_piece(c, &err);
  if (st != TD_OK) {
    fail_running(j, 500, err.msg);
  } else if (c->parts.state == TD_PARTS_DONE) {
    td_backend_cancel(j->host->backend, c->id);
    end_choice(c, TD_FINISH_STOP);
  }
}

static void on_prompt_token(void *ctx, const td_wire_token *token) {
  choice *c = ctx;
  td_err err;
  if (c->prompt) c->prompt[token->index] = *token;
  if (!c->job->request.echo || !c->job->request.logprobs) return;
  if (td_answer_echo(&c->answer, token, &err) != TD_OK) fail_running(c->job, 500, err.msg);
}

static void on_progress(void *ctx, const td_wire_progress *progress) {
  choice *c = ctx;
  c->n_cached = progress->n_cached;
  c->prefill_ns = progress->elapsed_ns;
  if (progress->n_done < progress->n_prompt) return;
  c->job->host->metrics.n_prompt += progress->n_prompt;
  c->job->host->metrics.n_cached += progress->n_cached;
}

static void on_done(void *ctx, const td_wire_done *done) {
  choice *c = ctx;
  switch (done->reason) {
  case TD_DONE_STOP:
    c->has_end = c->ids.n > 0;
    end_choice(c, TD_FINISH_STOP);
    break;
  case TD_DONE_LENGTH: end_choice(c, TD_FINISH_LENGTH); break;
  case TD_DONE_CANCELED:
    leave_worker(c, TD_FINISH_ABORT);
    fail_running(c->job, 500, "the request was canceled");
    break;
  default:
    leave_worker(c, TD_FINISH_ERROR);
    fail_running(c->job, done->reason == TD_DONE_LOST ? 503 : 500,
                 done->text[0] ? done->text : "the worker failed");
    break;
  }
}

// ---- submission -----------------------------------------------------------------------------

static td_status check_context(job *j, uint32_t n_ctx) {
  const char *param = j->is_chat ? "messages" : "prompt";
  for (uint32_t i = 0; i < j->n_prompts; i++) {
    bool is_cut = j->prompts[i].is_cut; // tokenization stopped at the limit
    size_t n = is_cut ? j->prompts[i].most + 1 : j->prompts[i].n;
    if (n == 0) return td_api_bad(&j->error, param, "the prompt has no tokens");
    if (n < n_ctx) continue;
    td_api_fail(&j->error, 400, param, "context_length_exceeded",
                "This model's maximum context length is %u tokens. However, the prompt has %s%zu "
                "tokens, and the output needs room for at least one: shorten the %s, or start the "
                "server with a larger --ctx-size.",
                n_ctx, is_cut ? "at least " : "", n, param);
    j->error.n_prompt_tokens = (int64_t)n;
    j->error.n_ctx = n_ctx;
    return TD_EINVAL;
  }
  return TD_OK;
}

// End tokens beyond those the checkpoint names: the tokenizer's EOS, stop_token_ids, and stop
// strings that are the text of a control token (which never appears in the output). At most one,
// all stop_token_ids, and one for each stop string.
static uint32_t collect_ends(const job *j, int32_t *ends) {
  const td_api_request *r = &j->request;
  const td_tokenizer *tok = td_chat_tokenizer(j->host->chat);
  uint32_t n = 0;
  if (!r->ignore_eos && td_tokenizer_eos(tok) >= 0) ends[n++] = td_tokenizer_eos(tok);
  for (uint32_t i = 0; i < r->n_stop_ids; i++)
    ends[n++] = r->stop_ids[i];
  for (unsigned i = 0; i < r->stops.n; i++) {
    int32_t id = td_tokenizer_find(tok, r->stops.strings[i].text, r->stops.strings[i].len);
    if (id >= 0 && td_tokenizer_is_special(tok, id)) ends[n++] = id;
  }
  return n;
}

static td_status submit(job *j, choice *c, uint32_t n_ctx) {
  const td_api_request *r = &j->request;
  int32_t ends[1 + TD_API_MAX_STOP_IDS + TD_API_MAX_STOPS];
  const td_token_ids *prompt = &j->prompts[c->index / r->n];
  uint32_t room = n_ctx - (uint32_t)prompt->n;
  bool all = r->max_tokens < 0 || r->max_tokens > room;
  bool is_scored = r->n_prompt_logprobs >= 0 || (r->echo && r->logprobs);
  uint32_t most = r->max_tokens ? (uint32_t)r->max_tokens : 1;
  td_request request = {.prompt = prompt->ids,
                        .n_prompt = (uint32_t)prompt->n,
                        .max_tokens = all ? room : most,
                        .flags = (r->ignore_eos ? TD_SUBMIT_IGNORE_EOS : 0u) |
                                 (r->logprobs || r->n > r->n_best ? TD_SUBMIT_LOGPROBS : 0u) |
                                 (is_scored ? TD_SUBMIT_SCORE_PROMPT : 0u),
                        .sampling = r->sampling,
                        .bias = r->bias,
                        .n_bias = r->n_bias,
                        .grammar = r->grammar.data,
                        .n_grammar = (uint32_t)r->grammar.len,
                        .ends = ends,
                        .n_ends = collect_ends(j, ends),
                        .min_tokens = (uint32_t)r->min_tokens,
                        .tenant = j->caller.tenant,
                        .weight = j->caller.weight};
  request.sampling.seed += c->index % r->n;
  if (r->n_prompt_logprobs > (int64_t)request.sampling.n_top_logprobs) {
    request.sampling.n_top_logprobs = (uint32_t)r->n_prompt_logprobs;
  }
  td_request_callbacks callbacks = {.on_progress = on_progress,
                                    .on_token = on_token,
                                    .on_prompt_token = on_prompt_token,
                                    .on_done = on_done,
                                    .ctx = c};
  td_err err;
  td_status st = td_backend_submit(j->host->backend, &request, &callbacks, &c->id, &err);
  if (st == TD_EAGAIN) {
    bool ready = td_backend_state_of(j->host->backend) == TD_BACKEND_READY;
    st = td_api_fail(&j->error, ready ? 429 : 503, NULL, NULL, "%s", err.msg);
  } else if (st != TD_OK) {
    st = td_api_fail_err(&j->error, NULL, &err);
  }
  if (st != TD_OK) {
    j->error.retry_s = td_backend_retry_s(j->host->backend);
    return st;
  }
  c->running = true;
  j->n_running++;
  return TD_OK;
}

// What the response says of the prompt: its text, its log-probabilities. The first token has none.
static td_status open_prompt(choice *c) {
  job *j = c->job;
  const td_api_request *r = &j->request;
  const td_token_ids *prompt = &j->prompts[c->index / r->n];
  td_err err;
  td_status st = TD_OK;
  size_t n_echoed = !r->echo ? 0 : r->logprobs && prompt->n ? 1 : prompt->n; // others are scored
  for (size_t i = 0; i < n_echoed && st == TD_OK; i++) {
    st = td_answer_echo(&c->answer, &(td_wire_token){.id = prompt->ids[i], .logprob = NAN}, &err);
  }
  if (st == TD_OK && r->n_prompt_logprobs >= 0 && prompt->n) {
    c->prompt = calloc(prompt->n, sizeof *c->prompt);
    if (!c->prompt) return td_api_fail(&j->error, 503, NULL, NULL, "out of memory");
    c->prompt[0] = (td_wire_token){.id = prompt->ids[0], .logprob = NAN};
  }
  return st == TD_OK ? st : td_api_fail_err(&j->error, NULL, &err);
}

static td_status open_choices(job *j) {
  const td_api_request *r = &j->request;
  j->choices = calloc((size_t)j->n_prompts * r->n, sizeof *j->choices);
  if (!j->choices) return td_api_fail(&j->error, 503, NULL, NULL, "out of memory");
  j->n_choices = j->n_prompts * r->n;
  const td_chat *chat = j->host->chat;
  const bool is_harmony = j->is_chat && td_chat_template_mentions(chat, "<|channel|>");
  // Mistral's calls and thoughts are marked with control tokens.
  const bool is_mistral = j->is_chat && (td_chat_template_mentions(chat, "[TOOL_CALLS]") ||
                                         td_chat_template_mentions(chat, "[THINK]"));
  for (uint32_t i = 0; i < j->n_choices; i++) {
    choice *c = &j->choices[i];
    c->job = j;
    c->index = i;
    td_answer_init(&c->answer, td_chat_tokenizer(j->host->chat),
                   &(td_answer_opts){.stops = &r->stops,
                                     .keep_tokens = r->logprobs,
                                     .shows_special = r->shows_special || is_harmony || is_mistral,
                                     .min_tokens = (uint32_t)r->min_tokens});
    c->parts = (td_output_parser){.begins_in_reasoning = j->prompt_thinks,
                                  .parse_tool_calls = r->has_tools,
                                  .in_pieces = r->stream,
                                  .one_call = r->one_call,
                                  .is_harmony = is_harmony,
                                  .id = j->call_id + i,
                                  .params = &r->params};
    td_status st = open_prompt(c);
    if (st != TD_OK) return st;
  }
  return TD_OK;
}

// The other protocols have one answer, and no log-probabilities.
static void begin_dialect(job *j) {
  j->state.head = &j->head;
  j->state.parts = &j->choices[0].parts;
}

static td_status begin_answer(job *j) {
  unsigned char random[16];
  uint64_t seed;
  if (getrandom(random, sizeof random, 0) != sizeof random ||
      getrandom(&seed, sizeof seed, 0) != sizeof seed) {
    return td_api_fail(&j->error, 503, NULL, NULL, "no random numbers");
  }
  if (!j->request.has_seed) j->request.sampling.seed = seed;
  td_api_head_init(&j->head, j->is_chat, j->host->name, td_chat_tokenizer(j->host->chat),
                   (int64_t)time(NULL), random);
  memcpy(&j->call_id, random + 8, sizeof j->call_id);
  uint32_t n_ctx = j->host->n_ctx;
  td_status st = check_context(j, n_ctx);
  if (st == TD_OK) st = open_choices(j);
  if (st == TD_OK && j->dialect) begin_dialect(j);
  for (uint32_t i = 0; st == TD_OK && i < j->n_choices; i++) {
    st = submit(j, &j->choices[i], n_ctx);
  }
  for (uint32_t i = 0; i < j->n_prompts; i++)
    j->usage.n_prompt += j->prompts[i].n;
  return st;
}

// ---- preparation ----------------------------------------------------------------------------

static td_status check_model(const job *j, td_api_error *error) {
  const char *asked = j->request.model, *suffix = j->dialect ? j->dialect->model_suffix : NULL;
  if (!asked || td_hosts_find(&j->serve->hosts, asked, suffix)) return TD_OK;
  return td_serve_unknown_model(j->serve, asked, error);
}

static td_status open_chat(job *j) {
  td_err err;
  return td_host_chat(j->host, &err) ? TD_OK : td_api_fail_err(&j->error, NULL, &err);
}

// On the thread pool. Uses only the job and immutable state.
static void prepare(uv_work_t *work) {
  job *j = work->data;
  const td_api_defaults *defaults = &j->host->defaults;
  const char *body = td_buf_text(&j->body);
  td_status (*parse)(td_api_request *, const char *, size_t, const td_api_defaults *,
                     td_api_error *) = j->is_chat ? td_api_parse_chat : td_api_parse_completion;
  j->status = TD_OK;
  if (j->dialect) {
    td_buf translated = TD_BUF_INIT;
    j->status = td_dialect_translate(j->dialect, &j->state, body, j->body.len, &translated,
                                     &j->error);
    td_buf_free(&j->body);
    j->body = translated;
    body = td_buf_text(&j->body);
  }
  if (j->status == TD_OK) {
    j->status = parse(&j->request, body, j->body.len, defaults, &j->error);
  }
  td_buf_free(&j->body);
  if (j->dialect) {
    j->request.n = j->request.n_best = 1;
    j->request.logprobs = j->request.include_usage = j->request.include_usage_so_far = false;
  }
  if (j->status == TD_OK) j->status = check_model(j, &j->error);
  if (j->status == TD_OK) j->status = open_chat(j);
  if (j->status != TD_OK) return;
  uint32_t n = j->is_chat ? 1 : j->request.n_prompts;
  j->prompts = calloc(n, sizeof *j->prompts);
  if (!j->prompts) {
    j->status = td_api_fail(&j->error, 503, NULL, NULL, "out of memory");
    return;
  }
  j->n_prompts = n;
  for (uint32_t i = 0; i < n; i++)
    j->prompts[i].most = j->n_ctx;
  uint64_t begin_ns = td_trace_begin();
  td_buf text = TD_BUF_INIT;
  j->status = td_serve_encode(j->host->chat, j->host->turns, &j->request, j->prompts,
                              j->is_chat ? &text : NULL, &j->error);
  j->prompt_thinks = td_output_parser_prompt_thinks(td_buf_text(&text), text.len);
  td_buf_free(&text);
  if (j->status == TD_OK) {
    j->status = td_serve_compose(j->host->chat, &j->request, j->prompt_thinks, &j->error);
  }
  if (j->is_chat) td_api_turn_place(&j->request, &j->place);
  bool is_cut = false;
  for (uint32_t i = 0; i < n; i++)
    is_cut |= j->prompts[i].is_cut;
  if (is_cut) check_context(j, j->n_ctx);
  td_buf_free(&j->request.vars);
  td_buf_free(&j->request.plain_vars);
  td_trace_span(begin_ns, TD_TRACE_PREPARE, 0, 0);
}

// Returns the memory of a large body to the system.
static void run_prepare(uv_work_t *work) {
  job *j = work->data;
  bool was_large = j->body.len >= LARGE_BODY_BYTES;
  prepare(work);
  td_buf_free(&j->body);
  if (was_large) malloc_trim(0);
}

static void on_prepared(uv_work_t *work, int canceled) {
  (void)canceled;
  job *j = work->data;
  release_body(j);
  j->preparing = false;
  if (!j->x) {
    job_free(j);
    return;
  }
  if (j->status == TD_OK) j->status = begin_answer(j);
  if (j->status != TD_OK) {
    refuse(j, &j->error);
  } else if (j->request.stream && j->dialect && j->dialect->stream_type) {
    td_http_stream_begin(j->x, 200, j->dialect->stream_type);
  } else if (j->request.stream) {
    td_http_sse_begin(j->x);
  }
}

static void begin_prepare(job *j) {
  j->preparing = true;
  j->n_ctx = j->host->n_ctx;
  if (j->is_chat) {
    td_lane_queue(&j->serve->templates, &j->work, run_prepare, on_prepared);
  } else {
    TD_CHECK(uv_queue_work(&j->serve->loop, &j->work.work, run_prepare, on_prepared) == 0);
  }
}

// ---- the model ------------------------------------------------------------------------------

static void on_turn(td_host_use *use, const char *why) {
  job *j = (job *)((char *)use - offsetof(job, use));
  td_api_error error;
  if (!why) {
    begin_prepare(j);
    return;
  }
  td_api_fail(&error, 503, NULL, NULL, "%s", why);
  refuse(j, &error);
}

static void enter_host(job *j) {
  j->use.on_turn = on_turn;
  if (td_host_enter(j->host, &j->use)) begin_prepare(j);
}

// On the thread pool.
static void find_host(uv_work_t *work) {
  job *j = work->data;
  const char *suffix = j->dialect ? j->dialect->model_suffix : NULL;
  j->host = td_serve_pick(j->serve, &j->body, suffix, &j->error);
}

static void on_host_found(uv_work_t *work, int canceled) {
  (void)canceled;
  job *j = work->data;
  j->preparing = false;
  if (!j->x) {
    job_free(j);
  } else if (j->host) {
    enter_host(j);
  } else {
    refuse(j, &j->error);
  }
}

static void start_job(td_serve *serve, td_http_exchange *x, bool is_chat,
                      const td_dialect *dialect) {
  if (td_serve_refuse_unready(serve, x)) return;
  job *j = calloc(1, sizeof *j);
  if (!j) {
    td_http_error(x, 503, "out of memory");
    return;
  }
  j->serve = serve;
  j->x = x;
  j->is_chat = is_chat;
  j->dialect = dialect;
  j->state.store = serve->responses;
  job_enter(j);
  j->begin_ns = td_clock_ns();
  j->work.work.data = j;
  td_serve_authorize(serve, x, &j->caller);
  j->body_bytes = td_http_take_body(x, &j->body);
  td_http_on_gone(x, on_gone, j);
  if (serve->hosts.n == 1) {
    j->host = &serve->hosts.all[0];
    enter_host(j);
  } else {
    j->preparing = true;
    TD_CHECK(uv_queue_work(&serve->loop, &j->work.work, find_host, on_host_found) == 0);
  }
}

void td_serve_chat(void *ctx, td_http_exchange *x) {
  start_job(ctx, x, true, NULL);
}

void td_serve_completions(void *ctx, td_http_exchange *x) {
  start_job(ctx, x, false, NULL);
}

void td_serve_responses(void *ctx, td_http_exchange *x) {
  start_job(ctx, x, true, &td_dialect_responses);
}

void td_serve_messages(void *ctx, td_http_exchange *x) {
  start_job(ctx, x, true, &td_dialect_messages);
}

void td_serve_ollama_chat(void *ctx, td_http_exchange *x) {
  start_job(ctx, x, true, &td_dialect_ollama_chat);
}

void td_serve_ollama_generate(void *ctx, td_http_exchange *x) {
  start_job(ctx, x, true, &td_dialect_ollama_generate);
}
