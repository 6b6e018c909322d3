// src/front/request_flow.c - a request's way from the queue through the workers to its end. Thread:
// the loop's.
// A request waits in the scheduler (sched/) until it is admitted with the KV pages of its prompt;
// more pages follow as it generates. With two workers, the first does prefill and samples the first
// token, the second decodes from the same pages; with one, that worker does both. With two on GPUs,
// the second also prefills what is short.
// Which prompt a worker computes next is the scheduler's choice, step by step (TD_MSG_FIRST).
// KV pages in shared memory survive a worker crash: the request resumes after the last token
// received. Pages in GPU memory do not (TD_READY_DEVICE_KV): prompt and generated tokens are
// recomputed.
// A preempted request is canceled at its worker, returns to the queue, and recomputes what the
// prefix cache has lost meanwhile. Its client is not notified.
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "front/backend_impl.h"

// Added to a request's crash_score if it was at a worker that died and has made no progress since
// the last crash: the score for a crash among several requests, for a crash alone or on probation,
// and the limit above which the request fails.
#define BLAME_TOGETHER 1
#define BLAME_ALONE    3
#define MAX_BLAME      3

// ---- requests ---------------------------------------------------------------------------------

td_front_request *td_backend_find(const td_backend *b, uint64_t id) {
  td_front_request *r = b->slots[id % b->n_slots];
  return r && r->out.id == id ? r : NULL;
}

void td_backend_free_request(td_front_request *r) {
  if (!r) return;
  if (r->keys != r->out.tokens) free(r->keys);
  td_pictures_drop(r->pictures);
  free(r->out.tokens);
  free(r->out.bias);
  free(r->out.grammar);
  free(r->salt_text);
  free(r);
}

static void become(td_front_request *r, td_request_state state) {
  td_request_become(&r->out.state, state, r->out.id);
}

// Its pages hold all of its tokens except the last, which was generated.
static bool can_decode(const td_front_request *r) {
  return r->n_output && r->n_past == r->out.submit.n_prompt + r->n_output - 1;
}

// ---- probation --------------------------------------------------------------------------------

// Any request at a worker when it died may be the cause. After the restart the suspects are sent
// one at a time, highest score first: the next follows when the previous one has produced a token
// or has ended, and no new request is sent in between. A request that crashes the worker again is
// then the only suspect, so its second crash identifies it. At equal score, a request in decode
// (one step per token) goes before one that needs prefill.
static void enter(td_front_request *r, td_worker_handle *w) {
  if (w->is_dying || w->on_probation) {
    become(r, TD_REQUEST_HELD);
    return;
  }
  become(r, TD_REQUEST_SENDING);
  if (r->crash_score) w->on_probation = r;
  if (r->out.submit.flags & TD_SUBMIT_URGENT) w->first = r->out.id;
  td_outbox_enter(&w->outbox, &r->out);
}

static uint32_t urgency(const td_front_request *r) {
  return 2 * r->crash_score + can_decode(r);
}

static bool is_held(const td_front_request *r, const td_worker_handle *w) {
  return r && r->at == w && r->out.state == TD_REQUEST_HELD;
}

static void release_held(td_backend *b, td_worker_handle *w) {
  td_front_request *most = NULL;
  for (uint32_t i = 0; i < b->n_slots; i++) {
    td_front_request *r = b->slots[i];
    if (is_held(r, w) && (!most || urgency(r) > urgency(most))) most = r;
  }
  if (most) enter(most, w);
  for (uint32_t i = 0; i < b->n_slots && !w->on_probation; i++) {
    td_front_request *r = b->slots[i];
    if (is_held(r, w)) enter(r, w);
  }
}

// Call when r has produced a token or leaves its worker.
static void end_trial(td_backend *b, td_front_request *r) {
  td_worker_handle *w = r->at;
  if (!w || w->on_probation != r) return;
  w->on_probation = NULL;
  release_held(b, w);
}

