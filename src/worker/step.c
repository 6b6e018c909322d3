// src/worker/step.c - choosing the sequences of a step.
#include "worker/step.h"

#include <stdlib.h>
#include <string.h>

td_status td_step_open(td_step *out, uint32_t max_seqs, uint32_t prefill_chunk, td_err *err) {
  *out = (td_step){.max_seqs = max_seqs,
                   .seqs = calloc(max_seqs, sizeof(td_step_seq)),
                   .requests = calloc(max_seqs, sizeof(td_worker_request *)),
                   .drafts = calloc(max_seqs, sizeof(td_draft *)),
                   .draft_mode = TD_DRAFT_OFF};
  td_draft_pace_init(&out->pace);
  td_prefill_budget_init(&out->budget, prefill_chunk);
  if (out->seqs && out->requests && out->drafts) return TD_OK;
  td_step_close(out);
  return td_fail(err, TD_ENOMEM, "out of memory for steps of %u requests", max_seqs);
}

td_status td_step_use_layer(td_step *step, td_err *err) {
  const uint32_t n = step->max_seqs;
  const size_t n_tokens = td_step_max_tokens(n, step->budget.max_tokens);
  step->layer.next = malloc(n_tokens * sizeof *step->layer.next);
  step->layer.drawn = malloc(n * sizeof *step->layer.drawn);
  step->layer.seqs = malloc(n * sizeof *step->layer.seqs);
  if (step->layer.next && step->layer.drawn && step->layer.seqs) return TD_OK;
  return td_fail(err, TD_ENOMEM, "out of memory for steps of %u requests", n);
}

void td_step_close(td_step *step) {
  free(step->seqs);
  free(step->requests);
  free(step->drafts);
  free(step->layer.next);
  free(step->layer.drawn);
  free(step->layer.seqs);
  free(step->layer.pages);
  free(step->layer.images);
  *step = (td_step){0};
}

void td_step_put_first(td_requests *requests, uint64_t id) {
  td_worker_request *r = td_requests_find(requests, id), **active = requests->active;
  uint32_t i = 0;
  if (!r) return;
  while (active[i] != r)
    i++;
  memmove(&active[1], &active[0], i * sizeof active[0]);
  active[0] = r;
}

static void add(td_step *step, td_worker_request *r, uint32_t n_tokens, td_want want) {
  step->seqs[step->n] = (td_step_seq){.tokens = r->tokens + r->n_past,
                                      .n_tokens = n_tokens,
                                      .n_past = r->n_past,
                                      .past = r->tokens,
                                      .pages = r->pages,
                                      .n_pages = r->n_pages_received,
                                      .images = r->images,
                                      .n_images = r->submit.n_images,
                                      .want = want,
                                      .is_decode = r->phase != TD_REQUEST_PREFILL,
                                      .temperature = r->submit.sampling.temperature};
  step->requests[step->n++] = r;
}

static bool waits_for_prefill(const td_worker_request *r) {
  return r->phase == TD_REQUEST_PREFILL && !r->is_held && !r->is_entering;
}

// Prompt tokens not prefilled yet.
static uint32_t n_prompt_left(const td_worker_request *r) {
  return r->submit.n_prompt - r->n_past;
}

// Scored prompts need logits of every token: host memory for that many rows of the vocabulary.
#define MAX_SCORED 64u

static bool is_scored(const td_worker_request *r) {
  return (r->submit.flags & TD_SUBMIT_SCORE_PROMPT) && r->phase == TD_REQUEST_PREFILL &&
         !r->submit.n_answer;
}

// The first image among the next n tokens of a prompt that is not embedded yet.
static const td_image_input *missing_image(const td_worker_request *r, uint32_t n) {
  for (uint32_t i = r->n_embedded; i < r->submit.n_images; i++) {
    const td_image_input *image = &r->images[i];
    if (image->at >= r->n_past + n) return NULL;
    if (image->at + image->n_tokens > r->n_past) return image;
  }
  return NULL;
}

const td_image_input *td_step_awaited(const td_step *step, const td_requests *requests,
                                      td_worker_request **of) {
  for (uint32_t i = 0; i < requests->n; i++) {
    td_worker_request *r = requests->active[i];
    const uint32_t left = r->submit.n_prompt - r->n_past, most = step->budget.max_tokens;
    const td_image_input *image = waits_for_prefill(r) ? missing_image(r, left < most ? left : most)
                                                       : NULL;
    *of = r;
    if (image) return image;
  }
  return NULL;
}

// Adds up to budget tokens of the request; returns how many.
static uint32_t add_prefill(td_step *step, td_worker_request *r, uint32_t budget) {
  const bool is_prompt = r->phase == TD_REQUEST_PREFILL;
  const uint32_t left = is_prompt ? n_prompt_left(r) : td_request_n_to_read(&r->submit) - r->n_past;
  if (is_scored(r) && budget > MAX_SCORED) budget = MAX_SCORED;
  uint32_t n = left < budget ? left : budget;
  const uint32_t n_keep = r->copies.keep >= 0 ? r->copies.n_keep : 0;
  if (n_keep > r->n_past && n > n_keep - r->n_past) n = n_keep - r->n_past;
  if (is_prompt && missing_image(r, n)) return 0;
  const bool draws = is_prompt && n == left && !r->submit.n_answer;
  add(step, r, n, is_scored(r) ? TD_WANT_ALL : draws ? TD_WANT_LAST : TD_WANT_NONE);
  step->n_prefilled += n;
  return n;
}

