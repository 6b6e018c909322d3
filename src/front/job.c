// src/front/job.c - tokens become text, and text becomes SSE events or one response; how jobs end.
#include "front/job.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/trace.h"

static void choice_free(td_choice *c) {
  td_answer_free(&c->answer);
  td_output_parser_free(&c->parts);
  td_delta_free(&c->delta);
  td_token_ids_free(&c->ids);
  td_buf_free(&c->drawn);
  free(c->prompt);
}

void td_job_release_body(td_job *j) {
  if (j->serve->http) td_http_bodies_freed(j->serve->http, &j->held);
}

void td_job_free(td_job *j) {
  td_job_release_body(j);
  *(j->prev ? &j->prev->next : &j->serve->jobs) = j->next;
  if (j->next) j->next->prev = j->prev;
  for (uint32_t i = 0; i < j->n_choices; i++)
    choice_free(&j->choices[i]);
  free(j->choices);
  for (uint32_t i = 0; i < j->n_prompts; i++)
    td_token_ids_free(&j->prompts[i]);
  free(j->prompts);
  td_pictures_drop(j->pictures);
  td_api_request_free(&j->request);
  td_dialect_state_free(&j->state);
  td_buf_free(&j->body);
  td_host_leave(&j->use);
  free(j);
}

// ---- ending a job ---------------------------------------------------------------------------

static void leave_worker(td_choice *c, td_finish how) {
  td_metrics *m = &c->job->host->metrics;
  c->running = false;
  c->job->n_running--;
  m->n_finished[how]++;
  td_trace_async(c->job->begin_ns, TD_TRACE_REQUEST, (uint32_t)c->answer.n_tokens, c->id);
  if (how == TD_FINISH_STOP || how == TD_FINISH_LENGTH)
    td_histogram_add(&m->whole, td_clock_ns() - c->job->begin_ns);
}

static void cancel_running(td_job *j) {
  for (uint32_t i = 0; i < j->n_choices; i++) {
    td_choice *c = &j->choices[i];
    if (!c->running) continue;
    td_backend_cancel(j->host->backend, c->id);
    leave_worker(c, TD_FINISH_ABORT);
  }
}

static void log_end(const td_job *j, int status) {
  uint64_t now = td_clock_ns();
  double first = j->first_token_ns ? (double)(j->first_token_ns - j->begin_ns) * 1e-6 : 0;
  td_info("%s %d: %llu prompt and %llu output tokens, first token after %.0f ms, %.2f s in all",
          j->is_chat ? "chat" : "completion", status, (unsigned long long)j->usage.n_prompt,
          (unsigned long long)j->usage.n_output, first, (double)(now - j->begin_ns) * 1e-9);
}

// Cached tokens are counted once per prompt, from its first choice.
static void count_usage(td_job *j) {
  for (uint32_t i = 0; i < j->n_choices; i++) {
    j->usage.n_output += j->choices[i].answer.n_tokens;
    j->usage.n_accepted += j->choices[i].n_accepted;
    j->usage.n_rejected += j->choices[i].n_rejected;
    if (i % j->request.n == 0) j->usage.n_cached += j->choices[i].n_cached;
  }
}

void td_job_on_gone(void *arg) {
  td_job *j = arg;
  j->x = NULL;
  cancel_running(j);
  if (j->preparing) return; // the thread pool still uses it
  count_usage(j);
  log_end(j, 499);
  td_job_free(j);
}

void td_job_name(const td_job *j, td_api_error *error) {
  if (j->dialect) td_dialect_name(&j->state, error);
}

// Sends an event and clears it. An event for which memory ran out ends the connection, so that the
// client does not take the rest for the whole.
static void send_event(td_job *j, td_buf *event) {
  if (event->failed)
    td_http_abort(j->x);
  else
    td_http_sse_data(j->x, td_buf_text(event), event->len);
  td_buf_clear(event);
}

// The same for bytes of a dialect's stream.
static void send_raw(td_job *j, td_buf *text) {
  if (text->failed)
    td_http_abort(j->x);
  else
    td_http_stream_write(j->x, td_buf_text(text), text->len);
  td_buf_clear(text);
}

