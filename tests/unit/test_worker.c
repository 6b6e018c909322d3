// tests/unit/test_worker.c - the worker's parts: arguments, the request table against well-formed
// and malformed records, and the building of steps.
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "shm/segment.h"
#include "unit/testing.h"
#include "worker/args.h"
#include "worker/request.h"
#include "worker/step.h"

// ---- arguments ----------------------------------------------------------------------------------

TEST(args_round_trip) {
  const td_worker_opts opts = {.runtime = {.model_dir = "/models/a b=c",
                                           .device = "cuda",
                                           .devices = "1,0",
                                           .expert_cache = "2.5",
                                           .mirror = "/other drive/b=c",
                                           .stream_from = 77,
                                           .expert_parallel = 2,
                                           .ctx_size = 1,
                                           .draft = TD_DRAFT_OFF + 3,
                                           .n_threads = 3,
                                           .prefill_chunk = 5,
                                           .kv_dtype = TD_F16,
                                           .weights = TD_WEIGHTS_AUTO,
                                           .activations = TD_ACTIVATIONS_INT8,
                                           .experts = TD_EXPERTS_GPU},
                               .role = TD_ROLE_DECODE,
                               .max_batch = 2,
                               .kv_tokens = 4,
                               .decode_slowdown = 9,
                               .gpu_mib = 10,
                               .weights_fd = 7,
                               .trace_fd = 8,
                               .images_fd = 11,
                               .log_level = TD_LOG_DEBUG,
                               .log_json = 1,
                               .parent_pid = 6};
  td_err err;
  td_worker_argv args;
  td_worker_opts got;
  assert_int_equal(td_worker_args_format(&args, &opts, &err), TD_OK);
  assert_string_equal(args.argv[1], "worker");
  assert_null(args.argv[args.argc]);
  assert_int_equal(td_worker_args_parse(&got, args.argc, args.argv, &err), TD_OK);
#define X(field, option) assert_string_equal(got.runtime.field, opts.runtime.field);
  TD_RUNTIME_TEXTS(X)
#undef X
#define X(type, field, option, least, most, in_kv)                                                 \
  assert_int_not_equal(opts.runtime.field, 0);                                                     \
  assert_int_equal(got.runtime.field, opts.runtime.field);
  TD_RUNTIME_NUMBERS(X)
#undef X
#define X(field, key, least, most) assert_int_equal(got.field, opts.field);
  TD_WORKER_NUMBERS(X)
#undef X
  for (int i = 2; i < args.argc; i++) { // every one is needed
    char *rest[32];
    memcpy(rest, args.argv, (size_t)args.argc * sizeof *rest);
    rest[i] = rest[args.argc - 1];
    assert_int_equal(td_worker_args_parse(&got, args.argc - 1, rest, &err), TD_EINVAL);
  }
  td_worker_argv_free(&args);
}

TEST(args_are_strict) {
  static const char *const bad[] = {"ctx-size",
                                    "ctx-size=",
                                    "ctx-size=1x",
                                    "ctx-size=-1",
                                    "batch=0",
                                    "nope=1",
                                    "ctx-size=99999999999999999999",
                                    "",
                                    "-h",
                                    "kv-dtype=4"};
  for (size_t i = 0; i < TD_COUNT(bad); i++) {
    char *argv[] = {"tandem", "worker", (char *)bad[i], NULL};
    td_worker_opts got;
    td_err err;
    assert_int_equal(td_worker_args_parse(&got, 3, argv, &err), TD_EINVAL);
  }
}

// ---- requests and steps -------------------------------------------------------------------------

enum { N_VOCAB = 100, N_CTX = 256, MAX_SEQS = 3, PAGE_TOKENS = 16, N_PAGES = 40 };

typedef struct {
  td_requests requests;
  td_wire_msg reply;
} table;

static void table_open(table *t) {
  td_err err;
  static const td_token_index tokens; // none has a text
  const td_request_limits limits = {.n_vocab = N_VOCAB,
                                    .n_ctx = N_CTX,
                                    .max_seqs = MAX_SEQS,
                                    .n_pages = N_PAGES,
                                    .page_tokens = PAGE_TOKENS,
                                    .tokens = &tokens};
  assert_int_equal(td_requests_open(&t->requests, &limits, &err), TD_OK);
}

static void table_close(table *t) {
  td_requests_close(&t->requests);
}

static bool send(table *t, uint64_t id, const td_wire_submit *submit) {
  const td_wire_msg msg = {.kind = TD_MSG_SUBMIT, .request = id, .u.submit = *submit};
  return td_requests_take(&t->requests, &msg, &t->reply);
}

