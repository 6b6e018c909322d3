// src/front/completions.c - POST /v1/chat/completions, /v1/completions and the other protocols
// (api/dialects/dialect.h): one job per request.
// A job is prepared on the thread pool (parse, check, template, tokenize); everything else is on
// the loop's thread: each choice is submitted to the backend, and job.c makes its tokens a
// response. Every error a client can cause is detected before the first byte of the response.
#include <malloc.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "api/turn.h"
#include "base/clock.h"
#include "base/trace.h"
#include "front/job.h"

// ---- submission -----------------------------------------------------------------------------

// End tokens beyond those the checkpoint names: the tokenizer's, stop_token_ids, and stop strings
// that are the text of a control token (which never appears in the output).
static uint32_t collect_ends(const td_job *j, int32_t *ends) {
  const td_api_request *r = &j->request;
  const td_tokenizer *tok = td_chat_tokenizer(j->host->chat);
  uint32_t n = 0;
  uint32_t n_own = 0;
  const int32_t *own = td_tokenizer_ends(tok, &n_own);
  for (uint32_t i = 0; i < n_own && !r->ignore_eos; i++)
    ends[n++] = own[i];
  for (uint32_t i = 0; i < r->n_stop_ids; i++)
    ends[n++] = r->stop_ids[i];
  for (unsigned i = 0; i < r->stops.n; i++) {
    int32_t id = td_tokenizer_find(tok, r->stops.strings[i].text, r->stops.strings[i].len);
    if (id >= 0 && td_tokenizer_is_special(tok, id)) ends[n++] = id;
  }
  return n;
}

