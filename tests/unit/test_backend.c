// tests/unit/test_backend.c - backend, supervision and worker with real processes and a
// make-believe engine: this program stands in for tandem when it is executed again as a worker, and
// defines the model, the device and the engine itself. The engine keeps the tokens in the KV pool
// and derives the next one from all of them, so a page lost or shared changes the answer.
//
// A prompt that begins with one of these and a length makes the worker misbehave once the sequence
// is that long:
enum {
  DIE = 901, // SIGKILL
  DIE_ONCE,  // the first time only (TANDEM_TEST_FUSE names a file, removed by then)
  HANG,      // three seconds in one step
  FAIL,      // an error of the engine
  N_VOCAB = 1000,
  N_PLAIN = 900, // ids below have no meaning
  EOS = 999,
};

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "app/backend.h"
#include "app/supervise.h"
#include "base/clock.h"
#include "engine/engine.h"
#include "worker/kv_pool.h"
#include "worker/worker.h"

// ---- the make-believe engine ------------------------------------------------------------------

struct td_model {
  td_model_config config;
};
struct td_dev {
  size_t own_bytes; // of memory; 0: it works in the host's
};
struct td_engine {
  td_engine_opts opts;
  int32_t *pages, *own_pages;
  float *logits;
};

td_status td_model_open_weights(td_model **out, const char *dir, int weights_fd, td_err *err) {
  (void)weights_fd;
  if (strcmp(dir, "absent") == 0) return td_fail(err, TD_ENOENT, "absent/config.json: not found");
  if (strcmp(dir, "crash") == 0) {
    fprintf(stderr, "something is\nterribly wrong\n");
    raise(SIGKILL);
  }
  *out = calloc(1, sizeof **out);
  (*out)->config = (td_model_config){
      .n_vocab = N_VOCAB, .max_position = 200000, .eos_ids = {EOS}, .n_eos = 1};
  return TD_OK;
}

void td_model_close(td_model *model) {
  free(model);
}

const td_model_config *td_model_config_of(const td_model *model) {
  return &model->config;
}

td_model_stats td_model_stats_of(const td_model *model) {
  (void)model;
  return (td_model_stats){.bytes = 1};
}

const void *td_model_memory(const td_model *model, size_t *n_bytes) {
  *n_bytes = sizeof *model;
  return model;
}

void td_dev_pin(td_dev *dev, const void *host, size_t n_bytes) {
  TD_CHECK(dev->own_bytes && host && n_bytes);
}

td_status td_dev_open(td_dev **out, const td_dev_opts *opts, td_err *err) {
  (void)err;
  *out = calloc(1, sizeof **out);
  if (strcmp(opts->kind, "cuda") == 0) (*out)->own_bytes = 4 << 20;
  return TD_OK;
}

size_t td_dev_own_free_bytes(td_dev *dev) {
  return dev->own_bytes;
}

const char *td_dev_name(const td_dev *dev) {
  (void)dev;
  return "make-believe GPU";
}

void td_dev_close(td_dev *dev) {
  free(dev);
}

void td_dev_set_threads(td_dev *dev, unsigned n_threads) {
  (void)dev;
  TD_CHECK(n_threads > 0);
}

size_t td_engine_kv_bytes_per_token(const td_model_config *config, td_dtype kv_dtype) {
  (void)config;
  (void)kv_dtype;
  return sizeof(int32_t);
}

td_status td_engine_open(td_engine **out, const td_model *model, td_dev *dev,
                         const td_engine_opts *opts, td_err *err) {
  (void)model;
  (void)dev;
  (void)err;
  td_engine *e = calloc(1, sizeof *e);
  e->opts = *opts;
  e->pages = opts->kv_pages;
  if (!e->pages) {
    size_t n_bytes = (size_t)opts->n_pages * opts->page_tokens * sizeof *e->pages;
    e->pages = e->own_pages = malloc(n_bytes);
    memset(e->own_pages, 0x55, n_bytes); // no token: what is not written again is noticed
  }
  e->logits = malloc((size_t)opts->max_step_seqs * N_VOCAB * sizeof *e->logits);
  *out = e;
  return TD_OK;
}

void td_engine_close(td_engine *engine) {
  if (!engine) return;
  free(engine->logits);
  free(engine->own_pages);
  free(engine);
}

float *td_engine_logits(td_engine *engine) {
  return engine->logits;
}

static int32_t *cell(td_engine *e, const td_step_seq *seq, uint32_t position) {
  uint32_t page = position / e->opts.page_tokens;
  TD_CHECK(page < seq->n_pages);
  return &e->pages[(size_t)seq->pages[page] * e->opts.page_tokens + position % e->opts.page_tokens];
}

