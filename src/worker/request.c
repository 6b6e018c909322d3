// src/worker/request.c - receiving, checking and ending a worker's requests.
#include "worker/request.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "base/clock.h"
#include "text/grammar/grammar.h"

td_status td_requests_open(td_requests *out, const td_request_limits *limits, td_err *err) {
  *out = (td_requests){.limits = *limits,
                       .slots = calloc(limits->max_seqs, sizeof(td_worker_request)),
                       .active = calloc(limits->max_seqs, sizeof(td_worker_request *))};
  if (out->slots && out->active) return TD_OK;
  td_requests_close(out);
  return td_fail(err, TD_ENOMEM, "out of memory for %u requests", limits->max_seqs);
}

static size_t image_bytes(const td_worker_request *r, const td_image_input *image) {
  return r->patch_bytes * image->grid_h * image->grid_w;
}

static void release(td_worker_request *r) {
  for (uint32_t i = 0; i < r->n_images_received; i++)
    if (r->images[i].rgb) munmap((void *)r->images[i].rgb, image_bytes(r, &r->images[i]));
  free(r->images);
  td_sampler_close(r->sampler);
  td_matcher_close(r->matcher);
  td_dry_close(r->dry);
  free(r->logits);
  free(r->grammar);
  free(r->tokens);
  free(r->pages);
  free(r->bias);
  *r = (td_worker_request){0};
}

void td_requests_close(td_requests *requests) {
  for (uint32_t i = 0; i < requests->n; i++)
    release(requests->active[i]);
  free(requests->slots);
  free(requests->active);
  *requests = (td_requests){0};
}

static void write_done(td_wire_msg *reply, uint64_t id, td_done_reason reason, const char *text) {
  *reply = (td_wire_msg){.kind = TD_MSG_DONE, .request = id, .u.done.reason = reason};
  if (text) snprintf(reply->u.done.text, sizeof reply->u.done.text, "%s", text);
}

static void write_counts(td_wire_done *done, const td_worker_request *r) {
  uint64_t now_ns = td_clock_ns();
  done->n_prompt = r->submit.n_prompt;
  done->n_output = r->n_output;
  done->n_cached = r->submit.n_answer ? 0 : r->submit.n_past;
  // After an error, or in the middle of a step, nobody knows what is in the last page.
  done->n_past = r->is_ended || done->reason == TD_DONE_ERROR ? 0 : r->n_past;
  if (!r->begin_ns) return;
  done->prefill_ns = (r->first_token_ns ? r->first_token_ns : now_ns) - r->begin_ns;
  done->decode_ns = r->first_token_ns ? now_ns - r->first_token_ns : 0;
}

void td_requests_end(td_requests *requests, td_worker_request *request, td_done_reason reason,
                     const char *text, td_wire_msg *reply) {
  write_done(reply, request->id, reason, text);
  write_counts(&reply->u.done, request);
  uint32_t i = 0;
  while (requests->active[i] != request)
    i++;
  requests->n--;
  memmove(&requests->active[i], &requests->active[i + 1],
          (requests->n - i) * sizeof requests->active[0]);
  release(request);
}

td_worker_request *td_requests_find(const td_requests *requests, uint64_t id) {
  for (uint32_t i = 0; i < requests->n; i++)
    if (requests->active[i]->id == id) return requests->active[i];
  return NULL;
}

// A free slot. There is one: the caller has checked the count.
static td_worker_request *free_slot(td_requests *requests) {
  for (uint32_t i = 0; i < requests->limits.max_seqs; i++) {
    bool is_taken = false;
    for (uint32_t j = 0; j < requests->n && !is_taken; j++)
      is_taken = requests->active[j] == &requests->slots[i];
    if (!is_taken) return &requests->slots[i];
  }
  TD_CHECK(!"a slot is free");
  return NULL;
}

static uint32_t max_output(const td_requests *requests, const td_wire_submit *submit) {
  uint32_t room = requests->limits.n_ctx - submit->n_prompt;
  return submit->max_tokens < room ? submit->max_tokens : room;
}