// ---- the end of a request ---------------------------------------------------------------------

void td_backend_end_request(td_backend *b, td_front_request *r, const td_wire_done *done) {
  const bool is_heard = done && !td_request_is_canceled(r->out.state);
  become(r, TD_REQUEST_ENDED);
  td_outbox_leave(&r->out);
  td_sched_remove(b->sched, r->out.id);
  b->slots[r->out.id % b->n_slots] = NULL;
  end_trial(b, r);
  td_request_callbacks callbacks = r->callbacks;
  td_backend_free_request(r);
  if (b->tier) td_kv_disk_save(b->tier); // its pages are prefix cache now
  if (is_heard) callbacks.on_done(callbacks.ctx, done);
}

// Ends a request that was at a worker; the counts and times are the front's.
static void finish_request(td_backend *b, td_front_request *r, const td_wire_done *given) {
  td_wire_done done = *given;
  done.n_prompt = r->out.submit.n_prompt;
  done.n_cached = r->n_cached;
  done.n_output = r->n_output;
  if (r->read_ns) {
    done.prefill_ns = r->prefill_ns;
    done.decode_ns = td_clock_ns() - r->read_ns;
  }
  td_backend_end_request(b, r, &done);
}

// Ends a request for a reason that is not its fault; the client may retry.
static void fail_request(td_backend *b, td_front_request *r, const char *why, const char *cure) {
  td_wire_done done = {.reason = TD_DONE_LOST};
  snprintf(done.text, sizeof done.text, "%.150s%s", why, cure);
  finish_request(b, r, &done);
}

void td_backend_fail_all(td_backend *b, const char *why) {
  for (uint32_t i = 0; i < b->n_slots; i++) {
    td_front_request *r = b->slots[i];
    if (r && !td_request_is_loading(r->out.state)) fail_request(b, r, why, "");
  }
}

// ---- to the workers ---------------------------------------------------------------------------

static td_worker_handle *reader(td_backend *b) {
  return &b->workers[0];
}

static td_worker_handle *decoder(td_backend *b) {
  return &b->workers[b->n_workers - 1];
}

static bool is_up(const td_worker_handle *w) {
  if (!w->supervisor) return false;
  td_backend_state state = td_supervisor_state(w->supervisor);
  return state == TD_BACKEND_READY || state == TD_BACKEND_STUCK;
}

// Whether the second worker takes it: to decode, or on a GPU to prefill what is too short for
// experts to stream. The first would compute that no faster, and the request does not change hands.
static bool is_for_decoder(const td_backend *b, const td_front_request *r) {
  const uint32_t n_prompt = r->out.submit.n_prompt;
  if (can_decode(r)) return true;
  if (!b->opts.has_gpus || !b->info.stream_tokens) return false;
  return r->n_past >= n_prompt || n_prompt - r->n_past < b->info.stream_tokens;
}

// The request has n_past tokens in its pages now: copies up to there were made.
static void note_past(td_front_request *r, uint32_t n_past) {
  if (n_past > r->n_past) r->out.copies.source = -1;
  if (n_past >= r->out.copies.n_keep) r->out.copies.keep = -1;
  r->n_past = n_past;
}

// Sends the request to a worker, to continue after the tokens in its pages.
static void give(td_backend *b, td_front_request *r) {
  td_wire_submit *submit = &r->out.submit;
  end_trial(b, r);
  td_worker_handle *w = is_for_decoder(b, r) ? decoder(b) : reader(b);
  r->at = w;
  if (!r->was_given && td_supervisor_heartbeat(decoder(b)->supervisor).skips_layer)
    submit->flags |= TD_SUBMIT_SKIP_LAYER; // for good: its pages have no entries of the layer then
  r->was_given = true;
  r->given_prefill_ns = r->prefill_ns;
  submit->n_answer = r->n_output;
  submit->n_past = r->n_past;
  submit->flags &= ~(TD_SUBMIT_PREFILL_ONLY | TD_SUBMIT_COPIES);
  if (r->out.copies.source >= 0 || r->out.copies.keep >= 0) submit->flags |= TD_SUBMIT_COPIES;
  if (w != decoder(b)) submit->flags |= TD_SUBMIT_PREFILL_ONLY;
  td_outbox_leave(&r->out);
  td_outgoing_rewind(&r->out);
  enter(r, w);
}

