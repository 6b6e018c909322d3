// tests/unit/test_sched.c - the scheduler in thousands of simulated lives. After every event: pages
// and sequences are never over-committed, admission is in order of arrival, and at the end of each
// life every request was admitted or canceled.
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "sched/sched.h"

enum { MAX_IDS = 400 };

static uint64_t rng_state;

static uint32_t draw(uint32_t n) {
  rng_state ^= rng_state << 13;
  rng_state ^= rng_state >> 7;
  rng_state ^= rng_state << 17;
  return (uint32_t)((rng_state >> 11) % n);
}

typedef enum { NEW, WAITS, RUNS, GONE } life;

typedef struct {
  td_sched *sched;
  td_sched_opts opts;
  uint64_t now_ns;
  uint32_t n_ids;
  struct {
    life at;
    uint32_t n_pages;
    uint64_t submitted_ns;
  } r[MAX_IDS]; // by id, which is the order of arrival
} world;

static void check(const world *w) {
  uint32_t n_waiting = 0, n_running = 0, n_pages = 0;
  for (uint32_t i = 0; i < w->n_ids; i++) {
    n_waiting += w->r[i].at == WAITS;
    if (w->r[i].at != RUNS) continue;
    n_running++;
    n_pages += w->r[i].n_pages;
  }
  assert_int_equal(td_sched_n_waiting(w->sched), n_waiting);
  assert_int_equal(td_sched_n_running(w->sched), n_running);
  assert_true(n_running <= w->opts.max_seqs);
  assert_true(n_pages <= w->opts.n_pages);
  assert_int_equal(td_sched_n_free_pages(w->sched), w->opts.n_pages - n_pages);
}

static void submit(world *w) {
  if (w->n_ids == MAX_IDS) return;
  uint32_t n_tokens = 1 + draw(w->opts.n_pages * w->opts.page_tokens + 3);
  uint32_t n_pages = (n_tokens + w->opts.page_tokens - 1) / w->opts.page_tokens;
  bool is_full = td_sched_n_waiting(w->sched) >= w->opts.max_waiting;
  td_err err;
  td_status st = td_sched_submit(w->sched, w->n_ids, n_tokens, w->now_ns, &err);
  assert_int_equal(st, n_pages > w->opts.n_pages ? TD_ELIMIT : is_full ? TD_EAGAIN : TD_OK);
  if (st != TD_OK) return;
  w->r[w->n_ids].at = WAITS;
  w->r[w->n_ids].n_pages = n_pages;
  w->r[w->n_ids].submitted_ns = w->now_ns;
  w->n_ids++;
}

static uint32_t first_waiting(const world *w) {
  uint32_t i = 0;
  while (i < w->n_ids && w->r[i].at != WAITS)
    i++;
  return i;
}

static void admit(world *w) {
  uint32_t expected = first_waiting(w);
  bool fits = expected < w->n_ids && td_sched_n_running(w->sched) < w->opts.max_seqs &&
              w->r[expected].n_pages <= td_sched_n_free_pages(w->sched);
  td_admission got;
  assert_int_equal(td_sched_admit(w->sched, w->now_ns, &got), fits);
  if (!fits) return;
  assert_int_equal(got.id, expected);
  assert_int_equal(got.waited_ns, w->now_ns - w->r[expected].submitted_ns);
  w->r[expected].at = RUNS;
}

static void finish_or_cancel(world *w) {
  if (!w->n_ids) return;
  uint32_t i = draw(w->n_ids);
  static const td_sched_phase phase_of[] = {[NEW] = TD_SCHED_UNKNOWN,
                                            [WAITS] = TD_SCHED_WAITING,
                                            [RUNS] = TD_SCHED_RUNNING,
                                            [GONE] = TD_SCHED_UNKNOWN};
  assert_int_equal(td_sched_phase_of(w->sched, i), phase_of[w->r[i].at]);
  assert_int_equal(td_sched_remove(w->sched, i), phase_of[w->r[i].at]);
  w->r[i].at = GONE;
}

static void worker_dies(world *w) {
  for (uint32_t i = 0; i < w->n_ids; i++) {
    if (w->r[i].at != RUNS) continue;
    if (draw(2)) {
      td_sched_requeue(w->sched, i);
      w->r[i].at = WAITS;
    } else {
      td_sched_remove(w->sched, i);
      w->r[i].at = GONE;
    }
  }
}

// With requests ending one after another, everybody gets their turn.
static void drain(world *w) {
  for (uint32_t rounds = 0; first_waiting(w) < w->n_ids; rounds++) {
    assert_true(rounds <= 2 * MAX_IDS);
    admit(w);
    check(w);
    for (uint32_t i = 0; i < w->n_ids; i++) {
      if (w->r[i].at != RUNS) continue;
      td_sched_remove(w->sched, i);
      w->r[i].at = GONE;
      break;
    }
  }
}

static void test_simulated_lives(void **state) {
  (void)state;
  for (uint64_t seed = 1; seed <= 3000; seed++) {
    rng_state = seed * 0x9e3779b97f4a7c15u;
    world w = {.opts = {.max_seqs = 1 + draw(6),
                        .n_pages = 1 + draw(40),
                        .page_tokens = 1u << draw(6),
                        .max_waiting = 1 + draw(20)}};
    td_err err;
    assert_int_equal(td_sched_open(&w.sched, &w.opts, &err), TD_OK);
    for (int i = 0; i < 250; i++) {
      w.now_ns += draw(1000000);
      uint32_t what = draw(100);
      if (what < 40) {
        submit(&w);
      } else if (what < 70) {
        admit(&w);
      } else if (what < 98) {
        finish_or_cancel(&w);
      } else {
        worker_dies(&w);
      }
      check(&w);
    }
    drain(&w);
    td_sched_close(w.sched);
  }
}

static void test_head_is_not_overtaken(void **state) {
  (void)state;
  td_err err;
  td_sched *sched;
  td_sched_opts opts = {.max_seqs = 4, .n_pages = 4, .page_tokens = 16, .max_waiting = 8};
  td_admission got;
  assert_int_equal(td_sched_open(&sched, &opts, &err), TD_OK);
  assert_int_equal(td_sched_submit(sched, 1, 3 * 16, 0, &err), TD_OK);
  assert_int_equal(td_sched_submit(sched, 2, 2 * 16, 0, &err), TD_OK);
  assert_int_equal(td_sched_submit(sched, 3, 1, 0, &err), TD_OK);
  assert_true(td_sched_admit(sched, 5, &got));
  assert_int_equal(got.id, 1);
  assert_int_equal(got.waited_ns, 5);
  assert_false(td_sched_admit(sched, 6, &got)); // 3 would fit; 2 was first
  assert_int_equal(td_sched_remove(sched, 1), TD_SCHED_RUNNING);
  assert_true(td_sched_admit(sched, 7, &got));
  assert_int_equal(got.id, 2);
  assert_true(td_sched_admit(sched, 7, &got));
  assert_int_equal(got.id, 3);
  td_sched_close(sched);
}

static void test_bad_options(void **state) {
  (void)state;
  td_err err;
  td_sched *sched;
  static const td_sched_opts bad[] = {{0, 1, 1, 1}, {1, 0, 1, 1}, {1, 1, 0, 1}, {1, 1, 1, 0}};
  for (size_t i = 0; i < TD_COUNT(bad); i++)
    assert_int_equal(td_sched_open(&sched, &bad[i], &err), TD_EINVAL);
  td_sched_close(NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_simulated_lives),
      cmocka_unit_test(test_head_is_not_overtaken),
      cmocka_unit_test(test_bad_options),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