static uint32_t most_pages(const td_requests *requests, const td_wire_submit *submit) {
  uint32_t page_tokens = requests->limits.page_tokens;
  uint32_t n_tokens = submit->n_prompt + max_output(requests, submit);
  uint32_t n = n_tokens / page_tokens + (n_tokens % page_tokens != 0);
  return n < requests->limits.n_pages ? n : requests->limits.n_pages;
}

static const char *check_submit(const td_requests *requests, const td_wire_submit *submit) {
  const td_request_limits *limits = &requests->limits;
  if (requests->n == limits->max_seqs) return "more requests than max_batch";
  if (submit->n_prompt == 0) return "the prompt is empty";
  if (submit->n_prompt >= limits->n_ctx) return "the prompt does not fit the context";
  if (submit->max_tokens == 0) return "max_tokens must be at least 1";
  if (submit->n_ends > TD_WIRE_MAX_ENDS) return "malformed request: more end tokens than it holds";
  if (submit->n_bias > limits->n_vocab) return "more biases than tokens in the vocabulary";
  if (submit->n_grammar > TD_GRAMMAR_MAX_BYTES) return "malformed request: the grammar is too long";
  if (submit->n_grammar && !limits->grammars) return "the worker has no tokenizer for a grammar";
  if ((submit->flags & TD_SUBMIT_DRY) && !limits->tokens)
    return "the worker has no tokenizer for DRY";
  if (submit->n_images && !limits->patch) return "the model does not see images";
  if (submit->n_answer >= max_output(requests, submit) ||
      submit->n_past >= submit->n_prompt + submit->n_answer)
    return "malformed request: no step can begin at n_past";
  if ((submit->flags & TD_SUBMIT_SCORE_PROMPT) && submit->n_past && !submit->n_answer)
    return "malformed request: a scored prompt is computed whole";
  // A request may have been preempted while it waited for the page of its last token.
  if (submit->n_pages > most_pages(requests, submit) ||
      td_request_n_to_read(submit) > (uint64_t)submit->n_pages * limits->page_tokens)
    return "malformed request: wrong number of pages";
  return NULL;
}

// NULL on success, else an error text for the client.
static const char *take_submit(td_requests *requests, uint64_t id, const td_wire_submit *submit) {
  const char *wrong = check_submit(requests, submit);
  if (wrong) return wrong;
  td_worker_request *r = free_slot(requests);
  *r = (td_worker_request){.id = id,
                           .submit = *submit,
                           .max_output = max_output(requests, submit),
                           .n_past = submit->n_past,
                           .n_output = submit->n_answer,
                           .most_pages = most_pages(requests, submit),
                           .copies = {.source = -1, .keep = -1},
                           .bias = malloc((submit->n_bias + (size_t)1) * sizeof *r->bias)};
  r->pages = malloc(r->most_pages * sizeof *r->pages);
  r->grammar = malloc(submit->n_grammar + (size_t)1);
  r->images = malloc((submit->n_images + (size_t)1) * sizeof *r->images);
  r->patch_bytes = 3 * (size_t)requests->limits.patch * requests->limits.patch;
  r->tokens = malloc((submit->n_prompt + (size_t)r->max_output + TD_DRAFT_MAX) * sizeof *r->tokens);
  uint32_t at = submit->flags & TD_SUBMIT_URGENT ? 0 : requests->n;
  memmove(&requests->active[at + 1], &requests->active[at],
          (requests->n++ - at) * sizeof requests->active[0]);
  requests->active[at] = r;
  const bool has_all = r->tokens && r->pages && r->bias && r->grammar && r->images;
  return has_all ? NULL : "the worker is out of memory";
}