static uint32_t mix(uint32_t hash, int32_t token) {
  return (hash ^ (uint32_t)token) * 16777619u;
}

static td_status misbehave(int32_t how, td_err *err) {
  const char *fuse = getenv("TANDEM_TEST_FUSE");
  if (how == DIE || (how == DIE_ONCE && fuse && unlink(fuse) == 0)) raise(SIGKILL);
  if (how == HANG) sleep(3);
  return how == FAIL ? td_fail(err, TD_EIO, "the engine is out of order") : TD_OK;
}

td_status td_engine_step(td_engine *e, const td_step_seq *seqs, uint32_t n_seqs, td_err *err) {
  uint32_t n_rows = 0, n_tokens = 0;
  for (uint32_t i = 0; i < n_seqs; i++) {
    const td_step_seq *seq = &seqs[i];
    uint32_t n = seq->n_past + seq->n_tokens, hash = 2166136261u;
    n_tokens += seq->n_tokens;
    for (uint32_t j = 0; j < seq->n_tokens; j++)
      *cell(e, seq, seq->n_past + j) = seq->tokens[j];
    if (n >= 2 && n == (uint32_t)*cell(e, seq, 1)) {
      td_status st = misbehave(*cell(e, seq, 0), err);
      if (st != TD_OK) return st;
    }
    if (seq->want != TD_WANT_LAST) continue;
    for (uint32_t j = 0; j < n; j++)
      hash = mix(hash, *cell(e, seq, j));
    float *row = e->logits + (size_t)n_rows++ * N_VOCAB;
    memset(row, 0, N_VOCAB * sizeof *row);
    // A prompt of one token is answered by counting up, which ends at EOS.
    int32_t first = *cell(e, seq, 0), last = *cell(e, seq, n - 1);
    bool counts = first > DIE + 50;
    row[counts ? last + 1 - (last == EOS) : (int32_t)(hash % N_PLAIN)] = 1;
  }
  TD_CHECK(n_tokens <= e->opts.max_step_tokens && n_seqs <= e->opts.max_step_seqs);
  const char *step_us = getenv("TANDEM_TEST_STEP_US");
  if (step_us) usleep((useconds_t)atoi(step_us));
  return TD_OK;
}

// ---- a client -----------------------------------------------------------------------------------

enum { MAX_ANSWER = 4096 };

typedef struct {
  td_backend *backend;
  uint64_t id;
  int32_t answer[MAX_ANSWER];
  uint32_t n, n_progress, cancel_at;
  bool is_canceled;
  int n_done;
  td_wire_done done;
  td_backend_state state_at_done;
} client;

static void on_progress(void *ctx, const td_wire_progress *progress) {
  client *c = ctx;
  assert_false(c->is_canceled);
  assert_true(progress->n_done <= progress->n_prompt);
  c->n_progress++;
}

static void on_token(void *ctx, const td_wire_token *token) {
  client *c = ctx;
  assert_false(c->is_canceled);
  assert_int_equal(c->n_done, 0);
  assert_int_equal(token->index, c->n);
  if (c->n < MAX_ANSWER) c->answer[c->n] = token->id;
  c->n++;
  assert_int_equal(token->is_eos, token->id == EOS && c->answer[0] != EOS);
  if (c->n != c->cancel_at) return;
  c->is_canceled = true;
  td_backend_cancel(c->backend, c->id);
}

static void on_done(void *ctx, const td_wire_done *done) {
  client *c = ctx;
  assert_false(c->is_canceled);
  c->n_done++;
  c->done = *done;
  c->state_at_done = td_backend_state_of(c->backend);
}

static td_status submit_flags(client *c, const int32_t *prompt, uint32_t n_prompt,
                              uint32_t max_tokens, uint32_t flags) {
  td_err err = {0};
  const td_request request = {
      .prompt = prompt, .n_prompt = n_prompt, .max_tokens = max_tokens, .flags = flags};
  const td_request_callbacks callbacks = {
      .on_progress = on_progress, .on_token = on_token, .on_done = on_done, .ctx = c};
  td_status st = td_backend_submit(c->backend, &request, &callbacks, &c->id, &err);
  assert_int_equal(c->n + c->n_done, 0); // never called back from inside
  assert_true(st == TD_OK || err.msg[0]);
  return st;
}

static td_status submit(client *c, const int32_t *prompt, uint32_t n_prompt, uint32_t max_tokens) {
  return submit_flags(c, prompt, n_prompt, max_tokens, 0);
}