static bool send_past(table *t, uint64_t id, uint32_t n_prompt, uint32_t max_tokens,
                      uint32_t n_bias, uint32_t n_pages, uint32_t n_past) {
  return send(t, id,
              &(td_wire_submit){.n_prompt = n_prompt,
                                .max_tokens = max_tokens,
                                .n_bias = n_bias,
                                .n_pages = n_pages,
                                .n_past = n_past});
}

static bool send_pages(table *t, uint64_t id, uint32_t n, int32_t first) {
  td_wire_msg msg = {.kind = TD_MSG_PAGES, .request = id, .u.pages.n = n};
  for (uint32_t i = 0; i < n && i < TD_WIRE_MAX_PAGES; i++)
    msg.u.pages.ids[i] = first + (int32_t)i;
  return td_requests_take(&t->requests, &msg, &t->reply);
}

// With as many pages as it needs, the first ones.
static bool send_submit(table *t, uint64_t id, uint32_t n_prompt, uint32_t max_tokens,
                        uint32_t n_bias) {
  uint64_t n = ((uint64_t)n_prompt + max_tokens + PAGE_TOKENS - 1) / PAGE_TOKENS;
  uint32_t n_pages = n < N_PAGES ? (uint32_t)n : N_PAGES;
  if (send_past(t, id, n_prompt, max_tokens, n_bias, n_pages, 0)) return true;
  return send_pages(t, id, n_pages, 0);
}

static bool send_tokens(table *t, uint64_t id, uint32_t n, int32_t token) {
  td_wire_msg msg = {.kind = TD_MSG_TOKENS, .request = id, .u.tokens.n = n};
  for (uint32_t i = 0; i < n && i < TD_WIRE_MAX_TOKENS; i++)
    msg.u.tokens.ids[i] = token;
  return td_requests_take(&t->requests, &msg, &t->reply);
}

static bool send_bias(table *t, uint64_t id, uint32_t n) {
  const td_wire_msg msg = {.kind = TD_MSG_BIAS, .request = id, .u.bias.n = n};
  return td_requests_take(&t->requests, &msg, &t->reply);
}

static bool send_kind(table *t, uint64_t id, uint32_t kind) {
  const td_wire_msg msg = {.kind = kind, .request = id};
  return td_requests_take(&t->requests, &msg, &t->reply);
}

static void expect_end(const table *t, bool replied, uint64_t id, td_done_reason reason) {
  assert_true(replied);
  assert_int_equal(t->reply.kind, TD_MSG_DONE);
  assert_int_equal(t->reply.request, id);
  assert_int_equal(t->reply.u.done.reason, reason);
  assert_int_equal(t->reply.u.done.text[0] != '\0', reason == TD_DONE_ERROR);
}

TEST(a_request_in_parts) {
  table t;
  table_open(&t);
  assert_false(send_past(&t, 7, 100, 20, 30, 7, 0));
  assert_false(send_pages(&t, 7, 5, 20));
  assert_false(send_tokens(&t, 7, 58, 1));
  assert_false(send_bias(&t, 7, 29));
  assert_false(send_tokens(&t, 7, 42, 2));
  assert_false(send_bias(&t, 7, 1));
  const td_worker_request *r = t.requests.active[0];
  assert_int_equal(r->phase, TD_REQUEST_RECEIVING);
  assert_false(send_pages(&t, 7, 2, 10));
  assert_int_equal(r->phase, TD_REQUEST_PREFILL);
  assert_false(send_pages(&t, 7, 1, 30)); // for its output, later
  assert_int_equal(r->pages[7], 30);
  assert_int_equal(r->pages[4], 24);
  assert_int_equal(r->pages[5], 10);
  assert_int_equal(r->tokens[57], 1);
  assert_int_equal(r->tokens[58], 2);
  expect_end(&t, send_kind(&t, 7, TD_MSG_CANCEL), 7, TD_DONE_CANCELED);
  assert_false(send_kind(&t, 7, TD_MSG_CANCEL));
  table_close(&t);
}

