// src/app/backend.c - requests between the front's callers and the workers.
// A request is copied by submit and waits in the scheduler (sched/) until it is admitted, with the
// KV pages of its prompt; more follow as its answer grows. With two workers the first reads its
// prompt and draws the first token, then the second goes on over the same pages; with one, that
// does both. Pages outlive workers, so a request whose worker dies is continued behind the last
// token that came from it. Pages in a GPU's memory do not (TD_READY_OWN_PAGES): prompt and answer
// are computed again then. One that has to make room is called back from its worker, waits in the
// scheduler again, and is computed again as far as the cache has lost it; nobody else notices.
#include "app/backend.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "app/outbox.h"
#include "app/supervise.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/team.h"
#include "sched/sched.h"
#include "worker/kv_pool.h"

#define MAX_WAITING 1024 // of one tenant alone half
#define STUCK_S     30u  // unless asked otherwise
// How far a request is suspected that was at a worker when it died, and got no further than the
// last time: a death in company, a death alone or on trial, and what is enough to give it up.
#define BLAME_TOGETHER 1
#define BLAME_ALONE    3
#define MAX_BLAME      3

enum { MAX_WORKERS = 2 };

typedef struct request request;

typedef struct {
  td_backend *backend;
  td_supervisor *supervisor; // NULL once closed
  td_outbox outbox;
  request *on_trial; // the one suspect of having killed it that it has now; NULL: none
  bool is_dying;     // what it had is being looked through
} worker;

struct request {
  td_outgoing out; // first
  td_request_callbacks callbacks;
  worker *at;        // NULL while it waits
  uint32_t n_output; // tokens of the answer that came, behind the prompt in out.tokens
  bool is_last;      // the answer ends with the last of them
  uint32_t n_past;   // tokens, of prompt and answer, that its pages hold
  bool was_given;    // to a worker, once
  uint32_t n_cached; // tokens of the prompt that were found in the cache of prefixes at first
  uint32_t furthest; // most tokens, of prompt and answer, that were ever computed
  uint32_t blame;    // for deaths of workers
  uint64_t prefill_ns, read_ns; // time it took to read the prompt, and when that was done
  td_kv_loading *loading;       // its pages come from the disk: neither waits nor is at a worker
  bool is_held;                 // from its worker, until a trial is over
};

struct td_backend {
  td_backend_opts opts;
  uv_loop_t *loop;
  worker workers[MAX_WORKERS]; // n_workers: the first reads prompts, the last decodes
  uint32_t n_workers, n_open;  // made; not yet closed
  td_backend_state told;       // to on_state
  int kv_fd;                   // the KV pool, which outlives workers
  td_sched *sched;             // NULL until a worker was ready once
  td_kv_tier *tier;            // NULL without a directory
  td_wire_ready info;
  request **slots; // [n_slots]; request id lies in slot id % n_slots
  uint32_t n_slots;
  uint64_t n_submitted;
  bool is_closing;
  void (*closed)(void *ctx);
  void *closed_ctx;
};

// ---- requests ---------------------------------------------------------------------------------

static request *find(const td_backend *b, uint64_t id) {
  request *r = b->slots[id % b->n_slots];
  return r && r->out.id == id ? r : NULL;
}

static void free_request(request *r) {
  if (!r) return;
  free(r->out.tokens);
  free(r->out.bias);
  free(r);
}

// Its pages hold all but the last of its tokens, which is one of the answer.
static bool can_decode(const request *r) {
  return r->n_output && r->n_past == r->out.submit.n_prompt + r->n_output - 1;
}

// ---- trials -----------------------------------------------------------------------------------
// Whoever was at a worker when it died may have killed it. They are given to the next one by one,
// the most suspect first, each when the one before has written another token or is gone, and nobody
// new comes in between. So one that kills again does it without another suspect beside it, and is
// found out by its second death. Among equals, whoever needs one step for a token comes before
// whoever has a prompt to read.

