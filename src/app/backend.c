// src/app/backend.c - requests between the front's callers and the worker.
// A request is copied by submit, waits in the scheduler (sched/) until it is admitted, and then
// stands in the outbox until all its records are in the ring; where it stands in its own records is
// kept in the request, so a full ring costs no memory and a worker's death only sets it back.
#include "app/backend.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "app/supervise.h"
#include "base/clock.h"
#include "sched/sched.h"
#include "worker/kv_pool.h"

#define MAX_WAITING 512
#define STUCK_S     30u // unless asked otherwise
#define KILL_NS     600000000000u
#define MAX_REPLAYS 1 // of a request whose worker died before the first token

typedef struct request request;
struct request {
  uint64_t id;
  td_wire_submit submit;
  int32_t *prompt;      // [submit.n_prompt], owned
  td_token_value *bias; // [submit.n_bias], owned
  const int32_t *pages; // [submit.n_pages], the scheduler's; NULL while it waits
  td_request_callbacks callbacks;
  bool is_canceled;  // nobody listens any more
  bool is_in_outbox; // has records to send
  bool submit_sent, cancel_sent;
  uint32_t n_pages_sent, n_tokens_sent, n_bias_sent;
  uint32_t n_output; // tokens of the answer that came
  uint32_t n_replays;
  request *next_out;
};

struct td_backend {
  td_backend_opts opts;
  td_supervisor *supervisor;
  int kv_fd;       // the KV pool, which outlives workers
  td_sched *sched; // NULL until the worker was ready once
  td_wire_ready info;
  request **slots; // [n_slots]; request id lies in slot id % n_slots
  uint32_t n_slots;
  uint64_t n_submitted;
  request *out_head, *out_tail; // the outbox, first in first out
  bool is_closing;
  void (*closed)(void *ctx);
  void *closed_ctx;
};

// ---- requests ---------------------------------------------------------------------------------

static request *find(const td_backend *b, uint64_t id) {
  request *r = b->slots[id % b->n_slots];
  return r && r->id == id ? r : NULL;
}

static void free_request(request *r) {
  if (!r) return;
  free(r->prompt);
  free(r->bias);
  free(r);
}

static void leave_outbox(td_backend *b, request *r) {
  if (!r->is_in_outbox) return;
  request **link = &b->out_head, *prev = NULL;
  while (*link != r) {
    prev = *link;
    link = &prev->next_out;
  }
  *link = r->next_out;
  if (b->out_tail == r) b->out_tail = prev;
  r->is_in_outbox = false;
}

static void enter_outbox(td_backend *b, request *r) {
  if (r->is_in_outbox) return;
  r->is_in_outbox = true;
  r->next_out = NULL;
  *(b->out_tail ? &b->out_tail->next_out : &b->out_head) = r;
  b->out_tail = r;
}

// Takes the request out of everything and tells its caller how it ended, if there still is one.
static void end_request(td_backend *b, request *r, const td_wire_done *done) {
  leave_outbox(b, r);
  td_sched_remove(b->sched, r->id);
  b->slots[r->id % b->n_slots] = NULL;
  td_request_callbacks callbacks = r->callbacks;
  bool is_heard = !r->is_canceled;
  free_request(r);
  if (is_heard) callbacks.on_done(callbacks.ctx, done);
}

static void fail_request(td_backend *b, request *r, const char *why, const char *cure) {
  td_wire_done done = {
      .reason = TD_DONE_ERROR, .n_prompt = r->submit.n_prompt, .n_output = r->n_output};
  snprintf(done.text, sizeof done.text, "%.150s%s", why, cure);
  end_request(b, r, &done);
}

static void fail_all(td_backend *b, const char *why) {
  for (uint32_t i = 0; i < b->n_slots; i++) {
    if (b->slots[i]) fail_request(b, b->slots[i], why, "");
  }
}

// ---- to the worker ----------------------------------------------------------------------------

static uint32_t smaller(uint32_t a, uint32_t b) {
  return a < b ? a : b;
}

