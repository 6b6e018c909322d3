// tests/unit/test_lane.c - whose work is next, without threads; and on libuv's pool: threads stay
// free for others, work can be canceled, and ends when it has used its time.

#include <stdlib.h>

#include "base/status.h"
#include "front/lane.h"
#include "unit/testing.h"

enum { N_WORKS = 64, SHORT = 100, SLOW = TD_LANE_SLOW_BYTES, LARGE = TD_LANE_LARGE_BYTES };
enum { FLOOD = 1, POLITE = 2 };
#define MS ((uint64_t)1000000)

static struct {
  uv_loop_t loop;
  td_lane lane;
  td_lane_work works[N_WORKS];
  unsigned n_works;
} t;

static int set_up(void **state) {
  (void)state;
  td_err err;
  t.n_works = 0;
  assert_int_equal(uv_loop_init(&t.loop), 0);
  assert_int_equal(td_lane_open(&t.lane, &t.loop, &err), TD_OK);
  return 0;
}

static int tear_down(void **state) {
  (void)state;
  td_lane_close(&t.lane);
  uv_run(&t.loop, UV_RUN_DEFAULT);
  assert_int_equal(uv_loop_close(&t.loop), 0);
  return 0;
}

static td_lane_work *add(uint64_t tenant, size_t n_bytes) {
  assert_true(t.n_works < N_WORKS);
  td_lane_work *w = &t.works[t.n_works++];
  *w = (td_lane_work){.tenant = tenant, .weight = 1, .n_bytes = n_bytes};
  td_lane_enter(&t.lane, w);
  return w;
}

// ---- the choice ---------------------------------------------------------------------------------

TEST(a_flood_costs_others_one_item, set_up, tear_down) {
  static const size_t sizes[] = {SHORT, SLOW, LARGE};
  for (size_t i = 0; i < TD_COUNT(sizes); i++) {
    td_lane_work *first[TD_LANE_MAX_RUNNING] = {0}, *next, *last = NULL;
    for (unsigned k = 0; k < 8; k++)
      last = add(FLOOD, sizes[i]);
    unsigned n = 0;
    while ((next = td_lane_next(&t.lane)) != NULL)
      first[n++] = next;
    assert_int_equal(n, sizes[i] == LARGE ? 1 : TD_LANE_MAX_OF_KIND);
    td_lane_work *polite = add(POLITE, sizes[i]);
    td_lane_end(first[0], 2000 * MS);
    assert_ptr_equal(td_lane_next(&t.lane), polite);
    td_lane_end(polite, 1 * MS);
    // It was idle, comes again before the flood is through, and waits for one item again.
    first[0] = td_lane_next(&t.lane);
    assert_int_equal(first[0]->tenant, FLOOD);
    polite = add(POLITE, sizes[i]);
    td_lane_end(first[n - 1], 2000 * MS);
    assert_ptr_equal(td_lane_next(&t.lane), polite);
    td_lane_end(polite, 1 * MS);
    if (n > 1) td_lane_end(first[0], 2000 * MS);
    while ((next = td_lane_next(&t.lane)) != NULL)
      td_lane_end(next, 2000 * MS);
    assert_int_equal(last->state, TD_LANE_OUTSIDE);
  }
}

// Both always have work; an item of one costs ten of the other's.
TEST(tenants_share_time, set_up, tear_down) {
  enum { N_ROUNDS = 2200 };
  static const uint64_t cost_ns[] = {[FLOOD] = 10 * MS, [POLITE] = 1 * MS};
  unsigned n_run[3] = {0};
  td_lane_work *running[2] = {0};
  for (unsigned k = 0; k < 3; k++) {
    add(FLOOD, SLOW);
    add(POLITE, SLOW);
  }
  for (unsigned i = 0; i < TD_COUNT(running); i++)
    running[i] = td_lane_next(&t.lane);
  for (unsigned round = 0; round < N_ROUNDS; round++) {
    td_lane_work **w = &running[round % TD_COUNT(running)];
    n_run[(*w)->tenant]++;
    td_lane_end(*w, cost_ns[(*w)->tenant]);
    td_lane_enter(&t.lane, *w);
    *w = td_lane_next(&t.lane);
    assert_non_null(*w);
  }
  assert_in_range(n_run[FLOOD], N_ROUNDS / 11 - 4, N_ROUNDS / 11 + 4);
  for (unsigned i = 0; i < TD_COUNT(running); i++)
    td_lane_end(running[i], 0);
  for (td_lane_work *w; (w = td_lane_next(&t.lane)) != NULL;)
    td_lane_end(w, 0);
}

