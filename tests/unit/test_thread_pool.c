// tests/unit/test_thread_pool.c - the thread pool: every member runs once, one caller after the
// other.

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "base/thread.h"
#include "base/thread_pool.h"
#include "unit/testing.h"

static td_thread_pool *open_pool(unsigned n_threads) {
  td_thread_pool *pool;
  td_err err;
  assert_int_equal(td_thread_pool_open(&pool, &(td_thread_pool_opts){.n_threads = n_threads}, &err),
                   TD_OK);
  assert_int_equal(td_thread_pool_size(pool), n_threads);
  return pool;
}

enum { MAX_MEMBERS = 9 };
typedef struct {
  int calls[MAX_MEMBERS]; // plain: each member has its own, the runner reads after the run
  unsigned n_members;
} roll;

static void call_roll(void *ctx, unsigned member, unsigned n_members) {
  roll *r = ctx;
  r->calls[member]++;
  if (member == 0) r->n_members = n_members;
}

TEST(each_member_runs_once) {
  static const unsigned sizes[] = {1, 2, 3, MAX_MEMBERS};
  for (size_t i = 0; i < TD_COUNT(sizes); i++) {
    td_thread_pool *pool = open_pool(sizes[i]);
    roll r = {{0}, 0};
    enum { RUNS = 500 };
    for (int run = 0; run < RUNS; run++)
      td_thread_pool_run(pool, call_roll, &r);
    assert_int_equal(r.n_members, sizes[i]);
    for (unsigned m = 0; m < sizes[i]; m++)
      assert_int_equal(r.calls[m], RUNS);
    td_thread_pool_close(pool);
  }
}

// Fewer and more members from run to run, asleep or not in between; nobody runs twice, and who does
// not take part is not called.
TEST(members_come_and_go) {
  static const unsigned active[] = {4, 1, 3, 2, 4, 4, 1, 2, 9, 0, 3};
  td_thread_pool *pool = open_pool(4);
  _Atomic uint32_t n_active;
  td_thread_pool_set_limit(pool, &n_active);
  roll r = {{0}, 0};
  int expected[4] = {0};
  for (int run = 0; run < 3000; run++) {
    unsigned n = active[(unsigned)run % TD_COUNT(active)];
    n_active = n;
    td_thread_pool_run(pool, call_roll, &r);
    n = n < 1 || n > 4 ? 4 : n;
    assert_int_equal(r.n_members, n);
    for (unsigned m = 0; m < 4; m++)
      assert_int_equal(r.calls[m], expected[m] += m < n);
    if (run % 200 < 15) nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL); // all are asleep
  }
  n_active = 1;
  td_thread_pool_run(pool, call_roll, &r);
  td_thread_pool_close(pool); // with members parked
}

typedef struct {
  roll roll;
  _Atomic uint32_t *n_active;
  uint32_t next;
} lease;

// As another process might, while everybody is at work.
static void change_the_lease(void *ctx, unsigned member, unsigned n_members) {
  lease *l = ctx;
  if (member == n_members - 1) *l->n_active = l->next;
  call_roll(&l->roll, member, n_members);
}

// A step is many runs: a lease that changes in the middle of one holds from the next run on.
TEST(a_lease_changes_within_a_step) {
  td_thread_pool *pool = open_pool(4);
  _Atomic uint32_t n_active = 4;
  lease l = {.n_active = &n_active};
  td_thread_pool_set_limit(pool, &n_active);
  for (uint32_t run = 0, n = 4; run < 3000; run++, n = l.next) {
    l.next = 1 + run * 7 % 4;
    td_thread_pool_run(pool, change_the_lease, &l);
    assert_int_equal(l.roll.n_members, n);
  }
  td_thread_pool_set_limit(pool, NULL);
  td_thread_pool_run(pool, call_roll, &l.roll);
  assert_int_equal(l.roll.n_members, 4);
  td_thread_pool_close(pool);
}