static void check_answer(const client *c, const int32_t *prompt, uint32_t n_prompt, uint32_t n) {
  uint32_t hash = 2166136261u;
  for (uint32_t i = 0; i < n_prompt; i++)
    hash = mix(hash, prompt[i]);
  assert_int_equal(c->n, n);
  for (uint32_t i = 0; i < n; i++) {
    assert_int_equal(c->answer[i], hash % N_PLAIN);
    hash = mix(hash, c->answer[i]);
  }
}

// ---- the loop -----------------------------------------------------------------------------------

typedef struct {
  uv_loop_t loop;
  td_backend *backend;
  td_backend_state states[16]; // in order of appearance
  int n_states;
  bool is_closed;
} world;

static void on_state(void *ctx, td_backend_state state) {
  world *w = ctx;
  if (w->n_states < 16) w->states[w->n_states++] = state;
}

static void on_closed(void *ctx) {
  ((world *)ctx)->is_closed = true;
}

static void nothing(uv_timer_t *timer) {
  (void)timer;
}

// Runs the loop until is_over(ctx), at most 30 s.
static void run_until(world *w, bool (*is_over)(void *ctx), void *ctx) {
  uv_timer_t timer;
  uint64_t end_ns = td_clock_ns() + 30000000000u;
  uv_timer_init(&w->loop, &timer);
  uv_timer_start(&timer, nothing, 10, 10);
  while (!is_over(ctx) && td_clock_ns() < end_ns)
    uv_run(&w->loop, UV_RUN_ONCE);
  uv_close((uv_handle_t *)&timer, NULL);
  uv_run(&w->loop, UV_RUN_NOWAIT);
  assert_true(is_over(ctx));
}

static bool is_settled(void *ctx) {
  td_backend_state state = td_backend_state_of(((world *)ctx)->backend);
  return state == TD_BACKEND_READY || state == TD_BACKEND_FAILED;
}

static bool is_done(void *ctx) {
  return ((client *)ctx)->n_done > 0;
}

static bool has_begun(void *ctx) {
  return ((client *)ctx)->n > 0;
}

static bool is_idle(void *ctx) {
  const td_backend *b = ((world *)ctx)->backend;
  return td_backend_n_running(b) == 0 && td_backend_n_waiting(b) == 0;
}

// Each test runs with one worker and with two, some with one that has memory of its own.
static bool is_split;
static const char *device = "cpu";

static void world_open(world *w, const char *model, uint32_t ctx_size, uint32_t max_batch) {
  td_err err;
  *w = (world){0};
  uv_loop_init(&w->loop);
  const td_backend_opts opts = {.model_dir = model,
                                .device = device,
                                .ctx_size = ctx_size,
                                .max_batch = max_batch,
                                .is_split = is_split,
                                .prefill_chunk = 100,
                                .on_state = on_state,
                                .ctx = w};
  assert_int_equal(td_backend_open(&w->backend, &w->loop, &opts, &err), TD_OK);
  assert_int_equal(td_backend_state_of(w->backend), TD_BACKEND_LOADING);
}

static void world_close(world *w) {
  td_backend_close(w->backend, on_closed, w);
  assert_false(w->is_closed);
  uv_run(&w->loop, UV_RUN_DEFAULT); // returns when no handle is left
  assert_true(w->is_closed);
  assert_int_equal(uv_loop_close(&w->loop), 0);
  assert_int_equal(waitpid(-1, NULL, WNOHANG), -1); // no child left
  assert_int_equal(errno, ECHILD);
}

static void world_ready(world *w, uint32_t ctx_size, uint32_t max_batch) {
  world_open(w, "model", ctx_size, max_batch);
  client early = {.backend = w->backend};
  assert_int_equal(submit(&early, (int32_t[]){1}, 1, 1), TD_EAGAIN);
  run_until(w, is_settled, w);
  assert_int_equal(td_backend_state_of(w->backend), TD_BACKEND_READY);
}

static void make_prompt(int32_t *prompt, uint32_t n, uint32_t seed) {
  for (uint32_t i = 0; i < n; i++)
    prompt[i] = (int32_t)((seed * 7919u + i * 104729u + i * i) % N_PLAIN);
}

// ---- tests --------------------------------------------------------------------------------------