static const char *take_pages(const td_requests *requests, td_worker_request *r,
                              const td_wire_pages *pages) {
  if (pages->n > TD_WIRE_MAX_PAGES || pages->n > r->most_pages - r->n_pages_received)
    return "malformed request: more pages than it can fill";
  for (uint32_t i = 0; i < pages->n; i++) {
    if (pages->ids[i] < 0 || (uint32_t)pages->ids[i] >= requests->limits.n_pages)
      return "malformed request: a page outside the pool";
    r->pages[r->n_pages_received++] = pages->ids[i];
  }
  return NULL;
}

static const char *take_tokens(const td_requests *requests, td_worker_request *r,
                               const td_wire_tokens *tokens) {
  if (tokens->n > TD_WIRE_MAX_TOKENS || tokens->n > td_request_n_given(r) - r->n_tokens_received)
    return "malformed request: more tokens than announced";
  for (uint32_t i = 0; i < tokens->n; i++) {
    if (tokens->ids[i] < 0 || (uint32_t)tokens->ids[i] >= requests->limits.n_vocab)
      return "the request holds a token outside the vocabulary";
    r->tokens[r->n_tokens_received++] = tokens->ids[i];
  }
  return NULL;
}

static const char *take_bias(td_worker_request *r, const td_wire_bias *bias) {
  if (bias->n > TD_WIRE_MAX_BIAS || bias->n > r->submit.n_bias - r->n_bias_received)
    return "malformed request: more biases than announced";
  memcpy(r->bias + r->n_bias_received, bias->entries, bias->n * sizeof bias->entries[0]);
  r->n_bias_received += bias->n;
  return NULL;
}

static const char *take_grammar(td_worker_request *r, const td_wire_grammar *grammar) {
  if (grammar->n > TD_WIRE_MAX_GRAMMAR || grammar->n > r->submit.n_grammar - r->n_grammar_received)
    return "malformed request: a longer grammar than announced";
  memcpy(r->grammar + r->n_grammar_received, grammar->text, grammar->n);
  r->n_grammar_received += grammar->n;
  return NULL;
}

// The image behind those that were received.
static const char *check_image(const td_request_limits *limits, const td_worker_request *r,
                               const td_wire_image *image) {
  const td_image_input *last = r->n_images_received ? &r->images[r->n_images_received - 1] : NULL;
  const uint32_t merge = limits->merge, h = image->grid_h / merge, w = image->grid_w / merge;
  const uint32_t n_prompt = r->submit.n_prompt;
  if (!h || !w || image->grid_h % merge || image->grid_w % merge || h > n_prompt || w > n_prompt ||
      (uint64_t)h * w != image->n_tokens)
    return "malformed request: an image whose tokens are not its grid's";
  if (image->at > n_prompt || image->n_tokens > n_prompt - image->at ||
      (last && image->at < last->at + last->n_tokens))
    return "malformed request: an image outside its place in the prompt";
  return NULL;
}

static const char *map_image(int fd, size_t n_bytes, const td_wire_image *from,
                             td_image_input *to) {
  struct stat file;
  if (fstat(fd, &file) != 0 || from->offset > (uint64_t)file.st_size ||
      n_bytes > (uint64_t)file.st_size - from->offset)
    return "malformed request: the pixels of an image are missing";
  void *rgb = mmap(NULL, n_bytes, PROT_READ, MAP_SHARED, fd, (off_t)from->offset);
  if (rgb == MAP_FAILED) return "the worker cannot map the pixels of an image";
  to->rgb = rgb;
  return NULL;
}

static const char *take_images(const td_requests *requests, td_worker_request *r,
                               const td_wire_images *images) {
  if (images->n > TD_WIRE_MAX_IMAGES || images->n > r->submit.n_images - r->n_images_received)
    return "malformed request: more images than announced";
  for (uint32_t i = 0; i < images->n; i++) {
    const td_wire_image *from = &images->images[i];
    const char *wrong = check_image(&requests->limits, r, from);
    if (wrong) return wrong;
    td_image_input to = {.at = from->at,
                         .n_tokens = from->n_tokens,
                         .grid_h = from->grid_h,
                         .grid_w = from->grid_w,
                         .norm = from->norm};
    memcpy(to.hash, from->hash, sizeof to.hash);
    if (to.at + to.n_tokens > r->submit.n_past)
      wrong = map_image(requests->limits.images_fd, image_bytes(r, &to), from, &to);
    if (wrong) return wrong;
    r->images[r->n_images_received++] = to;
  }
  return NULL;
}