TEST(runs_after_sleep) {
  td_thread_pool *pool = open_pool(4);
  roll r = {{0}, 0};
  for (int run = 0; run < 5; run++) {
    td_thread_pool_run(pool, call_roll, &r);
    nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL); // members are asleep by now
  }
  for (unsigned m = 0; m < 4; m++)
    assert_int_equal(r.calls[m], 5);
  td_thread_pool_close(pool);
}

static void slow_member(void *ctx, unsigned member, unsigned n_members) {
  (void)n_members;
  if (member == 1) nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
  ((roll *)ctx)->calls[member]++;
}

TEST(waits_for_the_slowest) {
  td_thread_pool *pool = open_pool(3);
  roll r = {{0}, 0};
  for (int run = 0; run < 3; run++) {
    td_thread_pool_run(pool, slow_member, &r);
    for (unsigned m = 0; m < 3; m++)
      assert_int_equal(r.calls[m], run + 1);
  }
  td_thread_pool_close(pool);
}

typedef struct {
  td_thread_pool *pool;
  _Atomic int *inside;
  _Atomic int *overlaps;
} caller;

static void alone(void *ctx, unsigned member, unsigned n_members) {
  (void)n_members;
  caller *c = ctx;
  if (member != 0) return;
  if (atomic_fetch_add(c->inside, 1) != 0) atomic_fetch_add(c->overlaps, 1);
  atomic_fetch_sub(c->inside, 1);
}

static void *call_often(void *arg) {
  caller *c = arg;
  for (int i = 0; i < 300; i++)
    td_thread_pool_run(c->pool, alone, c);
  return NULL;
}

TEST(callers_take_turns) {
  td_thread_pool *pool = open_pool(2);
  _Atomic int inside = 0, overlaps = 0;
  caller c = {.pool = pool, .inside = &inside, .overlaps = &overlaps};
  pthread_t threads[4];
  for (int i = 0; i < 4; i++)
    assert_int_equal(pthread_create(&threads[i], NULL, call_often, &c), 0);
  for (int i = 0; i < 4; i++)
    pthread_join(threads[i], NULL);
  assert_int_equal(overlaps, 0);
  td_thread_pool_close(pool);
}

static void note_stack(void *ctx, unsigned member, unsigned n_members) {
  (void)n_members;
  pthread_attr_t attr;
  assert_int_equal(pthread_getattr_np(pthread_self(), &attr), 0);
  assert_int_equal(pthread_attr_getstacksize(&attr, &((size_t *)ctx)[member]), 0);
  size_t n_guard_bytes;
  assert_int_equal(pthread_attr_getguardsize(&attr, &n_guard_bytes), 0);
  assert_true(member == 0 || n_guard_bytes >= TD_STACK_GUARD_BYTES);
  pthread_attr_destroy(&attr);
}

// Kernels need more than a process may give its threads by default.
TEST(stacks_hang_on_no_limit) {
  size_t n_bytes[3] = {0};
  pthread_attr_t before, small;
  pthread_getattr_default_np(&before);
  pthread_attr_init(&small);
  pthread_attr_setstacksize(&small, 128 << 10);
  assert_int_equal(pthread_setattr_default_np(&small), 0);
  td_thread_pool *pool;
  td_err err;
  assert_int_equal(td_thread_pool_open(&pool, &(td_thread_pool_opts){.n_threads = 3}, &err), TD_OK);
  td_thread_pool_run(pool, note_stack, n_bytes);
  td_thread_pool_close(pool);
  pthread_setattr_default_np(&before);
  pthread_attr_destroy(&before);
  pthread_attr_destroy(&small);
  assert_true(n_bytes[1] >= TD_STACK_BYTES && n_bytes[2] >= TD_STACK_BYTES);
}

TEST(defaults_and_pinning) {
  td_thread_pool *pool;
  td_err err;
  assert_true(td_cpu_count() >= 1);
  assert_int_equal(td_thread_pool_open(&pool, &(td_thread_pool_opts){.pin = true}, &err), TD_OK);
  assert_int_equal(td_thread_pool_size(pool), td_cpu_count());
  td_thread_pool_close(pool);
  td_thread_pool_close(NULL);
}