TEST(short_work_does_not_wait_for_slow, set_up, tear_down) {
  td_lane_work *slow[4], *running[3];
  for (unsigned i = 0; i < TD_COUNT(slow); i++)
    slow[i] = add(FLOOD, i < 2 ? LARGE : SLOW);
  running[0] = td_lane_next(&t.lane);
  assert_ptr_equal(running[0], slow[0]);
  assert_null(td_lane_next(&t.lane)); // large: one at a time
  td_lane_work *quick = add(FLOOD, SHORT);
  assert_ptr_equal(td_lane_next(&t.lane), quick);
  td_lane_end(quick, MS);
  td_lane_end(running[0], MS);
  running[0] = td_lane_next(&t.lane);
  assert_ptr_equal(running[0], slow[1]);
  running[1] = td_lane_next(&t.lane);
  assert_ptr_equal(running[1], slow[2]);
  assert_null(td_lane_next(&t.lane)); // slow: half of the pool's threads
  running[2] = add(FLOOD, SHORT);
  quick = add(POLITE, SHORT);
  assert_ptr_equal(td_lane_next(&t.lane), quick);
  assert_null(td_lane_next(&t.lane)); // one thread is for files
  td_lane_end(quick, MS);
  assert_ptr_equal(td_lane_next(&t.lane), running[2]);
  for (unsigned i = 0; i < TD_COUNT(running); i++)
    td_lane_end(running[i], MS);
  assert_ptr_equal(td_lane_next(&t.lane), slow[3]);
  td_lane_end(slow[3], MS);
}

TEST(what_waits_can_be_taken_back, set_up, tear_down) {
  td_lane_work *w[6];
  for (unsigned i = 0; i < TD_COUNT(w); i++)
    w[i] = add(FLOOD, LARGE);
  assert_ptr_equal(td_lane_next(&t.lane), w[0]);
  assert_true(td_lane_cancel(w[1])); // the first that waits, one between, the last
  assert_true(td_lane_cancel(w[3]));
  assert_true(td_lane_cancel(w[5]));
  assert_false(td_lane_cancel(w[0])); // it runs: it is told
  assert_true(w[0]->is_canceled);
  td_lane_end(w[0], MS);
  assert_ptr_equal(td_lane_next(&t.lane), w[2]);
  td_lane_end(w[2], MS);
  w[5]->is_canceled = false;
  td_lane_enter(&t.lane, w[5]);
  assert_ptr_equal(td_lane_next(&t.lane), w[4]);
  td_lane_end(w[4], MS);
  assert_ptr_equal(td_lane_next(&t.lane), w[5]);
  td_lane_end(w[5], MS);
  assert_null(td_lane_next(&t.lane));
}

// As many tenants as wish, each with a number of any size.
TEST(any_number_of_tenants, set_up, tear_down) {
  for (uint64_t i = 0; i < 100000; i++) {
    t.n_works = 0;
    td_lane_work *w = add(i * 0x9e3779b97f4a7c15u, SHORT);
    assert_ptr_equal(td_lane_next(&t.lane), w);
    td_lane_end(w, MS);
  }
}

// ---- on the pool --------------------------------------------------------------------------------

static struct {
  uv_sem_t may_end; // posted once for each work
  uv_mutex_t lock;
  unsigned n_running, max_running; // guarded by lock
  unsigned n_done, n_canceled, n_stopped;
} p;