// The protocol's event of an error, behind which the stream ends.
static void end_in_error(td_job *j, td_api_error *error) {
  td_buf text = TD_BUF_INIT, id = TD_BUF_INIT;
  td_http_added_header(j->x, TD_REQUEST_ID, &id);
  error->request_id = td_buf_text(&id);
  j->dialect->error(&text, error, true);
  td_buf_free(&id);
  send_raw(j, &text);
  td_buf_free(&text);
  td_http_sse_end(j->x);
}

void td_job_refuse(td_job *j, const td_api_error *error) {
  cancel_running(j);
  log_end(j, error->status);
  // Clients of Responses that stream, such as Codex, shorten the conversation when the response
  // fails for its length, which they read from the stream alone.
  if (j->dialect == &td_dialect_responses && j->request.stream && error->code &&
      strcmp(error->code, "context_length_exceeded") == 0) {
    td_api_error told = *error;
    td_http_sse_begin(j->x);
    end_in_error(j, &told);
  } else {
    td_serve_fail(j->x, error);
  }
  td_job_free(j);
}

// Fails a running job: a stream gets an error event and ends without [DONE].
// param: the member of the request that is wrong, or NULL.
static void fail_running(td_job *j, int status, const char *param, const char *message) {
  td_api_error error;
  td_api_fail(&error, status, param, NULL, "%s%s%s", param ? param : "", param ? ": " : "",
              message);
  td_job_name(j, &error);
  if (!j->request.stream) {
    td_job_refuse(j, &error);
    return;
  }
  cancel_running(j);
  count_usage(j);
  if (j->dialect) {
    end_in_error(j, &error);
  } else {
    td_buf text = TD_BUF_INIT;
    td_api_error_write(&text, &error);
    send_event(j, &text);
    td_buf_free(&text);
    td_http_sse_end(j->x);
  }
  log_end(j, error.status);
  td_job_free(j);
}

void td_serve_end_jobs(td_serve *serve, const char *why) {
  for (td_job *j = serve->jobs, *next; j; j = next) {
    next = j->next;
    if (!j->preparing) fail_running(j, 503, NULL, why);
  }
}

static uint64_t n_prompt_of(const td_choice *c) {
  return c->job->prompts[c->index / c->job->request.n].n;
}

static void add_timings(td_api_timings *t, const td_choice *c) {
  uint64_t n = c->answer.n_tokens;
  t->n_prefilled += n_prompt_of(c) - c->n_cached;
  t->n_cached += c->n_cached;
  t->prefill_ns += c->prefill_ns;
  t->n_output += n;
  t->n_followed += n ? n - 1 : 0;
  t->follow_ns += c->last_token_ns - c->first_token_ns;
}

static void end_dialect(td_job *j, td_buf *out, const td_delta *message) {
  const td_choice *c = &j->choices[0];
  const bool has_reasoning = message ? message->reasoning.len > 0 : j->state.reasoning.len > 0;
  if (has_reasoning) j->usage.n_reasoning = c->n_reasoning;
  td_api_timings timings = {0};
  add_timings(&timings, c);
  const td_dialect_end end = {.finish_reason = c->finish_reason,
                              .answer = &c->answer,
                              .usage = &j->usage,
                              .timings = &timings};
  if (message)
    j->dialect->whole(out, &j->state, message, &end);
  else
    j->dialect->end(out, &j->state, &end);
}