static void test_a_hundred_at_once(void **state) {
  (void)state;
  enum { N = 100 };
  static client clients[N];
  static int32_t prompts[N][300];
  world w;
  world_ready(&w, 512, 8);
  assert_int_equal(td_backend_info(w.backend).n_vocab, N_VOCAB);
  assert_int_equal(td_backend_info(w.backend).n_ctx, 512);
  for (uint32_t i = 0; i < N; i++) {
    clients[i] = (client){.backend = w.backend};
    make_prompt(prompts[i], 300, i);
    assert_int_equal(submit(&clients[i], prompts[i], 1 + i * 37 % 300, 1 + i % 50), TD_OK);
  }
  // Prompts of 1, 38 and 75 tokens are more than is read in one step; the others wait.
  assert_int_equal(td_backend_n_running(w.backend), 3);
  assert_int_equal(td_backend_n_waiting(w.backend), N - 3);
  run_until(&w, is_idle, &w);
  for (uint32_t i = 0; i < N; i++) {
    assert_int_equal(clients[i].n_done, 1);
    assert_int_equal(clients[i].done.reason, TD_DONE_LENGTH);
    assert_int_equal(clients[i].done.n_output, 1 + i % 50);
    assert_true(clients[i].n_progress > 0);
    check_answer(&clients[i], prompts[i], 1 + i * 37 % 300, 1 + i % 50);
  }
  world_close(&w);
}

static void test_ends_of_an_answer(void **state) {
  (void)state;
  world w;
  world_ready(&w, 256, 4);
  int32_t near_eos = EOS - 3, prompt[256];
  make_prompt(prompt, 256, 5);

  client eos = {.backend = w.backend}, ignored = {.backend = w.backend};
  client context = {.backend = w.backend}, refused = {.backend = w.backend};
  assert_int_equal(submit(&eos, &near_eos, 1, 50), TD_OK);
  assert_int_equal(submit(&context, prompt, 250, 50), TD_OK);
  run_until(&w, is_idle, &w);
  assert_int_equal(eos.done.reason, TD_DONE_STOP);
  assert_int_equal(eos.n, 3);
  assert_int_equal(eos.answer[2], EOS);
  assert_int_equal(context.done.reason, TD_DONE_LENGTH);
  check_answer(&context, prompt, 250, 6);

  int32_t at_eos = EOS;
  assert_int_equal(submit_flags(&ignored, &at_eos, 1, 5, TD_SUBMIT_IGNORE_EOS), TD_OK);
  run_until(&w, is_idle, &w);
  assert_int_equal(ignored.done.reason, TD_DONE_LENGTH);
  assert_int_equal(ignored.n, 5);

  assert_int_equal(submit(&refused, prompt, 256, 1), TD_EINVAL);
  assert_int_equal(submit(&refused, prompt, 0, 1), TD_EINVAL);
  assert_int_equal(submit(&refused, prompt, 1, 0), TD_EINVAL);
  assert_int_equal(submit(&refused, (int32_t[]){N_VOCAB}, 1, 1), TD_EINVAL);
  assert_int_equal(submit(&refused, (int32_t[]){-1}, 1, 1), TD_EINVAL);
  world_close(&w);
}

static void test_the_queue_is_bounded(void **state) {
  (void)state;
  enum { N = 513 };
  static client clients[N + 1];
  world w;
  world_ready(&w, 256, 1);
  for (int i = 0; i < N; i++) {
    clients[i] = (client){.backend = w.backend};
    assert_int_equal(submit(&clients[i], (int32_t[]){i % N_PLAIN}, 1, 2), TD_OK);
  }
  clients[N] = (client){.backend = w.backend};
  assert_int_equal(submit(&clients[N], (int32_t[]){1}, 1, 2), TD_EAGAIN);
  run_until(&w, is_idle, &w);
  for (int i = 0; i < N; i++)
    check_answer(&clients[i], (int32_t[]){i % N_PLAIN}, 1, 2);
  world_close(&w);
}

// More records than the ring holds, one way and the other.
static void test_full_rings(void **state) {
  (void)state;
  static int32_t prompt[150000];
  static client big, chatty;
  world w;
  world_ready(&w, 160000, 2);
  make_prompt(prompt, 150000, 1);
  big = (client){.backend = w.backend};
  chatty = (client){.backend = w.backend};
  assert_int_equal(submit(&big, prompt, 150000, 3), TD_OK);
  run_until(&w, is_idle, &w);
  check_answer(&big, prompt, 150000, 3);
  assert_int_equal(submit(&chatty, prompt, 3, 4000), TD_OK);
  sleep(1); // the loop stands still; the worker fills the ring and waits
  run_until(&w, is_idle, &w);
  check_answer(&chatty, prompt, 3, 4000);
  world_close(&w);
}