static void on_loaded(void *ctx, uint64_t id, uint32_t n_cached);

// Starts loading pages of the prompt from disk. False: there is nothing to load.
static bool load(td_backend *b, td_front_request *r) {
  bool is_fresh = r->out.submit.flags & TD_SUBMIT_SCORE_PROMPT;
  if (!b->tier || is_fresh || r->n_past >= r->out.submit.n_prompt) return false;
  td_kv_disk_save(b->tier); // admitting r may have evicted cached pages
  const td_kv_load what = {.id = r->out.id,
                           .salt = r->salt,
                           .prompt = r->keys,
                           .n_prompt = r->out.submit.n_prompt,
                           .n_cached = r->n_past - r->n_past % b->info.page_tokens,
                           .pages = r->out.pages,
                           .on_loaded = on_loaded,
                           .ctx = b};
  r->loading = td_kv_disk_load(b->tier, &what);
  if (r->loading) become(r, TD_REQUEST_LOADING);
  return r->loading != NULL;
}

static void admit(td_backend *b) {
  td_admission admission;
  while (is_up(reader(b)) && td_sched_admit(b->sched, td_clock_ns(), &admission)) {
    td_front_request *r = td_backend_find(b, admission.id);
    r->out.pages = admission.pages;
    r->out.submit.n_pages = admission.n_pages;
    r->out.submit.flags &= ~TD_SUBMIT_URGENT;
    if (admission.is_urgent) r->out.submit.flags |= TD_SUBMIT_URGENT;
    r->n_past = admission.n_cached;
    r->out.copies = (td_wire_copies){
        .source = admission.source, .keep = admission.keep, .n_keep = admission.n_keep};
    if (!r->was_given) r->n_cached = admission.n_cached;
    if (!load(b, r)) give(b, r);
  }
}

// Puts r back into the queue, at its old position.
static void requeue(td_backend *b, td_front_request *r) {
  end_trial(b, r);
  become(r, TD_REQUEST_QUEUED);
  td_outbox_leave(&r->out);
  td_outgoing_rewind(&r->out);
  td_sched_requeue(b->sched, r->out.id, r->n_output);
  r->at = NULL;
  r->out.pages = NULL;
}

static void give_pages(td_backend *b) {
  td_growth growth;
  while (td_sched_grow(b->sched, &growth)) {
    td_front_request *r = td_backend_find(b, growth.id);
    r->out.pages = growth.pages;
    r->out.submit.n_pages = growth.n_pages;
    if (r->out.state != TD_REQUEST_HELD) td_outbox_enter(&r->at->outbox, &r->out);
  }
}

// Preempts r: at once, or when nobody writes to its pages any more.
static void preempt(td_backend *b, td_front_request *r) {
  r->max_progress = 0; // recomputed tokens count as progress
  if (r->out.state == TD_REQUEST_LOADING) {
    become(r, TD_REQUEST_LOADING_RECALLED);
    td_kv_loading_cancel(r->loading);
  } else if (r->out.state == TD_REQUEST_RUNNING) {
    become(r, TD_REQUEST_RECALLED);
    td_outbox_enter(&r->at->outbox, &r->out); // requeued at the worker's DONE
  } else if (r->out.state == TD_REQUEST_HELD || r->out.state == TD_REQUEST_SENDING) {
    requeue(b, r);
  } // else it is about to leave its pages anyway
}