// The next record that r has to send; false when there is none.
static bool peek_record(const request *r, td_wire_msg *msg) {
  *msg = (td_wire_msg){.request = r->id};
  uint32_t pages_left = r->submit.n_pages - r->n_pages_sent;
  uint32_t tokens_left = r->submit.n_prompt - r->n_tokens_sent;
  uint32_t bias_left = r->submit.n_bias - r->n_bias_sent;
  if (r->is_canceled) {
    msg->kind = TD_MSG_CANCEL;
    return !r->cancel_sent;
  }
  if (!r->submit_sent) {
    msg->kind = TD_MSG_SUBMIT;
    msg->u.submit = r->submit;
  } else if (pages_left) {
    msg->kind = TD_MSG_PAGES;
    msg->u.pages.n = smaller(pages_left, TD_WIRE_MAX_PAGES);
    memcpy(msg->u.pages.ids, r->pages + r->n_pages_sent,
           msg->u.pages.n * sizeof msg->u.pages.ids[0]);
  } else if (tokens_left) {
    msg->kind = TD_MSG_TOKENS;
    msg->u.tokens.n = smaller(tokens_left, TD_WIRE_MAX_TOKENS);
    memcpy(msg->u.tokens.ids, r->prompt + r->n_tokens_sent,
           msg->u.tokens.n * sizeof msg->u.tokens.ids[0]);
  } else if (bias_left) {
    msg->kind = TD_MSG_BIAS;
    msg->u.bias.n = smaller(bias_left, TD_WIRE_MAX_BIAS);
    memcpy(msg->u.bias.entries, r->bias + r->n_bias_sent,
           msg->u.bias.n * sizeof msg->u.bias.entries[0]);
  }
  return msg->kind != 0;
}

static void note_sent(request *r, const td_wire_msg *msg) {
  switch (msg->kind) {
  case TD_MSG_CANCEL: r->cancel_sent = true; break;
  case TD_MSG_SUBMIT: r->submit_sent = true; break;
  case TD_MSG_PAGES: r->n_pages_sent += msg->u.pages.n; break;
  case TD_MSG_TOKENS: r->n_tokens_sent += msg->u.tokens.n; break;
  case TD_MSG_BIAS: r->n_bias_sent += msg->u.bias.n; break;
  }
}

static bool is_serving(const td_backend *b) {
  if (b->is_closing) return false;
  td_backend_state state = td_supervisor_state(b->supervisor);
  return state == TD_BACKEND_READY || state == TD_BACKEND_STUCK;
}

static void admit(td_backend *b) {
  td_admission admission;
  while (td_sched_admit(b->sched, td_clock_ns(), &admission)) {
    request *r = find(b, admission.id);
    r->pages = admission.pages;
    r->submit.n_pages = admission.n_pages;
    r->submit.n_past = admission.n_cached;
    enter_outbox(b, r);
  }
}

// Admits what fits and sends what the ring takes. Calls nobody back.
static void pump(td_backend *b) {
  if (!is_serving(b)) return;
  admit(b);
  while (b->out_head) {
    request *r = b->out_head;
    td_wire_msg msg;
    if (!peek_record(r, &msg)) {
      leave_outbox(b, r);
      continue;
    }
    if (td_supervisor_send(b->supervisor, &msg) != TD_OK) return; // on_space or on_death comes
    note_sent(r, &msg);
  }
}

// ---- from the worker --------------------------------------------------------------------------

static void on_token(const td_backend *b, request *r, const td_wire_token *token) {
  td_wire_token checked = *token;
  if (checked.n_top > TD_WIRE_MAX_TOP) checked.n_top = TD_WIRE_MAX_TOP;
  if (checked.id < 0 || (uint32_t)checked.id >= b->info.n_vocab) return;
  r->n_output++;
  if (!r->is_canceled) r->callbacks.on_token(r->callbacks.ctx, &checked);
}

static void on_progress(td_backend *b, request *r, const td_wire_progress *progress) {
  td_sched_progress(b->sched, r->id, progress->n_done);
  pump(b);
  if (r->is_canceled || !r->callbacks.on_progress) return;
  r->callbacks.on_progress(r->callbacks.ctx, progress);
}

static void on_record(void *ctx, const td_wire_msg *msg) {
  td_backend *b = ctx;
  if (!is_serving(b)) return;
  request *r = find(b, msg->request);
  if (!r || !r->pages) return;
  if (msg->kind == TD_MSG_TOKEN) {
    on_token(b, r, &msg->u.token);
  } else if (msg->kind == TD_MSG_PROGRESS) {
    on_progress(b, r, &msg->u.progress);
  } else if (msg->kind == TD_MSG_DONE) {
    td_wire_done done = msg->u.done;
    done.text[sizeof done.text - 1] = '\0';
    end_request(b, r, &done);
    pump(b);
  }
}

static void on_space(void *ctx) {
  pump(ctx);
}

static void rewind_request(td_backend *b, request *r) {
  leave_outbox(b, r);
  r->submit_sent = r->cancel_sent = false;
  r->n_pages_sent = r->n_tokens_sent = r->n_bias_sent = 0;
  r->pages = NULL;
  r->n_replays++;
  td_sched_requeue(b->sched, r->id);
}

// What the worker was at ends with an error, unless nothing of its answer has left yet: that waits
// again at its place in the queue. Twice is enough: it may be what kills the worker.
static void on_death(void *ctx, const char *why) {
  td_backend *b = ctx;
  for (uint32_t i = 0; i < b->n_slots && !b->is_closing; i++) {
    request *r = b->slots[i];
    if (!r || !r->pages) continue;
    if (!r->is_canceled && r->n_output == 0 && r->n_replays < MAX_REPLAYS) {
      rewind_request(b, r);
    } else {
      fail_request(b, r, why, "; try again");
    }
  }
}