static void enter(request *r, worker *w) {
  r->is_held = w->is_dying || w->on_trial;
  if (r->is_held) return;
  if (r->blame) w->on_trial = r;
  td_outbox_enter(&w->outbox, &r->out);
}

static uint32_t urgency(const request *r) {
  return 2 * r->blame + can_decode(r);
}

static void release_held(td_backend *b, worker *w) {
  request *most = NULL;
  for (uint32_t i = 0; i < b->n_slots; i++) {
    request *r = b->slots[i];
    if (r && r->at == w && r->is_held && (!most || urgency(r) > urgency(most))) most = r;
  }
  if (most) enter(most, w);
  for (uint32_t i = 0; i < b->n_slots && !w->on_trial; i++) {
    request *r = b->slots[i];
    if (r && r->at == w && r->is_held) enter(r, w);
  }
}

// It has written a token, or leaves its worker.
static void end_trial(td_backend *b, request *r) {
  worker *w = r->at;
  if (!w || w->on_trial != r) return;
  w->on_trial = NULL;
  release_held(b, w);
}

// ---- the end of a request ---------------------------------------------------------------------

// Takes the request out of everything and tells its caller how it ended, if there still is one.
static void end_request(td_backend *b, request *r, const td_wire_done *done) {
  td_outbox_leave(&r->out);
  td_sched_remove(b->sched, r->out.id);
  b->slots[r->out.id % b->n_slots] = NULL;
  end_trial(b, r);
  td_request_callbacks callbacks = r->callbacks;
  bool is_heard = !r->out.is_canceled;
  free_request(r);
  if (b->tier) td_kv_tier_save(b->tier); // its pages count as cache now
  if (is_heard) callbacks.on_done(callbacks.ctx, done);
}

// Ends a request that was at a worker, with what the front knows of it.
static void finish_request(td_backend *b, request *r, const td_wire_done *given) {
  td_wire_done done = *given;
  done.n_prompt = r->out.submit.n_prompt;
  done.n_cached = r->n_cached;
  done.n_output = r->n_output;
  if (r->read_ns) {
    done.prefill_ns = r->prefill_ns;
    done.decode_ns = td_clock_ns() - r->read_ns;
  }
  end_request(b, r, &done);
}

// What became of it is not the request's fault: it may be asked again.
static void fail_request(td_backend *b, request *r, const char *why, const char *cure) {
  td_wire_done done = {.reason = TD_DONE_LOST};
  snprintf(done.text, sizeof done.text, "%.150s%s", why, cure);
  finish_request(b, r, &done);
}

static void fail_all(td_backend *b, const char *why) {
  for (uint32_t i = 0; i < b->n_slots; i++) {
    if (b->slots[i] && !b->slots[i]->loading) fail_request(b, b->slots[i], why, "");
  }
}

// ---- to the workers ---------------------------------------------------------------------------

static worker *reader(td_backend *b) {
  return &b->workers[0];
}

static worker *decoder(td_backend *b) {
  return &b->workers[b->n_workers - 1];
}

static bool is_up(const worker *w) {
  if (!w->supervisor) return false;
  td_backend_state state = td_supervisor_state(w->supervisor);
  return state == TD_BACKEND_READY || state == TD_BACKEND_STUCK;
}

// The request goes to a worker, to begin behind what its pages hold.
static void give(td_backend *b, request *r) {
  td_wire_submit *submit = &r->out.submit;
  end_trial(b, r);
  worker *w = can_decode(r) ? decoder(b) : reader(b);
  r->at = w;
  r->was_given = true;
  submit->n_answer = r->n_output;
  submit->n_past = r->n_past;
  submit->flags &= ~TD_SUBMIT_READ_ONLY;
  if (w != decoder(b)) submit->flags |= TD_SUBMIT_READ_ONLY;
  td_outbox_leave(&r->out);
  td_outgoing_rewind(&r->out);
  enter(r, w);
}

static void on_loaded(void *ctx, uint64_t id, uint32_t n_cached);