// Allocates pages for growing sequences, preempting later requests if needed.
static void grow(td_backend *b) {
  uint64_t id;
  give_pages(b);
  while (td_sched_preempt(b->sched, td_clock_ns(), &id)) {
    preempt(b, td_backend_find(b, id));
    give_pages(b);
  }
}

// Sets each worker's thread count, before it is sent new work.
static void lease_threads(td_backend *b) {
  if (b->n_workers == 1) return;
  td_thread_split now = td_sched_lease(b->sched);
  bool is_reading = !b->opts.has_gpus; // else prompts may all be at the second worker
  for (uint32_t i = 0; i < b->n_slots && !is_reading; i++)
    is_reading = b->slots[i] && b->slots[i]->at == reader(b);
  if (!is_reading) now.decode = b->n_threads;
  if (is_up(reader(b))) td_supervisor_lease(reader(b)->supervisor, now.prefill);
  if (is_up(decoder(b))) td_supervisor_lease(decoder(b)->supervisor, now.decode);
}

// Sends as much as fits into the rings, and then tells what has become of the prefix cache.
static void flush(td_backend *b) {
  for (uint32_t i = 0; i < b->n_workers; i++) {
    td_worker_handle *w = &b->workers[i];
    if (is_up(w)) td_outbox_flush(&w->outbox, w->supervisor);
  }
  td_kv_events_send(b->opts.kv_events);
}

static bool is_at(void *ctx, uint64_t id) {
  const td_worker_handle *w = ctx;
  const td_front_request *r = td_backend_find(w->backend, id);
  return r->at == w && r->out.state == TD_REQUEST_RUNNING;
}

// Tells each worker whose prompt goes next, if that has changed and it has all that was to be sent.
static void order_prompts(td_backend *b) {
  for (uint32_t i = 0; i < b->n_workers; i++) {
    td_worker_handle *w = &b->workers[i];
    td_wire_msg msg = {.kind = TD_MSG_FIRST};
    if (!is_up(w) || w->outbox.head) continue;
    if (!td_sched_next_prefill(b->sched, is_at, w, &msg.request) || msg.request == w->first)
      continue;
    if (td_supervisor_send(w->supervisor, &msg) == TD_OK) w->first = msg.request;
  }
}

void td_backend_pump(td_backend *b) {
  if (b->is_closing || !b->sched) return;
  grow(b);
  admit(b);
  lease_threads(b);
  flush(b);
  order_prompts(b);
}

// Continues as if the pages had been in memory, after handling what happened meanwhile.
static void on_loaded(void *ctx, uint64_t id, uint32_t n_cached) {
  td_backend *b = ctx;
  td_front_request *r = td_backend_find(b, id);
  r->loading = NULL;
  if (r->out.state == TD_REQUEST_LOADING_CANCELED) {
    td_backend_end_request(b, r, NULL);
  } else if (b->is_closing) {
    fail_request(b, r, "the server is shutting down", "");
  } else if (td_backend_state_of(b) == TD_BACKEND_FAILED) {
    fail_request(b, r, TD_BACKEND_FAILED_TEXT, "");
  } else {
    if (n_cached > r->n_past) { // else a copy in memory has more
      td_sched_progress(b->sched, id, n_cached, td_clock_ns());
      note_past(r, n_cached);
    }
    if (!r->was_given) r->n_cached = r->n_past;
    if (r->out.state == TD_REQUEST_LOADING_RECALLED)
      requeue(b, r);
    else
      give(b, r);
  }
  td_backend_pump(b);
}

// ---- from the workers -------------------------------------------------------------------------

static void note_furthest(td_front_request *r, uint32_t n_computed) {
  if (n_computed <= r->max_progress) return;
  r->max_progress = n_computed;
  r->crash_score = 0;
}