static void test_cancel_in_every_phase(void **state) {
  (void)state;
  setenv("TANDEM_TEST_STEP_US", "10000", 1);
  static int32_t prompt[100000];
  make_prompt(prompt, 100000, 2);
  world w;
  world_ready(&w, 110000, 3);
  static client c[6];
  for (int i = 0; i < 6; i++)
    c[i] = (client){.backend = w.backend};
  c[0].cancel_at = 5;                                            // in decode, from its callback
  assert_int_equal(submit(&c[0], prompt, 10, 10000), TD_OK);     //
  assert_int_equal(submit(&c[1], prompt, 100000, 1000), TD_OK);  // half in the ring
  assert_int_equal(submit(&c[2], prompt + 1, 50000, 50), TD_OK); // not in the ring yet
  assert_int_equal(submit(&c[3], prompt, 10, 10), TD_OK);        // waiting
  assert_int_equal(submit(&c[4], prompt, 20, 10), TD_OK);
  for (int i = 1; i < 4; i++) {
    c[i].is_canceled = true;
    td_backend_cancel(w.backend, c[i].id);
    td_backend_cancel(w.backend, c[i].id);
  }
  td_backend_cancel(w.backend, 12345678);
  run_until(&w, is_idle, &w);
  check_answer(&c[4], prompt, 20, 10);
  assert_int_equal(c[0].n, 5);
  assert_int_equal(submit(&c[5], prompt, 99000, 10), TD_OK); // in prefill
  run_until(&w, is_done, &c[4]);
  while (!c[5].n_progress)
    uv_run(&w.loop, UV_RUN_ONCE);
  c[5].is_canceled = true;
  td_backend_cancel(w.backend, c[5].id);
  uint64_t begin_ns = td_clock_ns();
  run_until(&w, is_idle, &w);
  assert_true(td_clock_ns() - begin_ns < 5000000000u); // 990 steps of 10 ms were left
  unsetenv("TANDEM_TEST_STEP_US");
  world_close(&w);
}

static void test_death_in_mid_stream(void **state) {
  (void)state;
  world w;
  world_ready(&w, 512, 1);
  const int32_t deadly[] = {DIE, 20, 3}, harmless[] = {1, 2, 3};
  client victim = {.backend = w.backend}, next = {.backend = w.backend};
  client later = {.backend = w.backend};
  assert_int_equal(submit(&victim, deadly, 3, 100), TD_OK);
  assert_int_equal(submit(&next, harmless, 3, 10), TD_OK); // waits behind it, and survives
  run_until(&w, is_done, &victim);
  assert_int_equal(victim.done.reason, TD_DONE_LOST);
  assert_int_equal(victim.n, 17);
  assert_non_null(strstr(victim.done.text, "signal 9"));
  assert_non_null(strstr(victim.done.text, "try again"));
  assert_int_equal(victim.state_at_done, TD_BACKEND_LOADING);
  run_until(&w, is_done, &next);
  check_answer(&next, harmless, 3, 10);
  assert_int_equal(submit(&later, harmless, 3, 7), TD_OK);
  run_until(&w, is_done, &later);
  check_answer(&later, harmless, 3, 7);
  // It was tried once more behind its last token.
  const td_backend_state states[] = {TD_BACKEND_READY, TD_BACKEND_LOADING, TD_BACKEND_READY,
                                     TD_BACKEND_LOADING, TD_BACKEND_READY};
  assert_int_equal(w.n_states, 5);
  assert_memory_equal(w.states, states, sizeof states);
  world_close(&w);
}

static void make_fuse(char path[32]) {
  strcpy(path, "/tmp/tandem-fuse-XXXXXX");
  int fd = mkstemp(path);
  assert_true(fd >= 0);
  close(fd);
  setenv("TANDEM_TEST_FUSE", path, 1);
}

static void test_replay_before_the_first_token(void **state) {
  (void)state;
  char fuse[32];
  make_fuse(fuse);
  world w;
  world_ready(&w, 512, 2);
  const int32_t once[] = {DIE_ONCE, 4, 3, 4}, always[] = {DIE, 4, 3, 4};
  client lucky = {.backend = w.backend}, poison = {.backend = w.backend};
  assert_int_equal(submit(&lucky, once, 4, 10), TD_OK);
  run_until(&w, is_done, &lucky);
  assert_int_equal(lucky.done.reason, TD_DONE_LENGTH);
  check_answer(&lucky, once, 4, 10);
  assert_int_equal(access(fuse, F_OK), -1); // it did die

  assert_int_equal(submit(&poison, always, 4, 10), TD_OK);
  run_until(&w, is_done, &poison);
  assert_int_equal(poison.done.reason, TD_DONE_LOST);
  run_until(&w, is_settled, &w);
  assert_int_equal(td_backend_state_of(w.backend), TD_BACKEND_READY);
  unsetenv("TANDEM_TEST_FUSE");
  world_close(&w);
}