// Whether pages of the prompt are on their way from the disk.
static bool load(td_backend *b, request *r) {
  if (!b->tier || r->n_past >= r->out.submit.n_prompt) return false;
  td_kv_tier_save(b->tier); // of what other requests left, some gave way to this one
  const td_kv_load what = {.id = r->out.id,
                           .prompt = r->out.tokens,
                           .n_prompt = r->out.submit.n_prompt,
                           .n_cached = r->n_past,
                           .pages = r->out.pages,
                           .on_loaded = on_loaded,
                           .ctx = b};
  r->loading = td_kv_tier_load(b->tier, &what);
  return r->loading != NULL;
}

static void admit(td_backend *b) {
  td_admission admission;
  while (is_up(reader(b)) && td_sched_admit(b->sched, td_clock_ns(), &admission)) {
    request *r = find(b, admission.id);
    r->out.pages = admission.pages;
    r->out.submit.n_pages = admission.n_pages;
    r->out.submit.flags &= ~TD_SUBMIT_URGENT;
    if (admission.is_urgent) r->out.submit.flags |= TD_SUBMIT_URGENT;
    r->n_past = admission.n_cached;
    if (!r->was_given) r->n_cached = admission.n_cached;
    if (!load(b, r)) give(b, r);
  }
}

// Back to the queue, to its place.
static void wait_again(td_backend *b, request *r) {
  end_trial(b, r);
  r->is_held = false;
  td_outbox_leave(&r->out);
  td_outgoing_rewind(&r->out);
  td_sched_requeue(b->sched, r->out.id, r->n_output);
  r->at = NULL;
  r->out.pages = NULL;
}

static void give_pages(td_backend *b) {
  td_growth growth;
  while (td_sched_grow(b->sched, &growth)) {
    request *r = find(b, growth.id);
    r->out.pages = growth.pages;
    r->out.submit.n_pages = growth.n_pages;
    if (!r->is_held) td_outbox_enter(&r->at->outbox, &r->out);
  }
}

// It makes room, at once or as soon as nobody writes to its pages any more.
static void call_back(td_backend *b, request *r) {
  r->furthest = 0; // what it computes again counts as getting on
  r->out.is_called_back = true;
  if (r->loading) {
    td_kv_loading_cancel(r->loading);
  } else if (r->out.submit_sent) {
    td_outbox_enter(&r->at->outbox, &r->out); // the worker's DONE says when
  } else {
    wait_again(b, r);
  }
}

// Pages for answers that grow, where need be from requests that came later.
static void grow(td_backend *b) {
  uint64_t id;
  give_pages(b);
  while (td_sched_preempt(b->sched, td_clock_ns(), &id)) {
    call_back(b, find(b, id));
    give_pages(b);
  }
}

// What threads each may compute with, said before it is asked to.
static void lease_threads(td_backend *b) {
  if (b->n_workers == 1) return;
  td_lease now = td_sched_lease(b->sched);
  if (is_up(reader(b))) td_supervisor_lease(reader(b)->supervisor, now.prefill);
  if (is_up(decoder(b))) td_supervisor_lease(decoder(b)->supervisor, now.decode);
}

// Sends what the rings take.
static void flush(td_backend *b) {
  for (uint32_t i = 0; i < b->n_workers; i++) {
    worker *w = &b->workers[i];
    if (is_up(w)) td_outbox_flush(&w->outbox, w->supervisor);
  }
}

// Admits what fits, and sends it. No callback comes from inside.
static void pump(td_backend *b) {
  if (b->is_closing || !b->sched) return;
  grow(b);
  admit(b);
  lease_threads(b);
  flush(b);
}

// From here on it is like a request whose pages memory held. What came meanwhile is done now.
static void on_loaded(void *ctx, uint64_t id, uint32_t n_cached) {
  td_backend *b = ctx;
  request *r = find(b, id);
  r->loading = NULL;
  if (r->out.is_canceled) {
    end_request(b, r, NULL);
  } else if (b->is_closing) {
    fail_request(b, r, "the server is shutting down", "");
  } else if (td_backend_state_of(b) == TD_BACKEND_FAILED) {
    fail_request(b, r, td_backend_reason(b), "");
  } else {
    td_sched_progress(b->sched, id, n_cached, td_clock_ns());
    r->n_past = n_cached;
    if (!r->was_given) r->n_cached = n_cached;
    if (r->out.is_called_back) {
      wait_again(b, r);
    } else {
      give(b, r);
    }
  }
  pump(b);
}