static td_status on_ready(void *ctx, const td_wire_ready *info, td_err *err) {
  td_backend *b = ctx;
  if (!info->n_vocab || !info->n_ctx || !info->page_tokens || !info->n_pages ||
      info->max_seqs != b->opts.max_batch) {
    return td_fail(err, TD_EFORMAT, "the worker process sent a malformed READY");
  }
  if (!b->sched) {
    const td_sched_opts opts = {.max_seqs = info->max_seqs,
                                .n_pages = info->n_pages,
                                .page_tokens = info->page_tokens,
                                .max_waiting = MAX_WAITING,
                                .prefill_ahead = b->opts.prefill_chunk};
    td_status st = td_sched_open(&b->sched, &opts, err);
    if (st != TD_OK) return st;
  } else if (info->n_ctx != b->info.n_ctx || info->n_pages != b->info.n_pages ||
             info->n_vocab != b->info.n_vocab) {
    return td_fail(err, TD_EFORMAT, "the checkpoint has changed under the server; start it again");
  }
  b->info = *info;
  return TD_OK;
}

static void on_state(void *ctx, td_backend_state state) {
  td_backend *b = ctx;
  if (state == TD_BACKEND_FAILED) fail_all(b, td_supervisor_reason(b->supervisor));
  if (state == TD_BACKEND_READY) pump(b);
  if (!b->is_closing && b->opts.on_state) b->opts.on_state(b->opts.ctx, state);
}

// ---- open and close ---------------------------------------------------------------------------

static void free_backend(td_backend *b) {
  td_sched_close(b->sched);
  if (b->kv_fd >= 0) close(b->kv_fd);
  free(b->slots);
  free(b);
}

td_status td_backend_open(td_backend **out, uv_loop_t *loop, const td_backend_opts *opts,
                          td_err *err) {
  *out = NULL;
  td_backend *b = calloc(1, sizeof *b);
  if (!b) return td_fail(err, TD_ENOMEM, "out of memory");
  b->opts = *opts;
  b->opts.model_dir = NULL; // borrowed during this call only
  b->kv_fd = -1;
  b->n_slots = MAX_WAITING + opts->max_batch;
  b->slots = calloc(b->n_slots, sizeof(request *));
  td_status st = b->slots ? td_kv_pool_create(&b->kv_fd, err)
                          : td_fail(err, TD_ENOMEM, "out of memory");
  uint64_t stuck_s = opts->stuck_after_s ? opts->stuck_after_s : STUCK_S;
  const td_supervisor_opts supervisor = {.kv_fd = b->kv_fd,
                                         .worker = {.model_dir = opts->model_dir,
                                                    .ctx_size = opts->ctx_size,
                                                    .max_batch = opts->max_batch,
                                                    .n_threads = opts->n_threads,
                                                    .kv_tokens = opts->kv_tokens,
                                                    .kv_dtype = opts->kv_dtype,
                                                    .weights_fd = (uint32_t)opts->weights_fd,
                                                    .trace_fd = (uint32_t)opts->trace_fd,
                                                    .prefill_chunk = opts->prefill_chunk},
                                         .stuck_ns = stuck_s * 1000000000u,
                                         .kill_ns = KILL_NS,
                                         .on_ready = on_ready,
                                         .on_record = on_record,
                                         .on_space = on_space,
                                         .on_death = on_death,
                                         .on_state = on_state,
                                         .ctx = b};
  if (st == TD_OK) st = td_supervisor_open(&b->supervisor, loop, &supervisor, err);
  if (st != TD_OK) {
    free_backend(b);
    return st;
  }
  *out = b;
  return TD_OK;
}

static void on_closed(void *ctx) {
  td_backend *b = ctx;
  b->supervisor = NULL;
  fail_all(b, "the server is shutting down");
  void (*closed)(void *) = b->closed;
  void *closed_ctx = b->closed_ctx;
  free_backend(b);
  if (closed) closed(closed_ctx);
}

void td_backend_close(td_backend *b, void (*closed)(void *ctx), void *ctx) {
  b->is_closing = true;
  b->closed = closed;
  b->closed_ctx = ctx;
  td_supervisor_close(b->supervisor, on_closed, b);
}

// ---- the callers' side ------------------------------------------------------------------------

td_backend_state td_backend_state_of(const td_backend *b) {
  return b->supervisor ? td_supervisor_state(b->supervisor) : TD_BACKEND_FAILED;
}

const char *td_backend_reason(const td_backend *b) {
  return b->supervisor ? td_supervisor_reason(b->supervisor) : "the server is shutting down";
}

