// tests/unit/test_lane.c - work in a lane leaves threads of the pool to others, and goes in order.
#include <setjmp.h>

#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <stdlib.h>

#include "base/status.h"
#include "front/lane.h"

enum { N_WORKS = 8, MAX_RUNNING = 3 };

static struct {
  uv_loop_t loop;
  td_lane lane;
  uv_sem_t may_end; // posted once for each work in the lane
  uv_mutex_t lock;
  unsigned n_running, most_running; // guarded by lock
  unsigned n_done;
  unsigned order[N_WORKS];
  td_lane_work *works[N_WORKS];
} t;

static void wait_for_leave(uv_work_t *work) {
  (void)work;
  uv_mutex_lock(&t.lock);
  if (++t.n_running > t.most_running) t.most_running = t.n_running;
  uv_mutex_unlock(&t.lock);
  uv_sem_wait(&t.may_end);
  uv_mutex_lock(&t.lock);
  t.n_running--;
  uv_mutex_unlock(&t.lock);
}

static void note_done(uv_work_t *work, int status) {
  assert_int_equal(status, 0);
  unsigned which = (unsigned)(uintptr_t)work->data;
  t.order[t.n_done++] = which;
  free(t.works[which]);
}

static void nothing(uv_work_t *work) {
  (void)work;
}

// Gets its turn while the lane is full and nothing in it has ended.
static void let_all_end(uv_work_t *work, int status) {
  (void)work;
  assert_int_equal(status, 0);
  assert_int_equal(t.n_done, 0);
  for (unsigned i = 0; i < N_WORKS; i++)
    uv_sem_post(&t.may_end);
}

static void others_get_their_turn(void **state) {
  (void)state;
  assert_int_equal(uv_loop_init(&t.loop), 0);
  assert_int_equal(uv_sem_init(&t.may_end, 0), 0);
  assert_int_equal(uv_mutex_init(&t.lock), 0);
  t.lane = (td_lane){.loop = &t.loop, .max_running = MAX_RUNNING};
  for (uintptr_t i = 0; i < N_WORKS; i++) {
    t.works[i] = calloc(1, sizeof *t.works[i]);
    assert_non_null(t.works[i]);
    t.works[i]->work.data = (void *)i;
    td_lane_queue(&t.lane, t.works[i], wait_for_leave, note_done);
  }
  uv_work_t other;
  assert_int_equal(uv_queue_work(&t.loop, &other, nothing, let_all_end), 0);
  uv_run(&t.loop, UV_RUN_DEFAULT);
  assert_int_equal(t.n_done, N_WORKS);
  assert_true(t.most_running <= MAX_RUNNING);
  // Those that waited follow in their order; of those that run together, any may end first.
  for (unsigned i = 0; i < N_WORKS; i++)
    assert_true(t.order[i] < i + MAX_RUNNING);
  assert_null(t.lane.first);
  uv_mutex_destroy(&t.lock);
  uv_sem_destroy(&t.may_end);
  assert_int_equal(uv_loop_close(&t.loop), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(others_get_their_turn)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