// ---- from the workers -------------------------------------------------------------------------

static void note_furthest(request *r, uint32_t n_computed) {
  if (n_computed <= r->furthest) return;
  r->furthest = n_computed;
  r->blame = 0;
}

static void on_token(td_backend *b, request *r, const td_wire_token *token) {
  td_wire_token checked = *token;
  if (checked.n_top > TD_WIRE_MAX_TOP) checked.n_top = TD_WIRE_MAX_TOP;
  if (checked.id < 0 || (uint32_t)checked.id >= b->info.n_vocab) return;
  if (checked.index != r->n_output || r->n_output == r->out.submit.max_tokens) return;
  uint32_t n_prompt = r->out.submit.n_prompt;
  r->out.tokens[n_prompt + r->n_output++] = checked.id;
  r->is_last = checked.is_eos || r->n_output == r->out.submit.max_tokens;
  r->n_past = n_prompt + r->n_output - 1;
  note_furthest(r, n_prompt + r->n_output);
  end_trial(b, r);
  td_sched_progress(b->sched, r->out.id, r->n_past, td_clock_ns());
  if (!r->is_last) {
    grow(b);
    flush(b);
  }
  if (!r->out.is_canceled) r->callbacks.on_token(r->callbacks.ctx, &checked);
}

static void on_progress(td_backend *b, request *r, const td_wire_progress *progress) {
  uint32_t n_done = progress->n_done, n_prompt = r->out.submit.n_prompt;
  uint32_t n_known = n_prompt + (r->n_output ? r->n_output - 1 : 0);
  bool is_new = !r->read_ns; // what it has to read again is nobody's business
  if (n_done < r->n_past || n_done > n_known) return;
  r->n_past = n_done;
  td_sched_progress(b->sched, r->out.id, n_done, td_clock_ns());
  if (is_new && n_done == n_prompt) {
    r->read_ns = td_clock_ns();
    r->prefill_ns = progress->elapsed_ns;
    uint32_t n_read = r->out.submit.n_prompt - r->n_cached;
    if (b->tier) td_kv_tier_note_prefill(b->tier, n_read, r->prefill_ns);
  }
  note_furthest(r, n_done);
  pump(b);
  if (!is_new || r->out.is_canceled || !r->callbacks.on_progress) return;
  td_wire_progress told = *progress;
  told.n_cached = r->n_cached;
  told.n_prompt = n_prompt;
  r->callbacks.on_progress(r->callbacks.ctx, &told);
}

// The worker has let go of a request before its end.
static bool goes_on(const request *r, td_done_reason reason) {
  if (r->out.is_canceled || r->is_last) return false;
  return reason == TD_DONE_READ ? can_decode(r)
                                : reason == TD_DONE_CANCELED && r->out.is_called_back;
}

static void on_done(td_backend *b, request *r, const td_wire_done *given) {
  td_wire_done done = *given;
  done.text[sizeof done.text - 1] = '\0';
  if (goes_on(r, done.reason)) {
    if (r->out.is_called_back) {
      wait_again(b, r);
    } else {
      give(b, r);
    }
  } else if (done.reason == TD_DONE_READ) {
    done.reason = TD_DONE_ERROR;
    snprintf(done.text, sizeof done.text, "the worker process ended a request too early");
    finish_request(b, r, &done);
  } else {
    finish_request(b, r, &done);
  }
  pump(b);
}

