// src/worker/results.c - turning the results of a step into records: tokens, progress, ends.
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/jitter.h"
#include "worker/worker_impl.h"

td_status td_worker_save_state(td_worker *w, const td_worker_request *r, td_err *err) {
  const uint32_t page_idx = r->n_past / w->kv.layout.page_tokens;
  if (r->is_held || r->is_ended || page_idx >= r->n_pages_received) return TD_OK;
  return td_engine_save_state(w->engine, r->pages[page_idx], err);
}

// Rolls recurrent states back to before drafts that were rejected.
static td_status roll_back(const td_worker *w, td_worker_request *r, td_err *err) {
  const uint32_t n_ahead = r->n_computed > r->n_past ? r->n_computed - r->n_past : 0;
  r->n_computed = 0;
  if (!n_ahead) return TD_OK;
  return td_engine_roll_back(w->engine, r->step_seq, w->step.seqs[r->step_seq].n_tokens - n_ahead,
                             r->pages[(r->n_past - 1) / w->kv.layout.page_tokens], err);
}

static td_status post_done(td_worker *w, td_worker_request *r, td_done_reason reason,
                           const char *text, td_err *err) {
  td_wire_msg done;
  td_status st = roll_back(w, r, err);
  if (st == TD_OK) st = td_worker_save_state(w, r, err);
  if (st != TD_OK) return st;
  td_requests_end(&w->requests, r, reason, text, &done);
  return td_front_link_send(&w->front_link, &done, err);
}

// Sends a token that was drawn, and ends the request if it was the last.
static td_status post_token(td_worker *w, td_worker_request *r, td_wire_msg *msg, td_err *err) {
  td_wire_token *token = &msg->u.token;
  td_err why;
  if (td_sampler_status(r->sampler, &why) != TD_OK)
    return post_done(w, r, td_request_failure(why.code), why.msg, err);
  int32_t *next = td_request_next(r);
  token->index = r->n_output++;
  token->is_drafted = td_draft_take(&r->draft, &w->step.pace, next, token->id);
  if (!token->is_drafted) token->n_rejected = (uint16_t)td_draft_drop(&r->draft);
  *next = w->drawn = token->id;
  token->is_eos = td_request_ends_with(r, token->id);
  td_status st = td_front_link_send(&w->front_link, msg, err);
  if (st != TD_OK) return st;
  if (token->is_eos || td_request_is_complete(r)) return post_done(w, r, TD_DONE_STOP, NULL, err);
  if (r->n_output == r->max_output) return post_done(w, r, TD_DONE_LENGTH, NULL, err);
  if (r->submit.flags & TD_SUBMIT_PREFILL_ONLY)
    return post_done(w, r, TD_DONE_PREFILLED, NULL, err);
  return TD_OK;
}

// Whether no token can be drawn, and the request has ended: its grammar is complete, or has failed.
static bool has_ended(td_worker *w, td_worker_request *r, td_status *st, td_err *err) {
  td_err why;
  *st = TD_OK;
  if (r->matcher && td_sampler_status(r->sampler, &why) != TD_OK)
    *st = post_done(w, r, td_request_failure(why.code), why.msg, err);
  else if (td_request_is_complete(r))
    *st = post_done(w, r, TD_DONE_STOP, NULL, err);
  else
    return false;
  return true;
}

// Keeps a row until the grammar's mask is made: the request sits steps out, others do not.
static td_status wait_for_mask(td_worker *w, td_engine *engine, td_worker_request *r, uint32_t row,
                               td_err *err) {
  const size_t n_bytes = w->config->n_vocab * sizeof *r->logits;
  const float *logits;
  const td_top_logits *top;
  if (!r->logits) r->logits = malloc(n_bytes);
  if (!r->logits) return post_done(w, r, TD_DONE_ERROR, "out of memory for logits", err);
  td_status st = td_engine_fetch_logits(engine, row, &logits, &top, err);
  if (st != TD_OK) return st;
  memcpy(r->logits, logits, n_bytes);
  r->top = top ? *top : (td_top_logits){.n = 0};
  r->has_logits = true;
  r->draft.n_proposed = r->draft.n_taken; // the rows behind it are lost with the step
  return TD_OK;
}