// The checkpoint's end tokens, which may be ignored, and the request's own.
TEST(ends_of_an_answer) {
  static const int32_t eos[] = {7, 8};
  for (uint32_t flags = 0; flags <= TD_SUBMIT_IGNORE_EOS; flags++) {
    table t;
    table_open(&t);
    t.requests.limits.eos_ids = eos;
    t.requests.limits.n_eos = 2;
    const td_wire_submit submit = {.n_prompt = 1,
                                   .max_tokens = 4,
                                   .n_pages = 1,
                                   .flags = flags,
                                   .n_ends = 2,
                                   .ends = {9, 90},
                                   .min_tokens = 2};
    assert_false(send(&t, 1, &submit));
    assert_false(send_pages(&t, 1, 1, 0));
    const td_wire_msg tokens = {.kind = TD_MSG_TOKENS, .request = 1, .u.tokens = {1, {5}}};
    assert_false(td_requests_take(&t.requests, &tokens, &t.reply));
    const td_worker_request *r = t.requests.active[0];
    assert_int_equal(r->phase, TD_REQUEST_PREFILL);
    assert_int_equal(td_request_ends_with(r, 7) && td_request_ends_with(r, 8), !flags);
    assert_true(td_request_ends_with(r, 9) && td_request_ends_with(r, 90));
    assert_false(td_request_ends_with(r, 0));
    td_wire_submit too_many = submit;
    too_many.n_ends = TD_WIRE_MAX_ENDS + 1;
    assert_true(send(&t, 2, &too_many));
    assert_int_equal(t.reply.u.done.reason, TD_DONE_ERROR);
    table_close(&t);
  }
}

TEST(malformed_sequences) {
  table t;
  table_open(&t);
  expect_end(&t, send_submit(&t, 1, 0, 5, 0), 1, TD_DONE_ERROR);
  expect_end(&t, send_submit(&t, 1, 5, 0, 0), 1, TD_DONE_ERROR);
  expect_end(&t, send_submit(&t, 1, N_CTX, 5, 0), 1, TD_DONE_ERROR);
  expect_end(&t, send_submit(&t, 1, UINT32_MAX, 5, 0), 1, TD_DONE_ERROR);
  expect_end(&t, send_submit(&t, 1, 5, 5, UINT32_MAX), 1, TD_DONE_ERROR);
  assert_false(send_tokens(&t, 1, 5, 0)); // trails behind what was refused

  assert_false(send_submit(&t, 2, 5, 5, 0));
  expect_end(&t, send_submit(&t, 2, 5, 5, 0), 2, TD_DONE_ERROR);
  assert_false(send_submit(&t, 3, 5, 5, 0));
  expect_end(&t, send_tokens(&t, 3, 6, 0), 3, TD_DONE_ERROR);
  assert_false(send_submit(&t, 4, 100, 5, 0));
  expect_end(&t, send_tokens(&t, 4, TD_WIRE_MAX_TOKENS + 1, 0), 4, TD_DONE_ERROR);
  assert_false(send_submit(&t, 5, 5, 5, 0));
  expect_end(&t, send_tokens(&t, 5, 5, N_VOCAB), 5, TD_DONE_ERROR);
  assert_false(send_submit(&t, 6, 5, 5, 0));
  expect_end(&t, send_tokens(&t, 6, 5, -1), 6, TD_DONE_ERROR);
  assert_false(send_submit(&t, 7, 5, 5, 40));
  expect_end(&t, send_bias(&t, 7, TD_WIRE_MAX_BIAS + 1), 7, TD_DONE_ERROR);
  assert_false(send_submit(&t, 8, 5, 5, 1));
  expect_end(&t, send_bias(&t, 8, 2), 8, TD_DONE_ERROR);
  assert_false(send_submit(&t, 9, 5, 5, 0));
  expect_end(&t, send_kind(&t, 9, 12345), 9, TD_DONE_ERROR);
  assert_false(send_submit(&t, 10, 5, 5, 0));
  assert_false(send_tokens(&t, 10, 5, 0));
  expect_end(&t, send_tokens(&t, 10, 1, 0), 10, TD_DONE_ERROR); // it runs already
  expect_end(&t, send_past(&t, 11, 17, 16, 0, 1, 0), 11, TD_DONE_ERROR);
  expect_end(&t, send_past(&t, 11, 17, 16, 0, 4, 0), 11, TD_DONE_ERROR);
  expect_end(&t, send_past(&t, 11, 17, 16, 0, N_PAGES + 1, 0), 11, TD_DONE_ERROR);
  expect_end(&t, send_past(&t, 11, 17, 16, 0, 3, 17), 11, TD_DONE_ERROR);
  assert_false(send_past(&t, 11, 17, 16, 0, 3, 16));
  expect_end(&t, send_pages(&t, 11, 4, 0), 11, TD_DONE_ERROR);
  assert_false(send_past(&t, 12, 17, 16, 0, 3, 0));
  expect_end(&t, send_pages(&t, 12, 1, N_PAGES), 12, TD_DONE_ERROR);
  assert_false(send_past(&t, 13, 17, 16, 0, 3, 0));
  expect_end(&t, send_pages(&t, 13, 1, -1), 13, TD_DONE_ERROR);
  assert_int_equal(t.requests.n, 0);
  table_close(&t);
}