// What was computed lies in the pool: the answer goes on behind its last token.
static void test_an_answer_outlives_its_worker(void **state) {
  (void)state;
  char fuse[32];
  make_fuse(fuse);
  world w;
  world_ready(&w, 512, 4);
  static const int32_t plain[] = {5, 6, 7}, places[] = {4, 9, 20};
  for (size_t i = 0; i < TD_COUNT(places); i++) {
    const int32_t once[] = {DIE_ONCE, places[i], 3};
    client victim = {.backend = w.backend}, bystander = {.backend = w.backend};
    close(open(fuse, O_CREAT | O_WRONLY, 0600));
    assert_int_equal(submit(&bystander, plain, 3, 40), TD_OK);
    assert_int_equal(submit(&victim, once, 3, 40), TD_OK);
    run_until(&w, is_idle, &w);
    assert_int_equal(access(fuse, F_OK), -1);
    assert_int_equal(victim.done.reason, TD_DONE_LENGTH);
    check_answer(&victim, once, 3, 40);
    check_answer(&bystander, plain, 3, 40);
  }
  unsetenv("TANDEM_TEST_FUSE");
  world_close(&w);
}

// Pages that die with their worker are no cache: what was read and what was written is read again,
// in pieces.
static void test_an_answer_outlives_its_pages(void **state) {
  (void)state;
  enum { N = 4, PROMPT = 250, ANSWER = 200 };
  char fuse[32];
  make_fuse(fuse);
  world w;
  world_ready(&w, 512, N);
  static int32_t prompts[N][PROMPT];
  static client clients[N], again;
  for (int i = 0; i < N; i++) {
    make_prompt(prompts[i], PROMPT, 1);
    prompts[i][0] = DIE_ONCE; // all die with the first to come there
    prompts[i][1] = 420;
    prompts[i][200 + i] = i;
    clients[i] = (client){.backend = w.backend};
    assert_int_equal(submit(&clients[i], prompts[i], PROMPT, ANSWER), TD_OK);
  }
  run_until(&w, is_idle, &w);
  assert_int_equal(access(fuse, F_OK), -1);
  for (int i = 0; i < N; i++)
    check_answer(&clients[i], prompts[i], PROMPT, ANSWER);
  again = (client){.backend = w.backend};
  assert_int_equal(submit(&again, prompts[2], PROMPT, ANSWER), TD_OK);
  run_until(&w, is_done, &again);
  check_answer(&again, prompts[2], PROMPT, ANSWER);
  assert_true(again.done.n_cached >= 192); // of the second life
  unsetenv("TANDEM_TEST_FUSE");
  world_close(&w);
}

// The prefill worker dies again and again; what the other writes does not notice.
static void test_one_death_is_not_the_others(void **state) {
  (void)state;
  if (!is_split) skip();
  world w;
  world_ready(&w, 20000, 4);
  const int32_t plain[] = {5, 6, 7}, deadly[] = {DIE, 4, 3, 4};
  static client stream;
  client poison = {.backend = w.backend};
  stream = (client){.backend = w.backend};
  assert_int_equal(submit(&stream, plain, 3, MAX_ANSWER), TD_OK);
  run_until(&w, has_begun, &stream);
  assert_int_equal(submit(&poison, deadly, 4, 10), TD_OK);
  run_until(&w, is_done, &poison);
  assert_int_equal(poison.done.reason, TD_DONE_LOST);
  assert_non_null(strstr(poison.done.text, "prefill process died"));
  run_until(&w, is_done, &stream);
  check_answer(&stream, plain, 3, MAX_ANSWER);
  run_until(&w, is_settled, &w);
  td_backend_worker workers[TD_BACKEND_MAX_WORKERS];
  assert_int_equal(td_backend_workers(w.backend, workers), 2);
  assert_string_equal(workers[0].role, "prefill");
  assert_int_equal(workers[0].n_restarts, 2);
  assert_string_equal(workers[1].role, "decode");
  assert_int_equal(workers[1].n_restarts, 0);
  world_close(&w);
}