// Samples the request's next token from a row of the step.
static td_status answer(td_worker *w, td_engine *engine, td_worker_request *r, uint32_t row,
                        td_err *err) {
  td_wire_msg msg = {.kind = TD_MSG_TOKEN, .request = r->id};
  td_status st;
  if (r->matcher && !td_matcher_is_ready(r->matcher)) return wait_for_mask(w, engine, r, row, err);
  if (has_ended(w, r, &st, err)) return st;
  st = td_engine_draw(engine, row, r->sampler, (r->submit.flags & TD_SUBMIT_LOGPROBS) != 0,
                      &msg.u.token, err);
  return st == TD_OK ? post_token(w, r, &msg, err) : st;
}

// Samples the request's next tokens from the rows of a step, the last drawn token's and those of
// drafts: as long as the drafts are what is drawn.
static td_status answer_drafts(td_worker *w, td_worker_request *r, uint32_t seq_idx, uint32_t row,
                               td_err *err) {
  const uint64_t id = r->id;
  r->step_seq = seq_idx;
  r->n_computed = r->n_past + w->step.seqs[seq_idx].n_tokens;
  for (;; row++) {
    r->n_past++;
    const uint32_t n_taken = r->draft.n_taken;
    td_status st = answer(w, w->engine, r, row, err);
    if (st != TD_OK || r->id != id) return st;
    if (r->draft.n_taken != n_taken + 1) return roll_back(w, r, err);
  }
}

// Has the masks of the next tokens made, beside the next step. Not before all tokens are drawn:
// requests with the same grammar would wait for each other.
static void prepare_masks(const td_worker *w) {
  for (uint32_t i = 0; i < w->requests.n; i++) {
    const td_worker_request *r = w->requests.active[i];
    if (r->matcher && r->phase != TD_REQUEST_RECEIVING) td_matcher_prepare(r->matcher);
  }
}

td_status td_worker_answer_waiting(td_worker *w, td_err *err) {
  uint64_t n_made;
  td_status st = TD_OK;
  bool has_drawn = false;
  if (w->masks_fd < 0) return TD_OK;
  if (read(w->masks_fd, &n_made, sizeof n_made) < 0 && errno != EAGAIN)
    return td_fail(err, TD_EIO, "eventfd: %s", strerror(errno));
  for (uint32_t i = w->requests.n; i-- > 0 && st == TD_OK;) {
    td_worker_request *r = w->requests.active[i];
    if (!r->has_logits || r->is_held || !td_matcher_is_ready(r->matcher)) continue;
    r->has_logits = false;
    has_drawn = true;
    if (has_ended(w, r, &st, err)) continue;
    td_wire_msg msg = {.kind = TD_MSG_TOKEN, .request = r->id};
    const bool wants_logprobs = (r->submit.flags & TD_SUBMIT_LOGPROBS) != 0;
    if (!r->top.n || !td_sampler_next_of_top(r->sampler, &r->top, wants_logprobs, &msg.u.token))
      msg.u.token = td_sampler_next(r->sampler, r->logits, wants_logprobs);
    st = post_token(w, r, &msg, err);
  }
  if (has_drawn) prepare_masks(w);
  return st;
}

// Reports the log-probabilities of the prompt's tokens that follow those of the step, whose rows
// begin at row.
static td_status score(td_worker *w, td_engine *engine, const td_worker_request *r,
                       uint32_t n_tokens, uint32_t row, td_err *err) {
  td_status st = TD_OK;
  const float *logits = td_engine_logits(engine);
  for (uint32_t i = 0; i < n_tokens && st == TD_OK; i++) {
    const uint32_t at = r->n_past + i + 1;
    if (at >= r->submit.n_prompt) break;
    td_wire_msg msg = {.kind = TD_MSG_PROMPT_TOKEN, .request = r->id};
    td_sampler_score(r->sampler, logits + (size_t)(row + i) * w->config->n_vocab, r->tokens[at],
                     &msg.u.token);
    msg.u.token.index = at;
    st = td_front_link_send(&w->front_link, &msg, err);
  }
  return st;
}