td_wire_ready td_backend_info(const td_backend *b) {
  return b->info;
}

uint32_t td_backend_n_running(const td_backend *b) {
  return b->sched ? td_sched_n_running(b->sched) : 0;
}

uint32_t td_backend_n_waiting(const td_backend *b) {
  return b->sched ? td_sched_n_waiting(b->sched) : 0;
}

uint32_t td_backend_n_restarts(const td_backend *b) {
  return b->supervisor ? td_supervisor_n_restarts(b->supervisor) : 0;
}

double td_backend_kv_use(const td_backend *b) {
  if (!b->sched) return 0;
  return 1 - (double)td_sched_n_free_pages(b->sched) / (double)b->info.n_pages;
}

static td_status check_request(const td_backend *b, const td_request *q, td_err *err) {
  if (!is_serving(b)) return td_fail(err, TD_EAGAIN, "the worker process is not ready");
  if (q->n_prompt == 0) return td_fail(err, TD_EINVAL, "the prompt is empty");
  if (q->max_tokens == 0) return td_fail(err, TD_EINVAL, "no tokens of answer asked for");
  if (q->n_prompt >= b->info.n_ctx) {
    return td_fail(err, TD_EINVAL,
                   "the prompt has %u tokens, the context holds %u, answer included", q->n_prompt,
                   b->info.n_ctx);
  }
  if (q->n_bias > b->info.n_vocab) {
    return td_fail(err, TD_EINVAL, "%u logit biases for %u tokens", q->n_bias, b->info.n_vocab);
  }
  for (uint32_t i = 0; i < q->n_prompt; i++) {
    if (q->prompt[i] < 0 || (uint32_t)q->prompt[i] >= b->info.n_vocab) {
      return td_fail(err, TD_EINVAL, "token %d of the prompt is outside the vocabulary of %u",
                     q->prompt[i], b->info.n_vocab);
    }
  }
  return TD_OK;
}

static request *copy_request(const td_backend *b, const td_request *q,
                             const td_request_callbacks *callbacks) {
  request *r = calloc(1, sizeof *r);
  if (!r) return NULL;
  r->prompt = malloc(q->n_prompt * sizeof *r->prompt);
  r->bias = malloc((q->n_bias + (size_t)1) * sizeof *r->bias);
  if (!r->prompt || !r->bias) {
    free_request(r);
    return NULL;
  }
  memcpy(r->prompt, q->prompt, q->n_prompt * sizeof *r->prompt);
  if (q->n_bias) memcpy(r->bias, q->bias, q->n_bias * sizeof *r->bias);
  r->callbacks = *callbacks;
  r->submit = (td_wire_submit){.sampling = q->sampling,
                               .n_prompt = q->n_prompt,
                               .max_tokens = smaller(q->max_tokens, b->info.n_ctx - q->n_prompt),
                               .n_bias = q->n_bias,
                               .flags = q->flags};
  return r;
}

// An id whose slot is free. There is one: the scheduler's limits are the table's size.
static uint64_t new_id(td_backend *b) {
  for (uint32_t i = 0; i < b->n_slots; i++) {
    uint64_t id = ++b->n_submitted;
    if (!b->slots[id % b->n_slots]) return id;
  }
  return 0;
}

td_status td_backend_submit(td_backend *b, const td_request *q,
                            const td_request_callbacks *callbacks, uint64_t *id, td_err *err) {
  *id = 0;
  td_status st = check_request(b, q, err);
  if (st != TD_OK) return st;
  uint64_t fresh = new_id(b);
  if (!fresh) return td_fail(err, TD_EAGAIN, "%u requests wait already", b->n_slots);
  request *r = copy_request(b, q, callbacks);
  if (!r) return td_fail(err, TD_ENOMEM, "out of memory for a prompt of %u tokens", q->n_prompt);
  const td_sched_job job = {
      .prompt = r->prompt, .n_prompt = q->n_prompt, .max_tokens = r->submit.max_tokens};
  st = td_sched_submit(b->sched, fresh, &job, td_clock_ns(), err);
  if (st != TD_OK) {
    free_request(r);
    return st == TD_ELIMIT ? td_fail(err, TD_EINVAL, "the KV pool holds less than the context")
                           : st;
  }
  r->id = *id = fresh;
  b->slots[fresh % b->n_slots] = r;
  pump(b);
  return TD_OK;
}

void td_backend_cancel(td_backend *b, uint64_t id) {
  request *r = find(b, id);
  if (!r || r->is_canceled) return;
  r->is_canceled = true;
  if (r->pages && r->submit_sent) {
    enter_outbox(b, r); // the worker's DONE will end it
  } else {
    end_request(b, r, NULL);
  }
  pump(b);
}
