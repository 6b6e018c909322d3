// tests/unit/test_backend.c - backend and workers with real processes and a simulated engine
// (backend_testing.h).
// CTest: slow
#include "backend_testing.h"

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

// Neither waits for the other's end.
static void test_a_prompt_beside_an_answer(void **state) {
  (void)state;
  enum { PROMPT = 2000 };
  static int32_t prompt[PROMPT];
  static client stream, c;
  const int32_t plain[] = {5, 6, 7};
  setenv("TANDEM_TEST_STEP_US", "500", 1);
  world w;
  world_ready(&w, 8192, 4);
  stream = c = (client){.backend = w.backend};
  make_prompt(prompt, PROMPT, 4);
  assert_int_equal(submit(&stream, plain, 3, MAX_ANSWER), TD_OK);
  run_until(&w, has_begun, &stream);
  uint32_t n_before = stream.n;
  assert_int_equal(submit(&c, prompt, PROMPT, 5), TD_OK);
  run_until(&w, is_done, &c);
  check_answer(&c, prompt, PROMPT, 5);
  assert_int_equal(stream.n_done, 0);
  // Of one worker every step writes, and reads 100 tokens at most.
  assert_true(is_split || stream.n >= n_before + PROMPT / 100);
  check_answer(&stream, plain, 3, stream.n);
  stream.is_canceled = true;
  td_backend_cancel(w.backend, stream.id);
  run_until(&w, is_idle, &w);
  unsetenv("TANDEM_TEST_STEP_US");
  world_close(&w);
}

static void submit_of(client *c, uint64_t tenant, const int32_t *prompt, uint32_t n_prompt) {
  const td_request request = {
      .prompt = prompt, .n_prompt = n_prompt, .max_tokens = 1, .tenant = tenant};
  const td_request_callbacks callbacks = {
      .on_progress = on_progress, .on_token = on_token, .on_done = on_done, .ctx = c};
  td_err err;
  assert_int_equal(td_backend_submit(c->backend, &request, &callbacks, &c->id, &err), TD_OK);
}

// Prompts of several tenants take turns, chunk by chunk; short ones do not wait for long ones.
static void test_prompts_of_several_tenants(void **state) {
  (void)state;
  enum { LONG = 20000 };
  static int32_t first[LONG], second[LONG / 2];
  static client c[2], shorts[3];
  setenv("TANDEM_TEST_STEP_US", "3000", 1);
  world w;
  world_ready(&w, 2 * LONG, 4);
  make_prompt(first, LONG, 4);
  make_prompt(second, LONG / 2, 5);
  c[0] = c[1] = (client){.backend = w.backend};
  submit_of(&c[0], 1, first, LONG);
  while (!c[0].n_progress)
    uv_run(&w.loop, UV_RUN_ONCE);
  submit_of(&c[1], 2, second, LONG / 2);
  for (int i = 0; i < 3; i++) {
    shorts[i] = (client){.backend = w.backend};
    submit_of(&shorts[i], 3, second + 1 + i, 12);
    run_until(&w, is_done, &shorts[i]);
    check_answer(&shorts[i], second + 1 + i, 12, 1);
  }
  assert_in_range(c[0].n_progress, 1, 50);
  run_until(&w, is_done, &c[1]);
  check_answer(&c[1], second, LONG / 2, 1);
  assert_int_equal(c[0].n_done, 0);
  assert_in_range(c[0].n_progress, 80, 130);
  run_until(&w, is_done, &c[0]);
  check_answer(&c[0], first, LONG, 1);
  unsetenv("TANDEM_TEST_STEP_US");
  world_close(&w);
}

// Cancels c and tells how often the worker had stepped it.
static uint32_t cancel_at_step(client *c, int32_t first_token) {
  assert_int_equal(c->n_done, 0);
  c->is_canceled = true;
  uint32_t n = atomic_load(steps_of(first_token));
  td_backend_cancel(c->backend, c->id);
  return n;
}

static bool has_read_some(void *ctx) {
  return ((client *)ctx)->n_progress > 2;
}

static bool has_made_room(void *ctx) {
  return td_backend_n_preemptions(((client *)ctx)->backend) > 0;
}

static bool waits_behind_others(void *ctx) {
  return td_backend_n_waiting(((client *)ctx)->backend) > 0;
}

typedef struct {
  bool (*until)(void *client);
  uint32_t n_prompt;
  uint32_t n_others; // that come before it
  uint32_t n_max;    // steps
} cancel_phase;