static td_status submit(td_job *j, td_choice *c, uint32_t n_ctx) {
  const td_api_request *r = &j->request;
  int32_t ends[TD_TOKENIZER_MAX_ENDS + TD_API_MAX_STOP_IDS + TD_API_MAX_STOPS];
  const td_token_ids *prompt = &j->prompts[c->index / r->n];
  uint32_t room = n_ctx - (uint32_t)prompt->n;
  bool all = r->max_tokens < 0 || r->max_tokens > room;
  bool is_scored = r->n_prompt_logprobs >= 0 || (r->echo && r->logprobs);
  uint32_t most = r->max_tokens ? (uint32_t)r->max_tokens : 1;
  td_request request = {
      .prompt = prompt->ids,
      .n_prompt = (uint32_t)prompt->n,
      .max_tokens = all ? room : most,
      .flags = (r->ignore_eos ? TD_SUBMIT_IGNORE_EOS : 0u) |
               (r->logprobs || r->receipt || r->n > r->n_best ? TD_SUBMIT_LOGPROBS : 0u) |
               (is_scored ? TD_SUBMIT_SCORE_PROMPT : 0u),
      .sampling = r->sampling,
      .dry = r->dry.last_n ? &r->dry : NULL,
      .bias = r->bias,
      .n_bias = r->n_bias,
      .grammar = r->grammar.data,
      .n_grammar = (uint32_t)r->grammar.len,
      .ends = ends,
      .n_ends = collect_ends(j, ends),
      .min_tokens = (uint32_t)r->min_tokens,
      .n_keep = j->is_chat ? td_serve_n_lasting(j->host->chat, prompt) : 0,
      .tenant = j->caller.tenant,
      .weight = j->caller.weight,
      .salt = td_serve_cache_owner(&j->caller, r->cache_salt, j->serve->options->cache_per_key),
      .salt_text = j->serve->options->cache_per_key ? NULL : r->cache_salt,
      .pictures = j->pictures};
  request.sampling.seed += c->index % r->n;
  if (r->n_prompt_logprobs > (int64_t)request.sampling.n_top_logprobs)
    request.sampling.n_top_logprobs = (uint32_t)r->n_prompt_logprobs;
  c->sampling = request.sampling;
  td_request_callbacks callbacks = td_choice_callbacks(c);
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
static td_status open_prompt(td_choice *c) {
  td_job *j = c->job;
  const td_api_request *r = &j->request;
  const td_token_ids *prompt = &j->prompts[c->index / r->n];
  td_err err;
  td_status st = TD_OK;
  size_t n_echoed = !r->echo ? 0 : r->logprobs && prompt->n ? 1 : prompt->n; // others are scored
  for (size_t i = 0; i < n_echoed && st == TD_OK; i++)
    st = td_answer_echo(&c->answer, &(td_wire_token){.id = prompt->ids[i], .logprob = NAN}, &err);
  if (st == TD_OK && r->n_prompt_logprobs >= 0 && prompt->n) {
    c->prompt = calloc(prompt->n, sizeof *c->prompt);
    if (!c->prompt) return td_api_fail(&j->error, 503, NULL, NULL, "out of memory");
    c->prompt[0] = (td_wire_token){.id = prompt->ids[0], .logprob = NAN};
  }
  return st == TD_OK ? st : td_api_fail_err(&j->error, NULL, &err);
}

static td_status open_choices(td_job *j) {
  const td_api_request *r = &j->request;
  j->choices = calloc((size_t)j->n_prompts * r->n, sizeof *j->choices);
  if (!j->choices) return td_api_fail(&j->error, 503, NULL, NULL, "out of memory");
  j->n_choices = j->n_prompts * r->n;
  const td_chat *chat = j->host->chat;
  const td_output_form *form = j->is_chat ? td_output_form_of(chat) : NULL;
  // Mistral's calls are marked with control tokens, too.
  const bool keeps_specials = (form && form->keeps_specials) ||
                              (j->is_chat && td_chat_template_mentions(chat, "[TOOL_CALLS]"));
  for (uint32_t i = 0; i < j->n_choices; i++) {
    td_choice *c = &j->choices[i];
    c->job = j;
    c->index = i;
    td_answer_init(&c->answer, td_chat_tokenizer(j->host->chat),
                   &(td_answer_opts){.stops = &r->stops,
                                     .keep_tokens = r->logprobs,
                                     .shows_special = r->shows_special || keeps_specials,
                                     .min_tokens = (uint32_t)r->min_tokens});
    c->parts = (td_output_parser){.begins_in_reasoning = j->prompt_thinks,
                                  .parse_tool_calls = r->has_tools,
                                  .one_call = r->one_call,
                                  .is_harmony = form && form->final_begin,
                                  .id = j->call_id + i,
                                  .params = &r->params};
    td_status st = open_prompt(c);
    if (st != TD_OK) return st;
  }
  return TD_OK;
}

static td_status begin_answer(td_job *j) {
  unsigned char random[16];
  uint64_t seed;
  if (getrandom(random, sizeof random, 0) != sizeof random ||
      getrandom(&seed, sizeof seed, 0) != sizeof seed)
    return td_api_fail(&j->error, 503, NULL, NULL, "no random numbers");
  if (!j->request.has_seed) j->request.sampling.seed = seed;
  td_api_head_init(&j->head, j->is_chat, j->host->name, td_chat_tokenizer(j->host->chat),
                   (int64_t)time(NULL), random);
  j->head.fingerprint = j->host->fingerprint;
  memcpy(&j->call_id, random + 8, sizeof j->call_id);
  uint32_t n_ctx = j->host->n_ctx;
  td_status st = td_serve_check_context(j->prompts, j->n_prompts, j->is_chat, n_ctx, &j->error);
  if (st == TD_OK) st = open_choices(j);
  // The other protocols have one answer.
  if (st == TD_OK && j->dialect) {
    j->state.head = &j->head;
    j->state.answer = &j->choices[0].answer;
    j->state.parts = &j->choices[0].parts;
  }
  for (uint32_t i = 0; st == TD_OK && i < j->n_choices; i++)
    st = submit(j, &j->choices[i], n_ctx);
  for (uint32_t i = 0; i < j->n_prompts; i++)
    j->usage.n_prompt += j->prompts[i].n + j->prompts[i].n_cut;
  return st;
}

// Of what a request's constraints are made from; an eighth of it of what is made.
#define LARGE_GRAMMAR_BYTES (2u << 20)

// ---- preparation ----------------------------------------------------------------------------

static td_status open_chat(td_job *j) {
  td_err err;
  return td_host_chat(j->host, &err) ? TD_OK : td_api_fail_err(&j->error, NULL, &err);
}

// Translates a dialect's body to the one it stands for.
static td_status translate(td_job *j) {
  td_buf translated = TD_BUF_INIT;
  td_status st = open_chat(j);
  j->state.chat = j->host->chat;
  j->state.n_ctx = j->n_ctx;
  j->state.sees = atomic_load(&j->host->sees);
  if (st == TD_OK) {
    st = td_dialect_translate(j->dialect, &j->state, td_buf_text(&j->body), j->body.len,
                              &translated, &j->error);
  }
  td_buf_free(&j->body);
  j->body = translated;
  if (j->state.is_text) j->is_chat = false;
  return st;
}

static td_status parse(td_job *j) {
  td_api_request *r = &j->request;
  td_status (*parse_body)(td_api_request *, const char *, size_t, const td_api_defaults *,
                          td_api_error *) = j->is_chat ? td_api_parse_chat
                                                       : td_api_parse_completion;
  td_api_defaults defaults = j->host->defaults;
  defaults.is_canceled = &j->work.is_canceled;
  defaults.sees = atomic_load(&j->host->sees);
  td_status st = parse_body(r, td_buf_text(&j->body), j->body.len, &defaults, &j->error);
  if (!j->dialect) return st;
  r->n = r->n_best = 1;
  r->logprobs = r->logprobs && j->dialect->has_logprobs;
  r->include_usage = r->include_usage_so_far = r->return_progress = false;
  if (st == TD_OK && !j->is_chat && r->n_prompts != 1)
    st = td_api_bad(&j->error, "prompt", "only one prompt at a time");
  return st;
}

static td_status check_receipt(td_job *j) {
  if (j->dialect)
    return td_api_wrong(&j->error, "receipt", ": on chat and completions of OpenAI's API only");
  if (!j->serve->options->receipts)
    return td_api_wrong(&j->error, "receipt", ": start the server with --receipts");
  if (j->request.grammar.len)
    return td_api_wrong(&j->error, "receipt",
                        "is not allowed with what constrains an answer: response_format, tools");
  if (j->pictures) return td_api_wrong(&j->error, "receipt", "is not allowed with images");
  return TD_OK;
}

// Prepares a job whose body is one of chat or completions.
static void prepare_body(td_job *j) {
  j->status = parse(j);
  td_buf_free(&j->body);
  if (j->status == TD_OK) {
    const char *suffix = j->dialect ? j->dialect->model_suffix : NULL;
    j->status = td_serve_check_model(j->serve, j->request.model, suffix, &j->error);
  }
  if (j->status == TD_OK) j->status = open_chat(j);
  if (j->status == TD_OK)
    j->status = td_api_tokenize_bias(&j->request, td_chat_tokenizer(j->host->chat), &j->error);
  if (j->status != TD_OK) return;
  uint32_t n = j->is_chat ? 1 : j->request.n_prompts;
  j->prompts = calloc(n, sizeof *j->prompts);
  if (!j->prompts) {
    j->status = td_api_fail(&j->error, 503, NULL, NULL, "out of memory");
    return;
  }
  j->n_prompts = n;
  for (uint32_t i = 0; i < n; i++) {
    j->prompts[i].most = j->n_ctx;
    j->prompts[i].is_canceled = &j->work.is_canceled;
  }
  uint64_t begin_ns = td_trace_begin();
  td_buf text = TD_BUF_INIT;
  j->request.owner = td_serve_turn_owner(j->serve, &j->caller, &j->request);
  j->status = td_pictures_take(&j->pictures, &j->host->pictures, &j->request, j->caller.tenant,
                               true, &j->work.is_canceled, &j->error);
  if (j->status == TD_OK)
    j->status = td_serve_encode(j->host->chat, j->host->turns, &j->request, j->pictures, j->prompts,
                                j->is_chat ? &text : NULL, &j->error);
  const td_reasoning reasoning = td_output_parser_after(td_buf_text(&text), text.len);
  j->prompt_thinks = reasoning == TD_REASONING_BEGUN;
  td_buf_free(&text);
  if (j->status == TD_OK)
    j->status = td_serve_compose(j->host->chat, &j->host->calls, &j->request, reasoning, &j->error);
  if (j->status == TD_OK &&
      (uint64_t)n * j->request.n * j->request.grammar.len > TD_BACKEND_GRAMMAR_BYTES)
    j->status = td_api_wrong(&j->error, "n", ": too many answers for so large a grammar");
  if (j->status == TD_OK && j->request.receipt) j->status = check_receipt(j);
  if (j->is_chat) td_api_turn_place(&j->request, &j->place);
  td_buf_free(&j->request.vars);
  td_buf_free(&j->request.plain_vars);
  td_trace_span(begin_ns, TD_TRACE_PREPARE, 0, 0);
}

// On the thread pool: uses only the job and immutable state. Returns the memory of a large body, or
// of a large grammar's parts, to the system.
static void run_prepare(uv_work_t *work) {
  td_job *j = work->data;
  bool was_large = j->body.len >= TD_LANE_LARGE_BYTES;
  j->status = j->dialect ? translate(j) : TD_OK;
  if (j->status == TD_OK) {
    prepare_body(j);
    if (j->status != TD_OK) td_job_name(j, &j->error);
  }
  was_large |= j->request.budget.bytes < TD_API_BUDGET.bytes - LARGE_GRAMMAR_BYTES ||
               j->request.grammar.len > LARGE_GRAMMAR_BYTES / 8;
  td_buf_free(&j->body);
  if (was_large) malloc_trim(0);
}

// The job is back from the lane. False: it has ended.
static bool is_still_wanted(td_job *j) {
  j->preparing = false;
  if (!j->x)
    td_job_free(j);
  else if (td_serve_was_canceled(&j->work, &j->error))
    td_job_refuse(j, &j->error);
  else
    return true;
  return false;
}

static void on_prepared(uv_work_t *work, int canceled) {
  (void)canceled;
  td_job *j = work->data;
  td_job_release_body(j);
  if (!is_still_wanted(j)) return;
  if (j->status == TD_OK) {
    j->status = begin_answer(j);
    if (j->status != TD_OK) td_job_name(j, &j->error);
  }
  if (j->status != TD_OK) {
    td_job_refuse(j, &j->error);
  } else if (j->request.stream && j->dialect && j->dialect->stream_type) {
    td_http_stream_begin(j->x, j->dialect->stream_type);
    if (j->dialect->idle) {
      j->dialect->idle(&j->state.idle, &j->state);
      td_http_stream_keep_alive(j->x, td_buf_text(&j->state.idle));
    }
  } else if (j->request.stream) {
    td_http_sse_begin(j->x);
  }
}

static void queue(td_job *j, uv_work_cb run, uv_after_work_cb after) {
  j->preparing = true;
  j->work.run = run;
  j->work.after = after;
  td_lane_queue(&j->serve->lane, &j->work);
}

// ---- the model ------------------------------------------------------------------------------

// Answers a request that asks for no text.
static void send_loaded(td_job *j, const char *how) {
  td_buf body = TD_BUF_INIT;
  td_api_head_init(&j->head, true, j->host->name, NULL, (int64_t)time(NULL),
                   (const unsigned char[16]){0});
  j->state.head = &j->head;
  j->dialect->loaded(&body, &j->state, how);
  td_serve_respond(j->x, 200, TD_JSON_TYPE, &body);
  td_job_free(j);
}

static void begin_inside(td_job *j) {
  if (j->load.is_empty) {
    send_loaded(j, "load");
  } else {
    j->n_ctx = j->host->n_ctx;
    queue(j, run_prepare, on_prepared);
  }
}

static void on_turn(td_host_use *use, const char *why) {
  td_job *j = (td_job *)((char *)use - offsetof(td_job, use));
  td_api_error error;
  if (!why) {
    begin_inside(j);
    return;
  }
  td_api_fail(&error, 503, NULL, NULL, "%s", why);
  td_job_refuse(j, &error);
}

static void enter_host(td_job *j) {
  j->use.on_turn = on_turn;
  if (td_host_enter(j->host, &j->use)) begin_inside(j);
}

static bool has_load(const td_job *j) {
  return j->dialect && j->dialect->peek;
}

// On the thread pool.
static void find_host(uv_work_t *work) {
  td_job *j = work->data;
  const char *suffix = j->dialect ? j->dialect->model_suffix : NULL;
  j->host = td_serve_pick(j->serve, &j->body, suffix, &j->error);
  if (!j->host || !has_load(j)) return;
  char *name = NULL;
  td_status st = td_api_parse_model(&name, td_buf_text(&j->body), j->body.len, &j->error);
  if (st == TD_OK && name && name[0] && !td_hosts_find(&j->serve->hosts, name, suffix))
    st = td_serve_unknown_model(j->serve, name, &j->error);
  free(name);
  if (st == TD_OK)
    st = td_dialect_peek(j->dialect, &j->load, td_buf_text(&j->body), j->body.len, &j->error);
  if (st != TD_OK) j->host = NULL;
}

static void on_host_found(uv_work_t *work, int canceled) {
  (void)canceled;
  td_job *j = work->data;
  if (!is_still_wanted(j)) return;
  if (!j->host) {
    td_job_refuse(j, &j->error);
    return;
  }
  if (has_load(j)) td_host_keep(j->host, j->load.has_keep ? &j->load.keep_ms : NULL);
  if (j->load.is_empty && j->load.has_keep && j->load.keep_ms == 0)
    send_loaded(j, "unload");
  else
    enter_host(j);
}

// The client is gone: what waits is dropped, what runs is told.
static void on_gone(void *arg) {
  td_job *j = arg;
  if (j->preparing) j->preparing = !td_lane_cancel(&j->work);
  td_job_on_gone(j);
}

static void start_job(td_serve *serve, td_http_exchange *x, bool is_chat,
                      const td_dialect *dialect) {
  if (td_serve_refuse_unready(serve, x)) return;
  td_job *j = calloc(1, sizeof *j);
  if (!j) {
    td_http_error(x, 503, "out of memory");
    return;
  }
  j->serve = serve;
  j->x = x;
  j->is_chat = is_chat;
  j->dialect = j->state.dialect = dialect;
  j->state.store = serve->responses;
  td_job **first = &j->serve->jobs;
  j->next = *first;
  if (j->next) j->next->prev = j;
  *first = j;
  j->begin_ns = td_clock_ns();
  j->work.work.data = j;
  td_serve_authorize(serve, x, &j->caller);
  j->state.owner = td_serve_owner(serve, &j->caller);
  j->held = td_http_take_body(x, &j->body);
  td_http_on_gone(x, on_gone, j);
  j->work.tenant = j->caller.tenant;
  j->work.weight = j->caller.weight;
  j->work.n_bytes = j->body.len;
  if (serve->hosts.n == 1 && !has_load(j)) {
    j->host = &serve->hosts.all[0];
    enter_host(j);
  } else {
    queue(j, find_host, on_host_found);
  }
}

// plain_completions is an older name of completion.
#define JOB(name, is_chat, dialect)                                                                \
  void td_serve_##name(void *ctx, td_http_exchange *x) {                                           \
    start_job(ctx, x, is_chat, dialect);                                                           \
  }
JOB(chat, true, NULL)
JOB(completions, false, NULL)
JOB(responses, true, &td_dialect_responses)
JOB(messages, true, &td_dialect_messages)
JOB(completion, true, &td_dialect_completion)
JOB(plain_completions, true, &td_dialect_completion)
JOB(infill, true, &td_dialect_infill)
JOB(ollama_chat, true, &td_dialect_ollama_chat)
JOB(ollama_generate, true, &td_dialect_ollama_generate)
