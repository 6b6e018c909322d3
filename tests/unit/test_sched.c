// tests/unit/test_sched.c - the scheduler's rules, one by one; test_sched_lives.c has all of them
// at once. CTest: no-tsan
// CTest: no-tsan
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "sched/sched.h"
#include "unit/testing.h"

// The pages of generated tokens are found by later prompts, if that is wanted.
TEST(generated_tokens_are_found) {
  for (int shares = 0; shares < 2; shares++) {
    const td_sched_opts opts = {.max_seqs = 1,
                                .n_pages = 8,
                                .page_tokens = 4,
                                .max_waiting = 1,
                                .prefill_ahead = 64,
                                .shares_output = shares};
    int32_t tokens[20];
    td_sched *sched;
    td_admission admission;
    td_err err;
    for (int32_t i = 0; i < 20; i++)
      tokens[i] = i;
    assert_int_equal(td_sched_open(&sched, &opts, &err), TD_OK);
    const td_sched_job first = {.tokens = tokens, .n_prompt = 6, .max_tokens = 9};
    assert_int_equal(td_sched_submit(sched, 1, &first, 0, &err), TD_OK);
    assert_true(td_sched_admit(sched, 0, &admission));
    for (uint32_t n = 6; n <= 14; n++) {
      td_growth growth;
      td_sched_progress(sched, 1, n, 0);
      td_sched_grow(sched, &growth);
    }
    assert_int_equal(td_sched_remove(sched, 1), TD_SCHED_DECODE);
    const td_sched_job next = {.tokens = tokens, .n_prompt = 20, .max_tokens = 1};
    assert_int_equal(td_sched_submit(sched, 2, &next, 0, &err), TD_OK);
    assert_true(td_sched_admit(sched, 0, &admission));
    assert_int_equal(admission.n_cached, shares ? 12 : 4);
    td_sched_remove(sched, 2);
    assert_int_equal(td_sched_n_free_pages(sched), 8);
    td_sched_close(sched);
  }
}

static const int32_t counting[64] = {1, 2, 3, 4, 5, 6, 7, 8, 9};

static uint64_t clock_ns;

static td_status submit_job(td_sched *sched, uint64_t id, const int32_t *prompt, uint32_t n_prompt,
                            uint32_t max_tokens) {
  td_err err;
  const td_sched_job job = {.tokens = prompt, .n_prompt = n_prompt, .max_tokens = max_tokens};
  return td_sched_submit(sched, id, &job, clock_ns, &err);
}

static td_sched *open_sched(uint32_t n_pages, uint32_t prefill_ahead) {
  td_err err;
  td_sched *sched;
  const td_sched_opts opts = {.max_seqs = 4,
                              .n_pages = n_pages,
                              .page_tokens = 16,
                              .max_waiting = 8,
                              .prefill_ahead = prefill_ahead};
  assert_int_equal(td_sched_open(&sched, &opts, &err), TD_OK);
  return sched;
}

static td_admission admit_next(td_sched *sched, uint64_t id) {
  td_admission got;
  assert_true(td_sched_admit(sched, clock_ns, &got));
  assert_int_equal(got.id, id);
  return got;
}

static void submit_turn(td_sched *sched, uint64_t id, uint32_t n_prompt, uint32_t max_tokens) {
  td_err err;
  const td_sched_job job = {
      .tokens = counting, .n_prompt = n_prompt, .max_tokens = max_tokens, .n_keep = n_prompt};
  assert_int_equal(td_sched_submit(sched, id, &job, clock_ns, &err), TD_OK);
}