static void end_stream(td_job *j) {
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

static double mean_logprob(const td_choice *c) {
  return c->answer.n_tokens ? c->sum_logprob / (double)c->answer.n_tokens : -INFINITY;
}

// Whether fewer than n_best choices for the same prompt are likelier per token; of equals the first
// wins.
static bool is_among_best(const td_job *j, uint32_t index) {
  const uint32_t n = j->request.n, first = index / n * n;
  const double own = mean_logprob(&j->choices[index]);
  uint32_t n_before = 0;
  for (uint32_t i = first; i < first + n; i++) {
    const double other = mean_logprob(&j->choices[i]);
    n_before += other > own || (other == own && i < index);
  }
  return n_before < j->request.n_best;
}

static td_receipt receipt_of(const td_choice *c) {
  const td_job *j = c->job;
  const td_token_ids *prompt = &j->prompts[c->index / j->request.n];
  return (td_receipt){.options = &j->host->options,
                      .model = j->head.model,
                      .computed_by = j->host->computed_by,
                      .weights = j->host->weights,
                      .sampling = c->sampling,
                      .ignore_eos = j->request.ignore_eos,
                      .has_tokenizer = true,
                      .is_ended = c->is_ended && !j->request.n_stop_ids && !j->request.stops.n,
                      .prompt = prompt->ids,
                      .n_prompt = prompt->n,
                      .answer = (const td_token_value *)(const void *)td_buf_text(&c->drawn),
                      .n_answer = c->drawn.len / sizeof(td_token_value)};
}

static bool send_response(td_job *j) {
  td_api_choice *choices = calloc(j->n_choices, sizeof *choices);
  td_receipt *receipts = j->request.receipt ? calloc(j->n_choices, sizeof *receipts) : NULL;
  td_buf body = TD_BUF_INIT;
  td_api_timings timings = {0}; // sums over all choices
  if (choices && j->dialect) {
    end_dialect(j, &body, &j->choices[0].delta);
  } else if (choices) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < j->n_choices; i++) {
      const td_choice *c = &j->choices[i];
      add_timings(&timings, c);
      if (!is_among_best(j, i)) continue;
      if (receipts) receipts[i] = receipt_of(c);
      choices[n++] = (td_api_choice){.answer = &c->answer,
                                     .message = &c->delta,
                                     .parts = &c->parts,
                                     .finish_reason = c->finish_reason,
                                     .receipt = receipts ? &receipts[i] : NULL,
                                     .prompt = c->prompt,
                                     .n_prompt = (uint32_t)n_prompt_of(c),
                                     .n_prompt_top = (uint32_t)j->request.n_prompt_logprobs};
    }
    td_api_write_response(&body, &j->head, choices, n, &j->usage, &timings);
  }
  bool ok = choices && (receipts || !j->request.receipt) && !body.failed;
  if (ok) td_http_respond(j->x, 200, "application/json", body.data, body.len);
  free(choices);
  free(receipts);
  td_buf_free(&body);
  return ok;
}

static void end_job(td_job *j) {
  count_usage(j);
  if (j->request.stream) {
    end_stream(j);
  } else if (!send_response(j)) {
    fail_running(j, 500, NULL, "out of memory");
    return;
  }
  log_end(j, 200);
  td_job_free(j);
}

// ---- tokens ---------------------------------------------------------------------------------

static void send_dialect(td_choice *c, td_buf *out, bool has_piece) {
  td_job *j = c->job;
  const td_api_usage usage = {.n_prompt = n_prompt_of(c), .n_cached = c->n_cached};
  if (!c->started) j->dialect->begin(out, &j->state, &usage);
  c->started = true;
  if (has_piece) j->dialect->delta(out, &j->state, &c->delta);
  td_delta_clear(&c->delta, &c->parts);
  if (out->len) send_raw(j, out);
}

static td_api_usage usage_so_far(const td_choice *c) {
  return (td_api_usage){.n_prompt = n_prompt_of(c),
                        .n_output = c->answer.n_tokens,
                        .n_cached = c->n_cached,
                        .n_accepted = c->n_accepted,
                        .n_rejected = c->n_rejected};
}

// Gathers what the parser tells of the tokens so far. Those of a marker count as what they are
// around; what is not parsed yet counts as what follows.
static td_status gather(td_choice *c, td_err *err) {
  const td_output_parser_state before = c->parts.state;
  td_status st = td_delta_gather(&c->delta, &c->parts, &c->answer, err);
  const td_output_parser_state after = c->parts.state;
  if (st != TD_OK || (after == TD_PARTS_START && before != TD_PARTS_REASONING)) return st;
  if (before == TD_PARTS_REASONING || after == TD_PARTS_REASONING)
    c->n_reasoning += c->answer.n_tokens - c->n_parsed;
  c->n_parsed = c->answer.n_tokens;
  return TD_OK;
}