TEST(too_many_requests) {
  table t;
  table_open(&t);
  for (uint64_t id = 1; id <= MAX_SEQS; id++)
    assert_false(send_submit(&t, id, 200, 50, 0));
  expect_end(&t, send_submit(&t, 9, 5, 5, 0), 9, TD_DONE_ERROR);
  expect_end(&t, send_kind(&t, 2, TD_MSG_CANCEL), 2, TD_DONE_CANCELED);
  assert_false(send_submit(&t, 9, 5, 5, 0));
  table_close(&t);
}

TEST(steps) {
  table t;
  td_step step;
  td_err err;
  table_open(&t);
  assert_int_equal(td_step_open(&step, MAX_SEQS, 32, &err), TD_OK);
  td_step_build(&step, &t.requests);
  assert_int_equal(step.n, 0);

  assert_false(send_submit(&t, 1, 40, 5, 0)); // still receiving: not in any step
  assert_false(send_submit(&t, 2, 40, 5, 0));
  assert_false(send_tokens(&t, 2, 40, 2));
  assert_false(send_submit(&t, 3, 10, 5, 0));
  assert_false(send_tokens(&t, 3, 10, 3));
  td_step_build(&step, &t.requests);
  assert_int_equal(step.n, 1); // the whole budget goes to the one that came first
  assert_int_equal(step.requests[0]->id, 2);
  assert_int_equal(step.seqs[0].n_tokens, 32);
  assert_int_equal(step.seqs[0].want, TD_WANT_NONE);
  assert_true(step.seqs[0].n_pages >= 3);

  td_step_put_first(&t.requests, 99);
  td_step_put_first(&t.requests, 3);
  td_step_build(&step, &t.requests);
  assert_int_equal(step.n, 2);
  assert_int_equal(step.requests[0]->id, 3);
  assert_int_equal(step.seqs[0].n_tokens, 10);
  assert_int_equal(step.seqs[1].n_tokens, 22);
  td_step_put_first(&t.requests, 2);
  td_step_build(&step, &t.requests);
  assert_int_equal(step.requests[0]->id, 2);

  step.requests[0]->n_past += 32;
  td_step_build(&step, &t.requests);
  assert_int_equal(step.n, 2);
  assert_int_equal(step.seqs[0].n_tokens, 8);
  assert_int_equal(step.seqs[0].n_past, 32);
  assert_int_equal(step.seqs[0].want, TD_WANT_LAST);
  assert_int_equal(step.requests[1]->id, 3);
  assert_int_equal(step.seqs[1].n_tokens, 10);
  assert_int_equal(step.seqs[1].tokens[9], 3);

  td_worker_request *first = step.requests[0];
  first->n_past += 8;
  first->phase = TD_REQUEST_DECODE;
  first->tokens[40] = 77;
  td_step_build(&step, &t.requests);
  assert_int_equal(step.n, 1); // how long does a decoding sequence take?
  assert_int_equal(step.seqs[0].n_tokens, 1);
  assert_int_equal(step.seqs[0].tokens[0], 77);
  assert_int_equal(step.seqs[0].want, TD_WANT_LAST);
  td_step_note(&step, 1000);
  td_step_build(&step, &t.requests);
  assert_int_equal(step.n, 2);
  assert_int_equal(step.seqs[0].n_tokens, 1);
  assert_int_equal(step.seqs[1].n_tokens, 10);
  td_step_close(&step);
  table_close(&t);
}