static const char *take_copies(const td_requests *requests, td_worker_request *r,
                               const td_wire_copies *copies) {
  const int64_t n_pages = requests->limits.n_pages;
  if (r->has_copies || !(r->submit.flags & TD_SUBMIT_COPIES))
    return "malformed request: more copies of pages than announced";
  if (copies->source < -1 || copies->source >= n_pages || copies->keep < -1 ||
      copies->keep >= n_pages)
    return "malformed request: a page outside the pool";
  if (copies->keep >= 0 &&
      (copies->n_keep <= r->submit.n_past || copies->n_keep > r->submit.n_prompt))
    return "malformed request: a copy of what is not computed";
  r->copies = *copies;
  r->has_copies = true;
  return NULL;
}

static const char *take_dry(td_worker_request *r, const td_wire_dry *dry) {
  if (r->has_dry || !(r->submit.flags & TD_SUBMIT_DRY))
    return "malformed request: more parameters of DRY than announced";
  if (!td_dry_is_valid(dry)) return "malformed request: parameters of DRY out of range";
  r->params_of_dry = *dry;
  r->has_dry = true;
  return NULL;
}

static void collect_ends(const td_requests *requests, td_worker_request *r) {
  const td_request_limits *limits = &requests->limits;
  if (!(r->submit.flags & TD_SUBMIT_IGNORE_EOS))
    for (uint32_t i = 0; i < limits->n_eos && i < TD_MAX_EOS; i++)
      r->ends[r->n_ends++] = limits->eos_ids[i];
  for (uint32_t i = 0; i < r->submit.n_ends; i++)
    r->ends[r->n_ends++] = r->submit.ends[i];
}

bool td_request_ends_with(const td_worker_request *r, int32_t id) {
  for (uint32_t i = 0; i < r->n_ends; i++)
    if (r->ends[i] == id) return true;
  return false;
}

// Called when all of the request has arrived.
static td_status start(const td_requests *requests, td_worker_request *r, td_err *err) {
  td_status st = td_sampler_open(&r->sampler, &r->submit.sampling, r->bias, r->submit.n_bias,
                                 requests->limits.n_vocab, err);
  if (st != TD_OK) return st;
  collect_ends(requests, r);
  td_sampler_ends(r->sampler, r->ends, r->n_ends, r->submit.min_tokens);
  if (r->submit.n_grammar) {
    st = td_matcher_open(&r->matcher, requests->limits.grammars, r->grammar, r->submit.n_grammar,
                         err);
    free(r->grammar);
    r->grammar = NULL;
    if (st != TD_OK) return st;
    td_sampler_constrain(r->sampler, r->matcher);
  }
  if (r->has_dry) {
    st = td_dry_open(&r->dry, &r->params_of_dry, requests->limits.tokens, requests->limits.n_vocab,
                     r->submit.n_prompt + r->max_output, err);
    if (st != TD_OK) return st;
    td_sampler_dry(r->sampler, r->dry);
  }
  td_sampler_prompt(r->sampler, r->tokens, r->submit.n_prompt);
  td_sampler_answer(r->sampler, r->tokens + r->submit.n_prompt, r->submit.n_answer);
  r->phase = td_request_phase_of(r);
  if (r->matcher) td_matcher_prepare(r->matcher);
  if (r->matcher && !td_matcher_is_ready(r->matcher)) return TD_OK; // its status is not known yet
  return td_sampler_status(r->sampler, err);
}