static void on_token(td_backend *b, td_front_request *r, const td_wire_token *token) {
  if (r->out.state == TD_REQUEST_COMPLETE) return;
  td_wire_token checked = *token;
  if (checked.n_top > TD_WIRE_MAX_TOP) checked.n_top = TD_WIRE_MAX_TOP;
  if (checked.id < 0 || (uint32_t)checked.id >= b->info.n_vocab) return;
  if (checked.index != r->n_output || r->n_output == r->out.submit.max_tokens) return;
  uint32_t n_prompt = r->out.submit.n_prompt;
  r->keys[n_prompt + r->n_output] = checked.id;
  r->out.tokens[n_prompt + r->n_output++] = checked.id;
  const bool is_last = checked.is_eos || r->n_output == r->out.submit.max_tokens;
  if (is_last && r->out.state != TD_REQUEST_CANCELED) become(r, TD_REQUEST_COMPLETE);
  note_past(r, n_prompt + r->n_output - 1);
  note_furthest(r, n_prompt + r->n_output);
  end_trial(b, r);
  td_sched_progress(b->sched, r->out.id, r->n_past, td_clock_ns());
  if (!is_last) {
    grow(b);
    flush(b);
  }
  if (r->out.state != TD_REQUEST_CANCELED) r->callbacks.on_token(r->callbacks.ctx, &checked);
}

// A prefill that is repeated reports them again.
static void on_prompt_token(td_front_request *r, const td_wire_token *token) {
  td_wire_token checked = *token;
  if (checked.n_top > TD_WIRE_MAX_TOP) checked.n_top = TD_WIRE_MAX_TOP;
  if (checked.index != r->n_scored + 1 || checked.index >= r->out.submit.n_prompt) return;
  if (checked.id != r->out.tokens[checked.index]) return;
  r->n_scored++;
  bool is_wanted = r->out.state != TD_REQUEST_CANCELED && r->callbacks.on_prompt_token;
  if (is_wanted) r->callbacks.on_prompt_token(r->callbacks.ctx, &checked);
}

static void on_progress(td_backend *b, td_front_request *r, const td_wire_progress *progress) {
  uint32_t n_done = progress->n_done, n_prompt = r->out.submit.n_prompt;
  uint32_t n_known = n_prompt + (r->n_output ? r->n_output - 1 : 0);
  bool is_new = !r->read_ns; // a repeated prefill is not reported
  if (n_done < r->n_past || n_done > n_known) return;
  note_past(r, n_done);
  td_sched_progress(b->sched, r->out.id, n_done, td_clock_ns());
  if (is_new) r->prefill_ns = r->given_prefill_ns + progress->elapsed_ns;
  if (is_new && n_done == n_prompt) {
    r->read_ns = td_clock_ns();
    uint32_t n_prefilled = r->out.submit.n_prompt - r->n_cached;
    if (b->tier) td_kv_disk_note_prefill(b->tier, n_prefilled, r->prefill_ns);
  }
  note_furthest(r, n_done);
  td_backend_pump(b);
  if (!is_new || r->out.state == TD_REQUEST_CANCELED || !r->callbacks.on_progress) return;
  td_wire_progress told = *progress;
  told.n_cached = r->n_cached;
  told.n_prompt = n_prompt;
  told.elapsed_ns = r->prefill_ns;
  r->callbacks.on_progress(r->callbacks.ctx, &told);
}

// Whether a request that its worker has dropped has to be continued.
static bool should_continue(const td_front_request *r, td_done_reason reason) {
  const bool is_recalled = r->out.state == TD_REQUEST_RECALLED;
  if (!is_recalled && r->out.state != TD_REQUEST_RUNNING) return false;
  return reason == TD_DONE_PREFILLED ? can_decode(r) : reason == TD_DONE_CANCELED && is_recalled;
}