// Long prompts, and short ones that wait beside them, are the streaming engine's. While that holds
// them they are in no other step, and a request that is cancelled ends with the step.
TEST(steps_that_stream) {
  table t;
  td_step step, stream;
  td_err err;
  table_open(&t);
  assert_int_equal(td_step_open(&step, MAX_SEQS, 32, &err), TD_OK);
  assert_int_equal(td_step_open(&stream, MAX_SEQS, 100, &err), TD_OK);
  step.stream_tokens = 40;
  assert_false(send_submit(&t, 1, 39, 5, 0));
  assert_false(send_tokens(&t, 1, 39, 2));
  td_step_build_prefill(&stream, &t.requests, 40);
  assert_int_equal(stream.n, 0); // too few tokens
  td_step_build(&step, &t.requests);
  assert_int_equal(step.n, 1);
  assert_false(send_submit(&t, 2, 90, 5, 0));
  assert_false(send_tokens(&t, 2, 45, 3));
  assert_false(send_tokens(&t, 2, 45, 3));
  td_step_build(&step, &t.requests);
  assert_int_equal(step.n, 1);                                // not the long one
  assert_int_equal(td_step_long_prompts(&t.requests, 40), 0); // a short one waits
  assert_int_equal(td_step_long_prompts(&t.requests, 39), 39 + 90);
  td_step_build_prefill(&stream, &t.requests, 40);
  assert_int_equal(stream.n, 2);
  assert_int_equal(stream.n_prefilled, 100);
  assert_int_equal(stream.seqs[0].want, TD_WANT_LAST);
  assert_int_equal(stream.seqs[1].n_tokens, 61);
  assert_int_equal(stream.seqs[1].want, TD_WANT_NONE);
  td_step_hold(&stream, true);
  assert_int_equal(td_step_long_prompts(&t.requests, 39), 0); // nobody waits

  assert_false(send_submit(&t, 3, 5, 5, 0));
  assert_false(send_tokens(&t, 3, 5, 4));
  td_step_build(&step, &t.requests);
  assert_int_equal(step.n, 1);
  assert_int_equal(step.requests[0]->id, 3);
  assert_false(send_kind(&t, 1, TD_MSG_CANCEL));
  assert_false(td_step_is_ended(&stream));
  assert_false(send_tokens(&t, 2, 1, 4)); // malformed
  assert_true(td_step_is_ended(&stream));
  assert_false(send_kind(&t, 2, TD_MSG_CANCEL)); // it has ended already
  assert_int_equal(t.requests.n, 3);
  assert_int_equal(stream.requests[0]->end_reason, TD_DONE_CANCELED);
  assert_int_equal(stream.requests[1]->end_reason, TD_DONE_ERROR);
  assert_non_null(stream.requests[1]->end_text);
  td_step_hold(&stream, false);
  td_step_build_prefill(&stream, &t.requests, 200);
  assert_int_equal(stream.n, 0);
  assert_false(td_step_is_ended(&stream));
  td_step_close(&stream);
  td_step_close(&step);
  table_close(&t);
}

static bool send_copies(table *t, uint64_t id, int32_t source, int32_t keep, uint32_t n_keep) {
  const td_wire_msg msg = {.kind = TD_MSG_COPIES,
                           .request = id,
                           .u.copies = {.source = source, .keep = keep, .n_keep = n_keep}};
  return td_requests_take(&t->requests, &msg, &t->reply);
}

// A step ends where a page is to be copied; a request is not whole without its copies.
TEST(steps_end_at_copies) {
  static const struct {
    int32_t source, keep;
    uint32_t n_keep;
  } wrong[] = {{N_PAGES, -1, 0}, {-2, -1, 0}, {-1, N_PAGES, 25}, {-1, 3, 31}, {-1, 3, 5}};
  table t;
  td_step step;
  td_err err;
  table_open(&t);
  const td_wire_submit submit = {
      .n_prompt = 30, .max_tokens = 5, .n_pages = 3, .n_past = 5, .flags = TD_SUBMIT_COPIES};
  for (size_t i = 0; i < TD_COUNT(wrong); i++) {
    assert_false(send(&t, 1, &submit));
    expect_end(&t, send_copies(&t, 1, wrong[i].source, wrong[i].keep, wrong[i].n_keep), 1,
               TD_DONE_ERROR);
  }
  assert_int_equal(td_step_open(&step, MAX_SEQS, 32, &err), TD_OK);
  assert_false(send(&t, 2, &submit));
  assert_false(send_pages(&t, 2, 3, 1));
  assert_false(send_tokens(&t, 2, 30, 7));
  td_step_build(&step, &t.requests);
  assert_int_equal(step.n, 0); // still receiving
  assert_false(send_copies(&t, 2, 9, 8, 27));
  td_step_build(&step, &t.requests);
  assert_int_equal(step.n, 1);
  assert_int_equal(step.seqs[0].n_tokens, 22);
  assert_int_equal(step.seqs[0].want, TD_WANT_NONE);
  step.requests[0]->n_past = 27;
  td_step_build(&step, &t.requests);
  assert_int_equal(step.seqs[0].n_tokens, 3);
  assert_int_equal(step.seqs[0].want, TD_WANT_LAST);
  expect_end(&t, send_copies(&t, 2, 9, 8, 27), 2, TD_DONE_ERROR); // twice
  assert_int_equal(t.reply.u.done.n_past, 0);                     // nobody goes on from there
  assert_false(send_submit(&t, 3, 5, 5, 0));
  expect_end(&t, send_copies(&t, 3, -1, -1, 0), 3, TD_DONE_ERROR); // not announced
  assert_false(send_submit(&t, 4, 5, 5, 0));
  assert_false(send_tokens(&t, 4, 5, 4));
  td_requests_find(&t.requests, 4)->n_past = 3;
  expect_end(&t, send_kind(&t, 4, TD_MSG_CANCEL), 4, TD_DONE_CANCELED);
  assert_int_equal(t.reply.u.done.n_past, 3);
  td_step_close(&step);
  table_close(&t);
}