static td_status report_progress(td_worker *w, td_worker_request *r, td_err *err) {
  uint64_t now_ns = td_clock_ns();
  const td_wire_msg msg = {.kind = TD_MSG_PROGRESS,
                           .request = r->id,
                           .u.progress = {.n_done = r->n_past,
                                          .n_prompt = r->submit.n_prompt,
                                          .n_cached = r->submit.n_past,
                                          .elapsed_ns = now_ns - r->begin_ns}};
  if (r->phase == TD_REQUEST_PREFILL && r->n_past == r->submit.n_prompt) r->first_token_ns = now_ns;
  r->phase = td_request_phase_of(r);
  td_status st = td_front_link_send(&w->front_link, &msg, err);
  bool is_read = r->phase == TD_REQUEST_DECODE && r->submit.n_answer;
  if (st != TD_OK || !is_read || !(r->submit.flags & TD_SUBMIT_PREFILL_ONLY)) return st;
  return post_done(w, r, TD_DONE_PREFILLED, NULL, err);
}

// Copies the page that is being filled, if this is where it is to be kept.
static td_status keep_page(const td_worker *w, td_engine *engine, td_worker_request *r,
                           td_err *err) {
  if (r->copies.keep < 0 || r->n_past != r->copies.n_keep) return TD_OK;
  const int32_t page = r->pages[(r->n_past - 1) / w->kv.layout.page_tokens], keep = r->copies.keep;
  r->copies.keep = -1;
  return td_engine_copy_page(engine, keep, page, err);
}

td_status td_worker_post_results(td_worker *w, td_engine *engine, td_step *step, td_err *err) {
  uint32_t row = 0;
  td_status st = TD_OK;
  td_err why;
  w->n_steps++;
  for (uint32_t i = 0; i < step->n && st == TD_OK; i++) {
    td_worker_request *r = step->requests[i];
    const td_step_seq *seq = &step->seqs[i];
    const bool is_scored = seq->want == TD_WANT_ALL;
    const uint32_t n_rows = td_step_seq_rows(seq);
    const bool wants_token = n_rows &&
                             (!is_scored || r->n_past + seq->n_tokens == r->submit.n_prompt);
    w->drawn = -1;
    if (r->is_ended) {
      st = post_done(w, r, r->end_reason, r->end_text, err);
    } else if (td_engine_has_failed(engine, step->seqs, i, &why)) {
      td_error("request %llu: %s", (unsigned long long)r->id, why.msg);
      st = post_done(w, r, TD_DONE_ERROR, why.msg, err);
    } else if (seq->want == TD_WANT_EACH) {
      st = answer_drafts(w, r, i, row, err);
    } else {
      if (is_scored) st = score(w, engine, r, seq->n_tokens, row, err);
      r->n_past += seq->n_tokens;
      if (st == TD_OK) st = keep_page(w, engine, r, err);
      if (st == TD_OK && r->phase != TD_REQUEST_DECODE) st = report_progress(w, r, err);
      if (st == TD_OK && wants_token) st = answer(w, engine, r, row + n_rows - 1, err);
    }
    row += n_rows;
    if (step->layer.drawn) step->layer.drawn[i] = w->drawn;
  }
  prepare_masks(w);
  return st;
}

// ---- the layer that drafts ----------------------------------------------------------------------

// Whether it is computed for the request at all.
static bool uses_layer(const td_worker_request *r) {
  return !(r->submit.flags & TD_SUBMIT_SKIP_LAYER);
}

// Of a prompt whose experts stream the layer computes tokens at the end, with its own experts where
// decode has them: MIN_TAIL tokens and what begins the page that they are in, as far as the step
// has them. The layer sees the text from there on, or else from the next page on.
enum { MIN_TAIL = 64 };