// A page that is being filled is found by later prompts as it was at the end of a turn.
TEST(the_end_of_a_turn_is_found) {
  for (int shares = 0; shares < 2; shares++) {
    td_err err;
    td_sched *sched;
    const td_sched_opts opts = {.max_seqs = 2,
                                .n_pages = 8,
                                .page_tokens = 16,
                                .max_waiting = 8,
                                .prefill_ahead = 99,
                                .shares_output = shares};
    assert_int_equal(td_sched_open(&sched, &opts, &err), TD_OK);
    submit_turn(sched, 1, 20, 9);
    const td_admission first = admit_next(sched, 1);
    assert_true(first.n_cached == 0 && first.source == -1);
    assert_true(first.n_keep == 20 && first.keep >= 0 && first.n_pages == 2);
    const int32_t own[2] = {first.pages[0], first.pages[1]};
    td_sched_progress(sched, 1, 20, 0);
    td_sched_progress(sched, 1, 23, 0); // it goes on in its own page

    submit_turn(sched, 2, 20, 9); // the last token is always computed
    assert_int_equal(admit_next(sched, 2).n_cached, 16);
    td_sched_remove(sched, 2);
    submit_turn(sched, 3, 21, 9);
    const td_admission next = admit_next(sched, 3);
    assert_true(next.n_cached == 20 && next.source == first.keep);
    assert_true(next.pages[0] == own[0] && next.pages[1] != next.source);
    td_sched_remove(sched, 3);

    td_sched_settle(sched, 1);
    td_sched_remove(sched, 1);
    submit_turn(sched, 4, 30, 9);
    const td_admission last = admit_next(sched, 4);
    assert_int_equal(last.n_cached, shares ? 23 : 20);
    assert_int_equal(last.source, shares ? own[1] : first.keep);
    td_sched_remove(sched, 4);
    assert_int_equal(td_sched_n_free_pages(sched), 8);
    td_sched_close(sched);
  }
}

// Where nothing is free beside the copy, it becomes the request's page; nothing is kept then.
TEST(a_pool_too_small_for_copies) {
  td_sched *sched = open_sched(2, 99);
  submit_turn(sched, 1, 10, 6);
  const int32_t keep = admit_next(sched, 1).keep;
  assert_true(keep >= 0);
  td_sched_progress(sched, 1, 10, 0);
  td_sched_remove(sched, 1);
  submit_turn(sched, 2, 20, 12);
  const td_admission got = admit_next(sched, 2);
  assert_true(got.n_cached == 10 && got.source == -1 && got.keep == -1 && got.pages[0] == keep);
  td_sched_remove(sched, 2);
  assert_int_equal(td_sched_n_free_pages(sched), 2);
  td_sched_close(sched);
}

// Pages that come from elsewhere may hold more than was to be kept: nobody has made a copy then.
TEST(a_copy_that_was_not_made) {
  td_sched *sched = open_sched(8, 99);
  td_err err;
  const td_sched_job job = {.tokens = counting, .n_prompt = 40, .max_tokens = 4, .n_keep = 20};
  assert_int_equal(td_sched_submit(sched, 1, &job, clock_ns, &err), TD_OK);
  assert_true(admit_next(sched, 1).keep >= 0);
  td_sched_progress(sched, 1, 35, 0);
  submit_turn(sched, 2, 37, 4);
  assert_int_equal(admit_next(sched, 2).n_cached, 32);
  td_sched_remove(sched, 1);
  td_sched_remove(sched, 2);
  assert_int_equal(td_sched_n_free_pages(sched), 8);
  td_sched_close(sched);
}

// A preempted request goes on from its last token if its worker has left it there.
TEST(a_settled_page_is_resumed) {
  for (int settles = 0; settles < 2; settles++) {
    for (uint32_t n_answer = 0; n_answer < 8; n_answer += 7) {
      td_sched *sched = open_sched(8, 99);
      submit_turn(sched, 1, 25, 30);
      const int32_t own = admit_next(sched, 1).pages[1];
      const uint32_t n_done = n_answer ? 31 : 19;
      td_sched_progress(sched, 1, 16, 0);
      td_sched_progress(sched, 1, n_answer ? 25 : 19, 0);
      td_sched_progress(sched, 1, n_done, 0);
      if (settles) td_sched_settle(sched, 1);
      td_sched_requeue(sched, 1, n_answer);
      const td_admission after = admit_next(sched, 1);
      if (settles) {
        assert_int_equal(after.n_cached, n_done);
        assert_int_equal(n_answer ? after.pages[1] : after.source, own);
      } else { // the copy at the end of the prompt is there
        assert_int_equal(after.n_cached, n_answer ? 25 : 16);
      }
      td_sched_remove(sched, 1);
      assert_int_equal(td_sched_n_free_pages(sched), 8);
      td_sched_close(sched);
    }
  }
}