static void on_record(void *ctx, const td_wire_msg *msg) {
  worker *w = ctx;
  td_backend *b = w->backend;
  if (b->is_closing || !b->sched) return;
  request *r = find(b, msg->request);
  if (!r || r->at != w) return;
  if (msg->kind == TD_MSG_TOKEN) {
    on_token(b, r, &msg->u.token);
  } else if (msg->kind == TD_MSG_PROGRESS) {
    on_progress(b, r, &msg->u.progress);
  } else if (msg->kind == TD_MSG_DONE) {
    on_done(b, r, &msg->u.done);
  }
}

static void on_space(void *ctx) {
  pump(((worker *)ctx)->backend);
}

// ---- a worker's death -------------------------------------------------------------------------

// The answer was complete; only word of its end was lost.
static void end_complete(td_backend *b, request *r) {
  bool is_full = r->n_output == r->out.submit.max_tokens;
  finish_request(b, r, &(td_wire_done){.reason = is_full ? TD_DONE_LENGTH : TD_DONE_STOP});
}

// A prompt not yet read waits again at its place in the queue, with what is read of it in the cache
// of prefixes; an answer goes on behind its last token. Where the pages died with the worker, all
// is read again.
static void continue_request(td_backend *b, request *r) {
  bool is_lost = b->info.flags & TD_READY_OWN_PAGES;
  if (r->n_output && !is_lost && !r->out.is_called_back) {
    give(b, r);
  } else {
    wait_again(b, r);
  }
}

static uint32_t n_given(const td_backend *b, const worker *w) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < b->n_slots; i++)
    n += b->slots[i] && b->slots[i]->at == w && b->slots[i]->out.submit_sent;
  return n;
}

static void on_death(void *ctx, const char *why) {
  worker *w = ctx;
  td_backend *b = w->backend;
  bool are_pages_lost = b->info.flags & TD_READY_OWN_PAGES;
  bool is_alone = n_given(b, w) == 1;
  const request *on_trial = w->on_trial;
  w->on_trial = NULL;
  w->is_dying = true;
  for (uint32_t i = 0; i < b->n_slots && !b->is_closing; i++) {
    request *r = b->slots[i];
    if (!r || r->at != w) continue;
    bool is_suspect = is_alone || r == on_trial;
    if (r->out.submit_sent) r->blame += is_suspect ? BLAME_ALONE : BLAME_TOGETHER;
    if (r->is_last) {
      end_complete(b, r);
    } else if (r->out.is_canceled || r->blame > MAX_BLAME) {
      fail_request(b, r, why, "; try again");
    } else if (r->out.submit_sent || are_pages_lost) {
      continue_request(b, r);
    }
  }
  if (b->sched && are_pages_lost && !b->is_closing) td_sched_forget(b->sched);
  w->is_dying = false;
  release_held(b, w);
  pump(b);
}

// ---- workers come and go ----------------------------------------------------------------------

static td_status open_tier(td_backend *b, td_err *err) {
  const td_kv_tier_opts opts = {.loop = b->loop,
                                .dir = b->opts.kv_dir,
                                .model = b->opts.kv_model,
                                .kv = td_sched_kv(b->sched),
                                .pool_fd = b->kv_fd,
                                .flush_ns = b->opts.kv_flush_s * 1000000000ull};
  td_status st = td_kv_tier_open(&b->tier, &opts, err);
  if (st != TD_EUNSUPPORTED) return st;
  td_warn("serving without --kv-dir: %s", err->msg);
  return TD_OK;
}

// The last bit of what pages hold is the kernels' doing.
static void add_isa(td_digest *model, const td_wire_ready *info) {
  td_sha256 sha;
  td_sha256_begin(&sha);
  td_sha256_add(&sha, model, sizeof *model);
  td_sha256_add(&sha, info->isa, strnlen(info->isa, sizeof info->isa));
  td_sha256_end(&sha, model);
}