static void on_done(td_backend *b, td_front_request *r, const td_wire_done *given) {
  td_wire_done done = *given;
  done.text[sizeof done.text - 1] = '\0';
  const bool will_move = done.reason == TD_DONE_PREFILLED && r->out.state != TD_REQUEST_RECALLED;
  if ((b->info.flags & TD_READY_STATES) && done.n_past == r->n_past && !will_move)
    td_sched_settle(b->sched, r->out.id);
  if (should_continue(r, done.reason)) {
    if (r->out.state == TD_REQUEST_RECALLED)
      requeue(b, r);
    else
      give(b, r);
  } else if (done.reason == TD_DONE_PREFILLED) {
    done.reason = TD_DONE_ERROR;
    snprintf(done.text, sizeof done.text, "the worker process ended a request too early");
    finish_request(b, r, &done);
  } else {
    finish_request(b, r, &done);
  }
  td_backend_pump(b);
}

void td_backend_on_record(void *ctx, const td_wire_msg *msg) {
  td_worker_handle *w = ctx;
  td_backend *b = w->backend;
  if (b->is_closing || !b->sched) return;
  td_front_request *r = td_backend_find(b, msg->request);
  if (!r || r->at != w || !td_request_is_at_worker(r->out.state)) return;
  if (msg->kind == TD_MSG_TOKEN)
    on_token(b, r, &msg->u.token);
  else if (msg->kind == TD_MSG_PROMPT_TOKEN)
    on_prompt_token(r, &msg->u.token);
  else if (msg->kind == TD_MSG_PROGRESS)
    on_progress(b, r, &msg->u.progress);
  else if (msg->kind == TD_MSG_DONE)
    on_done(b, r, &msg->u.done);
}

void td_backend_on_space(void *ctx) {
  td_backend_pump(((td_worker_handle *)ctx)->backend);
}

// ---- a worker's death -------------------------------------------------------------------------

// A request in prefill is requeued at its old position; what was computed is in the prefix cache. A
// request in decode continues after its last token. If the pages were lost with the worker, or the
// last one may hold the recurrent state of a later token, both are requeued and recomputed from
// what is cached.
static void continue_request(td_backend *b, td_front_request *r) {
  bool is_lost = b->info.flags & (TD_READY_DEVICE_KV | TD_READY_STATES);
  if (r->n_output && !is_lost && r->out.state == TD_REQUEST_RUNNING)
    give(b, r);
  else
    requeue(b, r);
}

static uint32_t n_given(const td_backend *b, const td_worker_handle *w) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < b->n_slots; i++)
    n += b->slots[i] && b->slots[i]->at == w && td_request_is_at_worker(b->slots[i]->out.state);
  return n;
}

void td_backend_on_death(void *ctx, const char *why) {
  td_worker_handle *w = ctx;
  td_backend *b = w->backend;
  bool are_pages_lost = b->info.flags & TD_READY_DEVICE_KV;
  bool is_alone = n_given(b, w) == 1;
  const td_front_request *on_probation = w->on_probation;
  w->on_probation = NULL;
  w->first = 0;
  w->is_dying = true;
  for (uint32_t i = 0; i < b->n_slots && !b->is_closing; i++) {
    td_front_request *r = b->slots[i];
    if (!r || r->at != w) continue;
    const td_request_state state = r->out.state;
    const bool was_there = td_request_is_at_worker(state);
    bool is_suspect = is_alone || r == on_probation;
    if (was_there) r->crash_score += is_suspect ? BLAME_ALONE : BLAME_TOGETHER;
    if (state == TD_REQUEST_COMPLETE) {
      // All tokens had been received; only the worker's DONE was lost.
      bool is_full = r->n_output == r->out.submit.max_tokens;
      finish_request(b, r, &(td_wire_done){.reason = is_full ? TD_DONE_LENGTH : TD_DONE_STOP});
    } else if (state == TD_REQUEST_CANCELED || r->crash_score > MAX_BLAME) {
      fail_request(b, r, why, "; try again");
    } else if (was_there || are_pages_lost) {
      continue_request(b, r);
    }
  }
  if (b->sched && are_pages_lost && !b->is_closing) td_sched_forget(b->sched);
  w->is_dying = false;
  release_held(b, w);
  td_backend_pump(b);
}