// Until it is measured, a token takes 1 ms to read: a prompt's first token is due 4 ms later.
TEST(the_next_is_not_overtaken) {
  td_sched *sched = open_sched(6, 1000);
  td_admission got;
  clock_ns = 0;
  assert_int_equal(submit_job(sched, 1, counting, 3 * 16, 16), TD_OK);
  clock_ns = 80000000;
  assert_int_equal(submit_job(sched, 2, counting + 1, 2 * 16, 16), TD_OK);
  clock_ns = 205000000;
  assert_int_equal(submit_job(sched, 3, counting + 2, 1, 1), TD_OK);
  assert_true(td_sched_admit(sched, clock_ns + 5, &got));
  assert_int_equal(got.id, 1);
  assert_int_equal(got.n_pages, 4);
  assert_false(td_sched_admit(sched, clock_ns, &got)); // 3 would fit; 2 is due before
  assert_int_equal(td_sched_remove(sched, 1), TD_SCHED_PREFILL);
  assert_true(td_sched_admit(sched, clock_ns, &got));
  assert_int_equal(got.id, 2);
  assert_true(td_sched_admit(sched, clock_ns, &got));
  assert_int_equal(got.id, 3);
  assert_false(got.is_urgent);
  clock_ns = 0;
  td_sched_close(sched);
}

// Two outputs grow in a pool that does not hold both.
TEST(the_later_one_makes_room) {
  int32_t first[64] = {5}, second[64] = {6}, third[64] = {6};
  td_sched *sched = open_sched(6, 1000);
  td_admission got;
  td_growth growth;
  uint64_t id;
  assert_int_equal(submit_job(sched, 1, first, 16, 48), TD_OK);
  assert_int_equal(submit_job(sched, 2, second, 16, 48), TD_OK);
  assert_true(td_sched_admit(sched, 0, &got) && td_sched_admit(sched, 0, &got));
  assert_int_equal(got.n_pages, 2);
  assert_false(td_sched_grow(sched, &growth));
  td_sched_progress(sched, 1, 23, 0);
  assert_false(td_sched_grow(sched, &growth));
  td_sched_progress(sched, 1, 24, 0);
  assert_true(td_sched_grow(sched, &growth));
  assert_true(growth.id == 1 && growth.n_pages == 3);
  td_sched_progress(sched, 2, 32, 0);
  assert_true(td_sched_grow(sched, &growth));
  assert_int_equal(growth.id, 2);
  td_sched_progress(sched, 2, 40, 0);
  assert_false(td_sched_grow(sched, &growth));
  assert_false(td_sched_preempt(sched, 0, &id)); // it came last: it waits for a page
  td_sched_progress(sched, 1, 40, 0);
  assert_false(td_sched_grow(sched, &growth));
  assert_true(td_sched_preempt(sched, 0, &id));
  assert_int_equal(id, 2);
  assert_false(td_sched_preempt(sched, 0, &id)); // one at a time
  assert_int_equal(td_sched_n_preemptions(sched), 0);
  td_sched_requeue(sched, 2, 25);
  assert_int_equal(td_sched_n_preemptions(sched), 1);
  assert_true(td_sched_grow(sched, &growth));
  assert_true(growth.id == 1 && growth.n_pages == 4);
  assert_false(td_sched_admit(sched, 0, &got));
  // Its text is nobody else's cache but for the prompt.
  assert_int_equal(submit_job(sched, 3, third, 50, 1), TD_OK);
  td_sched_remove(sched, 1);
  assert_true(td_sched_admit(sched, 0, &got));
  assert_int_equal(got.id, 2);
  assert_int_equal(got.n_cached, 32);
  assert_int_equal(td_sched_phase_of(sched, 2), TD_SCHED_PREFILL);
  td_sched_progress(sched, 2, 39, 0);
  assert_int_equal(td_sched_phase_of(sched, 2), TD_SCHED_PREFILL);
  td_sched_progress(sched, 2, 40, 0);
  assert_int_equal(td_sched_phase_of(sched, 2), TD_SCHED_DECODE);
  td_sched_requeue(sched, 2, 25);
  td_sched_remove(sched, 2);
  assert_true(td_sched_admit(sched, 0, &got));
  assert_true(got.id == 3 && got.n_cached == 16);
  td_sched_close(sched);
}

// Of prompts that begin alike, the second waits for what the first leaves it.
TEST(a_prefix_is_read_once) {
  int32_t other[64];
  memcpy(other, counting, sizeof other);
  other[40] = 77; // alike in two pages
  td_sched *sched = open_sched(20, 1000);
  td_admission got;
  assert_int_equal(submit_job(sched, 1, counting, 64, 5), TD_OK);
  assert_int_equal(submit_job(sched, 2, other, 64, 5), TD_OK);
  assert_true(td_sched_admit(sched, 0, &got));
  assert_false(td_sched_admit(sched, 0, &got));
  td_sched_progress(sched, 1, 31, 0);
  assert_false(td_sched_admit(sched, 0, &got));
  td_sched_progress(sched, 1, 40, 0);
  assert_true(td_sched_admit(sched, 0, &got));
  assert_int_equal(got.n_cached, 32);
  td_sched_close(sched);
}