static bool is_for_prefill(const td_step *step, const td_worker_request *r) {
  if (r->phase == TD_REQUEST_REPLAY) return !r->is_entering;
  if (!waits_for_prefill(r)) return false;
  return is_scored(r) || !step->stream_tokens || n_prompt_left(r) < step->stream_tokens;
}

uint32_t td_step_max_drafts(const td_worker_request *r, uint32_t page_tokens) {
  const uint64_t n_room = (uint64_t)r->n_pages_received * page_tokens;
  uint32_t most = r->max_output - r->n_output - 1;
  if (n_room <= r->n_past) return 0;
  if (most > n_room - r->n_past - 1) most = (uint32_t)(n_room - r->n_past - 1);
  return most < TD_DRAFT_MAX ? most : TD_DRAFT_MAX;
}

// Adds drafts to the step's sequences, which all decode.
static void add_drafts(td_step *step, uint32_t page_tokens) {
  if (step->draft_mode == TD_DRAFT_OFF || step->n >= step->max_draft_tokens) return;
  for (uint32_t i = 0; i < step->n; i++) {
    td_worker_request *r = step->requests[i];
    const uint32_t most = td_step_max_drafts(r, page_tokens);
    if (r->n_guesses) {
      r->draft.n_proposed = r->n_guesses < most ? r->n_guesses : most;
      r->draft.source = TD_DRAFT_LAYER;
      r->n_guesses = 0;
    } else {
      r->draft.n_proposed = td_draft_lookup(r->tokens, r->n_past + 1, most);
      r->draft.source = TD_DRAFT_TEXT;
    }
    step->drafts[i] = &r->draft;
  }
  const uint32_t most = step->n + step->max_drafts;
  td_draft_choose(step->drafts, step->n, step->draft_mode, &step->pace, step->n,
                  most < step->max_draft_tokens ? most : step->max_draft_tokens);
  for (uint32_t i = 0; i < step->n; i++) {
    const uint32_t n = step->drafts[i]->n_drafted;
    if (!n) continue;
    step->seqs[i].n_tokens += n;
    step->seqs[i].want = TD_WANT_EACH;
    step->n_decode_tokens += n;
  }
}

void td_step_build(td_step *step, const td_requests *requests) {
  uint32_t page_tokens = requests->limits.page_tokens;
  step->n = 0;
  for (uint32_t i = 0; i < requests->n; i++) {
    td_worker_request *r = requests->active[i];
    bool has_page = r->n_past < (uint64_t)r->n_pages_received * page_tokens;
    const bool waits = r->is_entering || r->has_logits;
    if (r->phase == TD_REQUEST_DECODE && has_page && !waits) add(step, r, 1, TD_WANT_LAST);
  }
  step->n_decode = step->n_decode_tokens = step->n;
  add_drafts(step, page_tokens);
  step->n_prefilled = 0;
  uint32_t budget = td_prefill_budget_tokens(&step->budget, step->n_decode);
  for (uint32_t i = 0; i < requests->n && budget; i++) {
    td_worker_request *r = requests->active[i];
    if (is_for_prefill(step, r)) budget -= add_prefill(step, r, budget);
  }
  if (!step->n) step->is_warm = false;
}

void td_step_clear(td_step *step) {
  step->n = step->n_decode = step->n_decode_tokens = step->n_prefilled = 0;
}

uint64_t td_step_long_prompts(const td_requests *requests, uint32_t min_tokens) {
  uint64_t n = 0;
  for (uint32_t i = 0; i < requests->n; i++) {
    const td_worker_request *r = requests->active[i];
    if (r->phase == TD_REQUEST_RECEIVING) continue;
    if (!waits_for_prefill(r) || is_scored(r) || n_prompt_left(r) < min_tokens) return 0;
    n += n_prompt_left(r);
  }
  return n;
}

void td_step_build_prefill(td_step *step, const td_requests *requests, uint32_t min_tokens) {
  uint64_t n_waiting = 0;
  for (uint32_t i = 0; i < requests->n; i++) {
    const td_worker_request *r = requests->active[i];
    if (waits_for_prefill(r) && !is_scored(r)) n_waiting += n_prompt_left(r);
  }
  td_step_clear(step);
  uint32_t budget = n_waiting >= min_tokens ? step->budget.max_tokens : 0;
  for (uint32_t i = 0; i < requests->n && budget; i++) {
    td_worker_request *r = requests->active[i];
    if (waits_for_prefill(r) && !is_scored(r)) budget -= add_prefill(step, r, budget);
  }
}

void td_step_hold(const td_step *step, bool is_held) {
  for (uint32_t i = 0; i < step->n; i++)
    step->requests[i]->is_held = is_held;
}

bool td_step_is_ended(const td_step *step) {
  for (uint32_t i = 0; i < step->n; i++)
    if (!step->requests[i]->is_ended) return false;
  return step->n > 0;
}

void td_step_note(td_step *step, uint64_t ns) {
  const bool is_decode = step->n_decode && !step->n_prefilled;
  if (is_decode && step->is_warm) td_draft_pace_note(&step->pace, step->n_decode_tokens, ns);
  step->is_warm = is_decode;
  td_prefill_budget_note(&step->budget, step->n_decode, step->n_prefilled, ns);
}