// Sends what was gathered of a streamed choice. With usage in every chunk each token gets its own
// event, even if it adds no text.
static void send_piece(td_choice *c, bool has_piece) {
  td_job *j = c->job;
  td_buf event = TD_BUF_INIT;
  if (j->dialect) {
    send_dialect(c, &event, has_piece);
    td_buf_free(&event);
    return;
  }
  if (!c->started && j->is_chat) {
    td_api_write_role(&event, &j->head, c->index);
    send_event(j, &event);
  }
  c->started = true;
  const td_api_usage usage = usage_so_far(c);
  const td_api_usage *so_far = j->request.include_usage_so_far ? &usage : NULL;
  if (has_piece || (so_far && !c->answer.finished)) {
    if (j->is_chat) {
      td_api_write_delta(&event, &j->head, c->index, &c->answer, &j->state.piece, &c->parts,
                         &c->delta, so_far);
      td_delta_clear(&c->delta, &c->parts);
    } else {
      td_api_write_piece(&event, &j->head, c->index, &c->answer, &j->state.piece, so_far);
    }
    send_event(j, &event);
    if (so_far) c->n_sent = c->answer.n_tokens;
  }
  td_buf_free(&event);
}

// Takes the output of a choice that is final, and sends it if the response is streamed: parts in
// their order, so that a block that another follows is not opened again.
static td_status take_piece(td_choice *c, td_err *err) {
  td_job *j = c->job;
  td_answer_piece piece;
  bool has_piece = td_answer_take(&c->answer, &piece);
  c->delta.in_order = j->request.stream;
  do {
    if (j->is_chat) {
      td_status st = gather(c, err);
      if (st != TD_OK) return st;
      has_piece = !td_delta_is_empty(&c->delta) || piece.last > piece.first;
    } else if (j->dialect && has_piece) {
      td_buf_add(&c->delta.content, td_buf_text(&c->answer.text) + piece.begin,
                 piece.end - piece.begin);
    }
    if (!j->request.stream) piece.begin = piece.first = 0; // the output is kept for the response
    j->state.piece = piece;
    if (j->request.stream) send_piece(c, has_piece);
    piece.begin = piece.end;
    piece.first = piece.last;
  } while (c->delta.has_held);
  return TD_OK;
}

// Calls of which a stop string, or the model's own end, cut the last are not to be made.
static const char *finish_reason(const td_choice *c, td_finish how) {
  if (how != TD_FINISH_STOP || c->job->request.max_tokens == 0) return "length";
  const bool is_within = c->answer.stopped || c->parts.state == TD_PARTS_CALL;
  const bool is_cut = is_within && td_output_parser_is_cut(&c->parts);
  return c->parts.n_calls && !is_cut ? "tool_calls" : "stop";
}

// Remembers what was generated for when the conversation comes back. An answer that a stop string
// cut is not: its last tokens hold more than was sent.
static void keep_turn(const td_choice *c) {
  const td_job *j = c->job;
  if (!j->is_chat || j->n_choices != 1 || j->request.is_continued || c->answer.stopped) return;
  const td_generated g = {.place = &j->place,
                          .how = &c->parts,
                          .text = &c->answer.text,
                          .prompt = &j->prompts[0],
                          .ids = &c->ids,
                          .has_end = c->has_end};
  td_serve_keep_turn(j->host->turns, &g);
}

static void end_choice(td_choice *c, td_finish how) {
  td_job *j = c->job;
  td_err err;
  td_status st = td_answer_finish(&c->answer, how == TD_FINISH_LENGTH, &err);
  if (st == TD_OK) st = take_piece(c, &err);
  if (st != TD_OK) {
    leave_worker(c, TD_FINISH_ERROR);
    fail_running(j, 500, NULL, err.msg);
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
    // Tokens that end the answer without a chunk of their own, as those of a stop string.
    const bool has_more = j->request.include_usage_so_far && c->n_sent < c->answer.n_tokens;
    const td_api_usage usage = usage_so_far(c);
    const td_receipt receipt = receipt_of(c);
    td_api_write_finish(&event, &j->head, c->index, c->finish_reason,
                        j->request.receipt ? &receipt : NULL, &timings, has_more ? &usage : NULL);
    send_event(j, &event);
    td_buf_free(&event);
  }
  if (j->n_running == 0) end_job(j);
}

static void note_token(td_choice *c, const td_wire_token *token) {
  td_job *j = c->job;
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
  c->n_accepted += token->is_drafted;
  c->n_rejected += token->n_rejected;
  m->n_accepted += token->is_drafted;
  m->n_rejected += token->n_rejected;
}