static uint32_t tail_from(const td_step_seq *seq, uint32_t page_tokens) {
  const uint32_t end = seq->n_past + seq->n_tokens;
  const uint32_t least = (seq->n_past + page_tokens - 1) / page_tokens * page_tokens;
  const uint32_t from = end > MIN_TAIL ? (end - MIN_TAIL) / page_tokens * page_tokens : 0;
  return from > least ? from : least;
}

// What the layer does behind a step with streamed experts. Not while an engine has the memory of
// dense weights (td_worker.saved_engine).
static void note_tails(const td_worker *w, td_step *step) {
  const uint32_t page_tokens = w->kv.layout.page_tokens;
  uint32_t room = w->saved_engine ? 0 : w->step.budget.max_tokens;
  for (uint32_t i = 0; i < step->n; i++) {
    const td_step_seq *seq = &step->seqs[i];
    const uint32_t end = seq->n_past + seq->n_tokens;
    const uint32_t most = seq->want == TD_WANT_NONE || !uses_layer(step->requests[i]) ? 0 : room;
    uint32_t from = tail_from(seq, page_tokens);
    while (from < end && end - from > most)
      from += page_tokens;
    step->requests[i]->layer_from = from;
    step->layer.seqs[i] = (td_draft_seq){.from = from};
    if (from >= end) continue;
    room -= end - from;
    step->layer.reads_prompt = true;
  }
}

// Makes the sequences' pages those of the step.
static td_status keep_pages(td_step *step, td_err *err) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < step->n; i++)
    n += step->seqs[i].n_pages;
  if (n > step->layer.max_pages) {
    int32_t *pages = realloc(step->layer.pages, 2 * (size_t)n * sizeof *pages);
    if (!pages) return td_fail(err, TD_ENOMEM, "out of memory for the pages of a step");
    step->layer.pages = pages;
    step->layer.max_pages = 2 * n;
  }
  int32_t *at = step->layer.pages;
  for (uint32_t i = 0; i < step->n; at += step->seqs[i++].n_pages) {
    td_step_seq *seq = &step->seqs[i];
    if (seq->n_pages) memcpy(at, seq->pages, seq->n_pages * sizeof *at);
    seq->pages = at;
  }
  return TD_OK;
}

// Makes the sequences' images, without their pixels, those of the step.
static td_status keep_images(td_step *step, td_err *err) {
  uint32_t n = 0;
  for (uint32_t i = 0; i < step->n; i++)
    n += step->seqs[i].n_images;
  if (n > step->layer.max_images) {
    td_image_input *images = realloc(step->layer.images, 2 * (size_t)n * sizeof *images);
    if (!images) return td_fail(err, TD_ENOMEM, "out of memory for the images of a step");
    step->layer.images = images;
    step->layer.max_images = 2 * n;
  }
  td_image_input *at = step->layer.images;
  for (uint32_t i = 0; i < step->n; at += step->seqs[i++].n_images) {
    td_step_seq *seq = &step->seqs[i];
    if (seq->n_images) memcpy(at, seq->images, seq->n_images * sizeof *at);
    for (uint32_t k = 0; k < seq->n_images; k++)
      at[k].rgb = NULL;
    seq->images = at;
  }
  return TD_OK;
}

td_status td_worker_note_next(const td_worker *w, td_step *step, td_err *err) {
  int32_t *next = step->layer.next;
  step->layer.reads_prompt = false;
  if (!w->has_draft_layer) return TD_OK;
  td_status st = keep_images(step, err);
  if (st != TD_OK) return st;
  if (step == &w->stream_step) {
    note_tails(w, step);
    return TD_OK;
  }
  st = keep_pages(step, err);
  if (st != TD_OK) return st;
  for (uint32_t i = 0; i < step->n; i++) {
    const td_worker_request *r = step->requests[i];
    const td_step_seq *seq = &step->seqs[i];
    const uint32_t n_text = r->submit.n_prompt + r->n_output, from = seq->n_past + 1;
    const uint32_t n = n_text - from < seq->n_tokens ? n_text - from : seq->n_tokens;
    memcpy(next, r->tokens + from, n * sizeof *next);
    step->layer.seqs[i] = (td_draft_seq){.next = next, .n_next = n, .from = r->layer_from};
    next += seq->n_tokens;
    if (r->phase != TD_REQUEST_DECODE && uses_layer(r)) step->layer.reads_prompt = true;
  }
  return TD_OK;
}