static bool send_dry(table *t, uint64_t id, td_wire_dry dry) {
  const td_wire_msg msg = {.kind = TD_MSG_DRY, .request = id, .u.dry = dry};
  return td_requests_take(&t->requests, &msg, &t->reply);
}

TEST(dry_is_announced_and_checked) {
  const td_wire_dry good = {.multiplier = 1, .base = 2, .allowed_length = 2, .last_n = 9};
  td_wire_dry bad = good;
  table t;
  table_open(&t);
  const td_wire_submit submit = {
      .n_prompt = 30, .max_tokens = 5, .n_pages = 3, .flags = TD_SUBMIT_DRY};
  bad.base = 0;
  assert_false(send(&t, 1, &submit));
  expect_end(&t, send_dry(&t, 1, bad), 1, TD_DONE_ERROR);
  assert_false(send(&t, 2, &submit));
  assert_false(send_pages(&t, 2, 3, 1));
  assert_false(send_tokens(&t, 2, 30, 7));
  assert_int_equal(td_requests_find(&t.requests, 2)->phase, TD_REQUEST_RECEIVING);
  assert_false(send_dry(&t, 2, good));
  assert_int_equal(td_requests_find(&t.requests, 2)->phase, TD_REQUEST_PREFILL);
  assert_false(send(&t, 3, &submit));
  assert_false(send_dry(&t, 3, good));
  expect_end(&t, send_dry(&t, 3, good), 3, TD_DONE_ERROR); // twice
  assert_false(send_submit(&t, 3, 5, 5, 0));
  expect_end(&t, send_dry(&t, 3, good), 3, TD_DONE_ERROR); // not announced
  t.requests.limits.tokens = NULL;
  expect_end(&t, send(&t, 4, &submit), 4, TD_DONE_ERROR);
  table_close(&t);
}

static bool send_image(table *t, uint64_t id, td_wire_image image) {
  const td_wire_msg msg = {
      .kind = TD_MSG_IMAGES, .request = id, .u.images = {.n = 1, .images = {image}}};
  return td_requests_take(&t->requests, &msg, &t->reply);
}

TEST(images_are_mapped_and_checked) {
  const td_wire_submit submit = {.n_prompt = 30, .max_tokens = 5, .n_pages = 3, .n_images = 2};
  const td_wire_image good = {
      .at = 2, .n_tokens = 6, .grid_h = 4, .grid_w = 6, .offset = 4096, .hash = {7}};
  enum { N_BYTES = 3 * 2 * 2 * 4 * 6 };
  td_wire_image bad[6], second = good;
  table t;
  td_err err;
  int fd;
  table_open(&t);
  expect_end(&t, send(&t, 1, &submit), 1, TD_DONE_ERROR); // it does not see
  assert_int_equal(td_segment_reserve(&fd, "test", &err), TD_OK);
  assert_int_equal(pwrite(fd, "rgb", 3, 4096), 3);
  assert_int_equal(ftruncate(fd, 4096 + N_BYTES), 0);
  t.requests.limits.patch = t.requests.limits.merge = 2;
  t.requests.limits.images_fd = fd;
  for (size_t i = 0; i < TD_COUNT(bad); i++)
    bad[i] = good;
  bad[0].n_tokens = 7;
  bad[1].grid_h = 5;
  bad[2].grid_w = 0;
  bad[3].at = 25;
  bad[4].offset = 8192;
  bad[5].at = UINT32_MAX - 2;
  for (size_t i = 0; i < TD_COUNT(bad); i++) {
    assert_false(send(&t, 1, &submit));
    expect_end(&t, send_image(&t, 1, bad[i]), 1, TD_DONE_ERROR);
  }
  assert_false(send(&t, 1, &submit));
  assert_false(send_image(&t, 1, good));
  expect_end(&t, send_image(&t, 1, good), 1, TD_DONE_ERROR); // in the place of the first

  td_wire_submit later = submit;
  later.n_past = 8;
  assert_false(send(&t, 2, &later));
  assert_false(send_pages(&t, 2, 3, 1));
  assert_false(send_tokens(&t, 2, 30, 7));
  assert_false(send_image(&t, 2, good));
  assert_int_equal(td_requests_find(&t.requests, 2)->phase, TD_REQUEST_RECEIVING);
  second.at = 8;
  assert_false(send_image(&t, 2, second));
  const td_worker_request *r = td_requests_find(&t.requests, 2);
  assert_int_equal(r->phase, TD_REQUEST_PREFILL);
  assert_null(r->images[0].rgb); // it is in the pages
  assert_memory_equal(r->images[1].rgb, "rgb", 3);
  assert_int_equal(r->images[1].hash[0], 7);

  // Its prompt waits until the image that is not in the pages is embedded.
  td_step step;
  td_worker_request *of;
  assert_int_equal(td_step_open(&step, MAX_SEQS, 16, &err), TD_OK);
  td_step_build(&step, &t.requests);
  assert_int_equal(step.n, 0);
  assert_ptr_equal(td_step_awaited(&step, &t.requests, &of), &r->images[1]);
  of->n_embedded = 2;
  assert_null(td_step_awaited(&step, &t.requests, &of));
  td_step_build(&step, &t.requests);
  assert_int_equal(step.n, 1);
  assert_int_equal(step.seqs[0].n_images, 2);
  td_step_close(&step);
  table_close(&t);
  close(fd);
}