// Whether the time for the answer is over, and it has a whole line.
static bool is_late(const td_choice *c) {
  const uint64_t most_ns = c->job->state.max_predict_ns;
  const td_buf *text = &c->answer.text;
  return most_ns && c->last_token_ns - c->first_token_ns > most_ns && text->len &&
         memchr(text->data, '\n', text->len);
}

static void on_token(void *ctx, const td_wire_token *token) {
  td_choice *c = ctx;
  td_job *j = c->job;
  td_err err;
  if (j->request.max_tokens == 0) return; // discarded
  note_token(c, token);
  c->sum_logprob += (double)token->logprob;
  td_status st = td_answer_add(&c->answer, token, &err);
  c->is_ended = token->is_eos;
  if (st == TD_OK && j->request.receipt && !token->is_eos) {
    td_buf_add(&c->drawn, &(td_token_value){token->id, token->logprob}, sizeof(td_token_value));
    st = td_buf_status(&c->drawn, &err);
  }
  if (st == TD_OK && j->is_chat) st = td_token_ids_push(&c->ids, token->id, &err);
  if (st == TD_OK && is_late(c)) {
    td_backend_cancel(j->host->backend, c->id);
    end_choice(c, TD_FINISH_LENGTH);
    return;
  }
  if (st == TD_OK && c->answer.stopped) {
    td_backend_cancel(j->host->backend, c->id);
    end_choice(c, TD_FINISH_STOP);
    return;
  }
  if (st == TD_OK && (j->request.stream || j->is_chat)) st = take_piece(c, &err);
  if (st != TD_OK) {
    fail_running(j, 500, NULL, err.msg);
  } else if (c->parts.state == TD_PARTS_DONE) {
    td_backend_cancel(j->host->backend, c->id);
    end_choice(c, TD_FINISH_STOP);
  }
}

static void on_prompt_token(void *ctx, const td_wire_token *token) {
  td_choice *c = ctx;
  td_err err;
  if (c->prompt) c->prompt[token->index] = *token;
  if (!c->job->request.echo || !c->job->request.logprobs) return;
  if (td_answer_echo(&c->answer, token, &err) != TD_OK) fail_running(c->job, 500, NULL, err.msg);
}

static void on_progress(void *ctx, const td_wire_progress *progress) {
  td_choice *c = ctx;
  c->n_cached = progress->n_cached;
  c->prefill_ns = progress->elapsed_ns;
  if (c->job->request.stream && c->job->request.return_progress && !c->started) {
    const td_api_progress told = {.n_prompt = progress->n_prompt,
                                  .n_cached = progress->n_cached,
                                  .n_done = progress->n_done,
                                  .elapsed_ns = progress->elapsed_ns};
    td_buf event = TD_BUF_INIT;
    td_api_write_progress(&event, &c->job->head, c->index, &told);
    send_event(c->job, &event);
    td_buf_free(&event);
  }
  if (progress->n_done < progress->n_prompt) return;
  c->job->host->metrics.n_prompt += progress->n_prompt;
  c->job->host->metrics.n_cached += progress->n_cached;
}

static void on_done(void *ctx, const td_wire_done *done) {
  td_choice *c = ctx;
  switch (done->reason) {
  case TD_DONE_STOP:
    c->has_end = c->ids.n > 0;
    end_choice(c, TD_FINISH_STOP);
    break;
  case TD_DONE_LENGTH: end_choice(c, TD_FINISH_LENGTH); break;
  case TD_DONE_CANCELED:
    leave_worker(c, TD_FINISH_ABORT);
    fail_running(c->job, 500, NULL, "the request was canceled");
    break;
  case TD_DONE_REFUSED:
    leave_worker(c, TD_FINISH_ERROR);
    fail_running(c->job, 400, td_api_constrained_by(&c->job->request), done->text);
    break;
  default:
    leave_worker(c, TD_FINISH_ERROR);
    fail_running(c->job, done->reason == TD_DONE_LOST ? 503 : 500, NULL,
                 done->text[0] ? done->text : "the worker failed");
    break;
  }
}

td_request_callbacks td_choice_callbacks(td_choice *c) {
  return (td_request_callbacks){.on_progress = on_progress,
                                .on_token = on_token,
                                .on_prompt_token = on_prompt_token,
                                .on_done = on_done,
                                .ctx = c};
}
