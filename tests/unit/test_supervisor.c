// tests/unit/test_supervisor.c - supervision of real processes with a simulated engine
// (backend_testing.h): steps that hang or are long, starts that fail, ends that do not come.
// CTest: slow
#include "backend_testing.h"

typedef struct {
  td_supervisor *supervisor;
  int32_t how; // HANG or TOIL
  bool was_stuck, is_back, has_answer;
} watch;

static td_status watch_ready(void *ctx, const td_wire_ready *info, td_err *err) {
  (void)ctx;
  (void)info;
  (void)err;
  return TD_OK;
}

static void watch_record(void *ctx, const td_wire_msg *msg) {
  if (msg->kind == TD_MSG_DONE) ((watch *)ctx)->has_answer = true;
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
        .kind = TD_MSG_TOKENS, .request = 1, .u.tokens = {.n = 2, .ids = {s->how, 2}}};
    assert_int_equal(td_supervisor_send(s->supervisor, &msg), TD_OK);
  }
  if (state == TD_BACKEND_STUCK) s->was_stuck = true;
  if (state == TD_BACKEND_READY && s->was_stuck) s->is_back = true;
}

static bool has_answer(void *ctx) {
  return ((watch *)ctx)->has_answer;
}

static watch watch_one(int32_t how) {
  world w = {0};
  watch s = {.how = how};
  td_err err;
  uv_loop_init(&w.loop);
  int kv_fd;
  assert_int_equal(td_kv_pool_create(&kv_fd, &err), TD_OK);
  const td_supervisor_opts opts = {.kv_fd = kv_fd,
                                   .worker = {.runtime = {.model_dir = "model",
                                                          .device = "cpu",
                                                          .devices = "0",
                                                          .expert_cache = "off",
                                                          .prefill_chunk = 16},
                                              .max_batch = 1},
                                   .stuck_ns = 1500000000u,
                                   .kill_ns = 60000000000u,
                                   .on_ready = watch_ready,
                                   .on_record = watch_record,
                                   .on_space = watch_space,
                                   .on_death = watch_death,
                                   .on_state = watch_state,
                                   .ctx = &s};
  assert_int_equal(td_supervisor_open(&s.supervisor, &w.loop, &opts, &err), TD_OK);
  run_until(&w, has_answer, &s);
  td_supervisor_close(s.supervisor, on_closed, &w);
  uv_run(&w.loop, UV_RUN_DEFAULT);
  assert_true(w.is_closed);
  assert_int_equal(uv_loop_close(&w.loop), 0);
  close(kv_fd);
  return s;
}

TEST(stuck_and_back) {
  watch s = watch_one(HANG);
  assert_true(s.was_stuck);
  assert_true(s.is_back);
}

TEST(a_long_step_is_not_a_hang) {
  assert_false(watch_one(TOIL).was_stuck);
}

// What a worker lacks to start again may be there a second later.
TEST(starts_that_fail_for_a_while) {
  char fuse[32], fails[32];
  make_fuse(fails);
  setenv("TANDEM_TEST_FAILS", fails, 1);
  make_fuse(fuse);
  world w;
  world_ready(&w, 512, 2);
  assert_int_equal(truncate(fails, 4), 0);
  const int32_t prompt[] = {DIE_ONCE, 8, 3};
  client c = {.backend = w.backend};
  assert_int_equal(submit(&c, prompt, 3, 10), TD_OK);
  run_until(&w, is_done, &c);
  assert_int_equal(c.done.reason, TD_DONE_LENGTH);
  check_answer(&c, prompt, 3, 10);
  td_backend_worker workers[TD_BACKEND_MAX_WORKERS];
  assert_int_equal(td_backend_workers(w.backend, workers), 1);
  assert_int_equal(workers[0].n_restarts, 5);
  unsetenv("TANDEM_TEST_FUSE");
  unsetenv("TANDEM_TEST_FAILS");
  unlink(fails);
  world_close(&w);
}

// A worker that stands still before READY is started again; if that goes on, requests end with an
// error and the server is told.
TEST(starts_that_hang) {
  char fuse[32], fails[32];
  make_fuse(fails);
  setenv("TANDEM_TEST_FAILS", fails, 1);
  stuck_after_s = 1;
  const int32_t prompt[] = {DIE_ONCE, 8, 3};
  for (uint32_t n_hangs = 1; n_hangs <= 3; n_hangs += 2) {
    make_fuse(fuse);
    world w;
    world_ready(&w, 512, 2);
    int fd = open(fails, O_WRONLY);
    assert_int_equal(write(fd, "sss", n_hangs), n_hangs);
    close(fd);
    client c = {.backend = w.backend};
    assert_int_equal(submit(&c, prompt, 3, 10), TD_OK);
    run_until(&w, is_done, &c);
    td_backend_worker workers[TD_BACKEND_MAX_WORKERS];
    assert_int_equal(td_backend_workers(w.backend, workers), 1);
    assert_int_equal(workers[0].n_restarts, n_hangs == 1 ? 2 : 3);
    assert_int_equal(c.done.reason, n_hangs == 1 ? TD_DONE_LENGTH : TD_DONE_LOST);
    if (n_hangs == 1) check_answer(&c, prompt, 3, 10);
    if (n_hangs == 3) assert_int_equal(td_backend_state_of(w.backend), TD_BACKEND_FAILED);
    world_close(&w);
  }
  stuck_after_s = 0;
  unsetenv("TANDEM_TEST_FUSE");
  unsetenv("TANDEM_TEST_FAILS");
  unlink(fails);
}

static bool has_reason(void *ctx) {
  td_backend_worker workers[TD_BACKEND_MAX_WORKERS];
  assert_int_equal(td_backend_workers(ctx, workers), 1);
  return workers[0].reason[0] != '\0';
}

// One that does not end though it is killed is told of, and replaced when it has ended.
TEST(a_process_that_does_not_end) {
  char fuse[32];
  stuck_after_s = 1;
  make_fuse(fuse);
  const int32_t prompt[] = {LINGER, 3, 3};
  world w;
  world_ready(&w, 512, 2);
  client c = {.backend = w.backend};
  assert_int_equal(submit(&c, prompt, 3, 10), TD_OK);
  run_until(&w, has_reason, w.backend);
  td_backend_worker workers[TD_BACKEND_MAX_WORKERS];
  td_backend_workers(w.backend, workers);
  assert_int_equal(workers[0].state, TD_BACKEND_STUCK);
  assert_int_equal(workers[0].n_restarts, 0);
  assert_non_null(strstr(workers[0].reason, "was killed"));
  assert_int_equal(td_backend_state_of(w.backend), TD_BACKEND_STUCK);
  unlink(fuse);
  run_until(&w, is_done, &c);
  check_answer(&c, prompt, 3, 10);
  td_backend_workers(w.backend, workers);
  assert_int_equal(workers[0].n_restarts, 1);
  assert_string_equal(workers[0].reason, "");
  world_close(&w);
  stuck_after_s = 0;
  unsetenv("TANDEM_TEST_FUSE");
}

int main(int argc, char **argv) {
  if (argc > 1 && strcmp(argv[1], "worker") == 0) return td_worker_main(argc, argv);
  return testing_main(argc, argv);
}