// A request that waits for its grammar's mask is in no step; others take part in every one.
TEST(steps_without_those_that_wait_for_masks) {
  table t;
  td_step step;
  td_err err;
  table_open(&t);
  assert_int_equal(td_step_open(&step, MAX_SEQS, 8, &err), TD_OK);
  for (uint64_t id = 1; id <= 2; id++) {
    assert_false(send_submit(&t, id, 4, 8, 0));
    assert_false(send_tokens(&t, id, 4, 1));
    td_worker_request *r = td_requests_find(&t.requests, id);
    r->n_past = 4;
    r->phase = TD_REQUEST_DECODE;
  }
  td_requests_find(&t.requests, 1)->has_logits = true;
  td_step_build(&step, &t.requests);
  assert_int_equal(step.n, 1);
  assert_int_equal(step.requests[0]->id, 2);
  td_requests_find(&t.requests, 1)->has_logits = false;
  td_step_build(&step, &t.requests);
  assert_int_equal(step.n, 2);
  td_step_close(&step);
  table_close(&t);
}

// A decoding request waits for the page that its next token needs.
TEST(steps_wait_for_pages) {
  table t;
  td_step step;
  td_err err;
  table_open(&t);
  assert_int_equal(td_step_open(&step, MAX_SEQS, 32, &err), TD_OK);
  assert_false(send_past(&t, 1, 16, 20, 0, 1, 0));
  assert_false(send_pages(&t, 1, 1, 5));
  assert_false(send_tokens(&t, 1, 16, 3));
  td_step_build(&step, &t.requests);
  assert_int_equal(step.n, 1);
  assert_int_equal(step.seqs[0].want, TD_WANT_LAST);
  td_worker_request *r = step.requests[0];
  r->is_entering = true; // copies of its pages to the device have not ended
  td_step_build(&step, &t.requests);
  assert_int_equal(step.n, 0);
  td_step_build_prefill(&step, &t.requests, 1);
  assert_int_equal(step.n, 0);
  r->is_entering = false;
  r->n_past = 16;
  r->n_output = 1;
  r->phase = td_request_phase_of(r);
  td_step_build(&step, &t.requests);
  assert_int_equal(step.n, 0);
  assert_false(send_pages(&t, 1, 1, 9));
  r->is_entering = true;
  td_step_build(&step, &t.requests);
  assert_int_equal(step.n, 0);
  r->is_entering = false;
  td_step_build(&step, &t.requests);
  assert_int_equal(step.n, 1);
  assert_int_equal(step.seqs[0].n_pages, 2);
  assert_false(send_pages(&t, 1, 1, 10));
  expect_end(&t, send_pages(&t, 1, 1, 11), 1, TD_DONE_ERROR); // 36 tokens fit three
  td_step_close(&step);
  table_close(&t);
}