td_done_reason td_request_failure(td_status st) {
  return st == TD_EINVAL || st == TD_ELIMIT ? TD_DONE_REFUSED : TD_DONE_ERROR;
}

bool td_request_is_complete(const td_worker_request *r) {
  return r->matcher && td_matcher_must_end(r->matcher);
}

td_request_phase td_request_phase_of(const td_worker_request *r) {
  if (r->n_past < r->submit.n_prompt) return TD_REQUEST_PREFILL;
  return r->n_past < td_request_n_to_read(&r->submit) ? TD_REQUEST_REPLAY : TD_REQUEST_DECODE;
}

static const char *take_part(const td_requests *requests, td_worker_request *r,
                             const td_wire_msg *msg, td_err *err) {
  const char *wrong;
  if (msg->kind == TD_MSG_SUBMIT) return "malformed request: submitted twice";
  if (msg->kind == TD_MSG_PAGES)
    wrong = take_pages(requests, r, &msg->u.pages);
  else if (r->phase != TD_REQUEST_RECEIVING)
    wrong = "malformed request: records after its end";
  else if (msg->kind == TD_MSG_TOKENS)
    wrong = take_tokens(requests, r, &msg->u.tokens);
  else if (msg->kind == TD_MSG_BIAS)
    wrong = take_bias(r, &msg->u.bias);
  else if (msg->kind == TD_MSG_GRAMMAR)
    wrong = take_grammar(r, &msg->u.grammar);
  else if (msg->kind == TD_MSG_COPIES)
    wrong = take_copies(requests, r, &msg->u.copies);
  else if (msg->kind == TD_MSG_DRY)
    wrong = take_dry(r, &msg->u.dry);
  else if (msg->kind == TD_MSG_IMAGES)
    wrong = take_images(requests, r, &msg->u.images);
  else
    wrong = "malformed request: a record of unknown kind";
  bool is_whole = r->phase == TD_REQUEST_RECEIVING && r->n_pages_received >= r->submit.n_pages &&
                  r->n_tokens_received == td_request_n_given(r) &&
                  r->n_bias_received == r->submit.n_bias &&
                  r->n_grammar_received == r->submit.n_grammar &&
                  r->n_images_received == r->submit.n_images &&
                  r->has_copies == ((r->submit.flags & TD_SUBMIT_COPIES) != 0) &&
                  r->has_dry == ((r->submit.flags & TD_SUBMIT_DRY) != 0);
  if (!wrong && is_whole && start(requests, r, err) != TD_OK) wrong = err->msg;
  return wrong;
}

// False: there is nothing to reply yet.
static bool mark_ended(td_worker_request *r, td_done_reason reason, const char *text) {
  r->is_ended = true;
  r->end_reason = reason;
  r->end_text = text;
  return false;
}

bool td_requests_take(td_requests *requests, const td_wire_msg *msg, td_wire_msg *reply) {
  td_worker_request *r = td_requests_find(requests, msg->request);
  td_err err;
  const char *wrong;
  if (!r && msg->kind != TD_MSG_SUBMIT) return false;
  if (r && r->is_ended) return false;
  if (msg->kind == TD_MSG_CANCEL) {
    if (r->is_held) return mark_ended(r, TD_DONE_CANCELED, NULL);
    td_requests_end(requests, r, TD_DONE_CANCELED, NULL, reply);
    return true;
  }
  if (r) {
    wrong = take_part(requests, r, msg, &err);
  } else {
    wrong = take_submit(requests, msg->request, &msg->u.submit);
    r = td_requests_find(requests, msg->request);
  }
  if (!wrong) return false;
  if (r && r->is_held) return mark_ended(r, TD_DONE_ERROR, wrong);
  if (r) {
    const td_done_reason reason = wrong == err.msg ? td_request_failure(err.code) : TD_DONE_ERROR;
    td_requests_end(requests, r, reason, wrong, reply);
  } else {
    write_done(reply, msg->request, TD_DONE_ERROR, wrong);
  }
  return true;
}