// After the call there is at most the step that had begun, or was about to.
static void check_cancel(world *w, const cancel_phase *phase, int32_t first_token) {
  enum { ANSWER = 200 };
  static int32_t prompt[3000];
  static client others[2];
  for (uint32_t j = 0; j < phase->n_others; j++) {
    others[j] = (client){.backend = w->backend};
    assert_int_equal(submit(&others[j], (int32_t[]){(int32_t)(800 + j), 1}, 2, ANSWER), TD_OK);
    run_until(w, has_begun, &others[j]);
  }
  make_prompt(prompt, phase->n_prompt, (uint32_t)first_token);
  prompt[0] = first_token;
  client c = {.backend = w->backend};
  assert_int_equal(submit(&c, prompt, phase->n_prompt, 100), TD_OK);
  run_until(w, phase->until, &c);
  uint32_t n_before = cancel_at_step(&c, first_token);
  run_until(w, is_idle, w);
  assert_true(n_before > 0 || phase->until == waits_behind_others);
  assert_in_range(atomic_load(steps_of(first_token)), n_before, n_before + phase->n_max);
  for (uint32_t j = 0; j < phase->n_others; j++)
    check_answer(&others[j], (int32_t[]){(int32_t)(800 + j), 1}, 2, ANSWER);
  assert_true(td_backend_kv_use(w->backend) == 0);
}

static void test_cancel_takes_one_step(void **state) {
  (void)state;
  static const cancel_phase phases[] = {{waits_behind_others, 50, 2, 0},
                                        {has_read_some, 3000, 1, 1},
                                        {has_begun, 150, 0, 1}, // with two workers: between them
                                        {has_begun, 150, 1, 1}};
  static const cancel_phase put_aside = {has_made_room, 150, 1, 0};
  char path[32];
  make_fuse(path);
  unsetenv("TANDEM_TEST_FUSE");
  setenv("TANDEM_TEST_STEPS", path, 1);
  setenv("TANDEM_TEST_STEP_US", "1000", 1);
  world w;
  world_ready(&w, 4096, 2);
  for (size_t i = 0; i < TD_COUNT(phases); i++)
    check_cancel(&w, &phases[i], (int32_t)(700 + i));
  world_close(&w);
  kv_tokens = 320;
  world_ready(&w, 256, 2);
  kv_tokens = 0;
  check_cancel(&w, &put_aside, 750);
  world_close(&w);
  unsetenv("TANDEM_TEST_STEP_US");
  unsetenv("TANDEM_TEST_STEPS");
  assert_int_equal(unlink(path), 0);
}