// One that made room: its prompt is read, then what it had answered is computed as it was at first.
TEST(steps_of_a_replay) {
  table t;
  td_step step;
  td_err err;
  table_open(&t);
  assert_int_equal(td_step_open(&step, MAX_SEQS, 20, &err), TD_OK);
  const td_wire_submit submit = {
      .n_prompt = 30, .max_tokens = 50, .n_pages = 4, .n_answer = 30, .n_past = 16};
  assert_false(send(&t, 1, &submit));
  assert_false(send_pages(&t, 1, 4, 11));
  assert_false(send_tokens(&t, 1, 30, 1));
  assert_false(send_tokens(&t, 1, 30, 2));
  static const struct {
    td_request_phase phase;
    uint32_t n_past, n_tokens;
  } expected[] = {{TD_REQUEST_PREFILL, 16, 14},
                  {TD_REQUEST_REPLAY, 30, 20},
                  {TD_REQUEST_REPLAY, 50, 9},
                  {TD_REQUEST_DECODE, 59, 1}};
  for (size_t i = 0; i < TD_COUNT(expected); i++) {
    td_step_build(&step, &t.requests);
    assert_int_equal(step.n, 1);
    td_worker_request *r = step.requests[0];
    assert_int_equal(r->phase, expected[i].phase);
    assert_int_equal(step.seqs[0].n_past, expected[i].n_past);
    assert_int_equal(step.seqs[0].n_tokens, expected[i].n_tokens);
    assert_int_equal(step.seqs[0].is_decode, i > 0);
    assert_int_equal(step.seqs[0].want, i < 3 ? TD_WANT_NONE : TD_WANT_LAST);
    r->n_past += step.seqs[0].n_tokens;
    r->phase = td_request_phase_of(r);
  }
  td_step_close(&step);
  table_close(&t);
}

// A request that another worker began: it decodes at once.
TEST(steps_go_on_in_an_answer) {
  table t;
  td_step step;
  td_err err;
  table_open(&t);
  td_wire_submit submit = {
      .n_prompt = 30, .max_tokens = 18, .n_pages = 3, .n_answer = 3, .n_past = 32};
  for (uint32_t past = 33; past < 35; past++) {
    submit.n_past = past;
    expect_end(&t, send(&t, 1, &submit), 1, TD_DONE_ERROR);
  }
  submit.n_past = 32;
  assert_false(send(&t, 2, &submit));
  assert_false(send_pages(&t, 2, 3, 11));
  assert_false(send_tokens(&t, 2, 30, 1));
  assert_int_equal(t.requests.active[0]->phase, TD_REQUEST_RECEIVING);
  assert_false(send_tokens(&t, 2, 2, 2));
  assert_false(send_tokens(&t, 2, 1, 3));
  const td_worker_request *r = t.requests.active[0];
  assert_int_equal(r->phase, TD_REQUEST_DECODE);
  assert_int_equal(r->n_output, 3);
  assert_int_equal(td_step_open(&step, MAX_SEQS, 1, &err), TD_OK);
  td_step_build(&step, &t.requests);
  assert_int_equal(step.n, 1);
  assert_true(step.seqs[0].is_decode);
  assert_int_equal(step.seqs[0].n_past, 32);
  assert_int_equal(step.seqs[0].tokens[0], 3);
  submit.n_pages = 2; // for 32 tokens: another has the page that the last one waits for
  assert_false(send(&t, 3, &submit));
  assert_false(send_pages(&t, 3, 2, 14));
  assert_false(send_tokens(&t, 3, 33, 1));
  td_step_build(&step, &t.requests);
  assert_int_equal(step.n, 1);
  assert_false(send_pages(&t, 3, 1, 16));
  td_step_build(&step, &t.requests);
  assert_int_equal(step.n, 2);
  td_step_close(&step);
  submit.n_pages = 1;
  expect_end(&t, send(&t, 4, &submit), 4, TD_DONE_ERROR);
  submit.n_pages = 3;
  submit.n_answer = 18; // nothing left to draw
  submit.n_past = 47;
  expect_end(&t, send(&t, 4, &submit), 4, TD_DONE_ERROR);
  table_close(&t);
}

// What the pages hold already is not computed again, and counts as cached.
TEST(steps_begin_behind_the_cache) {
  table t;
  td_step step;
  td_err err;
  table_open(&t);
  assert_int_equal(td_step_open(&step, MAX_SEQS, 40, &err), TD_OK);
  assert_false(send_past(&t, 2, 40, 5, 0, 3, 2 * PAGE_TOKENS));
  assert_false(send_pages(&t, 2, 3, 7));
  assert_false(send_tokens(&t, 2, 39, 9));
  assert_false(send_tokens(&t, 2, 1, 8));
  td_step_build(&step, &t.requests);
  assert_int_equal(step.n, 1);
  assert_int_equal(step.seqs[0].n_past, 2 * PAGE_TOKENS);
  assert_int_equal(step.seqs[0].n_tokens, 8);
  assert_int_equal(step.seqs[0].tokens[7], 8);
  assert_int_equal(step.seqs[0].pages[2], 9);
  td_requests_end(&t.requests, step.requests[0], TD_DONE_STOP, NULL, &t.reply);
  assert_int_equal(t.reply.u.done.n_cached, 2 * PAGE_TOKENS);
  td_step_close(&step);
  table_close(&t);
}