static td_status on_ready(void *ctx, const td_wire_ready *info, td_err *err) {
  td_backend *b = ((worker *)ctx)->backend;
  if (!info->n_vocab || !info->n_ctx || !info->page_tokens || !info->n_pages ||
      info->max_seqs != b->opts.max_batch) {
    return td_fail(err, TD_EFORMAT, "a worker process sent a malformed READY");
  }
  if (!b->sched) {
    add_isa(&b->opts.kv_model, info);
    uint32_t n_threads = b->opts.n_threads ? b->opts.n_threads : td_cpu_count();
    const td_sched_opts opts = {.max_seqs = info->max_seqs,
                                .n_pages = info->n_pages,
                                .page_tokens = info->page_tokens,
                                .max_waiting = MAX_WAITING,
                                .kv_root = b->opts.kv_dir ? &b->opts.kv_model : NULL,
                                .prefill_ahead = b->opts.prefill_chunk,
                                .n_threads = n_threads,
                                .prefill_threads = b->opts.prefill_threads ? b->opts.prefill_threads
                                                                           : n_threads / 2};
    td_status st = td_sched_open(&b->sched, &opts, err);
    if (st == TD_OK && b->opts.kv_dir) st = open_tier(b, err);
    if (st != TD_OK) return st;
  } else if (info->n_ctx != b->info.n_ctx || info->n_pages != b->info.n_pages ||
             info->n_vocab != b->info.n_vocab || info->flags != b->info.flags) {
    return td_fail(err, TD_EFORMAT, "the checkpoint has changed under the server; start it again");
  }
  b->info = *info;
  return TD_OK;
}

static void on_state(void *ctx, td_backend_state state) {
  worker *w = ctx;
  td_backend *b = w->backend;
  if (state == TD_BACKEND_FAILED) fail_all(b, td_supervisor_reason(w->supervisor));
  if (state == TD_BACKEND_READY) pump(b);
  td_backend_state now = td_backend_state_of(b);
  if (b->is_closing || now == b->told) return;
  b->told = now;
  if (b->opts.on_state) b->opts.on_state(b->opts.ctx, now);
}

// ---- open and close ---------------------------------------------------------------------------

static void free_backend(td_backend *b) {
  td_sched_close(b->sched);
  if (b->kv_fd >= 0) close(b->kv_fd);
  free(b->slots);
  free(b);
}

// Nobody writes to the pages any more, and all that is in them is in the directory, too.
static void on_tier_closed(void *ctx) {
  td_backend *b = ctx;
  void (*closed)(void *) = b->closed;
  void *closed_ctx = b->closed_ctx;
  free_backend(b);
  if (closed) closed(closed_ctx);
}

static void on_closed(void *ctx) {
  worker *w = ctx;
  td_backend *b = w->backend;
  w->supervisor = NULL;
  if (--b->n_open) return;
  fail_all(b, "the server is shutting down");
  td_kv_tier *tier = b->tier;
  b->tier = NULL;
  td_kv_tier_close(tier, on_tier_closed, b);
}

// Frees b when the last worker is gone, or at once without any.
static void close_workers(td_backend *b) {
  b->is_closing = true;
  uint32_t n = b->n_open;
  if (!n) free_backend(b);
  for (uint32_t i = 0; i < n; i++)
    td_supervisor_close(b->workers[i].supervisor, on_closed, &b->workers[i]);
}

static td_status open_worker(td_backend *b, uv_loop_t *loop, const td_worker_opts *opts,
                             td_err *err) {
  worker *w = &b->workers[b->n_open];
  w->backend = b;
  uint64_t stuck_s = b->opts.stuck_after_s ? b->opts.stuck_after_s : STUCK_S;
  const td_supervisor_opts supervisor = {.worker = *opts,
                                         .kv_fd = b->kv_fd,
                                         .stuck_ns = stuck_s * 1000000000u,
                                         .kill_ns = 2 * stuck_s * 1000000000u,
                                         .on_ready = on_ready,
                                         .on_record = on_record,
                                         .on_space = on_space,
                                         .on_death = on_death,
                                         .on_state = on_state,
                                         .ctx = w};
  td_status st = td_supervisor_open(&w->supervisor, loop, &supervisor, err);
  if (st == TD_OK) b->n_open++;
  return st;
}