static void wait_for_leave(uv_work_t *work) {
  (void)work;
  uv_mutex_lock(&p.lock);
  if (++p.n_running > p.max_running) p.max_running = p.n_running;
  uv_mutex_unlock(&p.lock);
  uv_sem_wait(&p.may_end);
  uv_mutex_lock(&p.lock);
  p.n_running--;
  uv_mutex_unlock(&p.lock);
}

static void note_done(uv_work_t *work, int status) {
  td_lane_work *w = work->data;
  p.n_done++;
  p.n_canceled += status == UV_ECANCELED;
  assert_int_equal(w->state, TD_LANE_OUTSIDE);
  free(w);
}

static td_lane_work *queue(uv_work_cb run, size_t n_bytes) {
  td_lane_work *w = calloc(1, sizeof *w);
  assert_non_null(w);
  *w = (td_lane_work){.work.data = w, .run = run, .after = note_done, .n_bytes = n_bytes};
  td_lane_queue(&t.lane, w);
  return w;
}

static void nothing(uv_work_t *work) {
  (void)work;
}

// Gets its turn while the lane is full and nothing in it has ended.
static void let_all_end(uv_work_t *work, int status) {
  (void)work;
  assert_int_equal(status, 0);
  assert_int_equal(p.n_done, 0);
  for (unsigned i = 0; i < N_WORKS; i++)
    uv_sem_post(&p.may_end);
}

static void open_pool(void) {
  p.n_done = p.n_canceled = p.n_stopped = p.max_running = 0;
  assert_int_equal(uv_sem_init(&p.may_end, 0), 0);
  assert_int_equal(uv_mutex_init(&p.lock), 0);
}

static void run_pool(void) {
  uv_run(&t.loop, UV_RUN_DEFAULT);
  uv_mutex_destroy(&p.lock);
  uv_sem_destroy(&p.may_end);
}

TEST(others_get_their_turn, set_up, tear_down) {
  open_pool();
  for (unsigned i = 0; i < N_WORKS; i++)
    queue(wait_for_leave, i % 2 ? SLOW : SHORT);
  uv_work_t other;
  assert_int_equal(uv_queue_work(&t.loop, &other, nothing, let_all_end), 0);
  run_pool();
  assert_int_equal(p.n_done, N_WORKS);
  assert_int_equal(p.n_canceled, 0);
  assert_true(p.max_running <= TD_LANE_MAX_RUNNING);
}

static void note_stopped(td_lane *lane) {
  p.n_stopped++;
  assert_ptr_equal(lane, &t.lane);
  assert_int_equal(p.n_done, N_WORKS);
}

static void wait_until_canceled(uv_work_t *work) {
  const td_lane_work *w = work->data;
  while (!atomic_load(&w->is_canceled)) {
  }
}

// What runs ends by itself once it is told; only these were run.
TEST(a_stop_drops_what_waits, set_up, tear_down) {
  open_pool();
  for (unsigned i = 1; i < N_WORKS; i++)
    queue(wait_until_canceled, SLOW);
  td_lane_stop(&t.lane, note_stopped);
  assert_int_equal(p.n_canceled, N_WORKS - 1 - TD_LANE_MAX_OF_KIND);
  queue(nothing, SHORT);
  assert_int_equal(p.n_canceled, N_WORKS - TD_LANE_MAX_OF_KIND);
  assert_int_equal(p.n_stopped, 0);
  run_pool();
  assert_int_equal(p.n_stopped, 1);
}

static void note_over(uv_work_t *work, int status) {
  td_lane_work *w = work->data;
  assert_true(w->is_over);
  note_done(work, status);
}

TEST(what_has_used_its_time_ends, set_up, tear_down) {
  open_pool();
  t.lane.max_cpu_ns = 0;
  queue(wait_until_canceled, SLOW)->after = note_over;
  run_pool();
  assert_int_equal(p.n_done, 1);
}