// Nobody listens behind the first token: neither worker keeps the request, nor its pages.
static void test_cancel_at_the_hand_over(void **state) {
  (void)state;
  world w;
  world_ready(&w, 512, 4);
  static client clients[64];
  static int32_t prompts[64][70];
  for (uint32_t i = 0; i < 64; i++) {
    clients[i] = (client){.backend = w.backend, .cancel_at = 1 + i % 3};
    make_prompt(prompts[i], 70, i);
    assert_int_equal(submit(&clients[i], prompts[i], 70, 10), TD_OK);
  }
  run_until(&w, is_idle, &w);
  for (uint32_t i = 0; i < 64; i++)
    assert_int_equal(clients[i].n, 1 + i % 3);
  assert_true(td_backend_kv_use(w.backend) == 0);
  world_close(&w);
}

static void test_engine_failure(void **state) {
  (void)state;
  world w;
  world_ready(&w, 512, 2);
  const int32_t bad[] = {FAIL, 6, 3};
  client c = {.backend = w.backend};
  assert_int_equal(submit(&c, bad, 3, 10), TD_OK);
  run_until(&w, is_done, &c);
  assert_int_equal(c.done.reason, TD_DONE_LOST);
  assert_non_null(strstr(c.done.text, "out of order"));
  run_until(&w, is_settled, &w);
  assert_int_equal(td_backend_state_of(w.backend), TD_BACKEND_READY);
  world_close(&w);
}

static void test_failures_to_start(void **state) {
  (void)state;
  static const struct {
    const char *model;
    uint32_t ctx_size;
    const char *reason;
  } cases[] = {{"absent", 0, "absent/config.json: not found"},
               {"crash", 0, "terribly wrong"},
               {"model", 300000, "the model's longest is 200000"}};
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    world w;
    world_open(&w, cases[i].model, cases[i].ctx_size, 2);
    run_until(&w, is_settled, &w);
    assert_int_equal(td_backend_state_of(w.backend), TD_BACKEND_FAILED);
    assert_non_null(strstr(td_backend_reason(w.backend), cases[i].reason));
    assert_int_equal(w.n_states, 1);
    client c = {.backend = w.backend};
    assert_int_equal(submit(&c, (int32_t[]){1}, 1, 1), TD_EAGAIN);
    world_close(&w);
  }
}

static void test_close_with_requests(void **state) {
  (void)state;
  world w;
  world_ready(&w, 100000, 1);
  client running = {.backend = w.backend}, waiting = {.backend = w.backend};
  assert_int_equal(submit(&running, (int32_t[]){1, 2, 3}, 3, 90000), TD_OK);
  assert_int_equal(submit(&waiting, (int32_t[]){1, 2, 3}, 3, 10), TD_OK);
  while (!running.n)
    uv_run(&w.loop, UV_RUN_ONCE);
  world_close(&w);
  assert_int_equal(running.n_done, 1);
  assert_int_equal(running.done.reason, TD_DONE_LOST);
  assert_non_null(strstr(running.done.text, "shutting down"));
  assert_int_equal(waiting.n_done, 1);
  assert_int_equal(waiting.done.reason, TD_DONE_LOST);
}

static void test_close_while_loading(void **state) {
  (void)state;
  world w;
  world_open(&w, "model", 0, 4);
  world_close(&w);
}

// The front is killed; its worker becomes ours (sub-reaper) and must be gone soon.
static void test_worker_dies_with_the_front(void **state) {
  (void)state;
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  int ready[2];
  assert_int_equal(pipe(ready), 0);
  pid_t front = fork();
  assert_true(front >= 0);
  if (front == 0) {
    world w;
    world_ready(&w, 512, 2);
    if (write(ready[1], "!", 1) != 1) _exit(1);
    uv_run(&w.loop, UV_RUN_DEFAULT);
    _exit(1);
  }
  char byte;
  assert_int_equal(read(ready[0], &byte, 1), 1);
  kill(front, SIGKILL);
  assert_int_equal(waitpid(front, NULL, 0), front);
  int n_dead = 0;
  pid_t child = 0;
  for (int i = 0; i < 200 && child >= 0; i++) {
    usleep(i ? 50000 : 0);
    while ((child = waitpid(-1, NULL, WNOHANG)) > 0)
      n_dead++;
  }
  assert_int_equal(child, -1); // nobody is left
  assert_true(n_dead >= 1 + is_split);
  close(ready[0]);
  close(ready[1]);
  prctl(PR_SET_CHILD_SUBREAPER, 0);
}

// ---- the supervisor alone: a worker that hangs ------------------------------------------------

typedef struct {
  td_supervisor *supervisor;
  bool was_stuck, is_back;
} watch;

static td_status watch_ready(void *ctx, const td_wire_ready *info, td_err *err) {
  (void)ctx;
  (void)info;
  (void)err;
  return TD_OK;
}