static td_status open_workers(td_backend *b, uv_loop_t *loop, const td_backend_opts *opts,
                              td_err *err) {
  td_worker_opts w = {.role = TD_ROLE_BOTH,
                      .model_dir = opts->model_dir,
                      .device = opts->device,
                      .ctx_size = opts->ctx_size,
                      .max_batch = opts->max_batch,
                      .n_threads = opts->n_threads,
                      .kv_tokens = opts->kv_tokens,
                      .kv_dtype = opts->kv_dtype,
                      .activations = opts->activations,
                      .weights_fd = (uint32_t)opts->weights_fd,
                      .trace_fd = (uint32_t)opts->trace_fd,
                      .prefill_chunk = opts->prefill_chunk};
  if (b->n_workers == 1) return open_worker(b, loop, &w, err);
  w.role = TD_ROLE_PREFILL;
  td_status st = open_worker(b, loop, &w, err);
  if (st != TD_OK) return st;
  w.role = TD_ROLE_DECODE;
  w.prefill_chunk = 1; // it is asked to read none
  return open_worker(b, loop, &w, err);
}

td_status td_backend_open(td_backend **out, uv_loop_t *loop, const td_backend_opts *opts,
                          td_err *err) {
  *out = NULL;
  td_backend *b = calloc(1, sizeof *b);
  if (!b) return td_fail(err, TD_ENOMEM, "out of memory");
  b->opts = *opts;
  b->loop = loop;
  b->opts.model_dir = b->opts.device = NULL; // borrowed during this call only
  b->n_workers = opts->is_split ? 2 : 1;
  b->kv_fd = -1;
  b->n_slots = MAX_WAITING + opts->max_batch;
  b->slots = calloc(b->n_slots, sizeof(request *));
  td_status st = b->slots ? td_kv_pool_create(&b->kv_fd, err)
                          : td_fail(err, TD_ENOMEM, "out of memory");
  if (st == TD_OK) st = open_workers(b, loop, opts, err);
  if (st != TD_OK) {
    close_workers(b);
    return st;
  }
  *out = b;
  return TD_OK;
}

void td_backend_close(td_backend *b, void (*closed)(void *ctx), void *ctx) {
  b->closed = closed;
  b->closed_ctx = ctx;
  close_workers(b);
}

// ---- the callers' side ------------------------------------------------------------------------

// From the worst to the best.
static const td_backend_state states[] = {TD_BACKEND_FAILED, TD_BACKEND_LOADING, TD_BACKEND_STUCK};

td_backend_state td_backend_state_of(const td_backend *b) {
  for (size_t i = 0; i < TD_COUNT(states); i++) {
    for (uint32_t j = 0; j < b->n_workers; j++) {
      const td_supervisor *s = b->workers[j].supervisor;
      if ((s ? td_supervisor_state(s) : TD_BACKEND_FAILED) == states[i]) return states[i];
    }
  }
  return TD_BACKEND_READY;
}