// A prompt is given out when those before it are nearly read.
TEST(prompts_are_read_one_after_another) {
  int32_t others[3][64] = {{11}, {12}, {13}};
  td_sched *sched = open_sched(40, 20);
  td_admission got;
  for (uint64_t id = 0; id < 3; id++)
    assert_int_equal(submit_job(sched, id, others[id], 64, 5), TD_OK);
  assert_true(td_sched_admit(sched, 0, &got));
  td_sched_progress(sched, 0, 43, 0);
  assert_false(td_sched_admit(sched, 0, &got));
  td_sched_progress(sched, 0, 44, 0);
  assert_true(td_sched_admit(sched, 0, &got));
  assert_false(td_sched_admit(sched, 0, &got));
  td_sched_remove(sched, 1);
  assert_true(td_sched_admit(sched, 0, &got));
  assert_int_equal(td_sched_phase_of(sched, 0), TD_SCHED_PREFILL);
  td_sched_progress(sched, 0, 64, 0);
  assert_int_equal(td_sched_phase_of(sched, 0), TD_SCHED_DECODE);
  td_sched_close(sched);
}

static void expect_lease(const td_sched *sched, uint32_t prefill, uint32_t decode) {
  td_thread_split lease = td_sched_lease(sched);
  assert_int_equal(lease.prefill, prefill);
  assert_int_equal(lease.decode, decode);
}

TEST(cores_are_leased) {
  static const uint32_t cases[][4] = {// threads, asked for prefill; prefill's, decode's
                                      {8, 3, 3, 5},
                                      {8, 0, 1, 7},
                                      {8, 20, 7, 1},
                                      {2, 1, 1, 1},
                                      {1, 0, 1, 1}};
  for (size_t i = 0; i < TD_COUNT(cases); i++) {
    const uint32_t *c = cases[i];
    td_err err;
    td_sched *sched;
    td_admission got;
    const td_sched_opts opts = {.max_seqs = 4,
                                .n_pages = 40,
                                .page_tokens = 16,
                                .max_waiting = 8,
                                .prefill_ahead = 1000,
                                .n_threads = c[0],
                                .prefill_threads = c[1]};
    assert_int_equal(td_sched_open(&sched, &opts, &err), TD_OK);
    expect_lease(sched, c[0], c[0]);
    for (uint64_t id = 1; id <= 3; id++)
      assert_int_equal(submit_job(sched, id, counting + id, 10, 5), TD_OK);
    assert_true(td_sched_admit(sched, 0, &got));
    expect_lease(sched, c[0], c[0]); // nothing is written yet
    td_sched_progress(sched, 1, 10, 0);
    expect_lease(sched, c[0], c[0]); // nothing is read any more
    assert_true(td_sched_admit(sched, 0, &got));
    assert_true(td_sched_admit(sched, 0, &got));
    expect_lease(sched, c[2], c[3]);
    td_sched_progress(sched, 2, 10, 0);
    expect_lease(sched, c[2], c[3]);
    td_sched_requeue(sched, 3, 0);
    expect_lease(sched, c[0], c[0]);
    assert_true(td_sched_admit(sched, 0, &got));
    expect_lease(sched, c[2], c[3]);
    td_sched_remove(sched, 1);
    td_sched_remove(sched, 2);
    expect_lease(sched, c[0], c[0]);
    td_sched_close(sched);
  }
}

TEST(bad_options) {
  td_err err;
  td_sched *sched;
  static const uint32_t bad[][4] = {
      {0, 1, 1, 1}, {1, 0, 1, 1}, {1, 1, 0, 1}, {1, 1, 3, 1}, {1, 1, 1, 0}};
  for (size_t i = 0; i < TD_COUNT(bad); i++) {
    const td_sched_opts opts = {.max_seqs = bad[i][0],
                                .n_pages = bad[i][1],
                                .page_tokens = bad[i][2],
                                .max_waiting = bad[i][3]};
    assert_int_equal(td_sched_open(&sched, &opts, &err), TD_EINVAL);
  }
  td_sched_close(NULL);
}
