// tests/unit/test_worker.c - the worker's parts: arguments, the plan of the KV pool, the request
// table against well-formed and malformed records, and the building of steps.
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "kv/pool.h"
#include "worker/args.h"
#include "worker/request.h"
#include "worker/step.h"

// ---- arguments ----------------------------------------------------------------------------------

static void test_args_round_trip(void **state) {
  (void)state;
  const td_worker_opts opts = {.runtime = {.model_dir = "/models/a b=c",
                                           .device = "cuda",
                                           .devices = "1,0",
                                           .expert_cache = "2.5",
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

static void test_args_are_strict(void **state) {
  (void)state;
  static const char *const bad[] = {"ctx-size",
                                    "ctx-size=",
                                    "ctx-size=1x",
                                    "ctx-size=-1",
                                    "batch=0",
                                    "nope=1",
                                    "ctx-size=99999999999999999999",
                                    "",
                                    "-h",
                                    "kv-dtype=2"};
  for (size_t i = 0; i < TD_COUNT(bad); i++) {
    char *argv[] = {"tandem", "worker", (char *)bad[i], NULL};
    td_worker_opts got;
    td_err err;
    assert_int_equal(td_worker_args_parse(&got, 3, argv, &err), TD_EINVAL);
  }
}

// ---- the KV pool --------------------------------------------------------------------------------

static void test_kv_plan(void **state) {
  (void)state;
  enum { KIB = 1024, MIB = 1024 * KIB };
  static const struct {
    td_kv_need need; // max_position, bytes/token, weights, available, ctx, kv, batch, is_device,
                     // layers, host, none of states
    td_status status;
    td_kv_plan plan;
  } cases[] = {
      // plenty: max_batch whole contexts
      {{4096, 16, MIB, 1024u * MIB, 0, 0, 4, false, 1, 0, 0, 0, 0}, TD_OK, {4096, 256}},
      {{1u << 20, 16, MIB, 1024u * MIB, 0, 0, 2, false, 1, 0, 0, 0, 0}, TD_OK, {32768, 1024}},
      {{4096, 16, MIB, 1024u * MIB, 100, 0, 3, false, 1, 0, 0, 0, 0},
       TD_OK,
       {100, 6}}, // whole pages each
      // half of what the weights leave: 8 of 24 MiB at 1 KiB a token
      {{32768, KIB, 8 * MIB, 24 * MIB, 4096, 0, 16, false, 1, 0, 0, 0, 0}, TD_OK, {4096, 128}},
      // weights larger than memory: a quarter of it
      {{32768, KIB, 900 * MIB, 32 * MIB, 4096, 0, 16, false, 1, 0, 0, 0, 0}, TD_OK, {4096, 128}},
      // a device: three quarters of what the weights leave, but for 1.5 GiB, and nothing where they
      // do
      // not fit
      {{4096, MIB, 8 * MIB, 8200ull * MIB, 4096, 0, 16, true, 1, 0, 0, 0, 0}, TD_OK, {4096, 96}},
      {{4096, KIB, 8 * MIB, 1556ull * MIB, 4096, 0, 16, true, 1, 0, 0, 0, 0}, TD_OK, {4096, 192}},
      {{4096, KIB, 8 * MIB, 1544ull * MIB, 4096, 0, 16, true, 1, 0, 0, 0, 0}, TD_ENOMEM, {0, 0}},
      {{4096, KIB, 900 * MIB, 32 * MIB, 4096, 0, 16, true, 1, 0, 0, 0, 0}, TD_ENOMEM, {0, 0}},
      // with a copy in host memory, which takes half of that at most
      {{4096, MIB, 8 * MIB, 8200ull * MIB, 4096, 0, 16, true, 1, 64ull << 30, 0, 0, 0},
       TD_OK,
       {4096, 96}},
      {{4096, MIB, 8 * MIB, 8200ull * MIB, 4096, 0, 16, true, 1, 10ull << 30, 0, 0, 0},
       TD_OK,
       {4096, 80}},
      {{4096, MIB, 0, 8200ull * MIB, 0, 2048, 16, true, 1, 1ull << 30, 0, 0, 0}, TD_ENOMEM, {0, 0}},
      // the context is shortened when it was ours to choose, and only then
      {{32768, KIB, 0, 16 * MIB, 0, 0, 4, false, 1, 0, 0, 0, 0}, TD_OK, {8192, 128}},
      {{32768, KIB, 0, 16 * MIB, 16384, 0, 4, false, 1, 0, 0, 0, 0}, TD_ENOMEM, {0, 0}},
      {{32768, MIB, 0, 16 * MIB, 0, 0, 4, false, 1, 0, 0, 0, 0}, TD_ENOMEM, {0, 0}},
      // a pool of the user's own size
      {{32768, KIB, 0, 8 * MIB, 4096, 8192, 4, false, 1, 0, 0, 0, 0}, TD_OK, {4096, 128}},
      {{32768, KIB, 0, MIB, 0, 1000, 4, false, 1, 0, 0, 0, 0}, TD_OK, {1000, 16}},
      {{32768, KIB, 0, MIB, 4096, 4095, 4, false, 1, 0, 0, 0, 0}, TD_EINVAL, {0, 0}},
      {{32768, KIB, 0, 8 * MIB - 1, 4096, 8192, 4, false, 1, 0, 0, 0, 0}, TD_ENOMEM, {0, 0}},
      {{32768, KIB, 0, MIB, 4096, 1u << 30, 4, false, 1, 0, 0, 0, 0}, TD_ENOMEM, {0, 0}},
      {{4096, KIB, 0, 1024u * MIB, 4097, 0, 1, false, 1, 0, 0, 0, 0}, TD_EINVAL, {0, 0}},
  };
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    td_kv_plan plan = {0, 0};
    td_err err = {0};
    assert_int_equal(td_kv_plan_make(&plan, &cases[i].need, &err), cases[i].status);
    assert_int_equal(plan.n_ctx, cases[i].plan.n_ctx);
    assert_int_equal(plan.n_pages, cases[i].plan.n_pages);
    assert_int_equal(cases[i].status == TD_OK, err.msg[0] == '\0');
  }
}

static const td_kv_need small_need = {.max_position = 1000,
                                      .kv_bytes_per_token = 48,
                                      .available_bytes = 1u << 30,
                                      .max_batch = 4,
                                      .n_layers = 2};

// A page's parts, one a layer, as others see them.
static void check_copies(const td_kv_pool *pool, int fd) {
  enum { PART = 24 * TD_KV_PAGE_TOKENS };
  td_kv_shape shape;
  td_err err;
  static char page[2 * PART], again[2 * PART];
  assert_int_equal(td_kv_pool_shape(&shape, fd, &err), TD_OK);
  assert_int_equal(shape.n_layers, 2);
  assert_int_equal(shape.part_bytes, PART);
  memset(page, 1, PART);
  memset(page + PART, 2, PART);
  assert_int_equal(pool->versions[5], 0);
  assert_int_equal(td_kv_pool_put(fd, &shape, 5, page, &err), TD_OK);
  assert_true(pool->versions[5] == 1 && pool->versions[4] == 0 && pool->versions[6] == 0);
  assert_int_equal(td_kv_pool_get(fd, &shape, 5, again, &err), TD_OK);
  assert_memory_equal(page, again, sizeof page);
  const char *bytes = pool->pages;
  assert_memory_equal(bytes + 5 * PART, page, PART);
  assert_memory_equal(bytes + (64 + 5) * PART, page + PART, PART);
  assert_int_equal(bytes[5 * PART - 1] + bytes[6 * PART] + bytes[(64 + 6) * PART], 3 * 7);
  assert_int_equal(td_kv_pool_get(fd, &shape, 128, again, &err), TD_EIO);
}

// The first decides, whatever the others would; what is in the pool outlives who wrote it.
static void test_kv_pool(void **state) {
  (void)state;
  td_err err;
  int fd, status;
  assert_int_equal(td_kv_pool_create(&fd, &err), TD_OK);
  pid_t child = fork();
  if (child == 0) {
    td_kv_pool pool;
    if (td_kv_pool_attach(&pool, fd, &small_need, &err) != TD_OK) _exit(1);
    memset(pool.pages, 7, (size_t)pool.plan.n_pages * TD_KV_PAGE_TOKENS * 48);
    _exit(pool.plan.n_ctx == 1000 && pool.plan.n_pages == 64 ? 0 : 2);
  }
  assert_int_equal(waitpid(child, &status, 0), child);
  assert_int_equal(status, 0);
  td_kv_need poorer = small_need, other = small_need;
  poorer.available_bytes = 1 << 20;
  other.kv_bytes_per_token = 50;
  td_kv_pool pool;
  assert_int_equal(td_kv_pool_attach(&pool, dup(fd), &poorer, &err), TD_OK);
  assert_int_equal(pool.plan.n_ctx, 1000);
  assert_int_equal(pool.plan.n_pages, 64);
  const char *bytes = pool.pages;
  assert_int_equal(bytes[0], 7);
  assert_int_equal(bytes[64 * TD_KV_PAGE_TOKENS * 48 - 1], 7);
  check_copies(&pool, fd);
  td_kv_pool_close(&pool);
  assert_int_equal(td_kv_pool_attach(&pool, fd, &other, &err), TD_EFORMAT);
  assert_int_equal(close(fd), 0); // still ours after an error
}

// A page's parts and, behind those of all pages, its recurrent states.
static void test_kv_pool_with_states(void **state) {
  (void)state;
  enum { PAGE = 256, PART = 24 * PAGE, STATE = 1000, STATES = 3, N = 2 * PART + STATES * STATE };
  td_kv_need need = small_need, other;
  need.page_tokens = PAGE;
  need.n_states = STATES;
  need.state_bytes = STATE;
  td_err err;
  int fd;
  static char page[N], again[N];
  td_kv_pool pool;
  td_kv_shape shape;
  assert_int_equal(td_kv_pool_create(&fd, &err), TD_OK);
  assert_int_equal(td_kv_pool_attach(&pool, dup(fd), &need, &err), TD_OK);
  assert_int_equal(pool.plan.n_pages, 4 * 4); // four contexts of 1000 tokens
  assert_int_equal(td_kv_pool_shape(&shape, fd, &err), TD_OK);
  assert_int_equal(td_kv_shape_page_bytes(&shape), N);
  assert_int_equal(shape.page_tokens, PAGE);
  for (int i = 0; i < N; i++)
    page[i] = (char)(i % 251);
  assert_int_equal(td_kv_pool_put(fd, &shape, 5, page, &err), TD_OK);
  assert_int_equal(td_kv_pool_get(fd, &shape, 5, again, &err), TD_OK);
  assert_memory_equal(page, again, N);
  const char *bytes = pool.pages, *states = bytes + 16 * 2 * PART;
  assert_memory_equal(bytes + (16 + 5) * PART, page + PART, PART);
  for (int s = 0; s < STATES; s++)
    assert_memory_equal(states + (16 * s + 5) * STATE, page + 2 * PART + s * STATE, STATE);
  td_kv_pool_close(&pool);
  other = need;
  other.state_bytes = STATE + 4;
  assert_int_equal(td_kv_pool_attach(&pool, fd, &other, &err), TD_EFORMAT);
  assert_int_equal(close(fd), 0);
}

// Pages in a device's memory: the pool keeps the decision alone.
static void test_kv_pool_of_a_device(void **state) {
  (void)state;
  td_err err;
  int fd;
  td_kv_need need = small_need;
  need.is_device = true;
  need.available_bytes = 4ull << 30;
  td_kv_pool pool;
  assert_int_equal(td_kv_pool_create(&fd, &err), TD_OK);
  assert_int_equal(td_kv_pool_attach(&pool, dup(fd), &need, &err), TD_OK);
  assert_null(pool.pages);
  assert_int_equal(pool.plan.n_pages, 64);
  assert_true(pool.segment.n_bytes <= 4096);
  td_kv_pool_close(&pool);
  need.available_bytes = 1 << 20;
  assert_int_equal(td_kv_pool_attach(&pool, dup(fd), &need, &err), TD_OK);
  assert_int_equal(pool.plan.n_pages, 64);
  td_kv_pool_close(&pool);
  assert_int_equal(td_kv_pool_attach(&pool, fd, &small_need, &err), TD_EFORMAT);
  assert_non_null(strstr(err.msg, "device"));
  assert_int_equal(close(fd), 0);
}

// Pages in a device's memory and in the pool.
static void test_kv_pool_with_copies(void **state) {
  (void)state;
  td_err err;
  int fd;
  td_kv_need need = small_need;
  need.is_device = true;
  need.available_bytes = 4ull << 30;
  need.host_bytes = 1 << 30;
  td_kv_pool pool;
  td_kv_shape shape;
  assert_int_equal(td_kv_pool_create(&fd, &err), TD_OK);
  assert_int_equal(td_kv_pool_attach(&pool, dup(fd), &need, &err), TD_OK);
  assert_non_null(pool.pages);
  assert_int_equal(td_kv_pool_shape(&shape, fd, &err), TD_OK);
  pool.versions[63] = 9; // it is the segment's last
  td_kv_pool_close(&pool);
  need.host_bytes = 1; // it is sized
  assert_int_equal(td_kv_pool_attach(&pool, dup(fd), &need, &err), TD_OK);
  assert_int_equal(pool.plan.n_pages, 64);
  assert_int_equal(pool.versions[63], 9);
  td_kv_pool_close(&pool);
  need.host_bytes = 0;
  assert_int_equal(td_kv_pool_attach(&pool, fd, &need, &err), TD_EFORMAT);
  assert_int_equal(close(fd), 0);
}

static void test_kv_pool_that_cannot_be(void **state) {
  (void)state;
  td_err err;
  int fd;
  td_kv_need need = small_need;
  need.ctx_size = 2000;
  td_kv_pool pool;
  assert_int_equal(td_kv_pool_create(&fd, &err), TD_OK);
  assert_int_equal(td_kv_pool_attach(&pool, fd, &need, &err), TD_EINVAL);
  need = small_need;
  need.kv_tokens = 1u << 30;
  need.kv_bytes_per_token = 1ull << 50;
  assert_int_equal(td_kv_pool_attach(&pool, fd, &need, &err), TD_ENOMEM);
  assert_int_equal(td_kv_pool_attach(&pool, fd, &small_need, &err), TD_OK); // nothing was decided
  td_kv_pool_close(&pool);
}

// ---- requests and steps -------------------------------------------------------------------------

enum { N_VOCAB = 100, N_CTX = 256, MAX_SEQS = 3, PAGE_TOKENS = 16, N_PAGES = 40 };

typedef struct {
  td_requests requests;
  td_wire_msg reply;
} table;

static void table_open(table *t) {
  td_err err;
  const td_request_limits limits = {.n_vocab = N_VOCAB,
                                    .n_ctx = N_CTX,
                                    .max_seqs = MAX_SEQS,
                                    .n_pages = N_PAGES,
                                    .page_tokens = PAGE_TOKENS};
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

static void test_a_request_in_parts(void **state) {
  (void)state;
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
static void test_ends_of_an_answer(void **state) {
  (void)state;
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

static void test_malformed_sequences(void **state) {
  (void)state;
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

static void test_too_many_requests(void **state) {
  (void)state;
  table t;
  table_open(&t);
  for (uint64_t id = 1; id <= MAX_SEQS; id++)
    assert_false(send_submit(&t, id, 200, 50, 0));
  expect_end(&t, send_submit(&t, 9, 5, 5, 0), 9, TD_DONE_ERROR);
  expect_end(&t, send_kind(&t, 2, TD_MSG_CANCEL), 2, TD_DONE_CANCELED);
  assert_false(send_submit(&t, 9, 5, 5, 0));
  table_close(&t);
}

static void test_steps(void **state) {
  (void)state;
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
static void test_steps_that_stream(void **state) {
  (void)state;
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
static void test_steps_end_at_copies(void **state) {
  (void)state;
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

// A request that waits for its grammar's mask is in no step; others take part in every one.
static void test_steps_without_those_that_wait_for_masks(void **state) {
  (void)state;
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
static void test_steps_wait_for_pages(void **state) {
  (void)state;
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
static void test_steps_of_a_replay(void **state) {
  (void)state;
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
static void test_steps_go_on_in_an_answer(void **state) {
  (void)state;
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
static void test_steps_begin_behind_the_cache(void **state) {
  (void)state;
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

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_args_round_trip),
      cmocka_unit_test(test_args_are_strict),
      cmocka_unit_test(test_kv_plan),
      cmocka_unit_test(test_kv_pool),
      cmocka_unit_test(test_kv_pool_with_states),
      cmocka_unit_test(test_kv_pool_of_a_device),
      cmocka_unit_test(test_kv_pool_with_copies),
      cmocka_unit_test(test_kv_pool_that_cannot_be),
      cmocka_unit_test(test_a_request_in_parts),
      cmocka_unit_test(test_ends_of_an_answer),
      cmocka_unit_test(test_malformed_sequences),
      cmocka_unit_test(test_too_many_requests),
      cmocka_unit_test(test_steps),
      cmocka_unit_test(test_steps_begin_behind_the_cache),
      cmocka_unit_test(test_steps_that_stream),
      cmocka_unit_test(test_steps_end_at_copies),
      cmocka_unit_test(test_steps_wait_for_pages),
      cmocka_unit_test(test_steps_without_those_that_wait_for_masks),
      cmocka_unit_test(test_steps_of_a_replay),
      cmocka_unit_test(test_steps_go_on_in_an_answer),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