const char *td_backend_reason(const td_backend *b) {
  for (uint32_t i = 0; i < b->n_workers; i++) {
    const td_supervisor *s = b->workers[i].supervisor;
    if (s && td_supervisor_state(s) == TD_BACKEND_FAILED) return td_supervisor_reason(s);
  }
  return b->is_closing ? "the server is shutting down" : "";
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

uint32_t td_backend_workers(const td_backend *b, td_backend_worker out[TD_BACKEND_MAX_WORKERS]) {
  for (uint32_t i = 0; i < b->n_workers; i++) {
    const td_supervisor *s = b->workers[i].supervisor;
    uint32_t role = b->n_workers == 1 ? TD_ROLE_BOTH : i == 0 ? TD_ROLE_PREFILL : TD_ROLE_DECODE;
    out[i] = (td_backend_worker){.role = td_worker_role_name(role), .state = TD_BACKEND_FAILED};
    if (!s) continue;
    td_wire_heartbeat heartbeat = td_supervisor_heartbeat(s);
    out[i].state = td_supervisor_state(s);
    out[i].n_restarts = td_supervisor_n_restarts(s);
    out[i].n_steps = heartbeat.n_steps;
    out[i].n_threads = heartbeat.n_threads;
    for (uint32_t j = 0; j < b->n_slots; j++)
      out[i].n_running += b->slots[j] && b->slots[j]->at == &b->workers[i];
  }
  return b->n_workers;
}

td_kv_tier_stats td_backend_kv_disk(const td_backend *b) {
  return td_kv_tier_stats_of(b->tier);
}

uint64_t td_backend_n_preemptions(const td_backend *b) {
  return b->sched ? td_sched_n_preemptions(b->sched) : 0;
}

double td_backend_kv_use(const td_backend *b) {
  if (!b->sched) return 0;
  return 1 - (double)td_sched_n_free_pages(b->sched) / (double)b->info.n_pages;
}

bool td_backend_accepts(const td_backend *b) {
  return b->sched && !b->is_closing && td_backend_state_of(b) != TD_BACKEND_FAILED;
}

static request *copy_request(const td_backend *b, const td_request *q,
                             const td_request_callbacks *callbacks) {
  request *r = calloc(1, sizeof *r);
  if (!r) return NULL;
  uint32_t room = b->info.n_ctx - q->n_prompt;
  uint32_t max_tokens = q->max_tokens < room ? q->max_tokens : room;
  r->callbacks = *callbacks;
  r->out.submit = (td_wire_submit){.sampling = q->sampling,
                                   .n_prompt = q->n_prompt,
                                   .max_tokens = max_tokens,
                                   .n_bias = q->n_bias,
                                   .flags = q->flags};
  r->out.tokens = malloc(((size_t)q->n_prompt + max_tokens) * sizeof *r->out.tokens);
  r->out.bias = malloc((q->n_bias + (size_t)1) * sizeof *r->out.bias);
  if (!r->out.tokens || !r->out.bias) {
    free_request(r);
    return NULL;
  }
  memcpy(r->out.tokens, q->prompt, q->n_prompt * sizeof *r->out.tokens);
  if (q->n_bias) memcpy(r->out.bias, q->bias, q->n_bias * sizeof *r->out.bias);
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
  if (!td_backend_accepts(b)) return td_fail(err, TD_EAGAIN, "the worker process is not ready");
  td_status st = td_request_check(q, &b->info, err);
  if (st != TD_OK) return st;
  uint64_t fresh = new_id(b);
  if (!fresh) return td_fail(err, TD_EAGAIN, "%u requests wait already", b->n_slots);
  request *r = copy_request(b, q, callbacks);
  if (!r) return td_fail(err, TD_ENOMEM, "out of memory for a prompt of %u tokens", q->n_prompt);
  const td_sched_job job = {.tokens = r->out.tokens,
                            .n_prompt = q->n_prompt,
                            .max_tokens = r->out.submit.max_tokens,
                            .tenant = q->tenant,
                            .weight = q->weight};
  st = td_sched_submit(b->sched, fresh, &job, td_clock_ns(), err);
  if (st != TD_OK) {
    free_request(r);
    return st == TD_ELIMIT ? td_fail(err, TD_EINVAL, "the KV pool holds less than the context")
                           : st;
  }
  r->out.id = *id = fresh;
  b->slots[fresh % b->n_slots] = r;
  pump(b);
  return TD_OK;
}

uint32_t td_backend_retry_s(const td_backend *b) {
  uint64_t s = b->sched ? td_sched_retry_ns(b->sched, td_clock_ns()) / 1000000000u + 1 : 1;
  return s < 600 ? (uint32_t)s : 600;
}

void td_backend_cancel(td_backend *b, uint64_t id) {
  request *r = find(b, id);
  if (!r || r->out.is_canceled) return;
  r->out.is_canceled = true;
  if (r->loading) {
    td_kv_loading_cancel(r->loading);
  } else if (r->out.submit_sent) {
    td_outbox_enter(&r->at->outbox, &r->out); // the worker's DONE will end it
  } else {
    end_request(b, r, NULL);
  }
  pump(b);
}