static void watch_record(void *ctx, const td_wire_msg *msg) {
  (void)ctx;
  (void)msg;
}

static void watch_space(void *ctx) {
  (void)ctx;
}

static void watch_death(void *ctx, const char *why) {
  (void)ctx;
  (void)why;
  fail();
}

static void watch_state(void *ctx, td_backend_state state) {
  watch *s = ctx;
  if (state == TD_BACKEND_READY && !s->was_stuck) {
    td_wire_msg msg = {.kind = TD_MSG_SUBMIT,
                       .request = 1,
                       .u.submit = {.n_prompt = 2, .max_tokens = 1, .n_pages = 1}};
    assert_int_equal(td_supervisor_send(s->supervisor, &msg), TD_OK);
    msg = (td_wire_msg){.kind = TD_MSG_PAGES, .request = 1, .u.pages = {.n = 1}};
    assert_int_equal(td_supervisor_send(s->supervisor, &msg), TD_OK);
    msg = (td_wire_msg){
        .kind = TD_MSG_TOKENS, .request = 1, .u.tokens = {.n = 2, .ids = {HANG, 2}}};
    assert_int_equal(td_supervisor_send(s->supervisor, &msg), TD_OK);
  }
  if (state == TD_BACKEND_STUCK) s->was_stuck = true;
  if (state == TD_BACKEND_READY && s->was_stuck) s->is_back = true;
}

static bool is_back(void *ctx) {
  return ((watch *)ctx)->is_back;
}

static void test_stuck_and_back(void **state) {
  (void)state;
  world w = {0};
  watch s = {0};
  td_err err;
  uv_loop_init(&w.loop);
  int kv_fd;
  assert_int_equal(td_kv_pool_create(&kv_fd, &err), TD_OK);
  const td_supervisor_opts opts = {
      .kv_fd = kv_fd,
      .worker = {.model_dir = "model", .device = "cpu", .max_batch = 1, .prefill_chunk = 16},
      .stuck_ns = 1500000000u,
      .kill_ns = 60000000000u,
      .on_ready = watch_ready,
      .on_record = watch_record,
      .on_space = watch_space,
      .on_death = watch_death,
      .on_state = watch_state,
      .ctx = &s};
  assert_int_equal(td_supervisor_open(&s.supervisor, &w.loop, &opts, &err), TD_OK);
  run_until(&w, is_back, &s);
  td_supervisor_close(s.supervisor, on_closed, &w);
  uv_run(&w.loop, UV_RUN_DEFAULT);
  assert_true(w.is_closed);
  assert_int_equal(uv_loop_close(&w.loop), 0);
  close(kv_fd);
}

int main(int argc, char **argv) {
  if (argc > 1 && strcmp(argv[1], "worker") == 0) return td_worker_main(argc, argv);
  const struct CMUnitTest alone[] = {cmocka_unit_test(test_stuck_and_back)};
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_a_hundred_at_once),
      cmocka_unit_test(test_ends_of_an_answer),
      cmocka_unit_test(test_the_queue_is_bounded),
      cmocka_unit_test(test_full_rings),
      cmocka_unit_test(test_cancel_in_every_phase),
      cmocka_unit_test(test_death_in_mid_stream),
      cmocka_unit_test(test_replay_before_the_first_token),
      cmocka_unit_test(test_an_answer_outlives_its_worker),
      cmocka_unit_test(test_one_death_is_not_the_others),
      cmocka_unit_test(test_cancel_at_the_hand_over),
      cmocka_unit_test(test_engine_failure),
      cmocka_unit_test(test_failures_to_start),
      cmocka_unit_test(test_close_with_requests),
      cmocka_unit_test(test_close_while_loading),
      cmocka_unit_test(test_worker_dies_with_the_front),
  };
  const struct CMUnitTest own_pages[] = {
      cmocka_unit_test(test_cancel_in_every_phase),
      cmocka_unit_test(test_death_in_mid_stream),
      cmocka_unit_test(test_replay_before_the_first_token),
      cmocka_unit_test(test_an_answer_outlives_its_worker),
      cmocka_unit_test(test_an_answer_outlives_its_pages),
  };
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  int n_failed = cmocka_run_group_tests_name("supervisor", alone, NULL, NULL) +
                 cmocka_run_group_tests_name("one worker", tests, NULL, NULL);
  device = "cuda";
  n_failed += cmocka_run_group_tests_name("one worker with its own pages", own_pages, NULL, NULL);
  device = "cpu";
  is_split = true;
  return n_failed + cmocka_run_group_tests_name("two workers", tests, NULL, NULL);
}