static void test_death_in_mid_stream(void **state) {
  (void)state;
  world w;
  world_ready(&w, 512, 1);
  const int32_t deadly[] = {DIE, 20, 3}, harmless[] = {1, 2, 3};
  client victim = {.backend = w.backend}, next = {.backend = w.backend};
  client later = {.backend = w.backend};
  assert_int_equal(submit(&victim, deadly, 3, 100), TD_OK);
  assert_int_equal(submit(&next, harmless, 3, 10), TD_OK); // waits after it, and survives
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
  // It was tried once more after its last token.
  const td_backend_state states[] = {TD_BACKEND_READY, TD_BACKEND_LOADING, TD_BACKEND_READY,
                                     TD_BACKEND_LOADING, TD_BACKEND_READY};
  assert_int_equal(w.n_states, 5);
  assert_memory_equal(w.states, states, sizeof states);
  world_close(&w);
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

// What was computed lies in the pool: generation goes on after its last token.
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

// Of many that a worker had when one killed it, that one alone is to crash_score.
static void test_the_poison_alone_is_blamed(void **state) {
  (void)state;
  enum { N = 6 };
  static const int32_t plain[] = {5, 6, 7}, deadly[] = {DIE, 12, 3};
  static client clients[N];
  world w;
  setenv("TANDEM_TEST_STEP_US", "1000", 1);
  world_ready(&w, 512, N);
  for (int i = 0; i < N; i++) {
    clients[i] = (client){.backend = w.backend};
    assert_int_equal(submit(&clients[i], i == 2 ? deadly : plain, 3, 60 + (uint32_t)i), TD_OK);
  }
  run_until(&w, is_done, &clients[2]);
  client late = {.backend = w.backend};
  assert_int_equal(submit(&late, plain, 3, 10), TD_OK);
  run_until(&w, is_idle, &w);
  assert_int_equal(clients[2].done.reason, TD_DONE_LOST);
  assert_int_equal(clients[2].n, 12 - 3);
  for (int i = 0; i < N; i++) {
    if (i != 2) check_answer(&clients[i], plain, 3, 60 + (uint32_t)i);
  }
  check_answer(&late, plain, 3, 10);
  td_backend_worker workers[TD_BACKEND_MAX_WORKERS];
  uint32_t n = td_backend_workers(w.backend, workers);
  assert_int_equal(workers[0].n_restarts + (n > 1 ? workers[1].n_restarts : 0), 2);
  unsetenv("TANDEM_TEST_STEP_US");
  world_close(&w);
}

// The same while prompts are read, two of them poisoned.
static void test_two_poisons_among_prompts(void **state) {
  (void)state;
  if (!is_split) skip();
  enum { N = 8, PROMPT = 250 };
  static int32_t prompts[N][PROMPT];
  static client clients[N];
  world w;
  world_ready(&w, 512, N);
  for (int i = 0; i < N; i++) {
    make_prompt(prompts[i], PROMPT, (uint32_t)i);
    if (i == 1 || i == 5) prompts[i][0] = DIE;
    if (i == 1 || i == 5) prompts[i][1] = PROMPT;
    clients[i] = (client){.backend = w.backend};
    assert_int_equal(submit(&clients[i], prompts[i], PROMPT, 20), TD_OK);
  }
  run_until(&w, is_idle, &w);
  for (int i = 0; i < N; i++) {
    if (i == 1 || i == 5) {
      assert_int_equal(clients[i].done.reason, TD_DONE_LOST);
    } else {
      check_answer(&clients[i], prompts[i], PROMPT, 20);
    }
  }
  assert_true(td_backend_kv_use(w.backend) == 0);
  td_backend_worker workers[TD_BACKEND_MAX_WORKERS];
  td_backend_workers(w.backend, workers);
  // Two each, and a third where reading got further in between.
  assert_in_range(workers[0].n_restarts, 2, 6);
  world_close(&w);
}

// Nobody listens after the first token: neither worker keeps the request, nor its pages.
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

// Answers in a pool that holds a third of them: some make room for others and go on later, some of
// those are canceled, workers die meanwhile; whoever stays gets the text that it gets alone.
static void test_answers_make_room(void **state) {
  (void)state;
  enum { N = 12 };
  static client clients[N];
  static int32_t prompts[N][200];
  char fuse[32];
  make_fuse(fuse);
  kv_tokens = 1024;
  world w;
  world_ready(&w, 512, 6);
  kv_tokens = 0;
  for (uint32_t i = 0; i < N; i++) {
    clients[i] = (client){.backend = w.backend, .cancel_at = i % 4 == 3 ? 150 : 0};
    make_prompt(prompts[i], 200, i % 2); // every second begins alike
    if (i == 2) memcpy(prompts[i], (int32_t[]){DIE_ONCE, 400}, 2 * sizeof(int32_t));
    prompts[i][130] = (int32_t)i;
    assert_int_equal(submit(&clients[i], prompts[i], 140 + 5 * i, 300), TD_OK);
  }
  run_until(&w, is_idle, &w);
  for (uint32_t i = 0; i < N; i++) {
    assert_int_equal(clients[i].n_done, !clients[i].cancel_at);
    check_answer(&clients[i], prompts[i], 140 + 5 * i, clients[i].cancel_at ? 150 : 300);
    if (clients[i].n_done) assert_true(clients[i].done.n_cached <= 128);
  }
  assert_int_equal(access(fuse, F_OK), -1);             // it did die
  assert_true(td_backend_n_preemptions(w.backend) > 0); // how many hangs on who is slow
  assert_true(td_backend_kv_use(w.backend) == 0);
  unsetenv("TANDEM_TEST_FUSE");
  world_close(&w);
}

// Runs until one of the clients' requests is in that state, and cancels it.
static client *cancel_one_in(world *w, client *clients, uint32_t n, td_request_state state) {
  for (;;) {
    for (uint32_t i = 0; i < n; i++) {
      const td_front_request *r = td_backend_find(w->backend, clients[i].id);
      if (!r || r->out.state != state) continue;
      clients[i].is_canceled = true;
      td_backend_cancel(w->backend, clients[i].id);
      return &clients[i];
    }
    if (is_idle(w)) fail_msg("no request was %s", td_request_state_name(state));
    uv_run(&w->loop, UV_RUN_ONCE);
  }
}

// Canceled while its worker is asked to drop it: it is not queued again.
static void test_cancel_of_the_preempted(void **state) {
  (void)state;
  enum { N = 6 };
  static client clients[N];
  static int32_t prompts[N][140];
  setenv("TANDEM_TEST_STEP_US", "1000", 1);
  kv_tokens = 1024;
  world w;
  world_ready(&w, 512, N);
  kv_tokens = 0;
  for (uint32_t i = 0; i < N; i++) {
    clients[i] = (client){.backend = w.backend};
    make_prompt(prompts[i], 140, i);
    assert_int_equal(submit(&clients[i], prompts[i], 140, 200), TD_OK);
  }
  const client *canceled = cancel_one_in(&w, clients, N, TD_REQUEST_RECALLED);
  run_until(&w, is_idle, &w);
  for (uint32_t i = 0; i < N; i++) {
    assert_int_equal(clients[i].n_done, &clients[i] != canceled);
    if (&clients[i] != canceled) check_answer(&clients[i], prompts[i], 140, 200);
  }
  assert_true(td_backend_kv_use(w.backend) == 0);
  unsetenv("TANDEM_TEST_STEP_US");
  world_close(&w);
}

// Canceled while it is held back after a crash: nothing of it is sent.
static void test_cancel_of_the_held(void **state) {
  (void)state;
  enum { N = 6 };
  static const int32_t plain[] = {5, 6, 7}, deadly[] = {DIE, 12, 3};
  static client clients[N];
  world w;
  setenv("TANDEM_TEST_STEP_US", "1000", 1);
  world_ready(&w, 512, N);
  for (uint32_t i = 0; i < N; i++) {
    clients[i] = (client){.backend = w.backend};
    assert_int_equal(submit(&clients[i], i == 0 ? deadly : plain, 3, 60), TD_OK);
  }
  const client *canceled = cancel_one_in(&w, clients + 1, N - 1, TD_REQUEST_HELD);
  run_until(&w, is_idle, &w);
  assert_int_equal(clients[0].done.reason, TD_DONE_LOST);
  for (uint32_t i = 1; i < N; i++) {
    assert_int_equal(clients[i].n_done, &clients[i] != canceled);
    if (&clients[i] != canceled) check_answer(&clients[i], plain, 3, 60);
  }
  assert_true(td_backend_kv_use(w.backend) == 0);
  unsetenv("TANDEM_TEST_STEP_US");
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

int main(int argc, char **argv) {
  if (argc > 1 && strcmp(argv[1], "worker") == 0) return td_worker_main(argc, argv);
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_a_hundred_at_once),
      cmocka_unit_test(test_ends_of_an_answer),
      cmocka_unit_test(test_the_queue_is_bounded),
      cmocka_unit_test(test_full_rings),
      cmocka_unit_test(test_cancel_in_every_phase),
      cmocka_unit_test(test_a_prompt_beside_an_answer),
      cmocka_unit_test(test_prompts_of_several_tenants),
      cmocka_unit_test(test_cancel_takes_one_step),
      cmocka_unit_test(test_death_in_mid_stream),
      cmocka_unit_test(test_replay_before_the_first_token),
      cmocka_unit_test(test_an_answer_outlives_its_worker),
      cmocka_unit_test(test_one_death_is_not_the_others),
      cmocka_unit_test(test_the_poison_alone_is_blamed),
      cmocka_unit_test(test_two_poisons_among_prompts),
      cmocka_unit_test(test_cancel_at_the_hand_over),
      cmocka_unit_test(test_answers_make_room),
      cmocka_unit_test(test_cancel_of_the_preempted),
      cmocka_unit_test(test_cancel_of_the_held),
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
      cmocka_unit_test(test_answers_make_room),
      cmocka_unit_test(test_the_poison_alone_is_blamed),
  };
  if (argc > 1) cmocka_set_test_filter(argv[1]);
  int n_failed = cmocka_run_group_tests_name("one worker", tests, NULL, NULL);
  device = "cuda";
  n_failed += cmocka_run_group_tests_name("one worker with its own pages", own_pages, NULL, NULL);
  device = "cpu";
  is_split = true;
  return n_failed + cmocka_run_group_tests_name("two workers", tests, NULL, NULL);
}