// How many guesses the layer should make for the request; 0: none, or its text has better ones.
static uint32_t wanted_guesses(const td_worker *w, const td_worker_request *r) {
  const td_step *step = &w->step;
  const uint32_t most = td_step_max_drafts(r, w->kv.layout.page_tokens);
  const bool can_draft = step->draft_mode != TD_DRAFT_OFF && r->phase == TD_REQUEST_DECODE &&
                         most && uses_layer(r);
  if (!can_draft || r->has_logits || r->n_past + 1 != r->submit.n_prompt + r->n_output) return 0;
  if (r->n_past <= r->layer_from) return 0;
  return td_draft_depth(&r->draft, step->draft_mode, &step->pace,
                        step->n_decode ? step->n_decode : 1,
                        td_draft_lookup(r->tokens, r->n_past + 1, most) > 0);
}

// Completes what follows the tokens of sequence i of the step by what was drawn. Returns how many
// guesses it wants.
static uint32_t complete_next(const td_worker *w, td_step *step, uint32_t i) {
  td_worker_request *r = step->requests[i];
  const td_step_seq *seq = &step->seqs[i];
  td_draft_seq *d = &step->layer.seqs[i];
  if (!r->id) { // it has ended: another worker may continue behind its prompt
    if (step == &w->stream_step) return 0;
    const bool is_last = !seq->is_decode && d->n_next + 1 == seq->n_tokens;
    if (is_last && step->layer.drawn[i] >= 0)
      step->layer.next[d->next - step->layer.next + d->n_next++] = step->layer.drawn[i];
    return 0;
  }
  const uint32_t n = r->submit.n_prompt + r->n_output - seq->n_past - 1;
  d->next = r->tokens + seq->n_past + 1;
  d->n_next = n < seq->n_tokens ? n : seq->n_tokens;
  const uint32_t n_wanted = wanted_guesses(w, r);
  d->out = n_wanted ? td_request_next(r) : NULL;
  return n_wanted;
}

td_status td_worker_draft(td_worker *w, td_step *step, td_err *err) {
  uint32_t depth = 0;
  if (!w->has_draft_layer) return TD_OK;
  for (uint32_t i = 0; i < step->n; i++) {
    const uint32_t n = complete_next(w, step, i);
    if (n > depth) depth = n;
  }
  if (!depth && !step->layer.reads_prompt) return TD_OK;
  for (uint32_t i = 0; i < step->n; i++) { // near the end of a page the next may be missing
    const td_worker_request *r = step->requests[i];
    const uint64_t n_room = (uint64_t)r->n_pages_received * w->kv.layout.page_tokens;
    if (step->layer.seqs[i].out && n_room < (uint64_t)r->n_past + depth)
      step->layer.seqs[i].out = NULL;
  }
  const uint64_t begin_ns = td_clock_ns();
  const td_draft_step draft = {.of = step == &w->stream_step ? w->streaming : w->engine,
                               .seqs = step->seqs,
                               .drafts = step->layer.seqs,
                               .n_seqs = step->n,
                               .n_drafts = depth};
  td_status st = td_engine_draft(w->engine, &draft, err);
  if (st != TD_OK) return td_err_prefix(err, "drafts of %u sequences failed", step->n);
  if (depth && !step->n_prefilled && step->is_warm)
    td_draft_pace_note_passes(&step->pace, depth, td_jitter_time(td_clock_ns() - begin_ns));
  for (uint32_t i = 0; i < step->n; i++)
    if (step->layer.seqs[i].out) step->requests[i]->n_guesses = depth;
  return TD_OK;
}
